"""What a rank computes and sends for a layer of which some parameters are frozen, or have adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from stretto.job.chain import layer_of
from stretto.job.finetune import TrainedParameters
from stretto.job.lora import is_adapter
from stretto.job.shape import ModelShape
from stretto.planner.counts.activations import ComputeConfig
from stretto.planner.counts.rank_parameters import Shares, layer_parameters
from stretto.planner.counts.traffic import Message, into_columns, loss_traffic, out_of_rows, output_traffic

_ROWS = ("attn.proj", "mlp.down")  # linears of a block that are split by input features


def frozen_flops(
    shape: ModelShape, layer: int, compute: ComputeConfig, trained: TrainedParameters, upstream: bool
) -> tuple[int, int]:
    """Operations of the linears of a dense block, or of the head, forward and backward, where some are frozen
    or have adapters: a frozen one has no product for its weights, and none for an input that nothing trained
    comes before.

    Args:
        layer: 1 the first block, then the others, then the head.
        upstream: something before this layer is trained.
    """
    forward = backward = 0
    reached, inside = upstream, False
    module = ""
    for parameter in layer_parameters(shape, layer, Shares.of(compute)):
        base = parameter.name.partition(".lora.")[0].rpartition(".")[0]
        if is_adapter(parameter.name):
            base = parameter.name.partition(".lora.")[0]
        if base != module:
            reached, inside = reached or inside, False
            module = base
        update = trained(parameter.name)
        inside = inside or update
        if len(parameter.plain) != 2 or parameter.name.endswith("pos.weight"):
            continue
        # a factor that every rank has whole sees a rank's own tokens only
        replicated = is_adapter(parameter.name) and parameter.elements == prod(parameter.plain)
        flops = 2 * (compute.shard if replicated else compute.tokens) * parameter.elements
        forward += flops
        backward += flops * (update + (reached or parameter.name.endswith(".B.weight")))
    if backward and layer == shape.chain - 1 and compute.loss_chunk_tokens(shape):
        return 0, forward + backward
    return forward, backward


def frozen_traffic(
    shape: ModelShape,
    layer: int,
    compute: ComputeConfig,
    trained: TrainedParameters,
    *,
    upstream: bool,
    traffic: Sequence[Message],
) -> tuple[Message, ...]:
    """Messages of the embedding, a dense block or the head: nothing is gathered for gradients of frozen
    weights, no gradient is sent for an input that nothing trained comes before, and adapters exchange for
    their narrow vectors what their linears do for wide ones.

    Args:
        layer: 0 the embedding, then the blocks, then the head.
        upstream: something before this layer is trained.
        traffic: messages of the layer if all of it were trained.
    """
    kind = layer_of(shape, layer).kind
    if kind in ("embed", "between"):
        return tuple(m for m in traffic if m.phase == "F" or trained("embed.tok.weight"))
    linears = tuple(_linears(shape, layer, compute, trained, upstream))
    if kind == "head":
        return (*output_traffic(shape, compute, linears), *loss_traffic(shape, compute))
    below, reached = reached_parts(shape, layer, trained, upstream)
    # where each rank keeps a part of a block's input, this is gathered to recompute it
    regathers = compute.shard_inputs and not compute.sequence_parallel
    around = [
        m for m in traffic if m.axis != "tp" or (regathers and (m.phase, m.kind) == ("R", "all-gather"))
    ]
    around = [m for m in around if {"F": True, "R": reached}.get(m.phase, below)]
    again = [replace(m, phase="R") for m in linears if m.phase == "F"]
    return (*around, *linears, *(again if reached and compute.recompute == "full" else ()))


def reached_parts(
    shape: ModelShape, layer: int, trained: TrainedParameters, upstream: bool
) -> tuple[bool, bool]:
    """Whether the backward reaches a block's attention, and whether it reaches the block at all."""
    names = [p.name for p in layer_parameters(shape, layer, Shares())]
    below = [n for n in names if ".norm1." in n or (".attn." in n and ".attn.proj." not in n)]
    return upstream or any(map(trained, below)), upstream or any(map(trained, names))


def is_column(name: str) -> bool:
    """True if a parameter belongs to a linear, or its adapter, that is split by output features."""
    return not any(f".{linear}." in name for linear in _ROWS)


def _linears(
    shape: ModelShape, layer: int, compute: ComputeConfig, trained: TrainedParameters, upstream: bool
) -> Iterator[Message]:
    """Messages of the linears and their adapters, in order."""
    reached, inside = upstream, False
    module = ""
    for parameter in layer_parameters(shape, layer, Shares.of(compute)):
        name = parameter.name
        base = name.partition(".lora.")[0] if is_adapter(name) else name.rpartition(".")[0]
        if base != module:
            reached, inside = reached or inside, False
            module = base
        update = trained(name)
        inside = inside or update
        if len(parameter.plain) != 2 or name.endswith("pos.weight"):
            continue
        rows, columns = parameter.plain
        if not is_adapter(name):
            flow = into_columns(compute, columns) if is_column(name) else out_of_rows(compute, rows)
            needed = reached
        elif name.endswith(".B.weight") and is_column(name):
            flow, needed = into_columns(compute, columns), True
        elif name.endswith(".A.weight") and not is_column(name):
            flow, needed = out_of_rows(compute, rows), reached
        else:  # whole on every rank
            continue
        for message in flow:
            wanted = {"F": True, "I": needed, "W": update}[message.phase]
            # of a linear split by input features the gradient of the output is gathered for both
            both = message.kind == "all-gather" and message.phase == "I" and update
            if wanted or both:
                yield message
