"""What a stage holds for a while because ranks share: weights that are gathered, gradients on their way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from stretto.cost.keeping import Keeping, StateUnit, cut_units
from stretto.cost.shape import ModelShape
from stretto.cost.states import Shares, layer_parameters
from stretto.plan.stagework import Beside
from stretto.plan.states import Gather

TIED = "embed.tok.weight"
UNDER_WAY = 2  # reductions of microbatches that are not waited for yet


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

    def flying(self, inputs: bool | None = None) -> tuple[int, ...]:
        """Bytes that each unit's gradient takes while it is reduced, in the order in which a backward starts
        them; none where a step's are reduced at once.

        Args:
            inputs: of a backward in halves, whether the one of inputs; None: all of it.
        """
        return tuple(
            unit.flying for unit in self._each if inputs is None or inputs is not self._in_products(unit)
        )

    def _in_products(self, unit: StateUnit) -> bool:
        """Whether some gradient of the unit is a product that a split backward leaves to W."""
        head = self.layers[-1] if TIED in {p.name for p in unit.parameters} else None
        return any(
            ".attn." in p.name or ".mlp." in p.name or p.name == "head.out.weight" for p in unit.parameters
        ) or (head is not None and head > 0)

    @property
    def arriving(self) -> int:
        """Bytes of the gradients of others from a step's reduction to its end."""
        return sum(unit.arriving for unit in self.units)

    @property
    def updating(self) -> int:
        """Bytes that the update takes for itself."""
        return sum(unit.updating for unit in self.units)

    def beside(self, before: int = 0) -> tuple[Beside, ...]:
        """What is there while each layer computes. In the forward with nothing gathered before, in the
        backward in place of what was waiting and flying.

        Args:
            before: reductions of other microbatches that are under way, at most 2.
        """
        found = list[Beside]()
        for at, layer in enumerate(self.layers):
            open_ = [unit for unit in self._each if unit.complete <= layer]
            formed, before_it = (sum(unit.formed(l) for unit in open_) for l in (layer, layer + 1))
            packed = max((unit.whole for unit in open_ if unit.complete == layer), default=0)
            flying = self._flying_at(layer, before)
            # a tied weight is reduced as soon as the head has its gradient, in the middle of its backward
            sent = sum(u.whole for u in self._each if u.complete < layer and _ends_with(u, layer))
            found.append(
                Beside(
                    self._of(self.layers[at : at + 2]),
                    self._of(self.layers[at : at + 2], self.layers[-1:]),
                    self._of([layer]),
                    self._of(self.layers[max(0, at - 1) : at + 1]),
                    flying + before_it,
                    formed - before_it + sent,
                    flying + formed + packed,
                )
            )
        return tuple(found)

    def products(self, before: int) -> int:
        """Bytes of gradients at the end of a W, in place of what was flying; see `beside`."""
        each = self._each
        most = sum(unit.whole for unit in each) + max((unit.whole for unit in each), default=0)
        return most + self._flying_at(self.layers[-1], before)

    @cached_property
    def _each(self) -> tuple[StateUnit, ...]:
        """Units that every microbatch reduces, in the order in which a backward completes them."""
        return tuple(sorted((unit for unit in self.units if unit.each), key=lambda unit: -unit.complete))

    def _flying_at(self, layer: int, before: int) -> int:
        """Bytes of the reductions under way before this layer's backward."""
        each, older = self._each, 2 * list(self.flying())
        done = [unit.flying for unit in each if unit.complete > layer]
        return sum([*older[len(older) - before :], *done][-UNDER_WAY:])

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


def _ends_with(unit: StateUnit, layer: int) -> bool:
    """Whether the unit is the tied weight alone, and the layer the head."""
    return [p.name for p in unit.parameters] == [TIED] and max(unit.layers[0]) == layer


@lru_cache(maxsize=4096)
def stage_units(
    shape: ModelShape, stage: tuple[int, ...], shares: Shares, keeping: Keeping, gather: Gather | None
) -> StageUnits:
    """The units of the stage with these layers; a tied weight is one of its own."""
    layers = [(layer, layer_parameters(shape, layer, shares)) for layer in stage]
    alone = frozenset({TIED} if shape.tied else ())
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
