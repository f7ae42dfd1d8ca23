"""The tensors of one layer on one rank: what its backward needs, and what else is alive with each of them.

The forward makes these tensors in their order, the backward consumes them in reverse. Counted is what
autograd saves, each storage once, without parameters and without the batch itself. For GPT with explicit
attention and dropout these are the terms of Korthikanti et al. 2022, section 4, who count 2 bytes an element
and 1 byte a dropout mask, and neglect the statistics of norms (8 bytes a token in all, 1/h of an activation).
Alive with a tensor are outputs that have not been handed on, gradients of activations, and products of weight
gradients before they are accumulated, as PyTorch runs the operators.

Symbols in formulas: s tokens of a sample, b samples of a microbatch, h hidden size, a heads, k key heads, d
features of a head, f inner width, V vocabulary, t tensor-parallel and c context-parallel ranks; n tokens that
a rank routes, r rows that its experts receive, m tokens of the encoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from math import lcm

from stretto.job.attention import LatentShape
from stretto.job.experts import ExpertShape
from stretto.job.framework import STRETTO
from stretto.job.shape import ModelShape
from stretto.planner.counts.compute import ComputeConfig


@dataclass(frozen=True)
class LayerTensor:
    """One tensor that a layer's backward needs.

    Attributes:
        formula: its bytes in the symbols of this module.
        saved: True from the forward on; else it is recomputed in the backward, together with its recomputed
            neighbours.
        forward, backward: peak of other bytes while it is made, and while it is consumed.
        product: bytes of its weight gradient if that is formed separately and then accumulated.
        held_until_w: bytes of the output gradient that a split backward keeps with it from I to W, or None if
            I consumes it.
        regathered: bytes of the input that are gathered again for the weight gradient.
        is_residual: that output gradient is the residual stream's, which exists in any case.
    """

    name: str
    bytes: int
    formula: str = ""
    _: KW_ONLY
    saved: bool = True
    forward: int = 0
    backward: int = 0
    product: int = 0
    held_until_w: int | None = None
    regathered: int = 0
    is_residual: bool = False


_RATE = 4  # bytes of a random number
_TILE = 64  # queries of a tile of attention written out, on the CPU where dry runs are
_TILE_SCORES = 1 << 18  # of a tile, unless a single key head has more
_IN_16_BITS = ("mlp input", "mlp.router")  # inputs that Transformer Engine keeps as they are


class LayerWalk:
    """The operations of one layer on one rank, each with the tensors that it leaves to the backward.

    Attributes are bytes, of tensors that several operations see:
        residual, exact_residual: the residual stream of this rank's tokens; in the type that norms, routers
            and losses compute in.
        gathered: the residual stream of all tp ranks' tokens if sequence parallelism gathers it, else 0.
        ordered: the same in the order of samples, which attention and loss need; one sample is in order.
        column: input gradient of a column-split linear before, during and after its reduce-scatter.
        q, kv, v, y: queries; keys or values as wide as keys; values; attention's output.
        scores, softmax: probabilities, and the temporaries that make them.
        inner, wide: input of an MLP's second linear, output of its first.
    """

    def __init__(self, shape: ModelShape, compute: ComputeConfig, separate_gradients: bool = False) -> None:
        self.shape, self.compute = shape, compute
        e = compute.element
        t = compute.tokens
        tp = compute.tp
        gathers = compute.sequence_parallel and tp > 1
        self.halves = e < 4
        self.residual = e * compute.shard * shape.hidden
        self.exact_residual = compute.statistic * compute.shard * shape.hidden
        self.gathered = e * t * shape.hidden if gathers else 0
        self.ordered = self.gathered if compute.batch > 1 else 0
        self.sent = 1 if compute.accelerator else 2  # a tensor, and its copy while ranks sum it
        self.column = self.sent * self.gathered + self.residual if self.gathered else e * t * shape.hidden
        self.inner = e * t * shape.ffn // tp
        self.wide = self.inner * (2 if shape.gated else 1)
        self.q = e * t * shape.attention_width // tp
        self.kv = e * t * compute.kv_heads(shape) * shape.head_dim
        self.v = self.kv * shape.value_dim // shape.head_dim
        self.y = self.q * shape.value_dim // shape.head_dim
        self.wider = compute.statistic // e  # elements that norms, scores and losses compute in over these
        self.scores = e * (shape.heads // tp) * t * (t * compute.cp // compute.batch)
        # scaled scores, and with 16 bits two tensors in float32
        self.softmax = (1 if compute.framework.fused_softmax else 4 if self.halves else 2) * self.scores
        # the random numbers of a sample's mask, of all heads; PyTorch's own dropout stores none
        self.draw = _RATE * shape.heads * (t * compute.cp // compute.batch) ** 2
        self.draw *= not compute.framework.fused_softmax
        encoder = compute.for_memory
        self.memory = e * encoder.shard * shape.hidden
        self.memory_gathered = e * encoder.tokens * shape.hidden if gathers else 0
        # bytes of an element of a weight gradient that is formed separately
        self.weight = e if separate_gradients or (self.halves and not compute.accelerator) else 0
        # norms with a gain of 1 + weight (Gemma's) are composed of torch's operators, and in 16 bits keep a
        # copy of their input in float32; torch's RMSNorm keeps what is normalised too, unless it is fused
        self.composed = shape.norm == "rms1p" and compute.framework == STRETTO
        self.keeps_normalised = self.composed and not compute.accelerator
        self.keeps_input = not (self.composed and self.halves)  # a norm keeps its input, and not a copy of it
        # if norms keep copies, the block's input lives as long as its forward, whatever norms keep
        self.kept_input = 0 if self.keeps_input else self.residual
        # gradients of attention's heads and of the residual stream
        self.head_gradients = self.residual + self.q + 2 * self.kv
        # alive during all of a block's backward: the gradient of the encoder's output, from the backward of
        # the first cross-attention on; and if a branch has a norm at its end, a gradient of its own
        self.memory_gradient = self.memory if shape.encoder_layers else 0
        self.branch_gradient = self.memory_gradient
        self.branch_gradient += self.residual if shape.block_norms == "sandwich" else 0
        # an output before and after its reduction, or dropout
        self.output = self.sent * self.gathered + self.residual if self.gathered else 2 * self.residual
        self.dropped = self.residual if shape.dropout else 0  # the gradient before the mask
        self.first = "gate_up" if shape.gated else "up"

    # sizes, each with its formula

    def sized(self, size: int, elements: int, symbols: str, split: bool = True) -> tuple[int, str]:
        """Bytes of `elements` elements of `size` bytes each, and their formula.

        Args:
            split: tp ranks share the tensor.
        """
        return size * elements, self.formula(size, symbols, split)

    def stream(self, size: int) -> tuple[int, str]:
        """Bytes of a tensor as wide as the residual stream."""
        compute = self.compute
        return self.sized(size, compute.shard * self.shape.hidden, "sbh", compute.sequence_parallel)

    def formula(self, size: int, symbols: str, split: bool = True) -> str:
        """`size` times `symbols`, over the ranks that share them."""
        text = f"{size}{symbols}" if size > 1 else symbols
        over = ("t" if split and self.compute.tp > 1 else "") + ("c" if self.compute.cp > 1 else "")
        if not over:
            return text
        return f"{text}/{over}" if len(over) == 1 else f"{text}/({over})"

    # the layers

    def lookup(self) -> LayerTensor:
        """The temporaries of the embedding's lookup, which keeps nothing itself."""
        compute, shape = self.compute, self.shape
        tokens = compute.tokens * shape.hidden
        forward = self.residual
        if compute.tp > 1:
            forward = 2 * compute.element * tokens + (self.residual if self.gathered else 0)
        backward = self.residual + 2 * self.gathered
        if self.halves:  # the gradient in the type in which it is accumulated
            backward += compute.statistic * tokens
        forward = max(forward, 2 * self.residual if shape.learned else 0)
        return LayerTensor("embed", 0, forward=forward, backward=backward)

    def embedding(self) -> Iterator[LayerTensor]:
        """Without tp the token ids are those of the batch, which is not counted."""
        shape, compute = self.shape, self.compute
        if compute.tp > 1:
            yield LayerTensor("embed.tok ids", *self.sized(9, compute.tokens, "sb", False))
        if shape.learned:
            formula = self.formula(8, "s", compute.sequence_parallel)
            yield LayerTensor("embed.pos ids", 8 * compute.shard // compute.batch, formula)
        if shape.embedding_norm:
            yield from self.norm("embed.norm")
        if shape.dropout:
            yield LayerTensor("embed.drop mask", *self.stream(1))

    def between(self) -> Iterator[LayerTensor]:
        """The encoder's last norm, and the embedding of the decoder's tokens."""
        encoder = LayerWalk(self.shape, self.compute.for_memory)
        if self.shape.last_norm:
            yield from encoder.norm("memory_norm", backward=encoder.norm_backward)
        # keys and values are made of it in every block of the decoder, and their weights' gradients too
        yield LayerTensor("memory", *encoder.stream(self.compute.element), held_until_w=0)
        yield from self.embedding()

    def head(self) -> Iterator[LayerTensor]:
        """The last norm, the output layer and the loss."""
        shape, compute = self.shape, self.compute
        if shape.last_norm:
            yield from self.norm("norm", backward=self.norm_backward - self.residual)
        columns, chunk_tokens = compute.vocabulary_rows(shape), compute.loss_chunk_tokens(shape)
        weight = self.weight * columns * shape.hidden
        if not chunk_tokens:
            logits = compute.element * compute.tokens * columns
            yield LayerTensor(
                "out input",
                *self.stream(compute.element),
                forward=self.gathered + self.ordered + logits if self.gathered else 0,
                # the logits' gradient: a new tensor, or the probabilities overwritten with it
                backward=logits + self.column + self.ordered,
                product=weight + self.ordered,
                held_until_w=logits,
                regathered=self.gathered,
            )
            yield from self.loss(columns)
            return
        # the backward computes logits, loss and gradients by chunks
        elements = chunk_tokens * columns
        chunk = compute.statistic * elements * (2 if shape.logit_softcap else 1)  # overwritten with gradients
        chunk += compute.element * elements if self.halves else 0
        gathered = compute.element * compute.tokens * shape.hidden
        rows = compute.element * chunk_tokens * shape.hidden  # of the input's gradient, before a copy
        products = compute.element * elements + max(self.column + weight, gathered + rows)
        yield LayerTensor(
            "out input",
            *self.stream(compute.element),
            backward=self.gathered + max(gathered + chunk, products),
        )

    def loss(self, columns: int) -> Iterator[LayerTensor]:
        """The tensors of the loss, if it is computed from all logits at once."""
        shape, compute = self.shape, self.compute
        size = self.compute.statistic
        e, tokens = compute.element, compute.tokens
        logits, exact = e * tokens * columns, size * tokens * columns
        if shape.logit_softcap:  # the hyperbolic tangent
            yield LayerTensor("out capped", *self.sized(e, tokens * columns, "sbV"))
        if compute.fused_loss:
            yield LayerTensor("loss logits", *self.sized(e, tokens * columns, "sbV"), backward=logits)
            yield LayerTensor("loss statistics", *self.sized(size, tokens, "sb", False))
            return
        copied = exact if self.halves else 0
        backward = logits if self.halves else 0  # probabilities are overwritten with the gradient
        if compute.framework.dtensor_loss and compute.tp > 1:
            copied, backward = copied + exact, 3 * exact
        probabilities, forward = self.sized(size, tokens * columns, "sbV"), logits + copied
        if compute.framework.torch_loss and compute.tp == 1 and columns == shape.vocab:
            yield LayerTensor("loss log-probabilities", *probabilities, forward=forward, backward=2 * exact)
            yield LayerTensor("loss weight", size, str(size))
            return
        yield LayerTensor("loss probabilities", *probabilities, forward=forward, backward=backward)
        yield LayerTensor("loss targets", *self.sized(10, tokens, "sb", False))

    def block(self) -> tuple[LayerTensor, ...]:
        """Attention and MLP, between them attention to an encoder, each with its norms."""
        shape, before = self.shape, self.kept_input
        # alive with norms: the block's input, and attention's output until the MLP's exists
        after = 3 * self.residual if before else self.residual
        branches = [("norm1", self.attention(), before, before + self.residual)]
        if shape.encoder_layers:
            branches.append(("norm_cross", self.cross_attention(), self.residual, self.residual))
        mlp = self.experts(shape.moe) if shape.moe is not None else self.mlp()
        branches.append(("norm2", mlp, after, after))
        tensors = list[LayerTensor]()
        for name, branch, alive, alive_after in branches:
            norm = self.block_norm(name, alive)
            tensors += [*branch, *norm] if shape.block_norms == "post" else [*norm, *branch]
            if shape.block_norms == "sandwich":
                tensors += self.block_norm(f"{name}_post", alive_after)
        if not self.compute.framework.inputs_in_8_bits:
            return tuple(tensors)
        # Transformer Engine keeps the inputs of linears in 8 bits, and attention's output in its own type too
        for index, tensor in enumerate(tensors):
            name = tensor.name
            if name.endswith(" input") and "norm" not in name and not name.startswith(_IN_16_BITS):
                itself = tensor.bytes if name == "attn.proj input" else 0
                tensors[index] = replace(tensor, bytes=tensor.bytes // self.compute.element + itself)
        return tuple(tensors)

    def block_input(self) -> LayerTensor:
        """The saved input of a block that is recomputed as a whole."""
        compute = self.compute
        tokens, sharded = compute.shard, compute.sequence_parallel
        if compute.shard_inputs and not sharded:
            length = compute.tokens // compute.batch
            tokens, sharded = compute.batch * -(-length // compute.tp), True
        size = 0 if compute.framework.inputs_on_host else compute.element
        return LayerTensor("block input", *self.sized(size, tokens * self.shape.hidden, "sbh", sharded))

    # norms

    def norm(
        self,
        name: str,
        rows: int | None = None,
        width: int | None = None,
        symbols: tuple[str, str] = ("sb", "h"),
        split: bool | None = None,
        viewed: int | None = None,
        *,
        forward: int = 0,
        normalised: int = 0,
        backward: int = 0,
    ) -> Iterator[LayerTensor]:
        """The tensors of a norm, by default of the residual stream.

        Args:
            symbols: the symbols of rows and width.
            viewed: elements of the tensor that the input is a view of; by default of the input itself.
            forward: bytes alive with its statistics in the forward.
            normalised, backward: bytes alive with what was normalised, and with its input, in the backward.
        """
        compute, exact = self.compute, self.compute.statistic
        rows = compute.shard if rows is None else rows
        width = self.shape.hidden if width is None else width
        split = compute.sequence_parallel if split is None else split
        size = compute.element if self.keeps_input else exact
        elements = viewed if self.keeps_input and viewed is not None else rows * width
        formula = self.formula(size, "".join(symbols), split)
        yield LayerTensor(f"{name} input", size * elements, formula, backward=backward)
        if self.keeps_normalised:
            both = self.sized(exact, rows * width, "".join(symbols), split)
            yield LayerTensor(f"{name} normalised", *both, backward=normalised)
        if self.composed:
            yield LayerTensor(f"{name} gain", exact * width, f"{exact}{symbols[1]}")
        numbers = (2 if self.shape.norm == "layer" else 1) * exact
        yield LayerTensor(
            f"{name} statistics", *self.sized(numbers, rows, symbols[0], split), forward=forward
        )

    @property
    def norm_backward(self) -> int:
        """Gradients of output, input and residual path; in 16 bits also, in float32, that of the output, the
        normalised input, and their product.
        """
        return 3 * self.residual + (3 * self.exact_residual if self.halves else 0)

    def block_norm(self, name: str, alive: int) -> Iterator[LayerTensor]:
        """A norm of the residual stream in a block, in whose forward `alive` other bytes are alive."""
        r, exact = self.residual, self.exact_residual
        temporaries = 2 * exact if self.halves and self.shape.norm == "rms" else 0  # input and squares
        if self.composed:
            temporaries = exact + r * self.halves
        return self.norm(
            name,
            forward=alive + temporaries,
            normalised=r + 3 * exact + r * self.halves,
            # of a fused kernel the gradients of its output and input in float32
            backward=r + (4 if self.keeps_normalised else 2) * exact if self.composed else self.norm_backward,
        )

    # attention

    def attention(self) -> Iterator[LayerTensor]:
        """Self-attention, from the residual stream and back into it."""
        shape, compute = self.shape, self.compute
        e = compute.element
        tokens = compute.tokens
        r = self.residual
        pending = self.branch_gradient
        q, kv = shape.attention_width // compute.tp, compute.kv_heads(shape) * shape.head_dim
        if shape.latent is not None:
            yield from self.latent_vectors(shape.latent)
        else:
            yield LayerTensor(
                "attn.qkv input",
                *self.stream(e),
                backward=self.head_gradients + self.column + self.ordered + pending,
                product=self.weight * shape.hidden * (q + 2 * kv) + self.ordered,
                held_until_w=self.q + 2 * self.kv,
                regathered=self.gathered,
            )
        yield from self.head_norms()
        forward = self.gathered + self.ordered + self.kept_input
        yield LayerTensor("attn.core q", *self.sized(e, tokens * q, "sbad"), forward=forward)
        if compute.context == "ulysses" and compute.cp > 1 and not compute.repeats("core_attn"):
            heads = compute.kv_heads(shape)
            kv *= lcm(heads, compute.cp) // heads  # heads are repeated until every rank gets whole ones
        values = kv * shape.value_dim // shape.head_dim
        yield LayerTensor("attn.core k, v", e * tokens * (kv + values), self.formula(2 * e, "sbkd"))
        if not compute.repeats("core_attn"):
            yield from self.core()
        views = self.q + 2 * self.kv if shape.relative else 0  # the product that heads are views of
        yield LayerTensor(
            "attn.proj input",
            *self.sized(e, tokens * (q * shape.value_dim // shape.head_dim), "sbad"),
            forward=self.output + views + self.kept_input,
            backward=r + self.dropped + self.y + self.gathered + pending,
            product=self.weight * shape.hidden * shape.attention_width // compute.tp
            + (self.q if self.ordered else 0),
            held_until_w=self.gathered or r,
            is_residual=self.gives_residual_gradient,
        )
        if shape.dropout:
            yield LayerTensor("attn.drop mask", *self.stream(1))

    @property
    def gives_residual_gradient(self) -> bool:
        """True if the output gradient of a branch is that of the residual stream itself."""
        shape = self.shape
        return not shape.dropout and not self.gathered and shape.block_norms != "post"

    def latent_vectors(self, latent: LatentShape) -> Iterator[LayerTensor]:
        """The products and norms of the narrow vectors of latent attention, which ranks of sequence
        parallelism have of their own tokens only.
        """
        shape, compute = self.shape, self.compute
        unit = self.weight
        e = compute.element
        size = compute.statistic
        r = self.residual
        sharded = compute.sequence_parallel
        heads, t = shape.heads // compute.tp, compute.tp if self.gathered else 1
        down = latent.kv_rank + latent.rope_dim
        narrow = e * compute.shard * (down + (latent.q_rank or 0))
        q = heads * shape.head_dim if latent.q_rank is None else latent.q_rank
        yield LayerTensor(
            "attn.qkv input",
            *self.stream(e),
            backward=3 * r + narrow + (0 if latent.q_rank else self.q + self.column),
            product=unit * shape.hidden * max(down, q),
            held_until_w=narrow + (0 if latent.q_rank else self.q),
            regathered=self.gathered if latent.q_rank is None else 0,
        )
        # width of each vector, further features, features that it is projected to, and the gradients of
        # keys, values and of the residual stream that are alive until those of queries are done
        features = heads * (shape.head_dim - latent.rope_dim + latent.value_dim)
        vectors = [("kv", latent.kv_rank, latent.rope_dim, features, r + (r if latent.q_rank else self.q))]
        if latent.q_rank is not None:
            vectors.append(("q", latent.q_rank, 0, heads * shape.head_dim, r + self.kv + self.v))
        for name, rank, extra, rows, pending in vectors:
            shard = e * compute.shard * rank
            column = self.sent * t * shard + shard if self.gathered else shard
            yield LayerTensor(
                f"attn.{name}_down_norm input",
                *self.sized(e, compute.shard * (rank + extra), "sb(r+d)" if extra else "sbr", sharded),
                backward=pending + 2 * shard + 3 * self.wider * shard,
            )
            yield LayerTensor(
                f"attn.{name}_down_norm statistics",
                *self.sized(size, compute.shard, "sb", sharded),
                forward=2 * self.wider * shard * self.halves,
            )
            yield LayerTensor(
                f"attn.{name}_up input",
                *self.sized(e, compute.shard * rank, "sbr", sharded),
                backward=pending + e * compute.tokens * rows + column,
                product=unit * rank * rows,
                held_until_w=e * compute.tokens * rows,
                regathered=t * shard if self.gathered else 0,
            )

    def head_norms(self) -> Iterator[LayerTensor]:
        """The norms of queries and keys, which are views of one product with the values: a norm that keeps
        its input keeps this product whole.
        """
        shape, compute = self.shape, self.compute
        if shape.attention.norm is None:
            return
        d, q = shape.head_dim, shape.attention_width // compute.tp
        kv = compute.kv_heads(shape) * d
        product = self.q + 2 * self.kv if self.composed else 0
        for name, elements, size, viewed in (("q", q, self.q, q + 2 * kv), ("k", kv, self.kv, 0)):
            wide = self.wider * size
            tensors = self.norm(
                f"attn.{name}_norm",
                rows=compute.tokens * elements // d,
                width=d,
                symbols=("sba" if name == "q" else "sbk", "d"),
                split=True,
                viewed=compute.tokens * viewed,
                forward=self.kept_input + product + 2 * wide,
                normalised=self.head_gradients + 3 * wide,
                backward=self.head_gradients
                + ((4 if self.keeps_normalised else 2) * wide if self.composed else 3 * wide + size),
            )
            yield from (tensor for tensor in tensors if tensor.bytes)

    def core(self) -> Iterator[LayerTensor]:
        """The tensors of softmax(q k^T) v, without its inputs."""
        shape, compute = self.shape, self.compute
        size = self.compute.statistic
        e = compute.element
        tokens = compute.tokens
        gradients = self.head_gradients + self.branch_gradient
        heads, length = shape.heads // compute.tp, tokens // compute.batch
        elements = heads * tokens * length * compute.cp
        mask_backward = 2 * self.scores + gradients
        ring = compute.cp > 1 and compute.context == "ring"
        if ring or not compute.stores_scores(shape):  # a ring keeps no probabilities, whatever computes it
            forward, backward = self.core_temporaries()
            yield LayerTensor(
                "attn.core statistics",
                *self.sized(size, heads * tokens, "sba"),
                forward=forward + self.kept_input,
                backward=self.residual + backward + self.branch_gradient,
            )
            if ring and shape.dropout:  # of the pairs computed here: the diagonal block, half of each other
                pairs = heads * tokens * length * (compute.cp + 1) // 2
                yield LayerTensor(
                    "attn.core mask",
                    pairs,
                    f"{self.formula(1, 'as^2b')} (c+1)/(2c)",
                    forward=self.draw + self.kept_input,
                    backward=mask_backward,
                )
        else:
            stored, forward = self.sized(e, elements, "as^2b"), self.softmax + 2 * self.q
            if shape.attention.softcap is not None:
                yield LayerTensor(
                    "attn.core capped",
                    *stored,
                    forward=forward + self.kept_input,
                    backward=3 * self.scores + gradients,
                )
            backward = (2 if compute.framework.fused_softmax else 3) * self.scores + self.residual
            if shape.relative:  # with the product that heads are views of, and the bias of the scores
                forward = self.scores + self.q + 2 * self.kv + self.scores // compute.batch
                backward = 2 * self.scores + self.residual
                if compute.stores_cross_scores(shape):  # written out
                    forward += self.scores
                    backward += self.scores + self.residual
            yield LayerTensor(
                "attn.core probabilities",
                *stored,
                forward=forward + self.kept_input,
                backward=backward + self.branch_gradient,
            )
            if shape.dropout:
                yield LayerTensor(
                    "attn.core mask",
                    *self.sized(1, elements, "as^2b"),
                    forward=self.draw + self.kept_input,
                    backward=mask_backward,
                )
                yield LayerTensor(
                    "attn.core dropped",
                    *stored,
                    forward=2 * self.q + self.kept_input,
                    backward=self.scores + gradients,
                )
        q = shape.attention_width // compute.tp
        if compute.attention == "flex" and shape.attention.sinks:  # a factor outside of the kernel
            yield LayerTensor("attn.core without sinks", *self.sized(e, tokens * q, "sbad"))
            factor = size + (e if e < size else 0)  # as it is computed, and rounded
            yield LayerTensor("attn.core sinks", *self.sized(factor, heads * tokens, "sba"))
        flash = compute.attention != "explicit" and not shape.dropout
        if compute.cp > 1 and flash and compute.context == "ulysses":  # the projection takes another order
            yield LayerTensor("attn.core output", *self.sized(e, tokens * q, "sbad"))

    def core_temporaries(self) -> tuple[int, int]:
        """Bytes alive with the statistics of attention that keeps no probabilities: in its forward the
        product that heads are views of, and queries in another order; in its backward the gradients.

        Kernels for soft-capped scores, for values narrower than keys, and for windows on CPUs accumulate in
        float32.
        """
        shape, compute = self.shape, self.compute
        wider = self.wider
        special = shape.attention
        length = compute.tokens // compute.batch * (compute.cp if compute.context == "ulysses" else 1)
        window = (
            special.window if special.window is not None and special.window < length * compute.cp else None
        )
        tiled = special.softcap is not None or shape.value_dim < shape.head_dim
        tiled = tiled and compute.attention != "flex"
        ring = compute.cp > 1 and compute.context == "ring" and (tiled or window is not None)
        summed = tiled or (compute.attention != "flex" and window is not None)
        keys = self.q + self.kv + self.v
        gradients = wider * keys if summed else keys
        narrowed = keys if gradients > keys else 0  # rounded at the end
        y = wider * self.y if summed else 0
        views = keys  # products whose views are heads
        if shape.latent is None and shape.rotary:
            views += self.q  # queries before they are brought into order
        forward, backward = self.y, narrowed
        if tiled:
            scores = self.tile_scores(length, window)
            copied = self.kv if shape.latent is not None else 0  # keys of one head next to each other
            halves = compute.element if self.halves else 0
            forward = max(forward, copied + scores * (2 * compute.statistic + halves))
            backward = copied + max(backward, scores * (5 * compute.statistic + 2 * halves))
        if special.sinks:
            backward = max(backward, 2 * wider * self.y)
        if ring:  # one round's part and the sum, keys and values on their way, and the gradients of these
            moved = self.kv + self.v
            forward += y + moved
            # half of the queries see all keys of a later rank; nothing is rounded before all rounds are done
            sums = 2 * wider * moved if compute.cp > 2 else 0  # of gradients, received and sent
            backward += wider * (self.q // 2 + moved) + moved + sums
            backward += moved - self.kv * (shape.latent is not None) if tiled else -narrowed
        return views + y + forward, 2 * self.y + gradients + backward  # the output and its gradient, too

    def tile_scores(self, length: int, window: int | None) -> int:
        """Scores of the largest tile of attention written out (`engine.kernels.Explicit`)."""
        compute = self.compute
        heads, kv_heads = self.shape.heads // compute.tp, compute.kv_heads(self.shape)
        if compute.cp > 1 and compute.context == "ulysses":
            heads, kv_heads = max(heads // compute.cp, 1), max(kv_heads // compute.cp, 1)
        rounds = compute.cp > 1 and compute.context == "ring"  # whose queries see whole blocks of keys
        largest = 0
        for start in range(0, length, _TILE):
            queries = min(_TILE, length - start)
            keys = length if rounds else start + queries
            keys = keys if window is None else min(keys, window + queries - 1)
            size = heads // kv_heads * queries * keys
            largest = max(largest, size * min(max(_TILE_SCORES // size, 1), compute.batch * kv_heads))
        return largest

    def cross_attention(self) -> Iterator[LayerTensor]:
        """Attention to the encoder's output, which is kept once for all blocks of a stage."""
        shape, compute = self.shape, self.compute
        encoder = self.compute.for_memory
        e = compute.element
        tokens = compute.tokens
        r = self.residual
        pending = self.memory_gradient
        q, kv = shape.attention_width // compute.tp, compute.kv_heads(shape) * shape.head_dim
        heads, length = shape.heads // compute.tp, encoder.tokens // compute.batch
        scores, keys_and_values = e * heads * tokens * length, 2 * e * encoder.tokens * kv
        product = self.weight * shape.hidden * shape.attention_width // compute.tp
        column = self.sent * self.memory_gathered + self.memory if self.memory_gathered else self.memory
        gradients = r + self.q + keys_and_values + pending
        yield LayerTensor(
            "cross.q input",
            *self.stream(e),
            backward=gradients + self.column,
            product=product,
            held_until_w=self.q,
            regathered=self.gathered,
        )
        yield LayerTensor(
            "cross.kv input",
            0,
            "0",
            backward=r + keys_and_values + column + pending,
            product=self.weight * shape.hidden * 2 * kv,
            held_until_w=keys_and_values,
            regathered=self.memory_gathered,
        )
        yield LayerTensor("cross.core q", *self.sized(e, tokens * q, "sbad"))
        yield LayerTensor("cross.core k, v", keys_and_values, self.formula(2 * e, "mbkd"))
        if not compute.repeats("core_attn"):
            if compute.stores_cross_scores(shape):
                yield LayerTensor(
                    "cross.core probabilities",
                    *self.sized(e, heads * tokens * length, "asmb"),
                    forward=(4 if self.halves else 2) * scores + 2 * self.q + self.kept_input,
                    backward=3 * scores + r + pending,
                )
                if shape.dropout:
                    mask = self.sized(1, heads * tokens * length, "asmb")
                    yield LayerTensor("cross.core mask", *mask, backward=2 * scores + gradients)
                    dropped = self.sized(e, heads * tokens * length, "asmb")
                    yield LayerTensor("cross.core dropped", *dropped, backward=scores + gradients)
            else:
                yield LayerTensor(
                    "cross.core statistics",
                    *self.sized(compute.statistic, heads * tokens, "sba"),
                    forward=2 * self.q + keys_and_values + self.kept_input,
                    backward=gradients + self.q + keys_and_values,
                )
        yield LayerTensor(
            "cross.proj input",
            *self.sized(e, tokens * q, "sbad"),
            forward=self.output + self.kept_input,
            backward=2 * r + self.q + self.gathered + pending,
            product=product,
            held_until_w=self.gathered or r,
            is_residual=self.gives_residual_gradient,
        )
        if shape.dropout:
            yield LayerTensor("cross.drop mask", *self.stream(1))

    # the MLP

    def mlp(self) -> Iterator[LayerTensor]:
        """A dense MLP."""
        shape, compute = self.shape, self.compute
        inner = self.inner
        pending = self.branch_gradient
        alive = 3 * self.kept_input  # and the sum after attention, and attention's output
        product = self.weight * shape.hidden * shape.ffn // compute.tp
        yield LayerTensor(
            f"mlp.{self.first} input",
            *self.stream(compute.element),
            backward=self.wide + self.column + pending,
            product=self.weight * shape.hidden * (2 if shape.gated else 1) * shape.ffn // compute.tp,
            held_until_w=self.wide,
            regathered=self.gathered,
        )
        output, activated, down = self.inner_tensors("mlp", compute.tokens, shape.ffn, compute.tp, "sbf")
        if output is not None:
            yield replace(output, forward=self.gathered + alive, backward=self.wide + inner + pending)
        if activated is not None:
            yield replace(activated, backward=3 * inner + pending)
        activation = inner + self.residual if shape.mlp == "swiglu_clamped" else inner * (shape.mlp == "relu")
        yield replace(
            down,
            forward=max(self.output, activation) + alive,
            backward=inner + self.dropped + self.gathered + pending,
            product=product,
            held_until_w=self.gathered or self.residual,
            is_residual=self.gives_residual_gradient,
        )
        yield from self.mlp_mask()

    def mlp_mask(self) -> Iterator[LayerTensor]:
        """The mask of the dropout after an MLP."""
        if self.shape.dropout:
            forward = self.output + 3 * self.kept_input
            yield LayerTensor("mlp.drop mask", *self.stream(1), forward=forward)

    def inner_tensors(
        self, name: str, rows: int, width: int, ranks: int, symbols: str
    ) -> tuple[LayerTensor | None, LayerTensor | None, LayerTensor]:
        """The tensors of an MLP without its input, for `rows` rows and one of `ranks` slices of its width:
        the output of its first linear, the activated gate, and the input of its second linear.
        """
        shape, e = self.shape, self.compute.element
        elements, split = rows * width // ranks, ranks > 1
        output = activated = None
        if shape.mlp != "relu":  # relu's backward needs its result alone
            size = self.sized((2 if shape.gated else 1) * e, elements, symbols, split)
            output = LayerTensor(f"{name}.{self.first} output", *size)
        if shape.gated and not self.compute.framework.fused_activation:
            # of the clamped kind also the clamped gate, its sigmoid, and the other factor
            many = 4 if shape.mlp == "swiglu_clamped" else 1
            activated = LayerTensor(f"{name} activated", *self.sized(many * e, elements, symbols, split))
        return output, activated, LayerTensor(f"{name}.down input", *self.sized(e, elements, symbols, split))

    def experts(self, moe: ExpertShape) -> Iterator[LayerTensor]:
        """A mixture of experts under even routing."""
        shape, compute = self.shape, self.compute
        exact = self.compute.statistic
        e = compute.element
        h = shape.hidden
        k = moe.top_k
        slices = compute.expert_shards
        replicated = compute.replicated_routing
        n = compute.tokens if replicated else -(-compute.tokens // compute.tp)  # tokens routed here
        received = n * k if replicated else n * k * slices
        wide = 2 if shape.gated else 1
        inner = e * received * (shape.expert_ffn // slices)
        rows, copies = e * received * h, e * n * k * h
        again = 0 if self.halves else 1  # outputs of single experts are copied into one tensor
        shared = self.inner_tensors("mlp.shared", compute.tokens, moe.shared_ffn, compute.tp, "sbf")
        if moe.shared_ffn or e >= 4:
            waiting, gathered = (wide * shared[-1].bytes, self.gathered) if moe.shared_ffn else (None, 0)
            yield LayerTensor("mlp input", *self.stream(e), held_until_w=waiting, regathered=gathered)
        if e < 4:
            backward = self.exact_residual + self.residual
            yield LayerTensor("mlp.router input", *self.routed(exact, n * h, "nh"), backward=backward)
        scores = (4 if moe.score == "sigmoid" else 2) * exact  # log-sigmoids too, and one more number each
        numbers = (scores * moe.experts + 8 * k + exact * k + 8 * k + exact) * n
        formula = f"({scores}E+{16 + exact}k+{exact})n"
        yield LayerTensor("mlp.router scores, choices, order", numbers, formula)
        yield LayerTensor(
            f"mlp.experts.{self.first} input",
            *self.routed(e, received * h, "rh"),
            forward=copies,
            backward=wide * inner + (2 + again) * rows,
            held_until_w=wide * inner,
        )
        output, activated, down = self.inner_tensors("mlp.experts", received, shape.expert_ffn, slices, "rf")
        if output is not None:
            yield replace(output, forward=again * wide * inner, backward=(wide + 1) * inner)
        if activated is not None:
            yield replace(activated, backward=3 * inner)
        # the experts' output gradient: as it arrives from other ranks, and sorted by expert
        dy = copies + 2 * rows if compute.ep > 1 else rows
        yield replace(down, forward=(1 + again) * rows, backward=dy + (1 + again) * inner, held_until_w=rows)
        if shape.bias:
            yield LayerTensor("mlp.experts numbers", 8 * received, "8r")  # the expert of each row
        # the sum of a token's experts, the normalised input, and attention's output; if all ranks route the
        # same tokens, also the sum cut into the ranks' parts
        mixed = 3 * self.residual
        if replicated and self.gathered:
            mixed = 3 * self.gathered + 2 * self.residual
        yield LayerTensor(
            "mlp.experts output",
            *self.routed(e, n * k * h, "nkh"),
            forward=rows + mixed,
            backward=2 * copies + self.residual,
        )
        if moe.shared_ffn:
            yield from filter(None, shared[:-1])
            waiting = self.gathered or self.residual
            yield replace(shared[-1], held_until_w=waiting, is_residual=self.gives_residual_gradient)
            if moe.shared_gate:
                yield LayerTensor("mlp.shared output", *self.stream(e))
                size = self.sized(e, compute.shard, "sb", compute.sequence_parallel)
                yield LayerTensor("mlp.shared_gate output", *size)
        yield from self.mlp_mask()

    @staticmethod
    def routed(size: int, elements: int, symbols: str) -> tuple[int, str]:
        """Bytes of a tensor of routed tokens, whose symbols count those of this rank."""
        return size * elements, f"{size}{symbols}" if size > 1 else symbols
