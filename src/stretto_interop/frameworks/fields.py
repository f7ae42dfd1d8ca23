"""The fields of a job and of the run around it, typed and by name: what every framework must map.

`JOB.layout.tp` stands for a field: to pyright it is the `int` that a job has there, at run time its path.
Rules name fields in this way, and look their values up (`values[JOB.layout.tp]`). Names are those of a
config. They follow from its schema and from the dataclasses of a job: a new field of either is one that no
framework maps yet, which a test reports.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar, cast

from stretto.errors import StrettoError
from stretto.job.attention import AttentionShape, LatentShape, RopeScaling
from stretto.job.data_parallel import DataParallelSettings, Precision
from stretto.job.experts import ExpertShape
from stretto.job.finetune import TrainedParameters
from stretto.job.initial import Initial
from stretto.job.job import Job, Recompute
from stretto.job.lora import LoraShape
from stretto.job.optimiser import Optimiser, RateSchedule
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.program.program import Program
from stretto.run.config.required import FIELDS
from stretto.run.config.schema import ScheduleConfig, TrainConfig
from stretto.run.config.section import fields_of

T = TypeVar("T")

# ------------------------------------------------------------------ names

# fields of a job that are not chosen: properties of the machine, what follows from others, and ways of other
# frameworks, for predictions
NOT_CHOSEN = frozenset(
    {"world", "devices", "unified_memory", "framework", "fused_loss", "offset", "adapters", "state_size"}
    | {"steps_between_drains", "async_save"}
)
# names that a config has for fields of a job, if they are not those of a section
_JOB = {
    "global_batch": "batch.global_size",
    "micro_batch": "batch.micro_size",
    "sequence": "data.sequence",
    "target_sequence": "data.target_sequence",
    "encoder_pp": "layout.encoder_pp",
    "schedule": "schedule.name",
    "stage_layers": "layout.stages",
    "custom_program": "schedule.file",
    "expert_tp": "layout.expert_tp",
    "sequence_parallel": "layout.sequence_parallel",
    "context": "layout.context",
    "attention": "train.attention",
    "loss_chunk": "train.loss_chunk",
    "loss": "train.loss",
    "vocab_multiple": "train.vocab_multiple",
    "bucket": "train.bucket_mib",
    "compile": "train.compile",
    "graphs": "train.graphs",
}
# fields of a job that have fields themselves: the section's name, its class, and for a part that a model may
# lack the field that is None without it
_SECTIONS: Mapping[tuple[str, ...], tuple[str, type[Any], str | None]] = {
    ("shape",): ("model", ModelShape, None),
    ("shape", "moe"): ("model.moe", ExpertShape, "experts"),
    ("shape", "rope"): ("model.rope", RopeScaling, "type"),
    ("shape", "lora"): ("lora", LoraShape, "rank"),
    ("shape", "attention"): ("model.attention", AttentionShape, None),
    ("shape", "attention", "latent"): ("model.attention.latent", LatentShape, "kv_rank"),
    ("initial",): ("model", Initial, None),
    ("trained",): ("finetune", TrainedParameters, None),
    ("layout",): ("layout", Layout, None),
    ("recompute",): ("recompute", Recompute, None),
    ("dp",): ("dp", DataParallelSettings, None),
    ("precision",): ("precision", Precision, None),
    ("optimiser",): ("optim", Optimiser, None),
    ("optimiser", "rate"): ("optim.rate", RateSchedule, None),
}
_RENAMED = {"model.sequence": "model.positions", "precision.dtype": "train.dtype"}


def _paths() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name and path of every field of a job."""
    for entry in fields(Job):
        if entry.name in _JOB:
            yield _JOB[entry.name], (entry.name,)
    for name in ScheduleConfig.option_names():
        yield f"schedule.{name}", ("options", name)
    for path, (section, kind, _) in _SECTIONS.items():
        for entry in fields(kind):
            deeper = (*path, entry.name)
            # a layout of one expert-parallel rank does not keep expert_tp; the job does
            if deeper not in _SECTIONS and entry.name not in NOT_CHOSEN and deeper != ("layout", "expert_tp"):
                name = f"{section}.{entry.name}"
                yield _RENAMED.get(name, name), deeper


PATHS: Mapping[str, tuple[str, ...]] = dict(_paths())
_NAMES = {path: name for name, path in PATHS.items()}
# `model.preset` is another way to give the sizes
_OF_RUN = tuple(
    name for name in (".".join(path) for path, _ in fields_of(TrainConfig)) if name != "model.preset"
)
# of a job, and yet nothing that a plan decides
_UNPLANNED = {
    "train.bucket_mib",
    "train.compile",
    "train.graphs",
    *(f"model.{entry.name}" for entry in fields(Initial)),
    "precision.loss_scale",
    "precision.loss_scale_steps",
    *(name for name in PATHS if name.startswith("optim.") and name not in ("optim.name", "optim.states")),
}
# what a job's time and memory depend on
PRICED = frozenset(PATHS) - (_UNPLANNED - {"train.bucket_mib", "optim.clip"})
NAMES: tuple[str, ...] = tuple(dict.fromkeys((*PATHS, *_OF_RUN)))
RUN_DEFAULTS: Mapping[str, Any] = {".".join(path): entry.default for path, entry in fields_of(TrainConfig)}


# ------------------------------------------------------------------ fields


@dataclass(frozen=True)
class _Path:
    """The path of a field; its attributes are paths longer by one name."""

    _names: tuple[str, ...] = ()
    _of_run: bool = False

    def __getattr__(self, name: str) -> _Path:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Path((*self._names, name), self._of_run)

    def __str__(self) -> str:
        return ".".join(self._names) if self._of_run else _NAMES[self._names]


JOB = cast(Job, _Path())
MODEL = JOB.shape
MOE = cast(ExpertShape, MODEL.moe)
ROPE = cast(RopeScaling, MODEL.rope)
LORA = cast(LoraShape, MODEL.lora)
ATTENTION = MODEL.attention
LATENT = cast(LatentShape, ATTENTION.latent)
RATE = JOB.optimiser.rate
# fields that several frameworks map together
DEGREES = (JOB.layout.tp, JOB.layout.cp, JOB.layout.ep, JOB.layout.dp, JOB.layout.pp)
SHARDS = (JOB.dp.shard_states, JOB.dp.shard_gradients, JOB.dp.shard_parameters)
_ADAM = (JOB.optimiser.lr, JOB.optimiser.betas, JOB.optimiser.eps, JOB.optimiser.weight_decay)
_OTHERS = (JOB.optimiser.no_decay, JOB.optimiser.momentum, JOB.optimiser.states, JOB.optimiser.clip)
OPTIMISER = (JOB.optimiser.name, *_ADAM, *_OTHERS)
_DECAY = (RATE.min_ratio, RATE.decay_steps, RATE.decay_fraction, RATE.decay)
LEARNING_RATE = (RATE.schedule, RATE.warmup, RATE.warmup_init, *_DECAY)
# None in a model without the part
EXPERTS: int | None = MOE.experts
KV_RANK: int | None = LATENT.kv_rank
ROPE_TYPE: str | None = ROPE.type
LORA_RANK: int | None = LORA.rank
RUN = cast(TrainConfig, _Path(_of_run=True))  # fields of the run around a job, and options of its schedule


def name_of(field: object) -> str:
    """Return the name of a field, such as "layout.tp" for `JOB.layout.tp`; a name is returned as it is."""
    return str(field)


def names_under(*sections: str) -> tuple[str, ...]:
    """Return the names of all fields of these sections."""
    return tuple(name for name in NAMES if name.startswith(tuple(f"{section}." for section in sections)))


@dataclass(frozen=True)
class JobValues:
    """The values of all fields of a job.

    Attributes:
        values: decided values by field name, of all `NAMES`.
        open: undecided fields that a run needs; `values` has their defaults.
        unsaid: undecided fields that a framework may leave at its own defaults.
    """

    values: Mapping[str, Any] = field(repr=False)
    open: frozenset[str] = frozenset()
    unsaid: frozenset[str] = frozenset()

    def __getitem__(self, field: T) -> T:
        return self.values[name_of(field)]

    def is_open(self, field: object) -> bool:
        """True if a run needs the field and it is undecided."""
        return name_of(field) in self.open

    def is_unsaid(self, field: object) -> bool:
        """True if the field is left at the framework's default."""
        return name_of(field) in self.unsaid

    @cached_property
    def job(self) -> Job:
        """The job; raises StrettoError if the values do not fit each other."""
        return job_from(self.values)


def run_values(config: TrainConfig) -> JobValues:
    """Return the values of all fields of a config; required ones are open."""
    values = {".".join(path): _value_at(config, path) for path, _ in fields_of(TrainConfig)}
    return JobValues(values, frozenset(config.required))


def values_of(job: Job, run: JobValues | None = None) -> JobValues:
    """Return the values of all fields of a job, and of the run around it.

    Without a run, its fields have their defaults, and those that a plan cannot know are open.
    """
    values = dict(RUN_DEFAULTS if run is None else run.values)
    file = values["schedule.file"]
    values |= {name: _value_at(job, path) for name, path in PATHS.items()}
    values["train.bucket_mib"] = job.bucket / 2**20
    if job.custom_program is not None:
        values["schedule.file"] = job.custom_program if run is None else file
    decided = {name: values[name] for name in NAMES}
    if run is not None:
        return JobValues(decided, run.open)
    return JobValues(decided, frozenset(FIELDS), (frozenset(NAMES) - set(PATHS) | _UNPLANNED) - set(FIELDS))


def _value_at(value: Any, path: tuple[str, ...]) -> Any:
    """Return the value at a path of attributes and keys; None below a missing part."""
    for name in path:
        if value is None:
            return None
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
    return value


def job_from(values: Mapping[str, Any]) -> Job:
    """Return the job with these values by name, and a job's defaults for the others.

    Raises:
        StrettoError: sizes or degrees that do not fit each other.
    """
    tree: dict[tuple[str, ...], dict[str, Any]] = {}
    for name, value in values.items():
        path = PATHS.get(name)
        # the name of a file is no program yet
        if path is not None and (path[0] != "custom_program" or isinstance(value, Program)):
            tree.setdefault(path[:-1], {})[path[-1]] = value
    of_job = tree.setdefault((), {})
    layout = tree.get(("layout",), {})
    if layout.get("ep", 1) > 1:
        layout["expert_tp"] = of_job.get("expert_tp")
    if "bucket" in of_job:
        of_job["bucket"] = int(of_job["bucket"] * 2**20)
    for path in sorted(_SECTIONS, key=len, reverse=True):  # what is inside others first
        inside, (_, kind, presence) = tree.get(path), _SECTIONS[path]
        if inside and inside.get(presence or "", inside) is not None:
            tree.setdefault(path[:-1], {})[path[-1]] = kind(**inside)
    options = tree.get(("options",), {})
    of_job["options"] = {name: value for name, value in options.items() if value is not None}
    return Job(**of_job)


@contextmanager
def reading(source: str) -> Generator[None]:
    """Raise StrettoError for values of types that a setting does not take, wherever they cause an error."""
    try:
        yield
    except StrettoError:
        raise
    except (MemoryError, RecursionError) as error:
        raise StrettoError(f"{source}: values in each other, too deep to be read") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        hint = "look at numbers, lists and names there"
        raise StrettoError(f"{source}: no such value is taken ({error})", hint=hint) from error
