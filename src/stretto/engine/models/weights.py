"""Weights of a plain model by name: initial values, and the check of weights before they are loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stretto.engine.models.language import LanguageModel
from stretto.errors import StrettoError, nearest
from stretto.job.finetune import TrainedParameters
from stretto.job.initial import Initial
from stretto.job.lora import is_adapter
from stretto.job.shape import ModelShape


def initial_values(
    name: str, shape: tuple[int, ...], seed: int, model_shape: ModelShape, initial: Initial | None = None
) -> Tensor:
    """Return the initial values of a full parameter of the plain model, float32, on the CPU.

    They are a function of seed and name, and therefore the same under every layout. Norm gains are 1 (weights
    of `rms1p` 0), biases 0, all other values normal with the standard deviation of `initial` (by default
    `Initial()`). B of adapters is 0, and A uniform within 1/sqrt(in), like in PEFT.

    If attention does not scale its scores, the query weights are divided by sqrt(d) instead (T5); if the head
    scales its input and is tied, the embedding is divided by that scale, so that initial logits are the same.
    """
    if is_adapter(name):
        if name.endswith(".B.weight"):
            return torch.zeros(shape, device="cpu")
        bound = shape[1] ** -0.5
        values = torch.empty(shape, device="cpu")
        return values.uniform_(-bound, bound, generator=seeded_generator(seed, name))
    if name.endswith(("bias", "attn.sinks", "mlp.router.correction")):
        return torch.zeros(shape, device="cpu")
    if len(shape) == 1 and model_shape.norm == "rms1p" and not name.endswith("down_norm.weight"):
        return torch.zeros(shape, device="cpu")
    if len(shape) == 1:
        return torch.ones(shape, device="cpu")
    std = (initial or Initial()).std(name, model_shape.layers)
    if name == "embed.tok.weight" and model_shape.tied:
        std /= model_shape.logit_scale
    values = torch.empty(shape, device="cpu").normal_(std=std, generator=seeded_generator(seed, name))
    if model_shape.attention_scale == 1.0 and name.endswith(("attn.qkv.weight", "cross.q.weight")):
        values[: model_shape.attention_width] *= model_shape.head_dim**-0.5
    return values


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """Return a generator for one parameter, seeded by sha256: Python's hash() differs between processes."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@torch.no_grad()
def initialise(model: LanguageModel, seed: int, initial: Initial | None = None) -> None:
    """Set every parameter of the plain model to its initial values; the model must have storage."""
    model.tie()
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta, f"{name} is on the meta device: call to_empty first"
        parameter.copy_(initial_values(name, tuple(parameter.shape), seed, model.shape, initial))


def freeze(model: nn.Module, trained: TrainedParameters) -> None:
    """Set `requires_grad` of every parameter to whether it is trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained(name))


def check_weights(weights: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check that weights have exactly the expected names and sizes.

    Raises:
        StrettoError: a weight is missing, unknown or of another size; it names the first.
    """
    if missing := sorted(expected.keys() - weights.keys()):
        suggestion = nearest(missing[0], weights.keys() - expected.keys())
        raise StrettoError(
            f"weight {missing[0]!r} is missing, one of {len(missing)}",
            hint=f"is it {suggestion!r}?" if suggestion else "is this the checkpoint of another model?",
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
