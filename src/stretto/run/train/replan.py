"""A job on another number of ranks: with the layout that its config lists for it, or the planner's best."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from math import gcd
from typing import Any

from stretto.engine.parallel.signed import SIZE, is_genuine, job_key, signature
from stretto.errors import StrettoError
from stretto.planner.machines.catalogue import cluster_here
from stretto.planner.search.ranking import Plan, Ranked
from stretto.planner.search.search import search
from stretto.planner.search.task import SearchTask, unplanned
from stretto.run.config.check import find_problems
from stretto.run.config.for_ranks import for_ranks as listed
from stretto.run.config.job import job_of
from stretto.run.config.schema import TrainConfig
from stretto.run.config.section import plain_section
from stretto.run.config.validation import read_section
from stretto.run.config.written import laid_over
from stretto.run.launch.rendezvous import RendezvousInfo, join_early
from stretto.run.train.prediction import kind_here

SEARCH_S = 5.0  # of wall-clock time; the job waits for it
_KEY, _POLL_S = "stretto/layout", 0.1
_SECTIONS = ("layout", "dp", "recompute", "schedule", "batch")  # what a plan chooses

Note = Callable[[str], None]


def for_ranks(config: TrainConfig, ranks: int, note: Note) -> TrainConfig:
    """The job on so many ranks: as it is where it has as many, else with a layout of `elastic.layouts`.

    Args:
        note: told in a line which layout was planned, and why.

    Raises:
        StrettoError: none is listed; or the planner knows none that is legal and fits.
    """
    base = config.configured
    has_layout = ranks in (config.layout.to_layout().world, base.layout.to_layout().world)
    if config.elastic.layouts != "auto" or has_layout:
        return listed(config, ranks)
    other, line = _planned(base, ranks)
    note(line)
    return base.replacing({name: getattr(other, name) for name in _SECTIONS})


def join_for_ranks(config: TrainConfig, note: Note) -> TrainConfig:
    """As `for_ranks`, on each rank of a job that torchrun has started. Rank 0 plans, since a search that time
    cuts short may end differently elsewhere, and tells the others. Collective.
    """
    world = RendezvousInfo.of(os.environ).world
    if config.elastic.layouts != "auto" or world == config.layout.to_layout().world:
        return listed(config, world)
    attempt = join_early(config.train.start_s, timedelta(seconds=config.train.timeout_s))
    if attempt.rank == 0:
        body = json.dumps(_answer(config, world, note)).encode()
        attempt.store.set(_KEY, (signature(job_key(), 0, 0, body) + body).hex())
    _await_plan(attempt.store, config.train.timeout_s)
    signed = bytes.fromhex(attempt.store.get(_KEY).decode())
    if not is_genuine(job_key(), 0, 0, signed):
        raise StrettoError("the layout that rank 0 has planned is not signed with this job's key")
    answer = json.loads(signed[SIZE:])
    if "error" in answer:
        raise StrettoError(answer["error"], hint=answer["hint"])
    sections = {name: getattr(config, name) for name in _SECTIONS}
    return config.replacing(
        {name: read_section(type(section), answer[name]) for name, section in sections.items()}
    )


def _await_plan(store: Any, limit_s: float) -> None:
    """Wait for what rank 0 writes. The store's own wait would let no signal through to Python."""
    end = time.monotonic() + limit_s
    while not store.check([_KEY]):
        if time.monotonic() > end:
            raise StrettoError(f"rank 0 has planned no layout within {limit_s:g} s (train.timeout_s)")
        time.sleep(_POLL_S)


def _answer(config: TrainConfig, ranks: int, note: Note) -> dict[str, Any]:
    """The sections that were planned, or the error."""
    try:
        other = for_ranks(config, ranks, note)
    except StrettoError as error:
        return {"error": error.message, "hint": error.hint}
    return {name: plain_section(getattr(other, name)) for name in _SECTIONS}


def _planned(config: TrainConfig, ranks: int) -> tuple[TrainConfig, str]:
    """The job with the fastest layout that fits so many ranks of this machine, and a line about it."""
    job = unplanned(job_of(config))
    # where no two replicas could share the batch, the planner takes the number for a typing error
    fixed = {"dp": (1,)} if gcd(job.global_batch, ranks) == 1 else {}
    try:
        cluster = cluster_here(ranks, kind_here(config.train))
        plan = search(SearchTask(job=job, cluster=cluster, fixed=fixed, seconds=SEARCH_S))
    except StrettoError as error:
        raise _none(config, ranks, error.message) from None
    problem = None
    for one in plan.ranking:
        other = laid_over(one.estimate.job, config)
        problems = find_problems(other)
        if not problems:
            return other, _line(ranks, one, plan)
        problem = problem or problems[0].message
    raise _none(config, ranks, problem or _why_nothing(plan))


def _line(ranks: int, one: Ranked, plan: Plan) -> str:
    made = one.estimate
    cut_short = "" if plan.complete else f", the best found in {plan.seconds:.0f} s"
    return (
        f"elastic: {ranks} rank{'s' * (ranks > 1)} take{'s' * (ranks == 1)} {one.layout}{cut_short}: "
        f"{made.seconds:.3g} s a step predicted on {made.cluster.name}; {one.reason}"
    )


def _why_nothing(plan: Plan) -> str:
    if plan.nearest is not None:
        return f"nothing fits; nearest is {plan.nearest.layout}: {plan.nearest.reason}"
    return "nothing fits" if plan.complete else f"none was found in {plan.seconds:.0f} s"


def _none(config: TrainConfig, ranks: int, why: str) -> StrettoError:
    world = config.layout.to_layout().world
    return StrettoError(
        f"elastic.layouts is auto, and there is no layout of {ranks} rank{'s' * (ranks > 1)}: {why}",
        hint=f"start {world} rank{'s' * (world > 1)}, as in layout; or list elastic.layouts",
    )
