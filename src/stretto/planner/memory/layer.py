"""Saved tensors and peaks of one layer under each mode of recomputation, from its tensors (`LayerWalk`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from stretto.job.chain import layer_of
from stretto.job.framework import CORE, Operator
from stretto.job.shape import ModelShape
from stretto.planner.counts.activations import LayerTensor, LayerWalk
from stretto.planner.counts.compute import ComputeConfig


def total(tensors: Iterable[LayerTensor]) -> int:
    """The sum of the tensors' bytes."""
    return sum(tensor.bytes for tensor in tensors)


def layer_saved(kind: str, shape: ModelShape, compute: ComputeConfig) -> tuple[LayerTensor, ...]:
    """The tensors that a layer keeps between its forward and its backward.

    Args:
        kind: that of `job.chain`; of a block `shape` has only one kind.
    """
    walk = LayerWalk(shape, compute)
    if kind != "block":
        return tuple({"embed": walk.embedding, "between": walk.between, "head": walk.head}[kind]())
    if compute.recompute == "full":
        return (walk.block_input(),)
    saved = walk.block()
    if compute.recompute != "selective" or compute.framework.operators == CORE:
        return saved
    return tuple(_not_repeated(saved, walk))


# What the forward need not keep if an operator runs again in the backward: tensors by the beginnings of
# their names. Of `core_attn`, which training has too, see `LayerWalk.attention`.
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


def _not_repeated(saved: Iterable[LayerTensor], walk: LayerWalk) -> Iterator[LayerTensor]:
    """Those tensors that are kept although the framework's operators run again, and outputs that are kept in
    place of the tensors that they are made from.
    """
    shape, compute = walk.shape, walk.compute
    operators = compute.framework.operators
    of_dense = shape.moe is None
    freed = tuple(
        name
        for operator in operators
        if (operator == "mlp") <= of_dense and (operator == "mla_up_proj") <= (shape.latent is not None)
        for name in _FREED[operator]
    )
    alternate = "alternate_mm" in operators
    halved = ("attn.core k, v", "mlp.gate_up output") if alternate else ()
    names = set[str]()
    for tensor in saved:
        names.add(tensor.name)
        if tensor.name in halved and not tensor.name.startswith(freed):
            yield replace(tensor, bytes=tensor.bytes // 2)
        elif not (freed and tensor.name.startswith(freed)):
            yield tensor
    if "moe" in operators and not of_dense and "mlp input" not in names:
        yield LayerTensor("mlp input", *walk.stream(compute.element))
    if alternate:
        size = walk.sized(compute.element, compute.tokens * shape.hidden, "sbh", False)
        yield LayerTensor("mlp.down output", *size)


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """One layer of a stage.

    Attributes:
        input_bytes: bytes of the first tensor, if that is the layer's input; of a stage's first layer they
            are counted with the stage before or with the received message.
        ends: this is the embedding or the head.
        forward: peak bytes of a forward that keeps its input only.
    """

    tensors: tuple[LayerTensor, ...]
    input_bytes: int
    ends: bool = False
    recomputed: bool = False
    forward: int = 0

    @cached_property
    def saved(self) -> int:
        """Bytes between forward and backward, the input included."""
        return sum(tensor.bytes for tensor in self.tensors if tensor.saved)

    @cached_property
    def forward_peak(self) -> int:
        """Peak bytes of its forward, beyond what is held before it."""
        if self.recomputed:
            return self.saved + self.forward
        size = again = peak = 0
        for tensor in self.tensors:
            if tensor.saved:
                size, again = size + tensor.bytes, 0
            else:
                again += tensor.bytes
            peak = max(peak, size + again + tensor.forward)
        return peak

    @cached_property
    def last_product(self) -> LayerTensor | None:
        """The input of the layer's last linear."""
        return next((tensor for tensor in reversed(self.tensors) if tensor.held_until_w is not None), None)

    @cached_property
    def queued(self) -> int:
        """Bytes between I and W."""
        return sum(
            tensor.bytes + tensor.held_until_w for tensor in self.tensors if tensor.held_until_w is not None
        )


def layer_memory(
    shape: ModelShape,
    compute: ComputeConfig,
    layer: int,
    separate_gradients: bool = False,
    reached: bool = True,
    trained: bool = True,
) -> LayerMemory:
    """The memory of layer number `layer` of the chain (`job.chain`).

    Args:
        compute: the computation with the `recompute` of this block; in an encoder-decoder model, of the
            encoder's layers.
        separate_gradients: weight gradients are formed separately and then accumulated, as oneDNN's are;
            those of 16 bits always are.
        reached: the backward reaches the layer; otherwise it keeps nothing.
        trained: some of its weights are; otherwise no linear keeps its input, except for the output of
            attention, which attention's own backward reads.
    """
    chain_layer = layer_of(shape, layer)
    compute = compute.for_layer(chain_layer)
    if not reached:
        compute = replace(compute, recompute="full")
        passed = _layer_memory(chain_layer.kind, chain_layer.shape, compute, separate_gradients)
        forward = passed.forward or total(passed.tensors)
        return LayerMemory(tensors=(), input_bytes=0, recomputed=True, forward=forward + passed.input_bytes)
    memory = _layer_memory(chain_layer.kind, chain_layer.shape, compute, separate_gradients)
    if trained:
        return memory
    tensors = list(memory.tensors)
    for index, tensor in enumerate(tensors):
        if tensor.held_until_w is not None:
            size = tensor.bytes if tensor.name == "attn.proj input" else 0
            tensors[index] = replace(tensor, bytes=size, product=0, held_until_w=None, regathered=0)
    return replace(memory, tensors=tuple(tensors))


@lru_cache(maxsize=4096)
def _layer_memory(
    kind: str, shape: ModelShape, compute: ComputeConfig, separate_gradients: bool
) -> LayerMemory:
    if kind == "block":
        return _block_memory(shape, compute, separate_gradients)
    walk = LayerWalk(shape, compute, separate_gradients)
    if kind == "embed":
        return LayerMemory(tensors=(walk.lookup(), *walk.embedding()), input_bytes=0, ends=True)
    if kind == "between":
        tensors = tuple(walk.between())
        lookup = walk.lookup()
        lookup = replace(lookup, backward=lookup.backward + walk.memory)
        return LayerMemory(tensors=(*tensors, lookup), input_bytes=tensors[0].bytes, ends=True)
    tensors = tuple(walk.head())
    return LayerMemory(tensors=tensors, input_bytes=tensors[0].bytes * walk.keeps_input, ends=True)


def _block_memory(shape: ModelShape, compute: ComputeConfig, separate_gradients: bool) -> LayerMemory:
    walk = LayerWalk(shape, replace(compute, recompute="none"), separate_gradients)
    tensors = walk.block()
    saved = tensors if compute.recompute == "none" else layer_saved("block", shape, compute)
    if compute.recompute != "full":
        input_bytes = tensors[0].bytes * walk.keeps_input
        if compute.framework.operators == CORE:
            names = {tensor.name for tensor in saved}
            parts = [replace(tensor, saved=tensor.name in names) for tensor in tensors]
            if len(saved) < len(tensors) and shape.learned and compute.stores_scores(shape):
                # heads are views of one product, and are copied again; those of rotary positions are no views
                copies = LayerTensor("attn.core copies", walk.q + 2 * walk.kv, saved=False)
                parts.insert([tensor.saved for tensor in parts].index(False), copies)
            tensors = tuple(parts)
        else:
            tensors = tuple(_partly_saved(tensors, saved))
        return LayerMemory(tensors=tensors, input_bytes=input_bytes)
    (block_input,) = saved
    recomputed = [replace(tensor, saved=False) for tensor in tensors[walk.keeps_input :]]
    if block_input.bytes < walk.residual:  # a shard of the input, gathered again
        recomputed.insert(0, LayerTensor("gathered input", walk.residual, saved=False))
    # peak bytes of a block's forward that keeps nothing, in addition to its input
    core = walk.softmax + walk.scores if compute.stores_scores(shape) else walk.q
    if shape.dropout:
        core = max(core, 2 * walk.scores + walk.draw)
    attention = walk.residual + 2 * (walk.q + 2 * walk.kv) + core
    mlp = 2 * walk.residual + walk.wide + (2 if shape.gated else 1) * walk.inner + walk.residual
    return LayerMemory(
        tensors=(block_input, *recomputed),
        input_bytes=block_input.bytes,
        recomputed=True,
        forward=max(attention, mlp) + walk.residual * compute.framework.inputs_on_host,
    )


def _partly_saved(tensors: Sequence[LayerTensor], saved: Sequence[LayerTensor]) -> Iterator[LayerTensor]:
    """The tensors if operators other than attention's core are recomputed: two of one that is saved in
    part, and the tensors that are saved only then.
    """
    sizes = {tensor.name: tensor.bytes for tensor in saved}
    additional = sizes.keys() - {tensor.name for tensor in tensors}
    for tensor in tensors:
        size = sizes.get(tensor.name, 0)
        if 0 < size < tensor.bytes:
            yield LayerTensor(tensor.name, size)
            yield replace(tensor, bytes=tensor.bytes - size, saved=False)
        else:
            yield replace(tensor, saved=tensor.name in sizes)
        if tensor.name == "norm2 statistics":
            yield from (LayerTensor(name, sizes[name]) for name in sorted(additional))
