"""What one rank does in a step, to the last operation and byte; `stretto dryrun` reaches the same numbers by
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

from stretto.layout.layout import axes_of
from stretto.planner.counts.activations import ComputeConfig
from stretto.planner.counts.state_bytes import StateUnit
from stretto.planner.counts.traffic import Message, block_traffic, embedding_traffic, head_traffic
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import MemoryJob
from stretto.planner.memory.transient import TIED, StageUnits, distinct_units
from stretto.planner.rank_step.collectives import (
    SHARED,
    Call,
    EachMicrobatch,
    LayerGathers,
    gathered,
    once_a_step,
    published,
    reductions,
    stage_gathers,
)
from stretto.program.action import Action, Kind
from stretto.spec.job import Job
from stretto.spec.shape import ModelShape

_TILE = 256  # queries that attention which is written out takes at a time, where it works block by block


@dataclass(frozen=True)
class LayerFlops:
    """Operations of linear layers (`products`) and of softmax(q k^T) v (`attention`).

    Attributes:
        backward: gradients of inputs and of weights.
        again: of the forward, in the backward.
    """

    forward: tuple[int, int] = (0, 0)
    again: tuple[int, int] = (0, 0)
    backward: tuple[int, int] = (0, 0)


def layer_flops(shape: ModelShape, kind: str, how: ComputeConfig) -> LayerFlops:
    """Of a layer: `kind` is "embed", "block" or "head"; `how.recompute` says what a block repeats."""
    if kind == "embed":
        return LayerFlops()
    if kind == "head":
        columns = -(-shape.vocab // (how.tp * how.vocab_multiple)) * how.vocab_multiple
        logits = 2 * how.tokens * shape.hidden * columns
        return LayerFlops((logits, 0), (0, 0), (2 * logits, 0))
    attention, attention_back = _core(shape, how)
    both_ways, forward_only = _linears(shape, how)
    forward = both_ways + forward_only, attention
    again = {"none": (0, 0), "selective": (0, attention), "full": forward}[how.recompute]
    return LayerFlops(forward, again, (2 * both_ways, attention_back))


def _linears(shape: ModelShape, how: ComputeConfig) -> tuple[int, int]:
    """Products of a block whose backward is two of their size, and those that have none."""
    h, q = shape.hidden, shape.attention_width // how.tp
    kv = max(shape.kv_heads // how.tp, 1) * shape.head_dim
    around = how.tokens * h * (2 * q + 2 * kv)
    wide = 3 if shape.gated else 2  # matrices of an MLP
    if shape.moe is None:
        return 2 * (around + how.tokens * wide * h * (shape.ffn // how.tp)), 0
    moe, slices = shape.moe, how.tp if how.expert_tp is None else how.expert_tp
    together = how.ep == 1 and slices == how.tp
    length = how.tokens // how.batch
    routed = how.tokens if together else how.batch * -(-length // how.tp)
    rows = routed * moe.top_k * (1 if together else slices)
    inner = rows * wide * h * (shape.expert_ffn // slices)
    inner += how.tokens * wide * h * (moe.shared_ffn // how.tp)
    # the weighted sum of a token's experts is a product, its gradients are not
    return 2 * (around + inner + routed * h * moe.experts), 2 * routed * moe.top_k * h


def _core(shape: ModelShape, how: ComputeConfig) -> tuple[int, int]:
    """Attention, forward and backward."""
    heads, n = shape.heads // how.tp, how.tokens // how.batch
    explicit = how.attention == "explicit" or shape.dropout > 0.0
    of = 2 * how.batch * heads * shape.head_dim  # of a pair of query and key, in one product
    if how.cp > 1 and how.context == "ring":
        half, others = n // 2, (how.cp - 1) * (n * n // 2)
        triangle = _triangle if explicit else _square
        diagonal, diagonal_back = triangle(n), half * half + 2 * triangle(half)
        return 2 * of * (diagonal + others), 5 * of * (diagonal_back + others)
    if how.cp > 1:
        of, n = of // how.cp, n * how.cp
    # probabilities that are kept are not formed again: four products, not five
    return 2 * of * n * n, (4 if explicit else 5) * of * n * n


def _square(n: int) -> int:
    return n * n


def _triangle(n: int) -> int:
    """Pairs of n queries and keys, of which each tile of queries leaves out the keys behind it."""
    return sum(min(_TILE, n - start) * min(start + _TILE, n) for start in range(0, n, _TILE))


_NUMBER = 8  # bytes of a norm
_OVER = {"tp": "cp-dp", "expert_tp-ep": "expert_dp"}  # the ranks with the same part of what is split so
_TRAFFIC = {"embed": embedding_traffic, "head": head_traffic}


@dataclass(frozen=True)
class Counts:
    """One rank's step.

    Attributes:
        flops: of matrix products, by phase ("forward", "recompute", "backward") and kind ("products",
            "attention").
        bytes: of the whole of every collective and of each message sent, by the axes along which the ranks of
            the group differ, and by kind.
        calls: how many, in the same way.
    """

    flops: Mapping[tuple[str, str], int]
    bytes: Mapping[tuple[str, str], int]
    calls: Mapping[tuple[str, str], int]


def counts(job: Job, rank: int = 0, memory_job: MemoryJob | None = None) -> Counts:
    """What a rank does in every step but the first, which makes what lasts.

    Args:
        held: of `planner.memory.job.memory_of`, where it is made already.

    Raises:
        StrettoError: the schedule cannot be made.
    """
    return _Counting(job=job, rank=rank, memory_job=memory_job or memory_of(job)).run()


@dataclass(kw_only=True)
class _Counting:
    job: Job
    rank: int
    memory_job: MemoryJob
    flops: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    calls: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])

    def run(self) -> Counts:
        self._layers()
        self._messages()
        self._reductions()
        self._gathers()
        self._shared_in()
        self._ties()
        self._norm()
        return Counts(*({k: v for k, v in of.items() if v} for of in (self.flops, self.bytes, self.calls)))

    # ------------------------------------------------------------------ the rank

    @cached_property
    def at(self) -> Mapping[str, int]:
        return self.job.layout.coordinates(self.rank)

    @cached_property
    def stages(self) -> list[int]:
        return list(self.memory_job.program.stages_of(self.at["pp"]))

    @cached_property
    def order(self) -> Sequence[Action]:
        return self.memory_job.lowered.orders[self.at["pp"]]

    def layers(self, stage: int) -> range:
        return self.memory_job.stages[stage % self.memory_job.program.depth]

    def _say(self, axes: str, kind: str, size: int, count: int = 1) -> None:
        """Calls of a group of the layout."""
        self._to(self.job.layout.group(self.rank, axes), kind, size, count)

    def _to(self, ranks: list[int], kind: str, size: int, count: int = 1) -> None:
        if len(ranks) > 1 and count:
            key = axes_of(self.job.layout, ranks), kind
            self.bytes[key] += count * size
            self.calls[key] += count

    # ------------------------------------------------------------------ layers

    def _layers(self) -> None:
        for stage in self.stages:
            times = sum(action.stage == stage and action.kind is Kind.F for action in self.order)
            first = stage % self.memory_job.program.depth > 0
            for at, layer in enumerate(self.layers(stage)):
                self._layer(layer, times, received=first and at == 0)

    def _layer(self, layer: int, times: int, received: bool) -> None:
        shape, how = (
            self.memory_job.shape,
            replace(self.memory_job.how, recompute=self.memory_job.mode(layer)),
        )
        kind = "embed" if layer == 0 else "block" if layer <= shape.layers else "head"
        flops = layer_flops(shape, kind, how)
        for phase, operations in (
            ("forward", flops.forward),
            ("recompute", flops.again),
            ("backward", flops.backward),
        ):
            for name, count in zip(("products", "attention"), operations, strict=True):
                self.flops[phase, name] += times * count
        for message in self._talk(kind, how, received):
            self._say(message.axis, message.kind, message.size, times * message.count)

    def _talk(self, kind: str, how: ComputeConfig, received: bool) -> tuple[Message, ...]:
        if kind != "block":
            return _TRAFFIC[kind](self.memory_job.shape, how)
        if received:  # an input that came from another stage is kept whole
            how = replace(how, shard_inputs=False)
        return block_traffic(self.memory_job.shape, how, self.at["cp"])

    def _messages(self) -> None:
        """Between stages."""
        how = self.memory_job.how
        size = how.element * how.shard * self.memory_job.shape.hidden
        sent = sum(action.kind in (Kind.SEND_F, Kind.SEND_B) for action in self.order)
        if sent:
            self.bytes["pp", "send"] += sent * size
            self.calls["pp", "send"] += sent

    # ------------------------------------------------------------------ data-parallel ranks

    @cached_property
    def stage_units(self) -> dict[int, StageUnits]:
        """The units of each stage, those of a tied weight in each that uses it."""
        return {s: self.memory_job.units(s % self.memory_job.program.depth) for s in self.stages}

    @cached_property
    def late(self) -> bool:
        """Whether the tied weight belongs to several stages here, or to copies of them."""
        using = [
            s for s, stage in self.stage_units.items() for u in stage.units if u.parameters[0].name == TIED
        ]
        apart = len(self._tied_stages) > 1
        return bool(using) and apart and (len(using) > 1 or self.memory_job.program.copies > 1)

    @cached_property
    def by_stage(self) -> dict[int, list[StateUnit]]:
        """Every unit once."""
        if not self.late:
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

    def _level(self, unit: StateUnit, call: Call) -> None:
        """A collective over ranks that differ in one digit."""
        ranks = self._copies(unit.expert)
        if call.level < 4:
            digits = unit.sizes.digits(ranks.index(self.rank), unit.copies)
            ranks = [
                rank
                for number, rank in enumerate(ranks)
                if all(
                    a == b or level == call.level
                    for level, (a, b) in enumerate(
                        zip(unit.sizes.digits(number, unit.copies), digits, strict=True)
                    )
                )
            ]
        self._to(ranks, call.kind, call.size)

    def _copies(self, expert: bool) -> list[int]:
        axes = _OVER["expert_tp-ep" if expert else "tp"]
        return sorted(self.job.layout.group(self.rank, axes))

    def _span(self, unit: StateUnit) -> tuple[int, int]:
        """The elements whose gradients this rank has at last."""
        number = self._copies(unit.expert).index(self.rank)
        return unit.sizes.span(unit.size, number, unit.copies, 3)

    def _reductions(self) -> None:
        for unit in self.units:
            for call in (*once_a_step(unit), *(published(unit) if self._moves(unit) else ())):
                self._level(unit, call)
        tied = {s: self._tied_halves(s) for s in self.stages} if self.memory_job.shape.tied else {}
        each = EachMicrobatch(self.by_stage, self.memory_job.how.tp, tied)
        for unit in each.counts(self.order):
            for call in reductions(unit, 0, 2):
                self._level(unit, call)

    def _moves(self, unit: StateUnit) -> bool:
        """Whether the optimiser works on anything but the parameters themselves."""
        server = unit.state_config.mode == "server" and unit.copies > 1
        return not unit.sizes.whole or unit.apart or server

    def _gathers(self) -> None:
        if self.memory_job.gather == "stage":
            units = stage_gathers(self.stage_units, self.memory_job.program.orders[self.at["pp"]])
        elif self.memory_job.gather == "layer":
            units = iter(LayerGathers(self.stage_units).run(self.order))
        else:
            return
        for unit in units:
            self._level(unit, gathered(unit))

    # ------------------------------------------------------------------ what others share in

    def _shared_in(self) -> None:
        """Gradients to which several tensor-parallel ranks have parts: one sum for a group and a type."""
        sums = Counter[tuple[tuple[int, ...], int]]()
        for unit in self.units:
            span, start = self._span(unit), 0
            bytes_of = unit.whole // unit.size
            for parameter in unit.parameters:
                for ranks, low, high in self._parts(parameter.name, parameter.elements):
                    here = min(span[1], start + high) - max(span[0], start + low)
                    if here > 0:
                        sums[ranks, bytes_of] += here * bytes_of
                start += parameter.elements
        for (ranks, _), size in sums.items():
            self._to(list(ranks), "all-reduce", size)

    def _parts(self, name: str, elements: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """The ranks that share in elements [low, high) of a parameter."""
        how, shape = self.memory_job.how, self.memory_job.shape
        group = tuple(self.job.layout.group(self.rank, "tp"))
        along = "norm" in name or name == "embed.pos.weight" or name.endswith(("proj.bias", "down.bias"))
        if how.tp > 1 and ("router" in name or (along and how.sequence_parallel)):
            yield group, 0, elements
        if ".attn.qkv." in name and shape.kv_heads < how.tp:
            copies = how.tp // shape.kv_heads
            index = group.index(self.rank) // copies * copies
            rows = shape.attention_width // how.tp + 2 * shape.head_dim
            row = elements // rows
            # keys, then values, after the queries
            yield group[index : index + copies], (rows - 2 * shape.head_dim) * row, elements

    @cached_property
    def _tied_stages(self) -> list[int]:
        """The stages of one copy that use the tied weight."""
        if not self.memory_job.shape.tied:
            return []
        ends = (0, self.memory_job.shape.layers + 1)
        return [s for s, layers in enumerate(self.memory_job.stages) if any(end in layers for end in ends)]

    def _tied_halves(self, stage: int) -> tuple[str, ...]:
        layers = self.layers(stage)
        return ("I",) * (0 in layers) + ("W",) * (self.memory_job.shape.layers + 1 in layers)

    def _ties(self) -> None:
        """Gradients that stages of one pipeline share."""
        program, pipeline = self.memory_job.program, self.job.layout.group(self.rank, "pp")
        tied = [c * program.depth + s for c in range(program.copies) for s in self._tied_stages]
        if len(self._tied_stages) > 1:
            self._sum_over(
                tied, [u for u in self.units if u.parameters[0].name == TIED], pipeline, unpadded=True
            )
        if program.copies > 1:
            for stage in self.stages:
                same = [c * program.depth + stage % program.depth for c in range(program.copies)]
                self._sum_over(same, self.by_stage[stage], pipeline, unpadded=False)

    def _sum_over(
        self, stages: list[int], units: list[StateUnit], pipeline: list[int], unpadded: bool
    ) -> None:
        holders = sorted({self.memory_job.program.placement[s] for s in stages})
        if len(holders) < 2 or self.at["pp"] not in holders:
            return
        for unit in units:
            low, high = self._span(unit)
            if unpadded:
                high = max(low, min(high, unit.parameters[0].elements))
            self._to([pipeline[h] for h in holders], "all-reduce", (high - low) * (unit.whole // unit.size))

    def _norm(self) -> None:
        """The squares of all gradients."""
        shape, layout = self.memory_job.shape, self.job.layout
        for axes in ("tp", "expert_tp-ep") if shape.moe is not None else ("tp",):
            expert = axes != "tp"
            state_config = self.memory_job.state_config
            copies = state_config.expert_copies if expert else state_config.copies
            sizes = state_config.sizes.for_copies(copies) if expert else state_config.sizes
            digit = {
                rank: sizes.digits(number, copies)[3]
                for ranks in layout.groups(_OVER[axes])
                for number, rank in enumerate(sorted(ranks))
            }
            same = [rank for rank, value in digit.items() if value == digit[self.rank]]
            self._to(sorted(same), "all-reduce", _NUMBER)
        if self.memory_job.state_config.mode == "server":
            self._to(self._copies(expert=False), "broadcast", _NUMBER)
