"""What a rank says of itself when it fails, and which of several failures is the cause."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from stretto.errors import StrettoError

Kind = Literal["input", "error", "died", "silent", "gone"]

_PLACE = re.compile(r"\[[^\]]*gloo/[^\]]*\] ")
_GLOO = "gloo/"  # gloo's errors begin with the place in its source, and have no class of their own
_LATE = ("Timed out", "timed out", "wait timeout", "Watchdog caught collective operation timeout")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank failed.

    kind: `input`: a StrettoError; `error`: any other exception; `died`: the process ended without a word;
        `silent`:
        it waited in vain for another rank; `gone`: another rank's connection closed.
    name: class of the exception; "" where the process died.
    """

    rank: int
    kind: Kind
    name: str
    message: str
    traceback: str = ""
    hint: str | None = None

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """What `error`, which is being handled, says."""
        text = "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, StrettoError):
            return cls(
                rank=rank,
                kind="input",
                name=type(error).__name__,
                message=error.message,
                traceback=text,
                hint=error.hint,
            )
        notes: list[str] = getattr(error, "__notes__", [])
        message = ", ".join([_PLACE.sub("", str(error)) or type(error).__name__, *notes])
        return cls(
            rank=rank,
            kind=peer_failure(error) or "error",
            name=type(error).__name__,
            message=message,
            traceback=text,
        )

    @classmethod
    def died(cls, rank: int, exitcode: int | None) -> Failure:
        """A process that said nothing."""
        if exitcode is None or exitcode >= 0:
            return cls(
                rank=rank, kind="died", name="", message=f"ended with exit code {exitcode} and said nothing"
            )
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:
            name = f"signal {-exitcode}"
        hint = "the system kills the largest process when memory runs out" if name == "SIGKILL" else None
        return cls(rank=rank, kind="died", name="", message=f"was killed by {name}", hint=hint)


def peer_failure(error: BaseException) -> Literal["silent", "gone"] | None:
    """Whether the error only says that another rank does not answer (`silent`) or is gone; None: it is its
    own."""
    from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

    root = list(_chain(error))[-1]  # what was raised first; later ones come from cleaning up
    lost = isinstance(root, DistBackendError | DistNetworkError | DistStoreError)
    if not lost and _GLOO not in str(root):
        return None
    return "silent" if any(word in str(root) for word in _LATE) else "gone"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised from or in the handling of."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def first_cause(failures: Mapping[int, Failure], ranks: Collection[int]) -> Failure:
    """The failure that the others follow from.

    `failures` are in the order in which they were heard of. When all of them wait for each other, the cause
    is a rank that said nothing.
    """
    heard = list(failures.values())
    own = [failure for failure in heard if failure.kind not in ("silent", "gone")]
    if own:
        return own[0]
    waits = [failure for failure in heard if failure.kind == "silent"]
    mute = sorted(set(ranks) - set(failures))
    if not waits or not mute:
        return waits[0] if waits else heard[0]
    who = f"ranks {', '.join(map(str, mute))} do" if len(mute) > 1 else f"rank {mute[0]} does"
    told = "; ".join(f"rank {f.rank}: {f.message}" for f in waits[:4])
    return Failure(
        rank=mute[0],
        kind="silent",
        name=waits[0].name,
        message=f"{who} not answer ({told})",
        traceback=waits[0].traceback,
        hint="it hangs or is slow; train.timeout_s is the longest wait",
    )
