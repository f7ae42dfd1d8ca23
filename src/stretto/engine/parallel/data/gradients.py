"""Gradient buckets of a stage, reduced over data-parallel ranks while the backward still runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from stretto.engine.parallel.data.reduction import Reduction, one_group, reduce_to, reduce_to_first
from stretto.engine.parallel.data.unit import FlatParameter
from stretto.engine.parallel.tensor.linear import AccumulatesOwnGradients
from stretto.engine.parallel.tensor.vocabulary import VocabParallelEmbedding

BUCKET_BYTES = 25 * 2**20
MAX_IN_FLIGHT = 2  # reductions in flight at once, each of which holds memory


class FlatGradient:
    """The gradient of one unit.

    Attributes:
        flat: the unsharded gradient, in which microbatches accumulate; every `parameter.grad` is a view of
            it. None if every microbatch is reduced.
        frees_after_reduce: the unsharded gradient is allocated only from a step's first backward to its
            reduction, and this rank's part of it from then to the next step.
        accumulated: this rank's part, if it has separate memory.
        part: reduced gradient of the elements that this rank's optimiser updates; empty without states.
        parts: views of `part`, for each parameter in the shape of its `ParameterFragment.parameter`.
        norms: norm of each parameter's gradient on this rank, taken before a reduction overwrites it, or None
            if no other rank shares the parameters.
    """

    def __init__(
        self, unit: FlatParameter, dtype: torch.dtype, per_microbatch: bool, persistent: bool
    ) -> None:
        """
        Args:
            dtype: type in which gradients accumulate.
            per_microbatch: every microbatch is reduced.
            persistent: the unsharded gradient stays allocated although it is sharded.
        """
        self.unit, self.dtype = unit, dtype
        groups = unit.groups
        shared = groups.sizes.gradients > 1
        self.per_microbatch = per_microbatch and shared
        self.frees_after_reduce = shared and not self.per_microbatch and not persistent
        self.flat = None if self.per_microbatch else self._new(unit.size)
        low, high = groups.span(unit.size, 2)
        self.norms: Tensor | None = None
        self.accumulated = (
            self._new(high - low) if shared and (self.per_microbatch or self.frees_after_reduce) else None
        )
        start, stop = groups.span(unit.size, 3)
        self._full_part = (
            self.flat[start:stop] if self.accumulated is None and self.flat is not None else None
        )
        self._last = (
            self.accumulated[start - low : stop - low] if self.accumulated is not None else self._full_part
        )
        assert self._last is not None
        self.part = self._last[: unit.state_span[1] - unit.state_span[0]]
        self.parts = [unit.part(self.part, unit.state_span, at) for at in range(len(unit.parameters))]
        if unit.plain:
            self.parts = [part.view(p.shape) for part, p in zip(self.parts, unit.parameters, strict=True)]
        self.views = list[tuple[nn.Parameter, Tensor | None]]()
        for at, parameter in enumerate(unit.parameters):
            if parameter.dtype != dtype:
                parameter.grad_dtype = dtype  # pyright: ignore[reportAttributeAccessIssue]
            self.views.append((parameter, self._view(at)))
        if self.frees_after_reduce:  # after all views are created: a tensor without memory cannot have any
            _free(self.flat)
            _free(self.accumulated)
        self.set_views()

    def _new(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=self.dtype, device=self.unit.device)

    def _view(self, at: int) -> Tensor | None:
        if self.flat is None:
            return None
        start, parameter = self.unit.starts[at], self.unit.parameters[at]
        return self.flat[start : start + parameter.numel()].view(parameter.shape)

    def set_views(self) -> None:
        """Point every `parameter.grad` into this buffer; `optimizer.zero_grad()` sets them to None."""
        for parameter, view in self.views:
            if parameter.grad is not view:
                parameter.grad = view

    def zero(self) -> None:
        """Zero the gradients at the start of a step."""
        self.norms = None
        if self.frees_after_reduce:
            _free(self.accumulated)
        else:
            for tensor in (self.accumulated, self.flat):
                if tensor is not None:
                    tensor.zero_()
        self.set_views()

    def open(self) -> None:
        """Allocate the unsharded gradient, before the step's first backward."""
        if self.frees_after_reduce and self.flat is not None and not self.flat.untyped_storage().nbytes():
            _allocate(self.flat)
            self.flat.zero_()

    def reduce(self) -> Reduction:
        """Start summing the gradient over the ranks that hold copies of the parameters."""
        unit, groups = self.unit, self.unit.groups
        flat = self._packed() if self.per_microbatch else self.flat
        assert flat is not None
        self._measure(flat)
        if self.per_microbatch:
            return Reduction(reduce_to(flat, groups, 0, 2))
        assert self.flat is not None
        if unit.server and groups.copied is not None:
            return Reduction(reduce_to_first(self.flat, groups.copied))
        if self.frees_after_reduce:
            _allocate(self.accumulated)
            return Reduction(reduce_to(self.flat, groups, 0, 2, self.accumulated))
        return Reduction(reduce_to(self.flat, groups, 0, 4, self._full_part))

    @torch.no_grad()
    def _measure(self, flat: Tensor) -> None:
        """Compute the norms of this rank's gradients; memory-bound, and the host does not wait."""
        sizes = [parameter.numel() for parameter in self.unit.parameters]
        wide = torch.promote_types(self.dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(flat[: sum(sizes)].split(sizes), 2, wide))
        self.norms = norms if self.norms is None else self.norms + norms  # of every microbatch

    def own_bad(self) -> list[nn.Parameter]:
        """Return the parameters whose gradient was not finite on this rank before the reduction."""
        if self.norms is None:
            return [p for p, g in self.views if g is not None and not bool(g.isfinite().all())]
        good = self.norms.isfinite().tolist()
        return [p for p, finite in zip(self.unit.parameters, good, strict=True) if not finite]

    def complete(self) -> Reduction | None:
        """After the step's reductions: start the final one of the step, if gradients are sharded."""
        if self.accumulated is None:
            return None
        if self.frees_after_reduce:
            _free(self.flat)
        return Reduction(reduce_to(self.accumulated, self.unit.groups, 2, 4, self._last))

    def _packed(self) -> Tensor:
        """Return the latest microbatches' gradients as one flat tensor, and clear them from the
        parameters.
        """
        packed = torch.empty(self.unit.size, dtype=self.dtype, device=self.unit.device)
        at = 0
        for parameter in self.unit.parameters:
            place = packed[at : at + parameter.numel()]
            if parameter.grad is None:
                place.zero_()
            else:
                place.copy_(parameter.grad.reshape(-1))
                parameter.grad = None
            at += parameter.numel()
        packed[at:].zero_()
        return packed

    def reduced(self, at: int) -> tuple[Tensor, int]:
        """Return this rank's flat part of a parameter's reduced gradient, and the index of its first
        element.
        """
        span = self.unit.groups.span(self.unit.size, 3)
        return self.unit.part(self.last, span, at), self.unit.inside(at, span)[0]

    @property
    def last(self) -> Tensor:
        """This rank's part of the reduced gradient, even if the rank has no states."""
        assert self._last is not None
        return self._last


def _free(tensor: Tensor | None) -> None:
    """Free the memory; views of the tensor become valid again after the next allocation."""
    if tensor is not None:
        tensor.untyped_storage().resize_(0)


def _allocate(tensor: Tensor | None) -> None:
    if tensor is not None:
        tensor.untyped_storage().resize_(tensor.nbytes)


class GradientBuffer:
    """The gradients of one stage, in units (buckets), in the order in which the backward produces them.

    Gradients are sums over tokens, so reductions sum and nothing is averaged. With one reduction per step,
    microbatches accumulate in place, and once armed a unit is reduced as soon as its last contribution has
    arrived. The number of contributions is counted in the first armed backward, which therefore reduces
    everything at its end. With a reduction per microbatch, a unit is reduced once each of its parameters has
    received a gradient since the last reduction; later contributions go into the next.
    """

    def __init__(
        self,
        units: Sequence[FlatParameter],
        modules: Sequence[nn.Module],
        dtype: torch.dtype | None = None,
        per_microbatch: bool = False,
        persistent: bool = False,
    ) -> None:
        """
        Args:
            modules: the modules that hold the parameters; fused layers among them report the gradients that
                they accumulate outside autograd.
            dtype, per_microbatch, persistent: as in `FlatGradient`; the default type is that of the weights.
        """
        self.gradients = [
            FlatGradient(unit, dtype or unit.dtype, per_microbatch, persistent) for unit in units
        ]
        self.on_reduced: Callable[[FlatParameter], None] | None = None  # see `report_to`
        self._modules, self._hooks = modules, list[RemovableHandle]()
        self._watched = False
        self._of = {
            id(p): (at, i)
            for at, gradient in enumerate(self.gradients)
            for i, p in enumerate(gradient.unit.parameters)
        }
        self._contributions = Counter[int]()  # contributions of each unit in one backward, once counted
        self._calls = [0] * len(self.gradients)  # outstanding in the last backward
        self._missing = [self._all(at) for at in range(len(self.gradients))]
        self._armed = self._counted = False
        self._works: list[tuple[int, Reduction]] = []
        self._launched = 0
        self._finished = False
        if any(unit.groups.copies > 1 for unit in units):
            self._watch()

    def report_to(self, on_reduced: Callable[[FlatParameter], None]) -> None:
        """Call `on_reduced` with each unit whose gradients are complete: reduced, or on one rank added up."""
        self.on_reduced = on_reduced
        self._watch()

    def _watch(self) -> None:
        """Have `_ready` called with each parameter that gets a gradient."""
        if self._watched:
            return
        self._watched, fused = True, set[int]()
        for module in self._modules:
            for layer in module.modules():
                if isinstance(layer, AccumulatesOwnGradients | VocabParallelEmbedding):
                    fused_parameters = [p for p in layer.fused if id(p) in self._of]
                    if fused_parameters:  # all of a layer's parameters are in one stage's buffer
                        layer.on_gradient = self._ready
                    fused.update(id(p) for p in fused_parameters)
        for gradient in self.gradients:
            for parameter in gradient.unit.parameters:
                if id(parameter) not in fused:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._ready))

    def close(self) -> None:
        """Let go of the parameters: Python's garbage collection does not see the hooks that they hold."""
        for hook in self._hooks:
            hook.remove()

    def _all(self, at: int) -> set[int]:
        return {id(p) for p in self.gradients[at].unit.parameters}

    # ------------------------------------------------------------------ while the backward runs

    def _ready(self, parameter: Tensor) -> None:
        place = self._of.get(id(parameter))
        if place is None:
            return
        at = place[0]
        if self.gradients[at].per_microbatch:
            missing = self._missing[at]
            missing.discard(id(parameter))
            if not missing:
                self._reduce_microbatch(at)
        elif self._armed and not self._counted:
            self._contributions[at] += 1
        elif self._armed:
            self._calls[at] -= 1
            if self._calls[at] < 0:
                raise RuntimeError(
                    "a parameter got more gradients than in the first step, after its bucket was reduced"
                )
            self._launch(complete=True)

    def _launch(self, complete: bool) -> None:
        """Start reductions in the same order on all ranks, independent of the order in which units fill."""
        while self._launched < len(self.gradients):
            gradient = self.gradients[self._launched]
            if not gradient.per_microbatch:
                if complete and self._calls[self._launched]:
                    return
                if gradient.unit.groups.copies > 1:
                    self._works.append((self._launched, gradient.reduce()))
                elif gradient.accumulated is None:
                    self._report(gradient.unit)
            self._launched += 1
            while self.on_reduced is not None and len(self._works) > MAX_IN_FLIGHT:
                self._finish(*self._works.pop(0))

    def _reduce_microbatch(self, at: int) -> None:
        self._works.append((at, self.gradients[at].reduce()))
        self._missing[at] = self._all(at)
        while len(self._works) > MAX_IN_FLIGHT:
            self._add(*self._works.pop(0))

    def _add(self, at: int, work: Reduction) -> None:
        accumulated, summed = self.gradients[at].accumulated, work.finish()
        assert accumulated is not None
        accumulated.add_(summed)

    # ------------------------------------------------------------------ the step

    @property
    def flats(self) -> list[Tensor]:
        """The reduced gradients of this rank, as flat tensors."""
        return [gradient.last for gradient in self.gradients]

    def own_bad(self) -> list[nn.Parameter]:
        """Return the parameters whose gradient was not finite on this rank before the reduction. The host
        waits for the device.
        """
        return [parameter for gradient in self.gradients for parameter in gradient.own_bad()]

    @property
    def frees_after_reduce(self) -> bool:
        """True if unsharded gradients are allocated only from a step's first backward to their reduction."""
        return any(gradient.frees_after_reduce for gradient in self.gradients)

    def reduced(self, parameter: nn.Parameter) -> tuple[Tensor, int] | None:
        """Return this rank's flat part of a parameter's reduced gradient and the index of its first element,
        or None for parameters of other buffers.
        """
        place = self._of.get(id(parameter))
        return None if place is None else self.gradients[place[0]].reduced(place[1])

    def zero(self) -> None:
        """Zero the gradients at the start of a step."""
        for gradient in self.gradients:
            gradient.zero()
        self._launched, self._finished = 0, False

    def open(self) -> None:
        """Before the step's first backward: allocate gradients that are freed between steps."""
        for gradient in self.gradients:
            gradient.open()

    def arm(self) -> None:
        """Announce the backward that adds the last contributions of the step."""
        self._armed = True
        for at in range(len(self.gradients)):
            self._calls[at] = self._contributions[at] if self._counted else -1

    def flush(self) -> None:
        """After the last backward: start all remaining reductions."""
        for at, gradient in enumerate(self.gradients):
            if gradient.per_microbatch and any(p.grad is not None for p in gradient.unit.parameters):
                self._reduce_microbatch(at)
        self._launch(complete=False)
        self._counted = self._counted or self._armed
        self._armed = False

    def wait(self) -> None:
        """Wait for every reduction."""
        while self._works:
            self._finish(*self._works.pop(0))
        if self._launched == len(self.gradients) and not self._finished:
            self._finished = True
            started = [(gradient.unit, gradient.complete()) for gradient in self.gradients]
            for unit, work in started:
                if work is not None:
                    work.finish()
                    self._report(unit)

    def _finish(self, at: int, work: Reduction) -> None:
        """Wait for a reduction, which is the unit's last one if gradients are not sharded."""
        gradient = self.gradients[at]
        if gradient.per_microbatch:
            self._add(at, work)
            return
        work.finish()
        if gradient.accumulated is None:
            self._report(gradient.unit)

    def _report(self, unit: FlatParameter) -> None:
        if self.on_reduced is not None:
            self.on_reduced(unit)


Groups = Callable[[nn.Parameter], ProcessGroup | None]


def cut_units(
    parameters: Sequence[nn.Parameter],
    make: Callable[[list[nn.Parameter]], FlatParameter],
    key: Callable[[nn.Parameter], object],
    bucket_bytes: int = BUCKET_BYTES,
    alone: frozenset[int] = frozenset(),
) -> list[FlatParameter]:
    """Group parameters into units, last parameters first: the order of the backward.

    Args:
        parameters: parameters in model order.
        key: only parameters with the same key may share a unit; units are in the order of their completion.
        bucket_bytes: size at which a unit is complete; a parameter is never split between units.
        alone: ids of parameters that each get a separate unit.
    """
    open_units, groups = dict[object, tuple[list[nn.Parameter], int]](), list[list[nn.Parameter]]()
    for parameter in reversed(parameters):
        if id(parameter) in alone:
            groups.append([parameter])
            continue
        members, size = open_units.get(key(parameter), ([], 0))
        members.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= bucket_bytes:
            groups.append(members)
            open_units.pop(key(parameter), None)
        else:
            open_units[key(parameter)] = members, size
    groups += [members for members, _ in open_units.values()]
    return [make(members) for members in groups]


def buffer_of(
    parameters: Sequence[nn.Parameter],
    modules: Sequence[nn.Module],
    group_of: Groups,
    bucket_bytes: int = BUCKET_BYTES,
) -> GradientBuffer:
    """Return the buffer of plain data parallelism: unsharded gradients on every rank, summed once a step.

    Args:
        group_of: returns the group over which a parameter's gradient is summed.
    """

    def make(members: list[nn.Parameter]) -> FlatParameter:
        return FlatParameter(members, one_group(group_of(members[0])))

    def key(parameter: nn.Parameter) -> object:
        return id(group_of(parameter)), parameter.dtype, parameter.device

    return GradientBuffer(cut_units(parameters, make, key, bucket_bytes), modules)
