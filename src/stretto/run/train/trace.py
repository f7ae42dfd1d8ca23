"""What every rank really did in one step, beside what the replay of its program says.

The prediction takes the stages' costs from the cost model, in the unit in which their sum is the measured
work of all ranks: the table then shows which kinds of action the model takes for cheaper or dearer than they
are. A second replay, at the measured mean times of each stage's own actions, leaves only waiting to differ:
the schedule, messages and the machine. The latency of a message is the least that was seen from the start of
a send to the end of a wait which began before it.
"""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stretto.engine.parallel.mesh import Mesh
from stretto.engine.pipeline import Recorder
from stretto.errors import StrettoError
from stretto.program.action import Action, Kind
from stretto.program.messages import needed_by, send_of
from stretto.program.program import Program
from stretto.program.replay import Costs, Timeline, simulate
from stretto.program.text import parse_action
from stretto.view.measured import compare, measured_html, measured_text, seconds
from stretto.view.trace import COMMUNICATION, COMPUTE, Trace, TraceEvent, trace_of, write_trace

_WORK = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.UPDATE, Kind.RECOMPUTE)
_WAIT = "wait "


@dataclass(frozen=True)
class Report:
    """Where a traced step was written, and what it says: the table of differences, and a line on waiting."""

    trace: Path
    predicted: Path
    page: Path
    text: str


def start(mesh: Mesh) -> Recorder:
    """A recorder that starts together with those of all other ranks."""
    if mesh.layout.world > 1:
        dist.barrier()
    return Recorder(mesh.device)


def gather(recorder: Recorder, mesh: Mesh) -> list[list[TraceEvent]] | None:
    """The events of every pipeline of the job, the ranks numbered within it; on rank 0, None elsewhere.
    Collective.
    """
    spans = [(s.label, s.start, s.end) for s in recorder.spans]
    recorded = {"host": socket.gethostname(), "started": recorder.started, "spans": spans}
    texts = _exchange(json.dumps(recorded).encode(), mesh)
    if mesh.rank != 0:
        return None
    ranks: list[dict[str, Any]] = [json.loads(text) for text in texts]
    # one machine has one clock; those of several are further apart than the barrier lets their ranks be
    together = len({rank["host"] for rank in ranks}) == 1
    first = min(rank["started"] for rank in ranks)
    pipelines: list[list[TraceEvent]] = []
    for members in mesh.layout.groups("pp"):
        events: list[TraceEvent] = []
        for place, member in enumerate(members):
            late = ranks[member]["started"] - first if together else 0.0
            for label, begin, end in ranks[member]["spans"]:
                events.append(TraceEvent(place, label, begin + late, end + late, _thread(label)))
        pipelines.append(events)
    return pipelines


def _exchange(text: bytes, mesh: Mesh) -> list[bytes]:
    """The texts of all ranks."""
    world = mesh.layout.world
    if world == 1:
        return [text]
    length = torch.zeros(world, dtype=torch.int64, device=mesh.device)
    length[mesh.rank] = len(text)
    dist.all_reduce(length)
    sizes = [int(n) for n in length.tolist()]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    padded = padded.to(mesh.device)
    rows = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(rows, padded)
    return [bytes(row[:size].cpu().numpy()) for row, size in zip(rows, sizes, strict=True)]


def _thread(label: str) -> str:
    action = _action(label)
    return COMPUTE if action is not None and action.kind in _WORK else COMMUNICATION


def _action(label: str) -> Action | None:
    try:
        return parse_action(label)
    except StrettoError:
        return None


def predict(
    program: Program,
    measured: Sequence[TraceEvent],
    shares: Sequence[tuple[float, float, float]] | None = None,
) -> Timeline:
    """The replay of a lowered program in seconds.

    Args:
        measured: a step of it.
        shares: (F, I, W) of each stage of the model in any unit, from a cost model; None: the mean times that
            were measured.
    """
    times: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for event in measured:
        action = _action(event.action)
        if action is not None and action.kind in (*_WORK, Kind.REDUCE_GRAD):
            times[action.stage, action.kind].append(event.end - event.start)
    means = {key: sum(values) / len(values) for key, values in times.items()}

    def mean(stage: int, kind: Kind) -> float:
        return means.get((stage, kind), 0.0)

    per_stage: list[tuple[float, float, float]] = []
    for stage in range(program.stages):
        halves, whole = (mean(stage, Kind.I), mean(stage, Kind.W)), mean(stage, Kind.B)
        back = halves if sum(halves) else (whole, 0.0)
        per_stage.append((mean(stage, Kind.F), *back))
    if shares is not None:
        known = [shares[stage % program.depth] for stage in range(program.stages)]
        done = [program.copy_of.count(stage // program.depth) for stage in range(program.stages)]
        work = sum(n * sum(times) for n, times in zip(done, per_stage, strict=True))
        unit = work / (sum(n * sum(times) for n, times in zip(done, known, strict=True)) or 1.0)
        per_stage = [(f * unit, i * unit, w * unit) for f, i, w in known]
    return simulate(
        program,
        Costs(
            per_stage=per_stage,
            hop=_latency(program, measured),
            recompute=[mean(stage, Kind.RECOMPUTE) for stage in range(program.stages)],
            update=[mean(stage, Kind.UPDATE) for stage in range(program.stages)] if program.versions else 0.0,
        ),
    )


def _latency(program: Program, measured: Iterable[TraceEvent]) -> float:
    """Shortest time of a message that an action waited for, seconds; 0 where none did."""
    sent, waited = dict[Action, float](), list[tuple[Action, float, float]]()
    for event in measured:
        if (action := _action(event.action)) is not None and action.kind in (Kind.SEND_F, Kind.SEND_B):
            sent[action] = event.start
        elif event.action.startswith(_WAIT) and (user := _action(event.action.removeprefix(_WAIT))):
            receive = needed_by(program, user)
            if receive is not None:
                waited.append((send_of(receive), event.start, event.end))
    seen = [end - sent[send] for send, start, end in waited if send in sent and start < sent[send] < end]
    return min(seen, default=0.0)


def write(
    folder: Path,
    step: int,
    program: Program,
    pipelines: Sequence[Sequence[TraceEvent]],
    shares: Sequence[tuple[float, float, float]] | None = None,
) -> Report:
    """Write the traces of a step under `folder/trace`, and the report as `folder/report.html`.

    The first pipeline is compared with its replay; each further one has a trace of its own beside it.

    Raises:
        OSError: the folder cannot be written to.
    """
    place = folder / "trace"
    place.mkdir(parents=True, exist_ok=True)
    for at, events in enumerate(pipelines):
        path = place / (f"step-{step}.json" if at == 0 else f"step-{step}.pipeline-{at}.json")
        path.write_text(write_trace(Trace(tuple(events), program.name, "measured")), encoding="utf-8")
    measured = list(pipelines[0])
    predicted = trace_of(predict(program, measured, shares), second=1.0)
    beside = place / f"step-{step}.predicted.json"
    beside.write_text(write_trace(predicted), encoding="utf-8")
    page = folder / "report.html"
    work = _work(predicted.events), _work(measured)
    page.write_text(measured_html(*work, f"{program.name}, step {step}"), encoding="utf-8")
    differences, replayed = compare(*work), predict(program, measured).makespan
    waiting = waiting_text(differences.measured_step, replayed)
    return Report(place / f"step-{step}.json", beside, page, f"{measured_text(differences)}\n{waiting}")


def waiting_text(measured: float, replayed: float) -> str:
    """How much of a step the replay at measured mean times leaves unexplained: late ranks, messages, Python.

    The replay may also be the longer one: it puts the mean of a stage's actions on the critical path, where
    this step may have had quick ones.

    Args:
        measured: seconds of the step.
        replayed: seconds of the replay at the mean times of each stage's actions.
    """
    rest = (measured - replayed) / measured
    replay = f"replayed at the measured mean times of each stage: {seconds(replayed)}"
    if rest < 0:
        return f"{replay}, {-rest:.1%} of the step longer than measured"
    return f"{replay}; {rest:.1%} of the step is not in the replay (waiting, messages)"


def _work(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Without messages, whose events mean another thing in a replay: from the send to the arrival."""
    return [event for event in events if event.thread == COMPUTE]
