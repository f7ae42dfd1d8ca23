"""The buffers of Megatron's distributed optimizer as a checkpoint has them, written from their description.

After megatron/core/distributed/param_and_grad_buffer.py and optimizer/distrib_optimizer.py of core_v0.16.1: a
rank's parameters lie in the reverse order of its modules', each at a multiple of 64 elements; a bucket ends
with the parameter that fills it, a tied embedding has one to itself, and what pads a bucket's
end is not saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import megatron_models as megatron
from stretto.job.shape import ModelShape

DTYPES = (torch.bfloat16, torch.float32)
GARBAGE = 1e30  # in gaps
FUSED = (
    "linear_proj",
    "linear_qkv.layer_norm",
    "linear_qkv",
    "linear_fc1.layer_norm",
    "linear_fc1",
    "linear_fc2",
)
PLAIN = (
    "linear_qkv.layer_norm",
    "linear_proj",
    "linear_qkv",
    "linear_fc1.layer_norm",
    "linear_fc1",
    "linear_fc2",
)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How the run was laid out.

    modules: of a layer, in their order; FUSED as with Transformer Engine.
    stages: the layers of each pipeline stage and, where a rank has several chunks, of its next chunks.
    limit: elements that fill a bucket of the first stage.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    stages: tuple[tuple[int, ...], ...] = ((0, 1),)
    modules: tuple[str, ...] = FUSED
    limit: int = 10**9
    aligned: int = 64
    grouped: bool = True
    swapped: dict[int, int] = field(default_factory=dict[int, int])  # layers that are taken for one another


Named = list[tuple[str, Tensor]]


def buffers(shape: ModelShape, states: dict[str, megatron.Tensors], ranks: Ranks) -> dict[str, Any]:
    """What a checkpoint has of them: tensors and objects by name.

    Args:
        states: by kind, such as exp_avg, in the layout of the weights.
    """
    tensors: dict[str, Any] = {}
    spread = ranks.ep > 1
    for stage in range(ranks.pp):
        for tp in range(ranks.tp):
            prefix = "chained_0." if spread else ""
            each = [
                {kind: list(_dense(shape, native, ranks, number, tp)) for kind, native in states.items()}
                for number in range(stage, len(ranks.stages), ranks.pp)
            ]
            name = f"{prefix}optimizer.distributed.dp_group_idx_{tp + ranks.tp * stage}."
            tensors |= _rank(name, each, ranks, bucketed=stage == 0)
            for ep in range(ranks.ep) if spread else ():
                experts = [
                    {
                        kind: list(_spread(shape, native, ranks, number, tp, ep))
                        for kind, native in states.items()
                    }
                    for number in range(stage, len(ranks.stages), ranks.pp)
                ]
                place = tp + ranks.tp * (ep + ranks.ep * stage)
                name = f"chained_1.optimizer.distributed.dp_group_idx_{place}."
                tensors |= _rank(name, experts, ranks, bucketed=stage == 0)
    return tensors


def _rank(prefix: str, chunks: Sequence[dict[str, Named]], ranks: Ranks, *, bucketed: bool) -> dict[str, Any]:
    """What one rank saves of one optimizer; only the first chunk of the first stage has several buckets."""
    tensors: dict[str, Any] = {f"{prefix}optimizer/shard_0_1": megatron.saved([_settings()])}
    for number, chunk in enumerate(chunks):
        for kind, named in chunk.items():
            several = _buckets(named, ranks, limit=ranks.limit if bucketed and number == 0 else 10**9)
            for i, bucket in enumerate(several):
                tensors[f"{prefix}gbuf_idx_{number}.dtype_{DTYPES}.bucket_idx_{i}.{kind}"] = bucket
    tensors[f"{prefix}per_bucket_numel/shard_0_1"] = megatron.saved([[{DTYPES: [0]}]])
    return tensors


def _buckets(named: Named, ranks: Ranks, *, limit: int) -> list[Tensor]:
    """The buckets of a buffer, without what pads their ends."""
    buckets = [torch.empty(0)]
    for name, tensor in reversed(named):
        alone = name == "shared"
        last = buckets[-1]
        gap = -len(last) % ranks.aligned
        padded = torch.cat([last, torch.full((gap,), GARBAGE)])
        if alone and len(last):
            buckets[-1] = padded
            buckets.append(torch.empty(0))
            padded = buckets[-1]
        buckets[-1] = torch.cat([padded, tensor.flatten()])
        if alone or len(buckets[-1]) >= limit:
            buckets.append(torch.empty(0))
    return [bucket for bucket in buckets if len(bucket)]


def _dense(
    shape: ModelShape, native: megatron.Tensors, ranks: Ranks, number: int, tp: int
) -> Iterator[tuple[str, Tensor]]:
    """A rank's parameters of one chunk but spread experts, in the order of its modules."""
    first, last = number == 0, number == len(ranks.stages) - 1
    shared = shape.tied and ranks.pp > 1
    if first:
        name = "embedding.word_embeddings.weight"
        yield "shared" if shared else name, cut(shape, name, native[name], tp, ranks.tp)
        if (name := "embedding.position_embeddings.weight") in native:
            yield name, native[name]
    for layer in ranks.stages[number]:
        layer_tensors = _layer(native, ranks.swapped.get(layer, layer))
        for module in ranks.modules:
            for name in sorted(
                (n for n in layer_tensors if _is_of(n, module)), key=lambda n: n.endswith("bias")
            ):
                yield name, cut(shape, name, layer_tensors[name], tp, ranks.tp)
        if "mlp.router.weight" in layer_tensors:
            yield "router", layer_tensors["mlp.router.weight"]
            if ranks.ep == 1:
                yield from _experts(
                    shape, layer_tensors, ranks, range(shape.moe.experts if shape.moe else 0), tp
                )
    if last:
        for name in ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias"):
            if name in native:
                yield name, native[name]
        if shared:
            name = "embedding.word_embeddings.weight"
            yield "shared", cut(shape, name, native[name], tp, ranks.tp)
        elif not shape.tied:
            yield "head", cut(shape, "output_layer.weight", native["output_layer.weight"], tp, ranks.tp)


def _spread(
    shape: ModelShape, native: megatron.Tensors, ranks: Ranks, number: int, tp: int, ep: int
) -> Iterator[tuple[str, Tensor]]:
    assert shape.moe is not None
    each = shape.moe.experts // ranks.ep
    for layer in ranks.stages[number]:
        layer_tensors = _layer(native, layer)
        yield from _experts(shape, layer_tensors, ranks, range(ep * each, (ep + 1) * each), tp)


def _experts(
    shape: ModelShape, layer_tensors: megatron.Tensors, ranks: Ranks, experts: range, tp: int
) -> Iterator[tuple[str, Tensor]]:
    names = ["mlp.experts.experts.linear_fc1.weight", "mlp.experts.experts.linear_fc2.weight"]
    pairs = (
        [(n, e) for n in names for e in experts]
        if ranks.grouped
        else [(n, e) for e in experts for n in names]
    )
    for name, expert in pairs:
        yield name, cut(shape, name, layer_tensors[name][expert], tp, ranks.tp)


def _layer(native: megatron.Tensors, layer: int) -> megatron.Tensors:
    prefix = f"decoder.layers.{layer}."
    return {name.removeprefix(prefix): t for name, t in native.items() if name.startswith(prefix)}


def _is_of(name: str, module: str) -> bool:
    """Whether a module of a layer has a parameter; `.layer_norm` stands for the norm before a linear."""
    if "experts" in name or "router" in name:
        return False
    norm = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    return (
        f"{module}_" in norm
        if module.endswith("layer_norm")
        else f"{module}." in norm and "layer_norm" not in norm
    )


def cut(shape: ModelShape, name: str, tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """A tensor-parallel rank's share: columns of linears after attention and MLP, rows of those before."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(ranks, 1)[rank]
    if shape.gated and name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)])
    if "word_embeddings" in name or "output_layer" in name or ("norm" not in name and _has_rows(name)):
        return tensor.chunk(ranks)[rank]
    return tensor


def _has_rows(name: str) -> bool:
    return "linear_qkv." in name or "linear_fc1." in name


def _settings() -> dict[str, Any]:
    return {"param_groups": megatron.adam(7, tensor=False)["optimizer"]["param_groups"]}
