"""Parameters of one rank, counted to the element.

Parts are those of `engine.models.sharding`: linears by output or input features, the vocabulary padded to a
multiple on every rank, key heads copied if there are fewer of them than ranks, norms whole on every rank,
experts over ep and each expert's inner width over expert_tp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from stretto.job.chain import layer_of
from stretto.job.finetune import TrainedParameters
from stretto.job.lora import is_adapter
from stretto.job.parameters import (
    block_shapes,
    decoder_embedding_shapes,
    embedding_shapes,
    head_shapes,
    in_linear_of_block,
    shared_shapes,
)
from stretto.job.shape import ModelShape
from stretto.planner.counts.compute import ComputeConfig, vocabulary_rows

Named = dict[str, int]  # elements by parameter name

# split by heads; the narrow projections of latent attention are whole on every rank
_BY_HEAD = ("attn.q.weight", "attn.q_up.weight", "attn.kv_up.weight", "attn.sinks", "attn.relative")
_INTO_RESIDUAL = ("attn.proj", "cross.proj", "mlp.down", "mlp.shared.down")  # split by input features


@dataclass(frozen=True)
class Shares:
    """Number of ranks that share dense layers, experts and the inner width of an expert."""

    tp: int = 1
    ep: int = 1
    expert_tp: int = 1
    vocab_multiple: int = 1

    @classmethod
    def of(cls, compute: ComputeConfig) -> Shares:
        """The shares of a rank that computes in this way."""
        return cls(compute.tp, compute.ep, compute.expert_shards, compute.vocab_multiple)


@dataclass(frozen=True)
class Parameter:
    """One parameter as a tensor-parallel rank has it, before data-parallel ranks shard it.

    Attributes:
        name: name in the plain model.
        elements: size of this rank's part, padding included.
        plain: its shape in the plain model.
        expert: belongs to a routed expert; those may have another number of copies.
    """

    name: str
    elements: int
    plain: tuple[int, ...]
    expert: bool = False

    @property
    def matrices(self) -> tuple[int, ...]:
        """The plain shape; for stacked biases of experts, without their stack."""
        return self.plain[-1:] if self.name.endswith("bias") else self.plain

    @property
    def by_muon(self) -> bool:
        """True if Muon updates it: a matrix that a block multiplies with, other than the router's."""
        return in_linear_of_block(self.name) and len(self.matrices) > 1


def layer_parameters(shape: ModelShape, layer: int, shares: Shares) -> list[Parameter]:
    """The parameters of a layer that one rank holds, by their names in the plain model. A tied output weight
    has the name of the embedding.

    Args:
        layer: its place in the chain of `job.flops.layer_names`.
    """
    chain_layer = layer_of(shape, layer)
    table = _parameter("embed.", "tok.weight", (shape.vocab, shape.hidden), shape, shares)
    if chain_layer.kind == "block":
        block, stack = block_shapes(chain_layer.shape).items(), chain_layer.name.partition(".")[0]
        shared = shared_shapes(shape).items()
        return [
            *(_parameter(f"{chain_layer.name}.", n, sizes, shape, shares) for n, sizes in block),
            *(_parameter(f"{stack}.0.", n, sizes, shape, shares) for n, sizes in shared),
        ]
    of = {"embed": embedding_shapes, "between": decoder_embedding_shapes, "head": head_shapes}[
        chain_layer.kind
    ]
    parameters = [
        _parameter(f"{chain_layer.name}.", n, sizes, shape, shares) for n, sizes in of(shape).items()
    ]
    tied = chain_layer.kind == "between" or (chain_layer.kind == "head" and shape.tied)
    return [*parameters, table] if tied else parameters


def reached_by_backward(shape: ModelShape, stage: Sequence[int], trained: TrainedParameters) -> int:
    """The first layer of a stage that the backward reaches. What a stage receives has a gradient, whatever
    comes before it; in the first one, layers before any that is trained have no backward.
    """
    return stage[0] if not trained.freeze or stage[0] else _first_trained(shape, trained)


@lru_cache(maxsize=256)
def _first_trained(shape: ModelShape, trained: TrainedParameters) -> int:
    for layer in range(shape.chain):
        if any(trained(parameter.name) for parameter in layer_parameters(shape, layer, Shares())):
            return layer
    return shape.chain


@lru_cache(maxsize=4096)
def trained_share(shape: ModelShape, layer: int, trained: TrainedParameters) -> float:
    """The share of a layer's matrices that is trained, of those that would be if `freeze` were empty."""
    either = replace(trained, freeze=())
    parameters = layer_parameters(shape, layer, Shares())
    matrices = [p for p in parameters if len(p.matrices) > 1 and either(p.name)]
    return sum(p.elements for p in matrices if trained(p.name)) / max(1, sum(p.elements for p in matrices))


def layer_elements(shape: ModelShape, layer: int, shares: Shares) -> Named:
    """Elements of each parameter of a layer that one rank holds; see `layer_parameters`."""
    return {p.name: p.elements for p in layer_parameters(shape, layer, shares)}


def elements_of(shape: ModelShape, layers: Iterable[int], shares: Shares) -> Named:
    """Elements of each parameter of these layers; a tied parameter is counted once."""
    elements = Named()
    for layer in layers:
        elements |= layer_elements(shape, layer, shares)
    return elements


def _parameter(layer: str, name: str, sizes: tuple[int, ...], shape: ModelShape, shares: Shares) -> Parameter:
    routed = name.startswith("mlp.experts.")
    share = _expert(name, sizes, shares) if routed else _dense(name, sizes, shape, shares)
    return Parameter(layer + name, share, sizes, routed)


def _dense(name: str, sizes: tuple[int, ...], shape: ModelShape, shares: Shares) -> int:
    elements, tp = prod(sizes), shares.tp
    if is_adapter(name):
        # elements of an adapter's factor: B is split if its linear is split by output features, A if it is
        # split by input features
        module, _, inside = name.partition(".lora.")
        projection, factor, *_ = inside.split(".")
        if module.endswith("_down") or (factor == "A") != (module in _INTO_RESIDUAL):
            return prod(sizes)
        if module == "attn.qkv" and projection != "q_proj":
            return max(shape.kv_heads // tp, 1) * shape.head_dim * sizes[1]
        return prod(sizes) // tp
    if name in ("tok.weight", "out.weight"):
        return vocabulary_rows(shape, tp, shares.vocab_multiple) * shape.hidden
    if name.startswith("attn.qkv"):
        rows = shape.attention_width // tp + 2 * max(shape.kv_heads // tp, 1) * shape.head_dim
        return rows * (elements // sizes[0])
    if name.startswith("cross.kv"):
        return 2 * max(shape.kv_heads // tp, 1) * shape.head_dim * (elements // sizes[0])
    if name in _BY_HEAD or name.startswith("cross.q"):
        return elements // tp
    if name.startswith(_INTO_RESIDUAL):
        return elements if name.endswith("bias") else elements // tp
    if name.startswith("mlp.") and "router" not in name and "shared_gate" not in name:
        return elements // tp
    return elements


def _expert(name: str, sizes: tuple[int, ...], shares: Shares) -> int:
    """Elements of stacked experts [experts, ...] on one rank. The bias of the second linear is added after
    the sum over expert_tp, so that it is whole on each of these ranks.
    """
    elements = prod(sizes) // shares.ep
    return elements if name.endswith("down_bias") else elements // shares.expert_tp
