"""Initial values as a function of (seed, parameter name), so that they are the same under every layout."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from stretto.engine.models.language import LanguageModel
from stretto.spec.shape import ModelShape

STD = 0.02
_INTO_RESIDUAL = ("attn.proj.weight", "mlp.down.weight", "mlp.experts.down", "mlp.shared.down.weight")


def initial_values(name: str, shape: tuple[int, ...], seed: int, model_shape: ModelShape) -> Tensor:
    """Initial values of one parameter of the plain model, whole, float32, on the CPU.

    Norm gains are 1, biases 0, the rest normal with std 0.02; what is added to the residual stream is scaled
    by 1/sqrt(2 layers) (Radford et al. 2019, section 2.3).
    """
    if name.endswith("bias"):
        return torch.zeros(shape, device="cpu")
    if len(shape) == 1:
        return torch.ones(shape, device="cpu")
    std = STD / (2 * model_shape.layers) ** 0.5 if name.endswith(_INTO_RESIDUAL) else STD
    return torch.empty(shape, device="cpu").normal_(std=std, generator=stream(seed, name))


def stream(seed: int, name: str) -> torch.Generator:
    """A separate seed for every name; sha256 because Python's hash() changes from process to process."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@torch.no_grad()
def initialise(model: LanguageModel, seed: int) -> None:
    """Give every parameter of the plain model its initial values, in place; the model must have storage."""
    model.tie()
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta, f"{name} is on the meta device: call to_empty first"
        parameter.copy_(initial_values(name, tuple(parameter.shape), seed, model.shape))
