"""The flat buffers of Megatron's distributed optimizer, which checkpoints have rank by rank.

Every model-parallel rank has its own, `optimizer.distributed.dp_group_idx_RANK...`, whatever the number of
data-parallel replicas. In the form `dp_reshardable`, the default since core_v0.14 (`distrib_optimizer.py`,
core_v0.16.1), each bucket of a buffer is a tensor, without its padding at the end. Which parameter lies where
is no part of the checkpoint: `OrderedStates` finds it. The older `dp_zero_gather_scatter`, one object per
rank, does not even record the buckets, and is refused.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.errors import StrettoError
from stretto_interop.checkpoints.dcp.reader import Archives, DcpIndex
from stretto_interop.checkpoints.megatron.common import NAMES
from stretto_interop.checkpoints.megatron.names import MegatronRule

MASTER = "param"
SAVE_WHOLE = (
    "save once more in Megatron with --dist-ckpt-optim-fully-reshardable (before core_v0.14: "
    "--ckpt-fully-parallel-save), or --weights-only"
)
_KEYS = ("exp_avg", "exp_avg_sq", MASTER)
_NAME = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_BUCKET = re.compile(r"gbuf_idx_(\d+)\.dtype_\((.+)\)\.bucket_idx_(\d+)\.(\w+)")
_SETTINGS, _STATE = "optimizer/shard_0_1", "param_state/shard_0_1"


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A rank's buffer, without the padding after each bucket.

    Attributes:
        size: number of elements.
        buckets: number of elements of each bucket.
        read: reads the elements of a state from a position on into a flat float32 tensor; all must lie in one
            bucket.
    """

    size: int
    buckets: tuple[int, ...]
    read: Callable[[str, int, Tensor], None]


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """All buffers in a checkpoint.

    Attributes:
        dense, experts: buffers of each model-parallel rank, one for each chunk of the model; `experts` is
            empty unless experts are spread over ranks.
        settings: the optimiser's settings as each rank has them.
    """

    dense: Sequence[Sequence[Buffer]]
    experts: Sequence[Sequence[Buffer]]
    settings: Sequence[Any]


def has_buffers(index: DcpIndex) -> bool:
    """True if a checkpoint has the optimiser's states in buffers of ranks."""
    return any(_NAME.fullmatch(name) for name in (*index.tensors, *index.objects))


def read_buffers(archives: Archives) -> BufferLayout:
    """Return the buffers of a checkpoint.

    Raises:
        StrettoError: some are missing or damaged, or of a kind that is not read.
    """
    index = archives.index
    settings = list[Any]()
    prefixes: dict[tuple[int, int], dict[int, dict[int, str]]] = {}
    types = set[str]()
    for name in (*index.objects, *index.tensors):
        if (match := _NAME.fullmatch(name)) is None:
            continue
        rank = int(match[1] or 0), int(match[2])
        if match[3] == _SETTINGS:
            value: Any = archives.read_object(name, NAMES)
            # an object is saved in a list of its own
            settings.append(value[0] if isinstance(value, list) and len(value) == 1 else value)  # pyright: ignore[reportUnknownArgumentType]
        elif match[3] == _STATE:
            raise StrettoError(
                f"{name} in {index.folder} has the optimiser's states as dp_zero_gather_scatter, which does "
                "not record where they lie",
                hint=SAVE_WHOLE,
            )
        elif (bucket := _BUCKET.fullmatch(match[3])) is not None:
            types.add(bucket[2])
            parts = prefixes.setdefault(rank, {}).setdefault(int(bucket[1]), {})
            parts[int(bucket[3])] = name.removesuffix(bucket[4])
    buffers = {
        rank: [_bucketed(archives, each[number]) for number in _round_up(each, archives)]
        for rank, each in prefixes.items()
    }
    chains = {chain for chain, _ in buffers}
    if len(types) != 1 or chains not in ({0}, {0, 1}):
        raise StrettoError(
            f"the optimiser's buffers in {index.folder} are of {len(chains)} optimisers and hold "
            f"{' and '.join(sorted(types)) or 'nothing that is known'}; those of one type are read, of one "
            "optimiser or of one beside that of the experts",
            hint=SAVE_WHOLE,
        )
    dense, experts = (
        [by_rank[n] for n in _round_up(by_rank, archives)]
        for by_rank in ({rank: each for (item, rank), each in buffers.items() if item == n} for n in (0, 1))
    )
    return BufferLayout(dense=dense, experts=experts, settings=settings)


def _round_up(numbered: Mapping[int, Any], archives: Archives) -> Sequence[int]:
    """Return the numbers, which must be those from 0 on."""
    if missing := set(range(len(numbered))) - set(numbered):
        raise StrettoError(
            f"{archives.index.folder} lacks buffers of the optimiser: number {min(missing)} of "
            f"{len(numbered)} or more",
            hint="copy the whole folder again",
        )
    return range(len(numbered))


def _bucketed(archives: Archives, prefixes: Mapping[int, str]) -> Buffer:
    """Return a buffer from its buckets, which are tensors."""
    tensors, sizes = archives.index.tensors, list[int]()
    for number in _round_up(prefixes, archives):
        stored = [tensors.get(prefixes[number] + key) for key in _KEYS]
        record = {(item.shape, item.dtype) for item in stored if item is not None}
        shape, dtype = record.pop() if None not in stored else ((), "")
        if record or len(shape) != 1 or dtype != "float32":
            raise StrettoError(
                f"{prefixes[number]}* in {archives.index.folder} are not {', '.join(_KEYS)} in float32, "
                "flat and of one size",
                hint=SAVE_WHOLE,
            )
        sizes.append(shape[0])
    starts = [0, *accumulate(sizes)]

    def read(key: str, start: int, into: Tensor) -> None:
        bucket = bisect(starts, start) - 1
        archives.read_box(prefixes[bucket] + key, (start - starts[bucket],), into)

    return Buffer(size=starts[-1], buckets=tuple(sizes), read=read)


# ------------------------------------------------------------------ what lies where

_ALIGNED = 64  # elements; a bucket begins at a multiple of 128

# parameters of a block in the order in which Megatron makes its modules
_OTHER = (
    "attn.qkv.weight",
    "attn.qkv.bias",
    "attn.q_norm.weight",
    "attn.k_norm.weight",
    "norm2.weight",
    "norm2.bias",
    "mlp.up.weight",
    "mlp.up.bias",
    "mlp.gate_up.weight",
    "mlp.gate_up.bias",
    "mlp.down.weight",
    "mlp.down.bias",
    "mlp.router.gate.weight",
    "mlp.router.gate.bias",
    "mlp.experts.gate_up",
    "mlp.experts.up",
    "mlp.experts.down",
    "mlp.shared.gate_up.weight",
    "mlp.shared.up.weight",
    "mlp.shared.down.weight",
    "mlp.shared_gate.weight",
)
_PROJECTION = ("attn.proj.weight", "attn.proj.bias")
_NORM = ("norm1.weight", "norm1.bias")
# by `transformer_impl`: Transformer Engine has the norm in the linear after it
_ORDERS = {
    "transformer_engine": _PROJECTION + _NORM + _OTHER,
    "local": _NORM + _PROJECTION + _OTHER,
}
_FIRST = ("embed.tok.weight", "embed.pos.weight")
_EXPERTS = "mlp.experts.down"
_LAST = ("head.norm.weight", "head.norm.bias", "head.out.weight")
# cut over tensor-parallel ranks by rows, and by columns; all others are whole on each of them
_BY_ROWS = frozenset(
    {
        "embed.tok.weight",
        "head.out.weight",
        "attn.qkv.weight",
        "attn.qkv.bias",
        "mlp.up.weight",
        "mlp.up.bias",
        "mlp.gate_up.weight",
        "mlp.gate_up.bias",
        "mlp.shared.gate_up.weight",
        "mlp.shared.up.weight",
        "mlp.experts.gate_up",
        "mlp.experts.up",
    }
)
_BY_COLUMNS = frozenset({"attn.proj.weight", "mlp.down.weight", "mlp.shared.down.weight", "mlp.experts.down"})


class _MisfitError(Exception):
    """Parameters do not fill the buckets exactly."""


@dataclass(frozen=True, kw_only=True)
class _Order:
    """A possible layout of the ranks.

    Attributes:
        modules: order of a block's parameters.
        linears: True if the first linears of all experts lie together, False if each expert's linears do.
        tp, experts_tp: number of tensor-parallel ranks, and of those of an expert.
    """

    modules: tuple[str, ...]
    linears: bool
    tp: int
    experts_tp: int


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A parameter on a rank: one of the model's, or one expert's, cut over `ranks`.

    Attributes:
        alone: True if it has a bucket of its own: an embedding that is also the head, on another stage.
        copy: True if its values are read from another stage.
    """

    rule: MegatronRule
    ranks: int
    expert: int | None = None
    alone: bool = False
    copy: bool = False

    @property
    def is_cut(self) -> bool:
        """True if each rank has a different share."""
        return self.ranks > 1 and _module(self.rule) in _BY_ROWS | _BY_COLUMNS

    @property
    def size(self) -> int:
        """Elements on a rank."""
        shape = self.rule.shape if self.expert is None else self.rule.shape[1:]
        if not self.is_cut:
            return prod(shape)
        rows = _module(self.rule) in _BY_ROWS
        if shape[0 if rows else 1] % (self.ranks * (2 if rows and self.rule.halves is not None else 1)):
            raise _MisfitError
        return prod(shape) // self.ranks

    def share(self, foreign: Tensor, rank: int) -> Tensor:
        """The rank's share of the whole tensor, as a view of the shape that is stored."""
        full, dim = foreign if self.expert is None else foreign[self.expert], 0
        if not self.is_cut:
            return full
        if _module(self.rule) in _BY_COLUMNS:
            dim = 1
        elif self.rule.halves is not None:  # gate and up projection are cut apart
            full, dim = full.unflatten(0, (2, -1)), 1
        each = full.shape[dim] // self.ranks
        return full.narrow(dim, each * rank, each)


@dataclass(frozen=True)
class _Place:
    """The position of a share of a parameter: its buffer and its first element."""

    part: _Part
    rank: int
    buffer: Buffer
    start: int


def _module(rule: MegatronRule) -> str:
    """Return Stretto's name of a parameter without its block's number."""
    return rule.parameter if rule.layer is None else rule.parameter.split(".", 2)[2]


def _places(
    buffers: BufferLayout, rules: Sequence[MegatronRule], order: _Order
) -> Mapping[str, Sequence[_Place]]:
    """Return the places of every parameter by Stretto's name.

    Raises:
        _MisfitError: the buffers are of another size or number.
    """
    if len(buffers.dense) % order.tp:
        raise _MisfitError
    stages = len(buffers.dense) // order.tp
    model = _Model(rules, order, stages, spread=bool(buffers.experts))
    spread = len(buffers.experts) // (stages * order.experts_tp)
    if spread * stages * order.experts_tp != len(buffers.experts):
        raise _MisfitError
    result: dict[str, list[_Place]] = {rule.parameter: [] for rule in rules}
    chunks = [[each[i] for each in buffers.dense] for i in range(len(buffers.dense[0]))]
    if any(len(each) != len(chunks) for each in buffers.dense):
        raise _MisfitError
    layer, used = 0, [0] * stages  # buffers of experts: a chunk without experts has none
    for number in range(len(chunks) * stages):
        chunk, stage = divmod(number, stages)
        ranks = chunks[chunk][stage * order.tp : (stage + 1) * order.tp]
        last = number == len(chunks) * stages - 1
        layers, parts = model.stage(ranks[0], layer, first=number == 0, last=last)
        _place(result, parts, ranks)
        layer = layers.stop
        for rank in range(spread):
            if parts := model.experts(layers, rank, spread):
                at = order.experts_tp * (rank + spread * stage)
                each = buffers.experts[at : at + order.experts_tp]
                if any(len(item) <= used[stage] for item in each):
                    raise _MisfitError
                _place(result, parts, [item[used[stage]] for item in each])
                used[stage] += rank == spread - 1
    if layer != model.layers or any(not each for each in result.values()):
        raise _MisfitError
    return result


class _Model:
    """The parameters of a model as ranks have them."""

    def __init__(self, rules: Sequence[MegatronRule], order: _Order, stages: int, *, spread: bool) -> None:
        self._order, self._stages = order, stages
        self._spread = spread
        self._outside = {rule.parameter: rule for rule in rules if rule.layer is None}
        self._blocks: dict[int, dict[str, MegatronRule]] = {}
        for rule in rules:
            if rule.layer is not None:
                self._blocks.setdefault(rule.layer, {})[_module(rule)] = rule
        self.layers = len(self._blocks)

    def stage(self, buffer: Buffer, layer: int, *, first: bool, last: bool) -> tuple[range, list[_Part]]:
        """Return the layers of a stage, from `layer` on, whose parameters fill the buffer, and these
        parameters.
        """
        for count in [self.layers - layer] if last else range(self.layers - layer + 1):
            layers = range(layer, layer + count)
            parts = list(self._parts(layers, first=first, last=last))
            if parts and _starts(parts, buffer) is not None:
                return layers, parts
        raise _MisfitError

    def _parts(self, layers: range, *, first: bool, last: bool) -> Iterator[_Part]:
        tp = self._order.tp
        shared = self._stages > 1 and _LAST[-1] not in self._outside  # a tied head on another stage
        for name in _FIRST if first else ():
            if name in self._outside:
                yield _Part(rule=self._outside[name], ranks=tp, alone=shared and name == _FIRST[0])
        for layer in layers:
            block = self._blocks[layer]
            for name in self._order.modules:
                if name in block and not block[name].of_experts:
                    yield _Part(rule=block[name], ranks=tp)
                elif name == _EXPERTS and name in block and not self._spread:
                    yield from self._experts(layer, range(block[name].shape[0]), tp)
        for name in _LAST if last else ():
            if name in self._outside:
                yield _Part(rule=self._outside[name], ranks=tp)
        if last and shared:
            yield _Part(rule=self._outside[_FIRST[0]], ranks=tp, alone=True, copy=True)

    def experts(self, layers: range, rank: int, ranks: int) -> list[_Part]:
        """Return one expert-parallel rank's experts of some layers."""
        result = list[_Part]()
        for layer in layers:
            if (down := self._blocks[layer].get(_EXPERTS)) is not None:
                each, others = divmod(down.shape[0], ranks)
                if others:
                    raise _MisfitError
                result += self._experts(layer, range(rank * each, (rank + 1) * each), self._order.experts_tp)
        return result

    def _experts(self, layer: int, experts: range, ranks: int) -> Iterator[_Part]:
        names = [name for name in self._order.modules if name in self._blocks[layer]]
        linears = [self._blocks[layer][name] for name in names if self._blocks[layer][name].of_experts]
        if self._order.linears:
            yield from (_Part(rule=rule, ranks=ranks, expert=item) for rule in linears for item in experts)
        else:
            yield from (_Part(rule=rule, ranks=ranks, expert=item) for item in experts for rule in linears)


def _place(result: dict[str, list[_Place]], parts: Sequence[_Part], ranks: Sequence[Buffer]) -> None:
    """Record the places of a stage's parameters on each of its ranks."""
    for rank, buffer in enumerate(ranks):
        starts = _starts(parts, buffer)
        if starts is None:
            raise _MisfitError
        for part, start in zip(reversed(parts), starts, strict=True):
            if not part.copy and (rank == 0 or part.is_cut):
                result[part.rule.parameter].append(_Place(part, rank, buffer, start))


def _starts(parts: Sequence[_Part], buffer: Buffer) -> list[int] | None:
    """Return the first element of each parameter in a buffer without padding after buckets, from the last
    parameter to the first; None if they do not fill the buffer.
    """
    sizes = buffer.buckets
    starts = list[int]()
    before = bucket = end = 0
    for part in reversed(parts):
        at = -(-end // _ALIGNED) * _ALIGNED
        if end and (end == sizes[bucket] or (part.alone and at == sizes[bucket])):
            before += sizes[bucket]
            bucket += 1
            at = 0
            if bucket == len(sizes):
                return None
        end = at + part.size
        if end > sizes[bucket]:
            return None
        starts.append(before + at)
    complete = bucket == len(sizes) - 1 and end == sizes[bucket] and before + end == buffer.size
    return starts if complete else None


class OrderedStates:
    """The states of each parameter, read from the ranks' buffers.

    Args:
        rules: those of the parameters that have states.
        args: Megatron's arguments, which tell the layout of the ranks.
        weight: reads a weight of the model in Megatron's layout.
        source: folder of the checkpoint, for errors.

    Raises:
        StrettoError: no known order gives these buffers, with float32 weights that round to the model's.
    """

    def __init__(
        self,
        buffers: BufferLayout,
        rules: Sequence[MegatronRule],
        args: Mapping[str, Any],
        weight: Callable[[MegatronRule], Tensor],
        source: Path,
    ) -> None:
        samples = list({_module(rule): rule for rule in reversed(rules)}.values())  # one of each kind
        fitting = 0
        for order in _orders(buffers, rules, args):
            try:
                self._places = _places(buffers, rules, order)
            except _MisfitError:
                continue
            fitting += 1
            if all(rounds_to(self.read(rule, MASTER), weight(rule)) for rule in samples):
                return
        sizes = [item.size for rank in (*buffers.dense, *buffers.experts) for item in rank]
        listed = ", ".join(f"{size:,}" for size in sizes[:4])
        kind = (
            "float32 weights that round to the model's"
            if fitting
            else f"buffers of {listed}{', ...' * (len(sizes) > 4)} elements"
        )
        raise StrettoError(
            f"the optimiser's states in {source} are flat buffers of each rank (dp_reshardable), and "
            f"no order of parameters that is known here gives {kind}",
            hint=SAVE_WHOLE,
        )

    def read(self, rule: MegatronRule, key: str) -> Tensor:
        """Read a state of a parameter, or its float32 weights (MASTER), in Megatron's layout.

        Raises:
            StrettoError: it is damaged.
        """
        foreign = torch.empty(rule.shape)
        for place in self._places[rule.parameter]:
            share = place.part.share(foreign, place.rank)
            flat = torch.empty(share.numel())
            place.buffer.read(key, place.start, flat)
            share.copy_(flat.view(share.shape))
        return foreign


def rounds_to(exact: Tensor, weights: Tensor) -> bool:
    """True if every float32 value rounds to its weight, to the nearest, in either direction at ties."""
    exact = exact.float()
    nearest = exact.to(weights.dtype).float()
    return bool(((exact - weights.float()).abs() <= (exact - nearest).abs()).all())


def _orders(
    buffers: BufferLayout, rules: Sequence[MegatronRule], args: Mapping[str, Any]
) -> Iterator[_Order]:
    """Yield possible layouts of the ranks, the most likely by the arguments first; only those that the
    arguments allow.
    """
    ranks, moe = len(buffers.dense), any(rule.of_experts for rule in rules)
    tps = [tp] if (tp := _count(args, "tensor_model_parallel_size")) else range(ranks, 0, -1)
    impl = args.get("transformer_impl")
    for name in sorted(_ORDERS, key=lambda item: item != impl):
        for tp in tps:
            for linears in (True, False) if moe else (True,):
                experts_tp = _count(args, "expert_tensor_parallel_size") or tp
                yield _Order(modules=_ORDERS[name], linears=linears, tp=tp, experts_tp=experts_tp)


def _count(args: Mapping[str, Any], name: str) -> int:
    value = args.get(name)
    return value if type(value) is int and value > 0 else 0
