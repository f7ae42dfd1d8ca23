"""`stretto diagnose`: which rank a hung job waits for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app, say_no
from stretto.cli.report import CommandReport
from stretto.errors import StrettoError, counted

if TYPE_CHECKING:
    from stretto.run.diagnose.dump import RecordedCall
    from stretto.run.diagnose.hang import Diagnosis, Mismatch

app = command_app()

_SHOWN = 12  # waits and chains that are printed


@app.command(
    epilog="Example: stretto diagnose /tmp/dumps, with nccl_trace_rank_0, nccl_trace_rank_1, ... in it "
    "(TORCH_FR_DUMP_TEMP_FILE=/tmp/dumps/nccl_trace_rank_ makes NCCL's watchdog write them there), "
    "or: stretto diagnose runs/mine/hang"
)
def diagnose(
    dumps: Annotated[Path, typer.Argument(help="A folder with one dump for each rank.")],
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the job; by default as many as the dumps name.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which rank a hung job waits for, from its ranks' flight-recorder dumps.

    Reads what torch's flight recorder writes (pickle or JSON; NCCL or gloo), and what a run of `stretto
    train` leaves in its folder when ranks wait in vain. A pickle is read as plain data: nothing in it is run.

    Names calls that differ between ranks, the ranks that are missing in a collective, who waits for whom,
    through sends and receives too, and ranks without a dump. The exit code is 1 where something is stuck, 0
    where nothing is.
    """
    from stretto.run.diagnose.dump import read_dumps
    from stretto.run.diagnose.hang import diagnose as compare_ranks
    from stretto.run.watch.hang import summary_lines

    read = read_dumps(dumps)
    if ranks is not None and read[-1].rank >= ranks:
        raise StrettoError(
            f"--ranks is {ranks}, and there is a dump of rank {read[-1].rank}",
            hint=f"nearest is --ranks {read[-1].rank + 1}",
        )
    diagnosis = compare_ranks(read, ranks)
    summary = summary_lines(dumps)
    report = CommandReport(lambda: {**_record(diagnosis), "watch": summary})
    report.lines(lines(diagnosis))
    if summary:
        report.lines(["", *summary])
    report.print(as_json)
    if diagnosis.verdict != "fine":
        raise say_no()


def _record(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "verdict": diagnosis.verdict,
        "ranks": diagnosis.world,
        "dumps": {dump.rank: str(dump.path) for dump in diagnosis.dumps},
        "absent": list(diagnosis.absent),
        "culprits": list(diagnosis.culprits),
        "circle": list(diagnosis.circle),
        "mismatches": [
            {
                "group": str(each.group),
                "number": each.number,
                "about": each.about,
                "odd": list(each.odd),
                "slip": each.slip,
                "calls": {rank: _call_record(call) for rank, call in each.calls.items()},
            }
            for each in diagnosis.mismatches
        ],
        "missing": [
            {
                "group": str(each.group),
                "number": each.number,
                "missing": list(each.missing),
                "members_known": each.members_known,
                "waiting": {rank: _call_record(call) for rank, call in each.waiting.items()},
            }
            for each in diagnosis.missing
        ],
        "stalled": [
            {
                "open_on": list(each.open_on),
                "queued": list(each.queued),
                "calls": [_call_record(call) for call in each.calls.values()],
            }
            for each in diagnosis.stalled
        ],
        "waits": [
            {"rank": wait.rank, "target": wait.target, "call": _call_record(wait.call)}
            for wait in diagnosis.waits
        ],
        "last": {rank: _call_record(call) for rank, call in diagnosis.last.items()},
    }


def _call_record(call: RecordedCall) -> dict[str, Any]:
    if call.completed:
        state = "completed"
    elif call.retired:
        state = "retired"
    else:
        state = "started" if call.started else "scheduled"
    return {
        "rank": call.rank,
        "operation": call.operation,
        "group": str(call.group),
        "number": call.number,
        "peer": call.peer,
        "input_sizes": [list(size) for size in call.input_sizes],
        "output_sizes": [list(size) for size in call.output_sizes],
        "dtypes": sorted({*call.input_dtypes, *call.output_dtypes}),
        "state": state,
        "created_ns": call.created_ns,
        "place": None if call.frame is None else str(call.frame),
    }


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """The diagnosis in words: the cause first, then who waits for whom."""
    count = len(diagnosis.dumps)
    versions = ", ".join(sorted({dump.version for dump in diagnosis.dumps}))
    yield f"{counted(diagnosis.world, 'rank')}, {counted(count, 'dump')} (flight recorder {versions})"
    if diagnosis.absent:
        yield f"no dump of {_ranks(diagnosis.absent)}: killed, hung without one, or never started"
    yield ""
    yield from _cause(diagnosis)
    if diagnosis.waits:
        yield ""
        yield "who waits for whom"
        for wait in diagnosis.waits[:_SHOWN]:
            call = wait.call
            yield f"  rank {wait.rank} -> rank {wait.target}: {call}{call.sizes}{call.location}"
        if len(diagnosis.waits) > _SHOWN:
            yield f"  and {len(diagnosis.waits) - _SHOWN} more: --json has all"
    chains = [
        chain for rank in sorted({w.rank for w in diagnosis.waits}) if len(chain := diagnosis.chain(rank)) > 1
    ]
    if chains:
        yield ""
        yield "through others"
        for chain in chains[:_SHOWN]:
            steps = [f"rank {wait.target} ({wait.call.operation} of {wait.call.group})" for wait in chain]
            yield f"  rank {chain[0].rank} waits for {', which waits for '.join(steps)}"


def _cause(diagnosis: Diagnosis) -> Iterator[str]:
    for mismatch in diagnosis.mismatches:
        yield from _mismatch(mismatch)
    for each in diagnosis.missing:
        if set(each.missing) & set(diagnosis.culprits) or diagnosis.circle:
            first = next(iter(each.waiting.values()))
            yield (
                f"{_ranks(each.missing, 'is', 'are')} missing in {first}: "
                f"{_ranks(each.waiting, 'waits', 'wait')} in it{first.location}"
            )
            if not each.members_known:
                yield f"  (no dump says who belongs to {each.group}: these are the ranks that used it)"
    for stalled in diagnosis.stalled:
        if stalled.queued:
            call = next(iter(stalled.calls.values()))
            yield (
                f"{_ranks(stalled.open_on, 'waits', 'wait')} in {call}{call.location}: "
                f"{_ranks(stalled.queued, 'has', 'have')} asked for it too, and the device has not "
                "begun with it, as it is busy or stuck before it"
            )
    for rank in diagnosis.culprits:
        if rank not in diagnosis.last:
            yield f"  rank {rank} is not seen waiting for another: it has no dump, or none with calls"
            continue
        call = diagnosis.last[rank]
        newest = max(other.created_ns for other in diagnosis.last.values())
        seconds = (newest - call.created_ns) / 1e9
        since = f", {seconds:.1f} s before the newest call of any rank" if seconds >= 0.1 else ""
        yield f"  rank {rank} waits for no other rank; its last call was {call}{call.location}{since}"
    if diagnosis.circle:
        yield (
            f"ranks {' -> '.join(map(str, diagnosis.circle))} wait for each other in a circle: each asks for "
            "a call that the next has not come to"
        )
        oldest = min(
            (diagnosis.last[r] for r in diagnosis.circle if r in diagnosis.last), key=lambda c: c.created_ns
        )
        yield (
            "  either their calls are in different orders, or one computes or hangs outside of them: rank "
            f"{oldest.rank} has asked for nothing for longest, its last call is {oldest}{oldest.location}"
        )
    if not diagnosis.waits and not diagnosis.mismatches:
        for stalled in diagnosis.stalled:
            call = next(iter(stalled.calls.values()))
            yield (
                f"all its ranks have come to {call}, with the same arguments, and it has not ended on "
                f"{_ranks(stalled.open_on)}: the network or a device is slow or stuck"
            )
    if diagnosis.verdict == "fine":
        yield "nothing is stuck: every call that one rank waits in has ended or has all of its ranks"


def _mismatch(mismatch: Mismatch) -> Iterator[str]:
    sample = next(iter(mismatch.calls.values()))
    call_name = f"message {mismatch.number}" if sample.peer is not None else f"call #{mismatch.number}"
    yield (
        f"ranks differ in the {mismatch.about} of {call_name} of {mismatch.group}; {_ranks(mismatch.odd)} "
        + ("against each other:" if len(mismatch.odd) == len(mismatch.calls) else "against the others:")
    )
    for rank, call in mismatch.calls.items():
        mark = " <-" if rank in mismatch.odd and len(mismatch.odd) < len(mismatch.calls) else ""
        yield f"  rank {rank}: {call.details}{mark}"
    if mismatch.slip:
        odd = mismatch.odd[0]
        did = "left out one call" if mismatch.slip > 0 else "made one call more"
        yield f"  as if rank {odd} had {did}"


def _ranks(ranks: Collection[int], singular: str = "", plural: str = "") -> str:
    """Ranks in words, runs of neighbours as `3-6`, followed by a verb in the singular or the plural."""
    runs = list[list[int]]()
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    verb = plural if len(ranks) > 1 else singular
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)} {verb}".rstrip()
