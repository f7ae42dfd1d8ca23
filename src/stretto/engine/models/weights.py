"""A plain model's weights by name, each once: a tied head is not there a second time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stretto.engine.models.language import LanguageModel
from stretto.errors import StrettoError, nearest


def weights_of(model: LanguageModel) -> dict[str, Tensor]:
    """Every parameter by name, detached; the tensors share memory with the model's."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def load_weights(model: LanguageModel, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into the model, which must have storage; its dtype and device stay.

    Raises:
        StrettoError: a name is missing or unknown, or sizes differ; the model is then as it was.
    """
    parameters = dict(model.named_parameters())
    check_weights(weights, {name: tuple(p.shape) for name, p in parameters.items()})
    for name, parameter in parameters.items():
        assert not parameter.is_meta, f"{name} is on the meta device: call to_empty, then tie"
        parameter.copy_(weights[name])


def check_weights(weights: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check that weights have exactly the expected names and sizes.

    Raises:
        StrettoError: naming the first that is missing, unknown or of another size.
    """
    if missing := sorted(expected.keys() - weights.keys()):
        near = nearest(missing[0], weights.keys() - expected.keys())
        raise StrettoError(
            f"weight {missing[0]!r} is missing, one of {len(missing)}",
            hint=f"is it {near!r}?" if near else "is this the checkpoint of another model?",
        )
    if unknown := sorted(weights.keys() - expected.keys()):
        raise StrettoError(
            f"weight {unknown[0]!r} has no place in the model, one of {len(unknown)}",
            hint="is this the checkpoint of another model?",
        )
    for name, sizes in expected.items():
        if (actual := tuple(weights[name].shape)) != sizes:
            raise StrettoError(
                f"weight {name!r} is {list(actual)}, but {list(sizes)} in the model",
                hint="set the model's sizes to those of the checkpoint",
            )
