"""Whether a candidate fits, without walking through a long step: a bound, and the memory of a shorter one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, lcm

from stretto.cost.flops import Recompute as Mode
from stretto.cost.machine.device import Device
from stretto.cost.states import Shares
from stretto.errors import StrettoError
from stretto.plan.datatime import stage_elements
from stretto.plan.fits import Fit, fit
from stretto.plan.holding import memory_of
from stretto.plan.job import Job
from stretto.plan.memory import RankMemory, rank_memory
from stretto.plan.running import BYTES, Running, computing
from stretto.plan.space import small_program
from stretto.plan.states import DataParallel
from stretto.plan.task import Candidate, Order, Place, Saving, Task
from stretto.plan.timing import stages_of
from stretto.plan.working import layer_work
from stretto.schedule import schedule
from stretto.schedule.memory import peak_held

_ID = 8  # bytes of a token's number
_GROWING = ("gpipe", "bfs", "auto", "pipedream", "pipedream-2bw")  # what is held grows with microbatches
_ENOUGH = 3  # times the ranks: from so many microbatches on, as many are in flight as ever


def enough(order: Order, pp: int, microbatches: int) -> int:
    """A number of microbatches, as large at most, with which ranks hold as many activations at their fullest
    as with these; it leaves the same rest when groups are formed.
    """
    if order.name in _GROWING:
        return microbatches
    group = dict(order.options).get("group") or pp
    period = lcm(2 * pp, group)
    least = _ENOUGH * max(pp, group)
    return microbatches if microbatches <= least else least + (microbatches - least) % period


def shortened(job: Job) -> Job:
    """The job with a batch of no more microbatches than its memory depends on."""
    assert job.microbatches
    order = Order(job.schedule, tuple(sorted(job.options.items())))
    count = enough(order, job.layout.pp, job.microbatches)
    return replace(job, global_batch=count * job.layout.dp * job.micro_batch)


def weigh(job: Job, device: Device, running: Running) -> Fit:
    """The memory of every pipeline rank of a job; its batch's tokens are those of the whole step."""
    short = shortened(job)
    held = memory_of(short, running)
    assert job.microbatches
    assert short.microbatches
    tokens = 2 * _ID * held.how.tokens * (job.microbatches - short.microbatches)
    ranks = [replace(rank, batch=rank.batch + tokens) for rank in rank_memory(held)]
    return fit(ranks, device, running.reserve)


@dataclass(frozen=True)
class Least:
    """Bytes that some rank holds at least.

    Attributes:
        states: weights, gradients, masters, optimiser.
        activations: of blocks in flight.
    """

    states: int
    activations: int

    @property
    def total(self) -> int:
        return self.states + self.activations

    def fit(self, device: Device, reserve: float | None) -> Fit:
        """Where even this does not fit, nothing does."""
        nothing = RankMemory(0, self.states, 0, 0, self.activations, 0, 0, 0, 0, 0, 0, "the step")
        return fit([nothing], device, reserve)


@dataclass(frozen=True)
class _Rank:
    """What of a pipeline rank a bound looks at: its stages, their blocks, and how many of its stages'
    microbatches it holds at once.
    """

    stages: tuple[range, ...]
    blocks: tuple[int, ...]
    flights: int


class LeastMemory:
    """Lower bounds on the memory of the fullest rank, of both ends and the middle: states as they are shared,
    and what blocks in flight keep.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        shape = task.shape
        self._kinds = {shape.block(index): index for index in reversed(range(shape.layers))}.values()
        self._ranks = dict[object, tuple[_Rank, ...]]()
        self._states = dict[object, tuple[int, ...]]()
        self._blocks = dict[object, int]()

    def of(self, candidate: Candidate) -> Least:
        """The least that one of the ranks holds."""
        ranks = self._of_ranks(candidate)
        states = self._of_states(candidate, ranks)
        again = candidate.saving.recompute
        full = self._block(candidate.place, "full")
        plain = full if again.mode in ("full", "auto") and again.blocks is None else self._plain(candidate)
        found = list[Least]()
        for rank, held in zip(ranks, states, strict=True):
            most = 0 if again.blocks is None else again.blocks
            kept = min(min(n, most) * full + max(0, n - most) * plain for n in rank.blocks)
            found.append(Least(held, rank.flights * kept))
        return max(found, key=lambda one: one.total)

    def _plain(self, candidate: Candidate) -> int:
        """Bytes that a block keeps which is not recomputed whole."""
        mode = candidate.saving.recompute.mode
        return self._block(candidate.place, "selective" if mode == "selective" else "none")

    def _of_ranks(self, candidate: Candidate) -> tuple[_Rank, ...]:
        layout, order, task = candidate.place.layout, candidate.order, self.task
        microbatches = task.global_batch // (layout.dp * candidate.place.micro_batch)
        key = order, layout.pp, microbatches
        if key not in self._ranks:
            program = small_program(order, layout.pp)
            assert program is not None
            stages = stages_of(task.shape, task.sequence, program.depth)
            flights = in_flight(order, layout.pp, enough(order, layout.pp, microbatches))
            found = list[_Rank]()
            for rank in sorted({0, layout.pp // 2, layout.pp - 1}):
                held = tuple(stages[stage % program.depth] for stage in program.stages_of(rank))
                counts = tuple(sum(1 <= x <= task.shape.layers for x in stage) for stage in held)
                found.append(_Rank(held, counts, flights[rank]))
            self._ranks[key] = tuple(found)
        return self._ranks[key]

    def _of_states(self, candidate: Candidate, ranks: tuple[_Rank, ...]) -> tuple[int, ...]:
        place, saving = candidate.place, candidate.saving
        key = place.layout, place.expert_tp, candidate.order, candidate.dp, saving.offload, saving.parameters
        if key not in self._states:
            job, running = candidate.job(self.task), self.task.running
            found = [[_states(job, running, stage) for stage in rank.stages] for rank in ranks]
            # some stage is at work when the rank is fullest, with its weights gathered
            self._states[key] = tuple(sum(s for s, _ in own) + min(g for _, g in own) for own in found)
        return self._states[key]

    def _block(self, place: Place, mode: Mode) -> int:
        at = place.layout
        key = at.tp, at.cp, at.ep, place.expert_tp, place.micro_batch, place.sequence_parallel, place.context
        if (key, mode) not in self._blocks:
            job = Candidate(place, Order("1f1b"), DataParallel(), Saving()).job(self.task)
            how = replace(computing(job, self.task.running), recompute=mode)
            works = [layer_work(self.task.shape, how, layer + 1) for layer in self._kinds]
            self._blocks[key, mode] = min(max(0, work.kept - work.given) for work in works)
        return self._blocks[key, mode]


@lru_cache(maxsize=64)
def budget(device: Device, reserve: float | None) -> float:
    """The most bytes of tensors with which a device is not surely too small."""
    if device.memory == inf:
        return inf
    low, high = 0, int(2 * device.memory)
    while high - low > 1:
        middle = (low + high) // 2
        if Least(middle, 0).fit(device, reserve).verdict == "does not fit":
            high = middle
        else:
            low = middle
    return low


@lru_cache(maxsize=4096)
def in_flight(order: Order, pp: int, microbatches: int) -> tuple[int, ...]:
    """Most stages' microbatches that each rank holds activations of; a searched schedule: one."""
    if order.name == "auto":
        return (1,) * pp
    try:
        return tuple(peak_held(schedule(order.name, pp, microbatches, **dict(order.options))))
    except StrettoError:
        return (0,) * pp  # which the rules refuse


def _states(job: Job, running: Running, stage: range) -> tuple[int, int]:
    """Bytes of the states of a stage, padding aside, and parameters that stay in more bits; and of its
    weights where they are gathered stage by stage.
    """
    how = computing(job, running)
    shares = Shares(
        how.tp, how.ep, how.tp if how.expert_tp is None else how.expert_tp, running.vocab_multiple
    )
    ends = tuple(layer for layer in stage if layer in (0, job.shape.layers + 1))
    blocks = sum(1 <= layer <= job.shape.layers for layer in stage)
    elements = stage_elements(job.shape, tuple(sorted({*ends, *range(1, blocks + 1)})), shares)
    weight = BYTES[job.precision.dtype]
    half, away = weight == 2, job.dp.offload != "none" and not running.one_memory
    gradient = 0 if away else 2 if half and job.precision.gradients == "same" else max(4, weight)
    means = 2 * (running.moment or max(4, weight)) if running.optimiser in ("adamw", "lamb") else 0
    lasting = 0 if away else means + (4 if half else 0)
    total = 0.0
    experts = job.layout.size("expert_dp") if job.shape.moe else 1
    for count, copies in ((elements.dense, job.copies), (elements.expert, experts)):
        sizes = job.dp.sizes(job.copies).for_copies(copies)
        here = 0 if job.dp.offload_parameters != "none" else weight / sizes.parameters
        total += count * (here + gradient / sizes.gradients + lasting / sizes.states)
    by_stage = job.dp.gathers(job.layout.pp) == "stage" and job.dp.sizes(job.copies).parameters > 1
    return int(total), weight * elements.dense if by_stage else 0
