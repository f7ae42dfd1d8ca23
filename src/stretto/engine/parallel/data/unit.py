"""A unit: parameters of one stage in one flat tensor, sharded, reduced and gathered together."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from stretto.engine.device import on_accelerator
from stretto.engine.offload.shard_store import ShardStore
from stretto.engine.parallel.collectives import Pending, start_gather_into
from stretto.engine.parallel.data.reduction import ShardGroups
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement
from stretto.layout.shards import ShardSizes, padded


class FlatParameter:
    """Parameters laid out one after the other, that are reduced, updated and gathered together.

    Attributes:
        parameters, starts: in order, and the offset of each.
        size: of the whole, padded to divide evenly.
        groups: which rank holds which part.
        flat: all weights, of which the parameters are views; None where the parameters keep their memory,
            since nothing is split and there are no masters.
        shard: this rank's part of the weights, which stays allocated; a view of `flat` where that is all of
            them; None where it is in a store.
        held: what the optimiser updates, and checkpoints hold: for each parameter its elements in this rank's
            part, a view of `shard` where that has the optimiser's dtype; the parameters themselves where
            nothing is split.
        frozen: the parameters are not trained: no part of the unit is a gradient, a master or a state.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        groups: ShardGroups | None = None,
        master: torch.dtype | None = None,
        host: bool = False,
        server: bool = False,
    ) -> None:
        """
        Args:
            parameters: of one dtype on one device, in the order in which the backward makes their gradients;
                all trained or all frozen. Of frozen ones only the weights are split, and the arguments below
                are ignored.
            master: dtype that the optimiser works in; by default that of the parameters.
            host: the optimiser works in host memory, and masters are there.
            server: the first of the copies alone has states.
        """
        self.parameters = list(parameters)
        self.groups = groups or ShardGroups()
        first = self.parameters[0]
        self.frozen = not first.requires_grad
        if self.frozen:
            self.groups = _of_weights(self.groups)
            master, host = None, False
        self.server = server and self.groups.copies > 1 and not self.frozen
        self.dtype, self.device = first.dtype, first.device
        self.starts, at = list[int](), 0
        for parameter in self.parameters:
            assert parameter.dtype == self.dtype, "a unit has one type"
            assert parameter.requires_grad is not self.frozen, "a unit is trained or frozen"
            self.starts.append(at)
            at += parameter.numel()
        self.size = padded(at, self.groups.sizes.states)
        self._has_master = host or (master is not None and master != self.dtype)
        self._master_dtype, self._host = master or self.dtype, host
        self.flat: Tensor | None = None
        self.shard: Tensor | None = None
        self.held: list[nn.Parameter] = self.parameters
        self.store: ShardStore | None = None
        self.number = 0
        self._steps: Generator[Pending] = iter(())  # pyright: ignore[reportAttributeAccessIssue]
        self._coming: Pending | None = None
        self._gathered = True

    # ------------------------------------------------------------------ parts

    @property
    def split(self) -> bool:
        """Whether a rank keeps only a part of the weights between uses."""
        return self.groups.sizes.parameters > 1

    @property
    def plain(self) -> bool:
        """Whether the optimiser works on the parameters themselves."""
        return self.groups.sizes.whole and not self._has_master and not self.server

    @property
    def state_span(self) -> tuple[int, int]:
        """The elements [start, stop) that this rank's optimiser updates."""
        if self.server and self.groups.rank:
            return 0, 0
        return self.groups.span(self.size, 3)

    def inside(self, index: int, span: tuple[int, int]) -> tuple[int, int]:
        """Elements of a parameter, counted from its own start, that lie in a span of the unit."""
        start, size = self.starts[index], self.parameters[index].numel()
        low = min(max(span[0] - start, 0), size)
        return low, max(low, min(span[1] - start, size))

    # ------------------------------------------------------------------ memory

    def allocate(self, store: ShardStore | None = None, number: int = 0) -> None:
        """Allocate the weights, of which the parameters become views; their values are lost. Masters come
        with `begin`.

        Args:
            store: where this rank's part is between uses, under the unit's number; None: here.
        """
        self.number = number
        if self.plain:
            for parameter in self.parameters:
                storage = parameter.untyped_storage()
                if storage.nbytes() < parameter.nbytes:
                    storage.resize_(parameter.nbytes)
            return
        self.flat = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        self._bind()
        low, high = self.groups.span(self.size, 1)
        self.shard = self.flat.new_zeros(high - low) if self.split else self.flat
        if store is not None and self.split:
            self._has_master, self.store = not self.frozen, store
            store.add(number, self.shard)
            self.shard = None
        self.release()

    def begin(self) -> None:
        """Make what the optimiser updates."""
        if self.plain:
            return
        start, stop = self.state_span
        if self.store is not None and self.frozen:
            self._hold(self.store.parts(self.number, [self._local(at) for at in range(len(self.starts))]))
            return
        if self._has_master:
            device = torch.device("cpu") if self._host else self.device
            pin = self._host and on_accelerator(self.device)
            part = torch.zeros(stop - start, dtype=self._master_dtype, device=device, pin_memory=pin)
        else:
            assert self.shard is not None
            low = self.groups.span(self.size, 1)[0]
            part = self.shard[start - low : stop - low]
        self._hold(self._parts(part, (start, stop)))

    def _hold(self, parts: Sequence[Tensor]) -> None:
        self.held = [nn.Parameter(part, not self.frozen) for part in parts]

    def _parts(self, flat: Tensor, span: tuple[int, int]) -> list[Tensor]:
        """Of each parameter the elements inside the span, which `flat` covers."""
        return [self.part(flat, span, at) for at in range(len(self.starts))]

    def part(self, flat: Tensor, span: tuple[int, int], at: int) -> Tensor:
        """Of one parameter the elements inside the span, which `flat` covers."""
        return flat[slice(*self._local(at, span))]

    def _local(self, at: int, span: tuple[int, int] | None = None) -> tuple[int, int]:
        """Where a parameter's elements inside a span of the unit begin and end in it; by default in the span
        that this rank's optimiser updates.
        """
        span = span or self.state_span
        low, high = self.inside(at, span)
        begin = self.starts[at] + low - span[0] if high > low else 0
        return begin, begin + high - low

    @torch.no_grad()
    def load(self, values: Sequence[Tensor]) -> None:
        """Set initial values: a whole tensor of any dtype for each parameter."""
        if self.plain:
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.copy_(value)
            return
        whole = torch.zeros(self.size, dtype=self._master_dtype, device=self.device)
        for start, value in zip(self.starts, values, strict=True):
            whole[start : start + value.numel()].copy_(value.reshape(-1))
        low, high = self.groups.span(self.size, 1)
        self._blank().copy_(whole[low:high])
        if self._has_master:
            start, stop = self.state_span
            for held, part in zip(self.held, self._parts(whole[start:stop], self.state_span), strict=True):
                held.copy_(part)
        if self.store is not None:
            self.store.put(self.number)

    def _blank(self) -> Tensor:
        """Memory for this rank's part, to be overwritten."""
        if self.store is not None:
            return self.store.blank(self.number)
        assert self.shard is not None
        return self.shard

    def _bind(self) -> None:
        assert self.flat is not None
        for start, parameter in zip(self.starts, self.parameters, strict=True):
            parameter.data = self.flat[start : start + parameter.numel()].view(parameter.shape)

    def recreate_storage(self) -> None:
        """Move to new memory with the same values; older weight versions keep the old memory."""
        assert not self.split, "weights with versions are whole"
        if self.plain:
            for parameter in self.parameters:
                parameter.data = parameter.data.clone()
            return
        assert self.flat is not None
        self.flat = self.shard = self.flat.clone()
        self._bind()
        if not self._has_master:
            start, stop = self.state_span
            parts = self._parts(self.flat[start:stop], self.state_span)
            for held, part in zip(self.held, parts, strict=True):
                held.data = part

    # ------------------------------------------------------------------ after an update

    @torch.no_grad()
    def take(self) -> None:
        """After the optimiser's update: copy masters to this rank's part of the weights, rounding."""
        if not self._has_master:
            return
        start, stop = self.state_span
        low = self.groups.span(self.size, 1)[0]
        parts = self._parts(self._blank()[start - low : stop - low], self.state_span)
        for held, part in zip(self.held, parts, strict=True):
            part.copy_(held, non_blocking=True)

    def publish(self) -> None:
        """After `take`: start sending the updated weights to all ranks that hold them."""
        if self.plain:
            return
        shard = self._blank()
        self._start(self._spread(shard))
        if self.store is not None:
            self.ready()
            self.store.put(self.number)

    def _spread(self, shard: Tensor) -> Generator[Pending]:
        low = self.groups.span(self.size, 1)[0]
        if self.server and self.groups.copied is not None:
            yield self.groups.copied.broadcast([shard])
        for level in (2, 1):
            group = self.groups.levels[level]
            if group is not None:
                start, stop = self.groups.span(self.size, level + 1)
                begin, end = self.groups.span(self.size, level)
                yield start_gather_into(
                    shard[begin - low : end - low], shard[start - low : stop - low], group
                )

    def _start(self, steps: Generator[Pending]) -> None:
        self._steps, self._coming = steps, next(steps, None)

    def ready(self) -> None:
        """Wait for the weights of the last update, or for a gather."""
        while self._coming is not None:
            self._coming.wait()
            self._coming = next(self._steps, None)

    # ------------------------------------------------------------------ parameters that are split

    @property
    def gathered(self) -> bool:
        """Whether all weights are on this rank, or being gathered."""
        return self._gathered

    def read_ahead(self) -> None:
        """Prefetch this rank's part from the store, before a gather."""
        if self.store is not None and not self._gathered:
            self.store.start_fetch(self.number)

    def gather(self) -> None:
        """Start the all-gather of the weights."""
        if not self._gathered:
            self.ready()
            self._gathered = True
            self._start(self._bring())
            if self.store is not None:  # frees the store's few slots for the next unit at once
                self.ready()

    def _bring(self) -> Generator[Pending]:
        group = self.groups.gathers
        assert self.flat is not None
        assert group is not None
        shard = self.shard if self.store is None else self.store.fetch(self.number)
        assert shard is not None
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        yield start_gather_into(self.flat, shard, group)
        if self.store is not None:
            self.store.release(self.number)

    def release(self) -> None:
        """Keep this rank's part only."""
        if self.split and self._gathered:
            self.ready()
            assert self.flat is not None
            self.flat.untyped_storage().resize_(0)
            self._gathered = False

    # ------------------------------------------------------------------ what the optimiser sees

    def fragments(
        self, names: Sequence[str], places: Sequence[ShardPlacement], elsewhere: Sequence[bool], number: int
    ) -> list[ParameterFragment]:
        """A fragment for each parameter; `gradient` is not set."""
        fragments = list[ParameterFragment]()
        for at, (name, placed, away) in enumerate(zip(names, places, elsewhere, strict=True)):
            if not self.plain:
                placed = placed.part(tuple(self.parameters[at].shape), *self.inside(at, self.state_span))
            fragments.append(
                ParameterFragment(
                    name=name,
                    parameter=self.held[at],
                    placed=placed,
                    gradient=None,
                    holders=self.groups.holders,
                    counted_elsewhere=away,
                    unit=number,
                )
            )
        return fragments


def _of_weights(groups: ShardGroups) -> ShardGroups:
    """The same groups where nothing but the weights is split."""
    split = groups.sizes.parameters
    return replace(groups, sizes=ShardSizes(split, split, split), levels=(groups.levels[0], None, None, None))
