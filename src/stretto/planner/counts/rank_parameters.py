"""The parameters that one rank holds a part of, to the element.

Shares are those of `engine.models.sharding`: linears by output or input features, the vocabulary padded to a
multiple on every rank, key heads copied where there are fewer than ranks, norms whole on every rank, experts
over ep and each expert's inner width over expert_tp.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from stretto.spec.parameters import block_shapes, embedding_shapes, head_shapes
from stretto.spec.shape import ModelShape

Named = dict[str, int]  # elements of each tensor

# of latent attention, what leads to heads; its narrow vectors are whole on every rank
_BY_HEAD = ("attn.q.weight", "attn.q_up.weight", "attn.kv_up.weight", "attn.sinks")
_INTO_RESIDUAL = ("attn.proj", "mlp.down", "mlp.shared.down")  # split by input features


@dataclass(frozen=True)
class Shares:
    """How many ranks share what."""

    tp: int = 1
    ep: int = 1
    expert_tp: int = 1
    vocab_multiple: int = 1


@dataclass(frozen=True)
class Parameter:
    """One parameter as a rank has it, before data-parallel ranks share it.

    Attributes:
        name: in the plain model.
        elements: of this rank's part, padding included.
        plain: sizes in the plain model.
        expert: one of routed experts, of which there may be other numbers of copies.
    """

    name: str
    elements: int
    plain: tuple[int, ...]
    expert: bool = False


def layer_parameters(shape: ModelShape, layer: int, shares: Shares) -> list[Parameter]:
    """The parameters of a layer that one rank holds.

    Names are those of the plain model; a tied output weight goes by its name in the embedding.

    Args:
        layer: 0 for the embedding, then the blocks, then the head.
    """
    if layer == 0:
        return [_parameter("embed.", n, sizes, shape, shares) for n, sizes in embedding_shapes(shape).items()]
    if layer <= shape.layers:
        of = f"blocks.{layer - 1}."
        block = block_shapes(shape.block(layer - 1))
        return [_parameter(of, n, sizes, shape, shares) for n, sizes in block.items()]
    parameters = [_parameter("head.", n, sizes, shape, shares) for n, sizes in head_shapes(shape).items()]
    if shape.tied:
        parameters.append(_parameter("embed.", "tok.weight", (shape.vocab, shape.hidden), shape, shares))
    return parameters


def layer_elements(shape: ModelShape, layer: int, shares: Shares) -> Named:
    """Elements of each parameter of a layer that one rank holds; see `layer_parameters`."""
    return {p.name: p.elements for p in layer_parameters(shape, layer, shares)}


def elements_of(shape: ModelShape, layers: Iterable[int], shares: Shares) -> Named:
    """Elements of each parameter of these layers, a tied one once."""
    found = Named()
    for layer in layers:
        found |= layer_elements(shape, layer, shares)
    return found


def vocabulary_rows(shape: ModelShape, shares: Shares) -> int:
    """Rows of the vocabulary that each rank holds, padding included."""
    unit = shares.tp * shares.vocab_multiple
    return -(-shape.vocab // unit) * shares.vocab_multiple


def _parameter(layer: str, name: str, sizes: tuple[int, ...], shape: ModelShape, shares: Shares) -> Parameter:
    routed = name.startswith("mlp.experts.")
    share = _expert(name, sizes, shares) if routed else _dense(name, sizes, shape, shares)
    return Parameter(layer + name, share, sizes, routed)


def _dense(name: str, sizes: tuple[int, ...], shape: ModelShape, shares: Shares) -> int:
    whole, tp = prod(sizes), shares.tp
    if name in ("tok.weight", "out.weight"):
        return vocabulary_rows(shape, shares) * shape.hidden
    if name.startswith("attn.qkv"):
        rows = shape.attention_width // tp + 2 * max(shape.kv_heads // tp, 1) * shape.head_dim
        return rows * (whole // sizes[0])
    if name in _BY_HEAD:
        return whole // tp
    if name.startswith(_INTO_RESIDUAL):
        return whole if name.endswith("bias") else whole // tp
    if name.startswith("mlp.") and "router" not in name and "shared_gate" not in name:
        return whole // tp
    return whole


def _expert(name: str, sizes: tuple[int, ...], shares: Shares) -> int:
    """Of stacked experts [experts, ...]; biases added after the sum over expert_tp are whole there."""
    here = prod(sizes) // shares.ep
    return here if name.endswith("down_bias") else here // shares.expert_tp
