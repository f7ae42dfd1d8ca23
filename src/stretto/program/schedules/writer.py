"""Writes one rank's order: the caller names stages, and each stage takes its microbatches in order."""

from __future__ import annotations

from collections import defaultdict, deque

from stretto.program.action import Action, ActionKind


class OrderWriter:
    """Builds one rank's order.

    Every stage takes its microbatches in ascending order, for each kind of action; with several copies of the
    weights, copy c takes microbatches c, c + copies, ... Actions of microbatches beyond the last are counted
    but not written: without some microbatches, an order that completes still completes and holds no more
    activations. An order for many microbatches thus also serves for fewer.

    Args:
        microbatches: microbatches of the step.
        depth: stages of one copy; optional for a single copy.
        copies: copies of the weights.
        splits: backwards outside pairs are I and then W, so that the gradient is sent before W.
    """

    def __init__(self, microbatches: int, depth: int = 0, copies: int = 1, splits: bool = False) -> None:
        self.order: list[Action] = []
        self.pairs: set[tuple[Action, Action]] = set()
        self._microbatches = microbatches
        self._depth = depth
        self._copies = copies
        self._splits = splits
        self._next: dict[tuple[int, ActionKind], int] = defaultdict(int)
        self._due: deque[tuple[int, int]] = deque()  # deferred weight gradients, oldest first

    def forward(self, *stages: int) -> None:
        """Write F of each stage."""
        for stage in stages:
            self._write(stage, ActionKind.F, self._take(stage, ActionKind.F))

    def backward(self, stage: int) -> None:
        """Write B, or I and then W."""
        i = self._take(stage, ActionKind.I)
        for kind in (ActionKind.I, ActionKind.W) if self._splits else (ActionKind.B,):
            self._write(stage, kind, i)

    def input_gradient(self, stage: int) -> None:
        """Write I; its weight gradient is due from now on."""
        i = self._take(stage, ActionKind.I)
        self._write(stage, ActionKind.I, i)
        self._due.append((stage, i))

    def weight_gradient(self, stage: int | None = None) -> None:
        """Write the oldest W that is due, of `stage` if given; nothing if none is due."""
        for due in self._due:
            if stage is None or due[0] == stage:
                self._due.remove(due)
                self._write(due[0], ActionKind.W, due[1])
                return

    def weight_gradients(self, stage: int | None = None) -> None:
        """Write every W that is due, of `stage` if given, the oldest first."""
        for due in list(self._due):
            if stage is None or due[0] == stage:
                self._write(due[0], ActionKind.W, due[1])
        self._due = deque(due for due in self._due if stage is not None and due[0] != stage)

    def pair(self, forward: int, backward: int) -> None:
        """Write F of one stage and B of another as a pair, or one alone if the other has no microbatch
        left.
        """
        if max(self._peek(forward, ActionKind.F), self._peek(backward, ActionKind.I)) >= self._microbatches:
            self.forward(forward)
            self.backward(backward)
            return
        f = Action(forward, ActionKind.F, self._take(forward, ActionKind.F))
        b = Action(backward, ActionKind.B, self._take(backward, ActionKind.I))
        self.order += (f, b)
        self.pairs.add((f, b))

    def _peek(self, stage: int, kind: ActionKind) -> int:
        nth = self._next[stage, kind]
        return nth if self._copies == 1 else nth * self._copies + stage // self._depth

    def _take(self, stage: int, kind: ActionKind) -> int:
        microbatch = self._peek(stage, kind)
        self._next[stage, kind] += 1
        return microbatch

    def _write(self, stage: int, kind: ActionKind, microbatch: int) -> None:
        if microbatch < self._microbatches:
            self.order.append(Action(stage, kind, microbatch))
