"""A plan and an estimate as JSON: for `--json`, and for the page, which draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from stretto.errors import StrettoError
from stretto.planner.estimate import NOISE, timeline_of
from stretto.planner.memory.fits import fit_record
from stretto.planner.what_if import binding
from stretto.view.panel import panel
from stretto.view.panel_record import panels_record
from stretto.view.plan_texts import GIB, differences, plan_setting, search_text, uncertainty_text

if TYPE_CHECKING:
    from stretto.planner.assumptions import Assumptions
    from stretto.planner.estimate import Estimate
    from stretto.planner.memory.fits import Fit
    from stretto.planner.search.ranking import Evaluated, Plan, Ranked
    from stretto.planner.search.task import SearchTask
    from stretto.planner.what_if import Answer

_MOST_BLOCKS = 20_000  # of the timeline; more are slow to draw and only repeat the pattern
# of a rank's memory, in the order of a bar
MEMORY_KINDS = [
    "weights",
    "masters",
    "gradients",
    "optimizer",
    "gathered",
    "open",
    "versions",
    "activations",
    "ends",
    "messages",
    "transient",
    "batch",
]


def plan_record(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON: the ranking, what certainly fits, the plain alternatives, the rejected."""
    return {
        "candidates": plan.candidates,
        "replayed": plan.replayed,
        "feasible": plan.feasible,
        "seconds": plan.seconds,
        "complete": plan.complete,
        "gap": None if plan.gap == inf else plan.gap,
        "widened": plan.widened,
        "objective": plan.objective,
        "ranking": [ranked_record(ranked) for ranked in plan.ranking],
        "known_errors": list(plan.ranking[0].estimate.known_errors) if plan.ranking else [],
        "safe": None if plan.safe is None else ranked_record(plan.safe),
        "plain": {
            name: plain.fastest and ranked_record(plain.fastest) for name, plain in plan.baselines.items()
        },
        "plain_safe": {
            name: plain.safe and ranked_record(plain.safe) for name, plain in plan.baselines.items()
        },
        "missing": {name: plain.missing for name, plain in plan.baselines.items() if plain.missing},
        "rejected": {
            name: {"count": refusals.count, "example": refusals.example}
            for name, refusals in plan.rejected.items()
        },
        "nearest": None if plan.nearest is None else ranked_record(plan.nearest),
    }


def ranked_record(ranked: Ranked) -> dict[str, Any]:
    """Return a layout of the ranking as JSON."""
    job = ranked.estimate.job
    return {
        "layout": ranked.layout,
        "sizes": dict(job.layout.sizes),
        "gpus": job.layout.world,
        "micro_batch": job.micro_batch,
        "microbatches": job.microbatches,
        "schedule": job.schedule,
        "options": dict(job.options),
        "sequence_parallel": job.sequence_parallel,
        "context": job.context,
        "dp": {"mode": job.dp.mode, **job.dp.shards, "offload": job.dp.offload},
        "recompute": {"mode": job.recompute.mode, "blocks": job.recompute.blocks},
        "tokens_per_dollar": ranked.tokens_per_dollar,
        "variants": list(ranked.variants),
        "why": ranked.reason,
        **measures_record(ranked.estimate),
    }


def measures_record(estimate: Estimate) -> dict[str, Any]:
    """Return the predicted time and memory as JSON; `memory_gib` is allocated, as in metrics.jsonl."""
    memory = estimate.memory
    return {
        "step_time_s": estimate.seconds,
        "low": estimate.low,
        "high": estimate.high,
        "widths": dict(estimate.widths),
        "tokens_per_s": estimate.tokens_per_s,
        "tflops_per_gpu": estimate.tflops_per_gpu,
        "mfu": estimate.mfu,
        "bubble": estimate.bubble,
        "parts": dict(estimate.parts),
        "dominant": estimate.dominant,
        **({"memory_gib": None, "memory": None, "verdict": None} if memory is None else fit_record(memory)),
    }


def what_if_record(plan: Plan, task: SearchTask, answers: Sequence[Answer]) -> dict[str, Any] | None:
    """Return the answers to --what-if as JSON, with the share of the step that each resource binds."""
    if not answers:
        return None
    return {
        "binds": binding(plan, task, answers) if plan.ranking else {},
        "changes": [
            {
                "change": item.change.name,
                "layout": item.best and item.best.layout,
                "step_time_s": item.best and item.best.estimate.seconds,
                "tokens_per_s": item.best and item.best.estimate.tokens_per_s,
                "gain": item.gain,
                "unchanged": item.unchanged,
                "error": item.reason or None,
            }
            for item in answers
        ],
    }


def drawn_plan(plan: Plan, model: str, commands: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what the page draws of a plan for the model of this name.

    Args:
        commands: commands for next steps, by purpose.

    Raises:
        StrettoError: no layout was timed.
    """
    best = plan.ranking[0] if plan.ranking else plan.nearest
    if best is None:
        raise StrettoError("no layout was timed, so no page can be drawn", hint="relax the requirements")
    estimate = best.estimate
    job, cluster = estimate.job, estimate.cluster
    setting = plan_setting(job, cluster, plan.assumptions, model)
    rows = plan.ranking or [best]
    return {
        **plan_record(plan),
        "title": f"Plan of {model} on {setting['cluster'].partition(' (')[0]}",
        "setting": {**setting, "search": search_text(plan)},
        "uncertainty": [uncertainty_text(ranked.estimate.widths) for ranked in rows],
        "points": _points(plan.evaluated),
        "differences": differences(plan.ranking) if len(plan.ranking) > 1 else [],
        "noise": NOISE,
        "fullest": [_fullest(ranked.estimate.memory) for ranked in rows],
        "ranks": [] if estimate.memory is None else _ranks_record(estimate.memory),
        "every_rank": estimate.memory is not None and len(estimate.memory.ranks) == job.layout.pp,
        "commands": dict(commands or {}),
        "timelines": _timeline(estimate, plan.assumptions),
    }


def _points(tried: Sequence[Evaluated]) -> dict[str, list[Any]]:
    """Return the candidates that were timed, as columns, with whether each is on the front."""
    on_front = set(front(tried))
    return {
        "layout": [candidate.layout for candidate in tried],
        "seconds": [candidate.seconds for candidate in tried],
        "gib": [candidate.memory / GIB for candidate in tried],
        "lower_bound": [candidate.lower_bound for candidate in tried],
        "verdict": [candidate.verdict for candidate in tried],
        "front": [i in on_front for i in range(len(tried))],
    }


def front(tried: Sequence[Evaluated]) -> list[int]:
    """Return the indices of the Pareto front of time and memory among layouts that fit, by memory."""
    usable = [
        i
        for i, candidate in enumerate(tried)
        if candidate.verdict != "does not fit" and not candidate.lower_bound
    ]
    best: list[int] = []
    for i in sorted(usable, key=lambda i: (tried[i].memory, tried[i].seconds)):
        if not best or tried[i].seconds < tried[best[-1]].seconds:
            best.append(i)
    return best


def _fullest(fit: Fit | None) -> dict[str, float]:
    """Return the bytes of the fullest rank by kind; those beside tensors are the context and the cache."""
    if fit is None:
        return {}
    return max((rank["sizes"] for rank in _ranks_record(fit)), key=lambda sizes: sum(sizes.values()))


def _ranks_record(fit: Fit) -> list[dict[str, Any]]:
    """Return the bytes of each pipeline rank by kind, at its peak."""
    overhead = max(0.0, fit.device.mid - fit.allocated.mid)
    return [
        {
            "rank": rank.rank,
            "at": rank.at,
            "sizes": {kind: float(getattr(rank, kind)) for kind in MEMORY_KINDS}
            | {"beside tensors": overhead},
        }
        for rank in fit.ranks
    ]


def _timeline(estimate: Estimate, assumptions: Assumptions) -> dict[str, Any]:
    """Return the step's timeline, cut to the first microbatches if it has too many blocks."""
    job = estimate.job
    count, pp = job.microbatches or 1, job.layout.pp
    stages = job.program().stages
    limit = max(2 * pp, _MOST_BLOCKS // (3 * stages) // pp * pp)
    short = replace(job, global_batch=job.layout.dp * job.micro_batch * limit) if count > limit else job
    drawn = panel(timeline_of(replace(estimate, job=short), assumptions)[0])
    note = f"; the first {limit} of {count} microbatches" if short is not job else ""
    title = f"{job.schedule}, {pp} pipeline ranks"
    return panels_record([replace(drawn, title=title, line=drawn.line + note, unit="s")])
