"""Llama 3 70B is to be trained on 64 H100, 8 in a node: 256 samples of 4,096 tokens a step. Which layout is
fastest, and fits?

Choose the sizes of tensor, pipeline and data parallelism (their product is 64), the schedule and its chunks,
samples of a microbatch, ZeRO and recomputation. Try them with

    stretto predict --model llama3-70b --cluster dgx-h100:64 batch=256 seq=4096 tp=8 pp=8 micro=1

which prints the step time in parts, and the memory of the fullest rank. There are 50,000 layouts, so reason:

- weights, gradients and states in mixed precision are 16 bytes a parameter, and a GPU has 80 GB;
- tensor parallelism sends activations in every layer, and nothing hides that; beyond a node it is slow;
- a pipeline's bubble is (p - 1) / m of the work under 1F1B, and less with `schedule=interleaved chunks=K`;
- recomputation costs up to a third more work, and frees activations; `sp=true` frees some for nothing;
- ZeRO 1 frees states by the number of data-parallel ranks, for no more traffic than DDP.

Write `plan()`, which returns the fields as text. It must not be refused for memory ("tight" passes), and be
within 2% of the best that a search finds over all sizes, microbatches and ZeRO modes, for 1F1B and
interleaved schedules without context parallelism and recomputation.

Sources: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 3.
"""

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
