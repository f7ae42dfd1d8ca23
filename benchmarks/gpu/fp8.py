"""Losses with 8-bit products beside those in bfloat16, on real text: the sample that Stretto ships."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from gpu.jobs import LLAMA, config, trainer
from gpu.plain import PlainStep
from gpu.setting import Setting
from gpu.speed import attempt, torchao_fp8
from stretto.job.job import Job
from stretto.run.config.job import job_of
from stretto.run.config.schema import TrainConfig
from stretto.run.data.mixture import training_samples
from stretto.run.data.prepare import prepare_data
from stretto.run.data.sentinels import vocabulary
from stretto.run.train.batches import SampleSource

SECTION = {"family": "llama", "layers": 12, "hidden": 768, "heads": 12, "ffn": 2048}
STEPS, LAST = 500, 50  # the losses of the last steps are compared in their mean
CASES = {
    "bf16": (),
    "bf16, another seed of the data": ("train.seed=1",),
    "fp8=row": ("precision.fp8=row",),
    "fp8=tensor": ("precision.fp8=tensor",),
}


def losses(setting: Setting) -> dict[str, Any]:
    """Mean loss of the last steps by precision; the goal is 0.5% above bfloat16."""
    rows = dict[str, dict[str, Any]]()
    for name, words in CASES.items():
        rows[name] = attempt(lambda words=words: trained(words, setting))
        setting.keep({"rows": rows})
    for name, eight in (("plain torch, bf16", False), ("plain torch with torchao, rowwise", True)):
        rows[name] = attempt(lambda eight=eight: plain(eight, setting))
        setting.keep({"rows": rows})
    return {"rows": rows, "steps": steps(setting), "goal": 0.005}


def steps(setting: Setting) -> int:
    """Of a run."""
    return 3 if setting.tiny or setting.simulated else STEPS


def configured(words: tuple[str, ...], setting: Setting) -> TrainConfig:
    """The job on the sample of text."""
    section = {k: v for k, v in LLAMA.items() if k != "vocab"} if setting.tiny else SECTION
    sequence, micro = (32, 2) if setting.tiny else (512, 32)
    more = (f"train.steps={steps(setting)}", "optim.lr=6e-4", "optim.rate.warmup=0.1", "train.seed=0")
    return config(section, sequence, micro, 1, setting, *more, *words)


def real(made: TrainConfig) -> tuple[Job, SampleSource]:
    """The job with the vocabulary of its text, and the samples."""
    source = prepare_data(made.data, made.model.vocab, quiet=True)
    job = job_of(made, vocab=vocabulary(source, made.data, made.corruption))
    return job, training_samples(source, made.data, job, made.train.seed)


def trained(words: tuple[str, ...], setting: Setting) -> dict[str, Any]:
    """Losses of a run of Stretto's."""
    job, samples = real(configured(words, setting))
    started = time.perf_counter()
    with trainer(job, setting, samples) as made:
        for _ in range(steps(setting)):
            made.step()
        setting.synchronize()
        return summary(made.losses, time.perf_counter() - started)


def plain(eight: bool, setting: Setting) -> dict[str, Any]:
    """Losses of plain torch, in 8 bits by torchao."""
    job, samples = real(configured((), setting))
    torch._dynamo.reset()
    data = list(batches(job, samples, steps(setting), setting))
    convert = torchao_fp8 if eight else None
    step = PlainStep(job, data, setting.device, half=False, compiler=setting.compiler, convert=convert)
    started = time.perf_counter()
    for _ in range(steps(setting)):
        step.step()
    setting.synchronize()
    return summary([float(one) for one in step.losses], time.perf_counter() - started)


def batches(job: Job, samples: SampleSource, count: int, setting: Setting) -> Iterator[tuple[Tensor, Tensor]]:
    """The first so many microbatches of a run, on the device."""
    for i in range(count):
        one = samples.batch(range(i * job.micro_batch, (i + 1) * job.micro_batch))
        yield one.inputs.to(setting.device), one.targets.to(setting.device)


def summary(losses: list[float], seconds: float) -> dict[str, Any]:
    """What the report needs, and every tenth loss."""
    return {"last": mean(losses[-LAST:]), "first": losses[0], "seconds": seconds, "losses": losses[::10]}
