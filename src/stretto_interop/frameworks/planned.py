"""Plans for another framework: a search among its layouts, and a row of a plan in its format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.errors import StrettoError
from stretto.job.data_parallel import MODES, DataParallelSettings
from stretto.planner.search.fixed import fixed
from stretto.planner.search.ranking import Plan
from stretto.planner.search.task import SearchTask
from stretto.run.config.run_checks import raise_first
from stretto_interop.frameworks.fields import JobValues
from stretto_interop.frameworks.mapping import ExternalFramework, emit, refusals

# sections of values that a search makes
_SEARCHED = ("batch.", "dp.", "layout.", "recompute.", "schedule.")


def task_for(
    framework: ExternalFramework, task: SearchTask, fix: Sequence[str] = (), run: JobValues | None = None
) -> SearchTask:
    """Return a search among the framework's layouts, at their cost there.

    Args:
        fix: values that the user has set, as `--fix` takes them; they take precedence.
        run: values of the config that is planned, or None.

    Raises:
        StrettoError: the framework does not have the model, or another choice that is the same in all
            layouts.
    """
    plans, users = fixed(framework.plans), fixed(fix)
    job = framework.as_run(task.job, {})
    jobs = [replace(job, dp=DataParallelSettings(mode=mode)) for mode in MODES if mode != "server"]
    wrong, *others = ({item.field: item for item in refusals(framework, each, run)} for each in jobs)
    always = [item for name, item in wrong.items() if all(name in other for other in others)]
    raise_first([item for item in always if not item.field.startswith(_SEARCHED)])
    return replace(
        task,
        job=job,
        assumptions=framework.assumptions,
        fixed={**plans, **users},
        fixed_by=dict.fromkeys(plans.keys() - users.keys(), framework.name),
        refusals=lambda item: refusals(framework, item, run),
    )


def emitted_row(framework: ExternalFramework, plan: Plan, row: int | None, run: JobValues | None) -> str:
    """Return a layout of a plan in the framework's format.

    Args:
        row: row of the ranking, from 1, or None for the first.
        run: values of the config that was planned, or None.

    Raises:
        StrettoError: there is no such row.
    """
    count = len(plan.ranking)
    if row is not None and row > count:
        raise StrettoError(f"--row is {row}: the plan has {count} rows", hint=f"nearest: --row {count}")

    ranked = plan.ranking[(row or 1) - 1]
    estimate = ranked.estimate
    about = (
        f"{ranked.layout}\n"
        f"predicted on {estimate.job.layout.world} x {estimate.cluster.device.name}: "
        f"{estimate.seconds:.4g} s a step ({estimate.low:.4g} to {estimate.high:.4g})"
    )
    return emit(framework, estimate.job, run, about)
