"""The layouts to prove: one at a time, all that a number of ranks can take, or those of a YAML file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from stretto.errors import Problem, StrettoError, nearest
from stretto.layout.layout import AXES
from stretto.layout.shards import Mode
from stretto.program import names, options
from stretto.program.program import Program
from stretto.run.config.describe import allowed
from stretto.run.config.job import job_of
from stretto.run.config.model import ExpertConfig, ModelConfig
from stretto.run.config.schema import LayoutConfig, RecomputeConfig, ScheduleConfig, TrainConfig
from stretto.run.config.section import Section
from stretto.run.config.states import DataParallelConfig
from stretto.spec.attention import ContextKind
from stretto.spec.data_parallel import GatherChoice, Offload, ReduceChoice
from stretto.spec.job import RecomputeMode
from stretto.spec.rules import problems

SHARES = (
    "mode",
    "shard_states",
    "shard_gradients",
    "shard_parameters",
    "reduce",
    "gather",
    "offload",
    "offload_parameters",
)  # fields of section `dp`, and of a case

LEAST_EPS = 1e-8
"""Adam and LAMB divide a gradient by its own size plus eps. A gradient that is zero but for rounding, like
that of the bias of attention keys, differs between layouts in every digit; without an eps far above float64's
rounding error, so would its update."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layout with its schedule, and which of the other ways to save memory it uses.

    `recompute` is the mode of it; of the config's own mode all other settings are kept. What begins with
    `mode` is as in section `dp` of the config.
    """

    tp: int
    dp: int
    pp: int
    schedule: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    sequence_parallel: bool = False
    context: ContextKind = "ring"
    recompute: RecomputeMode = "none"
    shard_inputs: bool = False
    mode: Mode = "ddp"
    shard_states: int | None = None
    shard_gradients: int | None = None
    shard_parameters: int | None = None
    reduce: ReduceChoice = "auto"
    gather: GatherChoice = "auto"
    offload: Offload = "none"
    offload_parameters: Offload = "none"

    def __str__(self) -> str:
        chosen = self.options.items()
        return " ".join([self.where, self.schedule, *(f"{name}={_word(value)}" for name, value in chosen)])

    @property
    def where(self) -> str:
        """All but the schedule: sizes of axes, and what is not as usual."""
        sizes = [f"{axis}{getattr(self, axis)}" for axis in ("tp", "dp", "pp")]
        sizes[1:1] = [f"cp{self.cp}"] if self.cp > 1 else []
        sizes += [f"ep{self.ep}"] if self.ep > 1 else []
        sizes += [] if self.expert_tp is None else [f"expert_tp{self.expert_tp}"]
        used = {
            "sp": self.sequence_parallel,
            self.context: self.context != "ring",
            f"recompute={self.recompute}": self.recompute != "none",
            "shard_inputs": self.shard_inputs,
            self.mode: self.mode != "ddp",
            **{f"{name}={getattr(self, name)}": getattr(self, name) != USUAL[name] for name in SHARES[1:]},
        }
        return " ".join([*sizes, *(name for name, on in used.items() if on)])

    @property
    def ranks(self) -> int:
        """Ranks that it needs."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def shares(self) -> dict[str, Any]:
        """How ranks share parameters, gradients and states, by the fields of the config."""
        return {name: getattr(self, name) for name in SHARES}

    def apply(self, config: TrainConfig) -> TrainConfig:
        """The config with this layout, in float64 on the CPU, optimiser states too; without clipping where
        the schedule has none, and with an `optim.eps` of at least LEAST_EPS.

        Raises:
            pydantic.ValidationError: an option's value is of the wrong type.
            StrettoError: the sizes make no layout.
        """
        axes = {name: getattr(self, name) for name in (*AXES, "expert_tp")}
        used = {"sequence_parallel": self.sequence_parallel, "context": self.context}
        layout = config.layout.model_copy(update={**axes, **used, "order": _order(config.layout)})
        schedule = ScheduleConfig(name=self.schedule, **self.options)
        train = config.train.model_copy(update={"dtype": "float64", "device": "cpu"})
        parts = {
            "layout": layout,
            "schedule": schedule,
            "train": train,
            "recompute": self._recompute(config),
            "dp": self._dp(config),
            "optim": config.optim.model_copy(
                update={"states": "float32", "eps": max(config.optim.eps, LEAST_EPS)}
            ),
        }
        applied = config.model_copy(update=parts)
        program = _program(applied)
        if program is not None and program.versions:
            optim = applied.optim.model_copy(update={"clip": None})
            applied = applied.model_copy(update={"optim": optim})
        return applied

    def _recompute(self, config: TrainConfig) -> RecomputeConfig:
        configured = config.recompute
        if configured.mode == self.recompute:
            return configured.model_copy(update={"shard_inputs": self.shard_inputs})
        return RecomputeConfig(mode=self.recompute, shard_inputs=self.shard_inputs)

    def _dp(self, config: TrainConfig) -> DataParallelConfig:
        path = config.dp.path
        if path is None and "nvme" in (self.offload, self.offload_parameters):
            path = tempfile.gettempdir()  # a proof needs a file, not a fast one
        return config.dp.model_copy(update={**self.shares, "path": path})

    def problems(self, config: TrainConfig) -> list[Problem]:
        """The rules that it breaks."""
        try:
            return problems(job_of(self.apply(config)))
        except StrettoError as error:
            return [error.within("layout")]


USUAL = {one.name: one.default for one in fields(Case) if one.name in SHARES}


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _order(layout: LayoutConfig) -> str:
    """The config's order of axes, with those that it leaves out before pp."""
    names = layout.order.split("-")
    at = names.index("pp") if "pp" in names else len(names)
    return "-".join([*names[:at], *(axis for axis in AXES if axis not in names), *names[at:]])


def _program(config: TrainConfig) -> Program | None:
    job = job_of(config)
    try:
        return job.program() if job.microbatches else None
    except StrettoError:
        return None


def own_case(config: TrainConfig) -> Case:
    """The config's own layout."""
    layout = config.layout
    recompute = config.recompute
    schedule = config.schedule
    dp = config.dp
    return Case(
        tp=layout.tp,
        dp=layout.dp,
        pp=layout.pp,
        schedule=schedule.name,
        options=schedule.options,
        cp=layout.cp,
        ep=layout.ep,
        expert_tp=layout.expert_tp,
        sequence_parallel=layout.sequence_parallel,
        context=layout.context,
        recompute=recompute.mode,
        shard_inputs=recompute.shard_inputs,
        **{name: getattr(dp, name) for name in SHARES},
    )


def every_layout(config: TrainConfig, ranks: int) -> list[Case]:
    """Every tp x dp x pp that the config can take on so many ranks, with all else as it is."""
    configured = own_case(config)
    quick_options = {
        **configured.options,
        **quick(configured.schedule),
    }  # a search need not be a good one to say whether it can
    sizes = [(tp, dp, pp) for tp, cp, dp, pp in dense_layouts(ranks) if cp == configured.cp]
    cases = [replace(configured, tp=tp, dp=dp, pp=pp, options=quick_options) for tp, dp, pp in sizes]
    return [replace(case, options=configured.options) for case in cases if not case.problems(config)]


def dense_layouts(ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """Every tp, cp, dp, pp whose product is `ranks`."""
    for tp in divisors(ranks):
        for cp in divisors(ranks // tp):
            for dp in divisors(ranks // tp // cp):
                yield tp, cp, dp, ranks // tp // cp // dp


def quick(name: str) -> dict[str, Any]:
    """The least effort of a schedule that is searched."""
    return {"effort": 0.0} if "effort" in options(name) else {}


def divisors(n: int) -> list[int]:
    """All of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def smaller(config: TrainConfig, ranks: int) -> TrainConfig:
    """As little of the model and the batch as proves as much: as many heads, experts and entries of the
    vocabulary, but narrow ones; not more layers than any schedule can tell apart; two microbatches for each
    rank, which every layout can share, of two samples (one would hide what mixes them up) of at most 32
    tokens. Nothing is recomputed or shared: what proves it says so.
    """
    batch = config.batch.model_copy(update={"global_size": _SAMPLES * 2 * ranks, "micro_size": _SAMPLES})
    data = config.data.model_copy(update={"sequence": min(config.data.sequence, _TOKENS)})
    model = _narrow(config, ranks)
    usual = {"recompute": RecomputeConfig(), "dp": DataParallelConfig(path=config.dp.path)}
    parts = {"batch": batch, "data": data, "model": model, **usual}
    return config.model_copy(update=parts)


_SAMPLES = 2  # of a microbatch
_TOKENS = 32
_HEAD = 16
_WIDTH = 64  # of a sample, features of a head, inner width of an MLP
_CHUNKS = 4  # stages of a rank, at most


def _narrow(config: TrainConfig, ranks: int) -> ModelConfig:
    shape, model = config.shape(), config.model

    def width(size: int) -> int:
        """A small one that the same numbers of ranks divide."""
        return min(size, _WIDTH + (size - _WIDTH) % ranks)

    narrow: dict[str, Any] = {
        "positions": shape.sequence,
        "layers": min(shape.layers, _CHUNKS * ranks),
        "hidden": min(shape.hidden, shape.heads * _HEAD),
        "kv_heads": shape.kv_heads,
        "head_dim": min(shape.head_dim, _HEAD),
        "ffn": width(shape.ffn),
    }
    if shape.moe is not None:
        widths = {"ffn": width(shape.expert_ffn), "shared_ffn": width(shape.moe.shared_ffn)}
        said = {name: getattr(shape.moe, name) for name in ExpertConfig.model_fields}
        experts: dict[str, Any] = {**said, **widths}
        narrow["moe"] = ExpertConfig(**experts)
    return model.model_copy(update=narrow)


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
    keys = cast("dict[str, Any]", row)
    _check_keys(keys, where)
    layout = {key: keys[key] for key in _LAYOUT if key in keys}
    recompute = {key: keys[key] for key in _RECOMPUTE if key in keys}
    shares = {key: keys[key] for key in SHARES if key in keys}
    options = {key: v for key, v in keys.items() if key not in (*_LAYOUT, *_RECOMPUTE, *SHARES, "schedule")}
    _check(LayoutConfig, {key: key for key in layout}, layout, where)
    _check(RecomputeConfig, _RECOMPUTE, recompute, where)
    _check(DataParallelConfig, {key: key for key in shares}, shares, where)
    _check(ScheduleConfig, {key: key for key in options}, options, where)
    configured = own_case(config)
    kept: dict[str, Any] = {
        **dict.fromkeys(_AXES, 1),
        "sequence_parallel": configured.sequence_parallel,
        "context": configured.context,
        "recompute": configured.recompute,
    }
    if recompute.get("recompute", configured.recompute) == configured.recompute:
        kept["shard_inputs"] = configured.shard_inputs
    if shares.get("mode", configured.mode) == configured.mode:
        kept |= configured.shares
    case = Case(
        **{**kept, **layout, **recompute, **shares},
        schedule=_schedule(keys.get("schedule", config.schedule.name), where),
        options={key: value for key, value in options.items() if value is not None},
    )
    if broken := case.problems(config):
        raise StrettoError(f"{where} ({case}): {broken[0].message}", hint=broken[0].fix)
    return case


def _check_keys(keys: dict[str, Any], where: str) -> None:
    options = [name for name in ScheduleConfig.model_fields if name != "name"]
    fields = [*_LAYOUT, *_RECOMPUTE, *SHARES, "schedule", *options]
    for key in keys:
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
