"""Skip connections: a layer's output as an argument of a later layer, across any number of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stretto.errors import StrettoError


@dataclass(frozen=True)
class Skip:
    """The output of layer `source` as an extra argument of layer `target`, after its others.

    Between stages it is sent with the activation, across every boundary, and its gradient is sent back the
    same way: if source and target are k ranks apart it is sent k times.
    """

    source: int
    target: int


def check_skips(skips: Sequence[Skip], layers: int) -> tuple[Skip, ...]:
    """Check that every skip leads to a later layer.

    Raises:
        StrettoError: a skip does not.
    """
    for skip in skips:
        if not 0 <= skip.source < skip.target < layers:
            raise StrettoError(
                f"skip from layer {skip.source} to layer {skip.target}, must go to a later layer",
                hint=f"layers are 0 to {layers - 1}",
            )
    return tuple(skips)


class Stage(nn.Sequential):
    """The layers of one stage in sequence. A layer's tuple becomes several arguments of the next layer.

    Args:
        layers: layers of the stage.
        start: index of its first layer in the model.
        skips: skips of the model. Those that enter the stage are its last arguments, in order; those that
            leave it are its last results.
    """

    def __init__(self, layers: Sequence[nn.Module], start: int = 0, skips: Sequence[Skip] = ()) -> None:
        super().__init__(*layers)
        stop = start + len(layers)
        self._in = [s for s in skips if s.source < start <= s.target]
        self._out = [s for s in skips if s.source < stop <= s.target]
        layer_numbers = range(start, stop)
        self._targets = {at - start: [s for s in skips if s.target == at] for at in layer_numbers}
        self._sources = {at - start: [s for s in skips if s.source == at] for at in layer_numbers}
        self._plain = (
            not any(start <= at < stop for s in skips for at in (s.source, s.target)) and not self._in
        )

    def forward(self, *x: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the activation, or a tuple of the activation and the skips that leave the stage."""
        if not self._plain:
            return self._with_skips(x)
        for layer in self:
            y = layer(*x)
            x = y if type(y) is tuple else (y,)
        return x[0] if len(x) == 1 else x

    def _with_skips(self, x: tuple[Any, ...]) -> Any:
        arguments = len(x) - len(self._in)
        open_skips: dict[Skip, Tensor] = dict(zip(self._in, x[arguments:], strict=True))
        x = x[:arguments]
        for at, layer in enumerate(self):
            y = layer(*x, *(open_skips[skip] for skip in self._targets[at]))
            x = y if type(y) is tuple else (y,)
            for skip in self._sources[at]:
                if len(x) != 1:
                    raise StrettoError(
                        f"layer {skip.source} returns {len(x)} tensors, but a skip starts there",
                        hint="a skip carries one tensor",
                    )
                open_skips[skip] = x[0]
        x = (*x, *(open_skips[skip] for skip in self._out))
        return x[0] if len(x) == 1 else x
