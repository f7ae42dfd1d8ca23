"""Exact times and memory of candidates, each computed once however many passes of a search examine it."""

from __future__ import annotations

from time import perf_counter

from stretto.planner.estimate import Estimate, estimate_of, precision_of
from stretto.planner.memory.fits import Fit
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.short_step import short_step_fit
from stretto.planner.search.memory_bounds import filling_microbatches
from stretto.planner.search.space import depth_of, small_program
from stretto.planner.search.task import Candidate, Parallelism, Saving, ScheduleChoice, Task
from stretto.planner.search.time_bounds import TimeBounds
from stretto.planner.time.step import step_time
from stretto.program.program import Program
from stretto.program.schedules.traits import updates_within
from stretto.spec.chain import block_total, blocks_among, layer_of
from stretto.spec.flops import Recompute as Mode
from stretto.spec.job import Job
from stretto.spec.reduction import reduction

_SECONDS_PER_ACTION = 2e-5  # of a replay or a memory check on one core, until some were timed
_ENOUGH_ACTIONS = 2000
_EXCESS = 1.04  # ratio of exact times to bounds, until some of a schedule are known
_KINDS = 3  # actions of a microbatch on a stage: F, I and W


class Exact:
    """Exact times and memory for one task, and the bounds that follow from them."""

    def __init__(self, task: Task) -> None:
        self.task, self.bounds = task, TimeBounds(task)
        self.times = dict[Candidate, Estimate]()  # without memory
        self.fits = dict[Candidate, Fit]()
        self._makespans = dict[tuple[Parallelism, ScheduleChoice, Saving], float]()
        # by schedule and its options: number of ratios of exact times to bounds, and their mean
        self._excess = dict[str, dict[ScheduleChoice, tuple[int, float]]]()
        self._pace = {"replay": _SECONDS_PER_ACTION, "memory": _SECONDS_PER_ACTION}

    def bound(self, candidate: Candidate, job: Job) -> float:
        """The best lower bound on a candidate's seconds before its replay: the bound with its program, and
        the makespan of a candidate that differs only in how states are sharded.
        """
        bound = self.bounds.candidate(candidate, job, *_program(job))
        return max(
            bound, self._makespans.get((candidate.parallelism, candidate.schedule, candidate.saving), 0.0)
        )

    def seconds(self, candidate: Candidate) -> float:
        """Seconds of a step, replayed."""
        if candidate not in self.times:
            started = perf_counter()
            self.times[candidate] = self._replay(candidate)
            self._note("replay", perf_counter() - started, self._actions(candidate))
            bound = self.bounds.candidate(candidate, candidate.job(self.task))
            alike = self._excess.setdefault(candidate.schedule.name, {})
            count, mean = alike.get(candidate.schedule, (1, _EXCESS))
            ratio = self.times[candidate].seconds / bound
            alike[candidate.schedule] = count + 1, mean + (ratio - mean) / (count + 1)
        return self.times[candidate].seconds

    def fit(self, candidate: Candidate) -> Fit:
        """How the fullest rank's memory fits the device."""
        if candidate not in self.fits:
            started = perf_counter()
            job, device = candidate.job(self.task), self.task.cluster.device
            self.fits[candidate] = short_step_fit(job, device, self.task.assumptions)
            self._note("memory", perf_counter() - started, self._actions(candidate, short=True))
        return self.fits[candidate]

    def excess(self, choice: ScheduleChoice) -> float:
        """The usual ratio of exact times to bounds, from the replays of a schedule so far; of options that
        were not replayed, the least of the schedule. In some schedules ranks wait for each other more than
        in others, which bounds do not see.
        """
        alike = self._excess.get(choice.name, {})
        if choice in alike:
            return alike[choice][1]
        return min((mean for _, mean in alike.values()), default=_EXCESS)

    def expected_seconds(self, candidate: Candidate) -> float:
        """About how long it takes to compute what is not known yet of a candidate's time and memory."""
        taken = 0.0
        if candidate not in self.times:
            taken += self._pace["replay"] * self._actions(candidate)
        if candidate not in self.fits:
            taken += self._pace["memory"] * self._actions(candidate, short=True)
        return taken

    def _note(self, what: str, taken: float, actions: int) -> None:
        """Follow the pace of this machine, more readily upwards: a search must not overrun its time. Small
        programs say nothing of it: most of their time does not grow with their actions.
        """
        if actions < _ENOUGH_ACTIONS:
            return
        pace = taken / actions
        self._pace[what] = max(pace, 0.7 * self._pace[what] + 0.3 * pace)

    def _actions(self, candidate: Candidate, short: bool = False) -> int:
        layout, choice = candidate.parallelism.layout, candidate.schedule
        microbatches = self.task.global_batch // (layout.dp * candidate.parallelism.micro_batch)
        if updates_within(choice.name):
            microbatches *= 4  # a step, and the windows of `planner.time.step`
        if short:
            microbatches = min(microbatches, 2 * filling_microbatches(choice, layout.pp, microbatches))
        return max(1, _KINDS * depth_of(choice, layout.pp) * microbatches)

    def _replay(self, candidate: Candidate) -> Estimate:
        task, job = self.task, candidate.job(self.task)
        cluster = self.bounds.cluster(candidate.parallelism.layout.world)
        modes = memory_of(job).modes if job.recompute.mode == "auto" else self._modes(candidate)
        precision = task.assumptions.products or precision_of(job)
        time = step_time(job, cluster, task.assumptions, precision, modes)
        # other ways of sharding states can make actions longer, never shorter; updates within the step too
        if job.dp.mode in ("ddp", "zero1") and not time.timeline.program.versions:
            key = candidate.parallelism, candidate.schedule, candidate.saving
            self._makespans[key] = time.timeline.makespan * cluster.correction
        return estimate_of(job=job, cluster=cluster, precision=precision, time=time)

    def _modes(self, candidate: Candidate) -> list[Mode] | None:
        """How each block is recomputed, where only some of a stage are."""
        most, shape = candidate.saving.recompute.blocks, self.task.shape
        if most is None:
            return None
        modes: list[Mode] = ["none"] * block_total(shape)
        program = small_program(candidate.schedule, candidate.parallelism.layout.pp)
        assert program is not None
        for stage in self.task.stages(program.depth):
            for layer in blocks_among(shape, stage)[:most]:
                modes[layer_of(shape, layer).block or 0] = "full"
        return modes


def _program(job: Job) -> tuple[bool, Program | None]:
    """Whether gradients are reduced with each microbatch, and the program where the bound uses it."""
    if job.dp.mode not in ("zero2", "zero3"):
        return False, None
    program = job.program()
    return reduction(program, job.dp.mode, job.dp.reduce) == "microbatch", program
