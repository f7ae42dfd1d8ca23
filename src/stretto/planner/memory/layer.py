"""What one layer holds while it computes: what it keeps for its backward, and the largest temporaries of
forward and backward.

The forward makes the kept tensors in their order, the backward consumes them in reverse. At each of these
tensors the model counts what is alive beside it: outputs that have not been handed on, gradients of
activations, products of weight gradients before they are accumulated. Sizes are those of the operators as
PyTorch runs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from stretto.job.attention import LatentShape
from stretto.job.chain import layer_of
from stretto.job.framework import CORE
from stretto.job.shape import ModelShape
from stretto.planner.counts.activations import (
    ComputeConfig,
    Saved,
    between_saved,
    block_saved,
    composed_norms,
    embedding_saved,
    head_saved,
    keeps_input,
    stores_scores,
)

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


@dataclass(frozen=True, kw_only=True)
class LayerTensor:
    """One tensor that a layer's backward needs.

    Attributes:
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
    saved: bool = True
    forward: int = 0
    backward: int = 0
    product: int = 0
    held_until_w: int | None = None
    regathered: int = 0
    is_residual: bool = False


@dataclass(kw_only=True)
class _Extras:
    """Bytes beside the saved tensors, by the tensor with which they coexist; see `LayerTensor`."""

    forward: dict[str, int] = field(default_factory=dict[str, int])
    backward: dict[str, int] = field(default_factory=dict[str, int])
    product: dict[str, int] = field(default_factory=dict[str, int])
    held_until_w: dict[str, int] = field(default_factory=dict[str, int])
    regathered: dict[str, int] = field(default_factory=dict[str, int])

    def parts(self, saved: Sequence[Saved]) -> list[LayerTensor]:
        return [
            LayerTensor(
                name=tensor.name,
                bytes=tensor.bytes,
                forward=self.forward.get(tensor.name, 0),
                backward=self.backward.get(tensor.name, 0),
                product=self.product.get(tensor.name, 0),
                held_until_w=self.held_until_w.get(tensor.name),
                regathered=self.regathered.get(tensor.name, 0),
            )
            for tensor in saved
        ]


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """One layer of a stage.

    Attributes:
        input_bytes: bytes of the first part, where that is the layer's input; of a stage's first layer they
            are counted with the stage before or with the received message.
        ends: this is the embedding or the head.
        forward: peak bytes of a forward that keeps its input only.
    """

    parts: tuple[LayerTensor, ...]
    input_bytes: int
    ends: bool = False
    recomputed: bool = False
    forward: int = 0

    @property
    def saved(self) -> int:
        """Bytes between forward and backward, the input included."""
        return sum(part.bytes for part in self.parts if part.saved)

    @property
    def last_product(self) -> LayerTensor | None:
        """The input of the layer's last linear."""
        return next((part for part in reversed(self.parts) if part.held_until_w is not None), None)

    @property
    def between(self) -> int:
        """Bytes between I and W."""
        return sum(part.bytes + part.held_until_w for part in self.parts if part.held_until_w is not None)


def layer_memory(
    shape: ModelShape, compute: ComputeConfig, layer: int, separate_gradients: bool = False
) -> LayerMemory:
    """The memory of layer number `layer` of the chain (`job.chain`).

    Args:
        compute: the computation with the `recompute` of this block; in an encoder-decoder model, of the
            encoder's layers.
        separate_gradients: weight gradients are formed separately and then accumulated, as oneDNN's are;
            those of 16 bits always are.
    """
    chain_layer = layer_of(shape, layer)
    compute = compute.at(chain_layer)
    match chain_layer.kind:
        case "embed":
            return _embedding(shape, compute)
        case "between":
            return _between(shape, compute)
        case "head":
            return _head(shape, compute, separate_gradients)
        case _:
            return _block(chain_layer.shape, compute, separate_gradients)


@lru_cache(maxsize=1024)
def _embedding(shape: ModelShape, compute: ComputeConfig) -> LayerMemory:
    size = Sizes(shape, compute, False)
    saved = [LayerTensor(name=s.name, bytes=s.bytes) for s in embedding_saved(shape, compute)]
    gathered = compute.element * compute.tokens * shape.hidden
    forward = 2 * gathered + (size.residual if size.gathered else 0) if compute.tp > 1 else size.residual
    forward = max(forward, 2 * size.residual if shape.learned else 0)
    backward = size.residual + 2 * size.gathered
    if size.halves:  # the gradient in the type in which it is accumulated
        backward += compute.statistic * compute.tokens * shape.hidden
    return LayerMemory(
        parts=(LayerTensor(name="embed", bytes=0, forward=forward, backward=backward), *saved),
        input_bytes=0,
        ends=True,
    )


@lru_cache(maxsize=1024)
def _between(shape: ModelShape, compute: ComputeConfig) -> LayerMemory:
    """The encoder's last norm, then the embedding of the decoder's tokens."""
    embedding, memory = _embedding(shape, compute), Sizes(shape, compute.of_memory, False)
    parts = [LayerTensor(name=s.name, bytes=s.bytes) for s in between_saved(shape, compute)]
    input_bytes = parts[0].bytes
    # keys and values are made of it in every block of the decoder, and their weights' gradients too
    parts = [replace(part, held_until_w=0) if part.name == "memory" else part for part in parts]
    if shape.last_norm:
        parts[0] = replace(parts[0], backward=memory.norm)
    lookup = embedding.parts[0]
    return LayerMemory(
        parts=(*parts, replace(lookup, backward=lookup.backward + memory.residual)),
        input_bytes=input_bytes,
        ends=True,
    )


@lru_cache(maxsize=1024)
def _block(shape: ModelShape, compute: ComputeConfig, separate_gradients: bool) -> LayerMemory:
    size = Sizes(shape, compute, separate_gradients)
    extras = _block_extras(shape, compute, size)
    if shape.latent is not None:
        _add_latent_vectors(extras, shape, shape.latent, compute, size)
    parts = extras.parts(block_saved(shape, replace(compute, recompute="none")))
    if shape.moe is not None:
        parts = [_expert_part(part, shape, compute, size) for part in parts]
    if not shape.dropout and not size.gathered and shape.block_norms != "post":
        residual = ("attn.proj input", "cross.proj input", "mlp.down input")
        parts = [replace(part, is_residual=part.name in residual) for part in parts]
    saved = block_saved(shape, compute)
    if compute.recompute != "full":
        input_bytes = parts[0].bytes if keeps_input(shape, compute) else 0
        if compute.framework.operators == CORE:
            names = {tensor.name for tensor in saved}
            parts = [replace(part, saved=part.name in names) for part in parts]
        else:
            parts = list(_partly_saved(parts, saved))
        return LayerMemory(parts=tuple(parts), input_bytes=input_bytes)
    (block_input,) = saved
    recomputed = [replace(part, saved=False) for part in parts[keeps_input(shape, compute) :]]
    if block_input.bytes < size.residual:  # a shard of the input, gathered again
        recomputed.insert(0, LayerTensor(name="gathered input", bytes=size.residual, saved=False))
    # peak bytes, beside its input, of a block's forward that keeps nothing
    explicit = stores_scores(shape, compute)
    core = size.softmax + size.scores if explicit else size.q
    if shape.dropout:
        core = max(core, 2 * size.scores + size.draw)
    attention = size.residual + 2 * (size.q + 2 * size.kv) + core
    mlp = 2 * size.residual + size.wide + (2 if shape.gated else 1) * size.inner + size.residual
    return LayerMemory(
        parts=(LayerTensor(name=block_input.name, bytes=block_input.bytes), *recomputed),
        input_bytes=block_input.bytes,
        recomputed=True,
        forward=max(attention, mlp) + size.residual * compute.framework.inputs_on_host,
    )


def _partly_saved(parts: Sequence[LayerTensor], saved: Sequence[Saved]) -> Iterator[LayerTensor]:
    """The parts if operators other than attention's core are recomputed: two of a tensor that is saved in
    part, and the tensors that are saved only then.
    """
    sizes = {tensor.name: tensor.bytes for tensor in saved}
    additional = sizes.keys() - {part.name for part in parts}
    for part in parts:
        size = sizes.get(part.name, 0)
        if 0 < size < part.bytes:
            yield LayerTensor(name=part.name, bytes=size)
            yield replace(part, bytes=part.bytes - size, saved=False)
        else:
            yield replace(part, saved=part.name in sizes)
        if part.name == "norm2 statistics":
            yield from (LayerTensor(name=name, bytes=sizes[name]) for name in sorted(additional))


@lru_cache(maxsize=1024)
def _head(shape: ModelShape, compute: ComputeConfig, separate_gradients: bool) -> LayerMemory:
    size = Sizes(shape, compute, separate_gradients)
    saved = head_saved(shape, compute)
    gathered = compute.element * compute.tokens * shape.hidden
    weight = size.weight * size.columns * shape.hidden
    extras = _Extras(backward={"norm input": size.norm - size.residual})
    chunk_tokens = compute.loss_chunk_tokens(shape)
    if chunk_tokens:  # the backward computes logits, loss and gradients by chunks
        logits = chunk_tokens * size.columns
        exact = (
            compute.statistic * logits * (2 if shape.logit_softcap else 1)
        )  # overwritten with the gradient
        chunk = exact + (compute.element * logits if size.halves else 0)
        rows = (
            compute.element * chunk_tokens * shape.hidden
        )  # of the input's gradient, before they are copied
        products = compute.element * logits + max(size.column + weight, gathered + rows)
        extras.backward["out input"] = size.gathered + max(gathered + chunk, products)
    else:
        loss = next(s.name for s in saved if s.name.startswith("loss"))
        copied = size.exact if size.halves else 0
        probabilities = size.logits if size.halves else 0  # overwritten with the gradient
        if compute.framework.dtensor_loss and compute.tp > 1:
            copied, probabilities = copied + size.exact, 3 * size.exact
        # bytes beside what the loss keeps, in the forward and in the backward
        extras.forward[loss], extras.backward[loss] = {
            "loss log-probabilities": (size.logits + copied, 2 * size.exact),
            "loss probabilities": (size.logits + copied, probabilities),
            "loss logits": (0, size.logits),
        }[loss]
        extras.forward["out input"] = size.gathered + size.ordered + size.logits if size.gathered else 0
        # the logits' gradient: a new tensor, or the probabilities overwritten with it
        extras.backward["out input"] = size.logits + size.column + size.ordered
        extras.product["out input"] = weight + size.ordered
        extras.held_until_w["out input"] = size.logits
        extras.regathered["out input"] = size.gathered
    input_bytes = saved[0].bytes if keeps_input(shape, compute) else 0
    return LayerMemory(parts=tuple(extras.parts(saved)), input_bytes=input_bytes, ends=True)


def _expert_part(part: LayerTensor, shape: ModelShape, compute: ComputeConfig, size: Sizes) -> LayerTensor:
    """A tensor of a mixture of experts, under even routing, with the other bytes at that time."""
    assert shape.moe is not None
    e = compute.element
    tokens = compute.tokens if compute.replicated_routing else -(-compute.tokens // compute.tp)
    routed = tokens * shape.moe.top_k  # copies of this rank's tokens, one for each of their experts
    received = routed if compute.replicated_routing else routed * compute.expert_shards
    wide = 2 if shape.gated else 1
    inner = e * received * (shape.expert_ffn // compute.expert_shards)
    rows = e * received * shape.hidden
    copies = e * routed * shape.hidden
    first = "mlp.experts.gate_up" if shape.gated else "mlp.experts.up"
    # the experts' output gradient: as it arrives from other ranks, and sorted by expert
    dy = copies + 2 * rows if compute.ep > 1 else rows
    # the sum of a token's experts, the normalised input, and attention's output; if all ranks route the same
    # tokens, also the sum cut into the ranks' parts
    together = compute.replicated_routing and size.gathered
    mixed = 3 * size.gathered + 2 * size.residual if together else 3 * size.residual
    again = 0 if size.halves else 1  # outputs of single experts are copied into one tensor
    extras = {
        "mlp.router input": (0, size.exact_residual + size.residual, None),
        f"{first} input": (copies, wide * inner + (2 + again) * rows, wide * inner),
        f"{first} output": (again * wide * inner, (wide + 1) * inner, None),
        "mlp.experts activated": (0, 3 * inner, None),
        "mlp.experts.down input": ((1 + again) * rows, dy + (1 + again) * inner, rows),
        "mlp.experts output": (rows + mixed, 2 * copies + size.residual, None),
    }
    if part.name not in extras:
        return part
    forward, backward, held_until_w = extras[part.name]
    return replace(part, forward=forward, backward=backward, held_until_w=held_until_w)


def _block_extras(shape: ModelShape, compute: ComputeConfig, size: Sizes) -> _Extras:
    """Bytes beside the tensors of a dense block, other than around latent vectors."""
    r, inner = size.residual, size.inner
    first = "mlp.gate_up" if shape.gated else "mlp.up"
    out = 2 * size.gathered + r if size.gathered else 2 * r  # before and after the reduction, or dropout
    core, core_back = _core_extras(shape, compute, size)
    forward = {
        "attn.core q": size.gathered + size.ordered,
        "attn.core capped": size.softmax + 2 * size.q,
        "attn.core probabilities": size.softmax + 2 * size.q,
        "attn.core mask": size.draw,
        "attn.core dropped": 2 * size.q,
        "attn.core statistics": core,
        "attn.proj input": out,
        f"{first} output": size.gathered,
        "mlp.down input": max(
            out, inner + r if shape.mlp == "swiglu_clamped" else 0, inner * (shape.mlp == "relu")
        ),
        "mlp.drop mask": out,
    }
    dropped = r if shape.dropout else 0  # the gradient before the mask
    head_gradients = r + size.q + 2 * size.kv
    backward = {
        "attn.qkv input": head_gradients + size.column + size.ordered,
        "attn.core statistics": r + core_back,
        "attn.core probabilities": (2 if compute.framework.fused_softmax else 3) * size.scores + r,
        "attn.core capped": 3 * size.scores + head_gradients,
        "attn.core dropped": size.scores + head_gradients,
        "attn.core mask": 2 * size.scores + head_gradients,
        "attn.proj input": r + dropped + size.y + size.gathered,
        f"{first} input": size.wide + size.column,
        f"{first} output": size.wide + inner,
        "mlp activated": 3 * inner,
        "mlp.down input": inner + dropped + size.gathered,
    }
    if shape.relative:  # the product that queries, keys and values are views of, and the bias of the scores
        views, bias = size.q + 2 * size.kv, size.scores // compute.batch
        by_hand = compute.attention == "explicit" or shape.dropout > 0
        forward["attn.core probabilities"] = (2 if by_hand else 1) * size.scores + bias + views
        forward["attn.proj input"] += views
        backward["attn.core probabilities"] = 3 * size.scores + 2 * r if by_hand else 2 * size.scores + r
    if shape.encoder_layers:
        _add_cross(forward, backward, shape, compute, size)
    _add_norms(forward, backward, shape, compute, size)
    # linears by their inputs: bytes of their weight and output gradients, and of inputs gathered again
    h, tp = shape.hidden, compute.tp
    unit = size.weight
    wide, kv = 2 if shape.gated else 1, compute.kv_heads(shape) * shape.head_dim
    into_heads = unit * h * shape.attention_width // tp
    after_sum = size.gathered or compute.element * compute.shard * h
    out_of_heads = into_heads + (size.q if size.ordered else 0)
    linears = {
        "attn.qkv input": (
            unit * h * (shape.attention_width // tp + 2 * kv) + size.ordered,
            size.q + 2 * size.kv,
            size.gathered,
        ),
        "attn.proj input": (out_of_heads, after_sum, 0),
        f"{first} input": (unit * h * wide * shape.ffn // tp, size.wide, size.gathered),
        "mlp.down input": (unit * h * shape.ffn // tp, after_sum, 0),
        "cross.q input": (into_heads, size.q, size.gathered),
        "cross.kv input": (unit * h * 2 * kv, 2 * size.cross_kv, size.memory_gathered),
        "cross.proj input": (into_heads, after_sum, 0),
    }
    product, held_until_w, regathered = (
        {name: sizes[index] for name, sizes in linears.items()} for index in range(3)
    )
    return _Extras(
        forward=forward,
        backward=backward,
        product=product,
        held_until_w=held_until_w,
        regathered=regathered,
    )


def _add_cross(
    forward: dict[str, int], backward: dict[str, int], shape: ModelShape, compute: ComputeConfig, size: Sizes
) -> None:
    """Add what is alive beside the tensors of attention to the encoder's output; from its backward on, and
    through all that follows, there is the gradient of that output too.
    """
    scores, kv = size.cross_scores, 2 * size.cross_kv
    r = size.residual
    wide = 4 if size.halves else 2
    forward |= {
        "cross.core probabilities": wide * scores + 2 * size.q,
        "cross.core statistics": 2 * size.q + kv,
        "cross.proj input": 2 * size.gathered + r if size.gathered else 2 * r,
    }
    for name in backward:
        backward[name] += size.memory
    head_gradients = r + size.q + kv
    column = 2 * size.memory_gathered + size.memory if size.memory_gathered else size.memory
    backward |= {
        "cross.q input": r + size.q + kv + size.column + size.memory,
        "cross.kv input": r + kv + column + size.memory,
        "cross.core statistics": head_gradients + size.q + kv + size.memory,
        "cross.core probabilities": 3 * scores + r + size.memory,
        "cross.core dropped": scores + head_gradients + size.memory,
        "cross.core mask": 2 * scores + head_gradients + size.memory,
        "cross.proj input": 2 * r + size.q + size.gathered + size.memory,
    }


def _add_norms(
    forward: dict[str, int], backward: dict[str, int], shape: ModelShape, compute: ComputeConfig, size: Sizes
) -> None:
    """Add what is alive beside norms, and because of them beside other tensors."""
    r, exact = size.residual, size.exact_residual
    composed, after = composed_norms(shape, compute), shape.block_norms == "sandwich"
    lean = 2 * exact if size.halves and shape.norm == "rms" else 0  # RMSNorm: input and squares
    copied = size.halves and composed  # the block's input lives as long as its forward, whatever norms keep
    before = r if copied else 0
    if copied:
        for name in forward:
            later = name.startswith("mlp")
            forward[name] += 3 * r if later else r  # and the sum after attention, and attention's output
    # attention's output lives until the MLP's is there
    for name, alive in (
        ("norm1", before),
        ("norm1_post", before + r),
        ("norm_cross", r),
        ("norm2", 3 * r if copied else r),
        ("norm2_post", 3 * r if copied else r),
    ):
        forward[f"{name} statistics"] = alive + (exact + r * size.halves if composed else lean)
        backward[f"{name} normalised"] = r + 3 * exact + r * size.halves
        backward[f"{name} input"] = r + 4 * exact if composed else size.norm
    if after:  # a branch's gradient is another than the residual stream's
        for name in backward:
            if name.startswith(("attn", "mlp")):
                backward[name] += r
    head_gradients = r + size.q + 2 * size.kv
    for name, width in (("q", size.q), ("k", size.kv)):
        wide = size.wider * width
        product = size.q + 2 * size.kv if composed else 0
        forward[f"attn.{name}_norm statistics"] = before + product + 2 * wide
        backward[f"attn.{name}_norm normalised"] = head_gradients + 3 * wide
        backward[f"attn.{name}_norm input"] = head_gradients + (4 * wide if composed else 3 * wide + width)


_TILE = 64  # queries of a tile of attention written out, on the CPU where dry runs are
_TILE_SCORES = 1 << 18  # of a tile, unless a single key head has more


def _core_extras(shape: ModelShape, compute: ComputeConfig, size: Sizes) -> tuple[int, int]:
    """Bytes alive beside the statistics of attention that keeps no probabilities: in its forward the product
    that heads are views of, and queries in another order; in its backward the gradients.

    Kernels for soft-capped scores, for values narrower than keys, and for windows on CPUs accumulate in
    float32.
    """
    special, wider = shape.attention, size.wider
    length = compute.tokens // compute.batch * (compute.cp if compute.context == "ulysses" else 1)
    window = special.window if special.window is not None and special.window < length * compute.cp else None
    tiled = compute.attention != "flex" and (special.softcap is not None or shape.value_dim < shape.head_dim)
    ring = compute.cp > 1 and compute.context == "ring" and (tiled or window is not None)
    summed = tiled or (compute.attention != "flex" and window is not None)
    keys = size.q + size.kv + size.v
    gradients = wider * keys if summed else keys
    narrowed = keys if gradients > keys else 0  # rounded at the end
    y = wider * size.y if summed else 0
    views = size.q + size.kv + size.v  # products whose views are heads
    if shape.latent is None:
        views += size.q if shape.rotary else 0  # queries before they are brought into order
    forward, backward = size.y, narrowed
    if tiled:
        scores = _tile_scores(shape, compute, length, window)
        copied = size.kv if shape.latent is not None else 0  # keys of one head next to each other
        halves = compute.element if size.halves else 0
        forward = max(forward, copied + scores * (2 * compute.statistic + halves))
        backward = copied + max(backward, scores * (5 * compute.statistic + 2 * halves))
    if special.sinks:
        backward = max(backward, 2 * wider * size.y)
    if ring:  # one round's part beside the sum, keys and values on their way, and the gradients of these
        moved = size.kv + size.v
        forward += y + moved
        # half of the queries see all keys of a later rank; nothing is rounded before all rounds are done
        sums = 2 * wider * moved if compute.cp > 2 else 0  # of gradients, received and sent
        backward += wider * (size.q // 2 + moved) + moved + sums
        backward += moved - size.kv * (shape.latent is not None) if tiled else -narrowed
    return views + y + forward, 2 * size.y + gradients + backward  # the output and its gradient, too


def _tile_scores(shape: ModelShape, compute: ComputeConfig, length: int, window: int | None) -> int:
    """Scores of the largest tile of attention written out (`engine.kernels.Explicit`)."""
    heads, kv_heads = shape.heads // compute.tp, compute.kv_heads(shape)
    if compute.cp > 1 and compute.context == "ulysses":
        heads, kv_heads = heads // compute.cp, max(kv_heads // compute.cp, 1)
    rounds = compute.cp > 1 and compute.context == "ring"  # where queries see whole blocks of keys
    largest = 0
    for start in range(0, length, _TILE):
        queries = min(_TILE, length - start)
        keys = length if rounds else start + queries
        keys = keys if window is None else min(keys, window + queries - 1)
        size = heads // kv_heads * queries * keys
        largest = max(largest, size * min(max(_TILE_SCORES // size, 1), compute.batch * kv_heads))
    return largest


def _add_latent_vectors(
    extras: _Extras, shape: ModelShape, latent: LatentShape, compute: ComputeConfig, size: Sizes
) -> None:
    """Add the bytes beside the products and norms around the narrow vectors of latent attention."""
    e, unit = compute.element, size.weight
    r = size.residual
    heads, t = shape.heads // compute.tp, compute.tp if size.gathered else 1
    up = {"kv": (latent.kv_rank, heads * (shape.head_dim - latent.rope_dim + latent.value_dim))}
    if latent.q_rank is not None:
        up["q"] = latent.q_rank, heads * shape.head_dim
    down = latent.kv_rank + latent.rope_dim
    q = heads * shape.head_dim if latent.q_rank is None else latent.q_rank
    # the gradients of keys, values and of the residual stream are there until those of queries are done
    pending = {"q": r + size.kv + size.v, "kv": r + (r if latent.q_rank else size.q)}
    for name, (rank, rows) in up.items():
        shard = e * compute.shard * rank
        column = 2 * t * shard + shard if size.gathered else shard
        extras.forward[f"attn.{name}_down_norm statistics"] = 2 * size.wider * shard * size.halves
        extras.backward[f"attn.{name}_up input"] = pending[name] + e * compute.tokens * rows + column
        extras.backward[f"attn.{name}_down_norm input"] = pending[name] + 2 * shard + 3 * size.wider * shard
        extras.product[f"attn.{name}_up input"] = unit * rank * rows
        extras.held_until_w[f"attn.{name}_up input"] = e * compute.tokens * rows
        extras.regathered[f"attn.{name}_up input"] = t * shard if size.gathered else 0
    narrow = e * compute.shard * (down + (latent.q_rank or 0))
    wide = 0 if latent.q_rank else size.q + size.column
    extras.backward["attn.qkv input"] = 3 * r + narrow + wide
    extras.product["attn.qkv input"] = unit * shape.hidden * max(down, q)
    extras.held_until_w["attn.qkv input"] = narrow + (0 if latent.q_rank else size.q)
    if latent.q_rank is not None:
        extras.regathered["attn.qkv input"] = 0
