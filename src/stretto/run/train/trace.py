"""What every rank really did in one step, beside what the planner predicts for it.

The parts of the step are those of the rank of the first pipeline that is predicted to be the busiest;
together they are the step, and the prediction beside them is the one that the run begins with, as is the
timeline that is drawn above the measured one. A replay at the measured mean times of each stage's actions
leaves only waiting to differ: the schedule, messages and the machine. The latency of a message is the
shortest time from the start of a send to the end of a wait which began before it.
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
from stretto.planner.estimate import Estimate, timeline_of
from stretto.program.action import Action, ActionKind
from stretto.program.messages import needed_by, send_of
from stretto.program.program import Program
from stretto.program.replay import Costs, Timeline, simulate
from stretto.program.text import parse_action
from stretto.view.measured import (
    StepPart,
    compare,
    measured_html,
    measured_text,
    parts_table,
    seconds,
)
from stretto.view.panel import aligned
from stretto.view.trace import COMMUNICATION, COMPUTE, Trace, TraceEvent, trace_of, write_trace

_WORK = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W, ActionKind.UPDATE, ActionKind.RECOMPUTE)
_WAIT = "wait "
_SENT = "the wait for "  # until a message has left
# calls of a step outside the pipeline's program
BATCH = "the batch"
AGREEMENT = "the agreement"
UPDATE = "the update"


@dataclass(frozen=True)
class TraceReport:
    """Where a traced step was written, and what it says: the parts of the step, the differences by kind of
    action, and a line on waiting.
    """

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
    """Return the texts of all ranks."""
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


def replay(program: Program, measured: Sequence[TraceEvent]) -> Timeline:
    """Return the replay of a lowered program at the measured mean times, in seconds.

    Args:
        measured: events of a step of the program.
    """
    times: dict[tuple[int, ActionKind], list[float]] = defaultdict(list)
    for event in measured:
        action = _action(event.action)
        if action is not None and action.kind in (*_WORK, ActionKind.REDUCE_GRAD):
            times[action.stage, action.kind].append(event.end - event.start)
    means = {key: sum(values) / len(values) for key, values in times.items()}

    def mean(stage: int, kind: ActionKind) -> float:
        return means.get((stage, kind), 0.0)

    per_stage: list[tuple[float, float, float]] = []
    for stage in range(program.stages):
        halves = (mean(stage, ActionKind.I), mean(stage, ActionKind.W))
        back = halves if sum(halves) else (mean(stage, ActionKind.B), 0.0)
        per_stage.append((mean(stage, ActionKind.F), *back))
    return simulate(
        program,
        Costs(
            per_stage=per_stage,
            hop=_latency(program, measured),
            recompute=[mean(stage, ActionKind.RECOMPUTE) for stage in range(program.stages)],
            update=[mean(stage, ActionKind.UPDATE) for stage in range(program.stages)]
            if program.versions
            else 0.0,
        ),
    )


def _latency(program: Program, measured: Iterable[TraceEvent]) -> float:
    """Return the shortest time of a message that an action waited for, seconds, or 0 if none did."""
    sent, waited = dict[Action, float](), list[tuple[Action, float, float]]()
    for event in measured:
        if (action := _action(event.action)) is not None and action.kind in (
            ActionKind.SEND_F,
            ActionKind.SEND_B,
        ):
            sent[action] = event.start
        elif event.action.startswith(_WAIT) and (user := _action(event.action.removeprefix(_WAIT))):
            receive = needed_by(program, user)
            if receive is not None:
                waited.append((send_of(receive), event.start, event.end))
    latencies = [end - sent[send] for send, start, end in waited if send in sent and start < sent[send] < end]
    return min(latencies, default=0.0)


def write(
    title: str,
    folder: Path,
    step: int,
    program: Program,
    pipelines: Sequence[Sequence[TraceEvent]],
    expected: Estimate | None = None,
) -> TraceReport:
    """Write the traces of a step under `folder/trace`, and the report as `folder/report.html`.

    The first pipeline is compared with its replay; each further one has a trace of its own beside it.

    Args:
        title: the run, its model, layout and machine, for the page.
        expected: the prediction; None: there is none, and the replay at the measured mean times stands in
            its place.

    Raises:
        OSError: the folder cannot be written to.
    """
    place = folder / "trace"
    place.mkdir(exist_ok=True)
    for at, events in enumerate(pipelines):
        path = place / (f"step-{step}.json" if at == 0 else f"step-{step}.pipeline-{at}.json")
        path.write_text(write_trace(Trace(tuple(events), program.name, "measured")), encoding="utf-8")
    measured = list(pipelines[0])
    replayed = replay(program, measured)
    shown, second = (replayed, 1.0) if expected is None else timeline_of(expected)
    predicted = trace_of(shown, second=second)
    predicted_path = place / f"step-{step}.predicted.json"
    predicted_path.write_text(write_trace(predicted), encoding="utf-8")
    rank, choice = busiest(measured), "the busiest"
    if expected is not None:  # whose parts are those of one rank
        rank, choice = max(range(program.ranks), key=lambda rank: shown.work[rank]), "predicted busiest"
    parts = step_parts([event for event in measured if event.rank == rank], expected)
    page = folder / "report.html"
    work = _work(predicted.events), _work(measured)
    page.write_text(measured_html(*work, f"{title}: {program.name}, step {step}", parts), encoding="utf-8")
    differences = compare(*work)
    text = [
        f"pipeline rank {rank}, {choice}:",
        aligned(parts_table(parts)),
        "",
        measured_text(differences),
        waiting_text(differences.measured_step, replayed.makespan),
    ]
    return TraceReport(place / f"step-{step}.json", predicted_path, page, "\n".join(text))


def busiest(events: Iterable[TraceEvent]) -> int:
    """Return the pipeline rank with the most seconds of computation."""
    work = dict[int, float]()
    for event in events:
        work[event.rank] = work.get(event.rank, 0.0) + (event.thread == COMPUTE) * (event.end - event.start)
    return max(work, key=lambda rank: work[rank])


def step_parts(events: Sequence[TraceEvent], expected: Estimate | None) -> list[StepPart]:
    """Return the parts of one rank's step, measured and predicted, which add up to the step.

    Collectives of layers and what is recomputed within a backward are not timed separately.

    Args:
        events: the rank's, from the start of the step on; those of the program do not overlap.
    """
    spent = defaultdict[str, float](float)
    for event in events:
        spent[_part(event.action)] += event.end - event.start
    spent["other"] = max(event.end for event in events) - sum(spent.values())
    again = spent.pop("recompute", 0.0)
    spent["backward"] += again
    predicted = dict[str, float]() if expected is None else dict(expected.parts)
    collectives = sum(predicted.pop(name, 0.0) for name in ("tensor", "context", "expert"))
    predicted |= {} if expected is None else {"forward": expected.forward, "backward": expected.backward}
    parts = [StepPart(name, predicted.get(name), spent.get(name, 0.0)) for name in ("forward", "backward")]
    if again or predicted.get("recompute"):
        parts.append(StepPart("of it recompute", predicted.get("recompute"), again or None, within=True))
    if collectives:
        parts.append(StepPart("of both collectives of layers", collectives, None, within=True))
    for name, text in _OUTSIDE.items():
        if spent.get(name) or predicted.get(name):
            parts.append(StepPart(text, predicted.get(name), spent.get(name, 0.0)))
    return parts


# parts of a step outside forwards and backwards, as they are named in the report
_OUTSIDE = {
    "bubble": "bubble",
    "messages": "messages (sending and posting)",
    "data": "data (reductions and gathers)",
    "optimiser": "optimiser",
    "offload": "offload",
    "batch": "reading the batch",
    "agreement": "agreeing on the loss",
    "other": "everything else",
}
_PART_OF_KIND = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "backward",
    ActionKind.W: "backward",
    ActionKind.RECOMPUTE: "recompute",
    ActionKind.UPDATE: "optimiser",
    ActionKind.OFFLOAD: "offload",
    ActionKind.RELOAD: "offload",
    ActionKind.SEND_F: "messages",
    ActionKind.SEND_B: "messages",
    ActionKind.RECV_F: "messages",
    ActionKind.RECV_B: "messages",
}
_PART_OF_CALL = {BATCH: "batch", AGREEMENT: "agreement", UPDATE: "optimiser"}


def _part(label: str) -> str:
    """Return the part of the step that a recorded call belongs to."""
    if label in _PART_OF_CALL:
        return _PART_OF_CALL[label]
    if label.startswith(_WAIT):
        return "bubble"
    if label.startswith(_SENT):
        return "messages"
    action = _action(label)
    # other calls open, reduce and gather gradients and weights of data-parallel ranks
    return "data" if action is None else _PART_OF_KIND.get(action.kind, "data")


def waiting_text(measured: float, replayed: float) -> str:
    """Return how much of a step the replay at measured mean times leaves unexplained: late ranks, messages,
    Python.

    The replay may also be the longer one: it puts the mean of a stage's actions on the critical path, where
    this step may have had quick ones.

    Args:
        measured: seconds of the step.
        replayed: seconds of the replay at the mean times of each stage's actions.
    """
    unexplained = (measured - replayed) / measured
    replay = f"replayed at the measured mean times of each stage: {seconds(replayed)}"
    if unexplained < 0:
        return f"{replay}, {-unexplained:.1%} longer than from the first to the last action"
    span = "the time from the first to the last action"
    return f"{replay}; {unexplained:.1%} of {span} is not in it (late messages)"


def _work(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Return the events without messages, which in a replay last from the send to the arrival."""
    return [event for event in events if event.thread == COMPUTE]
