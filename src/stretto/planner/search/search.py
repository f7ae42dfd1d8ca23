"""The best layouts of a model on a cluster.

A search first finds the layouts that people use without a search, whatever its limit: they are the plain
alternatives, and what it starts from. Then come rounds (`planner.search.work`), the first short, so that rows
appear soon, of two passes that share what has been computed. The first looks at conventional layouts only,
the second at all legal candidates (`planner.search.branch`), and it starts with what has been accepted. The
search ends when a round has proved that nothing is faster; if the limit comes first, the plan says by how
much an unexamined layout could be.

Work is counted, not timed, so a busy machine returns the same plan, later; and a larger limit never returns a
worse one. Conventional passes search a task narrowed to some values of its choices (`Task.narrowed`). If what
the user has fixed excludes a conventional layout, its search finds nothing. Sources: Narayanan et al. 2021
(arXiv 2104.04473), section 3: tensor parallelism within a node, then pipeline parallelism until the model
fits, then data parallelism. Zhao et al. 2023 (arXiv 2304.11277): FSDP, and its hybrid, sharded in each node.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import gcd, inf
from time import perf_counter
from typing import Any

from stretto.errors import StrettoError
from stretto.job.rules import problems
from stretto.layout.layout import Layout
from stretto.planner.search.branch import BranchAndBound, Progress
from stretto.planner.search.evaluator import CandidateEvaluator
from stretto.planner.search.ranking import (
    Baseline,
    Evaluated,
    Feasible,
    Plan,
    Ranked,
    gap,
    is_safe,
    nearest_to_fitting,
    oddity,
    rank_candidate,
    rank_candidates,
    variants_of,
)
from stretto.planner.search.space import Space, divisors
from stretto.planner.search.task import RANKED, SearchTask
from stretto.planner.search.work import SearchWork, rounds
from stretto.program import PLAIN, entry, names

DDP = "DDP"
# Shares of a round at which its passes end. A later end of the first gives a better start; an earlier one
# leaves more for the proof. `benchmarks/plan_search.py` measures what a choice of these reaches.
_CONVENTIONAL_END = 0.25
_OFFLOAD_END = 0.4  # of conventional layouts with offload, if nothing fits by then
_SEED_FAMILIES = 4  # families that the first pass accepts; more: a better start, fewer: a longer proof

_COMMON_MICRO_BATCHES = (1, 2, 4, 8)  # samples of a microbatch


def search(task: SearchTask, progress: Progress | None = None) -> Plan:
    """Find the best layouts of the task, the best first.

    If no conventional layout fits, or a plain one with offload is faster than all that fit without it, states
    and parameters are sharded and offloaded in every way (`Task.allow_offload`), and the plan says so.

    Args:
        progress: called now and then with the candidates replayed, memories computed and families that fit.

    Raises:
        StrettoError: the task itself is illegal, or no layout is legal with the fixed choices.
    """
    *_, last = _rounds(task, progress)
    return last.plan()


def search_rounds(task: SearchTask, progress: Progress | None = None) -> Iterator[Plan]:
    """Yield the best layouts of the task after each round of the search; the last plan is that of `search`.

    Raises:
        StrettoError: as `search`.
    """
    return (each.plan() for each in _rounds(task, progress))


def _rounds(task: SearchTask, progress: Progress | None) -> Iterator[_Search]:
    if problem := _task_problem(task):
        raise problem
    # hundreds of thousands of lasting objects make each collection slow, and nothing here is cyclic
    collects = gc.isenabled()
    gc.disable()
    try:
        yield from _Search(task, progress).rounds()
    finally:
        if collects:
            gc.enable()


class _Search:
    """The passes of one search."""

    def __init__(self, task: SearchTask, progress: Progress | None) -> None:
        self.task, self.progress = task, progress
        self.work, self.start = SearchWork(), perf_counter()
        self.evaluator = CandidateEvaluator(task, self.work)
        # the fastest, and the fastest safe one
        self.baselines: dict[str, tuple[Feasible | None, Feasible | None]] = {}
        self.missing = dict[str, str]()
        self._passes = dict[tuple[str, bool], BranchAndBound]()
        self.widened = False  # to layouts with offload, since none fits without, or none is as fast
        # the pass over all candidates; until the first round it only has what others accepted
        self.run = BranchAndBound(task=task, evaluator=self.evaluator, wanted=RANKED)

    def rounds(self) -> Iterator[_Search]:
        """Find the baselines and run the passes of each round; yield the search before each baseline with
        pipelines, which take longest, before the first round and after each.
        """
        for name, task in baseline_tasks(self.task).items():
            if "pipeline" in name and self.run.families:
                yield self
            feasible = self._find_baseline(name, task)
            self.run.accept([f for f in feasible if self.task.allow_offload or not _needs_offload_search(f)])
        if self.run.families:
            yield self
        plain = accepted = [feasible for run in self._passes.values() for feasible in _all_accepted(run)]
        for limit in rounds(self.task.seconds):
            self.work.begin(limit)
            seeds, cut_short = self._find_conventional(self.task, until=_CONVENTIONAL_END)
            candidates = [*seeds, *accepted, *plain]
            best = min((self._cost(f) for f in candidates if not _needs_offload_search(f)), default=inf)
            offload_wins = best == inf or any(self._cost(f) < best for f in candidates)
            if offload_wins and not self.task.allow_offload:
                offload_task = replace(self.task, allow_offload=True)
                candidates += self._find_conventional(offload_task, until=_OFFLOAD_END)[0]
                # if the first search was cut short and found nothing, something may fit without offload
                self.widened = self.widened or best < inf or not cut_short
            if not (allow_offload := self.task.allow_offload or self.widened):
                candidates = [f for f in candidates if not _needs_offload_search(f)]
            task = replace(self.task, allow_offload=allow_offload)
            self.run = run = self._run_pass("all", task, until=1.0, wanted=RANKED, seeds=candidates)
            accepted = _all_accepted(run)
            if not run.cut_short and not run.candidates and not run.families:
                raise _nothing_legal(self.task, run.space)
            yield self
            if not run.cut_short:
                break

    def plan(self) -> Plan:
        """The plan after the rounds so far."""
        chosen = self.run.chosen()
        if self.task.top > RANKED and not self.run.cut_short:
            # a pass of its own, so that the first rows do not depend on how many more are wanted
            seeds = _all_accepted(self.run)
            longer = self._run_pass("top", self.run.task, until=1.0, wanted=self.task.top, seeds=seeds)
            families = {feasible.candidate.family(self.task) for feasible in chosen[:RANKED]}
            more = [
                feasible
                for feasible in longer.chosen()
                if feasible.candidate.family(self.task) not in families
            ]
            chosen = chosen[:RANKED] + more
        return self._plan_of(self.run, chosen)

    def _find_baseline(self, name: str, task: SearchTask) -> list[Feasible]:
        """Find the fastest of a kind of layout that people use, and the fastest safe one, or why there is
        none; return all that fit. They are few, so their search has no limit.
        """
        self.baselines[name] = None, None
        fixed = {choice: values for choice, values in task.fixed.items() if choice in task.narrowed}
        if others := {c: v for c, v in fixed.items() if not {*v} & {*task.narrowed[c]}}:
            self.missing[name] = _forbidden(others, task)
            return []
        run = self._run_pass(name, task, wanted=1, only_dives=True, safe_margin=inf)
        if not run.families and name != DDP:  # whose every rank is to hold all states
            task = replace(task, allow_offload=True)
            run = self._run_pass(name, task, wanted=1, only_dives=True, safe_margin=inf)
        accepted = _all_accepted(run)
        if run.families:
            first = run.chosen()[0]
            safe = [f for f in (first, *accepted) if is_safe(f.fit, task.memory_headroom)]
            fastest_safe = min(safe, key=run.cost_of, default=None)
            self.baselines[name] = first, first if first in safe else fastest_safe
        elif (closest := run.rejections.closest) is not None:
            self.missing[name] = f"none fits: {closest[1]} needs at least {closest[0].needed}"
        elif rules := [example for _, example in run.space.rejected.values()]:
            self.missing[name] = f"not legal: {rules[-1]}"
        else:
            self.missing[name] = _forbidden(task.fixed, task)
        return accepted

    def _cost(self, feasible: Feasible) -> float:
        """What rows are ranked by: more for a tight or an odd layout."""
        return self.run.cost_of(feasible) * feasible.penalty

    def _find_conventional(self, task: SearchTask, until: float) -> tuple[list[Feasible], bool]:
        """Some conventional layouts that fit, and whether others were left unexamined."""
        run = self._run_pass(
            "conventional", conventional_task(task), until=until, wanted=_SEED_FAMILIES, only_dives=True
        )
        return _all_accepted(run), run.cut_short

    def _run_pass(
        self,
        name: str,
        task: SearchTask,
        *,
        until: float = inf,
        wanted: int,
        seeds: list[Feasible] | None = None,
        only_dives: bool = False,
        safe_margin: float = 1.25,
    ) -> BranchAndBound:
        """Run a pass until a share of the round is done. One that was cut short continues."""
        key = name, task.allow_offload
        if key not in self._passes:
            self._passes[key] = BranchAndBound(
                task=task,
                evaluator=self.evaluator,
                wanted=wanted,
                only_dives=only_dives,
                safe_margin=safe_margin,
                progress=self.progress,
            )
        run = self._passes[key]
        run.until = until
        run.accept(seeds or [])
        run.run()
        return run

    def _plan_of(self, run: BranchAndBound, chosen: list[Feasible]) -> Plan:
        task, times = self.task, self.evaluator.times
        ranking = [
            replace(
                ranked,
                variants=variants_of(feasible, run.families.get(feasible.candidate.family(self.task), ())),
            )
            for ranked, feasible in zip(
                rank_candidates(chosen[: task.top], task, times), chosen[: task.top], strict=True
            )
        ]
        # the representative of a family is often tight, while a variant of it is safe
        candidates = [*_all_accepted(run), *(safe for _, safe in self.baselines.values() if safe is not None)]
        safe_candidates = [f for f in candidates if is_safe(f.fit, task.memory_headroom)]
        safe = min(safe_candidates, key=run.cost_of, default=None)
        best = ranking[0].estimate if ranking else None

        def ranked(feasible: Feasible | None) -> Ranked | None:
            return None if feasible is None else rank_candidate(feasible, best, task, times)

        evaluated = list[Evaluated]()
        for candidate, time in times.items():
            exact = self.evaluator.fits.get(candidate)
            fit = exact or run.savings.fit(candidate)
            evaluated.append(
                Evaluated(
                    layout=str(candidate),
                    seconds=time.seconds,
                    memory=fit.device.mid,
                    verdict=fit.verdict,
                    lower_bound=exact is None,
                )
            )
        return Plan(
            ranking=ranking,
            safe=ranked(safe),
            baselines={
                name: Baseline(fastest=ranked(fastest), safe=ranked(safe), missing=self.missing.get(name, ""))
                for name, (fastest, safe) in self.baselines.items()
            },
            evaluated=tuple(evaluated),
            rejected=run.rejections.reasons(
                run.space.rejected, run.candidates, len(times), run.slower_layouts
            ),
            candidates=run.candidates,
            feasible=sum(fit.likely for fit in self.evaluator.fits.values()),
            replayed=len(times),
            seconds=perf_counter() - self.start,
            objective=task.objective,
            assumptions=task.assumptions,
            gap=gap(run.best(), run.unexamined_cost),
            complete=not run.cut_short,
            widened=self.widened,
            nearest=None
            if ranking
            else nearest_to_fitting(run.rejections.closest, task, self.evaluator.bounds.cluster),
        )


def _all_accepted(run: BranchAndBound) -> list[Feasible]:
    return [feasible for family in run.families.values() for feasible in family]


def _needs_offload_search(feasible: Feasible) -> bool:
    """True for a candidate that is considered only with `Task.allow_offload`."""
    candidate = feasible.candidate
    sharded_pipeline = candidate.parallelism.layout.pp > 1 and candidate.dp.mode in ("zero2", "zero3")
    return candidate.saving.offload != "none" or sharded_pipeline


# ------------------------------------------------------------------ narrowed tasks


def baseline_tasks(task: SearchTask) -> dict[str, SearchTask]:
    """The task narrowed to what most people would run without a search, by name; pipelines come last."""
    moe, node = task.shape.moe, task.cluster.node
    unsplit: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("tp", "pp", "cp", "ep"), (1,)),
        "shard_states": (None,),
        "schedule": (PLAIN,),
    }
    narrowed = {DDP: {**unsplit, "mode": ("ddp",)}, "FSDP": {**unsplit, "mode": ("zero3",)}}
    if task.devices > node > 1:
        narrowed["hybrid FSDP"] = {**narrowed["FSDP"], "shard_states": tuple(range(2, node + 1))}
    pipeline: dict[str, tuple[Any, ...]] = {
        "cp": (1,),
        "shard_states": (None,),
        "schedule": _common_schedules(),
        "mode": ("ddp", "zero1"),
        # what the user has fixed is as plain
        **({} if "micro_batch" in task.fixed else {"micro_batch": _COMMON_MICRO_BATCHES}),
    }
    pipelines = dict[str, dict[str, tuple[Any, ...]]]()
    if moe is not None:
        experts = {"ep": divisors(moe.experts)[1:]}
        narrowed["expert x FSDP"] = {**narrowed["FSDP"], **experts}
        pipelines["expert x pipeline"] = {**pipeline, **experts, "tp": (1,)}
    fixed = task.fixed.get("tp", ())
    widths = [n for n in _tensor_widths(task) if n in fixed or not fixed]
    if (widest := max(widths or _tensor_widths(task))) > 1:
        sequence = {} if "sequence_parallel" in task.fixed else {"sequence_parallel": (True,)}
        tensor: dict[str, tuple[Any, ...]] = {"tp": (widest,), **sequence}
        if task.devices > widest:
            narrowed["tensor x FSDP"] = {**narrowed["FSDP"], **tensor}
        pipelines["tensor x pipeline"] = {**pipeline, **({} if moe else {"ep": (1,)}), **tensor}
    narrowed |= pipelines
    return {name: replace(task, narrowed=choices) for name, choices in narrowed.items()}


def conventional_task(task: SearchTask) -> SearchTask:
    """The task narrowed to conventional choices: tensor parallelism within a node; no context parallelism but
    for long sequences; schedules that most frameworks have; small microbatches.
    """
    plain = (n for n in divisors(task.devices) if not oddity(Layout(cp=n), task))
    narrowed: dict[str, tuple[Any, ...]] = {
        "tp": _tensor_widths(task),
        "cp": tuple(plain),
        "shard_states": (None,),
        "context": ("ring",),
        "schedule": _common_schedules(),
        "micro_batch": _COMMON_MICRO_BATCHES,
    }
    return replace(task, narrowed=narrowed)


def _common_schedules() -> tuple[str, ...]:
    return tuple(name for name in names() if entry(name).common)


def _tensor_widths(task: SearchTask) -> tuple[int, ...]:
    """Tensor-parallel widths within a node that split the heads."""
    return tuple(n for n in divisors(gcd(task.cluster.node, task.devices)) if task.shape.heads % n == 0)


# ------------------------------------------------------------------ errors


def _task_problem(task: SearchTask) -> StrettoError | None:
    """A problem of the task that no layout can mend."""
    wrong = problems(replace(task.job, layout=Layout(), global_batch=1, micro_batch=1))
    if wrong:
        return wrong[0]
    batch, devices = task.global_batch, task.devices
    dp_is_free = not task.smaller and not {"dp", "pp", "cp"} & task.fixed.keys()
    if dp_is_free and batch > 1 and devices > 1 and gcd(batch, devices) == 1:  # a typing error, perhaps
        unit = min(64, devices & -devices) if devices % 2 == 0 else devices
        nearest = max(unit, round(batch / unit) * unit)
        return StrettoError(
            f"batch is {batch}, which has no common divisor with the {devices} devices: no data parallelism "
            "is possible",
            hint=f"nearest is {nearest}; or fix dp=1",
        )
    if task.objective == "tokens_per_dollar" and task.price is None:
        return StrettoError(
            f"objective tokens_per_dollar: cluster {task.cluster.name!r} has no price",
            hint="give it one in its YAML file: price, dollars an hour of one device",
        )
    return None


def _nothing_legal(task: SearchTask, space: Space) -> StrettoError:
    """The error if no layout is legal: the rules that were broken, or no product of sizes."""
    if space.rejected:
        examples = "; ".join(example for _, example in space.rejected.values())
        fields = ", ".join(space.rejected)
        return StrettoError(f"no layout is legal: {examples}", hint=f"look at {fields}, and at --fix")
    return StrettoError(
        f"no layout of {task.devices} devices is legal: {_forbidden(task.fixed, task)}",
        hint="tp x cp x dp x pp must be the number of devices",
    )


def _forbidden(fixed: Mapping[str, Any], task: SearchTask) -> str:
    """Who excludes a layout, the user or the framework of the plan, by fixing these choices."""
    texts = dict[str, list[str]]()
    for name, values in fixed.items():
        choice = f"{name}={','.join(str(value).lower() for value in values)}"
        texts.setdefault(task.fixed_by.get(name, "--fix"), []).append(choice)
    return "forbidden by " + " and ".join(f"{who} {', '.join(choices)}" for who, choices in texts.items())
