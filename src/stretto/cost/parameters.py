"""How many parameters a model has, by name and in sum, to the integer."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from stretto.cost.experts import ExpertShape
from stretto.cost.shape import ModelShape

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model, each counted once: a tied head counts with the embedding."""

    embedding: int  # tokens, and learned positions
    per_layer: int  # one block
    layers: int
    norm: int  # the last norm
    output: int  # the output projection; 0 when tied
    idle: int = 0  # of one block: what a token does not meet there, the experts that it is not sent to

    @property
    def total(self) -> int:
        return self.embedding + self.blocks + self.norm + self.output

    @property
    def active(self) -> int:
        """Parameters that a token meets."""
        return self.total - self.layers * self.idle

    @property
    def blocks(self) -> int:
        """All blocks together."""
        return self.layers * self.per_layer

    @property
    def non_embedding(self) -> int:
        """All but embeddings and output projection (Kaplan et al. 2020, section 2.1)."""
        return self.blocks + self.norm


def count_parameters(shape: ModelShape) -> ParameterCount:
    """Parameters of the plain model of that shape, vocabulary without padding."""
    output = 0 if shape.tied else shape.vocab * shape.hidden
    return ParameterCount(
        embedding=_elements(embedding_shapes(shape)),
        per_layer=_elements(block_shapes(shape)),
        layers=shape.layers,
        norm=_elements(head_shapes(shape)) - output,
        output=output,
        idle=_idle(shape),
    )


def parameter_shapes(shape: ModelShape) -> dict[str, Sizes]:
    """Name and sizes of every parameter of the plain model, in the order of its layers."""
    found = {f"embed.{name}": sizes for name, sizes in embedding_shapes(shape).items()}
    for i in range(shape.layers):
        found |= {f"blocks.{i}.{name}": sizes for name, sizes in block_shapes(shape).items()}
    return found | {f"head.{name}": sizes for name, sizes in head_shapes(shape).items()}


def embedding_shapes(shape: ModelShape) -> dict[str, Sizes]:
    """Parameters of the embedding layer."""
    found: dict[str, Sizes] = {"tok.weight": (shape.vocab, shape.hidden)}
    if shape.family == "gpt":
        found["pos.weight"] = (shape.sequence, shape.hidden)
    return found


def block_shapes(shape: ModelShape) -> dict[str, Sizes]:
    """Parameters of one block."""
    attention, hidden = shape.attention_width, shape.hidden
    return {
        **_norm("norm1", shape),
        **_linear("attn.qkv", attention + 2 * shape.kv_width, hidden, shape.bias),
        **_linear("attn.proj", hidden, attention, shape.bias),
        **_norm("norm2", shape),
        **(_mlp("mlp", shape, shape.ffn) if shape.moe is None else _moe(shape, shape.moe)),
    }


def expert_shapes(shape: ModelShape) -> dict[str, Sizes]:
    """Parameters of the routed experts of one block, all experts stacked; none without experts."""
    if shape.moe is None:
        return {}
    one = _mlp("mlp.experts", shape, shape.expert_ffn)
    renamed = {name.removesuffix(".weight").replace(".bias", "_bias"): size for name, size in one.items()}
    return {name: (shape.moe.experts, *sizes) for name, sizes in renamed.items()}


def head_shapes(shape: ModelShape) -> dict[str, Sizes]:
    """Parameters of the head that are its own."""
    output: dict[str, Sizes] = {} if shape.tied else {"out.weight": (shape.vocab, shape.hidden)}
    return {**_norm("norm", shape), **output}


def _moe(shape: ModelShape, moe: ExpertShape) -> dict[str, Sizes]:
    return {
        "mlp.router.gate.weight": (moe.experts, shape.hidden),
        **expert_shapes(shape),
        **(_mlp("mlp.shared", shape, moe.shared_ffn) if moe.shared_ffn else {}),
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
    shifted = shape.family == "gpt" and shape.bias  # RMSNorm has no bias
    return {**gain, f"{name}.bias": (shape.hidden,)} if shifted else gain


def _elements(shapes: dict[str, Sizes]) -> int:
    return sum(prod(sizes) for sizes in shapes.values())
