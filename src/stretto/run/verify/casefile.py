"""Layouts to prove, from a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from stretto.errors import StrettoError, nearest
from stretto.program import names
from stretto.run.config.describe import allowed
from stretto.run.config.schema import LayoutConfig, RecomputeConfig, ScheduleConfig, TrainConfig
from stretto.run.config.section import Section
from stretto.run.config.states import DataParallelConfig
from stretto.run.verify.cases import SHARES, Case, own_case

_EXAMPLE = "write lines such as: - {tp: 2, dp: 2, pp: 1}"
_AXES = ("tp", "cp", "ep", "dp", "pp")
_LAYOUT = (*_AXES, "expert_tp", "sequence_parallel", "context")
_RECOMPUTE = {"recompute": "mode", "shard_inputs": "shard_inputs"}  # the key, and the config's field


def cases_from_file(path: Path, config: TrainConfig) -> list[Case]:
    """Cases from a YAML list of mappings with the keys of `layout`, `recompute` (its mode), `shard_inputs`,
    those of `dp` but its path, `schedule` (its name) and the schedule's options.

    Axes that are left out are 1, all else is the config's; what belongs to a mode, if the mode is.

    Raises:
        StrettoError: not such a list, an unknown key, a layout that is not legal, or layouts of different
            sizes.
    """
    try:
        rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StrettoError(
            f"{path}: cannot be read: {error.strerror}", hint="all, product, or a file's name"
        ) from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise StrettoError(f"{path}: no YAML: {error}", hint=_EXAMPLE) from None
    if not isinstance(rows, list) or not rows:
        raise StrettoError(f"{path}: no list of layouts", hint=_EXAMPLE)
    cases = [_case(row, f"{path}: layout {at}", config) for at, row in enumerate(cast("list[Any]", rows), 1)]
    sizes = sorted({case.ranks for case in cases})
    if len(sizes) > 1:
        raise StrettoError(f"{path}: layouts of {sizes} ranks", hint="one file for each number of ranks")
    return cases


def _case(row: Any, where: str, config: TrainConfig) -> Case:
    if not isinstance(row, dict):
        raise StrettoError(f"{where} is {row!r}", hint="write a mapping such as {tp: 2, dp: 2, pp: 1}")
    given = cast("dict[str, Any]", row)
    _check_keys(given, where)
    layout = {key: given[key] for key in _LAYOUT if key in given}
    recompute = {key: given[key] for key in _RECOMPUTE if key in given}
    shares = {key: given[key] for key in SHARES if key in given}
    options = {key: v for key, v in given.items() if key not in (*_LAYOUT, *_RECOMPUTE, *SHARES, "schedule")}
    _check(LayoutConfig, {key: key for key in layout}, layout, where)
    _check(RecomputeConfig, _RECOMPUTE, recompute, where)
    _check(DataParallelConfig, {key: key for key in shares}, shares, where)
    _check(ScheduleConfig, {key: key for key in options}, options, where)
    own = own_case(config)
    kept: dict[str, Any] = {
        **dict.fromkeys(_AXES, 1),
        "sequence_parallel": own.sequence_parallel,
        "context": own.context,
        "recompute": own.recompute,
    }
    if recompute.get("recompute", own.recompute) == own.recompute:
        kept["shard_inputs"] = own.shard_inputs
    if shares.get("mode", own.mode) == own.mode:
        kept |= own.shares
    case = Case(
        **{**kept, **layout, **recompute, **shares},
        schedule=_schedule(given.get("schedule", config.schedule.name), where),
        options={key: value for key, value in options.items() if value is not None},
    )
    if found := case.problems(config):
        raise StrettoError(f"{where} ({case}): {found[0].message}", hint=found[0].fix)
    return case


def _check_keys(given: dict[str, Any], where: str) -> None:
    options = [name for name in ScheduleConfig.model_fields if name != "name"]
    fields = [*_LAYOUT, *_RECOMPUTE, *SHARES, "schedule", *options]
    for key in given:
        if key not in fields:
            near = nearest(str(key), fields)
            raise StrettoError(
                f"{where} has the key {key!r}",
                hint=f"did you mean {near!r}?" if near else f"keys: {', '.join(fields)}",
            )


def _schedule(name: Any, where: str) -> str:
    if not isinstance(name, str):
        raise StrettoError(f"{where}: schedule is {name!r}, must be the name of a schedule", hint=_EXAMPLE)
    if name not in names():
        near = nearest(name, names())
        raise StrettoError(
            f"{where}: there is no schedule {name!r}",
            hint=f"did you mean {near!r}?" if near else f"one of {', '.join(names())}",
        )
    return name


def _check(section: type[Section], fields: dict[str, str], values: dict[str, Any], where: str) -> None:
    """That the section takes these values; `fields` are its names for the keys."""
    try:
        section.model_validate({fields[key]: value for key, value in values.items()})
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        key = next(key for key in values if fields[key] == name)
        legal = allowed(section.model_fields[name])
        raise StrettoError(f"{where}: {key} is {values[key]!r}, must be {legal}", hint=_EXAMPLE) from None
