"""All combinations of choices for a model on a cluster.

`spec.rules.problems` alone decides what is legal. It first checks parts of a job (a layout without its
pipeline, for one microbatch), so that what no schedule can mend is dropped early, and whole jobs before they
are timed. What these functions leave out beyond that is named where it happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import gcd
from typing import Any

from stretto.errors import Problem, StrettoError
from stretto.layout.layout import Layout
from stretto.planner.machines.cluster import group_of
from stretto.planner.search.task import Candidate, Parallelism, Saving, ScheduleChoice, Task
from stretto.program import PLAIN, entry, names, schedule
from stretto.program import options as options_of
from stretto.program.program import Program
from stretto.program.schedules.traits import is_searched, sweeps, trains, updates_within
from stretto.spec.attention import ContextKind
from stretto.spec.data_parallel import DataParallel, Mode
from stretto.spec.job import Job, Recompute
from stretto.spec.rules import problems

_CHUNKS = (2, 3, 4, 6, 8, 12)  # stages of a rank; with more the bubble, small by then, hardly shrinks
_WAVES = (1, 2, 4)
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # samples; kernels are tuned for powers of two


class Space:
    """The choices of a task, and which rules refused how many of them."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.rejected: dict[str, tuple[int, str]] = {}
        self._known: dict[object, bool] = {}
        self._listed: dict[tuple[int, int], list[ScheduleChoice]] = {}
        self._shared: dict[Layout, Sequence[DataParallel]] = {}
        self._supported: dict[tuple[Mode, Saving], bool] = {}

    def chosen(self, name: str, usual: Iterable[Any]) -> tuple[Any, ...]:
        """The fixed values of a choice, else the usual ones; of these, what the pass is narrowed to."""
        fixed, among = self.task.fixed.get(name), self.task.narrowed.get(name)
        values = tuple(usual) if fixed is None else tuple(fixed)
        return values if among is None else tuple(value for value in values if value in among)

    # ------------------------------------------------------------------ splitting the layers

    def parallelisms(self) -> Iterator[Parallelism]:
        """Every legal layout with every size of a microbatch."""
        for layout, expert_tp in self.layouts():
            yield from self.parallelisms_of(layout, expert_tp)

    def parallelisms_of(self, layout: Layout, expert_tp: int | None) -> Iterator[Parallelism]:
        """A layout with every size of a microbatch; of those that the user has not fixed, powers of two."""
        each, rest = divmod(self.task.global_batch, layout.dp)
        if rest:
            rule = f"batch of {self.task.global_batch} over dp={layout.dp}"
            self.refuse("batch.global_size", f"{layout}: {rule}")
            return
        sizes = [n for n in _MICRO_BATCHES if each % n == 0]
        for micro in self.chosen("micro_batch", sizes):
            if each % micro:
                self.refuse("batch.micro_size", f"{layout}: {micro} of {each} samples a replica")
                continue
            yield from self._with_microbatch(layout, expert_tp, micro)

    def _with_microbatch(self, layout: Layout, expert_tp: int | None, micro: int) -> Iterator[Parallelism]:
        parallel = self.chosen("sequence_parallel", (False, True) if layout.tp > 1 else (False,))
        contexts = self.chosen("context", ("ring", "ulysses") if layout.cp > 1 else ("ring",))
        for sequence_parallel in parallel:
            for context in contexts:
                if self._split_is_legal(layout, expert_tp, sequence_parallel, context):
                    yield Parallelism(
                        layout=layout,
                        expert_tp=expert_tp,
                        micro_batch=micro,
                        sequence_parallel=sequence_parallel,
                        context=context,
                    )

    def layouts(self) -> Iterator[tuple[Layout, int | None]]:
        """Layouts, each with its expert_tp, whose size is the number of devices, or a divisor of it where
        fewer are allowed.
        """
        devices = self.task.devices
        for world in divisors(devices) if self.task.smaller else [devices]:
            for tp in self.chosen("tp", [n for n in divisors(world) if self._tp_is_legal(n)]):
                for pp in self.chosen("pp", divisors(world // tp if world % tp == 0 else 1)):
                    if world % (tp * pp) or not self._pp_is_legal(pp):
                        continue
                    for cp in self.chosen("cp", divisors(world // tp // pp)):
                        yield from self._with_experts(world, tp, pp, cp)

    def _with_experts(self, world: int, tp: int, pp: int, cp: int) -> Iterator[tuple[Layout, int | None]]:
        dp, rest = divmod(world, tp * pp * cp)
        if rest or dp not in self.chosen("dp", (dp,)):
            return
        moe = self.task.shape.moe
        experts = [1] if moe is None else [n for n in divisors(moe.experts) if tp * cp * dp % n == 0]
        for ep in self.chosen("ep", experts):
            widths = (None, 1) if ep > 1 and tp > 1 else (None,)
            for expert_tp in self.chosen("expert_tp", widths):
                try:
                    yield (
                        Layout(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, expert_tp=expert_tp if ep > 1 else None),
                        expert_tp,
                    )
                except StrettoError as error:
                    self.refuse("layout.ep", error.message)

    def _tp_is_legal(self, tp: int) -> bool:
        return self._split_is_legal(Layout(tp=tp), None, False, "ring")

    def _pp_is_legal(self, pp: int) -> bool:
        job = replace(self._job(Layout(pp=pp), None, False, "ring"), schedule=PLAIN)
        return self._legal(("pp", pp), job)

    def _split_is_legal(
        self, layout: Layout, expert_tp: int | None, sequence_parallel: bool, context: ContextKind
    ) -> bool:
        """Whether layers may be split in this way, whatever the pipeline and the batch."""
        key = (layout.tp, layout.cp, layout.ep, layout.dp, expert_tp, sequence_parallel, context)
        if key not in self._known:
            flat = replace(layout, pp=1)
            self._legal(key, self._job(flat, expert_tp, sequence_parallel, context))
        return self._known[key]

    def _job(
        self, layout: Layout, expert_tp: int | None, sequence_parallel: bool, context: ContextKind
    ) -> Job:
        return replace(
            self.task.job,
            layout=layout,
            global_batch=layout.dp,
            micro_batch=1,
            expert_tp=expert_tp,
            sequence_parallel=sequence_parallel,
            context=context,
        )

    def _legal(self, key: object, job: Job) -> bool:
        legal = self._known.get(key)
        if legal is None:
            wrong = problems(job)
            legal = self._known[key] = not wrong
            if wrong:
                self.refuse(wrong[0].field, wrong[0].message)
        return legal

    def refuse(self, field: str, example: str) -> None:
        """Count a choice that a rule refused."""
        count, first = self.rejected.get(field, (0, example))
        self.rejected[field] = (count + 1, first)

    def illegal(self, job: Job, what: str) -> list[Problem]:
        """What is wrong with a whole job, here or for the framework that the plan is for; counted."""
        wrong = problems(job)
        if not wrong and self.task.refusals is not None:
            wrong = list(self.task.refusals(job))
        if wrong:
            self.refuse(wrong[0].field, f"{what}: {wrong[0].message}")
        return wrong

    # ------------------------------------------------------------------ schedules

    def schedules(self, parallelism: Parallelism) -> Sequence[ScheduleChoice]:
        """Schedules with their options for a layout and its number of microbatches. Some may not exist
        (`is_made`), which only their programs tell.
        """
        layout = parallelism.layout
        microbatches = self.task.global_batch // (layout.dp * parallelism.micro_batch)
        key = layout.pp, microbatches
        if key not in self._listed:
            self._listed[key] = self._schedules(*key)
        return self._listed[key]

    def is_made(self, choice: ScheduleChoice, pp: int) -> bool:
        """Whether a schedule exists for so many ranks, with no more stages than layers."""
        return 0 < depth_of(choice, pp) <= self.task.shape.chain

    def _schedules(self, pp: int, microbatches: int) -> list[ScheduleChoice]:
        choices = list[ScheduleChoice]()
        for name in self.chosen("schedule", [name for name in names() if self._is_considered(name, pp)]):
            for options in self._options(name, pp, microbatches):
                values = dict(options)
                # more stages than layers, which the rules would refuse after the program is made
                if max(values.get("chunks", 1), 2 * values.get("waves", 0)) * pp > self.task.shape.chain:
                    continue
                choices.append(ScheduleChoice(name, options))
        return choices

    def _is_considered(self, name: str, pp: int) -> bool:
        """Whether a schedule is considered where the user has not fixed one."""
        if not entry(name).planned or not trains(name):
            return False
        if updates_within(name):
            return self.task.asynchronous
        if is_searched(name) and not self.task.searched:
            return False
        # on one pipeline rank schedules differ only in when they gather sharded weights
        return pp > 1 or name == PLAIN or (self.task.wide and sweeps(name))

    def _options(self, name: str, pp: int, microbatches: int) -> Iterator[tuple[tuple[str, Any], ...]]:
        taken = options_of(name)
        groups: tuple[int | None, ...] = (None,)
        groups += tuple(n * pp for n in entry(name).groups if n * pp <= microbatches)
        usual = {
            "chunks": (None,) if is_searched(name) else _CHUNKS,
            "group": groups,
            "waves": _WAVES,
            "vertical_sync": (None,),
        }
        here = [(option, self.chosen(option, usual[option])) for option in usual if option in taken]
        if any(option not in taken and option in self.task.fixed for option in ("chunks", "group", "waves")):
            return
        combinations: list[tuple[tuple[str, Any], ...]] = [()]
        for option, values in here:
            combinations = [(*chosen, (option, value)) for chosen in combinations for value in values]
        for chosen in combinations:
            yield tuple((option, value) for option, value in chosen if value is not None)

    # ------------------------------------------------------------------ sharding states

    def sharings(self, layout: Layout) -> Sequence[DataParallel]:
        """How ranks with the same parameters shard states: over all of them, or over those of a node."""
        if layout not in self._shared:
            self._shared[layout] = self._sharings(layout)
        return self._shared[layout]

    def _sharings(self, layout: Layout) -> Sequence[DataParallel]:
        copies = layout.cp * layout.dp
        if copies == 1 and "mode" not in self.task.fixed:
            return (DataParallel(mode="ddp"),)
        local = gcd(group_of(layout, "cp-dp", self.task.cluster.node).local, copies)
        sharings = list[DataParallel]()
        # beside a pipeline, zero2 and zero3 communicate for every microbatch or stage
        all_modes = layout.pp == 1 or self.task.wide
        usual = ("ddp", "zero1", "zero2", "zero3") if all_modes else ("ddp", "zero1")
        for mode in self.chosen("mode", usual):
            fixed = {n: self.task.fixed[n][0] for n in _SHARDS if n in self.task.fixed}
            if fixed:
                sharings.append(DataParallel(mode=mode, **fixed))
                continue
            sharings.append(DataParallel(mode=mode))
            if not 1 < local < copies or "shard_states" in self.task.narrowed:
                continue
            if mode in ("zero1", "zero2", "zero3"):
                sharings.append(DataParallel(mode=mode, shard_states=local))
            if mode in ("zero2", "zero3"):
                sharings.append(DataParallel(mode=mode, shard_gradients=local))
            if mode == "zero3":
                sharings.append(DataParallel(mode=mode, shard_gradients=copies, shard_parameters=local))
        return sharings

    # ------------------------------------------------------------------ saving memory

    def first_saving(self) -> Saving:
        """The first rung of a ladder of savings."""
        modes = self.chosen("recompute", ("none",))
        mode = min(modes, key=("none", "selective", "full", "auto").index)
        blocks = self.chosen("blocks", (None,))[0]
        memory_budget = self.chosen("memory_gib", (None,))[0]
        offload = self.chosen("offload", ("none",))[0]
        parameters = self.chosen("offload_parameters", ("none",))[0]
        return Saving(Recompute(mode, blocks, memory_gib=memory_budget), offload, parameters)

    def ladder(self, saving: Saving, blocks: int, dp: DataParallel) -> list[list[Saving]]:
        """Rows of savings from this one on. Along a row less and less is held, and more and more is
        recomputed; from row to row more is kept off the device.

        A candidate is considered if the one before it in its row does not surely fit, or, for the first of a
        row, the first of the row before.

        Args:
            blocks: the most blocks of a stage.
        """
        places = [(saving.offload, saving.parameters)]
        if "offload" not in self.task.fixed and saving.offload == "none" and self.task.wide:
            places.append(("cpu", saving.parameters))
        free = "offload_parameters" not in self.task.fixed and saving.parameters == "none"
        if free and dp.mode == "zero3" and places[-1][0] == "cpu" and self.task.wide:
            places.append(("cpu", "cpu"))
        again = list(self._recomputations(saving.recompute, blocks))
        rows = [[Saving(one, *parallelism) for one in again] for parallelism in places]
        if self.task.refusals is None:
            return rows
        supported = [[s for s in row if self._is_supported(s, dp.mode)] for row in rows]
        return list(filter(None, supported)) or [[saving]]  # which is refused as a whole job, with the reason

    def _is_supported(self, saving: Saving, mode: Mode) -> bool:
        """Whether the framework that the plan is for can save memory this way in any layout."""
        key = mode, saving
        if self.task.refusals is not None and key not in self._supported:
            devices = self.task.devices
            parallelism = Parallelism(
                layout=Layout(dp=devices),
                expert_tp=None,
                micro_batch=1,
                sequence_parallel=False,
                context="ring",
            )
            candidate = Candidate(parallelism, ScheduleChoice(PLAIN), DataParallel(mode=mode), saving)
            wrong = self.task.refusals(replace(candidate.job(self.task), global_batch=devices))
            self._supported[key] = not any(one.field.startswith(("recompute", "dp.offload")) for one in wrong)
        return self._supported[key]

    def _recomputations(self, now: Recompute, blocks: int) -> Iterator[Recompute]:
        """Recomputation from `now` on, less to more."""
        yield now
        modes = self.chosen("recompute", ("none", "selective", "full"))
        if now.mode not in ("none", "selective", "full"):
            return
        explicit = self.task.job.attention == "explicit" or self.task.shape.dropout > 0
        if now.mode == "none" and explicit and "selective" in modes:
            yield Recompute("selective")
        ended = now.mode == "full" and (now.blocks is None or "blocks" in self.task.fixed)
        if ended or "full" not in modes:
            return
        for more in range((now.blocks or 0) + 1, blocks):
            yield Recompute("full", more)
        yield Recompute("full")


_SHARDS = ("shard_states", "shard_gradients", "shard_parameters")


@lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(d for d in range(1, n + 1) if n % d == 0)


@lru_cache(maxsize=4096)
def small_program(choice: ScheduleChoice, pp: int, microbatches: int = 2) -> Program | None:
    """The program for few microbatches, which has the placement of the program for many; None: the schedule
    does not exist for these ranks. For `auto` the plain schedule stands in.
    """
    options = {name: value for name, value in choice.options if name != "group"}
    if is_searched(choice.name):
        return schedule(PLAIN, pp, microbatches)
    try:
        return schedule(choice.name, pp, microbatches, **options)
    except StrettoError:
        return None


def depth_of(choice: ScheduleChoice, pp: int) -> int:
    """Stages of the model; 0: the schedule does not exist for these ranks."""
    program = small_program(choice, pp)
    return program.depth if program else 0
