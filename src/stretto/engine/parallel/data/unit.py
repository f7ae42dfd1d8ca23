"""Parameters of one stage in one flat tensor, of which ranks hold parts."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor, nn

from stretto.engine.offload.shard_store import ShardStore
from stretto.engine.parallel.collectives import Pending, start_gather_into
from stretto.engine.parallel.data.reduction import ShardGroups
from stretto.engine.parallel.fragment import Fragment, Placed
from stretto.layout.shards import padded


class Unit:
    """Some parameters, one after the other, that are reduced, updated and gathered together.

    Attributes:
        parameters, starts: in order, and where each begins.
        size: of the whole, padded so that it divides.
        groups: who holds which part.
        flat: gradients aside, all weights, of which the parameters are views; None where parameters keep
            memory of their own, since nothing of them is split and nothing else holds their values.
        shard: this rank's part of the weights, which lasts; a view of `flat` where that is all of them;
            None where it is in a store.
        held: what the optimiser updates: for each parameter its elements in this rank's part, a view of
            `shard` where that has the optimiser's type; the parameters themselves where nothing is split.
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
            parameters: of one type on one device, in the order in which the backward makes their gradients.
            master: type that the optimiser works in; by default the parameters' own.
            host: the optimiser works in host memory, and masters are there.
            server: the first of the copies alone has states.
        """
        self.parameters = list(parameters)
        self.groups = groups or ShardGroups()
        self.server = server and self.groups.copies > 1
        first = self.parameters[0]
        self.dtype, self.device = first.dtype, first.device
        self.starts, at = list[int](), 0
        for parameter in self.parameters:
            assert parameter.dtype == self.dtype, "a unit has one type"
            self.starts.append(at)
            at += parameter.numel()
        self.size = padded(at, self.groups.sizes.states)
        self._apart = host or (master is not None and master != self.dtype)
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
        """Whether a rank holds only a part of the weights for long."""
        return self.groups.sizes.parameters > 1

    @property
    def plain(self) -> bool:
        """Whether the optimiser works on the parameters themselves."""
        return self.groups.sizes.whole and not self._apart and not self.server

    @property
    def state_span(self) -> tuple[int, int]:
        """What this rank's optimiser updates."""
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
        """Make what lasts, but for what the optimiser holds apart (`begin`); the parameters become views of
        it. Their values are lost.

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
            self._apart, self.store = True, store
            store.add(number, self.shard)
            self.shard = None
        self.release()

    def begin(self) -> None:
        """Make what the optimiser updates."""
        if self.plain:
            return
        start, stop = self.state_span
        if self._apart:
            device = torch.device("cpu") if self._host else self.device
            pin = self._host and self.device.type == "cuda"
            part = torch.zeros(stop - start, dtype=self._master_dtype, device=device, pin_memory=pin)
        else:
            assert self.shard is not None
            low = self.groups.span(self.size, 1)[0]
            part = self.shard[start - low : stop - low]
        self.held = [
            nn.Parameter(elements, parameter.requires_grad)
            for elements, parameter in zip(self._parts(part, (start, stop)), self.parameters, strict=True)
        ]

    def _parts(self, flat: Tensor, span: tuple[int, int]) -> list[Tensor]:
        """What of each parameter lies in the span, of which `flat` has the elements."""
        return [self.part(flat, span, at) for at in range(len(self.starts))]

    def part(self, flat: Tensor, span: tuple[int, int], at: int) -> Tensor:
        """What of one parameter lies in the span, of which `flat` has the elements."""
        low, high = self.inside(at, span)
        begin = self.starts[at] + low - span[0] if high > low else 0
        return flat[begin : begin + high - low]

    @torch.no_grad()
    def load(self, values: Sequence[Tensor]) -> None:
        """Take initial values, one for each parameter, of any type."""
        if self.plain:
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.copy_(value)
            return
        whole = torch.zeros(self.size, dtype=self._master_dtype, device=self.device)
        for start, value in zip(self.starts, values, strict=True):
            whole[start : start + value.numel()].copy_(value.reshape(-1))
        low, high = self.groups.span(self.size, 1)
        self._blank().copy_(whole[low:high])
        if self._apart:
            start, stop = self.state_span
            for held, part in zip(self.held, self._parts(whole[start:stop], self.state_span), strict=True):
                held.copy_(part)
        if self.store is not None:
            self.store.put(self.number)

    def _blank(self) -> Tensor:
        """This rank's part, to be written anew."""
        if self.store is not None:
            return self.store.blank(self.number)
        assert self.shard is not None
        return self.shard

    def _bind(self) -> None:
        assert self.flat is not None
        for start, parameter in zip(self.starts, self.parameters, strict=True):
            parameter.data = self.flat[start : start + parameter.numel()].view(parameter.shape)

    def renew(self) -> None:
        """Go on in new memory with the same values; what refers to the old keeps it."""
        assert not self.split, "weights with versions are whole"
        if self.plain:
            for parameter in self.parameters:
                parameter.data = parameter.data.clone()
            return
        assert self.flat is not None
        self.flat = self.shard = self.flat.clone()
        self._bind()
        if not self._apart:
            start, stop = self.state_span
            parts = self._parts(self.flat[start:stop], self.state_span)
            for held, part in zip(self.held, parts, strict=True):
                held.data = part

    # ------------------------------------------------------------------ after an update

    @torch.no_grad()
    def take(self) -> None:
        """The optimiser has updated what it holds: round it to the weights of this rank's part."""
        if not self._apart:
            return
        start, stop = self.state_span
        low = self.groups.span(self.size, 1)[0]
        parts = self._parts(self._blank()[start - low : stop - low], self.state_span)
        for held, part in zip(self.held, parts, strict=True):
            part.copy_(held, non_blocking=True)

    def publish(self) -> None:
        """After `take`: start bringing the weights to all who hold them."""
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
        """Wait until the weights that this rank holds are those of the last update."""
        while self._coming is not None:
            self._coming.wait()
            self._coming = next(self._steps, None)

    # ------------------------------------------------------------------ parameters that are split

    @property
    def gathered(self) -> bool:
        """Whether all weights are here, or on their way."""
        return self._gathered

    def read_ahead(self) -> None:
        """This rank's part will be gathered soon."""
        if self.store is not None and not self._gathered:
            self.store.start_fetch(self.number)

    def gather(self) -> None:
        """Start bringing all weights here."""
        if not self._gathered:
            self.ready()
            self._gathered = True
            self._start(self._bring())
            if self.store is not None:  # whose memory for parts in use is small
                self.ready()

    def _bring(self) -> Generator[Pending]:
        group = self.groups.levels[0]
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
        self, names: Sequence[str], places: Sequence[Placed], elsewhere: Sequence[bool], number: int
    ) -> list[Fragment]:
        """One for each parameter; `gradient` is not set."""
        fragments = list[Fragment]()
        for at, (name, placed, away) in enumerate(zip(names, places, elsewhere, strict=True)):
            if not self.plain:
                placed = placed.part(tuple(self.parameters[at].shape), *self.inside(at, self.state_span))
            fragments.append(
                Fragment(
                    name=name,
                    parameter=self.held[at],
                    placed=placed,
                    gradient=None,
                    holders=self.groups.holders,
                    elsewhere=away,
                    unit=number,
                )
            )
        return fragments
