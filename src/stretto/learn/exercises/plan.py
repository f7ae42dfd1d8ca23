"""Grades `plan`: a 70B model on 64 H100, within 2% of the best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from stretto.errors import StrettoError
from stretto.job.data_parallel import Precision
from stretto.job.presets import find_shape
from stretto.learn.checks import Check, at_most
from stretto.planner.columns import column_name
from stretto.planner.estimate import estimate, usual_dtype
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.runs import read_run
from stretto.planner.search.fixed import fixed
from stretto.planner.search.search import search
from stretto.planner.search.task import SearchTask, job_to_plan

RANKS = 1
TEMPLATE = '''def plan() -> str:
    """Return the fields of a layout, such as "tp=8 pp=8 dp=1 micro=1 schedule=1f1b zero=1 sp=true"."""
    raise NotImplementedError
'''
MODEL, CLUSTER = "llama3-70b", "dgx-h100:64"
BATCH, SEQUENCE = 256, 4096
SEARCHED = ("cp=1", "sp=true", "recompute=none", "schedule=1f1b,interleaved")


def checks(reader: Mapping[str, Any], random: Random) -> Iterator[Check]:
    """Price the layout, and search for the best."""
    shape, cluster = find_shape(MODEL), find_cluster(CLUSTER)
    text = reader["plan"]()
    try:
        cells = {column_name(key): value for key, _, value in (word.partition("=") for word in text.split())}
        cells |= {"model": MODEL, "batch": str(BATCH), "seq": str(SEQUENCE)}
        run = read_run(cells, cluster, shape)
        predicted = estimate(run.job, run.cluster, run.assumptions)
    except (StrettoError, AttributeError) as error:
        yield Check("a legal layout", f"{text!r}: {error}")
        return
    world = run.job.layout.world
    yield Check("a legal layout", None if world == 64 else f"{text!r} is of {world} devices, must be of 64")
    fit, problem = predicted.memory, None
    if fit is None or fit.verdict == "does not fit":
        needed = 0.0 if fit is None else fit.device.mid / 2**30
        problem = f"the fullest rank needs {needed:.1f} GiB of {cluster.device.memory / 2**30:.1f}"
    yield Check("memory", problem)

    job = job_to_plan(shape=shape, global_batch=BATCH, sequence=SEQUENCE)
    job = replace(job, precision=Precision(dtype=usual_dtype(cluster.device)))
    best = search(SearchTask(job=job, cluster=cluster, fixed=fixed(SEARCHED))).ranking[0].estimate
    more = {part: seconds - best.parts.get(part, 0.0) for part, seconds in predicted.parts.items()}
    longer = ", ".join(
        f"{part} {seconds:+.2g} s"
        for part, seconds in sorted(more.items(), key=lambda item: -item[1])
        if seconds > 0.005 * best.seconds
    )
    yield at_most(
        "time",
        predicted.seconds,
        1.02 * best.seconds,
        f"a step takes {{actual}} s, 2% above the best are {{limit}} s; beside the best: {longer}",
    )
