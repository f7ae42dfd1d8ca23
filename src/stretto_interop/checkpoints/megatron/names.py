"""Megatron-core's names of a model's tensors, and where their values lie in ours.

Names are those of `GPTModel.sharded_state_dict` (core_v0.16.1), which are the same with Transformer Engine
and without. A tensor of all layers is stacked along a new first dimension, or, where layers differ, each
layer has its own; `importing` takes either. Three things differ beyond names:

- Queries, keys and values are one tensor, group by group of heads that share keys, where ours has all
  queries first.
- The norms before attention and MLP belong to the linear after them.
- Newer checkpoints may have the gate and the up projection of an MLP apart, as `..._w` and `..._v`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from stretto.errors import StrettoError
from stretto.job.parameters import Sizes, parameter_shapes
from stretto.job.shape import ModelShape

View = Callable[[Tensor], Tensor]

LAYERS = "decoder.layers."
EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
EXPERTS = "mlp.experts.experts."
_OUTSIDE = {
    "embed.tok.weight": EMBEDDING,
    "embed.pos.weight": "embedding.position_embeddings.weight",
    "head.norm.weight": "decoder.final_layernorm.weight",
    "head.norm.bias": "decoder.final_layernorm.bias",
    "head.out.weight": HEAD,
}
# of a block; of a norm with and without experts after it
_BLOCK = {
    "norm1.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "norm1.bias": ("self_attention.linear_qkv.layer_norm_bias", "input_layernorm.bias"),
    "attn.qkv.weight": ("self_attention.linear_qkv.weight",),
    "attn.qkv.bias": ("self_attention.linear_qkv.bias",),
    "attn.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "attn.k_norm.weight": ("self_attention.k_layernorm.weight",),
    "attn.proj.weight": ("self_attention.linear_proj.weight",),
    "attn.proj.bias": ("self_attention.linear_proj.bias",),
    "norm2.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "norm2.bias": ("mlp.linear_fc1.layer_norm_bias", "pre_mlp_layernorm.bias"),
    "mlp.up.weight": ("mlp.linear_fc1.weight",),
    "mlp.up.bias": ("mlp.linear_fc1.bias",),
    "mlp.gate_up.weight": ("mlp.linear_fc1.weight",),
    "mlp.gate_up.bias": ("mlp.linear_fc1.bias",),
    "mlp.down.weight": ("mlp.linear_fc2.weight",),
    "mlp.down.bias": ("mlp.linear_fc2.bias",),
    "mlp.router.gate.weight": ("mlp.router.weight",),
    "mlp.router.gate.bias": ("mlp.router.bias",),
    "mlp.router.correction": ("mlp.router.expert_bias",),
    "mlp.experts.gate_up": (f"{EXPERTS}linear_fc1.weight",),
    "mlp.experts.up": (f"{EXPERTS}linear_fc1.weight",),
    "mlp.experts.down": (f"{EXPERTS}linear_fc2.weight",),
    "mlp.shared.gate_up.weight": ("mlp.shared_experts.linear_fc1.weight",),
    "mlp.shared.up.weight": ("mlp.shared_experts.linear_fc1.weight",),
    "mlp.shared.down.weight": ("mlp.shared_experts.linear_fc2.weight",),
    "mlp.shared_gate.weight": ("mlp.shared_experts.gate_weight",),
}


@dataclass(frozen=True, kw_only=True)
class MegatronRule:
    """A parameter of Stretto, and Megatron's tensor, or one layer of it, that holds it.

    Attributes:
        names: Megatron's possible names, within the layer if there is one; the first that exists is read.
        layer: number of the layer, or None for a parameter outside the layers.
        order: pairs of views of equal shape, of Stretto's tensor and of Megatron's, which together cover
            both; empty if the values lie in the same order.
        halves: the dimension that gate and up projection are stacked along, or None without a gate.
    """

    parameter: str
    shape: Sizes
    names: tuple[str, ...]
    layer: int | None = None
    order: tuple[tuple[View, View], ...] = ()
    halves: int | None = None

    @property
    def of_experts(self) -> bool:
        """True if the first dimension numbers experts."""
        return self.names[0].startswith(EXPERTS)


def rules(shape: ModelShape) -> Iterator[MegatronRule]:
    """Yield a rule for every parameter of the model; a tied head is the embedding's.

    Raises:
        StrettoError: checkpoints of Megatron-core are not read or written for such a model.
    """
    _check(shape)
    qkv = tuple(_qkv(shape))
    for parameter, sizes in parameter_shapes(shape).items():
        if parameter in _OUTSIDE:
            yield MegatronRule(parameter=parameter, shape=sizes, names=(_OUTSIDE[parameter],))
            continue
        _, block, module = parameter.split(".", 2)
        if module not in _BLOCK:
            raise StrettoError(
                f"{parameter} has no counterpart in checkpoints of Megatron-core that is known here",
                hint="export for transformers instead, without --format megatron",
            )
        names = _BLOCK[module]
        if module.startswith("norm2.") and shape.block(int(block)).moe is not None:
            names = names[::-1]
        gated = shape.gated and (".gate_up" in parameter)
        halves = len(sizes) - (1 if parameter.endswith("bias") else 2) if gated else None
        order = qkv if module.startswith("attn.qkv.") else ()
        yield MegatronRule(
            parameter=parameter, shape=sizes, names=names, layer=int(block), order=order, halves=halves
        )


def is_trained(parameter: str) -> bool:
    """True if Megatron's optimiser has states for the parameter; the router's correction is a buffer."""
    return not parameter.endswith(".router.correction")


def _qkv(shape: ModelShape) -> Iterator[tuple[View, View]]:
    """Return views of queries, keys and values as (groups, heads of a group, width, ...)."""
    groups, width = shape.kv_heads, shape.head_dim
    members = (shape.heads // groups, 1, 1)
    for i, count in enumerate(members):
        before = sum(members[:i])
        yield (
            _parameter(before * groups * width, (groups, count, width)),
            _foreign((groups, sum(members), width), before, count),
        )


def _parameter(start: int, sizes: tuple[int, int, int]) -> View:
    rows = sizes[0] * sizes[1] * sizes[2]
    return lambda tensor: tensor.narrow(0, start, rows).unflatten(0, sizes)


def _foreign(sizes: tuple[int, int, int], start: int, count: int) -> View:
    return lambda tensor: tensor.unflatten(0, sizes).narrow(1, start, count)


_DEFAULT: dict[str, object] = {
    "encoder_layers": 0,
    "block_norms": "pre",
    "embedding_scale": 1.0,
    "embedding_norm": False,
    "logit_scale": 1.0,
    "logit_softcap": 0.0,
    "lora": None,
}
_ATTENTION: dict[str, object] = {"softcap": None, "query_scale": None, "local_theta": None, "latent": None}


def _check(shape: ModelShape) -> None:
    """Raise StrettoError for a model that Megatron-core's GPTModel does not compute, or keeps in tensors of
    an unknown layout.
    """
    values = [(name, getattr(shape, name), default) for name, default in _DEFAULT.items()]
    values += [
        (f"attention.{name}", getattr(shape.attention, name), default) for name, default in _ATTENTION.items()
    ]
    if shape.moe is not None:
        values += [("bias of experts", shape.bias, False)]
    if shape.attention.norm is not None:
        values += [("norm beside attention.norm", shape.norm == "layer", False)]
    if shape.attention.sinks:
        raise StrettoError(
            "model.attention.sinks is true: checkpoints of Megatron-core keep a number for each head "
            "(softmax_offset) and biases of experts in a layout that has not been tried here",
            hint="Hugging Face's format has gpt-oss; its config goes to Megatron-LM by --emit megatron",
        )
    for name, value, default in values:
        if value != default:
            raise StrettoError(
                f"model.{name} is {value!r}: checkpoints of Megatron-core are read and written where it is "
                f"{default!r}",
                hint="GPT and Llama, with and without experts, are; for others use Hugging Face's format",
            )
