"""Sharded data parallelism: parameters, gradients and optimiser states of a rank in any data-parallel mode.

Every stage's parameters are grouped into units (`Unit`), its gradients into the same units
(`GradientBuffer`), and the optimiser updates the `fragments` of units. Sources: Rajbhandari et al. 2019
("ZeRO") for stages 1 to 3; Li et al. 2014 for the parameter server, of which there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stretto.engine.offload.shard_store import ShardStore
from stretto.engine.parallel.data.gradients import BUCKET_BYTES, GradientBuffer, cut_units
from stretto.engine.parallel.data.layer_gather import LayerGather
from stretto.engine.parallel.data.reduction import ShardGroups, shard_groups
from stretto.engine.parallel.data.stage_weights import SHARED, trained_parameters
from stretto.engine.parallel.data.unit import Unit
from stretto.engine.parallel.fragment import Fragment, Placed
from stretto.engine.parallel.mesh import Mesh
from stretto.layout.shards import Mode, ShardSizes
from stretto.spec.data_parallel import Offload


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What a data-parallel mode is made of.

    Attributes:
        sizes: ranks that share parameters, gradients, states.
        master: type that the optimiser works in; None: the weights' own.
        gradients: type that gradients are added up in; None: the weights' own.
        each: every microbatch's gradients are reduced, where ranks share gradients.
        lasting: whole gradients stay through the step, which weights with versions need.
        layers: split parameters are gathered layer by layer; otherwise by whoever calls `gather`.
        host: optimiser states, or files that they are in, belong to the host.
        store: where a rank's part of split parameters is, with `path` as the folder of files.
    """

    mode: Mode = "ddp"
    sizes: ShardSizes = field(default_factory=ShardSizes)
    master: torch.dtype | None = None
    gradients: torch.dtype | None = None
    each: bool = False
    lasting: bool = False
    layers: bool = True
    host: bool = False
    store: Offload = "none"
    path: str | None = None
    bucket_bytes: int = BUCKET_BYTES


class ShardedStates:
    """All units of one rank: the `StageWeights` of every data-parallel mode.

    Args:
        parameters: of this rank by plain name, without memory yet (see `Unit.allocate`).
        places: where each lies in the plain model.

    Attributes:
        stage_update: applies the reduced gradients of a stage, for asynchronous schedules; whoever makes the
            optimisers sets it before the pipeline is made.
    """

    gathers = True

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, nn.Parameter],
        places: Mapping[str, Placed],
        over: Sequence[str] = ("tp",),
        sharing: Sharing | None = None,
    ) -> None:
        """
        Args:
            over: the axes over which parameters of the model are split, the same on all ranks.
        """
        self.mesh = mesh
        self.parameters = dict(parameters)
        self.places = dict(places)
        self.sharing = sharing or Sharing()
        self.groups: dict[str, ShardGroups] = {
            axes: shard_groups(mesh, axes, self.sharing.sizes) for axes in sorted({"tp", *over})
        }
        self.units = dict[int, list[Unit]]()
        self.buffers = dict[int, GradientBuffer]()
        self.fragments: list[Fragment] = []
        self._names = {id(p): name for name, p in self.parameters.items()}
        self._hooks = dict[int, LayerGather]()
        self._numbered = dict[int, Unit]()
        self._gathered_stages = set[int]()
        self.stage_update: Callable[[int], None] | None = None
        self._store = None
        if self.sharing.store != "none":
            self._store = ShardStore(self.sharing.store, mesh.device, self.sharing.path, mesh.rank)

    # ------------------------------------------------------------------ building

    def attach(
        self,
        mesh: Mesh,
        stages: Mapping[int, Sequence[nn.Module]],
        shared: Sequence[nn.Parameter],
        separate: frozenset[int],
    ) -> None:
        """Cut the parameters of all stages into units; see `StageWeights.attach`."""
        assert mesh is self.mesh
        for stage, parameters in trained_parameters(stages, shared).items():
            self.buffer(stage, parameters, stages.get(stage, ()), separate)
        self.watch(stages)

    def buffer(
        self,
        stage: int,
        parameters: Sequence[nn.Parameter],
        layers: Sequence[nn.Module],
        alone: frozenset[int] = frozenset(),
    ) -> GradientBuffer:
        """Group the parameters of a stage into units, and make their gradient buffer.

        Args:
            stage: its number, or SHARED.
            parameters: that are trained, in model order.
            layers: of the stage, in order.
            alone: by id, parameters that each get a separate unit, since other stages share them.
        """
        sharing = self.sharing
        # memory that is allocated and freed within a step goes layer by layer, to keep the peak low
        by_layer = sharing.sizes.parameters > 1 or (sharing.each and sharing.sizes.gradients > 1)
        layer_of = {id(p): at for at, layer in enumerate(layers) for p in layer.parameters()}

        def over(parameter: nn.Parameter) -> str:
            return self.places[self._names[id(parameter)]].over

        def key(parameter: nn.Parameter) -> object:
            layer = layer_of.get(id(parameter)) if by_layer else None
            return over(parameter), parameter.dtype, layer

        def make(members: list[nn.Parameter]) -> Unit:
            groups = self.groups[over(members[0])]
            return Unit(members, groups, sharing.master, sharing.host, sharing.mode == "server")

        most = sys.maxsize if sharing.sizes.parameters > 1 else sharing.bucket_bytes
        units = cut_units(parameters, make, key, most, alone)
        first = sum(map(len, self.units.values()))
        for number, unit in enumerate(units, first):
            unit.allocate(self._store, number)
            self._numbered[number] = unit
        self.units[stage] = units
        self.buffers[stage] = GradientBuffer(units, layers, sharing.gradients, sharing.each, sharing.lasting)
        return self.buffers[stage]

    def watch(self, stages: Mapping[int, Sequence[nn.Module]]) -> None:
        """Hook the layers of all stages, to wait for their weights and gather sharded ones."""
        everywhere = {id(p): unit for units in self.units.values() for unit in units for p in unit.parameters}
        if all(unit.plain for unit in everywhere.values()):
            return
        for stage, layers in stages.items():
            units = [
                list(
                    {
                        id(u): u for p in layer.parameters() if (u := everywhere.get(id(p))) is not None
                    }.values()
                )
                for layer in layers
            ]
            self._hooks[stage] = LayerGather(layers, units, self.sharing.layers)

    def begin(
        self,
        values: Callable[[str], Tensor] | None = None,
        elsewhere: frozenset[int] = frozenset(),
    ) -> Generator[Fragment]:
        """Make what the optimiser updates: lazily, one unit at a time, so that an optimiser with offloaded
        states can move each unit away before the next is made.

        Args:
            values: initial values of this rank's part of a parameter, by plain name; None: a checkpoint
                follows.
            elsewhere: by id, parameters whose first copy is on another rank.
        """
        for stage, units in self.units.items():
            for unit, gradient in zip(units, self.buffers[stage].gradients, strict=True):
                unit.begin()
                names = [self._names[id(p)] for p in unit.parameters]
                if values is not None:
                    unit.load([values(name) for name in names])
                away = [id(p) in elsewhere for p in unit.parameters]
                places = [self.places[name] for name in names]
                fragments = unit.fragments(names, places, away, unit.number)
                for at, fragment in enumerate(fragments):
                    fragment.gradient = gradient.part_of(at)
                self.fragments += fragments
                yield from fragments

    def own_part(self, name: str, full: Tensor) -> Tensor:
        """This rank's part of a plain tensor, padding included, on the CPU."""
        local = torch.empty(self.parameters[name].shape, dtype=full.dtype, device="cpu")
        self.places[name].fill(local, full)
        return local

    # ------------------------------------------------------------------ running

    def take(self, number: int) -> None:
        """After the optimiser updated a unit: copy its masters to the weights, rounding."""
        self.unit(number).take()

    def publish(self, number: int) -> None:
        """After `take`: start sending the weights of a unit to all ranks that hold them."""
        self.unit(number).publish()

    def unit(self, number: int) -> Unit:
        """A unit by its number (`Fragment.unit`)."""
        return self._numbered[number]

    def ready(self) -> None:
        """Wait for all weights that are on their way."""
        for unit in self._all():
            unit.ready()

    def gather(self, stage: int) -> None:
        """Start gathering the weights of a stage."""
        self._gathered_stages.add(stage)
        for unit in self._of(stage):
            unit.gather()

    def await_stage(self, stage: int) -> None:
        """Wait for the weights of a stage."""
        for unit in self._of(stage):
            unit.ready()

    def release(self, stage: int) -> None:
        """Keep only this rank's part of a stage's weights, except units that another stage still uses."""
        self._gathered_stages.discard(stage)
        for unit in self._of(stage) if not self._gathered_stages else self.units[stage]:
            unit.release()

    def end_backward(self, stage: int) -> None:
        """A backward through a stage is done: free what was gathered for it layer by layer."""
        if (hooks := self._hooks.get(stage)) is not None:
            hooks.release()

    def reduce(self, stage: int) -> None:
        """Start the reductions of a stage's gradients that are not under way yet."""
        self.buffers[stage].flush()

    @property
    def updates_stages(self) -> bool:
        """Whether stages are updated within the step."""
        return self.stage_update is not None

    def update(self, stage: int) -> None:
        """Apply the reduced gradients of a stage within the step."""
        assert self.stage_update is not None, "no optimiser for stages"
        self.stage_update(stage)

    def renew(self, stage: int) -> None:
        """Move a stage's weights to new memory with the same values."""
        for unit in self.units[stage]:
            unit.renew()

    def from_server(self, number: Tensor) -> Tensor:
        """A scalar of the rank with the states, on all ranks; with other modes all ranks have it already."""
        copied = self.groups["tp"].copied  # the first copy of dense parameters has the whole norm
        if self.sharing.mode == "server" and copied is not None:
            copied.broadcast([number]).wait()
        return number

    @contextmanager
    def whole(self) -> Generator[dict[str, Tensor]]:
        """All weights of this rank by plain name, while inside. Collective."""
        self.ready()
        gathered = [unit for unit in self._all() if not unit.gathered]
        for unit in gathered:
            unit.gather()
        self.ready()
        yield {name: parameter.detach() for name, parameter in self.parameters.items()}
        for unit in gathered:
            unit.release()

    def close(self) -> None:
        """Remove files."""
        if self._store is not None:
            self._store.close()

    def _all(self) -> list[Unit]:
        return [unit for units in self.units.values() for unit in units]

    def _of(self, stage: int) -> list[Unit]:
        """The units that a stage uses, including those shared with other stages."""
        return [*self.units[stage], *self.units.get(SHARED, [])]
