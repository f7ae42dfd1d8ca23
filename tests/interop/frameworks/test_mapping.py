"""Rules between choices and settings, on a framework of a few settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.job.framework import framework_behaviour
from stretto.job.job import Job
from stretto.job.presets import preset
from stretto.layout.layout import Layout
from stretto_interop.frameworks.fields import JobValues, values_of
from stretto_interop.frameworks.mapping import (
    ExternalFramework,
    ParsedSettings,
    Start,
    Unset,
    emit,
    ignored,
    one_of,
    read,
    renamed,
    restricted,
    settings_of,
    unmapped,
)
from stretto_interop.frameworks.registry import framework

RULES = (
    renamed("sizes.tensor", "layout.tp", default=1),
    renamed("sizes.data", "layout.dp", default=1),
    renamed("batch", "batch.global_size", default=4),
    renamed("depth", "model.layers", default=12),
    renamed("steps", "train.steps"),
    one_of(
        "zero", "dp.mode", {"ddp": 0, "zero1": 1}, default=0, instead="Tiny shards states, and nothing else"
    ),
    restricted("optim.name", ("adamw",), "Tiny has AdamW"),
    ignored("it is for people", ("run.name", "metrics.every")),
)


def render(settings: Mapping[str, Any], notes: Sequence[str]) -> str:
    texts = {name: "?" if isinstance(value, Unset) else value for name, value in settings.items()}
    return "\n".join(
        [*(f"# {note}" for note in notes), *(f"{name}={value}" for name, value in texts.items())]
    )


def parse(text: str, source: str, start: Start) -> ParsedSettings:
    pairs = (line.split("=") for line in text.splitlines())
    size = {} if start.devices is None else {"sizes.data": start.devices}
    return ParsedSettings(settings={**size, **{name: int(value) for name, value in pairs}})


TINY = ExternalFramework(
    name="tiny",
    title="Tiny 1.0",
    rules=RULES,
    render=render,
    parse=parse,
    unpriced={"log.*": "logging"},
    unread={"prune": "pruned models have no costs here"},
    as_run=lambda job, _: replace(
        job, framework=framework_behaviour("megatron", dp=job.dp, precision=job.precision)
    ),
    software=lambda _: "tuned",
    plans=(),
)
JOB = Job(shape=preset("gpt2"), layout=Layout(tp=2, dp=2), global_batch=8)


def test_what_is_mapped_is_written_and_what_changes_nothing_is_listed() -> None:
    text = emit(TINY, JOB, about="a job")
    assert text.splitlines() == [
        "# a job",
        "sizes.tensor=2",
        "sizes.data=2",
        "batch=8",
        "depth=12",
        "steps=?",
        "zero=0",
    ]


def test_what_the_framework_lacks_is_refused_by_name_with_the_nearest_it_has() -> None:
    job = replace(JOB, dp=replace(JOB.dp, mode="zero2"), optimiser=replace(JOB.optimiser, name="lamb"))
    with pytest.raises(StrettoError) as caught:
        emit(TINY, job)
    assert caught.value.message == "dp.mode is zero2: Tiny shards states, and nothing else"
    assert caught.value.hint == "nearest: dp.mode=zero1"
    assert [other.message.partition(":")[0] for other in caught.value.others] == ["optim.name is lamb"]


def test_a_choice_without_a_rule_is_known() -> None:
    missing, wrong = unmapped(TINY)
    assert "layout.pp" in missing
    assert not wrong
    twice = replace(
        TINY, rules=(*RULES, restricted("layout.tp", (1,), ""), restricted("layout.up", (1,), ""))
    )
    assert unmapped(twice)[1] == {"layout.tp", "layout.up"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sizes.tensr=2", "text: Tiny 1.0 has no sizes.tensr\nhint: did you mean sizes.tensor?"),
        ("prune=1", "text: prune is 1: pruned models have no costs here\nhint: leave prune out"),
        ("zero=3", "zero is 3: not modelled here\nhint: what is: 0, 1"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(StrettoError) as caught:
        read(TINY, text, "text")
    assert str(caught.value) == message


def test_an_unknown_framework_has_a_nearest_name() -> None:
    with pytest.raises(StrettoError, match="framework 'nothing' is not one of"):
        framework("nothing")


def test_the_run_around_a_job_is_listed_where_it_is_not_the_usual() -> None:
    values = {**values_of(JOB).values, "run.name": "mine"}
    changed = JobValues(values)
    assert settings_of(TINY, changed)[1] == ["left out: run.name=mine (it is for people)"]


@pytest.mark.parametrize(
    ("name", "source", "text", "message"),
    [
        ("deepspeed", "ds.json", '{"optimizer": ' + '{"a":' * 3000 + "1" + "}" * 3001, "too deep to be read"),
        (
            "deepspeed",
            "ds.json",
            '{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": "x"}}}',
            "no such value",
        ),
        ("torchtitan", "run.toml", "[model]\nconverters = 3", "no such value"),
        ("torchtitan", "run.py", "def f() -> Trainer.Config:\n    return " + "-" * 9000 + "1", "too deep"),
    ],
)
def test_values_of_other_kinds_are_one_error(name: str, source: str, text: str, message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        read(framework(name), text, source, 8, {"model.family": "llama"})
