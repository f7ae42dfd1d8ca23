"""Exact times and memory of candidates, each computed once however many passes of a search examine it."""

from __future__ import annotations

from stretto.job.job import Job
from stretto.job.reduction import reduction
from stretto.planner.estimate import Estimate, estimate_of, precision_of
from stretto.planner.memory.fits import Fit
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.short_step import short_step_fit
from stretto.planner.search.memory_bounds import MemoryBounds, filling_microbatches
from stretto.planner.search.space import depth_of
from stretto.planner.search.task import Candidate, Parallelism, Saving, ScheduleChoice, SearchTask
from stretto.planner.search.time_bounds import TimeBounds
from stretto.planner.search.work import SearchWork, seconds_of
from stretto.planner.time.step import step_time
from stretto.program.schedules.traits import updates_within

_FIRST_EXCESS = 1.04  # ratio of exact times to bounds, until some of a schedule are known
_ACTIONS_PER_STAGE = 3  # actions of a microbatch on a stage: F, I and W


class CandidateEvaluator:
    """Exact times and memory of the candidates of one task, and the bounds that follow from them.

    Attributes:
        times: estimates without memory.
    """

    def __init__(self, task: SearchTask, work: SearchWork | None = None) -> None:
        self.task, self.work = task, work or SearchWork()
        self.bounds, self.memory = TimeBounds(task, self.work), MemoryBounds(task, self.work)
        self.times = dict[Candidate, Estimate]()
        self.fits = dict[Candidate, Fit]()
        self._makespans = dict[tuple[Parallelism, ScheduleChoice, Saving], float]()
        # by schedule and its options: number of ratios of exact times to bounds, and their mean
        self._excess = dict[str, dict[ScheduleChoice, tuple[int, float]]]()

    def bound(self, candidate: Candidate, job: Job) -> float:
        """The best lower bound on a candidate's seconds before its replay: the bound with its program, and
        the makespan of a candidate that differs only in how states are sharded.
        """
        program, each = None, False
        if job.dp.mode in ("zero2", "zero3"):
            program = job.program()
            each = reduction(program, job.dp.mode, job.dp.reduce) == "microbatch"
        makespan = self._makespans.get((candidate.parallelism, candidate.schedule, candidate.saving), 0.0)
        return max(self.bounds.candidate(candidate, job, each, program), makespan)

    def seconds(self, candidate: Candidate) -> float:
        """Seconds of a step, replayed."""
        if candidate not in self.times:
            self.work.add("replay", self._actions(candidate))
            self.times[candidate] = self._replay(candidate)
            bound = self.bounds.candidate(candidate, candidate.job(self.task))
            variants = self._excess.setdefault(candidate.schedule.name, {})
            count, mean = variants.get(candidate.schedule, (1, _FIRST_EXCESS))
            ratio = self.times[candidate].seconds / bound
            variants[candidate.schedule] = count + 1, mean + (ratio - mean) / (count + 1)
        return self.times[candidate].seconds

    def fit(self, candidate: Candidate) -> Fit:
        """Fit of the fullest rank's memory on the device."""
        if candidate not in self.fits:
            self.work.add("memory", self._actions(candidate, short=True))
            job, cluster = candidate.job(self.task), self.task.cluster
            self.fits[candidate] = short_step_fit(job, cluster, self.task.assumptions)
        return self.fits[candidate]

    def excess(self, choice: ScheduleChoice) -> float:
        """The mean ratio of exact times to bounds in the replays of a schedule so far; for options that were
        not replayed, the least of the schedule. In some schedules ranks wait for each other more than in
        others, which bounds do not see.
        """
        variants = self._excess.get(choice.name, {})
        if choice in variants:
            return variants[choice][1]
        return min((mean for _, mean in variants.values()), default=_FIRST_EXCESS)

    def expected_seconds(self, candidate: Candidate) -> float:
        """Expected duration of computing a candidate's time and memory, as far as they are not known."""
        seconds = 0.0
        if candidate not in self.times:
            seconds += seconds_of("replay", self._actions(candidate))
        if candidate not in self.fits:
            seconds += seconds_of("memory", self._actions(candidate, short=True))
        return seconds

    def _actions(self, candidate: Candidate, short: bool = False) -> int:
        layout, choice = candidate.parallelism.layout, candidate.schedule
        microbatches = self.task.microbatches(candidate.parallelism)
        if updates_within(choice.name):
            microbatches *= 4  # a step, and the windows of `planner.time.step`
        if short:
            microbatches = min(microbatches, 2 * filling_microbatches(choice, layout.pp, microbatches))
        return max(1, _ACTIONS_PER_STAGE * depth_of(choice, layout.pp) * microbatches)

    def _replay(self, candidate: Candidate) -> Estimate:
        task, job = self.task, candidate.job(self.task)
        cluster = self.bounds.cluster(candidate.parallelism.layout.world)
        chosen = job.recompute.mode == "auto" or job.recompute.blocks is not None
        modes = memory_of(job).modes if chosen else None  # of each block
        precision = task.assumptions.products or precision_of(job)
        time = step_time(job, cluster, task.assumptions, precision, modes)
        # other ways of sharding states can make actions longer, never shorter; updates within the step too
        if job.dp.mode in ("ddp", "zero1") and not time.timeline.program.versions:
            key = candidate.parallelism, candidate.schedule, candidate.saving
            self._makespans[key] = time.timeline.makespan * cluster.correction
        return estimate_of(
            job=job,
            cluster=cluster,
            precision=precision,
            time=time,
            software=self.task.assumptions.software,
        )
