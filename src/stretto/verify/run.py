"""Run a proof: start the ranks, let them compare each case with one process, collect the verdicts.

What is proved is a `Proof`. The one of a task (`language/proof.py`, `recommender/proof.py`) says which cases
a job has and how the reference and the batches are made.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from stretto.errors import StrettoError
from stretto.run.launch.local import check_ranks, prepare, run_ranks

if TYPE_CHECKING:
    from stretto.verify.evidence import Verdict

_SHOWN = 6  # names in a line


@dataclass
class Impossible:
    """A reason, and the layouts, placements or schedules that are left out because of it."""

    reason: str
    left_out: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        shown = ", ".join(self.left_out[:_SHOWN])
        more = len(self.left_out) - _SHOWN
        return f"{self.reason} ({shown}{f' and {more} more' if more > 0 else ''})"


@dataclass
class Findings:
    """The result of a proof.

    Attributes:
        verdicts: one for each case.
        unproved: set fields of the job whose effect no case can show.
        rounded: the cases in the job's own types.
    """

    verdicts: list[Verdict] = field(default_factory=list["Verdict"])
    unproved: list[str] = field(default_factory=list[str])
    rounded: list[Verdict] = field(default_factory=list["Verdict"])


@dataclass(kw_only=True)
class Proof(ABC):
    """Cases of one job, all for the same number of ranks, to be compared with one process. The ranks get a
    pickled copy.

    Attributes:
        noun: word for a case.
        preload: modules that every rank imports.
        steps: training steps of each case.
        impossible: cases that do not exist, by reason.
        notes: values of the job that are changed for the proof.
        float64_only: why cases are not compared in the job's own types.
        updated_by: the independent implementations that update the reference.
    """

    noun: ClassVar[str]
    preload: ClassVar[tuple[str, ...]]
    ranks: int
    threads: int
    timeout: timedelta
    steps: int
    impossible: Sequence[Impossible] = ()
    notes: Sequence[str] = ()
    float64_only: Sequence[str] = ()
    updated_by: str

    @abstractmethod
    def needed_memory(self) -> tuple[float, str, str]:
        """Return the bytes that all ranks need, what needs them in words, and a hint to need fewer."""

    def run_alone(self, folder: Path) -> Any:
        """Run what one process computes without a process group; on rank 0, before the others may begin."""
        return None

    @abstractmethod
    def find(self, alone: Any, folder: Path, report: Callable[[Verdict, int], None]) -> Findings:
        """Compare all cases, on every rank. Collective over the default group.

        Args:
            alone: on rank 0, the result of `run_alone`; None on the others.
            folder: for temporary files of all ranks.
            report: called after each case, with the number of cases.
        """


def run_proof(proof: Proof, on_rank: Callable[[], None] | None = None, progress: str = "") -> Findings:
    """Run the proof on as many local ranks as it needs.

    Args:
        on_rank: called on every rank first.
        progress: "stdout" or "stderr", where a line for each case is printed; "" for nowhere.

    Raises:
        StrettoError: more ranks or memory needed than this machine has.
        RankFailed: a rank failed.
    """
    check_ranks(proof.ranks)
    _check_memory(*proof.needed_memory())
    prepare(proof.preload)
    with TemporaryDirectory(prefix="stretto-verify-") as folder:
        return run_ranks(proof.ranks, _run_rank, proof, Path(folder), on_rank, progress)[0]


def _run_rank(proof: Proof, folder: Path, on_rank: Callable[[], None] | None, progress: str) -> Findings:
    import torch  # the launching process does not need it
    import torch.distributed as dist

    torch.set_num_threads(proof.threads)
    alone = proof.run_alone(folder) if os.environ["RANK"] == "0" else None
    dist.init_process_group("gloo", timeout=proof.timeout)
    if on_rank is not None:
        on_rank()
    try:
        return proof.find(alone, folder, Progress("" if dist.get_rank() else progress))
    finally:
        dist.destroy_process_group()


def _check_memory(needed: float, subject: str, hint: str) -> None:
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return
    if needed > memory:
        raise StrettoError(
            f"{subject} takes about {needed / 2**30:.0f} GiB, this machine has {memory / 2**30:.0f}",
            hint=hint,
        )


class Progress:
    """Prints a line for each case that is done, and how many there are."""

    def __init__(self, stream: str = "stdout") -> None:
        self._stream, self._done = stream, 0

    def __call__(self, verdict: Verdict, cases: int) -> None:
        self._done += 1
        if self._stream:
            mark = "equal  " if verdict.equal else "DIFFERS"
            took = f"{verdict.seconds:.1f} s" if verdict.same_as is None else f"as {verdict.same_as}"
            print(
                f"[{self._done}/{cases}] {mark} {verdict.layout}  ({took})",
                file=getattr(sys, self._stream),
                flush=True,
            )
