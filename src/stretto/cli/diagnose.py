"""`stretto diagnose`: which rank a hung job waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app, report, say_no

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.run.diagnose.dump import Call
    from stretto.run.diagnose.hang import Diagnosis, Mismatch, Wait

app = command_app()

_MOST = 12  # waits and chains that are printed
_SECOND = 1_000_000_000


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

    read = read_dumps(dumps)
    if ranks is not None and read[-1].rank >= ranks:
        from stretto.errors import StrettoError

        raise StrettoError(
            f"--ranks is {ranks}, and there is a dump of rank {read[-1].rank}",
            hint=f"nearest is --ranks {read[-1].rank + 1}",
        )
    diagnosis = compare_ranks(read, ranks)
    from stretto.run.watch.hang import summary_lines

    last = summary_lines(dumps)
    report(
        {**facts(diagnosis), "watch": last} if as_json else {},
        as_json,
        lambda to: _print(to, diagnosis, last),
    )
    if diagnosis.verdict != "fine":
        raise say_no()


def facts(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as the command's JSON."""
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
                "calls": {rank: _call(call) for rank, call in each.calls.items()},
            }
            for each in diagnosis.mismatches
        ],
        "missing": [
            {
                "group": str(each.group),
                "number": each.number,
                "missing": list(each.missing),
                "members_known": each.members_known,
                "waiting": {rank: _call(call) for rank, call in each.waiting.items()},
            }
            for each in diagnosis.missing
        ],
        "stalled": [
            {"open_on": list(each.open_on), "queued": list(each.queued), "calls": _calls(each.calls.values())}
            for each in diagnosis.stalled
        ],
        "waits": [
            {"rank": wait.rank, "target": wait.target, "call": _call(wait.call)} for wait in diagnosis.waits
        ],
        "last": {rank: _call(call) for rank, call in diagnosis.last.items()},
    }


def _calls(calls: Any) -> list[dict[str, Any]]:
    return [_call(call) for call in calls]


def _call(call: Call) -> dict[str, Any]:
    return {
        "rank": call.rank,
        "operation": call.operation,
        "group": str(call.group),
        "number": call.number,
        "peer": call.peer,
        "input_sizes": [list(size) for size in call.input_sizes],
        "output_sizes": [list(size) for size in call.output_sizes],
        "dtypes": sorted({*call.input_dtypes, *call.output_dtypes}),
        "state": "completed" if call.completed else "retired" if call.retired else _begun(call),
        "created_ns": call.created_ns,
        "place": None if call.place is None else str(call.place),
    }


def _begun(call: Call) -> str:
    return "started" if call.started else "scheduled"


def _print(to: Console, diagnosis: Diagnosis, last: Sequence[str]) -> None:
    for line in [*lines(diagnosis), *([""] if last else []), *last]:
        to.print(line, soft_wrap=True, markup=False, highlight=False)


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """The diagnosis in words: the cause first, then who waits for whom."""
    count = len(diagnosis.dumps)
    versions = ", ".join(sorted({dump.version for dump in diagnosis.dumps}))
    yield f"{diagnosis.world} ranks, {count} dump{'s' * (count != 1)} (flight recorder {versions})"
    if diagnosis.absent:
        yield f"no dump of {_ranks(diagnosis.absent)}: killed, hung without one, or never started"
    yield ""
    yield from _cause(diagnosis)
    if diagnosis.waits:
        yield ""
        yield "who waits for whom"
        for wait in diagnosis.waits[:_MOST]:
            yield f"  rank {wait.rank} -> rank {wait.target}: {wait.call}{wait.call.sizes}{wait.call.at}"
        if len(diagnosis.waits) > _MOST:
            yield f"  and {len(diagnosis.waits) - _MOST} more: --json has all"
    far = [
        chain for rank in sorted({w.rank for w in diagnosis.waits}) if len(chain := diagnosis.chain(rank)) > 1
    ]
    if far:
        yield ""
        yield "through others"
        for chain in far[:_MOST]:
            yield "  " + _chain(chain)


def _cause(diagnosis: Diagnosis) -> Iterator[str]:
    for mismatch in diagnosis.mismatches:
        yield from _mismatch(mismatch)
    for each in diagnosis.missing:
        if set(each.missing) & set(diagnosis.culprits) or diagnosis.circle:
            first = next(iter(each.waiting.values()))
            yield (
                f"{_ranks(each.missing)} {_is(each.missing)} missing in {first}: {_ranks(each.waiting)} "
                f"{_verb(each.waiting, 'waits')} in it{first.at}"
            )
            if not each.members_known:
                yield f"  (no dump says who belongs to {each.group}: these are the ranks that used it)"
    for stalled in diagnosis.stalled:
        if stalled.queued:
            call = next(iter(stalled.calls.values()))
            yield (
                f"{_ranks(stalled.open_on)} {_verb(stalled.open_on, 'waits')} in {call}{call.at}: "
                f"{_ranks(stalled.queued)} {_has(stalled.queued)} asked for it too, and the device has not "
                "begun with it, as it is busy or stuck before it"
            )
    for rank in diagnosis.culprits:
        yield _last(diagnosis, rank)
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
            f"{oldest.rank} has asked for nothing for longest, its last call is {oldest}{oldest.at}"
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
    what = f"message {mismatch.number}" if sample.peer is not None else f"call #{mismatch.number}"
    yield f"ranks differ in the {mismatch.about} of {what} of {mismatch.group}; {_ranks(mismatch.odd)} " + (
        "against each other:" if len(mismatch.odd) == len(mismatch.calls) else "against the others:"
    )
    for rank, call in mismatch.calls.items():
        mark = " <-" if rank in mismatch.odd and len(mismatch.odd) < len(mismatch.calls) else ""
        yield f"  rank {rank}: {call.details}{mark}"
    if mismatch.slip:
        odd = mismatch.odd[0]
        did = "left out one call" if mismatch.slip > 0 else "made one call more"
        yield f"  as if rank {odd} had {did}"


def _last(diagnosis: Diagnosis, rank: int) -> str:
    if rank not in diagnosis.last:
        return f"  rank {rank} is not seen waiting for another: it has no dump, or none with calls"
    call = diagnosis.last[rank]
    newest = max(other.created_ns for other in diagnosis.last.values())
    ago = (newest - call.created_ns) / _SECOND
    since = f", {ago:.1f} s before the newest call of any rank" if ago >= 0.1 else ""
    return f"  rank {rank} waits for no other rank; its last call was {call}{call.at}{since}"


def _chain(chain: Sequence[Wait]) -> str:
    steps = [f"rank {chain[0].rank}"]
    steps += [f"rank {wait.target} ({wait.call.operation} of {wait.call.group})" for wait in chain]
    return " waits for ".join(steps[:2]) + "".join(f", which waits for {step}" for step in steps[2:])


def _ranks(ranks: Any) -> str:
    """Ranks in words: runs of neighbours as `3-6`."""
    numbers = sorted(ranks)
    runs = list[list[int]]()
    for rank in numbers:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(parts)}"


def _is(ranks: Any) -> str:
    return "are" if len(ranks) > 1 else "is"


def _has(ranks: Any) -> str:
    return "have" if len(ranks) > 1 else "has"


def _verb(ranks: Any, verb: str) -> str:
    return verb.removesuffix("s") if len(ranks) > 1 else verb
