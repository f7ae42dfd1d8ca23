"""A job on another number of ranks, with the layout that its config lists for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stretto.errors import Problem, StrettoError
from stretto.run.config.schema import ElasticConfig, ElasticLayout, TrainConfig

_OF_LAYOUT = ("tp", "cp", "ep", "dp", "pp", "expert_tp", "stages", "encoder_pp")


def rank_choices(config: TrainConfig) -> list[int]:
    """Return the numbers of ranks that the job can have, the largest first; if layouts are planned, all up
    to that of `layout`.
    """
    if config.elastic.layouts == "auto":
        return list(range(_world(config), 0, -1))
    base = config.configured
    return sorted({_world(base), *(layout.ranks for layout in base.elastic.listed)}, reverse=True)


def for_ranks(config: TrainConfig, ranks: int) -> TrainConfig:
    """Return the job with its layout for `ranks` ranks; fields that it leaves out come from the config.

    The config's own layout becomes one of `elastic.layouts`.

    Raises:
        StrettoError: there is no such layout.
    """
    base = config.configured
    if ranks == _world(config):
        return config
    if ranks == _world(base):
        return base
    entry = next((layout for layout in base.elastic.listed if layout.ranks == ranks), None)
    if entry is None:
        raise no_layout_error(ranks, rank_choices(config), "elastic.layouts")
    return config.replacing(_sections(base, entry) | {"elastic": ElasticConfig(layouts=_others(base, entry))})


def _world(config: TrainConfig) -> int:
    return config.layout.to_layout().world


def _sections(base: TrainConfig, entry: ElasticLayout) -> dict[str, Any]:
    """Return the sections of a job with this layout in place of its own."""
    sizes = {name: getattr(entry, name) for name in _OF_LAYOUT}
    sections: dict[str, Any] = {"layout": replace(base.layout, **sizes)}
    if entry.micro_size is not None:
        sections["batch"] = replace(base.batch, micro_size=entry.micro_size)
    if entry.schedule is not None:
        sections["schedule"] = type(base.schedule)(name=entry.schedule)
    return sections


def _others(base: TrainConfig, entry: ElasticLayout) -> list[ElasticLayout]:
    """The job's other layouts, its own among them, with what they leave out written where `entry` changes it.
    Those with options of the job's own schedule are left out where `entry` has another: no entry can say
    them.
    """
    former = ElasticLayout(**{name: getattr(base.layout, name) for name in _OF_LAYOUT})
    others, schedule = list[ElasticLayout](), base.schedule
    for other in (*(layout for layout in base.elastic.listed if layout is not entry), former):
        changes = dict[str, Any]()
        if entry.micro_size is not None and other.micro_size is None:
            changes["micro_size"] = base.batch.micro_size
        if entry.schedule is not None and other.schedule is None:
            if schedule.options or schedule.file is not None:
                continue
            changes["schedule"] = schedule.name
        others.append(replace(other, **changes))
    return others


def no_layout_error(ranks: int, choices: list[int], field: str) -> StrettoError:
    """Return the error of a number of ranks that a config has no layout for."""
    listed = ", ".join(map(str, choices))
    return StrettoError(
        f"{field} has no layout of {ranks} rank{'s' * (ranks > 1)}; the config's are of {listed}",
        hint=f"add one to {field}, or start {min(choices, key=lambda choice: abs(choice - ranks))} ranks",
    )


def alternatives(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Yield the job on every further number of ranks, with the field of its layout."""
    base = config.configured
    none: dict[str, Any] = {"elastic": ElasticConfig()}
    if _world(base) != _world(config):
        yield "layout", replace(base, **none)
    for index, entry in enumerate(base.elastic.listed):
        if entry.ranks not in (_world(base), _world(config)):
            yield f"elastic.layouts.{index}", replace(base, **_sections(base, entry), **none)


def duplicate_rank_counts(config: TrainConfig) -> Iterator[Problem]:
    """Report layouts with the same number of ranks, between which nothing could choose."""
    base = config.configured
    fields = {_world(base): "layout"}
    for index, entry in enumerate(base.elastic.listed):
        field = f"elastic.layouts.{index}"
        if (other := fields.setdefault(entry.ranks, field)) != field:
            rule = f"it has {entry.ranks} rank{'s' * (entry.ranks > 1)}, as {other} has"
            yield Problem(field, None, rule, "leave one of them out")
