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
    """Parameters concatenated in one flat tensor, which are reduced, updated and gathered together.

    Attributes:
        parameters, starts: parameters in order, and the offset of each.
        size: number of elements, padded to divide evenly.
        groups: the groups of ranks that share the unit, with this rank's part.
        flat: all weights, of which the parameters are views, or None if the parameters have separate memory,
            because nothing is sharded and no masters exist.
        shard: this rank's part of the weights, which stays allocated: a view of `flat` if it is all of them,
            or None if it is in a store.
        optimised: tensors that the optimiser updates and checkpoints store: each parameter's elements in this
            rank's part, views of `shard` if that has the optimiser's dtype, or the parameters themselves if
            nothing is sharded.
        frozen: the parameters are not trained: the unit has no gradient, master or state.
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
            parameters: parameters of one dtype on one device, in the order in which the backward computes
                their gradients; all trained or all frozen. For frozen ones only the weights are sharded, and
                the arguments below are ignored.
            master: dtype of the optimiser; by default that of the parameters.
            host: the optimiser and the masters are in host memory.
            server: only the first of the copies has states.
        """
        self.parameters = list(parameters)
        self.groups = groups or ShardGroups()
        first = self.parameters[0]
        self.frozen = not first.requires_grad
        if self.frozen:
            split = self.groups.sizes.parameters
            self.groups = replace(
                self.groups,
                sizes=ShardSizes(split, split, split),
                levels=(self.groups.levels[0], None, None, None),
            )
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
        self.optimised: list[nn.Parameter] = self.parameters
        self.store: ShardStore | None = None
        self.number = 0
        self._steps: Generator[Pending] = iter(())  # pyright: ignore[reportAttributeAccessIssue]
        self._coming: Pending | None = None
        self._gathered = True

    # ------------------------------------------------------------------ parts

    @property
    def split(self) -> bool:
        """True if a rank has only a part of the weights between uses."""
        return self.groups.sizes.parameters > 1

    @property
    def plain(self) -> bool:
        """True if the optimiser updates the parameters themselves."""
        return self.groups.sizes.unsharded and not self._has_master and not self.server

    @property
    def state_span(self) -> tuple[int, int]:
        """The elements [start, stop) that this rank's optimiser updates."""
        if self.server and self.groups.rank:
            return 0, 0
        return self.groups.span(self.size, 3)

    def inside(self, index: int, span: tuple[int, int]) -> tuple[int, int]:
        """Return the range of a parameter's elements, from its own start, inside a span of the unit."""
        start, size = self.starts[index], self.parameters[index].numel()
        low = min(max(span[0] - start, 0), size)
        return low, max(low, min(span[1] - start, size))

    # ------------------------------------------------------------------ memory

    def allocate(self, store: ShardStore | None = None, number: int = 0) -> None:
        """Allocate the weights, of which the parameters become views, discarding their values. `begin`
        creates the masters.

        Args:
            store: store of this rank's part between uses, under the unit's index; by default the unit itself.
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
        """Create the tensors that the optimiser updates."""
        if self.plain:
            return
        start, stop = self.state_span
        if self.store is not None and self.frozen:
            self._set_optimised(
                self.store.parts(self.number, [self._local(at) for at in range(len(self.starts))])
            )
            return
        if self._has_master:
            device = torch.device("cpu") if self._host else self.device
            pin = self._host and on_accelerator(self.device)
            part = torch.zeros(stop - start, dtype=self._master_dtype, device=device, pin_memory=pin)
        else:
            assert self.shard is not None
            low = self.groups.span(self.size, 1)[0]
            part = self.shard[start - low : stop - low]
        self._set_optimised(self._parts(part, (start, stop)))

    def _set_optimised(self, parts: Sequence[Tensor]) -> None:
        self.optimised = [nn.Parameter(part, not self.frozen) for part in parts]

    def _parts(self, flat: Tensor, span: tuple[int, int]) -> list[Tensor]:
        """Return each parameter's elements inside the span that `flat` covers."""
        return [self.part(flat, span, at) for at in range(len(self.starts))]

    def part(self, flat: Tensor, span: tuple[int, int], at: int) -> Tensor:
        """Return one parameter's elements inside the span that `flat` covers."""
        return flat[slice(*self._local(at, span))]

    def _local(self, at: int, span: tuple[int, int] | None = None) -> tuple[int, int]:
        """Return the range of a parameter's elements in a span of the unit; by default in the span that this
        rank's optimiser updates.
        """
        span = span or self.state_span
        low, high = self.inside(at, span)
        begin = self.starts[at] + low - span[0] if high > low else 0
        return begin, begin + high - low

    @torch.no_grad()
    def load(self, values: Sequence[Tensor]) -> None:
        """Set initial values: a full tensor of any dtype for each parameter."""
        if self.plain:
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.copy_(value)
            return
        full_values = torch.zeros(self.size, dtype=self._master_dtype, device=self.device)
        for start, value in zip(self.starts, values, strict=True):
            full_values[start : start + value.numel()].copy_(value.reshape(-1))
        low, high = self.groups.span(self.size, 1)
        self._blank().copy_(full_values[low:high])
        if self._has_master:
            start, stop = self.state_span
            for optimised, part in zip(
                self.optimised, self._parts(full_values[start:stop], self.state_span), strict=True
            ):
                optimised.copy_(part)
        if self.store is not None:
            self.store.put(self.number)

    def _blank(self) -> Tensor:
        """Return memory for this rank's part, to be overwritten."""
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
            for optimised, part in zip(self.optimised, parts, strict=True):
                optimised.data = part

    # ------------------------------------------------------------------ after an update

    @torch.no_grad()
    def copy_masters(self) -> None:
        """After the optimiser's update: copy masters to this rank's part of the weights, rounding."""
        if not self._has_master:
            return
        start, stop = self.state_span
        low = self.groups.span(self.size, 1)[0]
        parts = self._parts(self._blank()[start - low : stop - low], self.state_span)
        for optimised, part in zip(self.optimised, parts, strict=True):
            part.copy_(optimised, non_blocking=True)

    def publish(self) -> None:
        """After `copy_masters`: start sending the updated weights to all ranks that hold them."""
        if self.plain:
            return
        shard = self._blank()
        self._start(self._publish_steps(shard))
        if self.store is not None:
            self.ready()
            self.store.put(self.number)

    def _publish_steps(self, shard: Tensor) -> Generator[Pending]:
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

    # ------------------------------------------------------------------ sharded parameters

    @property
    def gathered(self) -> bool:
        """True if all weights are on this rank, or being gathered."""
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
            self._start(self._gather_steps())
            if self.store is not None:  # frees the store's few slots for the next unit immediately
                self.ready()

    def _gather_steps(self) -> Generator[Pending]:
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
        """Free all but this rank's part."""
        if self.split and self._gathered:
            self.ready()
            assert self.flat is not None
            self.flat.untyped_storage().resize_(0)
            self._gathered = False

    # ------------------------------------------------------------------ the optimiser's view

    def fragments(
        self, names: Sequence[str], places: Sequence[ShardPlacement], elsewhere: Sequence[bool], number: int
    ) -> list[ParameterFragment]:
        """Return a fragment for each parameter; `gradient` is not set."""
        fragments = list[ParameterFragment]()
        for at, (name, placed, away) in enumerate(zip(names, places, elsewhere, strict=True)):
            if not self.plain:
                placed = placed.part(tuple(self.parameters[at].shape), *self.inside(at, self.state_span))
            fragments.append(
                ParameterFragment(
                    name=name,
                    parameter=self.optimised[at],
                    placed=placed,
                    gradient=None,
                    holders=self.groups.holders,
                    counted_elsewhere=away,
                    unit=number,
                )
            )
        return fragments
