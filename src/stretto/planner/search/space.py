"""All combinations of choices for a model on a cluster.

`job.rules.problems` alone decides what is legal. It first checks parts of a job (a layout without its
pipeline, for one microbatch), so that what no schedule can mend is dropped early, and complete jobs before
they are timed. What these functions leave out beyond that is named at its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import gcd, prod
from typing import Any

from stretto.errors import Problem, StrettoError
from stretto.job.attention import ContextKind
from stretto.job.chain import block_kinds, is_block, layer_of
from stretto.job.data_parallel import DataParallelSettings, Mode
from stretto.job.job import Job, Recompute
from stretto.job.rules import problems
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.planner.machines.cluster import group_of
from stretto.planner.search.task import Parallelism, Saving, ScheduleChoice, SearchTask
from stretto.program import PLAIN, entry, names, schedule
from stretto.program import options as options_of
from stretto.program.program import Program
from stretto.program.schedules.traits import is_searched, sweeps, trains, updates_within

_CHUNKS = (2, 3, 4, 6, 8, 12)  # stages of a rank; with more the bubble, small by then, hardly shrinks
_WAVES = (1, 2, 4)
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # samples; kernels are tuned for powers of two


class Space:
    """The search space of a task, with counts of candidates rejected by each rule."""

    def __init__(self, task: SearchTask) -> None:
        self.task = task
        self.rejected: dict[str, tuple[int, str]] = {}
        self._problems: dict[object, list[Problem]] = {}
        self._counted: set[object] = set()
        self._schedules: dict[tuple[int, int], list[ScheduleChoice]] = {}
        self._sharings: dict[object, Sequence[DataParallelSettings]] = {}
        self._supported: dict[tuple[Mode, Saving], bool] = {}
        self._savings: dict[tuple[Saving, int, Mode], list[list[Saving]]] = {}

    def values(self, name: str, defaults: Iterable[Any]) -> tuple[Any, ...]:
        """The fixed values of a choice, else the defaults; of these, what the pass is narrowed to."""
        fixed, narrowed = self.task.fixed.get(name), self.task.narrowed.get(name)
        values = tuple(defaults) if fixed is None else tuple(fixed)
        return values if narrowed is None else tuple(value for value in values if value in narrowed)

    # ------------------------------------------------------------------ splitting the layers

    def parallelisms_of(self, layout: Layout, expert_tp: int | None) -> Iterator[Parallelism]:
        """A layout with every split of its layers and size of a microbatch."""
        samples, remainder = divmod(self.task.global_batch, layout.dp)
        if remainder:
            rule = f"{layout.dp} replicas do not divide a batch of {self.task.global_batch}"
            self.reject("batch.global_size", f"{layout.describe()}: {rule}")
            return
        splits = self.splits(layout, expert_tp)
        for micro in self.micro_batches(samples):
            if samples % micro:
                rule = f"microbatches of {micro} do not divide the {samples} samples of a replica"
                self.reject("batch.micro_size", f"{layout.describe()}: {rule}")
                continue
            for split in splits:
                yield replace(split, micro_batch=micro)

    def micro_batches(self, samples: int) -> tuple[int, ...]:
        """Sizes of a microbatch: those that the user has fixed, else powers of two that divide `samples`."""
        return self.values("micro_batch", [n for n in _MICRO_BATCHES if samples % n == 0])

    def splits(self, layout: Layout, expert_tp: int | None) -> list[Parallelism]:
        """The ways to split the layers of a layout over its ranks, with one sample in a microbatch."""
        parallel = self.values("sequence_parallel", (False, True) if layout.tp > 1 else (False,))
        contexts = self.values("context", ("ring", "ulysses") if layout.cp > 1 else ("ring",))
        return [
            Parallelism(
                layout=layout,
                expert_tp=expert_tp,
                micro_batch=1,
                sequence_parallel=sequence_parallel,
                context=context,
            )
            for sequence_parallel, context in product(parallel, contexts)
            if self._split_is_legal(layout, expert_tp, sequence_parallel, context)
        ]

    def layouts(self) -> Iterator[tuple[Layout, int | None]]:
        """Layouts, each with its expert_tp, whose size is the number of devices, or with `Task.smaller` a
        divisor of it.
        """
        devices = self.task.devices
        for world in divisors(devices) if self.task.smaller else [devices]:
            fixed = [prod(n) for n in product(*(self.values(name, (1,)) for name in ("pp", "cp", "dp")))]
            for tp in self.values("tp", divisors(world)):
                if all(world % (tp * n) for n in fixed):
                    continue
                if not self._split_is_legal(Layout(tp=tp), None, False, "ring"):
                    continue
                for pp in self.values("pp", divisors(world // tp)):
                    if pp not in self._problems:
                        job = replace(self._job(Layout(pp=pp), None, False, "ring"), schedule=PLAIN)
                        self._problems[pp] = problems(job)
                    if world % (tp * pp) or not self._is_legal(pp, self._problems[pp]):
                        continue
                    for cp in self.values("cp", divisors(world // tp // pp)):
                        dp, remainder = divmod(world, tp * pp * cp)
                        if not remainder and dp in self.values("dp", (dp,)):
                            yield from self._with_experts(tp, pp, cp, dp)

    def _with_experts(self, tp: int, pp: int, cp: int, dp: int) -> Iterator[tuple[Layout, int | None]]:
        moe = self.task.shape.moe
        sizes = [1] if moe is None else [n for n in divisors(moe.experts) if tp * cp * dp % n == 0]
        for ep in self.values("ep", sizes):
            for expert_tp in self.values("expert_tp", (None, 1) if ep > 1 and tp > 1 else (None,)):
                inner = expert_tp if ep > 1 else None
                try:
                    yield Layout(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, expert_tp=inner), expert_tp
                except StrettoError as error:
                    self.reject("layout.ep", error.message)

    def _split_is_legal(
        self, layout: Layout, expert_tp: int | None, sequence_parallel: bool, context: ContextKind
    ) -> bool:
        """True if the layers of a layout without a pipeline may be split in this way, for any batch."""
        # no rule depends on the replicas, but each number of them counts
        split = layout.tp, layout.cp, layout.ep, expert_tp, sequence_parallel, context
        if split not in self._problems:
            flat = replace(layout, pp=1)
            self._problems[split] = problems(self._job(flat, expert_tp, sequence_parallel, context))
        return self._is_legal((split, layout.dp), self._problems[split])

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

    def _is_legal(self, choice: object, wrong: Sequence[Problem]) -> bool:
        """True if a choice has no problems; else it is counted once."""
        if wrong and choice not in self._counted:
            self._counted.add(choice)
            self.reject(wrong[0].field, wrong[0].message)
        return not wrong

    def reject(self, field: str, example: str) -> None:
        """Count a choice that a rule rejected."""
        count, earlier_example = self.rejected.get(field, (0, example))
        self.rejected[field] = (count + 1, earlier_example)

    def illegal(self, job: Job, description: str) -> list[Problem]:
        """The problems of a complete job, for training or for the framework of the plan; counted."""
        wrong = problems(job)
        if not wrong and self.task.refusals is not None:
            wrong = list(self.task.refusals(job))
        if wrong:
            self.reject(wrong[0].field, f"{description}: {wrong[0].message}")
        return wrong

    # ------------------------------------------------------------------ schedules

    def schedules(self, parallelism: Parallelism) -> Sequence[ScheduleChoice]:
        """Schedules with their options for a layout and its number of microbatches. Some may not exist
        (`exists`), which only their programs tell.
        """
        key = parallelism.layout.pp, self.task.microbatches(parallelism)
        if key not in self._schedules:
            considered = [name for name in names() if self._is_considered(name, key[0])]
            considered.sort(key=lambda name: name != PLAIN)  # the first is the example of what does not fit
            self._schedules[key] = [
                ScheduleChoice(name, options)
                for name in self.values("schedule", considered)
                for options in self._options(name, *key)
            ]
        return self._schedules[key]

    def exists(self, choice: ScheduleChoice, pp: int) -> bool:
        """True if a schedule exists for this number of ranks, with no more stages than layers."""
        return 0 < depth_of(choice, pp) <= self.task.shape.chain

    def _is_considered(self, name: str, pp: int) -> bool:
        """True if a schedule is considered without being fixed by the user."""
        if not entry(name).planned or not trains(name):
            return False
        if updates_within(name):
            return self.task.asynchronous
        if is_searched(name) and not self.task.searched:
            return False
        # on one pipeline rank schedules differ only in when they gather sharded weights
        return pp > 1 or name == PLAIN or (self.task.allow_offload and sweeps(name))

    def _options(self, name: str, pp: int, microbatches: int) -> Iterator[tuple[tuple[str, Any], ...]]:
        accepted = options_of(name)
        if any(
            option not in accepted and option in self.task.fixed for option in ("chunks", "group", "waves")
        ):
            return
        defaults = {
            "chunks": (None,) if is_searched(name) else _CHUNKS,
            "group": (None, *(n * pp for n in entry(name).groups if n * pp <= microbatches)),
            "waves": _WAVES,
            "vertical_sync": (None,),
        }
        options = [option for option in defaults if option in accepted]
        for values in product(*(self.values(option, defaults[option]) for option in options)):
            chosen = {o: v for o, v in zip(options, values, strict=True) if v is not None}
            # more stages than layers, which the rules would reject after the program is made
            if max(chosen.get("chunks", 1), 2 * chosen.get("waves", 0)) * pp <= self.task.shape.chain:
                yield tuple(chosen.items())

    # ------------------------------------------------------------------ sharding states

    def sharings(self, layout: Layout) -> Sequence[DataParallelSettings]:
        """Ways to shard states over ranks with the same parameters: over all of them, or those of a node."""
        key = layout.tp, layout.cp, layout.dp, layout.pp  # experts share the ranks of these
        if key not in self._sharings:
            self._sharings[key] = self._sharings_of(layout)
        return self._sharings[key]

    def _sharings_of(self, layout: Layout) -> Sequence[DataParallelSettings]:
        copies = layout.cp * layout.dp
        narrowed = self.task.narrowed.get("shard_states")
        if copies == 1 and "mode" not in self.task.fixed:
            return (DataParallelSettings(mode="ddp"),) if narrowed is None or None in narrowed else ()
        local = gcd(group_of(layout, "cp-dp", self.task.cluster.node).local, copies)
        sharings = list[DataParallelSettings]()
        # in a pipeline, zero2 and zero3 communicate for every microbatch or stage
        all_modes = layout.pp == 1 or self.task.allow_offload
        for mode in self.values("mode", ("ddp", "zero1", "zero2", "zero3")[: 4 if all_modes else 2]):
            fixed = {n: self.task.fixed[n][0] for n in _SHARDS if n in self.task.fixed}
            if fixed:
                sharings.append(DataParallelSettings(mode=mode, **fixed))
                continue
            sharings.append(DataParallelSettings(mode=mode))
            if not 1 < local < copies:
                continue
            if mode in ("zero1", "zero2", "zero3"):
                sharings.append(DataParallelSettings(mode=mode, shard_states=local))
            if mode in ("zero2", "zero3"):
                sharings.append(DataParallelSettings(mode=mode, shard_gradients=local))
            if mode == "zero3":
                sharings.append(
                    DataParallelSettings(mode=mode, shard_gradients=copies, shard_parameters=local)
                )
        if narrowed is None:
            return sharings
        only_states = [dp for dp in sharings if dp.shard_gradients is dp.shard_parameters is None]
        return [dp for dp in only_states if dp.shard_states in narrowed]

    # ------------------------------------------------------------------ saving memory

    def first_saving(self) -> Saving:
        """The option that saves least."""
        modes = self.values("recompute", ("none",))
        mode = min(modes, key=("none", "selective", "full", "auto").index)
        blocks = self.values("blocks", (None,))[0]
        memory_budget = self.values("memory_gib", (None,))[0]
        offload = self.values("offload", ("none",))[0]
        parameters = self.values("offload_parameters", ("none",))[0]
        return Saving(Recompute(mode, blocks, memory_gib=memory_budget), offload, parameters)

    def savings(self, saving: Saving, blocks: int, dp: DataParallelSettings) -> list[list[Saving]]:
        """Rows of savings from this one on. Along a row more and more is recomputed, so that less and less is
        held; from row to row more is offloaded.

        A candidate is considered if the one before it in its row does not surely fit, or, for the first of a
        row, the first of the row before.

        Args:
            blocks: the most blocks of a stage.
        """
        key = saving, blocks, dp.mode
        if key not in self._savings:
            self._savings[key] = self._savings_of(saving, blocks, dp)
        return self._savings[key]

    def _savings_of(self, saving: Saving, blocks: int, dp: DataParallelSettings) -> list[list[Saving]]:
        offloads = [(saving.offload, saving.parameters)]
        if self.task.allow_offload:
            if "offload" not in self.task.fixed and saving.offload == "none":
                offloads.append(("cpu", saving.parameters))
            free = "offload_parameters" not in self.task.fixed and saving.parameters == "none"
            if free and dp.mode == "zero3" and offloads[-1][0] == "cpu":
                offloads.append(("cpu", "cpu"))
        recomputations = list(self._recomputations(saving.recompute, blocks))
        rows = [[Saving(recompute, *offload) for recompute in recomputations] for offload in offloads]
        if self.task.refusals is None:
            return rows
        supported = [[s for s in row if self._is_supported(s, dp.mode)] for row in rows]
        return list(filter(None, supported)) or [[saving]]  # rejected as a complete job, with the reason

    def _is_supported(self, saving: Saving, mode: Mode) -> bool:
        """True if the framework of the plan can save memory this way in any layout."""
        key = mode, saving
        if self.task.refusals is not None and key not in self._supported:
            job = self._job(Layout(dp=self.task.devices), None, False, "ring")
            dp = replace(job.dp, mode=mode, offload=saving.offload, offload_parameters=saving.parameters)
            wrong = self.task.refusals(replace(job, recompute=saving.recompute, dp=dp))
            self._supported[key] = not any(p.field.startswith(("recompute", "dp.offload")) for p in wrong)
        return self._supported[key]

    def _recomputations(self, start: Recompute, blocks: int) -> Iterator[Recompute]:
        """Recomputation from `start` on, less to more."""
        yield start
        modes = self.values("recompute", ("none", "selective", "full"))
        if start.mode not in ("none", "selective", "full"):
            return
        explicit = self.task.job.attention == "explicit" or self.task.shape.dropout > 0
        if start.mode == "none" and explicit and "selective" in modes:
            yield Recompute("selective")
        ended = start.mode == "full" and (start.blocks is None or "blocks" in self.task.fixed)
        if ended or "full" not in modes:
            return
        for more in range((start.blocks or 0) + 1, blocks):
            yield Recompute("full", more)
        yield Recompute("full")


_SHARDS = ("shard_states", "shard_gradients", "shard_parameters")


@lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(d for d in range(1, n + 1) if n % d == 0)


@lru_cache(maxsize=4096)
def small_program(choice: ScheduleChoice, pp: int, microbatches: int = 2) -> Program | None:
    """The program for few microbatches, which has the placement of the program for many, or None if the
    schedule does not exist for these ranks. For `auto` it is the plain schedule's.
    """
    options = {name: value for name, value in choice.options if name != "group"}
    if len(options) < len(choice.options):
        return small_program(ScheduleChoice(choice.name, tuple(options.items())), pp, microbatches)
    if is_searched(choice.name):
        return schedule(PLAIN, pp, microbatches)
    user = entry(choice.name).user
    if user is not None and user.program is not None:
        return user.program if user.program.ranks == pp else None
    counts = (microbatches,) if user is None else (microbatches, 2 * pp)  # it may take multiples only
    for count in counts:
        try:
            return schedule(choice.name, pp, count, **options)
        except StrettoError:
            continue
    return None


def existing_program(choice: ScheduleChoice, pp: int) -> Program:
    """The small program of a schedule that exists for these ranks."""
    program = small_program(choice, pp)
    assert program is not None
    return program


@lru_cache(maxsize=64)
def first_blocks(shape: ModelShape) -> tuple[int, ...]:
    """The first layer of each kind of block."""
    blocks = [layer for layer in range(shape.chain) if is_block(shape, layer)]
    return tuple(
        next(layer for layer in blocks if layer_of(shape, layer).shape == kind)
        for kind, _ in block_kinds(shape)
    )


def depth_of(choice: ScheduleChoice, pp: int) -> int:
    """Number of stages of the model; 0 if the schedule does not exist for these ranks."""
    program = small_program(choice, pp)
    return program.depth if program else 0
