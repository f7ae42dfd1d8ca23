"""Configuration of one rank's computation, on which counts of activations, traffic and time depend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from stretto.job.attention import AttentionKernel, ContextKind
from stretto.job.chain import ChainLayer
from stretto.job.flops import Recompute
from stretto.job.framework import STRETTO, Framework, Operator
from stretto.job.job import Job
from stretto.job.shape import ModelShape

LOGITS_BYTES = 64 * 2**20  # logits of a microbatch in float32 up to which chunks do not pay off
# tokens of a chunk that keep products efficient and gradients of weights from being read often
SMALLEST_CHUNK = 256


def loss_chunk_tokens(choice: int | None, tokens: int, columns: int, hidden: int) -> int:
    """Tokens of a chunk, or 0 if the loss is not computed in chunks.

    Without a choice, a chunk is half as many tokens as a token has features: its logits in float32 then
    take half the memory of the layer's weights in float32, an eighth of theirs and their states'. Fewer would
    read and write the gradient of the weights more often than its product takes.

    Args:
        choice: `Job.loss_chunk`.
        tokens: tokens of a microbatch on this rank.
        columns: entries of the vocabulary on this rank.
        hidden: features of a token.
    """
    if choice is not None:
        return choice and min(choice, tokens)
    longest = max(SMALLEST_CHUNK, hidden // 2)
    if 4 * tokens * columns <= LOGITS_BYTES or tokens <= longest:
        return 0
    return ceil(tokens / ceil(tokens / longest))


ELEMENT_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Configuration of one rank's computation of a microbatch.

    Attributes:
        batch: samples of a microbatch.
        sequence: tokens of a sample, on all ranks together; in an encoder-decoder model of the encoder's.
        target: tokens of the decoder's sample in an encoder-decoder model, else 0.
        memory: in a decoder's layer, tokens of the encoder's sample, which cross-attention sees.
        element: bytes of an activation's element: 2, 4 or 8.
        expert_tp: ranks that split each expert, or None for tp.
        attention: `explicit` forms the matrix of probabilities; dropout always does.
        context: kind of attention if cp > 1.
        shard_inputs: the saved input of a block is split over tp with full recomputation.
        vocab_multiple: each rank's share of the vocabulary is a multiple of it.
        loss_chunk: tokens whose logits and loss are computed at a time, 0 for all, or None for as many as pay
            off.
        fused_loss: one kernel computes the loss from the 16-bit logits, another their gradient into a tensor
            of the same type, so that no tensor of the vocabulary's width is made in float32.
        accelerator: no CPU: one kernel computes RMSNorm and another its backward, products are added to
            gradients of any type in place, and a reduce-scatter needs no memory besides its result.
        framework: which operators selective recomputation repeats, and what one kernel makes.
    """

    batch: int
    sequence: int
    element: int = 2
    tp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    sequence_parallel: bool = False
    attention: AttentionKernel = "auto"
    context: ContextKind = "ring"
    recompute: Recompute = "none"
    shard_inputs: bool = False
    vocab_multiple: int = 1
    loss_chunk: int | None = 0
    fused_loss: bool = False
    accelerator: bool = False
    framework: Framework = STRETTO
    target: int = 0
    memory: int = 0

    @classmethod
    def of(cls, job: Job) -> ComputeConfig:
        """The config of a job without recomputation; in an encoder-decoder model of the encoder's layers."""
        layout = job.layout
        return cls(
            batch=job.micro_batch,
            sequence=job.sequence,
            target=job.target_sequence if job.shape.encoder_layers else 0,
            element=ELEMENT_BYTES[job.precision.dtype],
            tp=layout.tp,
            cp=layout.cp,
            ep=layout.ep,
            expert_tp=layout.expert_tp if layout.ep > 1 else None,
            sequence_parallel=job.sequence_parallel and layout.tp > 1,
            attention=job.attention,
            context=job.context,
            shard_inputs=job.recompute.shard_inputs,
            vocab_multiple=job.vocab_multiple,
            loss_chunk=job.loss_chunk,
            fused_loss=job.fused_loss,
            accelerator=not job.unified_memory,
            framework=job.framework,
        )

    def for_layer(self, layer: ChainLayer) -> ComputeConfig:
        """The config of a layer: a decoder's layer behind an encoder takes the decoder's tokens."""
        if not layer.decoder or self.memory:
            return self
        return replace(self, sequence=self.target, target=0, memory=self.sequence)

    @cached_property
    def for_memory(self) -> ComputeConfig:
        """The config with which a decoder's layer computes on the encoder's tokens."""
        return replace(self, sequence=self.memory or self.sequence, memory=0)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a microbatch that this rank computes in attention, MLP and loss, padding included."""
        unit = (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sequence_parallel else 1)
        return self.batch * (-(-self.sequence // unit) * unit // self.cp)

    @cached_property
    def expert_shards(self) -> int:
        """Ranks that split the inner width of each expert."""
        return self.tp if self.expert_tp is None else self.expert_tp

    @property
    def replicated_routing(self) -> bool:
        """True if all tp ranks route the same tokens: experts are split over tp alone, as a dense MLP is."""
        return self.ep == 1 and self.expert_shards == self.tp

    def repeats(self, operator: Operator) -> bool:
        """True if selective recomputation repeats it."""
        return self.recompute == "selective" and operator in self.framework.operators

    def kv_heads(self, shape: ModelShape) -> int:
        """Key and value heads on one rank; copied if there are fewer heads than tp ranks."""
        return max(shape.kv_heads // self.tp, 1)

    def vocabulary_rows(self, shape: ModelShape) -> int:
        """Rows of the vocabulary on one rank, padding included."""
        return vocabulary_rows(shape, self.tp, self.vocab_multiple)

    def loss_chunk_tokens(self, shape: ModelShape) -> int:
        """Tokens of a chunk in which logits and loss are computed, or 0 for all of a microbatch at once."""
        columns = self.vocabulary_rows(shape)
        return loss_chunk_tokens(self.loss_chunk, self.tokens, columns, shape.hidden)

    def stores_scores(self, shape: ModelShape) -> bool:
        """True if attention keeps its probabilities: if they are dropped, or if scores have a trained bias,
        which torch's fused kernels do not give a gradient.
        """
        return self.stores_cross_scores(shape) or shape.relative

    def stores_cross_scores(self, shape: ModelShape) -> bool:
        """True if attention to an encoder's output, whose scores have no bias, keeps its probabilities."""
        return self.attention == "explicit" or shape.dropout > 0

    @property
    def shard(self) -> int:
        """Tokens of a microbatch that this rank holds in norms, dropout and the residual stream."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def statistic(self) -> int:
        """Bytes of an element of statistics (of norms, softmax and loss), which have at least 32 bits."""
        return max(4, self.element)


def vocabulary_rows(shape: ModelShape, tp: int, multiple: int) -> int:
    """Rows of the vocabulary on each of `tp` ranks, padded to a multiple."""
    return -(-shape.vocab // (tp * multiple)) * multiple
