"""How many parameters a model has, by name and in sum, to the integer."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

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

    @property
    def total(self) -> int:
        return self.embedding + self.blocks + self.norm + self.output

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
    first = "gate_up" if shape.gated else "up"
    return {
        **_norm("norm1", shape),
        **_linear("attn.qkv", attention + 2 * shape.kv_width, hidden, shape.bias),
        **_linear("attn.proj", hidden, attention, shape.bias),
        **_norm("norm2", shape),
        **_linear(f"mlp.{first}", shape.ffn * (2 if shape.gated else 1), hidden, shape.bias),
        **_linear("mlp.down", hidden, shape.ffn, shape.bias),
    }


def head_shapes(shape: ModelShape) -> dict[str, Sizes]:
    """Parameters of the head that are its own."""
    output: dict[str, Sizes] = {} if shape.tied else {"out.weight": (shape.vocab, shape.hidden)}
    return {**_norm("norm", shape), **output}


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, Sizes]:
    weight: dict[str, Sizes] = {f"{name}.weight": (rows, columns)}
    return {**weight, f"{name}.bias": (rows,)} if bias else weight


def _norm(name: str, shape: ModelShape) -> dict[str, Sizes]:
    gain: dict[str, Sizes] = {f"{name}.weight": (shape.hidden,)}
    shifted = shape.family == "gpt" and shape.bias  # RMSNorm has no bias
    return {**gain, f"{name}.bias": (shape.hidden,)} if shifted else gain


def _elements(shapes: dict[str, Sizes]) -> int:
    return sum(prod(sizes) for sizes in shapes.values())
