"""Every legal layout of a number of ranks, with everything that can run on it.

The product of layouts, features, schedules and ways of sharding states has thousands of cases. Enough of them
are chosen that each layout is proved with each combination of features and with each way of sharding, each
schedule on each tp x cp x dp x pp, and each schedule with each value of each feature and of sharding, and
these with each other: a bug of one part, or of two that meet, is seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from stretto.errors import Problem
from stretto.job.attention import ContextKind
from stretto.job.job import Job, RecomputeMode
from stretto.job.rules import problems
from stretto.program import names, options
from stretto.program.program import Program
from stretto.verify.language.cases import (
    dense_layouts,
    describe_layout,
    divisors,
    one_process,
    quick,
    unusual_sharding,
    vary,
)
from stretto.verify.run import Impossible

_LOSS_CHUNK = 13  # tokens: several chunks of a microbatch, the last of them a part

Way = dict[str, Any]  # fields of a case that are not as usual

_ALONE: tuple[Way, ...] = ({}, {"offload": "cpu"}, {"offload": "nvme"})

_SHARED: tuple[Way, ...] = (
    *_ALONE,
    {"mode": "server"},
    {"mode": "server", "offload": "cpu"},
    {"mode": "zero1"},
    {"mode": "zero1", "offload": "cpu"},
    {"mode": "zero1", "offload": "nvme"},
    {"mode": "zero2", "reduce": "step"},
    {"mode": "zero2", "reduce": "microbatch", "offload": "cpu"},
    {"mode": "zero2", "reduce": "step", "offload": "nvme"},
    {"mode": "zero3", "reduce": "microbatch", "gather": "layer"},
    {"mode": "zero3", "reduce": "step", "gather": "stage"},
    {"mode": "zero3", "reduce": "step", "gather": "layer", "offload": "cpu", "offload_parameters": "cpu"},
    {"mode": "zero3", "reduce": "microbatch", "gather": "stage", "offload": "nvme"},
    {"mode": "zero3", "reduce": "microbatch", "gather": "layer", "offload_parameters": "nvme"},
)


def ways(copies: int) -> Iterator[Way]:
    """The ways of sharding and offloading to prove where `copies` ranks hold the same parameters; a single
    copy cannot be sharded.
    """
    yield from _SHARED if copies > 1 else _ALONE
    part = next((n for n in range(2, copies) if copies % n == 0), None)
    if part is not None:
        yield {"mode": "zero1", "shard_states": part}
        yield {"mode": "zero2", "reduce": "microbatch", "shard_gradients": part}
        yield {"mode": "zero3", "gather": "layer", "reduce": "step", "shard_parameters": part}
        yield {"mode": "zero3", "gather": "stage", "reduce": "microbatch", "shard_states": part}
        yield {"mode": "zero3", "gather": "layer", "reduce": "microbatch", "shard_gradients": part}


def values(way: Way) -> set[str]:
    """What is to be met with each schedule and each feature: the mode, and what changes the order of things:
    when gradients are reduced, what is gathered at once, where the states are.
    """
    return {way.get("mode", "ddp"), *(f"{name}={way[name]}" for name in _MET if name in way)}


_MET = ("reduce", "gather", "offload")


_MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")


class Every:
    """All cases of a job for a number of ranks.

    Attributes:
        cases: what is to be proved; those of the same layout and program, action by action, follow each
            other.
        impossible: what cannot be, by reason.
    """

    def __init__(self, job: Job, ranks: int, full: bool = False) -> None:
        """Find the legal cases and choose those to prove.

        Args:
            job: whose model and batch all cases have.
            full: take the full product instead of a cover.
        """
        self.job = job
        self._reasons = dict[str, Impossible]()
        shapes = [self._shape(*sizes) for sizes in dense_layouts(ranks)]
        if job.shape.moe is None:
            self._leave_out("layout.ep is above 1: the model has no experts", "every layout")
        legal = [shape for shape in shapes if shape.cells and shape.classes]
        chosen = [_product(shape) for shape in legal] if full else cover(legal)
        self.cases = [case for cases in chosen for case in cases]
        self.impossible = list(self._reasons.values())

    def _leave_out(self, reason: str, label: str) -> None:
        left_out = self._reasons.setdefault(reason, Impossible(reason)).left_out
        if label not in left_out:
            left_out.append(label)

    def _shape(self, tp: int, cp: int, dp: int, pp: int) -> Shape:
        """Return the legal cases on these sizes."""
        base = one_process(self.job, tp=tp, cp=cp, dp=dp, pp=pp)
        if broken := [p for p in problems(base) if p.field != "schedule"]:
            self._leave_out(broken[0].message, describe_layout(base))
            return Shape([], [], [])
        cells = list[Job]()
        for cell in self._cells(base):
            if broken := problems(cell):
                experts = vary(base, ep=cell.layout.ep, expert_tp=cell.expert_tp)
                self._leave_out(broken[0].message, describe_layout(experts))
            else:
                cells.append(cell)
        classes = self._classes(base)
        return Shape(cells, classes, self._ways(classes))

    def _cells(self, base: Job) -> Iterator[Job]:
        """Everything that is not the schedule: experts and features."""
        split = (False, True) if base.layout.tp > 1 else (False,)
        contexts: tuple[ContextKind, ...] = ("ring", "ulysses") if base.layout.cp > 1 else ("ring",)
        for experts, sp, context, mode in product(self._experts(base), split, contexts, _MODES):
            ep, expert_tp = experts
            used: dict[str, Any] = {"sequence_parallel": sp, "context": context, "recompute": mode}
            if self.job.loss_chunk != 0:  # else off; null is off at these sizes, and on at those of a job
                used["loss_chunk"] = _LOSS_CHUNK if mode == "selective" else 0
            cell = vary(base, ep=ep, expert_tp=expert_tp, **used)
            yield cell
            if mode == "full" and base.layout.tp > 1 and not sp:
                yield vary(cell, shard_inputs=True)

    def _ways(self, classes: Sequence[Sequence[Job]]) -> list[list[Way]]:
        """The legal ways of sharding for each class; those that update after the step have the same."""
        common_ways, by_class = list[Way](), list[list[Way]]()
        for case, *_ in classes:
            late = bool(case.program().versions)
            by_class.append(self._legal(case) if late or not common_ways else common_ways)
            common_ways = common_ways if late else by_class[-1]
        return by_class

    def _legal(self, case: Job) -> list[Way]:
        legal = list[Way]()
        for way in ways(case.copies):
            if broken := problems(vary(case, **way)):
                self._leave_out(_reason(broken[0], case.schedule), describe_layout(case))
            else:
                legal.append(way)
        return legal

    def _experts(self, base: Job) -> list[tuple[int, int | None]]:
        """Sizes of ep and expert_tp that the ranks allow."""
        if self.job.shape.moe is None:
            return [(1, None)]
        tp = base.layout.tp
        ranks = tp * base.copies
        sizes: list[tuple[int, int | None]] = [(1, None)]
        for ep in divisors(ranks)[1:]:
            sizes += [(ep, None if n == tp else n) for n in divisors(ranks // ep)]
        return sizes

    def _classes(self, base: Job) -> list[list[Job]]:
        """The legal schedules with their options; those with one program together."""
        classes = dict[object, list[Job]]()
        for name in names():
            if broken := problems(vary(base, schedule=name, options=quick(name))):
                by_pp = broken[0].field == "layout.pp"
                self._leave_out(_reason(broken[0], name), name if by_pp else describe_layout(base))
            for choices in _choices(name, base.layout.pp):
                tried = (vary(base, schedule=name, options=chosen) for chosen in choices)
                legal = next((case for case in tried if not problems(case)), None)
                if legal is not None:
                    key = content(legal.program())
                    if legal not in (together := classes.setdefault(key, [])):
                        together.append(legal)
        return list(classes.values())


@dataclass
class Shape:
    """Of one tp x cp x dp x pp: its cells (with the usual schedule), its classes of schedules with one
    program, and for each class the ways of sharding states.
    """

    cells: list[Job]
    classes: list[list[Job]]
    ways: list[list[Way]]

    @cached_property
    def sharded(self) -> list[list[list[Job]]]:
        """For each class and each of its ways the cells in this way. Many classes have the same ways."""
        every_way = {str(way): way for legal in self.ways for way in legal}
        cells = {key: [vary(cell, **way) for cell in self.cells] for key, way in every_way.items()}
        return [[cells[str(way)] for way in legal] for legal in self.ways]


def content(program: Program) -> object:
    """Return everything of a program that ranks carry out."""
    return program.placement, program.orders, program.copies, program.pairs, program.versions


def _reason(problem: Problem, schedule: str) -> str:
    """Return a reason in words that are the same for all layouts."""
    return f"schedule {schedule}: {problem.rule}" if problem.field == "schedule" else problem.message


def _product(shape: Shape) -> list[Job]:
    return [
        _on(vary(cell, **way), schedule)
        for cell in shape.cells
        for together, legal in zip(shape.classes, shape.ways, strict=True)
        for schedule in together
        for way in legal
    ]


def _on(cell: Job, schedule: Job) -> Job:
    return vary(cell, schedule=schedule.schedule, options=schedule.options)


Pairs = set[tuple[object, object]]


def cover(shapes: Sequence[Shape]) -> list[list[Job]]:
    """Of each shape cases such that every cell, every class and every way is there, and over all shapes every
    schedule with every value of every feature and of sharding that it can meet. Greedy: each time what brings
    most that is new.
    """
    covered: Pairs = set()
    chosen = [_cells_and_classes(shape, covered) for shape in shapes]
    for shape, cases in zip(shapes, chosen, strict=True):
        for together, sharded in zip(shape.classes, shape.sharded, strict=True):
            for cell, *in_ways in zip(shape.cells, *sharded, strict=True):
                if any(_scheduled(cell, [schedule]) - covered for schedule in together):
                    cases += _take(_newest(in_ways, together, covered), together, covered)
            for cells in sharded:
                cell = _newest(cells, together, covered)
                cases += _take(cell, together if cell.layout.pp > 1 else together[:1], covered)
    return chosen


def _cells_and_classes(shape: Shape, covered: Pairs) -> list[Job]:
    """Each cell with some class and each class with some cell, each in some way."""
    cases, spare = list[Job](), list(shape.cells)
    used = dict.fromkeys(range(len(shape.classes)), 0)
    for at, together in enumerate(shape.classes):
        cell = _newest(spare or shape.cells, together, covered)
        in_ways = [cells[shape.cells.index(cell)] for cells in shape.sharded[at]]
        cases += _take(_newest(in_ways, together, covered), together, covered, new=False)
        used[at] += 1
        spare = [other for other in spare if other is not cell]
    for cell in spare:
        gains = [len(_pairs(cell, together[:1]) - covered) for together in shape.classes]
        at = max(used, key=lambda i, gains=gains: (gains[i], -used[i]))
        together, used[at] = shape.classes[at], used[at] + 1
        schedules = [together[used[at] % len(together)]]
        in_ways = [cells[shape.cells.index(cell)] for cells in shape.sharded[at]]
        cases += _take(_newest(in_ways, schedules, covered), schedules, covered, new=False)
    return cases


def _newest(cells: Sequence[Job], together: Sequence[Job], covered: Pairs) -> Job:
    return max(cells, key=lambda cell: len(_pairs(cell, together) - covered))


def _take(cell: Job, together: Sequence[Job], covered: Pairs, new: bool = True) -> list[Job]:
    """The cell with these schedules; with those alone to which it is `new`."""
    taken = [schedule for schedule in together if not new or _pairs(cell, [schedule]) - covered]
    covered |= _pairs(cell, taken)
    return [_on(cell, schedule) for schedule in taken]


def _pairs(cell: Job, together: Sequence[Job]) -> Pairs:
    """What meets: each schedule with each value of a feature and of sharding, these with each other, and all
    of the sharding with the sizes of the axes.
    """
    if not together:
        return set()
    way, layout = unusual_sharding(cell), cell.layout
    shared = {f"{value} {_pipelining(cell)}" for value in values(way)}
    # without a pipeline schedules of one program are one
    met = [case.schedule for case in (together if cell.layout.pp > 1 else together[:1])]
    pairs: Pairs = {*product(features(cell), shared), *product(shared, met), *_scheduled(cell, together)}
    return pairs | {((layout.tp, layout.cp, layout.dp, layout.pp), tuple(way.items()))}


def _scheduled(cell: Job, together: Sequence[Job]) -> Pairs:
    """Each schedule with each value of a feature."""
    return {(case.schedule, value) for case in together for value in features(cell)}


def features(case: Job) -> set[str]:
    """The values of the features that the case has a choice in; with and without a pipeline they are two."""
    recompute, layout = case.recompute, case.layout
    values = {f"recompute={recompute.mode}"} | ({"shard_inputs"} if recompute.shard_inputs else set())
    if layout.tp > 1:
        values.add("sp" if case.sequence_parallel else "tp")
    if layout.cp > 1:
        values.add(case.context)
    if layout.ep > 1:
        values.add("ep")
    return {f"{value} {_pipelining(case)}" for value in values}


def _pipelining(case: Job) -> str:
    return "pipelined" if case.layout.pp > 1 else "alone"


def _choices(name: str, pp: int) -> list[list[dict[str, Any]]]:
    """The options to prove a schedule with, each time the first that is legal."""
    schedule_options, other = options(name), dict[str, Any]()
    base = quick(name)
    for option, value in _OTHER.items():
        if option in schedule_options:
            other[option] = value(pp)
    if not other:
        return [[base]]
    # all of them at once, or as many as the model and the batch allow
    fewer = (
        [{k: v for k, v in other.items() if k != left_out} for left_out in other] if len(other) > 1 else []
    )
    return [[base], [{**base, **changes} for changes in (other, *fewer)]]


# values that are no schedule's default, by pipeline ranks
_OTHER = {
    "chunks": lambda pp: 3,
    "group": lambda pp: pp + 1,
    "waves": lambda pp: 2,
    "vertical_sync": lambda pp: True,
    "memory": lambda pp: 1.0 + pp // 2,
    "split": lambda pp: False,
}
