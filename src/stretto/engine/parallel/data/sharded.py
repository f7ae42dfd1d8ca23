"""Sharded data parallelism: parameters, gradients and optimiser states of a rank in any data-parallel mode.

Every stage's parameters are grouped into units (`FlatParameter`), its gradients into the same units
(`GradientBuffer`), and the optimiser updates the `fragments` of units. Sources: Rajbhandari et al. 2019
("ZeRO") for stages 1 to 3; Li et al. 2014 for the parameter server, of which there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stretto.engine.offload.shard_store import ShardStore
from stretto.engine.parallel.data.gradients import BUCKET_BYTES, GradientBuffer, cut_units
from stretto.engine.parallel.data.layer_gather import LayerGather
from stretto.engine.parallel.data.reduction import ShardGroups, shard_groups
from stretto.engine.parallel.data.stage_weights import SHARED, frozen_parameters, trained_parameters
from stretto.engine.parallel.data.unit import FlatParameter
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement
from stretto.engine.parallel.mesh import Mesh
from stretto.job.data_parallel import DataParallelSettings
from stretto.job.finetune import is_router_correction


class ShardedStates:
    """All units of one rank: the `StageWeights` of every data-parallel mode.

    Args:
        parameters: this rank's parameters by plain name, not yet allocated (see `FlatParameter.allocate`).
        places: placement of each in the plain model.

    Attributes:
        units: units of each stage, those of frozen parameters last.
        fragments: the fragments that the optimiser updates.
        frozen: this rank's part of the frozen parameters, which checkpoints also contain.
        stage_update: applies the reduced gradients of a stage, for asynchronous schedules; to be set before
            the pipeline is created.
    """

    gathers = True

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, nn.Parameter],
        places: Mapping[str, ShardPlacement],
        over: Sequence[str] = ("tp",),
        dp: DataParallelSettings | None = None,
        *,
        master: torch.dtype | None = None,
        gradients: torch.dtype | None = None,
        each_microbatch: bool = False,
        keep_gradients: bool = False,
        gather_layers: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """
        Args:
            over: the axes over which parameters of the model are split, the same on all ranks.
            dp: mode, shard sizes and offloading; by default `ddp`.
            master: type of the optimiser's weights; by default that of the weights.
            gradients: type in which gradients are accumulated; by default that of the weights.
            each_microbatch: sharded gradients are reduced for every microbatch.
            keep_gradients: unsharded gradients stay allocated during the step, as weight versions require.
            gather_layers: sharded parameters are gathered layer by layer; otherwise by calls of `gather`.
            bucket_bytes: bytes of weights per unit of unsharded parameters.
        """
        self.mesh = mesh
        self.parameters = dict(parameters)
        self.places = dict(places)
        self.dp = dp or DataParallelSettings()
        self.sizes = self.dp.sizes(mesh.size("cp-dp"))
        self._master = master
        self._gradient_type = gradients
        self._each_microbatch = each_microbatch
        self._keep_gradients = keep_gradients
        self._gather_layers = gather_layers
        self._bucket_bytes = bucket_bytes
        self.groups: dict[str, ShardGroups] = {
            axes: shard_groups(mesh, axes, self.sizes) for axes in sorted({"tp", *over})
        }
        self.units = dict[int, list[FlatParameter]]()
        self.buffers = dict[int, GradientBuffer]()
        self.fragments: list[ParameterFragment] = []
        self.frozen: list[ParameterFragment] = []
        self._names = {id(p): name for name, p in self.parameters.items()}
        self._hooks = dict[int, LayerGather]()
        self._numbered = dict[int, FlatParameter]()
        self._gathered_stages = set[int]()
        self.stage_update: Callable[[int], None] | None = None
        self._store = None
        if self.dp.offload_parameters != "none":
            path = self.dp.path if self.dp.offload_parameters == "nvme" else None
            assert path is not None or self.dp.offload_parameters == "cpu", "files need a path"
            self._store = ShardStore(mesh.device, path, mesh.rank)

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
        for stage, parameters in frozen_parameters(stages, shared).items():
            layers = stages.get(stage, ())
            self.units.setdefault(stage, []).extend(self._units(parameters, layers, separate))
        self.watch(stages)

    def buffer(
        self,
        stage: int,
        parameters: Sequence[nn.Parameter],
        layers: Sequence[nn.Module],
        alone: frozenset[int] = frozenset(),
    ) -> GradientBuffer:
        """Group the parameters of a stage into units, and create their gradient buffer.

        Args:
            stage: index of the stage, or SHARED.
            parameters: trained parameters in model order.
            layers: layers of the stage, in order.
            alone: ids of parameters that each get a separate unit, since other stages share them.
        """
        self.units[stage] = units = self._units(parameters, layers, alone)
        self.buffers[stage] = GradientBuffer(
            units, layers, self._gradient_type, self._each_microbatch, self._keep_gradients
        )
        return self.buffers[stage]

    def _units(
        self, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Module], alone: frozenset[int]
    ) -> list[FlatParameter]:
        """Create and allocate the units of a stage's parameters; see `buffer`."""
        # units that are allocated and freed within a step are per layer, to keep the peak low
        by_layer = self.sizes.parameters > 1 or (self._each_microbatch and self.sizes.gradients > 1)
        layer_of = {id(p): at for at, layer in enumerate(layers) for p in layer.parameters()}

        def over(parameter: nn.Parameter) -> str:
            return self.places[self._names[id(parameter)]].over

        def key(parameter: nn.Parameter) -> object:
            layer = layer_of.get(id(parameter)) if by_layer else None
            return over(parameter), parameter.dtype, layer, is_router_correction(self._names[id(parameter)])

        def make(members: list[nn.Parameter]) -> FlatParameter:
            groups = self.groups[over(members[0])]
            if is_router_correction(self._names[id(members[0])]):
                return FlatParameter(members)
            return FlatParameter(
                members, groups, self._master, self.dp.offload != "none", self.dp.mode == "server"
            )

        largest = sys.maxsize if self.sizes.parameters > 1 else self._bucket_bytes
        units = cut_units(parameters, make, key, largest, alone)
        for number, unit in enumerate(units, len(self._numbered)):
            unit.allocate(self._store, number)
            self._numbered[number] = unit
        return units

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
            self._hooks[stage] = LayerGather(layers, units, self._gather_layers)

    def begin(
        self,
        values: Callable[[str], Tensor] | None = None,
        elsewhere: frozenset[int] = frozenset(),
    ) -> Generator[ParameterFragment]:
        """Create the fragments that the optimiser updates, lazily, one unit at a time, so that an optimiser
        with offloaded states can move each unit away before the next is created.

        Args:
            values: returns the initial values of this rank's part of a parameter, by plain name, or None if a
                checkpoint is loaded afterwards.
            elsewhere: ids of parameters whose first copy is on another rank.
        """
        for unit in self._all():
            if unit.frozen:
                self.frozen += self._begin(unit, values, elsewhere)
        for buffer in self.buffers.values():
            for gradient in buffer.gradients:
                fragments = self._begin(gradient.unit, values, elsewhere)
                for fragment, part in zip(fragments, gradient.parts, strict=True):
                    fragment.gradient = part
                self.fragments += fragments
                yield from fragments

    def _begin(
        self, unit: FlatParameter, values: Callable[[str], Tensor] | None, elsewhere: frozenset[int]
    ) -> list[ParameterFragment]:
        unit.begin()
        names = [self._names[id(p)] for p in unit.parameters]
        if values is not None:
            unit.load([values(name) for name in names])
        away = [id(p) in elsewhere for p in unit.parameters]
        return unit.fragments(names, [self.places[name] for name in names], away, unit.number)

    def local_values(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of a plain tensor, including padding, on the CPU."""
        local = torch.empty(self.parameters[name].shape, dtype=full.dtype, device="cpu")
        self.places[name].fill(local, full)
        return local

    # ------------------------------------------------------------------ running

    def copy_masters(self, number: int) -> None:
        """After the optimiser has updated a unit: copy its masters to the weights, rounding."""
        self.unit(number).copy_masters()

    def publish(self, number: int) -> None:
        """After `copy_masters`: start sending the weights of a unit to all ranks that hold them."""
        self.unit(number).publish()

    def unit(self, number: int) -> FlatParameter:
        """Return a unit by its index (`ParameterFragment.unit`)."""
        return self._numbered[number]

    def ready(self) -> None:
        """Wait for all weights in transit."""
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
        """Free all but this rank's part of a stage's weights, except units that another stage still uses."""
        self._gathered_stages.discard(stage)
        for unit in self._of(stage) if not self._gathered_stages else self.units[stage]:
            unit.release()

    def end_backward(self, stage: int) -> None:
        """After a backward through a stage: free the weights that were gathered for it layer by layer."""
        if (hooks := self._hooks.get(stage)) is not None:
            hooks.release()

    def reduce(self, stage: int) -> None:
        """Start the reductions of a stage's gradients that have not started yet."""
        self.buffers[stage].flush()

    @property
    def updates_stages(self) -> bool:
        """True if stages are updated within the step."""
        return self.stage_update is not None

    def update(self, stage: int) -> None:
        """Apply the reduced gradients of a stage within the step."""
        assert self.stage_update is not None, "no optimiser for stages"
        self.stage_update(stage)

    def recreate_storage(self, stage: int) -> None:
        """Move a stage's weights to new memory with the same values."""
        for unit in self.units[stage]:
            if not unit.frozen:
                unit.recreate_storage()

    def from_server(self, number: Tensor) -> Tensor:
        """Return the server's scalar, broadcast to all ranks; in other modes unchanged, since all ranks have
        it.
        """
        copied = self.groups["tp"].copied  # the first copy of dense parameters has the full norm
        if self.dp.mode == "server" and copied is not None:
            copied.broadcast([number]).wait()
        return number

    @contextmanager
    def full_weights(self) -> Generator[dict[str, Tensor]]:
        """Gather all weights of this rank, by plain name, within the context. Collective."""
        self.ready()
        gathered = [unit for unit in self._all() if not unit.gathered]
        for unit in gathered:
            unit.gather()
        self.ready()
        yield {name: parameter.detach() for name, parameter in self.parameters.items()}
        for unit in gathered:
            unit.release()

    def close(self) -> None:
        """Remove the hooks of parameters, and the files of those that are offloaded."""
        for buffer in self.buffers.values():
            buffer.close()
        if self._store is not None:
            self._store.close()

    def _all(self) -> list[FlatParameter]:
        return [unit for units in self.units.values() for unit in units]

    def _of(self, stage: int) -> list[FlatParameter]:
        """Return the units that a stage uses, including those shared with other stages."""
        return [*self.units[stage], *self.units.get(SHARED, [])]
