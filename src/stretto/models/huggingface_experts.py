"""Experts as Hugging Face's MixtralForCausalLM names them.

Its files have a tensor for every expert and linear, under `block_sparse_moe`: w1 is the gate, w3 up and w2
down. Its modules in memory, since version 5, have the experts of a block stacked, under `mlp`, just as ours
are. Both are read; the files' names are what is written, as `save_pretrained` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from stretto.cost.shape import ModelShape
from stretto.errors import StrettoError

ROUTER = "block_sparse_moe.gate.weight"
_LINEARS = {"gate_up": ("w1", "w3"), "down": ("w2",)}  # stacked by rows to give ours
_IN_MEMORY = re.compile(r"(layers\.\d+\.)mlp\.(gate\.weight|experts\.(gate_up|down)_proj)")


def expert_names(linear: str, experts: int) -> tuple[str, ...]:
    """What `gate_up` or `down` of all experts of a block is called, in the order of our rows."""
    return tuple(
        f"block_sparse_moe.experts.{e}.{part}.weight" for e in range(experts) for part in _LINEARS[linear]
    )


def unstack(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Weights under the files' names, whether they come from a file or from a model in memory."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        match = _IN_MEMORY.fullmatch(name)
        if match is None:
            found[name] = weight
        elif match[3] is None:
            found[match[1] + ROUTER] = weight
        else:
            found |= {match[1] + part: w for part, w in _parts(name, match[3], weight, shape).items()}
    return found


def check_mixtral(shape: ModelShape) -> None:
    """Let pass only what MixtralForCausalLM can be. It has no z-loss and no capacity; both matter in training
    only, and are lost.

    Raises:
        StrettoError: naming what it has not.
    """
    moe = shape.moe
    assert moe is not None
    lacks = {
        "family": (shape.family, "llama"),
        "bias": (shape.bias, False),
        "moe.score": (moe.score, "softmax"),
        "moe.normalise": (moe.normalise, True),
        "moe.shared_ffn": (moe.shared_ffn, 0),
    }
    for name, (value, allowed) in lacks.items():
        if value != allowed:
            raise StrettoError(
                f"{name} {value!r} of a model with experts has no counterpart in MixtralForCausalLM",
                hint=f"only {name}: {allowed!r} exchanges",
            )


def _parts(name: str, linear: str, weight: Tensor, shape: ModelShape) -> dict[str, Tensor]:
    """The experts of a stacked tensor, as views of it."""
    assert shape.moe is not None
    experts, width = shape.moe.experts, shape.expert_ffn
    wide = (experts, 2 * width, shape.hidden)
    sizes = wide if linear == "gate_up" else (experts, shape.hidden, width)
    if tuple(weight.shape) != sizes:
        raise StrettoError(
            f"weight {name!r} is {list(weight.shape)}, but {list(sizes)} in the model",
            hint="set the model's sizes to those of the checkpoint",
        )
    count = len(_LINEARS[linear])
    return dict(zip(expert_names(linear, experts), weight.flatten(0, 1).chunk(experts * count), strict=True))
