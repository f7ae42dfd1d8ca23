"""Whether a task can be searched at all, and all of its candidates one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.planner.search.space import Space
from stretto.planner.search.task import Candidate, Task
from stretto.spec.rules import problems


def check(task: Task) -> None:
    """Raise for what no layout can mend."""
    job = replace(task.job, layout=Layout(), global_batch=1, micro_batch=1)
    wrong = problems(job)
    if wrong:
        raise wrong[0]
    if task.objective == "tokens_per_dollar" and price_of(task) is None:
        raise StrettoError(
            f"objective tokens_per_dollar: cluster {task.cluster.name!r} has no price",
            hint="give it one in its YAML file: price, dollars an hour of one device",
        )


def price_of(task: Task) -> float | None:
    """Dollars an hour of one device."""
    own = task.cluster.price
    return task.cluster.device.price if own is None else own


def every(task: Task) -> Iterator[Candidate]:
    """All candidates before anything is saved, without bounds; for tests, and small spaces."""
    space = Space(task)
    for place in space.places():
        for order in space.orders(place):
            for dp in space.sharings(place.layout):
                yield Candidate(place, order, dp, space.first_saving())


def nothing_legal(task: Task, space: Space) -> StrettoError:
    """No layout at all is legal: the first rule that was broken, or the numbers do not make a product."""
    for name, (_, example) in space.rejected.items():
        return StrettoError(f"no layout is legal: {example}", hint=f"look at {name}, and at --fix")
    return StrettoError(
        f"no layout of {task.devices} devices is left by what is fixed: "
        + ", ".join(f"{name}={_said(values)}" for name, values in task.fixed.items()),
        hint="tp x cp x dp x pp must be the number of devices",
    )


def _said(values: object) -> str:
    return ",".join(map(str, values)) if isinstance(values, tuple) else str(values)
