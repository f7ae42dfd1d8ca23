"""A job as one flat list of choices, by the names that a config gives them: what every framework must map.

The names follow from the schema of the config and from the dataclasses of a job, so that a new field of
either is a choice that no framework maps yet, which a test reports.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.program.program import Program
from stretto.run.config.required import FIELDS
from stretto.run.config.schema import ScheduleConfig, TrainConfig
from stretto.run.config.section import fields_of
from stretto.spec.attention import AttentionShape, LatentShape, RopeScaling
from stretto.spec.data_parallel import DataParallel, Precision
from stretto.spec.experts import ExpertShape
from stretto.spec.finetune import Trained
from stretto.spec.initial import Initial
from stretto.spec.job import Job, Recompute
from stretto.spec.lora import LoraShape
from stretto.spec.optimiser import Optimiser, RateSchedule
from stretto.spec.shape import ModelShape

# fields of a job that are no choices: facts of the machine, what follows from others, and ways of other
# frameworks, for predictions
NOT_CHOSEN = frozenset(
    {"world", "devices", "one_memory", "framework", "fused_loss", "offset", "adapters"}
    | {"undrained", "async_save"}
)

# names that a config has for fields of a job, where they are not those of a section
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
    "vocab_multiple": "train.vocab_multiple",
    "bucket": "train.bucket_mib",
    "compile": "train.compile",
    "graphs": "train.graphs",
}
# fields of a job that hold fields themselves: the section's name and its class
_SECTIONS: Mapping[tuple[str, ...], tuple[str, type[Any]]] = {
    ("shape",): ("model", ModelShape),
    ("shape", "moe"): ("model.moe", ExpertShape),
    ("shape", "rope"): ("model.rope", RopeScaling),
    ("shape", "lora"): ("lora", LoraShape),
    ("shape", "attention"): ("model.attention", AttentionShape),
    ("shape", "attention", "latent"): ("model.attention.latent", LatentShape),
    ("initial",): ("model", Initial),
    ("trained",): ("finetune", Trained),
    ("layout",): ("layout", Layout),
    ("recompute",): ("recompute", Recompute),
    ("dp",): ("dp", DataParallel),
    ("precision",): ("precision", Precision),
    ("optimiser",): ("optim", Optimiser),
    ("optimiser", "rate"): ("optim.rate", RateSchedule),
}
# sections that a model may lack, and the choice that tells
_PRESENT: Mapping[tuple[str, ...], str] = {
    ("shape", "moe"): "experts",
    ("shape", "rope"): "type",
    ("shape", "lora"): "rank",
    ("shape", "attention", "latent"): "kv_rank",
}
_RENAMED = {"model.sequence": "model.positions", "precision.dtype": "train.dtype"}


def _paths() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every choice that a job has, and where the job has it."""
    for one in fields(Job):
        if one.name in _JOB:
            yield _JOB[one.name], (one.name,)
    for name in ScheduleConfig.option_names():
        yield f"schedule.{name}", ("options", name)
    for path, (section, kind) in _SECTIONS.items():
        for one in fields(kind):
            deeper = (*path, one.name)
            # a layout of one expert-parallel rank does not keep expert_tp; the job does
            if deeper not in _SECTIONS and one.name not in NOT_CHOSEN and deeper != ("layout", "expert_tp"):
                name = f"{section}.{one.name}"
                yield _RENAMED.get(name, name), deeper


PATHS: Mapping[str, tuple[str, ...]] = dict(_paths())
# `model.preset` is but another way to say the sizes
_OF_RUN = tuple(
    name for name in (".".join(path) for path, _ in fields_of(TrainConfig)) if name not in ("model.preset",)
)
# of a job, and yet nothing that a plan decides
_UNPLANNED = {
    "train.bucket_mib",
    "train.compile",
    "train.graphs",
    *(f"model.{one.name}" for one in fields(Initial)),
    "precision.loss_scale",
    "precision.loss_scale_steps",
    *(name for name in PATHS if name.startswith("optim.") and name not in ("optim.name", "optim.states")),
}
# what a job's time and memory depend on
PRICED = frozenset(PATHS) - (_UNPLANNED - {"train.bucket_mib", "optim.clip"})
NAMES: tuple[str, ...] = tuple(dict.fromkeys((*PATHS, *_OF_RUN)))
RUN_DEFAULTS: Mapping[str, Any] = {".".join(path): one.default for path, one in fields_of(TrainConfig)}


@dataclass(frozen=True)
class Choices:
    """A job as its choices by name.

    Attributes:
        values: of every name in `NAMES` that has been decided.
        open: undecided names that a run needs; `values` has their defaults.
        unsaid: undecided names that a framework may leave at its own defaults.
    """

    values: Mapping[str, Any] = field(repr=False)
    open: frozenset[str] = frozenset()
    unsaid: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @cached_property
    def job(self) -> Job:
        """The job that the choices describe; raises StrettoError where they make none."""
        return job_from(self.values)


def choices_of(job: Job, config: TrainConfig | None = None) -> Choices:
    """All choices of a job, with those of the run around it from its config; without one these have their
    defaults, and what a plan cannot know is open.
    """
    values = dict(RUN_DEFAULTS)
    if config is not None:
        values |= {".".join(path): _at(config, path) for path, _ in fields_of(TrainConfig)}
    values |= {name: _at(job, path) for name, path in PATHS.items()}
    values["train.bucket_mib"] = job.bucket / 2**20
    if job.custom_program is not None:
        values["schedule.file"] = job.custom_program if config is None else config.schedule.file
    decided = {name: values[name] for name in NAMES}
    if config is not None:
        return Choices(decided, frozenset(config.required))
    return Choices(decided, frozenset(FIELDS), (frozenset(NAMES) - set(PATHS) | _UNPLANNED) - set(FIELDS))


def _at(whole: Any, path: tuple[str, ...]) -> Any:
    """What lies at a path of attributes and keys; None below what is not there."""
    for name in path:
        if whole is None:
            return None
        whole = whole.get(name) if isinstance(whole, Mapping) else getattr(whole, name)
    return whole


def job_from(values: Mapping[str, Any]) -> Job:
    """The job that some choices describe; those left out take the usual values of a job.

    Raises:
        StrettoError: sizes or degrees that do not fit each other.
    """
    tree: dict[tuple[str, ...], dict[str, Any]] = {}
    for name, value in values.items():
        path = PATHS.get(name)
        # the name of a file is no program yet
        if path is not None and (path[0] != "custom_program" or isinstance(value, Program)):
            tree.setdefault(path[:-1], {})[path[-1]] = value
    made = tree.setdefault((), {})
    layout = tree.get(("layout",), {})
    if layout.get("ep", 1) > 1:
        layout["expert_tp"] = made.get("expert_tp")
    if "bucket" in made:
        made["bucket"] = int(made["bucket"] * 2**20)
    for path in sorted(_SECTIONS, key=len, reverse=True):  # what is inside others first
        inside = tree.get(path)
        if inside and inside.get(_PRESENT.get(path, ""), inside) is not None:
            whole = _SECTIONS[path][1](**inside)
            tree.setdefault(path[:-1], {})[path[-1]] = whole
    made["options"] = {name: v for name, v in tree.get(("options",), {}).items() if v is not None}
    return Job(**made)


@contextmanager
def reading(what: str) -> Generator[None]:
    """Raise StrettoError for values of kinds that a setting does not take, wherever that comes to light."""
    try:
        yield
    except StrettoError:
        raise
    except (MemoryError, RecursionError) as error:
        raise StrettoError(f"{what}: values in each other, too deep to be read") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        hint = "look at numbers, lists and names there"
        raise StrettoError(f"{what}: no such value is taken ({error})", hint=hint) from error
