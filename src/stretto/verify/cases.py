"""Which layouts to prove: the config's own, a list from a file, or every legal one for a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from stretto.config.check import job_of
from stretto.config.describe import allowed
from stretto.config.schema import LayoutConfig, ScheduleConfig, TrainConfig
from stretto.errors import StrettoError, nearest
from stretto.plan.rules import Problem, problems
from stretto.schedule import names, options
from stretto.schedule.program import Program

_EXAMPLE = "write lines such as: - {tp: 2, dp: 2, pp: 1}"
_AXES = ("tp", "dp", "pp")


@dataclass(frozen=True)
class Case:
    """One layout with its schedule."""

    tp: int
    dp: int
    pp: int
    schedule: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        told = "".join(f" {name}={_word(value)}" for name, value in self.options.items())
        return f"tp{self.tp} dp{self.dp} pp{self.pp} {self.schedule}{told}"

    @property
    def ranks(self) -> int:
        """Ranks that it needs."""
        return self.tp * self.dp * self.pp

    def apply(self, config: TrainConfig) -> TrainConfig:
        """The config with this layout, in float64 on the CPU; without clipping where the schedule has none.

        Raises:
            pydantic.ValidationError: an option's value is of the wrong type.
        """
        layout = config.layout.model_copy(update={"tp": self.tp, "dp": self.dp, "pp": self.pp})
        schedule = ScheduleConfig(name=self.schedule, **self.options)
        train = config.train.model_copy(update={"dtype": "float64", "device": "cpu"})
        applied = config.model_copy(update={"layout": layout, "schedule": schedule, "train": train})
        program = _program(applied)
        if program is not None and program.versions:
            optim = config.optim.model_copy(update={"clip": None})
            applied = applied.model_copy(update={"optim": optim})
        return applied

    def problems(self, config: TrainConfig) -> list[Problem]:
        """The rules that it breaks."""
        return problems(job_of(self.apply(config)))


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _program(config: TrainConfig) -> Program | None:
    job = job_of(config)
    try:
        return job.program() if job.microbatches else None
    except StrettoError:
        return None


def own_case(config: TrainConfig) -> Case:
    """The config's own layout."""
    layout, schedule = config.layout, config.schedule
    return Case(layout.tp, layout.dp, layout.pp, schedule.name, schedule.options)


def every_case(config: TrainConfig, ranks: int) -> list[Case]:
    """Every legal tp x dp x pp whose product is `ranks`, each with every schedule: with its options as they
    are, and with other ones where it takes any.
    """
    found: list[Case] = []
    for tp, dp, pp in _layouts(ranks):
        for name in names():
            for choices in _choices(name, pp):
                cases = (Case(tp, dp, pp, name, given) for given in choices)
                legal = next((case for case in cases if not case.problems(config)), None)
                if legal is not None and legal not in found:
                    found.append(legal)
    return found


def untied_only(config: TrainConfig, ranks: int) -> list[str]:
    """The schedules that are left out of `every_case`, on some layout, because the embedding is tied."""
    if not config.shape().tied:
        return []
    return [
        name
        for name in names()
        if any(
            [problem.field for problem in Case(tp, dp, pp, name).problems(config)] == ["model.tied"]
            for tp, dp, pp in _layouts(ranks)
        )
    ]


def every_layout(config: TrainConfig, ranks: int) -> list[Case]:
    """Every tp x dp x pp whose product is `ranks` and that the config's own schedule can take."""
    own = own_case(config)
    given = {**own.options, **_quick(own.schedule)}  # a search need not be a good one to say whether it can
    cases = [Case(tp, dp, pp, own.schedule, given) for tp, dp, pp in _layouts(ranks)]
    return [replace(case, options=own.options) for case in cases if not case.problems(config)]


def _layouts(ranks: int) -> Iterator[tuple[int, int, int]]:
    for tp in _divisors(ranks):
        for dp in _divisors(ranks // tp):
            yield tp, dp, ranks // tp // dp


def _choices(name: str, pp: int) -> list[list[dict[str, Any]]]:
    """The options to prove a schedule with, each time the first that is legal."""
    known, other = options(name), dict[str, Any]()
    base = _quick(name)
    for option, value in _OTHER.items():
        if option in known:
            other[option] = value(pp)
    if not other:
        return [[base]]
    # all of them at once, or as many as the model and the batch allow
    fewer = (
        [{k: v for k, v in other.items() if k != left_out} for left_out in other] if len(other) > 1 else []
    )
    return [[base], [{**base, **some} for some in (other, *fewer)]]


def _quick(name: str) -> dict[str, Any]:
    """The least effort of a schedule that is searched."""
    return {"effort": 0.0} if "effort" in options(name) else {}


# values that are no schedule's default, by pipeline ranks
_OTHER = {
    "chunks": lambda pp: 3,
    "group": lambda pp: pp + 1,
    "waves": lambda pp: 2,
    "vertical_sync": lambda pp: True,
    "memory": lambda pp: 1.0 + pp // 2,
    "split": lambda pp: False,
}


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def smaller(config: TrainConfig, ranks: int) -> TrainConfig:
    """The same model on a batch that is as small as proves as much: one sample a microbatch, not more than
    two microbatches for each rank, of at most 32 tokens.
    """
    units = config.batch.global_size // config.batch.micro_size
    batch = config.batch.model_copy(update={"global_size": min(units, 2 * ranks), "micro_size": 1})
    model = config.model.model_copy(update={"positions": config.shape().sequence})
    data = config.data.model_copy(update={"sequence": min(config.data.sequence, 32)})
    return config.model_copy(update={"batch": batch, "data": data, "model": model})


def cases_from_file(path: Path, config: TrainConfig) -> list[Case]:
    """Cases from a YAML list of mappings with tp, dp, pp, schedule and the schedule's options.

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
    given = cast("dict[str, Any]", row)
    fields = [*_AXES, "schedule", *(name for name in ScheduleConfig.model_fields if name != "name")]
    for key in given:
        if key not in fields:
            near = nearest(str(key), fields)
            raise StrettoError(
                f"{where} has the key {key!r}",
                hint=f"did you mean {near!r}?" if near else f"keys: {', '.join(fields)}",
            )
    name = given.get("schedule", config.schedule.name)
    if not isinstance(name, str):
        raise StrettoError(f"{where}: schedule is {name!r}, must be the name of a schedule", hint=_EXAMPLE)
    if name not in names():
        near = nearest(name, names())
        raise StrettoError(
            f"{where}: there is no schedule {name!r}",
            hint=f"did you mean {near!r}?" if near else f"one of {', '.join(names())}",
        )
    sizes = {axis: given.get(axis, 1) for axis in _AXES}
    chosen = {key: value for key, value in given.items() if key not in (*_AXES, "schedule")}
    _check(LayoutConfig, sizes, where)
    _check(ScheduleConfig, chosen, where)
    case = Case(**sizes, schedule=name, options={k: v for k, v in chosen.items() if v is not None})
    if found := case.problems(config):
        raise StrettoError(f"{where} ({case}): {found[0]}", hint=found[0].fix)
    return case


def _check(section: type[LayoutConfig | ScheduleConfig], values: dict[str, Any], where: str) -> None:
    """That the section takes these values."""
    try:
        section.model_validate(values)
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        raise StrettoError(
            f"{where}: {key} is {values[key]!r}, must be {allowed(section.model_fields[key])}", hint=_EXAMPLE
        ) from None
