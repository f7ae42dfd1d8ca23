"""Names, sizes and counts of a model's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from math import prod

from stretto.job.attention import LatentShape
from stretto.job.experts import ExpertShape
from stretto.job.lora import PROJECTIONS, LoraShape, projection_rows
from stretto.job.shape import ModelShape
from stretto.job.user_shape import UserShape

Sizes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of a model, each counted once: a tied head counts with the embedding."""

    embedding: int  # tokens, learned positions of every stack, and norms of embeddings
    per_layer: int  # one block, the last if blocks differ
    layers: int
    norm: int  # the last norm
    output: int  # the output projection; 0 if tied
    idle: int = 0  # parameters that a token does not use, in all blocks: experts that it is not routed to
    uneven: int = 0  # surplus of all blocks over `per_layer` each, and parameters that blocks share
    encoder: int = 0  # the encoder's blocks, with parameters that they share, and its last norm

    @property
    def total(self) -> int:
        return self.embedding + self.encoder + self.blocks + self.norm + self.output

    @property
    def active(self) -> int:
        """Parameters that a token uses."""
        return self.total - self.idle

    @property
    def blocks(self) -> int:
        """Parameters of all blocks of the decoder."""
        return self.layers * self.per_layer + self.uneven

    @property
    def non_embedding(self) -> int:
        """All parameters but embeddings and output projection (Kaplan et al. 2020, section 2.1)."""
        return self.encoder + self.blocks + self.norm


def count_parameters(shape: ModelShape) -> ParameterCount:
    """Return the number of parameters of the plain model, with an unpadded vocabulary."""
    output = 0 if shape.tied else shape.vocab * shape.hidden
    last = _elements(block_shapes(shape.block(shape.layers - 1)))
    second = decoder_embedding_shapes(shape) if shape.encoder_layers else {}
    of_memory = _elements({name: sizes for name, sizes in second.items() if name.startswith("memory")})
    return ParameterCount(
        embedding=_elements(embedding_shapes(shape)) + _elements(second) - of_memory,
        per_layer=last,
        layers=shape.layers,
        norm=_elements(head_shapes(shape)) - output,
        output=output,
        idle=sum(many * _idle(kind) for kind, many in shape.kinds()),
        uneven=sum(many * (_elements(block_shapes(kind)) - last) for kind, many in shape.kinds())
        + _elements(shared_shapes(shape)),
        encoder=_encoder(shape) + of_memory,
    )


def _encoder(shape: ModelShape) -> int:
    if not shape.encoder_layers:
        return 0
    stack = shape.encoder_stack
    blocks = sum(many * _elements(block_shapes(kind)) for kind, many in stack.kinds())
    return blocks + _elements(shared_shapes(stack))


def parameter_shapes(shape: ModelShape) -> dict[str, Sizes]:
    """Return name and sizes of every parameter of the plain model, in the order of its layers."""
    if isinstance(shape, UserShape):
        return dict(shape.parameters)
    shapes = {f"embed.{name}": sizes for name, sizes in embedding_shapes(shape).items()}
    if shape.encoder_layers:
        shapes |= _stack("encoder", shape.encoder_stack)
        between = decoder_embedding_shapes(shape)
        shapes |= {f"decoder_embed.{name}": sizes for name, sizes in between.items()}
    shapes |= _stack("blocks", shape)
    return shapes | {f"head.{name}": sizes for name, sizes in head_shapes(shape).items()}


def _stack(prefix: str, stack: ModelShape) -> dict[str, Sizes]:
    """Return the parameters of all blocks of a stack; shared ones have their name in the first block."""
    shapes: dict[str, Sizes] = {}
    for i in range(stack.layers):
        block = block_shapes(stack.block(i))
        if i == 0:  # in the order of the modules: the first norm precedes attention
            block = {**_norm("norm1", stack), **shared_shapes(stack), **block}
        shapes |= {f"{prefix}.{i}.{name}": sizes for name, sizes in block.items()}
    return shapes


def embedding_shapes(shape: ModelShape) -> dict[str, Sizes]:
    """Return the parameters of the embedding layer."""
    shapes: dict[str, Sizes] = {"tok.weight": (shape.vocab, shape.hidden)}
    if shape.learned:
        shapes["pos.weight"] = (shape.sequence, shape.hidden)
    return {**shapes, **(_norm("norm", shape) if shape.embedding_norm else {})}


def decoder_embedding_shapes(shape: ModelShape) -> dict[str, Sizes]:
    """Return the parameters of the layer between encoder and decoder: the embedding of the decoder's tokens
    without the token table, which is the encoder's, and the encoder's last norm.
    """
    embedding = embedding_shapes(shape)
    del embedding["tok.weight"]
    return {**embedding, **(_norm("memory_norm", shape) if shape.last_norm else {})}


def shared_shapes(shape: ModelShape) -> dict[str, Sizes]:
    """Return the parameters that all blocks of a stack share, by their name in a block."""
    return {"attn.relative": (shape.heads, shape.attention.buckets)} if shape.relative else {}


def block_shapes(shape: ModelShape) -> dict[str, Sizes]:
    """Return the parameters of one block; if blocks differ, pass `shape.block(index)`."""
    after = shape.block_norms == "sandwich"
    shapes = {
        **_norm("norm1", shape),
        **(_attention(shape) if shape.latent is None else _latent(shape, shape.latent)),
        **_linear("attn.proj", shape.hidden, shape.heads * shape.value_dim, shape.proj_bias),
        **(_norm("norm1_post", shape) if after else {}),
        **(_cross(shape) if shape.encoder_layers else {}),
        **_norm("norm2", shape),
        **(_mlp("mlp", shape, shape.ffn) if shape.moe is None else _moe(shape, shape.moe)),
        **(_norm("norm2_post", shape) if after else {}),
    }
    return shapes if shape.lora is None else _adapted(shapes, shape, shape.lora)


def _adapted(shapes: dict[str, Sizes], shape: ModelShape, lora: LoraShape) -> dict[str, Sizes]:
    """Return a block's parameters with those of adapters, each after its linear's."""
    every: dict[str, Sizes] = {}
    for module, names in groupby(shapes, key=lambda name: name.rpartition(".")[0]):
        every |= {name: shapes[name] for name in names}
        if adapted := lora.adapted(module):
            rows, columns = shapes[f"{module}.weight"]
            sizes = zip(PROJECTIONS[module], projection_rows(module, rows, shape.kv_width), strict=True)
            for projection, size in sizes:
                if projection in adapted:
                    every[f"{module}.lora.{projection}.A.weight"] = (lora.rank, columns)
                    every[f"{module}.lora.{projection}.B.weight"] = (size, lora.rank)
    return every


def expert_shapes(shape: ModelShape) -> dict[str, Sizes]:
    """Return the parameters of one block's routed experts, stacked over experts; empty without experts."""
    if shape.moe is None:
        return {}
    expert = _mlp("mlp.experts", shape, shape.expert_ffn)
    renamed = {name.removesuffix(".weight").replace(".bias", "_bias"): size for name, size in expert.items()}
    return {name: (shape.moe.experts, *sizes) for name, sizes in renamed.items()}


def head_shapes(shape: ModelShape) -> dict[str, Sizes]:
    """Return the head's parameters, without a tied output projection."""
    output: dict[str, Sizes] = {} if shape.tied else {"out.weight": (shape.vocab, shape.hidden)}
    return {**(_norm("norm", shape) if shape.last_norm else {}), **output}


def _attention(shape: ModelShape) -> dict[str, Sizes]:
    """Return the parameters of attention before softmax(q k^T) v."""
    shapes: dict[str, Sizes] = {"attn.sinks": (shape.heads,)} if shape.attention.sinks else {}
    shapes |= _linear("attn.qkv", shape.attention_width + 2 * shape.kv_width, shape.hidden, shape.qkv_bias)
    if shape.attention.norm is not None:
        over_all = shape.attention.norm == "all"
        shapes["attn.q_norm.weight"] = (shape.attention_width if over_all else shape.head_dim,)
        shapes["attn.k_norm.weight"] = (shape.kv_width if over_all else shape.head_dim,)
    return shapes


def _cross(shape: ModelShape) -> dict[str, Sizes]:
    """Return the parameters of the decoder's attention to the encoder's output."""
    return {
        **_norm("norm_cross", shape),
        **_linear("cross.q", shape.attention_width, shape.hidden, shape.qkv_bias),
        **_linear("cross.kv", 2 * shape.kv_width, shape.hidden, shape.qkv_bias),
        **_linear("cross.proj", shape.hidden, shape.attention_width, shape.proj_bias),
    }


def _latent(shape: ModelShape, latent: LatentShape) -> dict[str, Sizes]:
    """Return the same for latent attention: down projections to latent vectors, their norms, up
    projections.
    """
    shapes: dict[str, Sizes] = {}
    queries = ("attn.q", shape.hidden)
    if latent.q_rank is not None:
        shapes |= _linear("attn.q_down", latent.q_rank, shape.hidden, shape.qkv_bias)
        shapes["attn.q_down_norm.weight"] = (latent.q_rank,)
        queries = ("attn.q_up", latent.q_rank)
    up = shape.heads * (shape.head_dim - latent.rope_dim + latent.value_dim)
    return {
        **shapes,
        f"{queries[0]}.weight": (shape.attention_width, queries[1]),
        **_linear("attn.kv_down", latent.kv_rank + latent.rope_dim, shape.hidden, shape.qkv_bias),
        "attn.kv_down_norm.weight": (latent.kv_rank,),
        "attn.kv_up.weight": (up, latent.kv_rank),
    }


def _moe(shape: ModelShape, moe: ExpertShape) -> dict[str, Sizes]:
    return {
        **({"mlp.router.correction": (moe.experts,)} if moe.correction else {}),
        "mlp.router.gate.weight": (moe.experts, shape.hidden),
        **({"mlp.router.gate.bias": (moe.experts,)} if moe.router_bias else {}),
        **expert_shapes(shape),
        **(_mlp("mlp.shared", shape, moe.shared_ffn) if moe.shared_ffn else {}),
        **({"mlp.shared_gate.weight": (1, shape.hidden)} if moe.shared_gate else {}),
    }


def _mlp(name: str, shape: ModelShape, width: int) -> dict[str, Sizes]:
    first, rows = ("gate_up", 2 * width) if shape.gated else ("up", width)
    return {
        **_linear(f"{name}.{first}", rows, shape.hidden, shape.bias),
        **_linear(f"{name}.down", shape.hidden, width, shape.bias),
    }


def _idle(shape: ModelShape) -> int:
    if shape.moe is None:
        return 0
    return _elements(expert_shapes(shape)) // shape.moe.experts * (shape.moe.experts - shape.moe.top_k)


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, Sizes]:
    weight: dict[str, Sizes] = {f"{name}.weight": (rows, columns)}
    return {**weight, f"{name}.bias": (rows,)} if bias else weight


def _norm(name: str, shape: ModelShape) -> dict[str, Sizes]:
    gain: dict[str, Sizes] = {f"{name}.weight": (shape.hidden,)}
    return {**gain, f"{name}.bias": (shape.hidden,)} if shape.norm_bias else gain


def _elements(shapes: dict[str, Sizes]) -> int:
    return sum(prod(sizes) for sizes in shapes.values())


def in_linear_of_block(name: str) -> bool:
    """True if a parameter of the plain model belongs to a block, but neither to a router nor to a table such
    as T5's biases by distance.
    """
    parts = name.split(".")
    return parts[0] in ("blocks", "encoder") and not {"router", "relative"} & set(parts)


def stays_float32(name: str, patterns: Iterable[str]) -> bool:
    """True if a parameter of the plain model matches a pattern (`*`: any text) and stays in float32."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
