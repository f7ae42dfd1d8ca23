"""What a stage holds for a while because ranks share: weights that are gathered, gradients on their way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from stretto.cost.keeping import Keeping, StateUnit, cut_units
from stretto.cost.shape import ModelShape
from stretto.cost.states import Shares, layer_parameters
from stretto.plan.stagework import Beside
from stretto.plan.states import Gather

TIED = "embed.tok.weight"
_UNDER_WAY = 2  # reductions of microbatches that are not waited for yet


@dataclass(frozen=True)
class StageUnits:
    """The units of one stage.

    Attributes:
        layers: of the stage.
        gather: what is gathered at once, where parameters are split.
    """

    layers: tuple[int, ...]
    units: tuple[StateUnit, ...]
    gather: Gather | None = None

    @property
    def weights(self) -> int:
        """Bytes of this rank's weights."""
        return sum(unit.weights for unit in self.units)

    @property
    def gathered(self) -> int:
        """Bytes of all weights, where a rank keeps a part."""
        return sum(unit.gathered for unit in self.units)

    @property
    def waiting(self) -> int:
        """Bytes of gathered weights between a forward and its backward, which begins with the layer that the
        forward ends with.
        """
        return self._of(self.layers[-1:])

    @property
    def open(self) -> int:
        """Bytes of whole gradients from the first backward to their reduction."""
        return sum(unit.open for unit in self.units)

    @property
    def flying(self) -> tuple[int, ...]:
        """Bytes that each unit's gradient takes while it is reduced, in the order in which a backward starts
        them; none where a step's are reduced at once.
        """
        return tuple(unit.flying for unit in self._each())

    @property
    def arriving(self) -> int:
        """Bytes of gradients that the server is sent."""
        return sum(unit.arriving for unit in self.units)

    @property
    def updating(self) -> int:
        """Bytes that the update takes for itself."""
        return sum(unit.updating for unit in self.units)

    def beside(self) -> tuple[Beside, ...]:
        """What is there while each layer computes. In the forward with nothing gathered before, in the
        backward in place of what was waiting and flying.
        """
        found = list[Beside]()
        for at, layer in enumerate(self.layers):
            flying, formed = self._flying_at(layer), sum(unit.formed(layer) for unit in self._each())
            formed -= sum(unit.whole for unit in self._each() if unit.complete > layer)
            packed = sum(unit.whole for unit in self._each() if unit.complete == layer)
            found.append(
                Beside(
                    self._of(self.layers[at : at + 2]),
                    self._of(self.layers[at : at + 2], self.layers[-1:]),
                    self._of(self.layers[max(0, at - 1) : at + 1]),
                    flying + formed,
                    flying + formed + packed,
                )
            )
        return tuple(found)

    @property
    def products(self) -> int:
        """Bytes of gradients at the end of a W, in place of what was flying."""
        each = self._each()
        most = sum(unit.whole for unit in each) + max((unit.whole for unit in each), default=0)
        return most + self._flying_at(self.layers[-1])

    def _each(self) -> list[StateUnit]:
        return sorted((unit for unit in self.units if unit.each), key=lambda unit: -unit.complete)

    def _flying_at(self, layer: int) -> int:
        """Bytes of the reductions under way before this layer's backward, of the microbatch before too."""
        each = self._each()
        done = [unit.flying for unit in each if unit.complete > layer]
        return sum([*(unit.flying for unit in each), *(unit.flying for unit in each), *done][-_UNDER_WAY:])

    def _of(self, layers: Iterable[int], without: Iterable[int] = ()) -> int:
        """Bytes of all weights of some layers where layers are gathered by themselves."""
        if self.gather != "layer":
            return 0
        left_out = list(without)
        return sum(
            unit.gathered
            for unit in self.units
            if any(map(unit.used_by, layers)) and not any(map(unit.used_by, left_out))
        )


@lru_cache(maxsize=4096)
def stage_units(
    shape: ModelShape, stage: tuple[int, ...], shares: Shares, keeping: Keeping, gather: Gather | None
) -> StageUnits:
    """The units of the stage with these layers; a weight tied with another stage's is one of its own."""
    layers = [(layer, layer_parameters(shape, layer, shares)) for layer in stage]
    ends = {0, shape.layers + 1} & set(stage)
    alone = frozenset({TIED}) if shape.tied and len(ends) == 1 else frozenset[str]()
    return StageUnits(stage, tuple(cut_units(layers, keeping, alone)), gather)


def lasting(stages: Sequence[StageUnits]) -> list[StateUnit]:
    """The units of all stages of a rank, those that two of them share once."""
    found, seen = list[StateUnit](), set[str]()
    for stage in stages:
        for unit in stage.units:
            name = unit.parameters[0].name
            if name != TIED or TIED not in seen:
                found.append(unit)
            seen.add(name)
    return found
