"""Every field of a job and of its config is a choice by name, and choices make the job again."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from stretto.job.attention import RopeScaling
from stretto.job.job import Job
from stretto.job.lora import LoraShape
from stretto.job.presets import PRESETS, preset
from stretto.layout.layout import Layout
from stretto.run.config import load
from stretto.run.config.job import job_of
from stretto.run.config.schema import TrainConfig
from stretto.run.config.section import fields_of
from stretto_interop.frameworks.fields import NAMES, NOT_CHOSEN, PATHS, job_from, run_values, values_of


def leaves(value: object, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """The fields of a dataclass that hold no dataclass, with their paths."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return {path}
    return {
        leaf
        for field in dataclasses.fields(value)
        if field.name not in NOT_CHOSEN
        for leaf in leaves(getattr(value, field.name), (*path, field.name))
    }


def test_every_field_of_a_job_is_a_choice() -> None:
    """Of a model that has all kinds of parts: experts, latent attention, scaled positions, and adapters."""
    yarn = RopeScaling(type="yarn", factor=40.0, original_positions=4096)
    lora = LoraShape(rank=8, alpha=16.0)
    fields = leaves(Job(shape=replace(preset("deepseek-v3"), rope=yarn, lora=lora)))
    options = {path for path in PATHS.values() if path[0] == "options"}
    assert fields - {("options",), ("layout", "expert_tp")} == set(PATHS.values()) - options


def test_every_field_of_a_config_is_a_choice() -> None:
    fields = {".".join(path) for path, _ in fields_of(TrainConfig)}
    assert fields - set(NAMES) == {"model.preset"}


@pytest.mark.parametrize("name", PRESETS)
def test_choices_make_the_job_again(name: str) -> None:
    shape = preset(name)
    split = {"ep": 2, "expert_tp": 1} if shape.moe is not None else {}
    job = Job(
        shape=shape,
        layout=Layout(dp=4, pp=2, **split),
        expert_tp=split.get("expert_tp"),
        global_batch=8,
        schedule="interleaved",
        options={"chunks": 2},
        stage_layers=(2, 2, 2, shape.layers - 4),
        bucket=2**20,
    )
    assert job_from(values_of(job).values) == job


def test_a_plan_leaves_open_what_it_cannot_know_and_a_config_what_it_marks() -> None:
    config = load("configs/llama-tiny-tp2.yaml", ["train.steps=7", "train.seed=3"])
    assert values_of(job_of(config)).open >= {"train.steps", "data.source"}
    choices = values_of(job_of(config), run_values(config))
    assert not choices.open
    assert (choices["train.steps"], choices["train.seed"], choices["model.family"]) == (7, 3, "llama")
    marked = load("configs/llama-tiny-tp2.yaml", ["train.steps=REQUIRED"])
    assert values_of(job_of(marked), run_values(marked)).open == {"train.steps"}
