"""Bytes of the activations that a rank works on, by which layers' memory is counted."""

from __future__ import annotations

from stretto.job.shape import ModelShape
from stretto.planner.counts.activations import ComputeConfig

_RATE = 4  # bytes of a random number


class Sizes:
    """Bytes of the activations that a rank works on."""

    def __init__(self, shape: ModelShape, compute: ComputeConfig, separate_gradients: bool) -> None:
        e = compute.element
        t = compute.tokens
        tp = compute.tp
        self.residual = e * compute.shard * shape.hidden
        self.halves = e < 4
        # in the type that norms, routers and losses compute in
        self.exact_residual = compute.statistic * compute.shard * shape.hidden
        self.gathered = e * t * shape.hidden if compute.sequence_parallel and tp > 1 else 0
        # attention and loss need a gathered sequence in the order of samples; one sample is in order anyway
        self.ordered = self.gathered if compute.batch > 1 else 0
        # the input gradient of a column-split linear: before, during and after its reduce-scatter
        self.column = 2 * self.gathered + self.residual if self.gathered else e * t * shape.hidden
        self.inner = e * t * shape.ffn // tp
        self.wide = self.inner * (2 if shape.gated else 1)
        self.q = e * t * shape.attention_width // tp
        self.kv = e * t * compute.kv_heads(shape) * shape.head_dim
        self.v = self.kv * shape.value_dim // shape.head_dim
        self.y = self.q * shape.value_dim // shape.head_dim  # attention's output
        self.wider = compute.statistic // e  # elements that norms, scores and losses compute in over these
        self.scores = e * (shape.heads // tp) * t * (t * compute.cp // compute.batch)
        memory = compute.of_memory
        self.cross_scores = e * (shape.heads // tp) * t * (memory.tokens // compute.batch)
        self.cross_kv = e * memory.tokens * compute.kv_heads(shape) * shape.head_dim
        self.memory = e * memory.shard * shape.hidden
        self.memory_gathered = e * memory.tokens * shape.hidden if compute.sequence_parallel and tp > 1 else 0
        # beside the scores: scaled scores, and with 16 bits two tensors in float32
        self.softmax = (1 if compute.framework.fused_softmax else 4 if self.halves else 2) * self.scores
        # the random numbers of a sample's mask, of all heads; PyTorch's own dropout stores none
        self.draw = _RATE * shape.heads * (compute.tokens * compute.cp // compute.batch) ** 2
        self.draw *= not compute.framework.fused_softmax
        # backward of a norm: gradients of output, input and residual path; in 16 bits also, in float32, that
        # of the output, the normalised input, and their product
        self.norm = 3 * self.residual + (3 * self.exact_residual if self.halves else 0)
        self.columns = compute.vocabulary_rows(shape)
        self.logits = e * t * self.columns
        self.exact = compute.statistic * t * self.columns
        self.weight = (
            e if separate_gradients or self.halves else 0
        )  # of an element of a weight gradient formed apart
