"""What a framework's jobs cost, and which of its layouts would cost less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.job.data_parallel import MODES, DataParallelSettings
from stretto.planner.estimate import Estimate, estimate
from stretto.planner.machines.cluster import Cluster
from stretto.planner.search.fixed import fixed
from stretto.planner.search.task import SearchTask, unplanned
from stretto.run.config.run_checks import raise_first
from stretto.run.config.schema import TrainConfig
from stretto_interop.frameworks.mapping import ExternalFramework, ForeignJob, refusals

# sections of values that a search makes
_SEARCHED = ("batch.", "dp.", "layout.", "recompute.", "schedule.")


def task_for(
    framework: ExternalFramework, task: SearchTask, fix: Sequence[str] = (), config: TrainConfig | None = None
) -> SearchTask:
    """A search among the layouts that the framework has, at the cost that they have there.

    Args:
        fix: values that the user has made, as `--fix` takes them; these come first.
        config: that is planned, if any: of values of the run around the job.

    Raises:
        StrettoError: the framework does not have the model, or another choice that no layout changes.
    """
    values = {**fixed(framework.plans), **fixed(fix)}
    job = framework.as_run(task.job, {})
    jobs = [replace(job, dp=DataParallelSettings(mode=mode)) for mode in MODES if mode != "server"]
    wrong, *others = ({item.field: item for item in refusals(framework, each, config)} for each in jobs)
    always = [item for name, item in wrong.items() if all(name in other for other in others)]
    raise_first([item for item in always if not item.field.startswith(_SEARCHED)])
    return replace(
        task,
        job=job,
        assumptions=framework.assumptions,
        fixed=values,
        refusals=lambda item: refusals(framework, item, config),
    )


def price(reading: ForeignJob, cluster: Cluster, *, memory: bool = True) -> Estimate:
    """Time and memory of a job as it was read, on a cluster of its size."""
    return estimate(reading.job, cluster, reading.assumptions, memory=memory)


def overlapped(framework: ExternalFramework, reading: ForeignJob, cluster: Cluster) -> Estimate | None:
    """The same layout with gradients reduced while the backward computes; None where they are already."""
    if reading.assumptions.overlap:
        return None
    assumptions = replace(reading.assumptions, overlap=framework.assumptions.overlap)
    return estimate(reading.job, cluster, assumptions)


def better(
    framework: ExternalFramework, reading: ForeignJob, cluster: Cluster, seconds: float, top: int
) -> SearchTask:
    """The search for layouts that do the same work on the same cluster in less time.

    Args:
        seconds: of the search.
        top: layouts that are wanted.
    """
    return SearchTask(
        job=unplanned(reading.job),  # with what the framework keeps of it
        cluster=cluster,
        assumptions=replace(reading.assumptions, overlap=framework.assumptions.overlap),
        fixed=fixed(framework.plans),
        refusals=lambda item: refusals(framework, item),
        seconds=seconds,
        top=top,
    )
