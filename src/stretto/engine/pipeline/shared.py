"""Tied parameters, and gradient sums besides data parallelism: over tied parameters, copies of a stage, and
partial slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from stretto.engine.parallel.collectives import all_sum, start_sum
from stretto.engine.parallel.data.gradients import GradientBuffer
from stretto.engine.parallel.data.reduction import same_place
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import ShardedParameter, SharedSlice
from stretto.engine.pipeline.skips import Stage
from stretto.errors import StrettoError
from stretto.program.program import Program


@dataclass(frozen=True)
class Tie:
    """One parameter that several layers share: one tensor in the plain model, and a copy on each rank that
    holds one of these layers.
    """

    uses: tuple[tuple[int, str], ...]  # (layer, name in the layer), in model order

    def stages(self, cut: Sequence[range]) -> tuple[int, ...]:
        """Return the stages that hold the parameter."""
        return tuple(s for s, layers in enumerate(cut) if any(layer in layers for layer, _ in self.uses))


def find_ties(layers: Sequence[nn.Module]) -> list[Tie]:
    """Return every parameter that several layers share; these must still be the same tensors."""
    uses = dict[int, list[tuple[int, str]]]()
    for at, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            uses.setdefault(id(parameter), []).append((at, name))
    return [Tie(tuple(places)) for places in uses.values() if len(places) > 1]


Reduced = Callable[[nn.Parameter], tuple[Tensor, int] | None]


@dataclass(frozen=True)
class PartialGradient:
    """A slice of a parameter's gradient to which several ranks contribute."""

    parameter: nn.Parameter
    slice: SharedSlice

    def view(self, reduced: Reduced | None = None) -> Tensor:
        """Return the slice of the gradient, or this rank's part if data-parallel ranks shard the gradient."""
        part = None if reduced is None else reduced(self.parameter)
        if part is None or len(part[0]) == self.parameter.numel():
            gradient = self.parameter.grad if part is None else part[0].view(self.parameter.shape)
            assert gradient is not None
            if not gradient.dim():
                return gradient
            return gradient.narrow(self.slice.dim, self.slice.start, self.slice.size)
        assert self.slice.dim == 0, "a gradient split over ranks is split by rows"
        flat, first = part
        row = self.parameter.numel() // self.parameter.shape[0]
        low = min(max(self.slice.start * row - first, 0), len(flat))
        high = min(max((self.slice.start + self.slice.size) * row - first, low), len(flat))
        return flat[low:high]


def sum_partial(parts: Sequence[PartialGradient], reduced: Reduced | None = None) -> None:
    """Sum each slice over its group, with one all-reduce for all gradients of a group and dtype. Collective.

    Args:
        parts: the same slices in the same order on all ranks of a group.
        reduced: returns the gradient of a parameter if it is not in `grad`.
    """
    together = dict[tuple[int, torch.dtype], tuple[ProcessGroup, list[Tensor]]]()
    for part in parts:
        view = part.view(reduced)
        if not view.numel():
            continue
        group = part.slice.group
        together.setdefault((id(group), view.dtype), (group, []))[1].append(view)
    started = list[tuple[list[Tensor], Tensor, Work]]()
    for group, views in together.values():
        single = len(views) == 1 and views[0].is_contiguous()
        flat = views[0].view(-1) if single else torch.cat([view.reshape(-1) for view in views])
        started.append((views, flat, start_sum(flat, group)))
    for views, flat, work in started:
        work.wait()
        if not same_place(flat, views[0]):
            for view, summed in zip(views, flat.split([v.numel() for v in views]), strict=True):
                view.copy_(summed.view_as(view))


def sum_gradients(model: nn.Module, table: Mapping[str, ShardedParameter]) -> None:
    """Sum the gradients to which several ranks contribute, as with BatchParallel style: once a step, after
    the last backward and before clipping. Collective over the tp ranks.

    Args:
        table: result of `parallelize` for the model.

    Raises:
        StrettoError: no such parameter has a `grad`.
    """
    shared = [
        (p, shared_slice) for name, p in model.named_parameters() for shared_slice in table[name].shared
    ]
    parts = [PartialGradient(p, shared_slice) for p, shared_slice in shared if p.grad is not None]
    if shared and not parts:
        raise StrettoError(
            "sum_gradients: no parameter whose gradient must be summed has a grad",
            hint="call it after backward; of data_parallel's modes it supports 'ddp'",
        )
    sum_partial(parts)


class SharedGradients:
    """Gradients of parameters that several stages hold: tied ones, and those of copies of a stage.
    Collective: all ranks construct it together, since it creates process groups.

    Attributes:
        late: parameters, by id, whose gradients are complete only after all stages of this rank.

    Args:
        cut: layers of each stage of the model.
        stages: stages of this rank, by index.
    """

    def __init__(
        self,
        program: Program,
        cut: Sequence[range],
        ties: Sequence[Tie],
        stages: Mapping[int, Stage],
        mesh: Mesh,
    ) -> None:
        self.program = program
        self.cut = cut
        self.stages = stages
        self.ties = ties
        self.late = dict[int, nn.Parameter]()
        self._groups = dict[tuple[int, ...], ProcessGroup | None]()
        self._sums = self._tied(mesh)
        self._copies = self._copied(mesh)

    def copies_elsewhere(self, rank: int) -> list[nn.Parameter]:
        """Return this rank's parameters whose first copy is on another rank, which counts and saves them."""
        copies = list[nn.Parameter]()
        first = {s % self.program.depth for s in self.stages if s < self.program.depth}
        for s, stage in self.stages.items():
            if s % self.program.depth not in first:
                copies.extend(p for p in stage.parameters() if id(p) not in self._tied_here())
        for tie in self.ties:
            home = tie.stages(self.cut)[0]
            if self.program.placement[home] != rank:
                copies.extend(self._parameter(tie, s) for s in self._places(tie) if s in self.stages)
        return copies

    def sum(self, buffers: Mapping[int, GradientBuffer]) -> None:
        """Sum the shared gradients over their stages, after the data-parallel reductions are done."""
        for buffer in buffers.values():
            buffer.flush()
            buffer.wait()
        for parameter, group in self._sums:
            parts = (buffer.reduced(parameter) for buffer in buffers.values())
            all_sum(next(part for part in parts if part is not None)[0], group)
        for stage, group in self._copies:
            for flat in buffers[stage].flats:
                all_sum(flat, group)

    def tied(self) -> frozenset[int]:
        """Return the ids of this rank's tied parameters. Each gets a separate unit on all ranks that share
        it, so that its gradient has the same shape on all of them.
        """
        return frozenset(self._tied_here())

    def _tied_here(self) -> set[int]:
        return {id(self._parameter(t, s)) for t in self.ties for s in self._places(t) if s in self.stages}

    def _places(self, tie: Tie) -> list[int]:
        """Return the stages that hold the tied parameter, in all copies of the model."""
        depth = self.program.depth
        return [copy * depth + s for copy in range(self.program.copies) for s in tie.stages(self.cut)]

    def _parameter(self, tie: Tie, stage: int) -> nn.Parameter:
        layers = self.cut[stage % self.program.depth]
        layer, name = next((layer, name) for layer, name in tie.uses if layer in layers)
        return self.stages[stage][layer - layers.start].get_parameter(name)

    def _group(self, stages: Sequence[int], mesh: Mesh) -> ProcessGroup | None:
        holders = tuple(sorted({self.program.placement[s] for s in stages}))
        if len(holders) > 1 and holders not in self._groups:
            self._groups[holders] = mesh.pair_group(holders)
        return self._groups.get(holders)

    def _tied(self, mesh: Mesh) -> list[tuple[nn.Parameter, ProcessGroup]]:
        """Return (parameter, group) of every tied sum of this rank, in the same order on all ranks."""
        sums = list[tuple[nn.Parameter, ProcessGroup]]()
        for tie in self.ties:
            stages = self._places(tie)
            if len(tie.stages(self.cut)) < 2:
                continue  # tied inside one stage: autograd sums it
            group, local_stages = self._group(stages, mesh), [s for s in stages if s in self.stages]
            if not local_stages:
                continue
            parameter = self._parameter(tie, local_stages[0])
            # the sum over a stage's copies must not include it again
            if len(local_stages) > 1 or self.program.copies > 1:
                self.late[id(parameter)] = parameter
            if group is not None and parameter.requires_grad:
                sums.append((parameter, group))
        return sums

    def _copied(self, mesh: Mesh) -> list[tuple[int, ProcessGroup]]:
        """Return (stage, group) of every stage of this rank whose copies are on other ranks."""
        copied, depth = list[tuple[int, ProcessGroup]](), self.program.depth
        if self.program.copies == 1:
            return copied
        for s in range(depth):
            stages = [copy * depth + s for copy in range(self.program.copies)]
            if len({self.program.placement[stage] for stage in stages}) < len(stages):
                raise StrettoError(
                    f"two copies of stage {s} are on one rank",
                    hint="put every copy of a stage on another rank",
                )
            group = self._group(stages, mesh)
            copied.extend((stage, group) for stage in stages if stage in self.stages and group is not None)
        return copied
