"""Whether a task can be searched at all, and all of its candidates one by one."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.plan.job import Job
from stretto.plan.rules import problems
from stretto.plan.space import Space
from stretto.plan.task import Candidate, Task


def check(task: Task) -> None:
    """Raise for what no layout can mend."""
    job = Job(task.shape, Layout(), 1, 1, task.sequence, clip=task.clip, precision=task.precision)
    wrong = problems(job)
    if wrong:
        raise wrong[0].error()
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
