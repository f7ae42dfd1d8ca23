"""Closed forms that papers give for the activations of a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stretto.job.framework import CORE
from stretto.job.shape import ModelShape
from stretto.planner.counts.compute import ComputeConfig


@dataclass(frozen=True)
class Published:
    """The closed form that a paper gives for a block's activations, evaluated in bytes."""

    bytes: float
    formula: str
    source: str


def published_formula(shape: ModelShape, compute: ComputeConfig) -> Published | None:
    """The closed form of Korthikanti et al. 2022, table 2, for this block, or None if it does not apply
    (`deviations`).
    """
    return None if any(True for _ in deviations(shape, compute)) else closed_form(shape, compute)


Reason = tuple[str, dict[str, int | str]]  # a text with {names}, and their values


def deviations(shape: ModelShape, compute: ComputeConfig) -> Iterator[Reason]:
    """Yield what this block has and the paper's has not: it is GPT's in 16 bits with dropout, no grouped
    heads, inner width 4h, the attention core alone recomputed, and no context parallelism.
    """
    if shape.encoder_layers:
        yield "an encoder, to whose output the decoder attends", {}
    if shape.latent is not None:
        yield "latent attention: keys and values go through narrow vectors", {}
    elif shape.kv_heads != shape.heads:
        yield (
            "grouped-query attention: {keys} key heads of {heads}",
            {"keys": shape.kv_heads, "heads": shape.heads},
        )
    if shape.attention_width != shape.hidden:
        yield "heads of {n} features in all, not h = {h}", {"n": shape.attention_width, "h": shape.hidden}
    if shape.moe is not None:
        yield "experts in place of the MLP: of every token its choices are kept", {}
    elif shape.gated:
        text = "a gated MLP: both factors and their product of {n} features, not one output of 4h"
        yield text, {"n": shape.ffn}
    elif shape.ffn != 4 * shape.hidden:
        yield "an MLP of inner width {n}, not 4h", {"n": shape.ffn}
    if not shape.dropout:
        yield "no dropout: neither masks nor dropped probabilities", {}
    if not shape.learned:
        yield "{kind} positions, not learned ones", {"kind": shape.position_embedding}
    if compute.element != 2:
        yield "activations of {n} bytes, not 2", {"n": compute.element}
    if compute.cp > 1:
        yield "context parallelism: a rank has a part of a sample, of {n}", {"n": compute.cp}
    if compute.framework.operators != CORE:
        yield "selective recomputation of other operators", {}


def closed_form(shape: ModelShape, compute: ComputeConfig) -> Published:
    """The closed form evaluated, whether or not it was made for such a block."""
    t = compute.tp
    sbh = compute.sequence * compute.batch * shape.hidden
    quadratic = 0.0
    if not compute.repeats("core_attn"):
        quadratic = 5 * shape.heads * compute.sequence**2 * compute.batch / compute.tp
    if compute.recompute == "full":
        shared = compute.sequence_parallel or compute.shard_inputs
        value, text = 2 * sbh / (t if shared else 1), "2sbh/t" if shared else "2sbh"
    elif compute.sequence_parallel:
        value = sbh * 34 / t + quadratic
        text = "sbh(34/t+5as/(ht))" if quadratic else "sbh(34/t)"
    elif t > 1:
        value = sbh * (10 + 24 / t) + quadratic
        text = "sbh(10+24/t+5as/(ht))" if quadratic else "sbh(10+24/t)"
    else:
        value = sbh * 34 + quadratic
        text = "sbh(34+5as/h)" if quadratic else "34sbh"
    return Published(value, text, "Korthikanti et al. 2022, table 2")


def closed_form_parts(shape: ModelShape, compute: ComputeConfig) -> dict[str, float]:
    """The terms of the closed form, bytes: of "norms", "attention" without its scores, "scores" and "mlp";
    with full recomputation of the "input" alone. Section 4.1 of the paper; over tp ranks section 4.2.
    """
    if compute.recompute == "full":
        return {"input": closed_form(shape, compute).bytes}
    sbh = compute.sequence * compute.batch * shape.hidden
    t = compute.tp
    unsplit = t if compute.sequence_parallel else 1  # ranks that share what tensor parallelism leaves whole
    scores = 0 if compute.repeats("core_attn") else 5 * shape.heads * compute.sequence**2 * compute.batch / t
    return {
        "norms": 4 * sbh / unsplit,
        "attention": sbh * (3 / unsplit + 8 / t),
        "scores": scores,
        "mlp": sbh * (3 / unsplit + 16 / t),
    }
