"""A training job that takes seconds: a few kilobytes of made-up text and a model of a few thousand
parameters, four samples a step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from stretto.job.job import Job
from stretto.run.config import TrainConfig
from stretto.run.config.load import parse
from stretto.verify.language.cases import configured_job, vary

GPT = "{family: gpt, layers: 2, hidden: 32, heads: 4, dropout: 0.1}"
LLAMA = "{family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 64}"
MOE = (
    "{family: llama, layers: 2, hidden: 32, heads: 4, ffn: 32, "
    "moe: {experts: 4, capacity: 1.2, shared_ffn: 16, z: 0.001}}"
)
EIGHT = "batch.global_size=8"
"""For two microbatches on each of four replicas, or the schedules that need as many."""
_JOB = """
model: {model}
data: {{source: {text}, vocab: 300, sequence: 16, cache: {cache}}}
batch: {{global_size: 4, micro_size: 1}}
optim: {{lr: 1e-2, clip: 0.5, rate: {{warmup: 2}}}}
train: {{steps: 6, seed: 1, device: cpu, vocab_multiple: 4, timeout_s: 60}}
metrics: {{every: 1}}
sample: {{tokens: 8}}
run: {{dir: {runs}}}
"""


def write_text(path: Path, count: int = 3000, seed: int = 1) -> Path:
    """Words drawn by Zipf's law, so that there is something to learn."""
    draw = random.Random(seed)
    lexicon = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(1, 7))) for _ in range(150)]
    chosen = draw.choices(lexicon, weights=[1 / (i + 1) for i in range(150)], k=count)
    lines = [" ".join(chosen[i : i + 12]) + ".\n" for i in range(0, count, 12)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def job_text(folder: Path, model: str = GPT) -> str:
    """The YAML of the job; its text, cache and runs lie in `folder`."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(text)
    return _JOB.format(model=model, text=text, cache=folder / "cache", runs=folder / "runs")


def job_file(folder: Path, model: str = GPT) -> Path:
    """The job as a file."""
    path = folder / "tiny.yaml"
    path.write_text(job_text(folder, model), encoding="utf-8")
    return path


def job(folder: Path, *overrides: str, model: str = GPT) -> TrainConfig:
    """The job as a config."""
    return parse(job_text(folder, model), "tiny.yaml", overrides, name="tiny")


Changes = dict[str, Any]  # of a job, as `vary` takes them


def changes(**fields: Any) -> Changes:
    """A case of a proof before there is a job."""
    return fields


def varied(config: TrainConfig, case: Changes) -> Job:
    """The config's job as it is proved, with these changes."""
    return vary(configured_job(config), **case)


def name_of(case: Changes) -> str:
    """The case in a test's name."""
    return " ".join(f"{key}={value}" for key, value in case.items())
