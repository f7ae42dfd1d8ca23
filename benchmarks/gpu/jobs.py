"""Language models of the campaign, and Stretto's training step on them: the product's own, from a config."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
import yaml
from torch import Tensor

from gpu.setting import Setting
from stretto.engine.device import has_graphs
from stretto.engine.optim.rate import LearningRate
from stretto.engine.parallel.mesh import Mesh
from stretto.job.job import Job
from stretto.job.rules import problems
from stretto.run.config.job import job_of
from stretto.run.config.load import parse
from stretto.run.config.schema import TrainConfig
from stretto.run.config.section import config_fields
from stretto.run.data.dataset import Batch
from stretto.run.train import trainer as training
from stretto.run.train.assemble import assemble
from stretto.run.train.async_step import AsyncTrainer
from stretto.run.train.batches import SampleSource, read_ahead
from stretto.run.train.language_task import LanguageTask, TextProgress
from stretto.run.train.rank_model import RankModel

GPT = {"family": "gpt", "layers": 2, "hidden": 64, "heads": 2, "vocab": 256, "dropout": 0.0}
LLAMA = {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 256}
MOE = {**LLAMA, "ffn": 64, "moe": {"experts": 4, "top_k": 2, "balance": 0.0}}
LLAMA_1B = {
    "family": "llama",
    "layers": 16,
    "hidden": 2048,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 8192,
    "vocab": 128256,
    "tied": True,
    "rope_theta": 500000.0,
}
LLAMA_3B = {**LLAMA_1B, "layers": 28, "hidden": 3072, "heads": 24}
# states of 12 bytes a parameter in place of 18: the weights' type for gradients and Adam's means
SMALL_STATES = ("precision.gradients=same", "optim.states=bfloat16")


@dataclass(frozen=True, kw_only=True)
class Model:
    """One row of the table of speeds.

    Attributes:
        section: `model` of the config.
        tiny: the same of a rehearsal.
        micro: samples of a microbatch.
        goal: model FLOPs utilisation that is aimed at.
        settings: overrides of the config.
        plain_half: whether the plain contestant holds weights and states in bfloat16 without a float32 copy,
            because its states would not fit otherwise.
        graphs: whether the memory that graphs keep for themselves fits beside that of the update.
    """

    name: str
    section: Mapping[str, Any]
    tiny: Mapping[str, Any]
    sequence: int
    micro: int
    microbatches: int
    goal: float
    settings: tuple[str, ...] = ()
    plain_half: bool = False
    graphs: bool = True

    def config(self, setting: Setting, *overrides: str) -> TrainConfig:
        """Its job on one device in bfloat16."""
        if setting.tiny:
            return config(self.tiny, 32, 2, 2, setting, *self.settings, *overrides)
        return config(
            self.section, self.sequence, self.micro, self.microbatches, setting, *self.settings, *overrides
        )


MODELS = {
    model.name: model
    for model in (
        Model(
            name="gpt2-124m",
            section={"preset": "gpt2", "vocab": 50257, "dropout": 0.0},
            tiny=GPT,
            sequence=1024,
            micro=32,
            microbatches=4,
            goal=0.45,
        ),
        Model(
            name="gpt2-1.5b",
            section={"preset": "gpt2-xl", "vocab": 50257, "dropout": 0.0},
            tiny=GPT,
            sequence=1024,
            micro=8,
            microbatches=2,
            goal=0.52,
        ),
        Model(
            name="llama-1b",
            section=LLAMA_1B,
            tiny=LLAMA,
            sequence=4096,
            micro=4,
            microbatches=1,
            goal=0.54,
        ),
        Model(
            name="llama-3b",
            section=LLAMA_3B,
            tiny=LLAMA,
            sequence=4096,
            micro=2,
            microbatches=2,
            goal=0.56,
        ),
        Model(
            name="llama3-8b",
            section={"preset": "llama3-8b", "vocab": 128256},
            tiny=LLAMA,
            sequence=8192,
            micro=1,
            microbatches=1,
            goal=0.57,
            settings=(*SMALL_STATES, "recompute.mode=auto", "recompute.memory_gib=121"),
            plain_half=True,
            graphs=False,
        ),
        Model(
            name="moe-8x1b",
            section={**LLAMA_1B, "vocab": 32000, "moe": {"experts": 8, "top_k": 2, "balance": 0.0}},
            tiny=MOE,
            sequence=4096,
            micro=2,
            microbatches=2,
            goal=0.40,
            settings=SMALL_STATES,
            plain_half=True,
        ),
    )
}


@dataclass(frozen=True)
class Trick:
    """Something that may make a step faster, by the field of a config that turns it on.

    Attributes:
        value: with it; `without` is the value of the step that it is compared with.
    """

    field: str
    value: str
    without: str


GRAPHS = "train.graphs"
TRICKS = (
    Trick("train.compile", "blocks", "off"),
    Trick(GRAPHS, "microbatch", "off"),
    Trick("train.loss_chunk", "null", "0"),
    Trick("train.attention", "sdpa", "explicit"),
    Trick("train.attention", "flex", "sdpa"),
    Trick("train.vocab_multiple", "128", "1"),
    Trick("optim.states", "bfloat16", "float32"),
    Trick("precision.gradients", "same", "float32"),
    Trick("recompute.mode", "none", "selective"),
    Trick("precision.fp8", "row", "none"),
    Trick("precision.fp8", "tensor", "none"),
)
FASTEST = ("train.compile", GRAPHS)  # of these, what a model is raced with beside its defaults


def has_field(name: str, value: str = "") -> bool:
    """Whether configs have this field, and among its choices the value."""
    schema: Any = TrainConfig
    *sections, last = name.split(".")
    for section in sections:
        schema = config_fields(schema)[section].type
    if last not in config_fields(schema):
        return False
    choices = get_args(config_fields(schema)[last].type)
    return not value or not all(isinstance(c, str) for c in choices) or not choices or value in choices


def known_tricks() -> list[Trick]:
    """Those that this version has."""
    return [trick for trick in TRICKS if has_field(trick.field, trick.value)]


def tricks_of(setting: Setting, section: Mapping[str, Any]) -> list[Trick]:
    """Those that the setting's device and a model of this section can use."""
    graphs = has_graphs(setting.device.type) and "moe" not in section
    return [trick for trick in known_tricks() if graphs or trick.field != GRAPHS]


def fastest(setting: Setting, section: Mapping[str, Any] = LLAMA) -> tuple[str, ...]:
    """Overrides of the step that is expected to be fastest, of a model of this section."""
    return tuple(f"{t.field}={t.value}" for t in tricks_of(setting, section) if t.field in FASTEST)


def config(
    section: Mapping[str, Any],
    sequence: int,
    micro: int,
    microbatches: int,
    setting: Setting,
    *overrides: str,
) -> TrainConfig:
    """A job in bfloat16 on the setting's device, on one process unless overrides say otherwise."""
    values = {
        "model": dict(section),
        "data": {"source": "stretto-sample", "sequence": sequence},
        "batch": {"micro_size": micro, "global_size": micro * microbatches},
        "optim": {"lr": 1e-4},
        "train": {"dtype": "bfloat16", "device": setting.device.type, "vocab_multiple": 128},
    }
    return parse(yaml.safe_dump(values), "campaign", overrides, name="campaign")


def legal(config: TrainConfig) -> Job:
    """The config's job.

    Raises:
        StrettoError: it breaks a rule.
    """
    job = job_of(config)
    for problem in problems(job):
        raise problem
    return job


@dataclass
class Samples:
    """Random tokens, the same for every contestant: a few batches, over and over."""

    job: Job
    batches: int = 4
    _whole: Batch | None = field(default=None, init=False)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Some of them, by their index."""
        if self._whole is None:
            draw = torch.Generator().manual_seed(0)
            size = (self.batches * self.job.global_batch, self.job.sequence + 1)
            ids = torch.randint(self.job.shape.vocab, size, generator=draw)
            decoder = ids[:, :-1].flip(0) if self.job.shape.encoder_layers else None
            self._whole = Batch(
                inputs=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous(), decoder=decoder
            )
        return self._whole.take([i % len(self._whole.inputs) for i in indices])


class Trainer:
    """Training's own step of one rank, with samples read ahead and copied from pinned memory.

    Attributes:
        losses, norms: of each step so far.
    """

    def __init__(
        self, job: Job, mesh: Mesh, samples: SampleSource | None = None, *, quick: bool = False
    ) -> None:
        self.replica = assemble(job, mesh, seed=0, fresh=not quick)
        if quick:
            fill(self.replica)
        self.replica.pipeline.train()
        self._samples = read_ahead(Samples(job) if samples is None else samples, self.replica)
        task = LanguageTask(self.replica, self._samples, LearningRate.of(job.optimiser, 1_000_000))
        kind = AsyncTrainer if self.replica.asynchronous else training.Trainer
        self._trainer = kind(task, TextProgress())
        self.losses: list[float] = []
        self.norms: list[float] = []

    def step(self) -> None:
        """The next step. Collective."""
        results = self._trainer.step()
        self.losses += [result.loss for result in results]
        self.norms += [result.norm for result in results if result.norm is not None]

    def close(self) -> None:
        """Free everything."""
        self._samples.close()
        self.replica.close()


@torch.no_grad()
def fill(replica: RankModel) -> None:
    """Initial values drawn where the weights lie: the seeded ones of billions of parameters, the same on
    every device, take the host minutes.
    """
    for fragment in replica.fragments:
        values: Tensor = fragment.parameter
        if "norm" in fragment.name:
            values.fill_(0.0 if fragment.name.endswith("bias") else 1.0)
        else:
            values.normal_(std=0.02)
    replica.refresh()


@contextmanager
def trainer(
    job: Job, setting: Setting, samples: SampleSource | None = None, *, quick: bool = False
) -> Generator[Trainer]:
    """Training on one process, closed afterwards."""
    setting.forget_peak()  # what the last one held is freed only once its caller has returned
    made = Trainer(job, Mesh(job.layout, setting.device), samples, quick=quick)
    try:
        yield made
    finally:
        made.close()
