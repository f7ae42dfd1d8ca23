"""Transient memory: weights and gradients that are whole on a rank for a while, followed through its step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from stretto.job.data_parallel import Gather
from stretto.job.parameters import shared_shapes
from stretto.job.shape import ModelShape
from stretto.planner.counts.rank_parameters import Shares, layer_parameters
from stretto.planner.counts.state_bytes import StateConfig, StateUnit, cut_units
from stretto.planner.memory.stage import GradientStep, Resident
from stretto.program.action import Action, ActionKind

TIED = "embed.tok.weight"
UNDER_WAY = 2  # reductions of earlier microbatches that may still be running


@dataclass(frozen=True, kw_only=True, eq=False)
class StageUnits:
    """The units of one stage.

    Attributes:
        layers: layers of the stage.
        gather: gather sharded parameters by layers or by stages, or None.
        head: the layer whose product is with the tied weight, or -1 if none is.
        names: the names of the parameters of each layer, in the model's order.
    """

    layers: tuple[int, ...]
    units: tuple[StateUnit, ...]
    gather: Gather | None = None
    head: int = -1
    names: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def weights(self) -> int:
        """Bytes of this rank's trained weights, of which there may be several versions."""
        return sum(unit.weights for unit in self.units if not unit.frozen)

    @cached_property
    def gathered(self) -> int:
        """Bytes of the whole weights of units of which a rank keeps a shard."""
        return sum(unit.gathered for unit in self.units)

    @cached_property
    def moves(self) -> bool:
        """True if any weights or gradients come and go."""
        return bool(self.gathered or self.open or self.arriving or self.flying())

    @cached_property
    def waiting(self) -> int:
        """Bytes of gathered weights kept from a forward to its backward: those of the last layer, with which
        the backward begins.
        """
        return self._of(self.layers[-1:])

    @cached_property
    def open(self) -> int:
        """Bytes of whole gradients from the first backward to their reduction."""
        return sum(unit.open for unit in self.units)

    def flying(self, inputs: bool | None = None) -> tuple[int, ...]:
        """Bytes of each unit's gradient during its reduction, in the order in which a backward starts them;
        empty if gradients are reduced once a step.

        Args:
            inputs: True for units whose gradients I of a split backward makes, False for those of W, or None
                for all.
        """
        return self._flying[inputs]

    @cached_property
    def _flying(self) -> dict[bool | None, tuple[int, ...]]:
        each = [(unit.flying, self._in_products(unit)) for unit in self._each]
        return {half: tuple(n for n, of in each if of is not half) for half in (None, True, False)}

    def _in_products(self, unit: StateUnit) -> bool:
        """True if a gradient of the unit is a product that a split backward leaves to W."""
        return any(
            (".attn." in p.name and not p.name.endswith(".relative"))
            or ".cross." in p.name
            or ".mlp." in p.name
            or p.name == "head.out.weight"
            or (p.name == TIED and self.head in layers)  # the head's product too, not only the lookup
            for p, layers in zip(unit.parameters, unit.layers, strict=True)
        )

    @property
    def arriving(self) -> int:
        """Bytes of gradients received from other ranks, from a step's reduction to its end."""
        return sum(unit.arriving for unit in self.units)

    @property
    def updating(self) -> int:
        """Bytes of the update's temporaries."""
        return sum(unit.updating for unit in self.units)

    def resident(self, before: int = 0, *, split: bool = False) -> tuple[Resident, ...]:
        """Gathered weights and open gradients while each layer computes: in the forward beyond all that is
        held, in the backward in place of what was waiting and in flight.

        Args:
            before: reductions of earlier microbatches that are under way, at most 2.
            split: the backward is I of a split backward, which completes only gradients that are no products.
        """
        # stages are shared by all layouts with the same shares (`stage_units`)
        if (before, split) in self._residents:
            return self._residents[before, split]
        resident = list[Resident]()
        flying, formed = self._flying_before(before, split), 0
        units = (unit for unit in self._each if not (split and self._in_products(unit)))
        missing = {id(unit): len(unit.parameters) for unit in units}
        for index, layer in reversed(list(enumerate(self.layers))):
            gradients, steps = sum(flying) + formed, list[GradientStep]()
            for name, unit in (pair for pair in self._by_layer[index] if id(pair[1]) in missing):
                formed += unit.gradient_of(name)
                now = packing = sum(flying) + formed
                missing[id(unit)] -= 1
                if not missing[id(unit)]:  # a parameter that layers share is reduced for each of them
                    missing[id(unit)] = len(unit.parameters)
                    packing += unit.full_gradient
                    formed -= sum(unit.gradient_of(p.name) for p in unit.parameters)
                    flying = [*flying, unit.flying][-UNDER_WAY:]
                name = "head.out.weight" if name == TIED and layer == self.head else name
                in_layer = name.partition(".")[2].lstrip("0123456789.")
                steps.append(GradientStep(in_layer, now, packing, sum(flying) + formed))
            resident.append(
                Resident(
                    forward=self._of(self.layers[index : index + 2]),
                    again=self._of(self.layers[index : index + 2], self.layers[-1:]),
                    loss=self._of([layer]),
                    backward=self._of(self.layers[max(0, index - 1) : index + 1]),
                    gradients=gradients,
                    steps=tuple(steps),
                )
            )
        return self._residents.setdefault((before, split), tuple(reversed(resident)))

    @cached_property
    def _residents(self) -> dict[tuple[int, bool], tuple[Resident, ...]]:
        return {}

    def products(self, before: int) -> int:
        """Bytes of gradients at the end of a W, in place of those in flight; see `resident`."""
        sizes = [unit.full_gradient for unit in self._each]
        return sum(sizes) + max(sizes, default=0) + sum(self._flying_before(before, split=True))

    @cached_property
    def _by_layer(self) -> list[list[tuple[str, StateUnit]]]:
        """The gradients that each layer's backward makes, in this order: the names of their parameters, and
        their units, of those that are reduced with every microbatch.
        """
        units = {p.name: unit for unit in self.units if unit.each for p in unit.parameters}
        return [[(name, units[name]) for name in reversed(names) if name in units] for names in self.names]

    @cached_property
    def _each(self) -> tuple[StateUnit, ...]:
        """Units that are reduced with every microbatch, in the order in which a backward completes them."""
        first = [unit for gradients in self._by_layer for _, unit in reversed(gradients)]
        return tuple(reversed({id(unit): unit for unit in first}.values()))

    def _flying_before(self, before: int, split: bool) -> list[int]:
        """Bytes of the last reductions of earlier microbatches, at most two, that are under way."""
        sizes = (*self.flying(True), *self.flying(False)) if split else self.flying()
        older = 2 * list(sizes[-UNDER_WAY:])
        return older[len(older) - min(before, UNDER_WAY) :]

    @cached_property
    def _used(self) -> dict[int, list[StateUnit]]:
        return {layer: [unit for unit in self.units if layer in unit.users] for layer in self.layers}

    def _of(self, layers: Iterable[int], without: Iterable[int] = ()) -> int:
        """Bytes of the whole weights of some layers, if weights are gathered layer by layer, else 0."""
        if self.gather != "layer":
            return 0
        units = {id(unit): unit for layer in layers for unit in self._used[layer]}
        return sum(unit.gathered for unit in units.values() if unit.users.isdisjoint(without))


@lru_cache(maxsize=4096)
def stage_units(
    shape: ModelShape,
    stage: tuple[int, ...],
    shares: Shares,
    state_config: StateConfig,
    gather: Gather | None,
) -> StageUnits:
    """The units of the stage with these layers; a tied weight is a unit of its own."""
    layers = [(layer, layer_parameters(shape, layer, shares)) for layer in stage]
    head = shape.chain - 1 if shape.tied else -1
    names = tuple(tuple(p.name for p in parameters) for _, parameters in layers)
    units = tuple(cut_units(layers, state_config, shared_names(shape)))
    return StageUnits(layers=stage, units=units, gather=gather, head=head, names=names)


@lru_cache(maxsize=256)
def shared_names(shape: ModelShape) -> frozenset[str]:
    """The parameters that several layers use: the table of tokens, if the head or the decoder of an
    encoder-decoder model uses it too, and what all blocks of a stack share.
    """
    table = {TIED} if shape.tied or shape.encoder_layers else set[str]()
    stacks = ("encoder", "blocks") if shape.encoder_layers else ("blocks",)
    return frozenset(table | {f"{stack}.0.{name}" for stack in stacks for name in shared_shapes(shape)})


def distinct_units(stages: Sequence[StageUnits]) -> list[StateUnit]:
    """The units of all stages of a rank; one that two stages share is listed once."""
    units, names = list[StateUnit](), set[str]()
    for stage in stages:
        new_units = [unit for unit in stage.units if unit.parameters[0].name not in names]
        units += new_units
        names |= {unit.parameters[0].name for unit in new_units}
    return units


SHARED = -1  # the key of a parameter that several stages of the rank share


class TransientMemory:
    """Tracks the gathered weights and open gradients of a rank.

    Attributes:
        units: units of each stage, without a weight that several of the stages share.
        gathered, open: bytes of them now.
        moves: there may be any.
    """

    def __init__(self, units: Mapping[int, StageUnits], split: frozenset[int]) -> None:
        self.gathered = self.open = 0
        self.moves = any(of_stage.moves for of_stage in units.values())
        self._split = split
        tied = {s: u for s, of_stage in units.items() for u in of_stage.units if u.parameters[0].name == TIED}
        self._shared = set(tied) if len(tied) > 1 else set[int]()
        self._tied = next(iter(tied.values())) if self._shared else None
        self.units = {
            s: replace(stage, units=tuple(u for u in stage.units if u.parameters[0].name != TIED))
            if s in self._shared
            else stage
            for s, stage in units.items()
        }
        self._waiting, self._gathered = set[int](), set[int]()
        self._opened, self._reduced = set[int](), set[int]()
        self._flying = {s: list[int]() for s in (*units, SHARED)}

    # ------------------------------------------------------------------ weights

    def waits(self, stage: int) -> bool:
        """True if the weights of the stage's last layer are still gathered since a forward."""
        return stage in self._waiting

    def forward(self, stage: int) -> None:
        """A forward leaves the weights of the last layer gathered for the backward."""
        if stage not in self._waiting:
            self._waiting.add(stage)
            self.gathered += self.units[stage].waiting

    def gather(self, stage: int) -> None:
        """The weights of a stage are gathered."""
        self._hold_tied(stage, 1)
        self._gathered.add(stage)
        self.gathered += self.units[stage].gathered

    def release(self, stage: int) -> None:
        """The gathered weights of a stage are freed."""
        self._gathered.remove(stage)
        self._hold_tied(stage, -1)
        self.gathered -= self.units[stage].gathered

    def _hold_tied(self, stage: int, sign: int) -> None:
        if self._tied is not None and stage in self._shared and self._gathered.isdisjoint(self._shared):
            self.gathered += sign * self._tied.gathered

    # ------------------------------------------------------------------ gradients

    def before(self, stage: int) -> int:
        """Reductions of the stage's gradients that are under way."""
        return len(self._flying[stage])

    def flying(self, stage: int) -> int:
        """Bytes of these reductions."""
        return sum(self._flying[stage])

    def replaced(self, stage: int) -> int:
        """Bytes that are held now and are counted again in a backward's own peak."""
        waiting = self.units[stage].waiting if stage in self._waiting else 0
        return waiting + self.flying(stage)

    def open_gradients(self, stage: int) -> None:
        """The first backward of a stage allocates its whole gradient, after the gradients that are reduced
        were freed.
        """
        if stage in self._opened or not (size := self.units[stage].open):
            return
        for done in self._reduced:
            self.open -= self.units[done].open + self.units[done].arriving
        self._reduced.clear()
        self._opened.add(stage)
        self.open += size

    def backward(self, action: Action) -> None:
        """A backward, or one of its halves, is done: reductions of the gradients that it completed start."""
        stage, kind, _ = action
        if kind is not ActionKind.W and stage in self._waiting:
            self._waiting.remove(stage)
            self.gathered -= self.units[stage].waiting
        units = self.units[stage]
        halves = (True, False) if stage in self._split else (None,)
        for inputs in halves:
            if kind is ActionKind.B or inputs is (kind is ActionKind.I):
                self._launch(stage, units.flying(inputs))
        if self._tied is not None and stage in self._shared and self._tied.each and kind is not ActionKind.I:
            self._launch(SHARED, (self._tied.flying,))

    def _launch(self, stage: int, sizes: Sequence[int]) -> None:
        """Start reductions; all but the last two of them have arrived by then."""
        flying = self._flying[stage]
        self.open -= sum(flying)
        flying[:] = [*flying, *sizes][-UNDER_WAY:]
        self.open += sum(flying)

    def reduce(self, stage: int) -> None:
        """The reduction of a step's gradients starts."""
        self._reduced.add(stage)
        self.open += self.units[stage].arriving

    def updated(self, stage: int) -> None:
        """Reduced gradients are applied in the middle of the step."""
        self._reduced.discard(stage)
        self.open -= self.units[stage].arriving
