"""A job on another number of ranks, with the layout that its config lists for it."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.errors import Problem, StrettoError
from stretto.run.config.elastic import ElasticConfig, ElasticLayout
from stretto.run.config.schema import TrainConfig
from stretto.run.config.section import Section

_OF_LAYOUT = ("tp", "cp", "ep", "dp", "pp", "expert_tp", "stages", "encoder_pp")


def rank_choices(config: TrainConfig) -> list[int]:
    """The numbers of ranks that the job can have, the largest first; where layouts are planned, those up to
    that of `layout`.
    """
    world = config.layout.to_layout().world
    if config.elastic.layouts == "auto":
        return list(range(world, 0, -1))
    return sorted({world, *(one.ranks for one in config.elastic.layouts)}, reverse=True)


def for_ranks(config: TrainConfig, ranks: int) -> TrainConfig:
    """The job with its listed layout for so many ranks; the layout that it has now is then one of
    `elastic.layouts`.

    Raises:
        StrettoError: it has none.
    """
    if ranks == config.layout.to_layout().world:
        return config
    entry = next((one for one in config.elastic.listed if one.ranks == ranks), None)
    if entry is None:
        raise no_such_ranks(ranks, rank_choices(config), "elastic.layouts")
    sizes = {name: getattr(entry, name) for name in _OF_LAYOUT}
    layouts = [one for one in config.elastic.listed if one is not entry] + _former(config, entry)
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
    for number, entry in enumerate(config.elastic.listed):
        if entry.ranks != config.layout.to_layout().world:
            one = config.model_copy(update={"elastic": ElasticConfig(layouts=[entry])})
            job = for_ranks(one, entry.ranks)
            yield f"elastic.layouts.{number}", job.model_copy(update={"elastic": ElasticConfig()})


def number_twice(config: TrainConfig) -> Iterator[Problem]:
    """Two layouts of one number of ranks, of which none could be chosen."""
    seen = {config.layout.to_layout().world: "layout"}
    for number, entry in enumerate(config.elastic.listed):
        field = f"elastic.layouts.{number}"
        if (other := seen.setdefault(entry.ranks, field)) != field:
            rule = f"it has {entry.ranks} rank{'s' * (entry.ranks > 1)}, as {other} has"
            yield Problem(field, None, rule, "leave one of them out")
