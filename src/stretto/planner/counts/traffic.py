"""Bytes that one rank communicates in a layer for one microbatch, exact, by axis, collective and action."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import lcm
from typing import Literal, NamedTuple

from stretto.job.shape import ModelShape
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.machines.cluster import Collective

Phase = Literal["F", "R", "I", "W"]  # forward, the forward again, input gradient, weight gradient
_COUNT = 8  # bytes of an int64


class Message(NamedTuple):
    """A collective, or a message, of one rank.

    Attributes:
        axis: the group: "tp", "cp", "ep", "expert_tp", or several, as in "tp-cp".
        size: bytes, as `collective_seconds` takes them.
        phase: the action that it belongs to.
        times: number of such messages.
        overlaps: it overlaps with the layer's computation, as the keys and values of a ring do.
    """

    axis: str
    kind: Collective
    size: int
    phase: Phase
    times: int = 1
    overlaps: bool = False


def layer_traffic(
    kind: str, shape: ModelShape, compute: ComputeConfig, cp_index: int | None = None
) -> tuple[Message, ...]:
    """Return the messages of a layer: `kind` is that of `job.chain`. Between an encoder and its decoder they
    are those of the embedding of the decoder's tokens.
    """
    if kind == "block":
        return block_traffic(shape, compute, cp_index)
    return head_traffic(shape, compute) if kind == "head" else embedding_traffic(shape, compute)


def block_traffic(
    shape: ModelShape, compute: ComputeConfig, cp_index: int | None = None
) -> tuple[Message, ...]:
    """Return the messages of one block with `compute.recompute`, with even routing to experts.

    Args:
        cp_index: the rank's index along cp, or None for the rank that sends most, for which the others wait:
            the ranks of a ring do not send equally much.
    """
    core = tuple(_core(shape, compute, cp_index))
    mlp = tuple(_linears(compute, shape.hidden) if shape.moe is None else _experts(shape, compute))
    others = (*_attention_linears(shape, compute), *mlp)
    if shape.encoder_layers:  # the linears of cross-attention; keys and values take the encoder's tokens
        keys_and_values = into_columns(compute.for_memory, shape.hidden)
        cross = (*_linears(compute, shape.hidden), *keys_and_values)
        others = (*_attention_linears(shape, compute), *cross, *mlp)
    again = (*core, *others) if compute.recompute == "full" else ()
    if compute.repeats("core_attn"):
        again = core
    if compute.repeats("mlp" if shape.moe is None else "moe"):
        again += mlp
    repeated = [m._replace(phase="R") for m in again if m.phase == "F"]
    return (*_kept_input(shape, compute), *core, *others, *repeated)


def embedding_traffic(shape: ModelShape, compute: ComputeConfig) -> tuple[Message, ...]:
    """Traffic of the embedding: partial rows of a vocabulary that is split over tp are summed."""
    if compute.tp == 1:
        return ()
    size = compute.element * compute.tokens * shape.hidden
    if not compute.sequence_parallel:
        return (Message(axis="tp", kind="all-reduce", size=size, phase="F"),)
    return (
        Message(axis="tp", kind="reduce-scatter", size=size, phase="F"),
        Message(axis="tp", kind="all-gather", size=size, phase="I"),
    )


def head_traffic(shape: ModelShape, compute: ComputeConfig) -> tuple[Message, ...]:
    """Traffic of the last norm, the logits and the loss."""
    return (
        *output_traffic(shape, compute, into_columns(compute, shape.hidden)),
        *loss_traffic(shape, compute),
    )


def output_traffic(
    shape: ModelShape, compute: ComputeConfig, messages: Iterable[Message]
) -> Iterator[Message]:
    """Traffic of the output layer, from that of a product with all tokens: in chunks, the backward computes
    all of it, and gathers its input once.
    """
    chunked = compute.loss_chunk_tokens(shape) > 0
    for message in messages:
        if not chunked:
            yield message
        elif message.phase != "W":
            yield message._replace(phase="I")


def loss_traffic(shape: ModelShape, compute: ComputeConfig) -> Iterator[Message]:
    """Traffic of the loss: of each chunk one all-reduce for the largest logit, and one for the sum of
    exponentials and the target's logit together.
    """
    if compute.tp == 1:
        return
    chunk = compute.loss_chunk_tokens(shape)
    phase: Phase = "I" if chunk else "F"
    chunks, remainder = divmod(compute.tokens, chunk or compute.tokens)
    for tokens, count in ((chunk or compute.tokens, chunks), (remainder, 1)):
        for numbers in (1, 2):
            size = numbers * compute.statistic * tokens
            if size:
                yield Message(axis="tp", kind="all-reduce", size=size, phase=phase, times=count)


# ------------------------------------------------------------------ dense layers


def into_columns(compute: ComputeConfig, hidden: int) -> Iterator[Message]:
    """Traffic of a linear that is split by output features."""
    size = compute.element * compute.tokens * hidden
    if compute.tp == 1:
        return
    if compute.sequence_parallel:
        yield Message(axis="tp", kind="all-gather", size=size, phase="F")
        yield Message(axis="tp", kind="reduce-scatter", size=size, phase="I")
        yield Message(axis="tp", kind="all-gather", size=size, phase="W")  # the input is gathered again
    else:
        yield Message(axis="tp", kind="all-reduce", size=size, phase="I")


def out_of_rows(compute: ComputeConfig, hidden: int) -> Iterator[Message]:
    """Traffic of a linear that is split by input features."""
    size = compute.element * compute.tokens * hidden
    if compute.tp == 1:
        return
    if compute.sequence_parallel:
        yield Message(axis="tp", kind="reduce-scatter", size=size, phase="F")
        yield Message(axis="tp", kind="all-gather", size=size, phase="I")
    else:
        yield Message(axis="tp", kind="all-reduce", size=size, phase="F")


def _linears(compute: ComputeConfig, hidden: int) -> Iterator[Message]:
    """Traffic of two linears, split by output and then by input features."""
    yield from into_columns(compute, hidden)
    yield from out_of_rows(compute, hidden)


def _attention_linears(shape: ModelShape, compute: ComputeConfig) -> Iterator[Message]:
    """Traffic of the linears around attention. Of latent attention those to narrow vectors are whole on every
    rank and communicate nothing; narrow vectors go into those to heads, and the key of all heads to these.
    """
    latent = shape.latent
    if latent is None:
        yield from _linears(compute, shape.hidden)
        return
    yield from into_columns(compute, latent.q_rank or shape.hidden)
    yield from into_columns(compute, latent.kv_rank)
    for message in into_columns(
        compute, latent.rope_dim
    ):  # no product, so nothing is gathered for its weights
        if message.phase != "W":
            yield message
    yield from out_of_rows(compute, shape.hidden)


def _kept_input(shape: ModelShape, compute: ComputeConfig) -> Iterator[Message]:
    """The gather of a block's input before it is recomputed, if each tp rank keeps a part of it."""
    if (
        compute.recompute == "full"
        and compute.shard_inputs
        and not compute.sequence_parallel
        and compute.tp > 1
    ):
        part = compute.batch * -(-compute.tokens // compute.batch // compute.tp)
        yield Message(
            axis="tp", kind="all-gather", size=compute.element * compute.tp * part * shape.hidden, phase="R"
        )


# ------------------------------------------------------------------ attention over several ranks


def _core(shape: ModelShape, compute: ComputeConfig, cp_index: int | None) -> Iterator[Message]:
    if compute.cp == 1:
        return
    keys = compute.kv_heads(shape)
    both = shape.head_dim + shape.value_dim  # a head's key and value
    if compute.context == "ring":
        # keys and values travel round the ring in the forward, and again in the backward followed by their
        # gradients. A rank behind the owner of a block attends to half of its positions only, so only that
        # half is sent there
        half = compute.tokens // 2 * (keys * both)  # elements of keys and values of half of the positions
        c = compute.cp
        if cp_index is None:
            blocks, gradients = (c - 1, 0), (c - 1, 0)
        else:
            to = (cp_index - 1) % c
            owners = [(cp_index + step) % c for step in range(c - 1)]
            halves = sum(owner < to for owner in owners)
            blocks = c - 1 - halves, halves
            gradients = (c - 1, 0) if cp_index == 0 else (c - 2, 1)  # only half of the first rank's block
        for phase in ("F", "I"):
            yield from _sends(blocks, compute.element * half, phase)
        yield from _sends(gradients, compute.statistic * half, "I")
        return
    heads = shape.heads // compute.tp
    copied = lcm(keys, compute.cp)  # heads are repeated until every rank gets whole ones
    sent = compute.element * compute.tokens * (heads * shape.head_dim + copied * both)
    returned = compute.element * compute.tokens * heads * shape.value_dim
    for phase in ("F", "I"):
        yield Message(axis="cp", kind="all-to-all", size=sent, phase=phase)
        yield Message(axis="cp", kind="all-to-all", size=returned, phase=phase)


def _sends(counts: tuple[int, int], half: int, phase: Phase) -> Iterator[Message]:
    for size, count in zip((2 * half, half), counts, strict=True):
        if count:
            yield Message(axis="cp", kind="send", size=size, phase=phase, times=count, overlaps=True)


# ------------------------------------------------------------------ experts


def _experts(shape: ModelShape, compute: ComputeConfig) -> Iterator[Message]:
    moe, hidden = shape.moe, shape.hidden
    assert moe is not None
    if compute.replicated_routing:
        # Experts are split as a dense MLP is. The router needs all tokens, so that its gathered input is kept
        # and not gathered again in W.
        yield from (message for message in _linears(compute, hidden) if message.phase != "W")
    else:
        yield from _dispatched_tokens(shape, compute)
    length = compute.tokens // compute.batch
    routed = length if compute.replicated_routing else -(-length // compute.tp)
    sample, parts = ("cp", compute.cp) if compute.replicated_routing else ("tp-cp", compute.tp * compute.cp)
    if parts > 1 and moe.capacity is not None:  # capacity is that of whole samples
        choices = 2 * compute.statistic * compute.batch * routed * moe.top_k
        yield Message(axis=sample, kind="all-gather", size=parts * choices, phase="F")
    if parts > 1 and moe.balance:
        # the balance loss is formed once, in the forward that builds the graph
        phase: Phase = "R" if compute.recompute == "full" else "F"
        yield Message(axis=sample, kind="all-reduce", size=_COUNT * compute.batch * moe.experts, phase=phase)
    if moe.shared_ffn:
        yield from _linears(compute, hidden)


def _dispatched_tokens(shape: ModelShape, compute: ComputeConfig) -> Iterator[Message]:
    """Each rank's tokens go to the ranks that hold their experts, and from there to all ranks with a slice of
    these.
    """
    moe, hidden = shape.moe, shape.hidden
    assert moe is not None
    slices = compute.expert_shards
    tokens = compute.batch * -(-compute.tokens // compute.batch // compute.tp)
    if compute.tp > 1 and not compute.sequence_parallel:
        size = compute.element * compute.tp * tokens * hidden
        yield Message(axis="tp", kind="all-gather", size=size, phase="F")
        yield Message(axis="tp", kind="all-gather", size=size, phase="I")
    if compute.ep * slices > 1:
        counts = _COUNT * moe.experts * compute.ep * slices
        yield Message(axis="expert_tp-ep", kind="all-gather", size=counts, phase="F")
    rows = compute.element * tokens * moe.top_k * hidden
    if compute.ep > 1:
        yield Message(axis="ep", kind="all-to-all", size=rows, phase="F", times=2)
        yield Message(axis="ep", kind="all-to-all", size=rows, phase="I", times=2)
    if slices > 1:
        for phase in ("F", "I"):
            yield Message(axis="expert_tp", kind="all-gather", size=slices * rows, phase=phase)
            yield Message(axis="expert_tp", kind="reduce-scatter", size=slices * rows, phase=phase)
