"""What one layer holds while it computes: what it keeps for its backward, and the largest temporaries of
forward and backward.

The forward makes the kept tensors in their order, the backward consumes them in reverse. At each of these
tensors the model counts what is alive beside it: outputs that have not been handed on, gradients of
activations, products of weight gradients before they are accumulated. Sizes are those of the operators as
PyTorch runs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

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
from stretto.planner.memory.sizes import Sizes
from stretto.spec.attention import LatentShape
from stretto.spec.chain import layer_of
from stretto.spec.framework import CORE
from stretto.spec.shape import ModelShape


class _ExpertRows:
    """Rows that a rank's experts work on under even routing.

    Attributes:
        copies: copies of the tokens that this rank routes, one for each expert that a token goes to.
        rows: rows that the experts on this rank work on; each expert has a slice of the inner width.
        width: the width of that slice.
    """

    def __init__(self, shape: ModelShape, compute: ComputeConfig) -> None:
        moe = shape.moe
        assert moe is not None
        tokens = compute.tokens if compute.replicated_routing else -(-compute.tokens // compute.tp)
        self.copies = tokens * moe.top_k
        self.rows = self.copies if compute.replicated_routing else self.copies * compute.expert_shards
        self.width = shape.expert_ffn // compute.expert_shards


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor that a layer's backward needs.

    Attributes:
        kept: from the forward on; else it is recomputed in the backward, together with its recomputed
            neighbours.
        forward, backward: peak bytes beside it while it is made, and while it is consumed.
        product: bytes of its weight gradient where that is formed apart and then accumulated.
        waits: bytes of the output gradient that a split backward keeps with it from I to W; None: none, I
            consumes it.
        fetched: bytes of the input that are gathered again for the weight gradient.
        passes: whether that output gradient is the residual stream's, which is there in any case.
    """

    name: str
    bytes: int
    kept: bool = True
    forward: int = 0
    backward: int = 0
    product: int = 0
    waits: int | None = None
    fetched: int = 0
    passes: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """One layer of a stage.

    Attributes:
        input_bytes: bytes of the first part, where that is the layer's input; of a stage's first layer they
            are counted with the stage before or with the received message.
        ends: whether this is the embedding or the head.
        forward: peak bytes of a forward that keeps its input only.
    """

    parts: tuple[Part, ...]
    input_bytes: int
    ends: bool = False
    recomputed: bool = False
    forward: int = 0

    @property
    def kept(self) -> int:
        """Bytes between forward and backward, the input included."""
        return sum(part.bytes for part in self.parts if part.kept)

    @property
    def last_product(self) -> Part | None:
        """The input of the layer's last linear."""
        return next((part for part in reversed(self.parts) if part.waits is not None), None)

    @property
    def between(self) -> int:
        """Bytes between I and W."""
        return sum(part.bytes + part.waits for part in self.parts if part.waits is not None)


def layer_memory(shape: ModelShape, compute: ComputeConfig, layer: int, apart: bool = False) -> LayerMemory:
    """The memory of layer number `layer` of the chain (`spec.chain`).

    Args:
        compute: with the `recompute` of this block; of an encoder's layers where there is one.
        apart: weight gradients are formed apart and then accumulated, as oneDNN's are; those of 16 bits
            always are.
    """
    here = layer_of(shape, layer)
    compute = compute.at(here)
    match here.kind:
        case "embed":
            return _embedding(shape, compute)
        case "between":
            return _between(shape, compute)
        case "head":
            return _head(shape, compute, apart)
        case _:
            return _block(here.shape, compute, apart)


@lru_cache(maxsize=1024)
def _embedding(shape: ModelShape, compute: ComputeConfig) -> LayerMemory:
    size = Sizes(shape, compute, False)
    kept = [Part(name=s.name, bytes=s.bytes) for s in embedding_saved(shape, compute)]
    whole = compute.element * compute.tokens * shape.hidden
    forward = 2 * whole + (size.residual if size.gathered else 0) if compute.tp > 1 else size.residual
    forward = max(forward, 2 * size.residual if shape.learned else 0)
    backward = size.residual + 2 * size.gathered
    if size.halves:  # the gradient in the type in which it is accumulated
        backward += compute.statistic * compute.tokens * shape.hidden
    return LayerMemory(
        parts=(Part(name="embed", bytes=0, kept=True, forward=forward, backward=backward), *kept),
        input_bytes=0,
        ends=True,
    )


@lru_cache(maxsize=1024)
def _between(shape: ModelShape, compute: ComputeConfig) -> LayerMemory:
    """The encoder's last norm, then the embedding of the decoder's tokens."""
    embedding, memory = _embedding(shape, compute), Sizes(shape, compute.of_memory, False)
    saved = between_saved(shape, compute)
    kept = [Part(name=s.name, bytes=s.bytes) for s in saved]
    first = kept[0]
    # keys and values are made of it in every block of the decoder, and their weights' gradients too
    kept = [replace(part, waits=0) if part.name == "memory" else part for part in kept]
    if shape.last_norm:
        kept[0] = replace(first, backward=memory.norm)
    lookup = embedding.parts[0]
    return LayerMemory(
        parts=(*kept, replace(lookup, backward=lookup.backward + memory.residual)),
        input_bytes=first.bytes,
        ends=True,
    )


@lru_cache(maxsize=1024)
def _block(shape: ModelShape, compute: ComputeConfig, apart: bool) -> LayerMemory:
    size = Sizes(shape, compute, apart)
    whole = block_saved(shape, replace(compute, recompute="none"))
    here = {saved.name for saved in block_saved(shape, compute)}
    forward, backward = _block_extras(shape, compute, size)
    product, waits = _weights(shape, compute, size), _waits(shape, compute, size)
    columns = ["attn.qkv input", "mlp.gate_up input" if shape.gated else "mlp.up input"]
    columns += ["cross.q input"] if shape.encoder_layers else []
    fetched: dict[str, int] = dict.fromkeys(columns, size.gathered)
    fetched["cross.kv input"] = size.memory_gathered
    if shape.latent is not None:
        vectors = _latent_vectors(shape, shape.latent, compute, size)
        for extras, of_vectors in zip((forward, backward, product, waits, fetched), vectors, strict=True):
            extras |= of_vectors
    parts = _parts(
        saved=whole, forward=forward, backward=backward, product=product, waits=waits, fetched=fetched
    )
    if shape.moe is not None:
        parts = [_expert_part(part, shape, compute, size) for part in parts]
    if not shape.dropout and not size.gathered:
        through = ("attn.proj input", "cross.proj input", "mlp.down input")
        parts = [replace(p, passes=p.name in through and shape.block_norms != "post") for p in parts]
    if compute.recompute != "full":
        first = parts[0]
        if compute.framework.operators == CORE:
            parts = [replace(part, kept=part.name in here) for part in parts]
        else:
            parts = list(_kept_parts(parts, block_saved(shape, compute)))
        return LayerMemory(parts=tuple(parts), input_bytes=first.bytes if keeps_input(shape, compute) else 0)
    (kept,) = block_saved(shape, compute)
    again = [replace(part, kept=False) for part in parts[keeps_input(shape, compute) :]]
    if kept.bytes < size.residual:  # a shard of the input, gathered again
        again.insert(0, Part(name="gathered input", bytes=size.residual, kept=False))
    return LayerMemory(
        parts=(Part(name=kept.name, bytes=kept.bytes), *again),
        input_bytes=kept.bytes,
        recomputed=True,
        forward=_without_graph(shape, compute, size) + size.residual * compute.framework.inputs_on_host,
    )


def _kept_parts(parts: Sequence[Part], kept: Sequence[Saved]) -> Iterator[Part]:
    """The parts where operators other than attention's core are recomputed: of a tensor that is kept in part,
    two; and what is kept beside the tensors that a block keeps without recomputation.
    """
    sizes = {saved.name: saved.bytes for saved in kept}
    beside = sizes.keys() - {part.name for part in parts}
    for part in parts:
        size = sizes.get(part.name, 0)
        if 0 < size < part.bytes:
            yield Part(name=part.name, bytes=size)
            yield replace(part, bytes=part.bytes - size, kept=False)
        else:
            yield replace(part, kept=part.name in sizes)
        if part.name == "norm2 statistics":
            yield from (Part(name=name, bytes=sizes[name]) for name in sorted(beside))


@lru_cache(maxsize=1024)
def _head(shape: ModelShape, compute: ComputeConfig, apart: bool) -> LayerMemory:
    size = Sizes(shape, compute, apart)
    saved = head_saved(shape, compute)
    if compute.loss_chunk_tokens(shape):
        return _chunked_head(shape, compute, size)
    loss = next(s.name for s in saved if s.name.startswith("loss"))
    copied = size.exact if size.halves else 0
    probabilities = size.logits if size.halves else 0  # overwritten with the gradient
    if compute.framework.dtensor_loss and compute.tp > 1:
        copied, probabilities = copied + size.exact, 3 * size.exact
    made, consumed = {  # bytes beside what the loss keeps: in the forward, in the backward
        "loss log-probabilities": (size.logits + copied, 2 * size.exact),
        "loss probabilities": (size.logits + copied, probabilities),
        "loss logits": (0, size.logits),
    }[loss]
    gathered = size.gathered + size.ordered + size.logits if size.gathered else 0
    forward = {"out input": gathered, loss: made}
    back = {
        "norm input": size.norm - size.residual,
        # the logits' gradient: a new tensor, or the probabilities overwritten with it
        "out input": size.logits + size.column + size.ordered,
        loss: consumed,
    }
    product = {"out input": size.weight * size.columns * shape.hidden + size.ordered}
    waits = {"out input": size.logits}
    parts = _parts(
        saved=saved,
        forward=forward,
        backward=back,
        product=product,
        waits=waits,
        fetched={"out input": size.gathered},
    )
    itself = keeps_input(shape, compute)
    return LayerMemory(parts=tuple(parts), input_bytes=saved[0].bytes if itself else 0, ends=True)


def _chunked_head(shape: ModelShape, compute: ComputeConfig, size: Sizes) -> LayerMemory:
    """The head whose backward computes logits, loss and gradients chunk by chunk."""
    saved = head_saved(shape, compute)
    logits = compute.loss_chunk_tokens(shape) * size.columns
    exact = compute.statistic * logits * (2 if shape.logit_softcap else 1)  # overwritten with the gradient
    chunk = exact + (compute.element * logits if size.halves else 0)
    whole = compute.element * compute.tokens * shape.hidden  # the input's gradient
    weight = size.weight * size.columns * shape.hidden
    rows = (
        compute.element * compute.loss_chunk_tokens(shape) * shape.hidden
    )  # of it, before they are copied there
    products = compute.element * logits + max(size.column + weight, whole + rows)
    back = {
        "norm input": size.norm - size.residual,
        "out input": size.gathered + max(whole + chunk, products),
    }
    parts = _parts(saved=saved, forward={}, backward=back, product={}, waits={}, fetched={})
    itself = keeps_input(shape, compute)
    return LayerMemory(parts=tuple(parts), input_bytes=saved[0].bytes if itself else 0, ends=True)


def _expert_part(part: Part, shape: ModelShape, compute: ComputeConfig, size: Sizes) -> Part:
    """A tensor of a mixture of experts with what is alive beside it."""
    at, e = _ExpertRows(shape, compute), compute.element
    wide = 2 if shape.gated else 1
    inner = e * at.rows * at.width
    rows = e * at.rows * shape.hidden
    copies = e * at.copies * shape.hidden
    first = "mlp.experts.gate_up" if shape.gated else "mlp.experts.up"
    # the experts' output gradient: as it arrives from other ranks, and sorted by expert
    dy = copies + 2 * rows if compute.ep > 1 else rows
    # the sum of a token's experts, the normalised input, and attention's output; where all ranks route the
    # same tokens, these too, and the sum cut into the ranks' parts
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
    forward, backward, waits = extras[part.name]
    return replace(part, forward=forward, backward=backward, waits=waits)


def _parts(
    saved: Sequence[Saved],
    forward: Mapping[str, int],
    backward: Mapping[str, int],
    product: Mapping[str, int],
    waits: Mapping[str, int],
    fetched: Mapping[str, int],
) -> list[Part]:
    return [
        Part(
            name=s.name,
            bytes=s.bytes,
            kept=True,
            forward=forward.get(s.name, 0),
            backward=backward.get(s.name, 0),
            product=product.get(s.name, 0),
            waits=waits.get(s.name),
            fetched=fetched.get(s.name, 0),
        )
        for s in saved
    ]


def _block_extras(
    shape: ModelShape, compute: ComputeConfig, size: Sizes
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes alive beside each kept tensor of a block, in the forward and in the backward."""
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
    made = r + size.q + 2 * size.kv
    backward = {
        "attn.qkv input": made + size.column + size.ordered,
        "attn.core statistics": r + core_back,
        "attn.core probabilities": (2 if compute.framework.fused_softmax else 3) * size.scores + r,
        "attn.core capped": 3 * size.scores + made,
        "attn.core dropped": size.scores + made,
        "attn.core mask": 2 * size.scores + made,
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
    return forward, backward


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
    made = r + size.q + kv
    column = 2 * size.memory_gathered + size.memory if size.memory_gathered else size.memory
    backward |= {
        "cross.q input": r + size.q + kv + size.column + size.memory,
        "cross.kv input": r + kv + column + size.memory,
        "cross.core statistics": made + size.q + kv + size.memory,
        "cross.core probabilities": 3 * scores + r + size.memory,
        "cross.core dropped": scores + made + size.memory,
        "cross.core mask": 2 * scores + made + size.memory,
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
    made = r + size.q + 2 * size.kv
    for name, width in (("q", size.q), ("k", size.kv)):
        wide = size.wider * width
        product = size.q + 2 * size.kv if composed else 0
        forward[f"attn.{name}_norm statistics"] = before + product + 2 * wide
        backward[f"attn.{name}_norm normalised"] = made + 3 * wide
        backward[f"attn.{name}_norm input"] = made + (4 * wide if composed else 3 * wide + width)


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
    most = 0
    for start in range(0, length, _TILE):
        queries = min(_TILE, length - start)
        seen = length if rounds else start + queries
        seen = seen if window is None else min(seen, window + queries - 1)
        size = heads // kv_heads * queries * seen
        most = max(most, size * min(max(_TILE_SCORES // size, 1), compute.batch * kv_heads))
    return most


def _latent_vectors(
    shape: ModelShape, latent: LatentShape, compute: ComputeConfig, size: Sizes
) -> tuple[dict[str, int], ...]:
    """Of the products and norms around the narrow vectors of latent attention, by the inputs of these: bytes
    alive in the forward and in the backward, of weight gradients, of the output gradients that wait for them,
    and of inputs that are gathered again.
    """
    e, unit = compute.element, size.weight
    r = size.residual
    heads, t = shape.heads // compute.tp, compute.tp if size.gathered else 1
    up = {"kv": (latent.kv_rank, heads * (shape.head_dim - latent.rope_dim + latent.value_dim))}
    if latent.q_rank is not None:
        up["q"] = latent.q_rank, heads * shape.head_dim
    down = latent.kv_rank + latent.rope_dim
    q = heads * shape.head_dim if latent.q_rank is None else latent.q_rank
    forward, backward, product, waits, fetched = (dict[str, int]() for _ in range(5))
    # the gradients of keys, values and of the residual stream are there until those of queries are done
    beside = {"q": r + size.kv + size.v, "kv": r + (r if latent.q_rank else size.q)}
    for name, (rank, rows) in up.items():
        shard = e * compute.shard * rank
        column = 2 * t * shard + shard if size.gathered else shard
        forward[f"attn.{name}_down_norm statistics"] = 2 * size.wider * shard * size.halves
        backward[f"attn.{name}_up input"] = beside[name] + e * compute.tokens * rows + column
        backward[f"attn.{name}_down_norm input"] = beside[name] + 2 * shard + 3 * size.wider * shard
        product[f"attn.{name}_up input"] = unit * rank * rows
        waits[f"attn.{name}_up input"] = e * compute.tokens * rows
        fetched[f"attn.{name}_up input"] = t * shard if size.gathered else 0
    narrow = e * compute.shard * (down + (latent.q_rank or 0))
    wide = 0 if latent.q_rank else size.q + size.column
    backward["attn.qkv input"] = 3 * r + narrow + wide
    product["attn.qkv input"] = unit * shape.hidden * max(down, q)
    waits["attn.qkv input"] = narrow + (0 if latent.q_rank else size.q)
    if latent.q_rank is not None:
        fetched["attn.qkv input"] = 0
    return forward, backward, product, waits, fetched


def _weights(shape: ModelShape, compute: ComputeConfig, size: Sizes) -> dict[str, int]:
    """Bytes of the weight gradients of a block's linears, by the inputs that they are formed from."""
    h = shape.hidden
    tp = compute.tp
    unit = size.weight
    first = "mlp.gate_up" if shape.gated else "mlp.up"
    wide = 2 if shape.gated else 1
    kv = compute.kv_heads(shape) * shape.head_dim
    return {
        "attn.qkv input": unit * h * (shape.attention_width // tp + 2 * kv) + size.ordered,
        "attn.proj input": unit * h * shape.attention_width // tp + (size.q if size.ordered else 0),
        f"{first} input": unit * h * wide * shape.ffn // tp,
        "mlp.down input": unit * h * shape.ffn // tp,
        "cross.q input": unit * h * shape.attention_width // tp,
        "cross.kv input": unit * h * 2 * kv,
        "cross.proj input": unit * h * shape.attention_width // tp,
    }


def _waits(shape: ModelShape, compute: ComputeConfig, size: Sizes) -> dict[str, int]:
    """Bytes of the output gradients of a block's linears, by their inputs."""
    first = "mlp.gate_up" if shape.gated else "mlp.up"
    after = size.gathered or compute.element * compute.shard * shape.hidden
    return {
        "attn.qkv input": size.q + 2 * size.kv,
        "attn.proj input": after,
        f"{first} input": size.wide,
        "mlp.down input": after,
        "cross.q input": size.q,
        "cross.kv input": 2 * size.cross_kv,
        "cross.proj input": after,
    }


def _without_graph(shape: ModelShape, compute: ComputeConfig, size: Sizes) -> int:
    """Peak bytes, beside its input, of a block's forward that keeps nothing."""
    explicit = stores_scores(shape, compute)
    core = size.softmax + size.scores if explicit else size.q
    if shape.dropout:
        core = max(core, 2 * size.scores + size.draw)
    attention = size.residual + 2 * (size.q + 2 * size.kv) + core
    mlp = 2 * size.residual + size.wide + (2 if shape.gated else 1) * size.inner + size.residual
    return max(attention, mlp)
