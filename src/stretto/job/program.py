"""Builds the program of a job from its schedule's name, options and, for searched schedules, costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import fsum
from typing import Any

from stretto.errors import StrettoError
from stretto.job.flops import attention_flops, block_flops, head_flops, layer_costs
from stretto.job.shape import ModelShape
from stretto.job.user_shape import UserShape
from stretto.layout.cut import cut
from stretto.program import options as options_of
from stretto.program import schedule
from stretto.program.program import Program
from stretto.program.replay import Costs, simulate
from stretto.program.transforms.sharding import gather
from stretto.program.transforms.shorten import shorten

_CHUNKS = (1, 2, 4)  # candidates of a searched schedule without configured chunks

Times = tuple[float, float, float]  # durations of F, I and W


@lru_cache(maxsize=4096)
def stages_of(
    shape: ModelShape,
    sequence: int,
    depth: int,
    stage_layers: tuple[int, ...] | None = None,
    target: int = 0,
    encoder_stages: int | None = None,
) -> tuple[range, ...]:
    """Return the layers of each of the model's `depth` stages, in the order of `layer_names`.

    Args:
        stage_layers: number of layers of each stage; by default the cut minimises the largest forward FLOPs
            of a stage, and no stage has layers of both an encoder and a decoder; layers from a user's file,
            whose FLOPs are unknown, are cut by their number.
        target: tokens of the decoder's sample; 0: as many as the encoder's.
        encoder_stages: number of stages of the encoder; by default chosen by the same costs.
    """
    if stage_layers is not None:
        ends = list(accumulate(stage_layers))
        return tuple(range(end - count, end) for end, count in zip(ends, stage_layers, strict=True))
    if isinstance(shape, UserShape):
        return tuple(cut([1.0] * shape.chain, depth))
    costs = layer_costs(shape, sequence, target)
    if not shape.encoder_layers or depth == 1:
        return tuple(cut(costs, depth))
    first = 1 + shape.encoder_layers  # the decoder's first layer
    fewest, largest = max(1, depth - len(costs) + first), min(first, depth - 1)
    counts = range(fewest, largest + 1) if encoder_stages is None else [encoder_stages]
    cuts = [
        (
            *cut(costs[:first], n),
            *(range(s.start + first, s.stop + first) for s in cut(costs[first:], depth - n)),
        )
        for n in counts
    ]
    return min(cuts, key=lambda stages: max(fsum(costs[layer] for layer in stage) for stage in stages))


@dataclass(frozen=True, kw_only=True)
class ScheduleSearchKey:
    """The values that determine the costs of a searched schedule.

    Attributes:
        sequence, target: tokens of a sample, and of the decoder's sample if the model has an encoder.
        recompute: mode of all blocks, which lengthens backwards ("auto" counts as "none", since its choice
            depends on the program).
        stage_layers, encoder_stages: as in `stages_of`.
    """

    shape: ModelShape
    sequence: int
    recompute: str = "none"
    stage_layers: tuple[int, ...] | None = None
    target: int = 0
    encoder_stages: int | None = None


@dataclass(frozen=True, kw_only=True)
class ProgramKey:
    """The values that determine the program of a schedule.

    Attributes:
        options: the schedule's options except `costs`.
        costs: the key of the costs of a searched schedule.
        digest: of the user's file that the schedule is in, which may change between two jobs of a process.
        gathered: parameters are sharded and gathered stage by stage; not if weights change within the step,
            which the rules of a job reject.
    """

    name: str
    ranks: int
    microbatches: int
    options: tuple[tuple[str, Any], ...] = ()
    costs: ScheduleSearchKey | None = None
    gathered: bool = False
    digest: str = ""


@lru_cache(maxsize=512)
def build_program(key: ProgramKey) -> Program:
    """Return the program of a schedule for one model, the same on every rank.

    A schedule that takes `costs` gets those of the model's stages; if it also takes `chunks` and none are
    given, 1, 2 and 4 are tried and the program with the smallest makespan is used.

    Raises:
        StrettoError: the schedule does not exist, or not with these options.
    """
    return complete(_generate(replace(key, gathered=False)), gathered=key.gathered)


@lru_cache(maxsize=64)
def short_step(key: ProgramKey) -> Program:
    """Return the program of `build_program` without the microbatches that do not raise any rank's peak memory
    (`program.transforms.shorten`).
    """
    return complete(shorten(_generate(replace(key, gathered=False))), gathered=key.gathered)


def complete(program: Program, *, gathered: bool) -> Program:
    """Return the program with gathers of sharded parameters, if `gathered`: a rank has the parameters of the
    stages that it works with and of the next one.
    """
    if gathered and program.trains and not program.versions:
        at_work = max((len({a.stage, b.stage}) for a, b in program.pairs), default=1)
        return gather(program, limit=at_work + 1)
    return program


@lru_cache(maxsize=512)
def _generate(key: ProgramKey) -> Program:
    options = dict(key.options)
    if key.costs is None:
        return schedule(key.name, key.ranks, key.microbatches, **options)
    # the best program for the model's costs
    ranks, accepted = key.ranks, options_of(key.name)
    counts = [options["chunks"]] if options.get("chunks") else [1]
    if "chunks" in accepted and not options.get("chunks"):
        counts = [c for c in _CHUNKS if c == 1 or (ranks > 1 and c * ranks <= key.costs.shape.chain)]
    candidates, refused = list[tuple[float, Program]](), list[StrettoError]()
    if key.costs.stage_layers is not None:
        counts = [max(1, len(key.costs.stage_layers) // ranks)]
    for chunks in counts:
        costs = Costs(per_stage=stage_times(key.costs, ranks * chunks))
        try:
            program = schedule(key.name, ranks, key.microbatches, **options, costs=costs)
        except StrettoError as error:
            refused.append(error)
        else:
            candidates.append((simulate(program, costs).makespan, program))
    if not candidates:
        raise refused[0]
    return min(candidates, key=lambda candidate: candidate[0])[1]


def stage_times(of: ScheduleSearchKey, stages: int) -> list[Times]:
    """Return (F, I, W) of every stage: the summed costs of its layers, in units of a block's forward.

    A product with a weight costs the same in F, I and W; products of attention have no weight and cost twice
    as much in I. Recomputation adds another forward to I. With fewer layers than stages, which no job may
    have, all stages cost the same.
    """
    shape = of.shape
    if stages > shape.chain:
        return [(1.0, 1.0, 1.0)] * stages
    target, share = of.target or of.sequence, (of.target or of.sequence) / of.sequence

    def times_of(kind: ModelShape, sequence: int, memory: int = 0) -> Times:
        block = block_flops(kind, sequence, memory=memory)
        attention = attention_flops(kind, sequence, memory=memory)
        again = {"selective": attention, "full": block}.get(of.recompute, 0.0)
        return block, block + attention + again, block - attention

    head, unit = head_flops(shape), block_flops(shape, of.sequence)
    none, times = (0.0, 0.0, 0.0), [(0.0, 0.0, 0.0)]
    if shape.encoder_layers:
        times += [*shape.encoder_stack.each(lambda kind: times_of(kind, of.sequence)), none]
        decoder = [*shape.each(lambda kind: times_of(kind, target, of.sequence)), (head, head, head)]
        times += [(f * share, i * share, w * share) for f, i, w in decoder]
    else:
        times += [*shape.each(lambda kind: times_of(kind, of.sequence)), (head, head, head)]
    by_stage: list[Times] = []
    cut_into = stages_of(
        shape, of.sequence, stages, of.stage_layers, target=of.target, encoder_stages=of.encoder_stages
    )
    for stage in cut_into:
        f, i, w = (fsum(times[layer][kind] for layer in stage) / unit for kind in range(3))
        by_stage.append((f, i, w))
    return by_stage
