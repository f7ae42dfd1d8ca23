"""Small models with Megatron-core's names and layout, written plainly, and checkpoints as it writes them.

After megatron/core/transformer and dist_checkpointing of core_v0.16.1: queries, keys and values of a group of
heads lie together, in the order q, ..., q, k, v; the gate lies before the up projection; a norm belongs to
the linear after it; a tensor of all layers is stacked.
"""

from __future__ import annotations

import io
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from stretto.job.shape import ModelShape

Tensors = dict[str, Tensor]


def weights(shape: ModelShape, dtype: torch.dtype = torch.float32) -> Tensors:
    """Random weights of a GPT or a Llama, a layer's under `decoder.layers.I.`, experts stacked."""
    torch.manual_seed(0)
    hidden, width, ffn = shape.hidden, shape.head_dim, shape.ffn
    rows = (shape.heads + 2 * shape.kv_heads) * width
    sizes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (shape.vocab, hidden)}
    if not shape.rotary:
        sizes["embedding.position_embeddings.weight"] = (shape.sequence, hidden)
    for i in range(shape.layers):
        layer = {
            "self_attention.linear_qkv.layer_norm_weight": (hidden,),
            "self_attention.linear_qkv.weight": (rows, hidden),
            "self_attention.linear_proj.weight": (hidden, shape.heads * width),
            "mlp.linear_fc1.layer_norm_weight": (hidden,),
            "mlp.linear_fc1.weight": (2 * ffn if shape.gated else ffn, hidden),
            "mlp.linear_fc2.weight": (hidden, ffn),
        }
        if shape.bias:
            layer |= {
                "self_attention.linear_qkv.layer_norm_bias": (hidden,),
                "self_attention.linear_qkv.bias": (rows,),
                "self_attention.linear_proj.bias": (hidden,),
                "mlp.linear_fc1.layer_norm_bias": (hidden,),
                "mlp.linear_fc1.bias": (ffn,),
                "mlp.linear_fc2.bias": (hidden,),
            }
        if shape.moe is not None:
            experts = shape.moe.experts
            layer = {name: size for name, size in layer.items() if not name.startswith("mlp.")} | {
                "pre_mlp_layernorm.weight": (hidden,),
                "mlp.router.weight": (experts, hidden),
                "mlp.experts.experts.linear_fc1.weight": (experts, 2 * ffn, hidden),
                "mlp.experts.experts.linear_fc2.weight": (experts, hidden, ffn),
            }
        sizes |= {f"decoder.layers.{i}.{name}": size for name, size in layer.items()}
    sizes["decoder.final_layernorm.weight"] = (hidden,)
    if shape.bias:
        sizes["decoder.final_layernorm.bias"] = (hidden,)
    if not shape.tied:
        sizes["output_layer.weight"] = (shape.vocab, hidden)
    return {
        name: torch.randn(size, dtype=dtype) / 4 + (1.0 if name.endswith("norm_weight") else 0.0)
        for name, size in sizes.items()
    }


def forward(shape: ModelShape, native: Tensors, tokens: Tensor) -> Tensor:
    """Logits of the weights in Megatron's layout."""
    x = native["embedding.word_embeddings.weight"][tokens]
    length = tokens.shape[1]
    if not shape.rotary:
        x = x + native["embedding.position_embeddings.weight"][:length]
    for i in range(shape.layers):
        layer = {n.split(".", 3)[3]: t for n, t in native.items() if n.startswith(f"decoder.layers.{i}.")}
        qkv = _linear(layer, "self_attention.linear_qkv", _norm(shape, x, layer, "self_attention.linear_qkv"))
        x = x + _linear(layer, "self_attention.linear_proj", _attend(shape, qkv))
        y = _linear(layer, "mlp.linear_fc1", _norm(shape, x, layer, "mlp.linear_fc1"))
        if shape.gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        else:
            y = F.gelu(y, approximate="tanh")
        x = x + _linear(layer, "mlp.linear_fc2", y)
    last = {f"last.layer_norm_{n}": native[f"decoder.final_layernorm.{n}"] for n in _kinds(shape)}
    head = native["embedding.word_embeddings.weight"] if shape.tied else native["output_layer.weight"]
    return _norm(shape, x, last, "last") @ head.T


def _kinds(shape: ModelShape) -> tuple[str, ...]:
    return ("weight", "bias") if shape.bias else ("weight",)


def _linear(layer: Tensors, name: str, x: Tensor) -> Tensor:
    return F.linear(x, layer[f"{name}.weight"], layer.get(f"{name}.bias"))


def _norm(shape: ModelShape, x: Tensor, layer: Tensors, name: str) -> Tensor:
    weight = layer[f"{name}.layer_norm_weight"]
    if shape.norm == "rms":
        return F.rms_norm(x, weight.shape, weight, shape.norm_eps)
    return F.layer_norm(x, weight.shape, weight, layer[f"{name}.layer_norm_bias"], shape.norm_eps)


def _attend(shape: ModelShape, qkv: Tensor) -> Tensor:
    """Group by group, as the rows lie: the heads that share a key, then the key, then the value."""
    outputs = list[Tensor]()
    each, width = shape.heads // shape.kv_heads, shape.head_dim
    for group in qkv.split((each + 2) * width, dim=-1):
        *queries, key, value = (_turned(shape, part) for part in group.split(width, dim=-1))
        value = group[..., -width:]
        for query in queries:
            outputs.append(F.scaled_dot_product_attention(query, key, value, is_causal=True))
    return torch.cat(outputs, dim=-1)


def _turned(shape: ModelShape, x: Tensor) -> Tensor:
    """Rotary positions of one head, (i, i + d / 2) as a pair."""
    if not shape.rotary:
        return x
    half = shape.head_dim // 2
    rates = shape.rope_theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * rates
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def stored(shape: ModelShape, native: Tensors, form: str = "stacked", ranks: int = 2) -> Tensors:
    """The tensors as a checkpoint has them.

    Args:
        form: "stacked" over layers; "apart", each layer and both halves of a gated MLP; "flat", what the
            distributed optimizer wrote up to core_v0.13 for states under `ranks` tensor-parallel ranks.
    """
    if form == "apart":
        return dict(_halved(shape, native))
    tensors: Tensors = {n: t for n, t in native.items() if not n.startswith("decoder.layers.")}
    names = [n.split(".", 3)[3] for n in native if n.startswith("decoder.layers.0.")]
    for name in names:
        layers = [native[f"decoder.layers.{i}.{name}"] for i in range(shape.layers)]
        tensors[f"decoder.layers.{name}"] = torch.stack(layers)
    return {n: _flat(n, t, ranks) for n, t in tensors.items()} if form == "flat" else tensors


def _halved(shape: ModelShape, native: Tensors) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in native.items():
        if shape.gated and name.endswith("linear_fc1.weight"):
            gate, up = tensor.chunk(2)
            yield from ((f"{name}_w", gate.clone()), (f"{name}_v", up.clone()))
        else:
            yield name, tensor


def _flat(name: str, tensor: Tensor, ranks: int) -> Tensor:
    """[X, Y] in pieces [x, y] as [X / x, Y / y, x y]; column-parallel weights are cut by rows, row-parallel
    ones by columns, and what is stacked over layers has one layer in each piece.
    """
    stack = name.startswith("decoder.layers.")
    counts = [1] * tensor.dim()
    if stack:
        counts[0] = tensor.shape[0]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        counts[-1] = ranks
    elif name.endswith(("linear_qkv.weight", "word_embeddings.weight", "output_layer.weight")):
        counts[int(stack)] = ranks
    elif name.endswith("linear_fc1.weight"):
        counts[1] = 2 * ranks  # gate and up projection apart
    cut = tensor
    for dim in range(tensor.dim()):
        cut = cut.unflatten(2 * dim, (counts[dim], -1))
    order = [*range(0, cut.dim(), 2), *range(1, cut.dim(), 2)]
    return cut.permute(order).reshape(*counts, -1).contiguous()


def arguments(shape: ModelShape, **more: Any) -> Namespace:
    """Arguments as Megatron keeps them."""
    return Namespace(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        group_query_attention=shape.kv_heads != shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        max_position_embeddings=shape.sequence,
        seq_length=shape.sequence,
        padded_vocab_size=shape.vocab,
        swiglu=shape.gated,
        add_bias_linear=shape.bias,
        normalization="RMSNorm" if shape.norm == "rms" else "LayerNorm",
        position_embedding_type="rope" if shape.rotary else "learned_absolute",
        rotary_base=int(shape.rope_theta),
        rotary_percent=1.0,
        untie_embeddings_and_output_weights=not shape.tied,
        norm_epsilon=shape.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **more,
    )


def write(
    folder: Path,
    shape: ModelShape,
    native: Tensors,
    *,
    states: dict[str, Tensors] | None = None,
    form: str = "stacked",
    states_form: str = "stacked",
    optimiser: dict[str, Any] | None = None,
    args: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    iteration: int = 3,
) -> Path:
    """A checkpoint as Megatron writes it.

    Args:
        states: by kind, such as exp_avg, in the layout of the weights.
        optimiser: what common.pt has of it.
        args: beside those of the model.
        beside: other tensors and objects by name.

    Returns:
        The folder to load from.
    """
    place = folder / f"iter_{iteration:07d}"
    state: dict[str, Any] = dict(stored(shape, native, form))
    for kind, each in (states or {}).items():
        state |= {f"optimizer.state.{kind}.{n}": t for n, t in stored(shape, each, states_form).items()}
    state["decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"] = [None]
    dcp.save({**state, **(extra or {})}, checkpoint_id=place, planner=_AsTheyAre(), no_dist=True)
    common: dict[str, Any] = {"args": arguments(shape, **(args or {})), "iteration": iteration}
    common |= {"checkpoint_version": 3.0, **({} if optimiser is None else {"optimizer": optimiser})}
    torch.save(common, place / "common.pt")
    kind = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (place / "metadata.json").write_text(json.dumps(kind), encoding="utf-8")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration), encoding="utf-8")
    return folder


def saved(value: Any) -> io.BytesIO:
    """An object as Megatron saves it, keys of dicts as they are."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


class _AsTheyAre(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if isinstance(object, io.BytesIO):
            return object
        return super().transform_object(write_item, object)


def adam(updates: int, *, tensor: bool = True, **settings: Any) -> dict[str, Any]:
    """The optimiser as common.pt has it: the number of updates as a tensor, or in each group."""
    defaults = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "max_lr": 1e-2, **settings}
    groups: list[dict[str, Any]] = [
        {**defaults, "wd_mult": decay, "weight_decay": 0.1 * decay, "lr_mult": 1.0} for decay in (1.0, 0.0)
    ]
    if tensor:
        return {"state": {"common_step": torch.tensor(float(updates))}, "param_groups": groups}
    return {"optimizer": {"param_groups": [{**group, "step": updates} for group in groups]}}
