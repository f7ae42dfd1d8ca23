"""Operations, bytes and calls of one rank's step, exact; `stretto dryrun` arrives at the same numbers by
running its code.

Counted are the step and its update, without the counting of tokens and the small all-reduce in which ranks
agree on the loss. Not covered: schedules whose weights change within a step, and collectives of optimisers
(LAMB, Adafactor, Muon) and of 8-bit products. Routing to experts is taken as even.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

from stretto.job.chain import layer_of
from stretto.job.finetune import TrainedParameters
from stretto.job.job import Job
from stretto.job.lora import is_adapter
from stretto.job.shape import ModelShape
from stretto.layout.layout import axes_of
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.rank_parameters import Parameter, Shares, layer_parameters
from stretto.planner.counts.state_bytes import StateUnit
from stretto.planner.counts.traffic import (
    Message,
    into_columns,
    layer_traffic,
    loss_traffic,
    out_of_rows,
    output_traffic,
)
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import MemoryJob, message_bytes, tensors_between
from stretto.planner.memory.transient import SHARED, TIED, StageUnits, distinct_units, shared_names
from stretto.planner.rank_step.collectives import (
    DigitCollective,
    EachMicrobatch,
    LayerGathers,
    gathered,
    once_a_step,
    published,
    reductions,
    stage_gathers,
)
from stretto.planner.time.kernels import attention_linears
from stretto.program.action import Action, ActionKind

_TILE = 64  # queries of one tile of attention with a window or written out, on the CPU where dry runs are


class LayerFlops(NamedTuple):
    """Operations of linear layers, and of softmax(q k^T) v, as pairs (products, attention).

    Attributes:
        backward: gradients of inputs and of weights.
        again: recomputation of the forward, in the backward.
    """

    forward: tuple[int, int] = (0, 0)
    again: tuple[int, int] = (0, 0)
    backward: tuple[int, int] = (0, 0)


def layer_flops(shape: ModelShape, kind: str, compute: ComputeConfig, index: int = 0) -> LayerFlops:
    """Operations of a layer on cp rank `index`: `kind` is that of `job.chain`; of a block `shape` has only
    one kind, and `compute.recompute` says what it repeats.
    """
    if kind in ("embed", "between"):
        return LayerFlops()
    if kind == "head":
        logits = 2 * compute.tokens * shape.hidden * compute.vocabulary_rows(shape)
        if compute.loss_chunk_tokens(shape):  # all in the backward
            return LayerFlops((0, 0), (0, 0), (3 * logits, 0))
        return LayerFlops((logits, 0), (0, 0), (2 * logits, 0))
    attention, attention_back = _core(shape, compute, index)
    both_ways, forward_only = _linears(shape, compute)
    forward = both_ways + forward_only, attention
    again = forward if compute.recompute == "full" else (0, attention * compute.repeats("core_attn"))
    return LayerFlops(forward, again, (2 * both_ways, attention_back))


def _linears(shape: ModelShape, compute: ComputeConfig) -> tuple[int, int]:
    """Operations of a block's products whose backward has two products of their size, and of those without a
    backward product.
    """
    h, q = shape.hidden, shape.attention_width // compute.tp
    kv = compute.kv_heads(shape) * shape.head_dim
    around = compute.tokens * h * (2 * q + 2 * kv)
    if shape.encoder_layers:
        around += compute.tokens * h * 2 * q + compute.for_memory.tokens * h * 2 * kv
    if shape.latent is not None:
        # each rank of sequence parallelism makes the narrow vectors of its own tokens alone
        narrow = h * (shape.latent.kv_rank + shape.latent.rope_dim + (shape.latent.q_rank or 0))
        around = compute.tokens * sum(n * k for n, k in attention_linears(shape, compute.tp))
        around -= (compute.tokens - compute.shard) * narrow
    wide = 3 if shape.gated else 2  # matrices of an MLP
    if shape.moe is None:
        return 2 * (around + compute.tokens * wide * h * (shape.ffn // compute.tp)), 0
    moe, slices = shape.moe, compute.expert_shards
    length = compute.tokens // compute.batch
    routed = compute.tokens if compute.replicated_routing else compute.batch * -(-length // compute.tp)
    rows = routed * moe.top_k * (1 if compute.replicated_routing else slices)
    inner = rows * wide * h * (shape.expert_ffn // slices)
    inner += compute.tokens * wide * h * (moe.shared_ffn // compute.tp)
    if moe.shared_gate:
        inner += compute.shard * h
    # the weighted sum of a token's experts is a matrix product, its gradients are not
    return 2 * (around + inner + routed * h * moe.experts), 2 * routed * moe.top_k * h


def _core(shape: ModelShape, compute: ComputeConfig, index: int) -> tuple[int, int]:
    """Operations of attention, forward and backward, on cp rank `index`."""
    heads, n = shape.heads // compute.tp, compute.tokens // compute.batch
    explicit = compute.stores_scores(shape)
    special = shape.attention
    wide, narrow = shape.head_dim, shape.value_dim
    # the formula written out goes through tiles; fused kernels know neither a cap nor narrower values
    tiled = special.softcap is not None or narrow < wide
    if compute.cp > 1 and compute.context == "ring":
        pairs = _ring_pairs(n, compute.cp, index, special.window, tiled or explicit)
        explicit = False
    else:
        if compute.cp > 1:
            heads, n = heads // compute.cp, n * compute.cp
        all_pairs = explicit or not special.causal
        pairs = n * n if all_pairs else _pairs(n, n, 0, special.window, tiled)
    of = 2 * compute.batch * heads * pairs
    # gradients of probabilities, values, queries and keys, and the scores again unless they were kept
    forward, back = of * (wide + narrow), of * (2 * narrow + (2 if explicit else 3) * wide)
    if shape.encoder_layers:
        cross_pairs = 2 * compute.batch * heads * n * (compute.for_memory.tokens // compute.batch)
        stores_probabilities = compute.attention == "explicit" or shape.dropout > 0.0
        forward, back = (
            forward + cross_pairs * 2 * wide,
            back + cross_pairs * (4 if stores_probabilities else 5) * wide,
        )
    return forward, back


def _ring_pairs(n: int, size: int, index: int, window: int | None, tiled: bool) -> int:
    """Pairs of queries and keys that rank `index` of a ring computes, with n of each and in zigzag order (see
    `engine.parallel.context.ring`).
    """
    half, last = n // 2, 2 * size - 1
    pairs = 0
    window = None if window is None or window >= n * size else window
    for owner in range(size):
        if owner != index and window is None:
            pairs += n * half
            continue
        for query_half, key_half in ((last - index, owner), (index, owner), (last - index, last - owner)):
            shift = (query_half - key_half) * half
            first = max(0, -shift)
            stop = half if window is None else min(half, half - 1 + window - shift)
            begin, end = _visible(first, stop, half, shift, window)
            if first < stop and begin < end:
                pairs += _pairs(stop - first, end - begin, shift + first - begin, window, tiled)
    return pairs


def _pairs(n: int, m: int, shift: int, window: int | None, tiled: bool) -> int:
    """Pairs that attention of n queries to m keys computes, the first query `shift` positions after the first
    key (see `engine.kernels.Band`). Tiles of queries skip the keys that none of them sees.
    """
    full = shift >= m - 1 and (window is None or shift + n - 1 < window)
    causal = shift == m - n >= 0 and (window is None or window >= m)
    if not tiled and (full or causal):
        return n * m
    pairs = 0
    for start in range(0, n, _TILE):
        stop = min(start + _TILE, n)
        begin, end = _visible(start, stop, m, shift, window)
        pairs += (stop - start) * (end - begin)
    return pairs


def _visible(start: int, stop: int, m: int, shift: int, window: int | None) -> tuple[int, int]:
    """Those of m keys that any of the queries [start, stop) sees."""
    first = 0 if window is None else start + shift - window + 1
    return min(max(first, 0), m), min(max(stop + shift, 0), m)


_NUMBER = 8  # bytes of a norm
_OVER = {
    "tp": "cp-dp",
    "expert_tp-ep": "expert_dp",
}  # axes of the ranks with the same part of tensors split so


Purpose = Literal["forward", "recompute", "backward", "gradients", "weights", "norm"]


class GroupTraffic(NamedTuple):
    """The collectives of one kind, or the messages, of a rank within one group in a step.

    Attributes:
        axes: axes of the group as layers name them ("tp", "ep", "expert_tp-ep", "pp"), or "cp-dp" and
            "expert_dp", over which gradients and weights travel.
        purpose: the action of layers that they belong to, or what they carry.
        ranks: the group, or sender and receiver of messages between stages.
        bytes: size of all together.
        sent: bytes that leave the rank.
    """

    axes: str
    purpose: Purpose
    kind: str
    ranks: tuple[int, ...]
    bytes: int
    calls: int
    sent: float


_PURPOSES: Mapping[str, Purpose] = {"F": "forward", "R": "recompute", "I": "backward", "W": "backward"}


@dataclass(frozen=True, kw_only=True)
class Counts:
    """One rank's step.

    Attributes:
        flops: FLOPs of matrix products, by phase ("forward", "recompute", "backward") and kind ("products",
            "attention").
        bytes: size of every collective and of each message sent, by the axes of its group and by kind.
        calls: number of calls, by the same keys.
        sent: bytes that leave the rank if collectives are bandwidth-optimal, as
            `stretto.engine.parallel.traffic` counts them.
        traffic: the same by group and purpose.
    """

    flops: Mapping[tuple[str, str], int]
    bytes: Mapping[tuple[str, str], int]
    calls: Mapping[tuple[str, str], int]
    sent: int = 0
    traffic: tuple[GroupTraffic, ...] = ()


def _leaving(kind: str, size: int, ranks: int, root: bool) -> float:
    """Bytes of one collective that leave a rank."""
    if kind == "send":
        return size
    if kind == "broadcast":
        return (ranks - 1) * size if root else 0
    if kind == "gather":
        return 0 if root else size
    return (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks * size


_COMMUNICATING = ("lamb", "adafactor", "muon")  # optimizers that communicate during the update


def countable(job: Job, memory_job: MemoryJob) -> bool:
    """True if `counts` covers all that the job does."""
    if job.optimiser.user_defined:  # may communicate
        return False
    simple = job.optimiser.name not in _COMMUNICATING and job.precision.fp8 == "none"
    return simple and not memory_job.program.versions


def bytes_sent(job: Job, memory_job: MemoryJob) -> int | None:
    """Bytes that the busiest rank sends in a step, of the first rank of each pipeline stage's group; None
    if they are not counted.
    """
    if not countable(job, memory_job):
        return None
    first = [
        rank
        for rank in range(job.layout.world)
        if not any(coordinate for axis, coordinate in job.layout.coordinates(rank).items() if axis != "pp")
    ]
    return max(counts(job, rank, memory_job).sent for rank in first)


def counts(job: Job, rank: int = 0, memory_job: MemoryJob | None = None) -> Counts:
    """Operations, bytes and calls of a rank in every step but the first, which also creates lasting tensors.

    Args:
        memory_job: the result of `planner.memory.job.memory_of`, if it exists already.

    Raises:
        StrettoError: the schedule cannot be made.
    """
    return _Counting(job=job, rank=rank, memory=memory_job or memory_of(job)).run()


@dataclass(kw_only=True)
class _Counting:
    job: Job
    rank: int
    memory: MemoryJob
    flops: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    traffic: dict[object, GroupTraffic] = field(default_factory=dict[object, GroupTraffic])
    sent: float = 0.0

    def run(self) -> Counts:
        for stage in self.stages:
            times = sum(action.stage == stage and action.kind is ActionKind.F for action in self.order)
            inner_stage = stage % self.memory.program.depth > 0
            for index, layer in enumerate(self.layers(stage)):
                self._layer(layer, times, inner_stage, first=index == 0)
        for action in self.order:
            if action.kind in (ActionKind.SEND_F, ActionKind.SEND_B):
                layers = self.layers(action.stage)
                border = layers.stop if action.kind is ActionKind.SEND_F else layers.start
                step = 1 if action.kind is ActionKind.SEND_F else -1
                to = self.pipeline[self.memory.program.placement[action.stage + step]]
                self._call(
                    [self.rank, to],
                    "send",
                    message_bytes(self.memory.shape, self.memory.compute, border),
                    calls=tensors_between(self.memory.shape, border),
                    about=("pp", "forward" if step == 1 else "backward"),
                )
        for unit in self.units:
            # the optimiser works on something other than the parameters themselves
            server = unit.state_config.mode == "server" and unit.copies > 1
            moves = not unit.sizes.unsharded or unit.has_masters or server
            for call in once_a_step(unit):
                self._digit_collective(unit, call, "gradients")
            for call in published(unit) if moves else ():
                self._digit_collective(unit, call, "weights")
        tied = {s: self._tied_halves(s) for s in self.stages} if self._tied_stages else {}
        each = EachMicrobatch(self.by_stage, self.memory.compute.tp, tied, self._head_half)
        for unit in each.counts(self.order):
            for call in reductions(unit, 0, 2):
                self._digit_collective(unit, call, "gradients")
        self._gathers()
        self._partial_gradients()
        # gradients that stages of one pipeline share
        program = self.memory.program
        for name in sorted(shared_names(self.memory.shape)):
            using = self._stages_using(name)
            shared = [c * program.depth + s for c in range(program.copies) for s in using]
            if len(using) > 1:
                self._sum_over(shared, [u for u in self.units if u.parameters[0].name == name], unpadded=True)
        if program.copies > 1:
            for stage in self.stages:
                ranks_alike = [c * program.depth + stage % program.depth for c in range(program.copies)]
                self._sum_over(ranks_alike, self.by_stage[stage], unpadded=False)
        self._norm()
        flops = {key: operations for key, operations in self.flops.items() if operations}
        sizes, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for each in self.traffic.values():
            key = axes_of(self.job.layout, each.ranks), each.kind
            sizes[key] += each.bytes
            calls[key] += each.calls
        return Counts(
            flops=flops,
            bytes=+sizes,
            calls=+calls,
            sent=round(self.sent),
            traffic=tuple(self.traffic.values()),
        )

    # ------------------------------------------------------------------ the rank

    @cached_property
    def coordinates(self) -> Mapping[str, int]:
        return self.job.layout.coordinates(self.rank)

    @cached_property
    def stages(self) -> list[int]:
        return list(self.memory.program.stages_of(self.coordinates["pp"]))

    @cached_property
    def order(self) -> Sequence[Action]:
        return self.memory.lowered.orders[self.coordinates["pp"]]

    def layers(self, stage: int) -> range:
        return self.memory.stages[stage % self.memory.program.depth]

    @cached_property
    def pipeline(self) -> list[int]:
        """The ranks of this rank's pipeline, by their index in it."""
        return self.job.layout.group(self.rank, "pp")

    def _call(
        self,
        ranks: list[int],
        kind: str,
        size: int,
        *,
        about: tuple[str, Purpose],
        calls: int = 1,
        times: int = 1,
    ) -> None:
        """Count `times` x `calls` collectives or messages of `size` bytes for each `calls` of them.

        Args:
            about: axes and purpose.
        """
        if len(ranks) > 1 and times:
            key = (*about, kind, tuple(ranks))
            sent = times * _leaving(kind, size, len(ranks), self.rank == ranks[0])
            before = self.traffic.get(key) or GroupTraffic(
                axes=about[0], purpose=about[1], kind=kind, ranks=tuple(ranks), bytes=0, calls=0, sent=0.0
            )
            self.traffic[key] = before._replace(
                bytes=before.bytes + times * size,
                calls=before.calls + times * calls,
                sent=before.sent + sent,
            )
            self.sent += sent

    # ------------------------------------------------------------------ layers

    def _layer(self, layer: int, times: int, inner_stage: bool, first: bool) -> None:
        shape = self.memory.shape
        compute = replace(self.memory.compute, recompute=self.memory.mode(layer))
        chain_layer = layer_of(shape, layer)
        kind, block = chain_layer.kind, chain_layer.shape
        compute = compute.for_layer(chain_layer)
        flops = layer_flops(block, kind, compute, self.coordinates["cp"])
        # an input that came from another stage is kept whole
        sharded = replace(compute, shard_inputs=compute.shard_inputs and not (inner_stage and first))
        traffic = layer_traffic(kind, block, sharded, self.coordinates["cp"])
        trained = self.memory.state_config.trained
        # frozen parameters of experts and of latent attention count as trained
        if not (trained.everything or block.moe or block.latent):
            earlier = (layer_parameters(shape, other, self.memory.shares) for other in range(layer))
            # else the layer's input has no gradient; what a stage receives has one
            upstream = inner_stage or any(trained(p.name) for parameters in earlier for p in parameters)
            part = _PartlyTrained(
                shape=shape, layer=layer, compute=compute, trained=trained, upstream=upstream
            )
            traffic = part.traffic(traffic)
            if kind != "embed":
                flops = part.flops(flops)
        for phase, operations in (
            ("forward", flops.forward),
            ("recompute", flops.again),
            ("backward", flops.backward),
        ):
            for name, count in zip(("products", "attention"), operations, strict=True):
                self.flops[phase, name] += times * count
        for message in traffic:
            group = self.job.layout.group(self.rank, message.axis)
            about = message.axis, _PURPOSES[message.phase]
            self._call(group, message.kind, message.size, about=about, times=times * message.times)

    # ------------------------------------------------------------------ data-parallel ranks

    @cached_property
    def stage_units(self) -> dict[int, StageUnits]:
        """The units of each stage; a tied weight is in each that uses it."""
        return {s: self.memory.units(s % self.memory.program.depth) for s in self.stages}

    @cached_property
    def tied_apart(self) -> bool:
        """True if the tied weight belongs to several stages of this rank, or to copies of them."""
        using = [
            s for s, stage in self.stage_units.items() for u in stage.units if u.parameters[0].name == TIED
        ]
        several = len(self._tied_stages) > 1
        return bool(using) and several and (len(using) > 1 or self.memory.program.copies > 1)

    @cached_property
    def by_stage(self) -> dict[int, list[StateUnit]]:
        """The units of each stage, with each unit listed once."""
        if not self.tied_apart:
            return {s: list(stage.units) for s, stage in self.stage_units.items()}
        parted = {
            s: [u for u in stage.units if u.parameters[0].name != TIED]
            for s, stage in self.stage_units.items()
        }
        tied = [u for u in distinct_units(list(self.stage_units.values())) if u.parameters[0].name == TIED]
        return {**parted, SHARED: tied}

    @property
    def units(self) -> Iterator[StateUnit]:
        return (unit for units in self.by_stage.values() for unit in units)

    def _digit_collective(self, unit: StateUnit, call: DigitCollective, purpose: Purpose) -> None:
        """Count a collective over ranks that differ in one digit of their number among the copies."""
        ranks = self._copies(unit.expert)
        if call.level < 4:
            digits = unit.sizes.digits(ranks.index(self.rank), unit.copies)
            ranks = [
                rank
                for index, rank in enumerate(ranks)
                if all(
                    a == b or level == call.level
                    for level, (a, b) in enumerate(
                        zip(unit.sizes.digits(index, unit.copies), digits, strict=True)
                    )
                )
            ]
        self._call(ranks, call.kind, call.size, about=("expert_dp" if unit.expert else "cp-dp", purpose))

    def _copies(self, expert: bool) -> list[int]:
        axes = _OVER["expert_tp-ep" if expert else "tp"]
        return sorted(self.job.layout.group(self.rank, axes))

    def _span(self, unit: StateUnit) -> tuple[int, int]:
        """The elements whose reduced gradients this rank gets."""
        index = self._copies(unit.expert).index(self.rank)
        return unit.sizes.span(unit.size, index, unit.copies, 3)

    def _gathers(self) -> None:
        if self.memory.gather == "stage":
            units = stage_gathers(self.stage_units, self.memory.program.orders[self.coordinates["pp"]])
        elif self.memory.gather == "layer":
            units = iter(LayerGathers(self.stage_units).run(self.order))
        else:
            return
        for unit in units:
            self._digit_collective(unit, gathered(unit), "weights")

    # ------------------------------------------------------------------ gradients summed with other ranks

    def _partial_gradients(self) -> None:
        """Gradients of which tensor-parallel ranks have partial sums: one all-reduce for each
        group and type.
        """
        sums = Counter[tuple[tuple[int, ...], int]]()
        for unit in self.units:
            if unit.frozen:
                continue
            span, start = self._span(unit), 0
            bytes_of = unit.full_gradient // unit.size
            for parameter in unit.parameters:
                for ranks, low, high in self._shared_elements(parameter.name, parameter.elements):
                    overlap = min(span[1], start + high) - max(span[0], start + low)
                    if overlap > 0:
                        sums[ranks, bytes_of] += overlap * bytes_of
                start += parameter.elements
        for (ranks, _), size in sums.items():
            self._call(list(ranks), "all-reduce", size, about=("tp", "gradients"))

    def _shared_elements(self, name: str, elements: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """The ranks with partial sums of elements [low, high) of a parameter."""
        compute, shape = self.memory.compute, self.memory.shape
        group = tuple(self.job.layout.group(self.rank, "tp"))
        if is_adapter(name):
            split = not name.endswith(".A.weight" if _is_column(name) else ".B.weight")
            if compute.tp > 1 and compute.sequence_parallel and not split:  # of a rank's own tokens
                yield group, 0, elements
            if (
                split
                and name.endswith(("k_proj.B.weight", "v_proj.B.weight"))
                and shape.kv_heads < compute.tp
            ):
                copies = compute.tp // shape.kv_heads
                index = group.index(self.rank) // copies * copies
                yield group[index : index + copies], 0, elements
            return
        along = "norm" in name or name.endswith(("embed.pos.weight", "proj.bias", "down.bias"))
        along = along or "shared_gate" in name or ".attn.kv_down." in name or ".attn.q_down." in name
        if compute.tp > 1 and ("router" in name or (along and compute.sequence_parallel)):
            yield group, 0, elements
        if ".attn.qkv." in name and shape.kv_heads < compute.tp:
            copies = compute.tp // shape.kv_heads
            index = group.index(self.rank) // copies * copies
            rows = shape.attention_width // compute.tp + 2 * shape.head_dim
            row = elements // rows
            # rows are those of queries, then keys, then values
            yield group[index : index + copies], (rows - 2 * shape.head_dim) * row, elements

    @cached_property
    def _tied_stages(self) -> list[int]:
        """The stages of one copy that use the tied weight."""
        return self._stages_using(TIED) if TIED in shared_names(self.memory.shape) else []

    def _stages_using(self, name: str) -> list[int]:
        """The stages of one copy that use a parameter that layers share."""
        shape, shares = self.memory.shape, self.memory.shares
        users = {
            layer
            for layer in range(shape.chain)
            if any(p.name == name for p in layer_parameters(shape, layer, shares))
        }
        return [s for s, layers in enumerate(self.memory.stages) if users.intersection(layers)]

    def _tied_halves(self, stage: int) -> tuple[str, ...]:
        layers = self.layers(stage)
        shape = self.memory.shape
        lookups = [layer for layer in layers if layer_of(shape, layer).kind in ("embed", "between")]
        return ("I",) * len(lookups) + (self._head_half,) * (shape.tied and shape.chain - 1 in layers)

    @cached_property
    def _head_half(self) -> Literal["I", "W"]:
        """The half of a backward in which the head's weight gets its gradient."""
        shape = self.memory.shape
        return (
            "I"
            if self.memory.compute.for_layer(layer_of(shape, shape.chain - 1)).loss_chunk_tokens(shape)
            else "W"
        )

    def _sum_over(self, stages: list[int], units: list[StateUnit], unpadded: bool) -> None:
        holders = sorted({self.memory.program.placement[s] for s in stages})
        if len(holders) < 2 or self.coordinates["pp"] not in holders:
            return
        for unit in units:
            if unit.frozen:
                continue
            low, high = self._span(unit)
            if unpadded:
                high = max(low, min(high, unit.parameters[0].elements))
            size = (high - low) * (unit.full_gradient // unit.size)
            ranks = [self.pipeline[h] for h in holders]
            self._call(ranks, "all-reduce", size, about=("pp", "gradients"))

    def _norm(self) -> None:
        """The squared norm of all gradients."""
        shape, layout = self.memory.shape, self.job.layout
        experts = any(kind.moe is not None for kind, _ in shape.kinds())
        for axes in ("tp", "expert_tp-ep") if experts else ("tp",):
            expert = axes != "tp"
            state_config = self.memory.state_config
            copies = state_config.expert_copies if expert else state_config.copies
            sizes = state_config.sizes.for_copies(copies) if expert else state_config.sizes
            digit = {
                rank: sizes.digits(index, copies)[3]
                for ranks in layout.groups(_OVER[axes])
                for index, rank in enumerate(sorted(ranks))
            }
            ranks_alike = [rank for rank, value in digit.items() if value == digit[self.rank]]
            self._call(sorted(ranks_alike), "all-reduce", _NUMBER, about=(axes, "norm"))
        if self.memory.state_config.mode == "server":
            self._call(self._copies(expert=False), "broadcast", _NUMBER, about=("cp-dp", "norm"))


_ROWS = ("attn.proj", "mlp.down")  # linears of a block that are split by input features


@dataclass(frozen=True, kw_only=True)
class _PartlyTrained:
    """The embedding, a dense block or the head, of which some parameters are frozen or have adapters.

    Attributes:
        layer: index in the chain: 0 the embedding, then the blocks, then the head.
        upstream: True if something before this layer is trained.
    """

    shape: ModelShape
    layer: int
    compute: ComputeConfig
    trained: TrainedParameters
    upstream: bool

    def flops(self, flops: LayerFlops) -> LayerFlops:
        """Operations of the layer: a frozen linear has no product for its weights, and none for an input that
        nothing trained comes before.

        Args:
            flops: those of the layer if all of it were trained.
        """
        compute = self.compute
        forward = 0
        backward = 0
        for parameter, reached, update in self._matrices():
            # a factor that every rank has whole sees a rank's own tokens only
            replicated = is_adapter(parameter.name) and parameter.elements == prod(parameter.plain)
            count = 2 * (compute.shard if replicated else compute.tokens) * parameter.elements
            forward += count
            backward += count * (update + (reached or parameter.name.endswith(".B.weight")))
        if backward and self.layer == self.shape.chain - 1 and compute.loss_chunk_tokens(self.shape):
            forward, backward = 0, forward + backward
        attention_reached, reached = self._reached()
        again = (forward, flops.again[1]) if compute.recompute == "full" else flops.again
        return LayerFlops(
            (forward, flops.forward[1]),
            again if reached else (0, 0),
            (backward, flops.backward[1] * attention_reached),
        )

    def traffic(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Messages of the layer: nothing is gathered for gradients of frozen weights, no gradient is sent for
        an input that nothing trained comes before, and adapters exchange for their narrow vectors what their
        linears do for wide ones.

        Args:
            messages: those of the layer if all of it were trained.
        """
        shape = self.shape
        compute = self.compute
        kind = layer_of(self.shape, self.layer).kind
        if kind in ("embed", "between"):
            return tuple(m for m in messages if m.phase == "F" or self.trained("embed.tok.weight"))
        linears = tuple(self._linears())
        if kind == "head":
            return (*output_traffic(shape, compute, linears), *loss_traffic(shape, compute))
        attention_reached, reached = self._reached()
        # if each rank keeps a part of a block's input, it is gathered to be recomputed
        regathers = compute.shard_inputs and not compute.sequence_parallel
        around = [
            m for m in messages if m.axis != "tp" or (regathers and (m.phase, m.kind) == ("R", "all-gather"))
        ]
        around = [m for m in around if {"F": True, "R": reached}.get(m.phase, attention_reached)]
        again = [m._replace(phase="R") for m in linears if m.phase == "F"]
        return (*around, *linears, *(again if reached and compute.recompute == "full" else ()))

    def _reached(self) -> tuple[bool, bool]:
        """Return whether the backward reaches a block's attention, and whether it reaches the block."""
        names = [p.name for p in layer_parameters(self.shape, self.layer, Shares())]
        below = [n for n in names if ".norm1." in n or (".attn." in n and ".attn.proj." not in n)]
        return (
            self.upstream or any(map(self.trained, below)),
            self.upstream or any(map(self.trained, names)),
        )

    def _matrices(self) -> Iterator[tuple[Parameter, bool, bool]]:
        """The matrices of linears and adapters in order, each with whether something before its module is
        trained, and whether it is trained itself.
        """
        reached = self.upstream
        inside = False
        module = ""
        for parameter in layer_parameters(self.shape, self.layer, Shares.of(self.compute)):
            name = parameter.name
            base = name.partition(".lora.")[0] if is_adapter(name) else name.rpartition(".")[0]
            if base != module:
                reached = reached or inside
                inside = False
                module = base
            update = self.trained(name)
            inside = inside or update
            if len(parameter.plain) == 2 and not name.endswith("pos.weight"):
                yield parameter, reached, update

    def _linears(self) -> Iterator[Message]:
        """Messages of the linears and their adapters, in order."""
        compute = self.compute
        for parameter, reached, update in self._matrices():
            name, (rows, columns) = parameter.name, parameter.plain
            if not is_adapter(name):
                flow = into_columns(compute, columns) if _is_column(name) else out_of_rows(compute, rows)
                needed = reached
            elif name.endswith(".B.weight") and _is_column(name):
                flow, needed = into_columns(compute, columns), True
            elif name.endswith(".A.weight") and not _is_column(name):
                flow, needed = out_of_rows(compute, rows), reached
            else:  # whole on every rank
                continue
            for message in flow:
                wanted = {"F": True, "I": needed, "W": update}[message.phase]
                # of a linear split by input features the gradient of the output is gathered for both
                both = message.kind == "all-gather" and message.phase == "I" and update
                if wanted or both:
                    yield message


def _is_column(name: str) -> bool:
    """True if a parameter belongs to a linear, or its adapter, that is split by output features."""
    return not any(f".{linear}." in name for linear in _ROWS)
