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
from stretto.run.train.prediction import local_device_kind

SEARCH_S = 5.0  # of wall-clock time; the job waits for it
_KEY, _POLL_S = "stretto/layout", 0.1
_SECTIONS = ("layout", "dp", "recompute", "schedule", "batch")  # what a plan chooses

Note = Callable[[str], None]


def for_ranks(config: TrainConfig, ranks: int, note: Note) -> TrainConfig:
    """Return the job on `ranks` ranks: as it is if it has as many, else with a layout of `elastic.layouts`.
    With `auto` the planner chooses the fastest one that fits this machine.

    Args:
        note: receives a line that says which layout was planned, and why.

    Raises:
        StrettoError: none is listed; or the planner finds none that is legal and fits.
    """
    base = config.configured
    world = base.layout.to_layout().world
    if config.elastic.layouts != "auto" or ranks in (config.layout.to_layout().world, world):
        return listed(config, ranks)
    job = unplanned(job_of(base))
    # if no two replicas can share the batch, the planner takes the number of ranks for a typing error
    fixed = {"dp": (1,)} if gcd(job.global_batch, ranks) == 1 else {}
    try:
        cluster = cluster_here(ranks, local_device_kind(base.train.device))
        plan = search(SearchTask(job=job, cluster=cluster, fixed=fixed, seconds=SEARCH_S))
    except StrettoError as error:
        raise _no_plan_error(ranks, world, error.message) from None
    reason = None
    for ranked in plan.ranking:
        other = laid_over(ranked.estimate.job, base)
        problems = find_problems(other)
        if not problems:
            note(_describe(ranked, ranks, plan))
            return base.replacing({name: getattr(other, name) for name in _SECTIONS})
        reason = reason or problems[0].message
    if reason is None and plan.nearest is not None:
        reason = f"nothing fits; nearest is {plan.nearest.layout}: {plan.nearest.reason}"
    elif reason is None:
        reason = "nothing fits" if plan.complete else f"none was found in {plan.seconds:.0f} s"
    raise _no_plan_error(ranks, world, reason)


def join_for_ranks(config: TrainConfig, note: Note) -> TrainConfig:
    """As `for_ranks`, on each rank of a job that torchrun has started. Rank 0 plans, since a search that is
    cut short by time may end differently elsewhere, and sends the result to the others. Collective.
    """
    world = RendezvousInfo.of(os.environ).world
    if config.elastic.layouts != "auto" or world == config.layout.to_layout().world:
        return listed(config, world)
    attempt = join_early(config.train.start_s, timedelta(seconds=config.train.timeout_s))
    if attempt.rank == 0:
        answer: dict[str, Any]
        try:
            other = for_ranks(config, world, note)
            answer = {name: plain_section(getattr(other, name)) for name in _SECTIONS}
        except StrettoError as error:
            answer = {"error": error.message, "hint": error.hint}
        body = json.dumps(answer).encode()
        attempt.store.set(_KEY, (signature(job_key(), 0, 0, body) + body).hex())
    # the store's own wait would let no signal through to Python
    end = time.monotonic() + config.train.timeout_s
    while not attempt.store.check([_KEY]):
        if time.monotonic() > end:
            limit = config.train.timeout_s
            raise StrettoError(f"rank 0 has planned no layout within {limit:g} s (train.timeout_s)")
        time.sleep(_POLL_S)
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


def _describe(ranked: Ranked, ranks: int, plan: Plan) -> str:
    estimate = ranked.estimate
    cut_short = "" if plan.complete else f", the best found in {plan.seconds:.0f} s"
    return (
        f"elastic: {ranks} rank{'s' * (ranks > 1)} take{'s' * (ranks == 1)} {ranked.layout}{cut_short}: "
        f"{estimate.seconds:.3g} s a step predicted on {estimate.cluster.name}; {ranked.reason}"
    )


def _no_plan_error(ranks: int, world: int, reason: str) -> StrettoError:
    return StrettoError(
        f"elastic.layouts is auto, and there is no layout of {ranks} rank{'s' * (ranks > 1)}: {reason}",
        hint=f"start {world} rank{'s' * (world > 1)}, as in layout; or list elastic.layouts",
    )
