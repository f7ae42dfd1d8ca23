"""The best layouts of a model on a cluster.

A search has three passes, which share what they have computed. The first finds the layouts that people use
without a search (`planner.search.conventional`), with which the result is compared. The second looks at
conventional layouts only, so that something is known soon. The third looks at all legal candidates
(`planner.search.branch`), and starts with what the second has accepted. With enough time it proves that
nothing is faster; otherwise the plan says by how much an unexamined layout could be.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from math import gcd

from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.planner.memory.short_step import short_step_fit
from stretto.planner.search.branch import BranchAndBound, Progress
from stretto.planner.search.conventional import conventional, plain_layouts
from stretto.planner.search.deadline import Deadline
from stretto.planner.search.exact import Exact
from stretto.planner.search.ranking import (
    Feasible,
    Plan,
    Ranked,
    Tried,
    compared,
    gap,
    is_safe,
    nearest_to_fitting,
    ranked,
)
from stretto.planner.search.space import Space
from stretto.planner.search.task import RANKED, Task
from stretto.spec.rules import problems

# Shares of the time limit at which the passes end. Each plain layout gets an equal part of the first.
_PLAIN = 0.15
_CONVENTIONAL = 0.35
_WIDENED = 0.45  # where nothing fits by then, conventional layouts with offload
_ALL = 0.95  # then the leaders are verified
_SEEDS = 4  # families that the second pass accepts


def search(task: Task, progress: Progress | None = None) -> Plan:
    """The best layouts of the task, the best first.

    Where no conventional layout fits, states and parameters are sharded and offloaded in every way
    (`Task.wide`), and the plan says so.

    Args:
        progress: called now and then.

    Raises:
        StrettoError: the task itself is illegal, or no layout is legal with the fixed choices.
    """
    _check(task)
    # hundreds of thousands of lasting objects make each collection slow, and nothing here is cyclic
    collects = gc.isenabled()
    gc.disable()
    try:
        return _Search(task, progress).plan()
    finally:
        if collects:
            gc.enable()


class _Search:
    """The passes of one search."""

    def __init__(self, task: Task, progress: Progress | None) -> None:
        self.task, self.progress = task, progress
        self.deadline, self.exact = Deadline(task.seconds), Exact(task)

    def plan(self) -> Plan:
        """Run all passes."""
        plain = self._plain()
        known, cut_short = self._conventional(self.task, until=_CONVENTIONAL)
        widened = False
        if not known and not self.task.wide:
            known, _ = self._conventional(replace(self.task, wide=True), until=_WIDENED)
            widened = not cut_short  # else something may fit without
        wide = self.task.wide or widened
        known += [one for one in plain.values() if one is not None and (wide or not _is_wide(one))]
        task = replace(self.task, wide=wide)
        run = self._pass(task, until=_ALL, wanted=RANKED, known=known)
        if not run.candidates and not run.cut_short:
            raise _nothing_legal(self.task, run.space)
        chosen = run.chosen()
        if task.top > RANKED and not run.cut_short:
            # a pass of its own, so that the first rows do not depend on how many more are wanted
            more = self._pass(task, until=_ALL, wanted=task.top, known=_all(run))
            first = {one.candidate.family for one in chosen[:RANKED]}
            chosen = chosen[:RANKED] + [one for one in more.chosen() if one.candidate.family not in first]
        return self._answer(run, self._verified(chosen), plain, widened)

    def _plain(self) -> dict[str, Feasible | None]:
        """The fastest of each kind of layout that people use; None: none fits, or none is legal."""
        narrowed = plain_layouts(self.task)
        fastest = dict[str, Feasible | None]()
        for number, (name, task) in enumerate(narrowed.items(), 1):
            until = _PLAIN * number / len(narrowed)
            for wide in (False, True):  # offload where nothing fits otherwise
                one = replace(task, wide=wide)
                run = self._pass(one, until=until, wanted=1, only_dives=True)
                fastest[name] = next(iter(run.chosen()), None)
                if fastest[name] is not None:
                    break
        return fastest

    def _conventional(self, task: Task, until: float) -> tuple[list[Feasible], bool]:
        """Some conventional layouts that fit, and whether others were left unexamined."""
        run = self._pass(conventional(task), until=until, wanted=_SEEDS, only_dives=True)
        return _all(run), run.cut_short

    def _pass(
        self,
        task: Task,
        *,
        until: float,
        wanted: int,
        known: list[Feasible] | None = None,
        only_dives: bool = False,
    ) -> BranchAndBound:
        run = BranchAndBound(
            task=task,
            exact=self.exact,
            deadline=self.deadline,
            until=until,
            wanted=wanted,
            only_dives=only_dives,
            progress=self.progress,
        )
        run.accept(known or [])
        run.go()
        return run

    def _answer(
        self,
        run: BranchAndBound,
        chosen: list[Feasible],
        plain: dict[str, Feasible | None],
        widened: bool,
    ) -> Plan:
        task = self.task
        ranking = ranked(chosen[: task.top], task, self.exact.times)
        # what represents its family is often tight, where a variant of it is safe
        safe = min((one for one in _all(run) if is_safe(one.fit, task.room)), key=run.cost_of, default=None)
        first = ranking[0].estimate if ranking else None

        def beside(one: Feasible | None) -> Ranked | None:
            return None if one is None else compared(one, first, task, self.exact.times)

        replayed = len(self.exact.times)
        return Plan(
            ranking=ranking,
            safe=beside(safe),
            plain={name: beside(one) for name, one in plain.items()},
            tried=self._tried(run),
            rejected=run.refusals.reasons(run.space.rejected, run.candidates, replayed),
            candidates=run.candidates,
            feasible=sum(fit.likely for fit in self.exact.fits.values()),
            replayed=replayed,
            seconds=self.deadline.elapsed,
            objective=task.objective,
            assumptions=task.assumptions,
            gap=gap(run.best(), run.left),
            complete=not run.cut_short,
            widened=widened,
            nearest=None
            if ranking
            else nearest_to_fitting(run.refusals.closest, task, self.exact.bounds.cluster),
        )

    def _verified(self, chosen: list[Feasible]) -> list[Feasible]:
        """The ranking without leaders of which some pipeline rank, when all are checked, does not fit."""
        while chosen:
            job = chosen[0].candidate.job(self.task)
            fit = short_step_fit(job, self.task.cluster.device, self.task.assumptions, every=True)
            if fit.likely:
                return [replace(chosen[0], fit=fit), *chosen[1:]]
            chosen = chosen[1:]
        return chosen

    def _tried(self, run: BranchAndBound) -> tuple[Tried, ...]:
        """All that was replayed, with its exact memory or, where that was not computed, its lower bound."""
        tried = list[Tried]()
        for candidate, time in self.exact.times.items():
            known = self.exact.fits.get(candidate)
            fit = known or run.savings.fit(candidate)
            tried.append(
                Tried(
                    layout=str(candidate),
                    seconds=time.seconds,
                    memory=fit.device.mid,
                    verdict=fit.verdict,
                    least=known is None,
                )
            )
        return tuple(tried)


def _all(run: BranchAndBound) -> list[Feasible]:
    return [one for family in run.families.values() for one in family]


def _is_wide(one: Feasible) -> bool:
    """Whether a candidate is one of those that are considered only where nothing fits otherwise."""
    candidate = one.candidate
    beside_pipeline = candidate.parallelism.layout.pp > 1 and candidate.dp.mode in ("zero2", "zero3")
    return candidate.saving.offload != "none" or beside_pipeline


# ------------------------------------------------------------------ errors


def _check(task: Task) -> None:
    """Raise what no layout can mend."""
    job = replace(task.job, layout=Layout(), global_batch=1, micro_batch=1)
    wrong = problems(job)
    if wrong:
        raise wrong[0]
    if problem := _odd_batch(task):
        raise problem
    if task.objective == "tokens_per_dollar" and task.price is None:
        raise StrettoError(
            f"objective tokens_per_dollar: cluster {task.cluster.name!r} has no price",
            hint="give it one in its YAML file: price, dollars an hour of one device",
        )


def _odd_batch(task: Task) -> StrettoError | None:
    """The error for a batch that no two replicas can share, as happens with typing errors."""
    batch, devices = task.global_batch, task.devices
    free = not task.smaller and not {"dp", "pp", "cp"} & task.fixed.keys()
    if not free or batch == 1 or devices == 1 or gcd(batch, devices) > 1:
        return None
    unit = min(64, devices & -devices) if devices % 2 == 0 else devices
    near = max(unit, round(batch / unit) * unit)
    return StrettoError(
        f"batch is {batch}, which has no common divisor with the {devices} devices: no data parallelism is "
        "possible",
        hint=f"nearest is {near}; or fix dp=1",
    )


def _nothing_legal(task: Task, space: Space) -> StrettoError:
    """The error where no layout is legal: the first rule that was broken, or no product of sizes."""
    for name, (_, example) in space.rejected.items():
        return StrettoError(f"no layout is legal: {example}", hint=f"look at {name}, and at --fix")
    return StrettoError(
        f"no layout of {task.devices} devices is left by what is fixed: "
        + ", ".join(f"{name}={_in_words(values)}" for name, values in task.fixed.items()),
        hint="tp x cp x dp x pp must be the number of devices",
    )


def _in_words(values: object) -> str:
    return ",".join(map(str, values)) if isinstance(values, tuple) else str(values)
