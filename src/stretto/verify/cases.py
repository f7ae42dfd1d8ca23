"""Which layouts to prove: the config's own, a list from a file, or every legal one for a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from stretto.config.check import job_of
from stretto.config.schema import TrainConfig
from stretto.errors import StrettoError, nearest
from stretto.plan.rules import problems
from stretto.schedule import names
from stretto.schedule.registry import options

_EXAMPLE = "write lines such as: - {tp: 2, dp: 2, pp: 1}"


@dataclass(frozen=True)
class Case:
    """One layout with its schedule."""

    tp: int
    dp: int
    pp: int
    schedule: str
    chunks: int | None = None
    group: int | None = None

    def __str__(self) -> str:
        given = {"chunks": self.chunks, "group": self.group}
        told = "".join(f" {name}={value}" for name, value in given.items() if value)
        return f"tp{self.tp} dp{self.dp} pp{self.pp} {self.schedule}{told}"

    @property
    def ranks(self) -> int:
        """Ranks that it needs."""
        return self.tp * self.dp * self.pp

    def apply(self, config: TrainConfig) -> TrainConfig:
        """The config with this layout, in float64 on the CPU."""
        layout = config.layout.model_copy(update={"tp": self.tp, "dp": self.dp, "pp": self.pp})
        schedule = config.schedule.model_copy(
            update={"name": self.schedule, "chunks": self.chunks, "group": self.group}
        )
        train = config.train.model_copy(update={"dtype": "float64", "device": "cpu"})
        return config.model_copy(update={"layout": layout, "schedule": schedule, "train": train})

    def legal(self, config: TrainConfig) -> bool:
        """Whether the rules allow it."""
        return not problems(job_of(self.apply(config)))


def own_case(config: TrainConfig) -> Case:
    """The config's own layout."""
    layout, schedule = config.layout, config.schedule
    return Case(layout.tp, layout.dp, layout.pp, schedule.name, schedule.chunks, schedule.group)


def every_case(config: TrainConfig, ranks: int) -> list[Case]:
    """Every legal tp x dp x pp x schedule x chunks whose product is `ranks`."""
    return [case for case in _candidates(config, ranks) if case.legal(config)]


def _candidates(config: TrainConfig, ranks: int) -> Iterator[Case]:
    layers = config.shape().layers + 2
    for tp in _divisors(ranks):
        for dp in _divisors(ranks // tp):
            pp = ranks // tp // dp
            for name in names():
                if "chunks" in options(name):
                    for chunks in range(2, layers // pp + 1):
                        yield Case(tp, dp, pp, name, chunks)
                else:
                    yield Case(tp, dp, pp, name)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def cases_from_file(path: Path, config: TrainConfig) -> list[Case]:
    """Cases from a YAML list of mappings with tp, dp, pp, schedule, chunks, group.

    Axes that are left out are 1, the schedule is the config's.

    Raises:
        StrettoError: not such a list, an unknown key, a layout that is not legal, or layouts of different
            sizes.
    """
    try:
        rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StrettoError(
            f"{path}: cannot be read: {error.strerror}", hint="all, or a file's name"
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
    base: dict[str, Any] = {"tp": 1, "dp": 1, "pp": 1, "schedule": config.schedule.name, "chunks": None}
    given: dict[str, Any] = {**base, "group": None, **cast("dict[str, Any]", row)}
    for key, value in given.items():
        if key not in (*base, "group"):
            near = nearest(str(key), base)
            raise StrettoError(
                f"{where} has the key {key!r}",
                hint=f"did you mean {near!r}?" if near else f"keys: {', '.join(base)}",
            )
        _check_value(where, key, value)
    case = Case(**given)
    if case.schedule not in names():
        near = nearest(case.schedule, names())
        raise StrettoError(
            f"{where}: there is no schedule {case.schedule!r}",
            hint=f"did you mean {near!r}?" if near else f"one of {', '.join(names())}",
        )
    if found := problems(job_of(case.apply(config))):
        raise StrettoError(f"{where} ({case}): {found[0]}", hint=found[0].fix)
    return case


def _check_value(where: str, key: str, value: Any) -> None:
    if key == "schedule":
        good, wanted = isinstance(value, str), "the name of a schedule"
    else:
        good = (type(value) is int and value > 0) or (value is None and key in ("chunks", "group"))
        wanted = "a whole number above 0"
    if not good:
        raise StrettoError(f"{where}: {key} is {value!r}, must be {wanted}", hint=_EXAMPLE)
