"""Which rank hangs: what is seen of all ranks from outside, and what their records say."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stretto.engine.progress import RankMarks
from stretto.errors import StrettoError
from stretto.run.diagnose.dump import read_dumps
from stretto.run.diagnose.hang import Diagnosis, diagnose
from stretto.run.launch.failure import Failure

HANG = "hang"  # the folder inside that of the run
RECORD, STACK = "rank_{rank}.json", "rank_{rank}.stack"
SUMMARY = "hang.json"
_AHEAD_S, _AHEAD = 2.0, 0.25  # records are gathered so long before the limit, or such a part of it
_MUTE = 0.5  # of the time without progress, without a sign of life either
_SHOWN = 8  # ranks in a message
_STOPPED = "T"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_WAITS = "/run/watch/waits.py"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is seen of a rank from outside.

    Attributes:
        seconds: without progress.
        mute: seconds without a sign of life of any of its threads.
        state: of its process, as Linux says it (R, S, D, T, ...); "" where that is not known.
    """

    rank: int
    row: RankMarks
    seconds: float
    mute: float
    state: str = ""

    @property
    def late(self) -> bool:
        """Whether it makes no progress for longer than it may."""
        return self.row.marks > 0 and self.seconds > self.row.limit

    @property
    def nearly_late(self) -> bool:
        """Whether it will be late soon, unless it goes on."""
        ahead = min(_AHEAD_S, _AHEAD * self.row.limit)
        return self.row.marks > 0 and self.seconds > self.row.limit - ahead

    @property
    def answers(self) -> bool:
        """Whether a thread of its Python runs."""
        return self.state != _STOPPED and self.mute <= _MUTE * self.seconds


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which ranks hang, and why it is they."""

    culprits: tuple[int, ...]
    why: str
    diagnosis: Diagnosis | None = None


def judge(seen: Mapping[int, Seen], diagnosis: Diagnosis | None) -> Verdict:
    """The ranks that the others wait for.

    A rank that cannot answer is one of them; else the ranks' calls, put side by side, tell; else it is one
    that waits for no other.
    """
    if stopped := tuple(one.rank for one in seen.values() if one.state == _STOPPED):
        return Verdict(culprits=stopped, why="stopped by a signal (SIGSTOP or SIGTSTP)", diagnosis=diagnosis)
    late = [one for one in seen.values() if one.late]
    if mute := tuple(one.rank for one in late if not one.answers):
        why = "no thread of its Python runs: a call into C holds the interpreter's lock (GIL)"
        if not all(seen[rank].state for rank in mute):
            why = "no sign of life: its host is cut off or gone, or it is stopped or holds Python's lock"
        return Verdict(culprits=mute, why=why, diagnosis=diagnosis)
    if (differing := odd_call(diagnosis)) is not None:
        return differing
    waiting = {one.rank for one in seen.values() if one.row.waits}
    if (opposed := opposed_calls(diagnosis)) is not None and waiting.issuperset(opposed.culprits):
        return opposed
    if diagnosis is not None:
        named = tuple(rank for rank in diagnosis.culprits if rank in seen)
        if alone := tuple(rank for rank in named if rank not in waiting):
            return Verdict(culprits=alone, why="the others wait for it", diagnosis=diagnosis)
        if named:
            return Verdict(culprits=named, why="the others wait for it", diagnosis=diagnosis)
        waiters = Counter(target for _, target in {(wait.rank, wait.target) for wait in diagnosis.waits})
        most = [rank for rank in waiters if rank in seen and waiters[rank] == max(waiters.values())]
        if len(most) == 1 and max(waiters.values()) > 1:
            why = (
                "most ranks wait for it, and it for one of them: as if it had left out a call or made another"
            )
            return Verdict(culprits=(most[0],), why=why, diagnosis=diagnosis)
    if alone := tuple(one.rank for one in late if one.rank not in waiting):
        return Verdict(culprits=alone, why="it waits for no other rank", diagnosis=diagnosis)
    if diagnosis is not None and diagnosis.circle and waiting.issuperset(diagnosis.circle):
        why = "they wait for each other, as if one of them had left out a call or made another"
        return Verdict(culprits=diagnosis.circle[:-1], why=why, diagnosis=diagnosis)
    worst = max(late, key=lambda one: one.seconds)
    why = "it has made no progress for the longest time, and every rank waits for another"
    return Verdict(culprits=(worst.rank,), why=why, diagnosis=diagnosis)


def odd_call(diagnosis: Diagnosis | None) -> Verdict | None:
    """The ranks whose call differs from that of most others; None where the calls agree, or as many are of
    one kind as of the other.
    """
    if diagnosis is None or not diagnosis.mismatches:
        return None
    first = diagnosis.mismatches[0]
    if len(first.odd) == len(first.calls):
        return None
    calls = ", ".join(f"rank {rank} {call.operation}" for rank, call in first.calls.items())
    slips = {1: "; as if it had left out a call", -1: "; as if it had made a call more"}
    why = f"its call #{first.number} of {first.group} differs in {first.about} ({calls})"
    return Verdict(culprits=first.odd, why=why + slips.get(first.slip, ""), diagnosis=diagnosis)


def opposed_calls(diagnosis: Diagnosis | None) -> Verdict | None:
    """Both sides of calls that differ, where as many ranks made one as made the other; None where there are
    no such calls.
    """
    if diagnosis is None or not diagnosis.mismatches or odd_call(diagnosis) is not None:
        return None
    first = diagnosis.mismatches[0]
    calls = "; ".join(f"rank {rank} {call.details}" for rank, call in list(first.calls.items())[:_SHOWN])
    why = f"their calls #{first.number} of {first.group} differ in {first.about}, and neither is the odd one"
    return Verdict(culprits=first.odd, why=f"{why}: {calls}", diagnosis=diagnosis)


def aborted(dead: Failure, seen: Mapping[int, Seen], diagnosis: Diagnosis | None, folder: Path) -> Failure:
    """The failure of a rank that gloo has ended, with what every rank was doing: the last calls of those that
    could write their records, the stacks of the others. Of the dead rank nothing but its stack is left.
    """
    text = list[str]()
    for one in sorted(seen.values(), key=lambda one: (one.rank != dead.rank, one.rank))[:_SHOWN]:
        line = f"  rank {one.rank} on {one.row.host}: {_doing(one)}"
        call = None if diagnosis is None else diagnosis.last.get(one.rank)
        if one.rank != dead.rank and call is not None:
            line += f"; its last call: #{call.number} of {call.group}, {call.details}"
        else:
            stack = main_stack(_text_of(folder / STACK.format(rank=one.rank)))
            stack = dead.traceback if one.rank == dead.rank else stack
            line += f", at {places}" if (places := innermost(stack)) else ""
        text.append(line)
    why = "gloo ends a process that is sent more than its call expects: ranks have called different things"
    return replace(dead, message="\n".join([f"{dead.message}; {why}", *text]))


def read_records(folder: Path, world: int) -> Diagnosis | None:
    """What the records say; None where none can be read."""
    with contextlib.suppress(StrettoError, OSError):
        return diagnose(read_dumps(folder), world)
    return None


def remove_records(folder: Path) -> None:
    """Remove those of an earlier hang."""
    for pattern in (RECORD, STACK):
        for old in folder.glob(pattern.format(rank="*")):
            old.unlink(missing_ok=True)
    (folder / SUMMARY).unlink(missing_ok=True)


def failure(seen: Mapping[int, Seen], verdict: Verdict, folder: Path) -> Failure:
    """The failure of the rank that hangs, which names what every rank did; the same is written into the
    folder as `hang.json`.
    """
    first = verdict.culprits[0]
    stack = main_stack(_text_of(folder / STACK.format(rank=first)))
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)  # in the run's, which is not made anew
        facts = _facts(seen, verdict)
        (folder / SUMMARY).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    one = seen[first]
    others = [rank for rank in verdict.culprits if rank != first]
    also = f" (and so do ranks {', '.join(map(str, others))})" if others else ""
    message = (
        f"hangs on host {one.row.host}{also}: {_doing(one)}; no progress for {one.seconds:.1f} s, "
        f"{one.row.limit:.3g} s are the limit; {verdict.why}"
    )
    return Failure(
        rank=first,
        kind="hung",
        name="",
        message="\n".join([message, *lines(seen, verdict)]),
        traceback=stack,
        hint=f"stacks and last calls of all ranks: `stretto diagnose {folder}`; train.hang_s is the limit",
    )


def lines(seen: Mapping[int, Seen], verdict: Verdict) -> list[str]:
    """What every rank did last."""
    shown = sorted(seen.values(), key=lambda one: (one.rank not in verdict.culprits, one.rank))[:_SHOWN]
    text = [f"  rank {one.rank} on {one.row.host}: {_doing(one)}{_call(one, verdict)}" for one in shown]
    return text + ([f"  and {len(seen) - len(shown)} more"] if len(seen) > len(shown) else [])


def _doing(one: Seen) -> str:
    step = f"step {one.row.step}: " if one.row.step else ""
    return f"{step}{one.row.text or 'its start'}{', waiting for others' if one.row.waits else ''}"


def _call(one: Seen, verdict: Verdict) -> str:
    if verdict.diagnosis is None or not one.row.waits:
        return ""
    waits = [wait for wait in verdict.diagnosis.waits if wait.rank == one.rank]
    if not waits:
        return ""
    whom = ", ".join(dict.fromkeys(str(wait.target) for wait in waits))
    call = waits[0].call
    return f" (in {call}{call.sizes}{call.at}, for rank {whom})"


def _facts(seen: Mapping[int, Seen], verdict: Verdict) -> dict[str, Any]:
    return {
        "culprits": list(verdict.culprits),
        "why": verdict.why,
        "ranks": [
            {
                "rank": one.rank,
                **{name: value for name, value in asdict(one.row).items() if not name.endswith("_ns")},
                "limit": min(one.row.limit, 1e9),
                "seconds": round(one.seconds, 1),
                "state": one.state,
            }
            for one in seen.values()
        ],
    }


def summary_lines(folder: Path) -> list[str]:
    """What every rank was doing when the watch ended the job, and where its stacks are; [] where no watch
    did, or what it left cannot be read.
    """
    try:
        facts = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        lines = [
            f"ranks that hung: {', '.join(str(int(rank)) for rank in facts['culprits'])}; {facts['why']}"
        ]
        for one in facts["ranks"]:
            stack = folder / STACK.format(rank=int(one["rank"]))
            waits = ", waiting for others" if one["waits"] else ""
            where = f"; stacks in {stack.name}" if stack.is_file() else ""
            lines.append(
                f"  rank {one['rank']} on {one['host']}: step {one['step']}: {one['text']}{waits}, without "
                f"progress for {float(one['seconds']):.1f} s{where}"
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
    """Of the stacks of all threads, that of the main thread, the innermost call first."""
    blocks = [block.strip() for block in text.split("\n\n") if block.strip()]
    return blocks[-1] if blocks else ""


def crash_stack(text: str) -> str:
    """The stack of the main thread of a process that has crashed, from what Python's fault handler wrote."""
    text = text.rpartition("Fatal Python error")[2].partition("\nExtension modules")[0]
    return main_stack(text)


def innermost(stack: str) -> str:
    """The innermost calls of a stack, outside of the watch."""
    frames = [match for match in _FRAME.finditer(stack) if not match["file"].endswith(_WAITS)]
    return ", from ".join(
        f"{match['file'].rpartition('/')[2]}:{match['line']} in {match['function']}" for match in frames[:3]
    )


def process_state(process: int) -> str:
    """The state of a process (R, S, D, T: stopped, t: traced, Z); "" where the system does not say."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]
