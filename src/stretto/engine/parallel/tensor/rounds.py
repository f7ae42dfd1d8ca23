"""A module that computes on the full batch, of which every rank has a part: gathered at once, or in rounds
that overlap with the module's computation.

Krizhevsky 2014 ("One weird trick for parallelizing convolutional neural networks", section 4) describes three
schemes between data-parallel convolutions and fully connected layers that are split over the same K ranks:

- (a) "all": every rank sends its activations to every other, and the layers compute on the full batch.
- (b) "turns": K rounds. In round k, rank k's part is broadcast, and the layers compute on it while that of
  rank k + 1 is in transit: (K - 1)/K of the communication can be hidden.
- (c) "shares": K rounds, in each of which every rank sends 1/K of its part to all others. The rounds are as
  large as those of (b), but all ranks' links share the traffic.

In the backward, the gradient of each sample's activations is summed over the ranks, each of which has the
term of its features, and sent to the rank of the sample; in rounds, while the next round computes.

In the paper each round is a forward and a backward, so only one round's activations are alive, and the
weights may be updated after each ("variable batch size"). That requires the loss inside the loop, as with
`InRounds.rounds`. Called as a module, all forwards come before all backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.engine.parallel.collectives import (
    Pending,
    cut,
    start_broadcast,
    start_gather,
    start_scatter_sum,
    start_sum_at,
)
from stretto.engine.parallel.tensor.dropout import DropoutKeys, KeyedDropout
from stretto.errors import StrettoError

Schedule = Literal["all", "turns", "shares"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


class _Rows:
    """The rows of the batch that are gathered in each round.

    Args:
        part: this rank's rows of the batch [b, ...].
    """

    def __init__(self, part: Tensor, group: ProcessGroup, schedule: Schedule) -> None:
        self.part = part.detach().contiguous()
        self.group, self.schedule = group, schedule
        self.ranks = group.size()
        self.rounds = 1 if schedule == "all" else self.ranks
        self.gradient: Tensor | None = None
        if schedule == "shares" and len(part) % self.ranks:
            raise StrettoError(
                f"a rank's {len(part)} samples do not divide into {self.ranks} shares, one for each round",
                hint=f"a batch that is a multiple of {self.ranks**2}, or schedule 'turns'",
            )

    @property
    def share(self) -> int:
        """Number of rows of one rank in one round of "shares"."""
        return len(self.part) // self.ranks

    def of_round(self, k: int) -> Tensor:
        """Return the indices of the batch's rows in round k, in the round's order: int64."""
        b = len(self.part)
        if self.schedule == "all":
            return torch.arange(self.ranks * b)
        if self.schedule == "turns":
            return torch.arange(k * b, (k + 1) * b)
        starts = torch.arange(self.ranks)[:, None] * b + k * self.share
        return (starts + torch.arange(self.share)).flatten()

    def start(self, k: int) -> tuple[Tensor, Pending]:
        """Start gathering the rows of round k, the same on all ranks."""
        if self.schedule == "turns":
            is_local = k == self.group.rank()
            rows = self.part if is_local else torch.empty_like(self.part)
            return rows.detach(), start_broadcast(rows, k, self.group)
        sent = self.part if self.schedule == "all" else self.part.narrow(0, k * self.share, self.share)
        pieces, work = start_gather(sent, self.group)
        return pieces.flatten(0, 1), work

    def start_return(self, k: int, term: Tensor) -> Callable[[], object]:
        """Start summing the ranks' terms of the gradient of round k's rows, each row on its rank; return a
        function that completes the sum.
        """
        if self.gradient is None:
            self.gradient = torch.empty_like(self.part)
        gradient, term = self.gradient, term.contiguous()
        if self.schedule == "turns":
            work, is_local = start_sum_at(term, k, self.group), k == self.group.rank()

            def end() -> None:
                work.wait()
                if is_local:
                    gradient.copy_(term)

            return end
        out = gradient if self.schedule == "all" else gradient.narrow(0, k * self.share, self.share)
        return start_scatter_sum(cut(term, self.ranks, 0), self.group, out)[1].wait

    def ordered(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the rounds' outputs in the order of the batch."""
        if self.schedule != "shares":
            return torch.cat(list(outputs))
        return torch.stack([output.unflatten(0, (self.ranks, -1)) for output in outputs], 1).flatten(0, 2)

    def cut(self, batch: Tensor) -> list[Tensor]:
        """Split a tensor in the order of the batch into rounds: the inverse of `ordered`."""
        if self.schedule != "shares":
            return list(batch.chunk(self.rounds))
        shares = batch.unflatten(0, (self.ranks, self.rounds, -1))
        return [shares[:, k].flatten(0, 1) for k in range(self.rounds)]


@dataclass(frozen=True, kw_only=True)
class GatherRound:
    """One round of `InRounds.rounds`.

    Attributes:
        output: output of the module for this round's rows.
        rows: indices of these rows in the batch, in the order of `output`: int64.
        number, rounds: index of this round, from 0, and number of rounds.
    """

    output: Tensor
    rows: Tensor
    number: int
    rounds: int


class InRounds(nn.Module):
    """Mixin of a module with the style `GatherBatch`."""

    _group: ProcessGroup
    _schedule: Schedule
    _finish: Callable[[Any], Any]

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's rows of the module's input to the output for the full batch, on every rank."""
        rows = _Rows(x, self._group, self._schedule)
        if torch.is_grad_enabled():
            return cast(Tensor, _Rounds.apply(self, rows, x, *self.parameters()))
        return rows.ordered([self._compute(batch, rows, k) for k, batch in _gathered(rows)])

    def rounds(self, x: Tensor) -> Iterator[GatherRound]:
        """Yield one round after another, each to be followed by its backward:

            for one in model.classifier.rounds(x):
                loss = cross_entropy(one.output, y[one.rows]) / one.rounds
                loss.backward()

        Meanwhile the next round's rows and the previous round's gradient are in transit. After the last round
        the gradient continues to the graph of x. The module's weights may be updated between rounds; this is
        then equal to one process on small batches, one per round, not on the full batch.

        Args:
            x: this rank's rows of the module's input.

        Raises:
            StrettoError: a round was not followed by its backward.
        """
        rows = _Rows(x, self._group, self._schedule)
        returned = list[Callable[[], object]]()
        for k, batch in _gathered(rows):
            leaf = batch.requires_grad_()
            yield GatherRound(
                output=self._compute(leaf, rows, k), rows=rows.of_round(k), number=k, rounds=rows.rounds
            )
            if leaf.grad is None:
                raise StrettoError(
                    f"round {k} of {rows.rounds} had no backward",
                    hint="call loss.backward() inside the loop over rounds()",
                )
            if x.requires_grad:
                returned.append(rows.start_return(k, leaf.grad))
        for end in returned:
            end()
        if x.requires_grad:
            x.backward(rows.gradient)

    def _compute(self, batch: Tensor, rows: _Rows, k: int) -> Tensor:
        with self._samples_of(rows.of_round(k)):
            return cast(Tensor, self._finish(super().forward(batch)))

    @contextmanager
    def _samples_of(self, rows: Tensor) -> Generator[None]:
        """Within this context dropout has the keys of these samples only."""
        keys = list[DropoutKeys]({m.keys for m in self.modules() if isinstance(m, KeyedDropout) and m.active})
        before = [dropout_keys.samples for dropout_keys in keys]
        try:
            for dropout_keys in keys:
                dropout_keys.samples = [dropout_keys.samples[row] for row in rows.tolist()]
            yield
        finally:
            for dropout_keys, samples in zip(keys, before, strict=True):
                dropout_keys.samples = samples


def _gathered(rows: _Rows) -> Iterator[tuple[int, Tensor]]:
    """Yield each round's index and rows, while those of the next are in transit."""
    following = rows.start(0)
    for k in range(rows.rounds):
        batch, work = following
        work.wait()
        if k + 1 < rows.rounds:
            following = rows.start(k + 1)
        yield k, batch


class _Rounds(torch.autograd.Function):
    """Runs all rounds' forwards; the backward runs each round's graph while the previous gradient is in
    transit.

    The parameters are inputs so that the output requires a gradient if they do; their gradients are
    accumulated by the rounds' backwards.
    """

    @staticmethod
    def forward(ctx: Any, module: InRounds, rows: _Rows, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.rows, ctx.graphs = rows, []
        ctx.parameters = len(parameters)
        outputs = list[Tensor]()
        for k, batch in _gathered(rows):
            leaf = batch.requires_grad_(ctx.needs_input_grad[2])
            with torch.enable_grad():
                output = module._compute(leaf, rows, k)
            outputs.append(output.detach())
            ctx.graphs.append((leaf, output))
        return rows.ordered(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        rows: _Rows = ctx.rows
        graphs, ctx.graphs = ctx.graphs, None
        returned = list[Callable[[], object]]()
        for k, gradient in enumerate(rows.cut(grads[0])):
            leaf, output = graphs[k]
            graphs[k] = None
            torch.autograd.backward(output, gradient)
            if leaf.requires_grad:
                assert leaf.grad is not None
                returned.append(rows.start_return(k, leaf.grad))
        for end in returned:
            end()
        return (None, None, rows.gradient, *[None] * ctx.parameters)


@cache
def _class_in_rounds(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{kind.__name__}InRounds", (InRounds, kind), {})


def in_rounds(module: nn.Module, group: ProcessGroup, schedule: Schedule) -> nn.Module:
    """Convert a module to be called with this rank's rows, in place."""
    module.__class__ = _class_in_rounds(type(module))
    assert isinstance(module, InRounds)
    module._group, module._schedule = group, schedule
    module._finish = _as_it_is
    return module


def finish_rounds(module: nn.Module, convert: Callable[[Any], Any]) -> None:
    """Set the conversion of each round's output to the full tensor."""
    assert isinstance(module, InRounds)
    module._finish = convert


def _as_it_is(output: Any) -> Any:
    return output
