"""Layouts of a job by number of ranks, for runs that go on with fewer or more of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from stretto.errors import Problem, StrettoError
from stretto.run.config.section import Section

if TYPE_CHECKING:
    from stretto.run.config.schema import TrainConfig

_OF_LAYOUT = ("tp", "cp", "ep", "dp", "pp", "expert_tp", "stages", "encoder_pp")


class ElasticLayout(Section):
    """A layout of another number of ranks than `layout`'s. Sizes that are left out are 1; what is not said
    here is as in `layout`, `batch` and `schedule`.
    """

    tp: int = Field(default=1, gt=0, description="As in `layout`.")
    cp: int = Field(default=1, gt=0, description="As in `layout`.")
    ep: int = Field(default=1, gt=0, description="As in `layout`.")
    dp: int = Field(default=1, gt=0, description="As in `layout`.")
    pp: int = Field(default=1, gt=0, description="As in `layout`.")
    expert_tp: int | None = Field(default=None, gt=0, description="As in `layout`.")
    stages: list[int] | None = Field(default=None, description="As in `layout`.")
    encoder_pp: int | None = Field(default=None, gt=0, description="As in `layout`.")
    micro_size: int | None = Field(
        default=None, gt=0, description="Samples per microbatch; null: `batch.micro_size`."
    )
    schedule: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the schedule, with its usual options; null: that of `schedule`.",
    )

    @property
    def ranks(self) -> int:
        """Processes of the layout; experts share those of other axes."""
        return self.tp * self.cp * self.dp * self.pp


class ElasticConfig(Section):
    """Fewer or more ranks: a run goes on from its checkpoint with the layout for the number that there is,
    with the same global batch and the same samples in the same order. `WORLD_SIZE` of torchrun chooses it, or
    `--ranks`; where a local rank dies twice in one step, a restart takes the next smaller one.
    """

    layouts: list[ElasticLayout] = Field(
        default_factory=list[ElasticLayout],
        description="One layout for each further number of ranks.",
    )


def rank_choices(config: TrainConfig) -> list[int]:
    """The numbers of ranks that the job can have, the largest first."""
    numbers = {config.layout.to_layout().world, *(one.ranks for one in config.elastic.layouts)}
    return sorted(numbers, reverse=True)


def for_ranks(config: TrainConfig, ranks: int) -> TrainConfig:
    """The job with its layout for so many ranks; the layout that it has now is one of `elastic.layouts` then.

    Raises:
        StrettoError: it has none.
    """
    if ranks == config.layout.to_layout().world:
        return config
    entry = next((one for one in config.elastic.layouts if one.ranks == ranks), None)
    if entry is None:
        raise no_such_ranks(ranks, rank_choices(config), "elastic.layouts")
    sizes = {name: getattr(entry, name) for name in _OF_LAYOUT}
    layouts = [one for one in config.elastic.layouts if one is not entry] + _former(config, entry)
    changes: dict[str, Section] = {
        "layout": config.layout.model_copy(update=sizes),
        "elastic": ElasticConfig(layouts=layouts),
    }
    if entry.micro_size is not None:
        changes["batch"] = config.batch.model_copy(update={"micro_size": entry.micro_size})
    if entry.schedule is not None:
        changes["schedule"] = type(config.schedule)(name=entry.schedule)
    return config.model_copy(update=changes)


def _former(config: TrainConfig, entry: ElasticLayout) -> list[ElasticLayout]:
    """The layout that `entry` takes the place of, as an entry; none where its schedule has options, which no
    entry can say.
    """
    schedule = config.schedule
    if entry.schedule is not None and (schedule.options or schedule.file is not None):
        return []
    sizes = {name: getattr(config.layout, name) for name in _OF_LAYOUT}
    micro_size = None if entry.micro_size is None else config.batch.micro_size
    name = None if entry.schedule is None else schedule.name
    return [ElasticLayout(**sizes, micro_size=micro_size, schedule=name)]


def no_such_ranks(ranks: int, choices: list[int], field: str) -> StrettoError:
    """The error of a number of ranks that a config has no layout for."""
    known = ", ".join(map(str, choices))
    return StrettoError(
        f"{field} has no layout of {ranks} rank{'s' * (ranks > 1)}; the config's are of {known}",
        hint=f"add one to {field}, or start {min(choices, key=lambda one: abs(one - ranks))} ranks",
    )


def alternatives(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """The job on every further number of ranks, beside the field that has its layout."""
    for number, entry in enumerate(config.elastic.layouts):
        if entry.ranks != config.layout.to_layout().world:
            one = config.model_copy(update={"elastic": ElasticConfig(layouts=[entry])})
            job = for_ranks(one, entry.ranks)
            yield f"elastic.layouts.{number}", job.model_copy(update={"elastic": ElasticConfig()})


def number_twice(config: TrainConfig) -> Iterator[Problem]:
    """Two layouts of one number of ranks, of which none could be chosen."""
    seen = {config.layout.to_layout().world: "layout"}
    for number, entry in enumerate(config.elastic.layouts):
        field = f"elastic.layouts.{number}"
        if (other := seen.setdefault(entry.ranks, field)) != field:
            rule = f"it has {entry.ranks} rank{'s' * (entry.ranks > 1)}, as {other} has"
            yield Problem(field, None, rule, "leave one of them out")
