"""Initial values of a DLRM's dense layers, as a function of (seed, parameter name)."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.models.dlrm import DenseNet
from stretto.models.initial import stream


def initial_dense(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Initial values of one dense parameter, float32, on the CPU.

    Weights are normal with variance 2 / (inputs + outputs) (Glorot and Bengio 2010, eq. 12), as in the DLRM
    paper's own code; biases are 0, where that code draws them too: a logit begins near 0 for every seed.
    """
    if len(shape) == 1:
        return torch.zeros(shape, device="cpu")
    std = (2.0 / (shape[0] + shape[1])) ** 0.5
    return torch.empty(shape, device="cpu").normal_(std=std, generator=stream(seed, name))


@torch.no_grad()
def initialise_dense(net: DenseNet, seed: int) -> None:
    """Give every dense parameter its initial values, in place."""
    for name, parameter in net.named_parameters():
        parameter.copy_(initial_dense(name, tuple(parameter.shape), seed))
