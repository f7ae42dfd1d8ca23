"""Bytes that one layer keeps on one rank between its forward and its backward, tensor by tensor.

Counted is what autograd saves, each storage once, without parameters and without the batch itself. For GPT
with explicit attention and dropout these are the terms of Korthikanti et al. 2022, section 4, who count 2
bytes an element and 1 byte a dropout mask, and neglect the statistics of norms (8 bytes a token in all, 1/h
of an activation).

Symbols in formulas: s tokens of a sample, b samples of a microbatch, h hidden size, a heads, k key heads, d
features of a head, f inner width, V vocabulary, t tensor-parallel and c context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, lcm

from stretto.job.attention import AttentionKernel, ContextKind
from stretto.job.chain import ChainLayer
from stretto.job.experts import ExpertShape
from stretto.job.flops import Recompute
from stretto.job.framework import CORE, STRETTO, Framework, Operator
from stretto.job.job import Job
from stretto.job.shape import ModelShape

LOGITS_BYTES = 64 * 2**20  # of a microbatch in float32: those of fewer are not worth chunks
SMALLEST_CHUNK = (
    256  # tokens of a chunk that keep products efficient and gradients of weights from being read often
)


def loss_chunk_tokens(choice: int | None, tokens: int, columns: int, hidden: int) -> int:
    """Tokens of a chunk; 0: the loss is not computed in chunks.

    Where it is left open, a chunk is half as many tokens as there are features: its logits in float32 then
    take half the memory of the layer's weights in float32, an eighth of theirs and their states'. Fewer would
    read and write the gradient of the weights more often than its product takes.

    Args:
        choice: `Job.loss_chunk`.
        tokens: of a microbatch on this rank.
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
    """How one rank computes a microbatch.

    Attributes:
        batch: samples of a microbatch.
        sequence: tokens of a sample, on all ranks together; with an encoder, of the encoder's.
        target: tokens of a decoder's sample beside an encoder; 0: there is none.
        memory: where a decoder's layer computes, tokens of the encoder's sample, which cross-attention sees.
        element: bytes of an activation's element: 2, 4 or 8.
        expert_tp: ranks that split each expert; None: tp.
        attention: `explicit` forms the matrix of probabilities; dropout always does.
        context: kind of attention where cp > 1.
        shard_inputs: with full recomputation the input of a block is kept split over tp.
        vocab_multiple: each rank's share of the vocabulary is a multiple of it.
        loss_chunk: tokens of which logits and loss are computed at a time; 0: all; None: as many as pay off.
        fused_loss: one kernel computes the loss from the 16-bit logits, another their gradient into a tensor
            of the same type, so that no tensor of the vocabulary's width is made in float32.
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
    framework: Framework = STRETTO
    target: int = 0
    memory: int = 0

    @classmethod
    def of(cls, job: Job) -> ComputeConfig:
        """The config of a job, without recomputation, of an encoder's layers where there is one."""
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
            framework=job.framework,
        )

    def at(self, layer: ChainLayer) -> ComputeConfig:
        """How a layer computes: one of a decoder beside an encoder takes the decoder's tokens."""
        if not layer.decoder or self.memory:
            return self
        return replace(self, sequence=self.target, target=0, memory=self.sequence)

    @cached_property
    def of_memory(self) -> ComputeConfig:
        """Of a decoder's layer, how it computes with the encoder's tokens."""
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
        """Key and value heads on one rank; copied where there are fewer heads than tp ranks."""
        return max(shape.kv_heads // self.tp, 1)

    def vocabulary_rows(self, shape: ModelShape) -> int:
        """Rows of the vocabulary on one rank, padding included."""
        return vocabulary_rows(shape, self.tp, self.vocab_multiple)

    def loss_chunk_tokens(self, shape: ModelShape) -> int:
        """Tokens of a chunk in which logits and loss are computed; 0: all of a microbatch at once."""
        columns = self.vocabulary_rows(shape)
        return loss_chunk_tokens(self.loss_chunk, self.tokens, columns, shape.hidden)

    @property
    def shard(self) -> int:
        """Tokens of a microbatch that this rank holds in norms, dropout and the residual stream."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def statistic(self) -> int:
        """Bytes of an element of statistics (of norms, softmax and loss), which have at least 32 bits."""
        return max(4, self.element)


@dataclass(frozen=True)
class Saved:
    """One tensor that is kept for the backward."""

    name: str
    bytes: int
    formula: str


def vocabulary_rows(shape: ModelShape, tp: int, multiple: int) -> int:
    """Rows of the vocabulary on each of `tp` ranks, padded to a multiple."""
    return -(-shape.vocab // (tp * multiple)) * multiple


def total(saved: tuple[Saved, ...]) -> int:
    """The sum of the tensors' bytes."""
    return sum(tensor.bytes for tensor in saved)


def block_saved(shape: ModelShape, compute: ComputeConfig) -> tuple[Saved, ...]:
    """The tensors that one block keeps between its forward and its backward."""
    if compute.recompute == "full":
        return tuple(_full(shape, compute))
    after = shape.block_norms == "sandwich"
    parts = [("norm1", _attention)]
    parts += [("norm_cross", _cross)] if shape.encoder_layers else []
    parts += [("norm2", _mlp)]
    saved = tuple[Saved, ...]()
    for norm, of in parts:
        before, inside = tuple(_norm(norm, shape, compute)), tuple(of(shape, compute))
        saved += inside + before if shape.block_norms == "post" else before + inside
        saved += tuple(_norm(f"{norm}_post", shape, compute)) if after else ()
    if compute.framework.inputs_in_8_bits:
        saved = tuple(_in_8_bits(tensor, compute) for tensor in saved)
    if compute.recompute != "selective" or compute.framework.operators == CORE:
        return saved
    return tuple(_not_repeated(saved, shape, compute))


def _in_8_bits(tensor: Saved, compute: ComputeConfig) -> Saved:
    """A tensor as Transformer Engine keeps it: the inputs of linears in 8 bits."""
    name = tensor.name
    if not name.endswith(" input") or "norm" in name or name.startswith(("mlp input", "mlp.router")):
        return tensor
    rescale = tensor.bytes if name == "attn.proj input" else 0
    return replace(tensor, bytes=tensor.bytes // compute.element + rescale)


# What the forward need not keep where an operator runs again in the backward: tensors by the beginnings of
# their names. Of `core_attn`, which training has too, see `_core`.
_FREED: Mapping[Operator, tuple[str, ...]] = {
    "core_attn": (),
    "layernorm": ("attn.qkv input", "mlp input", "mlp.up input", "mlp.gate_up input"),
    "mla_up_proj": ("attn.core q", "attn.core k, v"),
    "mlp": ("mlp.up output", "mlp.gate_up output", "mlp activated", "mlp.down input"),
    "moe": ("mlp.router", "mlp.experts", "mlp.shared"),
    "moe_act": ("mlp.experts activated", "mlp.experts.down input"),
    "shared_experts": ("mlp.shared",),
    # products whose outputs are not kept are wk, wo and w3, and everything between products
    "alternate_mm": (
        "norm1 statistics",
        "attn.qkv input",
        "norm2",
        "mlp input",
        "mlp.up input",
        "mlp.gate_up input",
        "mlp activated",
        "mlp.down input",
        "mlp.experts activated",
        "mlp.experts.down input",
    ),
}


def _not_repeated(saved: Iterable[Saved], shape: ModelShape, compute: ComputeConfig) -> Iterator[Saved]:
    """Those tensors that are kept although the operators of `compute` run again, and outputs that are kept in
    place of the tensors that they are made from.
    """
    of_dense = shape.moe is None
    freed = tuple(
        name
        for operator in compute.framework.operators
        if (operator == "mlp") <= of_dense and (operator == "mla_up_proj") <= (shape.latent is not None)
        for name in _FREED[operator]
    )
    alternate = "alternate_mm" in compute.framework.operators
    halved = ("attn.core k, v", "mlp.gate_up output") if alternate else ()
    for tensor in saved:
        if tensor.name in halved and not tensor.name.startswith(freed):
            yield replace(tensor, bytes=tensor.bytes // 2)
        elif not (freed and tensor.name.startswith(freed)):
            yield tensor
    size = compute.element * compute.tokens * shape.hidden
    if (
        "moe" in compute.framework.operators
        and not of_dense
        and not any(tensor.name == "mlp input" for tensor in saved)
    ):
        yield _shard("mlp input", compute.element, compute, shape)
    if alternate:
        yield Saved("mlp.down output", size, _formula(compute.element, "sbh", _over(compute, False)))


def embedding_saved(shape: ModelShape, compute: ComputeConfig) -> tuple[Saved, ...]:
    """The tensors that the embedding keeps. Without tp the token ids are those of the batch, which is not
    counted.
    """
    saved = list[Saved]()
    if compute.tp > 1:
        saved.append(Saved("embed.tok ids", 9 * compute.tokens, _formula(9, "sb", _over(compute, False))))
    if shape.learned:
        over = _over(compute, compute.sequence_parallel)
        saved.append(Saved("embed.pos ids", 8 * compute.shard // compute.batch, _formula(8, "s", over)))
    if shape.embedding_norm:
        saved += _norm("embed.norm", shape, compute)
    if shape.dropout:
        saved.append(_shard("embed.drop mask", 1, compute, shape))
    return tuple(saved)


def between_saved(shape: ModelShape, compute: ComputeConfig) -> tuple[Saved, ...]:
    """The tensors that the layer between an encoder and its decoder keeps: those of the encoder's last norm
    and of the embedding of the decoder's tokens.
    """
    encoder = compute.of_memory
    norm = _norm("memory_norm", shape, encoder) if shape.last_norm else ()
    return (*norm, _shard("memory", compute.element, encoder, shape), *embedding_saved(shape, compute))


def head_saved(shape: ModelShape, compute: ComputeConfig) -> tuple[Saved, ...]:
    """The tensors that the last norm, the output layer and the loss keep."""
    norm = _norm("norm", shape, compute) if shape.last_norm else ()
    logits = () if compute.loss_chunk_tokens(shape) else tuple(_loss(shape, compute))
    return (*norm, _shard("out input", compute.element, compute, shape), *logits)


# ------------------------------------------------------------------ parts


def _full(shape: ModelShape, compute: ComputeConfig) -> Iterator[Saved]:
    tokens, over = compute.shard, compute.sequence_parallel
    if compute.shard_inputs and not over:
        length = compute.tokens // compute.batch
        tokens, over = compute.batch * -(-length // compute.tp), True
    size = 0 if compute.framework.inputs_on_host else compute.element
    yield Saved("block input", size * tokens * shape.hidden, _formula(size, "sbh", _over(compute, over)))


def composed_norms(shape: ModelShape, compute: ComputeConfig) -> bool:
    """True if norms are composed of torch's operators, which keep what is normalised too, and in 16 bits a
    copy of their input in float32: those with a gain of 1 + weight (Gemma's).
    """
    return shape.norm == "rms1p" and compute.framework == STRETTO


def keeps_input(shape: ModelShape, compute: ComputeConfig) -> bool:
    """True if a norm keeps its input itself, and not a copy of it."""
    return compute.element == compute.statistic or not composed_norms(shape, compute)


def _norm(name: str, shape: ModelShape, compute: ComputeConfig) -> Iterator[Saved]:
    """What a norm of the residual stream keeps."""
    tokens, over = compute.shard, _over(compute, compute.sequence_parallel)
    yield from _norm_of(
        name=name, shape=shape, compute=compute, sizes=(tokens, shape.hidden), symbols=("sb", "h"), over=over
    )


def _norm_of(
    name: str,
    shape: ModelShape,
    compute: ComputeConfig,
    sizes: tuple[int, int],
    symbols: tuple[str, str],
    over: str,
    viewed: int | None = None,
) -> Iterator[Saved]:
    """What a norm of the model's kind keeps.

    Args:
        sizes: rows and their width; `symbols` and `over` for formulas.
        viewed: elements of the tensor of which the input is a view; None: of the input itself.
    """
    (rows, width), (of_rows, of_width) = sizes, symbols
    itself, exact = keeps_input(shape, compute), compute.statistic
    size = compute.element if itself else exact
    elements = viewed if itself and viewed is not None else rows * width
    yield Saved(f"{name} input", size * elements, _formula(size, of_rows + of_width, over))
    if composed_norms(shape, compute):
        yield Saved(f"{name} normalised", exact * rows * width, _formula(exact, of_rows + of_width, over))
        yield Saved(f"{name} gain", exact * width, _formula(exact, of_width, ""))
    statistics = (2 if shape.norm == "layer" else 1) * compute.statistic
    yield Saved(f"{name} statistics", statistics * rows, _formula(statistics, of_rows, over))


def _attention(shape: ModelShape, compute: ComputeConfig) -> Iterator[Saved]:
    e = compute.element
    tokens = compute.tokens
    split = _over(compute, True)
    q, kv = shape.attention_width // compute.tp, compute.kv_heads(shape) * shape.head_dim
    if compute.context == "ulysses" and compute.cp > 1 and not compute.repeats("core_attn"):
        heads = compute.kv_heads(shape)
        kv *= lcm(heads, compute.cp) // heads  # heads are repeated until every rank gets whole ones
    yield _shard("attn.qkv input", e, compute, shape)
    yield from _before_heads(shape, compute)
    yield Saved("attn.core q", e * tokens * q, _formula(e, "sbad", split))
    values = kv * shape.value_dim // shape.head_dim
    yield Saved("attn.core k, v", e * tokens * (kv + values), _formula(2 * e, "sbkd", split))
    if not compute.repeats("core_attn"):
        yield from _core(shape, compute)
    q = q * shape.value_dim // shape.head_dim
    yield Saved("attn.proj input", e * tokens * q, _formula(e, "sbad", split))
    if shape.dropout:
        yield _shard("attn.drop mask", 1, compute, shape)


def _before_heads(shape: ModelShape, compute: ComputeConfig) -> Iterator[Saved]:
    """What stands between the residual stream and heads: latent vectors, which ranks of sequence parallelism
    have of their own tokens only, before and after their norms; queries and keys before theirs.
    """
    if shape.latent is not None:
        e, size = compute.element, compute.statistic
        over = _over(compute, compute.sequence_parallel)
        vectors = [("kv", shape.latent.kv_rank, shape.latent.rope_dim)]
        if shape.latent.q_rank is not None:
            vectors.append(("q", shape.latent.q_rank, 0))
        for name, rank, extra in vectors:
            formula = _formula(e, "sb(r+d)" if extra else "sbr", over)
            yield Saved(f"attn.{name}_down_norm input", e * compute.shard * (rank + extra), formula)
            yield Saved(f"attn.{name}_down_norm statistics", size * compute.shard, _formula(size, "sb", over))
            yield Saved(f"attn.{name}_up input", e * compute.shard * rank, _formula(e, "sbr", over))
    if shape.attention.norm is None:
        return
    d, split = shape.head_dim, _over(compute, True)
    q, kv = shape.attention_width // compute.tp, compute.kv_heads(shape) * d
    # queries and keys are views of one product with the values, which a norm that keeps its input keeps whole
    viewed = compute.tokens * (q + 2 * kv), 0
    for name, width, viewed_elements, symbols in (("q", q, viewed[0], "sba"), ("k", kv, viewed[1], "sbk")):
        rows = compute.tokens * width // d
        norm = _norm_of(
            name=f"attn.{name}_norm",
            shape=shape,
            compute=compute,
            sizes=(rows, d),
            symbols=(symbols, "d"),
            over=split,
            viewed=viewed_elements,
        )
        yield from (saved for saved in norm if saved.bytes)


def stores_scores(shape: ModelShape, compute: ComputeConfig) -> bool:
    """True if attention keeps its probabilities: where they are dropped, and where scores have a bias that is
    trained, which torch's fused kernels do not give a gradient.
    """
    return compute.attention == "explicit" or shape.dropout > 0 or shape.relative


def _cross(shape: ModelShape, compute: ComputeConfig) -> Iterator[Saved]:
    """What attention to the encoder's output keeps; m are the encoder's tokens. The output itself is kept
    once for all blocks of a stage.
    """
    e, memory = compute.element, compute.of_memory
    split = _over(compute, True)
    q, kv = shape.attention_width // compute.tp, compute.kv_heads(shape) * shape.head_dim
    yield _shard("cross.q input", e, compute, shape)
    yield Saved("cross.kv input", 0, "0")
    yield Saved("cross.core q", e * compute.tokens * q, _formula(e, "sbad", split))
    yield Saved("cross.core k, v", e * memory.tokens * 2 * kv, _formula(2 * e, "mbkd", split))
    if not compute.repeats("core_attn"):
        heads, length = shape.heads // compute.tp, memory.tokens // compute.batch
        if compute.attention == "explicit" or shape.dropout:
            scores = heads * compute.tokens * length
            yield Saved("cross.core probabilities", e * scores, _formula(e, "asmb", split))
            if shape.dropout:
                yield Saved("cross.core mask", scores, _formula(1, "asmb", split))
                yield Saved("cross.core dropped", e * scores, _formula(e, "asmb", split))
        else:
            size = compute.statistic
            yield Saved("cross.core statistics", size * heads * compute.tokens, _formula(size, "sba", split))
    yield Saved("cross.proj input", e * compute.tokens * q, _formula(e, "sbad", split))
    if shape.dropout:
        yield _shard("cross.drop mask", 1, compute, shape)


def _core(shape: ModelShape, compute: ComputeConfig) -> Iterator[Saved]:
    """What softmax(q k^T) v keeps beside its inputs."""
    e = compute.element
    split = _over(compute, True)
    size = compute.statistic
    heads, length = shape.heads // compute.tp, compute.tokens // compute.batch
    scores = heads * compute.tokens * length * compute.cp
    statistics = Saved("attn.core statistics", size * heads * compute.tokens, _formula(size, "sba", split))
    if compute.cp > 1 and compute.context == "ring":  # keeps no probabilities, whichever kernel computes it
        yield statistics
        if shape.dropout:  # of the pairs computed here: all of the diagonal block, half of each other
            pairs = heads * compute.tokens * length * (compute.cp + 1) // 2
            yield Saved("attn.core mask", pairs, f"{_formula(1, 'as^2b', split)} (c+1)/(2c)")
    elif stores_scores(shape, compute):
        if shape.attention.softcap is not None:
            yield Saved("attn.core capped", e * scores, _formula(e, "as^2b", split))
        yield Saved("attn.core probabilities", e * scores, _formula(e, "as^2b", split))
        if shape.dropout:
            yield Saved("attn.core mask", scores, _formula(1, "as^2b", split))
            yield Saved("attn.core dropped", e * scores, _formula(e, "as^2b", split))
    else:
        yield statistics
    if compute.attention == "flex" and shape.attention.sinks:  # a factor outside of the kernel
        q = shape.attention_width // compute.tp
        yield Saved("attn.core without sinks", e * compute.tokens * q, _formula(e, "sbad", split))
        factor = size + (e if e < size else 0)  # as it is computed, and rounded
        yield Saved("attn.core sinks", factor * heads * compute.tokens, _formula(factor, "sba", split))
    flash = compute.attention != "explicit" and not shape.dropout
    if compute.cp > 1 and flash and compute.context == "ulysses":  # the projection takes it in another order
        q = shape.attention_width // compute.tp
        yield Saved("attn.core output", e * compute.tokens * q, _formula(e, "sbad", split))


def _mlp(shape: ModelShape, compute: ComputeConfig) -> Iterator[Saved]:
    if shape.moe is not None:
        yield from _experts(shape, shape.moe, compute)
    else:
        yield _shard(f"mlp.{_first(shape)} input", compute.element, compute, shape)
        yield from _inner(
            name="mlp",
            rows=compute.tokens,
            width=shape.ffn,
            parts=compute.tp,
            symbols="sbf",
            shape=shape,
            compute=compute,
        )
    if shape.dropout:
        yield _shard("mlp.drop mask", 1, compute, shape)


def _first(shape: ModelShape) -> str:
    return "gate_up" if shape.gated else "up"


def _inner(
    name: str, rows: int, width: int, parts: int, symbols: str, shape: ModelShape, compute: ComputeConfig
) -> Iterator[Saved]:
    """The tensors that an MLP keeps beside its input, for this many rows and one of `parts` slices of its
    width.
    """
    e = compute.element
    inner = rows * width // parts
    first = _first(shape)
    wide, over = 2 if shape.gated else 1, _over(compute, parts > 1)
    if shape.mlp != "relu":  # whose backward looks at its result
        yield Saved(f"{name}.{first} output", wide * e * inner, _formula(wide * e, symbols, over))
    if shape.gated and not compute.framework.fused_activation:
        # the activated gate; of the clamped kind also the clamped gate, its sigmoid, and the other factor
        many = 4 if shape.mlp == "swiglu_clamped" else 1
        yield Saved(f"{name} activated", many * e * inner, _formula(many * e, symbols, over))
    yield Saved(f"{name}.down input", e * inner, _formula(e, symbols, over))


def _experts(shape: ModelShape, moe: ExpertShape, compute: ComputeConfig) -> Iterator[Saved]:
    """The tensors of a mixture of experts under even routing; n are the tokens that a rank routes, r the rows
    that its experts receive.
    """
    e = compute.element
    h = shape.hidden
    k = moe.top_k
    parts = compute.expert_shards
    n = compute.tokens if compute.replicated_routing else -(-compute.tokens // compute.tp)
    rows = n * k if compute.replicated_routing else n * k * parts
    exact = compute.statistic
    if moe.shared_ffn or e >= 4:
        yield _shard("mlp input", e, compute, shape)
    if e < 4:
        yield Saved("mlp.router input", exact * n * h, _formula(exact, "nh", ""))
    scores = (4 if moe.score == "sigmoid" else 2) * exact  # log-sigmoids too, and a number beside each
    numbers = (scores * moe.experts + 8 * k + exact * k + 8 * k + exact) * n
    yield Saved("mlp.router scores, choices, order", numbers, f"({scores}E+{16 + exact}k+{exact})n")
    yield Saved(f"mlp.experts.{_first(shape)} input", e * rows * h, _formula(e, "rh", ""))
    yield from _inner(
        name="mlp.experts",
        rows=rows,
        width=shape.expert_ffn,
        parts=parts,
        symbols="rf",
        shape=shape,
        compute=compute,
    )
    if shape.bias:
        yield Saved("mlp.experts numbers", 8 * rows, "8r")  # the expert of each row
    yield Saved("mlp.experts output", e * n * k * h, _formula(e, "nkh", ""))
    if moe.shared_ffn:
        yield from _inner(
            name="mlp.shared",
            rows=compute.tokens,
            width=moe.shared_ffn,
            parts=compute.tp,
            symbols="sbf",
            shape=shape,
            compute=compute,
        )
    if moe.shared_ffn and moe.shared_gate:
        yield _shard("mlp.shared output", e, compute, shape)
        yield Saved(
            "mlp.shared_gate output",
            e * compute.shard,
            _formula(e, "sb", _over(compute, compute.sequence_parallel)),
        )


def _loss(shape: ModelShape, compute: ComputeConfig) -> Iterator[Saved]:
    columns, size = compute.vocabulary_rows(shape), compute.statistic
    if shape.logit_softcap:  # the hyperbolic tangent
        capped = compute.element * compute.tokens * columns
        yield Saved("out capped", capped, _formula(compute.element, "sbV", _over(compute, True)))
    text = _formula(size, "sbV", _over(compute, True))
    if compute.fused_loss:
        text = _formula(compute.element, "sbV", _over(compute, True))
        yield Saved("loss logits", compute.element * compute.tokens * columns, text)
        yield Saved("loss statistics", size * compute.tokens, _formula(size, "sb", _over(compute, False)))
        return
    if compute.framework.torch_loss and compute.tp == 1 and columns == shape.vocab:
        yield Saved("loss log-probabilities", size * compute.tokens * columns, text)
        yield Saved("loss weight", size, str(size))
        return
    yield Saved("loss probabilities", size * compute.tokens * columns, text)
    yield Saved("loss targets", 10 * compute.tokens, _formula(10, "sb", _over(compute, False)))


def _shard(name: str, size: int, compute: ComputeConfig, shape: ModelShape) -> Saved:
    """A tensor as wide as the residual stream."""
    text = _formula(size, "sbh", _over(compute, compute.sequence_parallel))
    return Saved(name, size * compute.shard * shape.hidden, text)


def _over(compute: ComputeConfig, tp: bool) -> str:
    return ("t" if tp and compute.tp > 1 else "") + ("c" if compute.cp > 1 else "")


def _formula(size: int, symbols: str, over: str) -> str:
    text = f"{size}{symbols}" if size > 1 else symbols
    if not over:
        return text
    return f"{text}/{over}" if len(over) == 1 else f"{text}/({over})"
