"""Count repeated work instead of running it: microbatches of a step, and tiles of attention."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from stretto.engine.kernels import NaiveAttention
from stretto.engine.pipeline.rank_buffers import Call
from stretto.engine.pipeline.recorder import Recorder
from stretto.program.action import Action
from stretto.run.dryrun.fake import AFTER, BACKWARD, FORWARD, Following

T = TypeVar("T")

# label of an action with a microbatch, such as 2F0, or of the end of its message, as "the wait for 2SEND_F0"
_LABEL = re.compile(r"(?P<call>(?P<wait>the wait for )?\d+[A-Z_]+)(?P<microbatch>\d+)")


def repeating(order: Iterable[Action], first: int = 2) -> frozenset[int]:
    """Return the microbatches of a rank's program that need not be run.

    The `first` ones and the last of each stage's forwards, backwards and messages are run: the first creates
    what persists, the last of the `first` shows what all later ones do, and the last starts the reductions.
    """
    of = defaultdict[tuple[object, ...], list[int]](list)
    for action in order:
        if action.microbatch is not None:
            of[action.stage, action.kind].append(action.microbatch)
    run = {microbatch for several in of.values() for microbatch in (*several[:first], several[-1])}
    return frozenset(microbatch for several in of.values() for microbatch in several) - run


@dataclass(frozen=True)
class _Effect:
    """The effect of one call.

    counted: what it added to each of the recorder's counters.
    at_peak, after: change of the bytes of each kind since before the call, at its peak and after it.
    """

    counted: tuple[Counter[Any], ...]
    at_peak: Counter[str]
    after: Counter[str]


class PhaseRecorder(Recorder):
    """Sets the phase of each action, records its memory, and repeats the effect of an earlier call instead of
    running the calls of `repeated` microbatches.

    Args:
        following: follows the tensors of the step.
        counters: counters to which repeated calls add what the earlier call added.
        repeated: microbatches that are not run, from `repeating`.
        progress: called with the number of actions of microbatches that are done.

    Attributes:
        actions: label of each call, the bytes held after it, and the peak during it.
    """

    def __init__(
        self,
        following: Following,
        counters: Sequence[Counter[Any]] = (),
        repeated: frozenset[int] = frozenset(),
        progress: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__("cpu")
        self.following = following
        self.actions = list[tuple[str, int, int]]()
        self._counters = counters
        self._repeated = repeated
        self._progress = progress
        self._done = 0
        self._effects = dict[str, _Effect | None]()  # None for the first call of its kind

    def record(self, label: str, call: Call, wait: Call | None) -> None:
        """Run a call, after the wait that it would begin with, or repeat the effect of such a call."""
        following = self.following
        parts = _LABEL.fullmatch(label)
        before, fullest = following.peak, following.peak_kinds
        following.peak, following.peak_kinds = following.allocated, following.kinds.copy()
        if parts is None:
            self._run(label, call, wait)
        elif int(parts["microbatch"]) in self._repeated:
            effect = self._effects.get(parts["call"])
            assert effect is not None, f"no earlier {parts['call']} was run"
            for counter, added in zip(self._counters, effect.counted, strict=True):
                counter.update(added)
            following.change(effect.at_peak)
            following.change(_since(effect.after, effect.at_peak))
        else:
            self._run_and_record(parts["call"], label, call, wait)
        self.actions.append((label, following.allocated, following.peak))
        if following.peak <= before:
            following.peak, following.peak_kinds = before, fullest
        if self._progress is not None and parts is not None and not parts["wait"]:
            self._done += 1
            self._progress(self._done)

    def _run(self, label: str, call: Call, wait: Call | None) -> None:
        following = self.following
        if wait is not None:
            wait()
        kind = label.lstrip("0123456789")  # of an action such as 2F0
        following.phase = FORWARD if kind.startswith("F") and kind != label else BACKWARD
        call()
        following.phase = AFTER
        following.look()

    def _run_and_record(self, name: str, label: str, call: Call, wait: Call | None) -> None:
        """Run a call, and store its effect unless it was the first of its kind."""
        following = self.following
        kinds, counted = following.kinds.copy(), [counter.copy() for counter in self._counters]
        self._run(label, call, wait)
        if name not in self._effects:
            self._effects[name] = None
            return
        self._effects[name] = _Effect(
            tuple(_since(now, was) for now, was in zip(self._counters, counted, strict=True)),
            _since(following.peak_kinds, kinds),
            _since(following.kinds, kinds),
        )


@contextmanager
def tiles_once(following: Following) -> Generator[None]:
    """Naive attention goes through hundreds of tiles in each layer: inside the `with`, only the first call
    with tensors of the same shapes is run, and later ones repeat its effect.
    """
    results_of = dict[Any, tuple[Counter[str], Counter[str], list[Any]]]()

    def once(method: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        def call(kernel: NaiveAttention, *arguments: Any, **named: Any) -> tuple[Tensor, ...]:
            if kernel.dropout is not None:
                return method(kernel, *arguments, **named)
            key = method, kernel, *map(_described, (*arguments, *named.values()))
            if key not in results_of:
                results, at_peak, flops = _measured(following, partial(method, kernel, *arguments, **named))
                results_of[key] = at_peak, flops, [_described(x) for x in results]
                return results
            at_peak, flops, results = results_of[key]
            for kind, count in flops.items():
                following.flops[following.phase, kind] += count
            following.change(at_peak)
            following.change({kind: -size for kind, size in at_peak.items()})
            return tuple(
                torch.empty_strided(size, stride, dtype=dtype, device=device)
                for size, stride, dtype, device in results
            )

        return call

    was = NaiveAttention.forward, NaiveAttention.backward
    NaiveAttention.forward, NaiveAttention.backward = map(once, was)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        NaiveAttention.forward, NaiveAttention.backward = was


def _measured(
    following: Following, run: Callable[[], tuple[Tensor, ...]]
) -> tuple[tuple[Tensor, ...], Counter[str], Counter[str]]:
    """Return a call's results, the bytes of each kind that it adds at its peak, and its FLOPs by kind."""
    kinds, flops = following.kinds.copy(), following.flops.copy()
    before, fullest = following.peak, following.peak_kinds
    following.peak, following.peak_kinds = following.allocated, kinds
    results = run()
    at_peak = _since(following.peak_kinds, kinds)
    if following.peak <= before:
        following.peak, following.peak_kinds = before, fullest
    done = Counter[str]()
    for (_, kind), count in _since(following.flops, flops).items():
        done[kind] += count
    return results, at_peak, done


def _described(x: Any) -> Any:
    return (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x


def _since(now: Counter[T], was: Counter[T]) -> Counter[T]:
    """Return by how much each count has changed; `-` of counters would drop decreases."""
    change = now.copy()
    change.subtract(was)
    return change
