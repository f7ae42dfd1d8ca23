"""Exact times of candidates, and what one replay tells of others."""

from __future__ import annotations

from stretto.planner.estimate import precision_of
from stretto.planner.memory.job import memory_of
from stretto.planner.search.space import depth_of
from stretto.planner.search.task import Candidate, Order, Place, Saving, Task
from stretto.planner.search.time_bounds import Bounds
from stretto.planner.time.step import stages_of, step_time
from stretto.program.program import Program
from stretto.spec.flops import Recompute as Mode
from stretto.spec.job import Job
from stretto.spec.reduction import reduction


class Replays:
    """The replays of one search."""

    def __init__(self, task: Task, bounds: Bounds) -> None:
        self.task, self.bounds = task, bounds
        self.done = dict[Candidate, float]()
        self._makespans = dict[tuple[Place, Order, Saving], float]()

    @property
    def count(self) -> int:
        """Candidates replayed."""
        return len(self.done)

    def bound(self, candidate: Candidate, job: Job) -> float:
        """The best lower bound on its seconds before it is replayed itself: that with its program, and the
        makespan of another that keeps states in another way.
        """
        bound = self.bounds.candidate(candidate, job, *_program(job))
        return max(bound, self._makespans.get((candidate.place, candidate.order, candidate.saving), 0.0))

    def replay(self, candidate: Candidate, job: Job) -> float:
        """Seconds of a step."""
        assumptions = self.task.assumptions
        cluster = self.bounds.cluster(candidate.place.layout.world)
        modes = memory_of(job).modes if job.recompute.mode == "auto" else self._modes(candidate)
        time = step_time(job, cluster, assumptions, precision_of(job), modes)
        # another way of keeping states can make actions longer, and never shorter
        if job.dp.mode in ("ddp", "zero1"):
            key = candidate.place, candidate.order, candidate.saving
            self._makespans[key] = time.timeline.makespan * cluster.correction
        self.done[candidate] = time.seconds * cluster.correction
        return self.done[candidate]

    def _modes(self, candidate: Candidate) -> list[Mode] | None:
        """How each block is recomputed, where only some of a stage are."""
        most, shape = candidate.saving.recompute.blocks, self.task.shape
        if most is None:
            return None
        modes: list[Mode] = ["none"] * shape.layers
        depth = depth_of(candidate.order, candidate.place.layout.pp)
        for stage in stages_of(shape, self.task.sequence, depth):
            for layer in [layer for layer in stage if 1 <= layer <= shape.layers][:most]:
                modes[layer - 1] = "full"
        return modes


def _program(job: Job) -> tuple[bool, Program | None]:
    """Whether gradients are reduced with each microbatch, and the program where a bound looks at it."""
    if job.dp.mode not in ("zero2", "zero3"):
        return False, None
    program = job.program()
    return reduction(program, job.dp.mode, job.dp.reduce) == "microbatch", program
