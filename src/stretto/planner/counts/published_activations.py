"""Closed forms that papers give for the activations of a block."""

from __future__ import annotations

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
    """The closed form of Korthikanti et al. 2022, table 2, for this block, or None if it does not apply.

    It covers GPT in 16 bits with dropout, explicit attention, no grouped heads, inner width 4h and no context
    parallelism.
    """
    standard = shape.kv_heads == shape.heads and shape.ffn == 4 * shape.hidden
    standard = standard and shape.attention_width == shape.hidden and shape.moe is None
    if (
        not shape.learned
        or shape.encoder_layers
        or not shape.dropout
        or not standard
        or compute.framework.operators != CORE
    ):
        return None
    if compute.element != 2 or compute.cp > 1:
        return None
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
