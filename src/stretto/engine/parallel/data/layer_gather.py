"""Layer-wise all-gather of weights that are sharded over data-parallel ranks, with prefetching.

While a layer computes, the weights of the next one (in the backward, of the previous one) are gathered
(Rajbhandari et al. 2019, "ZeRO", section 5.3; Zhao et al. 2023, "PyTorch FSDP", section 3.3.2). Weights
that are already gathered, such as those of a stage between UNSHARD and RESHARD, are neither gathered nor
released.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.engine.parallel.data.unit import FlatParameter


class LayerGather:
    """Hooks on the layers of one stage.

    Args:
        layers: layers of the stage, in order.
        units: units of each layer's parameters.
        ahead: prefetch the next layer's weights.
    """

    def __init__(
        self, layers: Sequence[nn.Module], units: Sequence[Sequence[FlatParameter]], ahead: bool = True
    ) -> None:
        self._units, self._ahead = [list(layer_units) for layer_units in units], ahead
        self._stage_parameters = dict[int, FlatParameter]()
        for at, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._before(at))
            layer.register_forward_hook(self._after(at))

    def release(self) -> None:
        """Release the weights that these hooks have gathered."""
        for unit in self._stage_parameters.values():
            unit.release()
        self._stage_parameters.clear()

    def _gather_layer(self, at: int, following: int) -> None:
        """Before layer `at` computes: gather its weights and prefetch those of layer `following`."""
        self._gather(at)
        if self._ahead and 0 <= following < len(self._units):
            self._gather(following)
            further = 2 * following - at
            for unit in self._units[further] if 0 <= further < len(self._units) else ():
                unit.read_ahead()
        for unit in self._units[at]:
            unit.ready()

    def _gather(self, at: int) -> None:
        for unit in self._units[at]:
            if not unit.gathered:
                unit.gather()
                self._stage_parameters[id(unit)] = unit

    def _release_layer(self, at: int, following: int) -> None:
        """After layer `at`: release its weights, except those shared with layer `following`."""
        still = self._units[following] if 0 <= following < len(self._units) else []
        for unit in self._units[at]:
            if id(unit) in self._stage_parameters and not any(unit is other for other in still):
                self._stage_parameters.pop(id(unit)).release()

    def _before(self, at: int) -> Any:
        def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._gather_layer(at, at + 1)
            if torch.is_grad_enabled():
                x = next((x for x in tensors_in(inputs) if x.requires_grad), None)
                if x is not None:
                    x.register_hook(lambda _: self._release_layer(at, at - 1))

        return hook

    def _after(self, at: int) -> Any:
        last = at == len(self._units) - 1

        def hook(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
            trained = [t for t in tensors_in(out) if t.requires_grad]
            for t in trained:
                t.register_hook(lambda _: self._gather_layer(at, at - 1))
            if not (last and trained):  # the last layer's weights are usually needed next, by its backward
                self._release_layer(at, at + 1)

        return hook


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in a module's arguments or results, within mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():  # pyright: ignore[reportUnknownVariableType]
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from tensors_in(item)
