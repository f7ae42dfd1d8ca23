"""Find the rank that hangs, by what its launcher observes of all ranks and by their flight records."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stretto.engine.progress import RankMarks
from stretto.errors import StrettoError
from stretto.run.diagnose.dump import read_dumps
from stretto.run.diagnose.hang import Diagnosis, diagnose
from stretto.run.launch.failure import Failure

HANG = "hang"  # the folder inside that of the run
RECORD, STACK = "rank_{rank}.json", "rank_{rank}.stack"
SUMMARY = "hang.json"
_AHEAD_S, _AHEAD = 2.0, 0.25  # records are gathered this long before the limit, or this part of it
_SILENT = 0.5  # a rank without a sign of life for this part of its time without progress is silent
_SHOWN = 8  # ranks in a message
_STOPPED = "T"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_WATCH = "/run/watch/rank.py"


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What can be observed of a rank from outside.

    Attributes:
        seconds: time without progress, seconds.
        silent_s: time without a sign of life from any of its threads, seconds.
        state: state of its process as Linux reports it (R, S, D, T, ...); "" if unknown.
    """

    rank: int
    row: RankMarks
    seconds: float
    silent_s: float
    state: str = ""

    @property
    def late(self) -> bool:
        """True if it has made no progress for longer than its limit."""
        return self.row.marks > 0 and self.seconds > self.row.limit

    @property
    def nearly_late(self) -> bool:
        """True if it will soon be late, unless it makes progress."""
        ahead = min(_AHEAD_S, _AHEAD * self.row.limit)
        return self.row.marks > 0 and self.seconds > self.row.limit - ahead

    @property
    def answers(self) -> bool:
        """True if any of its Python threads runs."""
        return self.state != _STOPPED and self.silent_s <= _SILENT * self.seconds


@dataclass(frozen=True, kw_only=True)
class HangVerdict:
    """The ranks that hang, and the reason for blaming them."""

    culprits: tuple[int, ...]
    reason: str
    diagnosis: Diagnosis | None = None


def judge(statuses: Mapping[int, RankStatus], diagnosis: Diagnosis | None) -> HangVerdict:
    """Return the ranks that the others wait for.

    Ranks that cannot answer are blamed first, then those that the comparison of all ranks' calls points to,
    then a rank that waits for no other.
    """
    if stopped := tuple(status.rank for status in statuses.values() if status.state == _STOPPED):
        return HangVerdict(
            culprits=stopped, reason="stopped by a signal (SIGSTOP or SIGTSTP)", diagnosis=diagnosis
        )
    late = [status for status in statuses.values() if status.late]
    if silent := tuple(status.rank for status in late if not status.answers):
        reason = "no thread of its Python runs: a call into C holds the interpreter's lock (GIL)"
        if not all(statuses[rank].state for rank in silent):
            reason = "no sign of life: its host is cut off or gone, or it is stopped or holds Python's lock"
        return HangVerdict(culprits=silent, reason=reason, diagnosis=diagnosis)
    if (differing := odd_call(diagnosis)) is not None:
        return differing
    waiting = {status.rank for status in statuses.values() if status.row.waits}
    if (opposed := opposed_calls(diagnosis)) is not None and waiting.issuperset(opposed.culprits):
        return opposed
    if diagnosis is not None:
        named = tuple(rank for rank in diagnosis.culprits if rank in statuses)
        if alone := tuple(rank for rank in named if rank not in waiting):
            return HangVerdict(culprits=alone, reason="the others wait for it", diagnosis=diagnosis)
        if named:
            return HangVerdict(culprits=named, reason="the others wait for it", diagnosis=diagnosis)
        waiters = Counter(target for _, target in {(wait.rank, wait.target) for wait in diagnosis.waits})
        awaited = [rank for rank in waiters if rank in statuses and waiters[rank] == max(waiters.values())]
        if len(awaited) == 1 and max(waiters.values()) > 1:
            reason = (
                "most ranks wait for it, and it for one of them: as if it had left out a call or made another"
            )
            return HangVerdict(culprits=(awaited[0],), reason=reason, diagnosis=diagnosis)
    if alone := tuple(status.rank for status in late if status.rank not in waiting):
        return HangVerdict(culprits=alone, reason="it waits for no other rank", diagnosis=diagnosis)
    if diagnosis is not None and diagnosis.circle and waiting.issuperset(diagnosis.circle):
        reason = "they wait for each other, as if one of them had left out a call or made another"
        return HangVerdict(culprits=diagnosis.circle[:-1], reason=reason, diagnosis=diagnosis)
    worst = max(late, key=lambda status: status.seconds)
    reason = "it has made no progress for the longest time, and every rank waits for another"
    return HangVerdict(culprits=(worst.rank,), reason=reason, diagnosis=diagnosis)


def odd_call(diagnosis: Diagnosis | None) -> HangVerdict | None:
    """Return the ranks whose call differs from the majority's, or None if the calls agree or there is a
    tie.
    """
    if diagnosis is None or not diagnosis.mismatches:
        return None
    first = diagnosis.mismatches[0]
    if len(first.odd) == len(first.calls):
        return None
    calls = ", ".join(f"rank {rank} {call.operation}" for rank, call in first.calls.items())
    slips = {1: "; as if it had left out a call", -1: "; as if it had made a call more"}
    reason = f"its call #{first.number} of {first.group} differs in {first.about} ({calls})"
    return HangVerdict(culprits=first.odd, reason=reason + slips.get(first.slip, ""), diagnosis=diagnosis)


def opposed_calls(diagnosis: Diagnosis | None) -> HangVerdict | None:
    """Return both sides of calls that differ with no majority for either, or None if there are none."""
    if diagnosis is None or not diagnosis.mismatches or odd_call(diagnosis) is not None:
        return None
    first = diagnosis.mismatches[0]
    calls = "; ".join(f"rank {rank} {call.details}" for rank, call in list(first.calls.items())[:_SHOWN])
    reason = (
        f"their calls #{first.number} of {first.group} differ in {first.about}, and neither is the odd one"
    )
    return HangVerdict(culprits=first.odd, reason=f"{reason}: {calls}", diagnosis=diagnosis)


def aborted(
    dead: Failure, statuses: Mapping[int, RankStatus], diagnosis: Diagnosis | None, folder: Path
) -> Failure:
    """Return the failure of a rank that gloo has aborted, with what every rank was doing: the last call if it
    has written its record, otherwise its stack. Of the dead rank only the stack is left.
    """
    text = list[str]()
    for status in sorted(statuses.values(), key=lambda status: (status.rank != dead.rank, status.rank))[
        :_SHOWN
    ]:
        line = f"  rank {status.rank} on {status.row.host}: {_doing(status)}"
        call = None if diagnosis is None else diagnosis.last.get(status.rank)
        if status.rank != dead.rank and call is not None:
            line += f"; its last call: #{call.number} of {call.group}, {call.details}"
        else:
            stack = main_stack(_text_of(folder / STACK.format(rank=status.rank)))
            stack = dead.traceback if status.rank == dead.rank else stack
            line += f", at {places}" if (places := innermost(stack)) else ""
        text.append(line)
    reason = "gloo ends a process that is sent more than its call expects: ranks have called different things"
    return replace(dead, message="\n".join([f"{dead.message}; {reason}", *text]))


def read_records(folder: Path, world: int) -> Diagnosis | None:
    """Return what the ranks' records say, or None if none can be read."""
    with contextlib.suppress(StrettoError, OSError):
        return diagnose(read_dumps(folder), world)
    return None


def remove_records(folder: Path) -> None:
    """Remove the records of an earlier hang."""
    for pattern in (RECORD, STACK):
        for old in folder.glob(pattern.format(rank="*")):
            old.unlink(missing_ok=True)
    (folder / SUMMARY).unlink(missing_ok=True)


def failure(statuses: Mapping[int, RankStatus], verdict: HangVerdict, folder: Path) -> Failure:
    """Return the failure of the rank that hangs, which says what every rank did; also write this to
    `hang.json` in `folder`.
    """
    first = verdict.culprits[0]
    stack = main_stack(_text_of(folder / STACK.format(rank=first)))
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)  # not its parents: the run's folder is not created anew
        summary = {
            "culprits": list(verdict.culprits),
            "why": verdict.reason,
            "ranks": [
                {
                    "rank": status.rank,
                    **{name: value for name, value in asdict(status.row).items() if not name.endswith("_ns")},
                    "limit": min(status.row.limit, 1e9),
                    "seconds": round(status.seconds, 1),
                    "state": status.state,
                }
                for status in statuses.values()
            ],
        }
        (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    status = statuses[first]
    others = [rank for rank in verdict.culprits if rank != first]
    also = f" (and so do ranks {', '.join(map(str, others))})" if others else ""
    message = (
        f"hangs on host {status.row.host}{also}: {_doing(status)}; no progress for {status.seconds:.1f} s, "
        f"{status.row.limit:.3g} s are the limit; {verdict.reason}"
    )
    return Failure(
        rank=first,
        kind="hung",
        name="",
        message="\n".join([message, *lines(statuses, verdict)]),
        traceback=stack,
        hint=f"stacks and last calls of all ranks: `stretto diagnose {folder}`; train.hang_s is the limit",
    )


def lines(statuses: Mapping[int, RankStatus], verdict: HangVerdict) -> list[str]:
    """Return one line per rank, with what it did last."""
    shown = sorted(statuses.values(), key=lambda status: (status.rank not in verdict.culprits, status.rank))[
        :_SHOWN
    ]
    text = [
        f"  rank {status.rank} on {status.row.host}: {_doing(status)}{_call(status, verdict)}"
        for status in shown
    ]
    return text + ([f"  and {len(statuses) - len(shown)} more"] if len(statuses) > len(shown) else [])


def _doing(status: RankStatus) -> str:
    step = f"step {status.row.step}: " if status.row.step else ""
    return f"{step}{status.row.text or 'its start'}{', waiting for others' if status.row.waits else ''}"


def _call(status: RankStatus, verdict: HangVerdict) -> str:
    if verdict.diagnosis is None or not status.row.waits:
        return ""
    waits = [wait for wait in verdict.diagnosis.waits if wait.rank == status.rank]
    if not waits:
        return ""
    whom = ", ".join(dict.fromkeys(str(wait.target) for wait in waits))
    call = waits[0].call
    return f" (in {call}{call.sizes}{call.location}, for rank {whom})"


def summary_lines(folder: Path) -> list[str]:
    """Return what every rank was doing when the watch ended the job, and the files of their stacks; [] if
    no watch ended it or its summary cannot be read.
    """
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        lines = [
            f"ranks that hung: {', '.join(str(int(rank)) for rank in summary['culprits'])}; {summary['why']}"
        ]
        for status in summary["ranks"]:
            stack = folder / STACK.format(rank=int(status["rank"]))
            waits = ", waiting for others" if status["waits"] else ""
            stacks = f"; stacks in {stack.name}" if stack.is_file() else ""
            lines.append(
                f"  rank {status['rank']} on {status['host']}: step {status['step']}: {status['text']}"
                f"{waits}, without progress for {float(status['seconds']):.1f} s{stacks}"
            )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return lines


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def main_stack(text: str) -> str:
    """Return the main thread's stack, innermost call first, from a dump of all threads."""
    blocks = [block.strip() for block in text.split("\n\n") if block.strip()]
    return blocks[-1] if blocks else ""


def crash_stack(text: str) -> str:
    """Return the main thread's stack of a crashed process, from the output of Python's fault handler."""
    text = text.rpartition("Fatal Python error")[2].partition("\nExtension modules")[0]
    return main_stack(text)


def innermost(stack: str) -> str:
    """Return the innermost calls of a stack, outside the watch."""
    frames = [match for match in _FRAME.finditer(stack) if not match["file"].endswith(_WATCH)]
    return ", from ".join(
        f"{match['file'].rpartition('/')[2]}:{match['line']} in {match['function']}" for match in frames[:3]
    )


def process_state(process: int) -> str:
    """Return the state of a process (R, S, D, T: stopped, t: traced, Z); "" if the system does not report
    it.
    """
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]
