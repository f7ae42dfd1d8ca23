"""Times and bytes of a cut as sums over stages, so that unfinished cuts can be bounded.

The order of a program is fixed, so its makespan is the longest of all chains of actions in which each waits
for the one before it. A chain has a fixed number of forwards, backwards and messages of each stage. Its time
is therefore a sum over stages, linear in their times, and bounds the makespan of every cut from below. What a
rank holds at one point of its order is such a sum as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import fsum, inf

from stretto.planner.cutting.profile import ModelProfile
from stretto.program.action import ActionKind
from stretto.program.checks.versions import weight_versions
from stretto.program.program import Program
from stretto.program.replay.sweep import KINDS, encode, sweep

Cut = tuple[int, ...]  # first layer of each stage, and the number of layers
Counts = Mapping[tuple[int, ActionKind], float]  # by stage of one copy, how often

_FORWARD = {ActionKind.F, ActionKind.RECOMPUTE}


@dataclass(frozen=True)
class Row:
    """A sum over stages: stage s with layers i to j - 1 adds slope[s][j] - slope[s][i] + entry[s][i].

    Attributes:
        suffix: rest[s][i] is the least that stages from s on can add if they begin at layer i.
    """

    slope: Sequence[Sequence[float]]
    entry: Sequence[Sequence[float]]
    suffix: Sequence[Sequence[float]]

    def stage(self, s: int, i: int, j: int) -> float:
        """The value that one stage adds."""
        return self.slope[s][j] - self.slope[s][i] + self.entry[s][i]

    def of(self, cut: Cut) -> float:
        """The sum of a whole cut."""
        return fsum(self.stage(s, i, j) for s, (i, j) in enumerate(pairwise(cut)))


def _row(slope: Sequence[Sequence[float]], entry: Sequence[Sequence[float]]) -> Row:
    """The row with its `suffix`, computed from the last stage to the first."""
    depth, layers = len(slope), len(slope[0]) - 1
    after = [inf] * layers + [0.0]
    suffix = [after]
    for s in reversed(range(depth)):
        best, smallest = [inf] * (layers + 1), inf
        for i in reversed(range(layers)):
            smallest = min(smallest, slope[s][i + 1] + after[i + 1])
            best[i] = smallest - slope[s][i] + entry[s][i]
        suffix.append(best)
        after = best
    return Row(slope, entry, suffix[::-1])


class StageSums:
    """The layers of a model under one program.

    Args:
        states: bytes kept for each byte of weights: weights, gradients, optimiser states.
        hop, bandwidth: seconds of a message, and bytes a second.
    """

    def __init__(
        self,
        profile: ModelProfile,
        program: Program,
        states: float = 4.0,
        hop: float = 0.0,
        bandwidth: float = inf,
    ) -> None:
        self.profile, self.program = profile, program
        self.layers, self.depth = len(profile.layers), program.depth
        self.forward = [0.0, *accumulate(layer.forward for layer in profile.layers)]
        self.back = [0.0, *accumulate(layer.halves[0] for layer in profile.layers)]
        self.weight = [0.0, *accumulate(layer.halves[1] for layer in profile.layers)]
        self.cumulative_activations = [0, *accumulate(layer.activations for layer in profile.layers)]
        self.bytes = [0, *accumulate(layer.parameters for layer in profile.layers)]
        outputs = [layer.output for layer in profile.layers]
        # of a stage that begins with a layer: its message, and bytes of its input beyond the kept part
        self.entering = [0, *outputs[:-1], 0]
        self.delay = [0.0, *(hop + size / bandwidth for size in self.entering[1:])]
        inputs = [layer.input for layer in profile.layers]
        self.extra = [
            0,
            *(max(0, size - received) for size, received in zip(outputs, inputs[1:], strict=False)),
            0,
        ]
        versions = weight_versions(program)
        self.copies = [states + versions[s] - 1 for s in range(program.stages)]
        self.shared = profile.shared
        self.needs = [_held_microbatches(program, rank) for rank in range(program.ranks)]

    # ------------------------------------------------------------------ time

    def times(self, cut: Cut) -> list[tuple[float, float, float]]:
        """F, I and W of each stage, seconds."""
        sums = (self.forward, self.back, self.weight)
        return [
            (sums[0][j] - sums[0][i], sums[1][j] - sums[1][i], sums[2][j] - sums[2][i])
            for i, j in pairwise(cut)
        ]

    def replay(self, cut: Cut) -> tuple[float, Counts]:
        """The program's makespan, seconds, and how often its longest chain has each action of a stage.
        Messages are counted as receives, at the stage that receives them.
        """
        program, depth = self.program, self.depth
        cost, delay = [0.0] * (program.stages * len(KINDS)), [0.0] * (program.stages * len(KINDS))
        times = self.times(cut)
        for s in range(program.stages):
            stage, position = s % depth, s * len(KINDS)
            f, i, w = times[stage]
            for kind, seconds in (
                (ActionKind.F, f),
                (ActionKind.RECOMPUTE, f),
                (ActionKind.B, i + w),
                (ActionKind.I, i),
                (ActionKind.W, w),
            ):
                cost[position + KINDS[kind]] = seconds
            if stage and program.placement[s - 1] != program.placement[s]:
                delay[position + KINDS[ActionKind.F]] = self.delay[cut[stage]]
            if stage + 1 < depth and program.placement[s + 1] != program.placement[s]:
                delay[position + KINDS[ActionKind.B]] = delay[position + KINDS[ActionKind.I]] = self.delay[
                    cut[stage + 1]
                ]
        code = encode(program)
        starts, ends = sweep(code, cost, delay)
        last = max(range(len(ends)), key=ends.__getitem__)
        return ends[last], self._chain(last, starts, ends)

    def _chain(self, last: int, starts: Sequence[float], ends: Sequence[float]) -> Counts:
        """Walk back from the last slot, each time to what its start was waiting for."""
        code, depth = encode(self.program), self.depth
        node = {slot: position for position, slot in enumerate(code.slots)}
        kinds = list(KINDS)
        counts = Counter[tuple[int, ActionKind]]()
        slot = last
        while slot in node:
            position = node[slot]
            stage, kind_index = divmod(code.kinds[position], len(kinds))
            kind, stage = kinds[kind_index], stage % depth
            counts[stage, kind] += 1
            if ends[slot - 1] >= starts[slot] or not code.sources[position]:
                slot -= 1
                continue
            counts[stage, ActionKind.RECV_F if kind in _FORWARD else ActionKind.RECV_B] += 1
            slot = code.sources[position]
        return counts

    def chain(self, counts: Counts) -> Row:
        """The time of a chain of actions."""
        sums = {
            ActionKind.F: self.forward,
            ActionKind.RECOMPUTE: self.forward,
            ActionKind.I: self.back,
            ActionKind.W: self.weight,
        }
        slope = [[0.0] * (self.layers + 1) for _ in range(self.depth)]
        entry = [[0.0] * (self.layers + 1) for _ in range(self.depth)]
        for (s, kind), count in counts.items():
            if kind in (ActionKind.RECV_F, ActionKind.RECV_B):
                to = s if kind is ActionKind.RECV_F else s + 1
                entry[to] = [e + count * d for e, d in zip(entry[to], self.delay, strict=True)]
            for half in (ActionKind.I, ActionKind.W) if kind is ActionKind.B else (kind,):
                if half in sums:
                    slope[s] = [a + count * b for a, b in zip(slope[s], sums[half], strict=True)]
        return _row(slope, entry)

    def work(self) -> list[Row]:
        """Bounds from the work of ranks: the whole order of each rank, with the path to its first action and
        from its last backward; and means over several ranks, which can exceed the bounds of single ones.
        """
        counts = [self._order(rank) for rank in range(self.program.ranks)]
        rows = [self.chain(chain_counts) for chain_counts in counts]
        for first in range(self.program.ranks - 1):
            mean = defaultdict[tuple[int, ActionKind], float](float)
            for chain_counts in counts[first:]:
                for key, count in chain_counts.items():
                    mean[key] += count / (len(counts) - first)
            rows.append(self.chain(mean))
        return rows

    def _order(self, rank: int) -> Counts:
        program, depth = self.program, self.depth
        order, counts = program.orders[rank], Counter[tuple[int, ActionKind]]()
        for stage, kind, _ in order:
            counts[stage % depth, kind] += 1
        away = [
            stage > 0 and program.placement[stage - 1] != program.placement[stage]
            for stage in range(program.stages)
        ]
        for copy_stage in range(order[0].stage - order[0].stage % depth, order[0].stage):
            counts[copy_stage % depth, ActionKind.F] += 1
            counts[copy_stage % depth + 1, ActionKind.RECV_F] += away[copy_stage + 1]
        last = order[-1]
        if last.kind in (ActionKind.B, ActionKind.I):
            for copy_stage in range(last.stage - last.stage % depth, last.stage):
                counts[copy_stage % depth, ActionKind.I] += 1
                counts[copy_stage % depth, ActionKind.RECV_B] += away[copy_stage + 1]
        return counts

    # ------------------------------------------------------------------ memory

    def memory(self, cut: Cut) -> list[float]:
        """Peak bytes of each rank: states, activations in flight and inputs of stages."""
        return [
            self.states(cut, rank) + max(self._activations(cut, n) for n in self.needs[rank])
            for rank in range(self.program.ranks)
        ]

    def states(self, cut: Cut, rank: int) -> float:
        """Bytes of weights, gradients and states; shared weights count once."""
        total, copies = 0.0, dict[int, float]()
        for s in self.program.stages_of(rank):
            i, j = cut[s % self.depth], cut[s % self.depth + 1]
            total += self.copies[s] * (self.bytes[j] - self.bytes[i])
            copies |= dict.fromkeys(range(i, j), self.copies[s])
        for weights in self.shared:
            on_rank = [layer for layer in weights.layers if layer in copies]
            total -= sum(copies[layer] * weights.bytes for layer in on_rank[1:])
        return total

    def _activations(self, cut: Cut, counts: Counts) -> float:
        total = 0.0
        for (s, kind), count in counts.items():
            i, j = cut[s], cut[s + 1]
            if kind is ActionKind.RECOMPUTE:
                total += count * self.entering[i]
            else:
                sums = self.cumulative_activations
                total += count * (sums[j] - sums[i] + self.extra[i])
        return total

    def memory_rows(self, rank: int) -> list[Row]:
        """Bytes that the rank holds at each point at which it may be fullest; never above `memory`."""
        rows: list[Row] = []
        for counts in self.needs[rank]:
            slope = [[0.0] * (self.layers + 1) for _ in range(self.depth)]
            entry = [[0.0] * (self.layers + 1) for _ in range(self.depth)]
            for s in self.program.stages_of(rank):
                stage, single = s % self.depth, self._single()
                slope[stage] = [a + self.copies[s] * b for a, b in zip(slope[stage], single, strict=True)]
            for (s, kind), count in counts.items():
                if kind is not ActionKind.RECOMPUTE:
                    slope[s] = [
                        a + count * b for a, b in zip(slope[s], self.cumulative_activations, strict=True)
                    ]
                more = self.entering if kind is ActionKind.RECOMPUTE else self.extra
                entry[s] = [a + count * b for a, b in zip(entry[s], more, strict=True)]
            rows.append(_row(slope, entry))
        return rows

    def _single(self) -> list[float]:
        """Bytes of weights up to each layer; shared ones count at the first of their layers only."""
        each = [float(layer.parameters) for layer in self.profile.layers]
        for weights in self.shared:
            for layer in weights.layers[1:]:
                each[layer] -= weights.bytes
        return [0.0, *accumulate(each)]


def _held_microbatches(program: Program, rank: int) -> list[Counts]:
    """Microbatches of each stage that the rank holds at each point of its order that no other point
    dominates: under `F` those with all activations, under `RECOMPUTE` those with their input only.
    """
    order, depth = program.orders[rank], program.depth
    repeated = {(a.stage, a.microbatch) for a in order if a.kind is ActionKind.RECOMPUTE}
    in_flight, points = (
        Counter[tuple[int, ActionKind]](),
        set[frozenset[tuple[tuple[int, ActionKind], int]]](),
    )
    for stage, kind, i in order:
        stage_of_copy, light = stage % depth, (stage, i) in repeated
        if kind is ActionKind.F:
            in_flight[stage_of_copy, ActionKind.RECOMPUTE if light else ActionKind.F] += 1
        elif kind is ActionKind.RECOMPUTE:
            in_flight[stage_of_copy, ActionKind.RECOMPUTE] -= 1
            in_flight[stage_of_copy, ActionKind.F] += 1
        elif kind in (ActionKind.B, ActionKind.W):
            in_flight[stage_of_copy, ActionKind.F] -= 1
        points.add(frozenset((key, count) for key, count in in_flight.items() if count > 0))
        if not program.trains:
            in_flight.clear()
    counts = [dict(point) for point in points]

    def dominates(larger: Counts, smaller: Counts) -> bool:
        return all(larger.get(key, 0) >= count for key, count in smaller.items())

    return [
        point
        for point in counts
        if not any(dominates(other, point) for other in counts if other is not point)
    ]
