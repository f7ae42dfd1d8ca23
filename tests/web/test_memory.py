"""Answers about memory: what the commands print for the same job, beside the papers' formulas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command_line import CommandLine
from stretto.job.huggingface import config_to_huggingface
from stretto.job.presets import preset
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.published_activations import closed_form, closed_form_parts, published_formula
from stretto.recommender.config.load import load_config
from stretto.run.config.job import job_of
from stretto.web.answers import reply_lines
from stretto.web.memory import count_memory, memory_record
from stretto.web.question_job import read_job

JOB: dict[str, Any] = {"tp": 2, "dp": 2, "pp": 4, "model": "llama3-8b", "cluster": "dgx-h100"}
FIELDS = {"micro_batch": "1", "microbatches": "16"}


def refused(**question: Any) -> Any:
    *_, line = reply_lines(json.dumps({"ask": "memory", **JOB, "fields": FIELDS, **question}))
    return json.loads(line)["error"]


@pytest.mark.parametrize(
    ("degrees", "fields", "model"),
    [
        ({"tp": 2, "dp": 2, "pp": 4}, {}, "llama3-8b"),
        (
            {"tp": 8, "dp": 2, "pp": 2},
            {"recompute": "full", "recompute_layers": "3", "zero": "2"},
            "gpt3-175b",
        ),
        ({"tp": 4, "dp": 4}, {"zero": "3", "offload": "both", "precision": "fp32"}, "gpt2-large"),
        ({"tp": 2, "cp": 2, "dp": 2, "pp": 2}, {"schedule": "zb-v", "seq": "16384"}, "llama3-8b"),
        ({"dp": 16, "pp": 2, "ep": 8}, {"recompute": "selective", "attention": "unfused"}, "mixtral-8x7b"),
    ],
    ids=str,
)
def test_the_fit_is_that_of_predict(
    stretto: CommandLine, degrees: dict[str, int], fields: dict[str, str], model: str
) -> None:
    fields = {**FIELDS, **fields}
    answer = count_memory({**degrees, "model": model, "cluster": "dgx-a100-80gb", "fields": fields})
    arguments = [f"{name}={value}" for name, value in {**degrees, **fields}.items()]
    command = ("predict", "--model", model, "--cluster", "dgx-a100-80gb", *arguments)
    (printed,) = stretto.json(*command, code=int(answer["verdict"] == "does not fit"))["rows"]
    for name in ("verdict", "memory_gib", "memory", "defaults", "layout", "gpus"):
        expected = printed[name]
        if name == "defaults":  # the page always says how many data-parallel ranks there are
            expected = {key: value for key, value in expected.items() if key in answer["defaults"]}
            assert {key: answer["defaults"][key] for key in expected} == expected
            continue
        assert answer[name] == expected, name


@pytest.mark.parametrize("config", ["llama-1b-64gpu", "moe-tiny"])
def test_ranks_are_those_of_the_memory_command(stretto: CommandLine, config: str) -> None:
    printed = stretto.json("memory", f"configs/{config}.yaml")
    job: Any = job_of(load_config(Path(f"configs/{config}.yaml"), []))  # pyright: ignore[reportArgumentType]
    answer = memory_record(replace(read_job({**JOB, "fields": FIELDS}), job=job))
    for rank, expected in zip(json.loads(json.dumps(answer["ranks"])), printed["ranks"], strict=True):
        assert {name: rank[name] for name in expected} == expected
    assert answer["fullest"] == printed["fullest"]
    if config.startswith("llama"):
        assert answer["activations"]["tensors"] == printed["block"]


def test_the_kinds_of_a_rank_add_up_to_the_device() -> None:
    answer = count_memory({**JOB, "fields": FIELDS})
    for rank in answer["ranks"]:
        extra = rank["fragmentation"] + rank["context"]
        assert rank["total"] + extra == pytest.approx(rank["device"]["mid"])
    fullest = answer["ranks"][answer["fullest"]]
    assert fullest["device"]["mid"] / 2**30 == pytest.approx(answer["memory"]["device"]["gib"])


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("tp", "sp"), [(1, "0"), (8, "0"), (8, "1")])
def test_the_formula_is_exact_for_the_gpt_it_was_made_for(recompute: str, tp: int, sp: str) -> None:
    """Up to the statistics of norms, 8 bytes a token and norm (`counts.activations`)."""
    fields = {**FIELDS, "attention": "unfused", "dropout": "0.1", "recompute": recompute, "sp": sp}
    question = {"tp": tp, "model": "korthikanti-22b", "cluster": "dgx-a100-80gb", "fields": fields}
    answer = count_memory(question)["activations"]
    assert answer["reasons"] == []
    counted = sum(tensor["bytes"] for tensor in answer["tensors"])
    statistics = 0 if recompute == "full" else 2 * 8 * 2048 // (tp if sp == "1" else 1)
    assert counted - answer["paper"]["bytes"] == statistics
    assert sum(part["paper"] for part in answer["parts"]) == pytest.approx(answer["paper"]["bytes"])
    for part in answer["parts"]:
        assert part["counted"] - part["paper"] == (statistics if part["part"] == "norms" else 0), part


def test_terms_add_up_to_the_closed_form_of_any_block() -> None:
    shape = preset("llama3-8b")
    for compute in (ComputeConfig(batch=2, sequence=512), ComputeConfig(batch=1, sequence=512, tp=4)):
        assert published_formula(shape, compute) is None
        assert sum(closed_form_parts(shape, compute).values()) == closed_form(shape, compute).bytes


def test_what_differs_from_the_formulas_is_said() -> None:
    answer = count_memory({**JOB, "fields": {**FIELDS, "zero": "2", "optimizer": "adafactor"}})
    reasons = [text.format(**values) for text, values in answer["activations"]["reasons"]]
    assert "grouped-query attention: 8 key heads of 32" in reasons
    assert any("gated MLP" in reason and "14336" in reason for reason in reasons)
    states = [text.format(**values) for text, values in answer["states"]["reasons"]]
    assert any("adafactor" in reason for reason in states)


def test_a_config_of_hugging_face_is_its_preset() -> None:
    config = json.dumps(config_to_huggingface(preset("llama3-8b")))
    given = count_memory({**JOB, "model": "", "config": config, "fields": FIELDS})
    named = count_memory({**JOB, "fields": FIELDS})
    assert given["model"]["kind"] == "llama"
    assert {**given, "model": None} == {**named, "model": None}


@pytest.mark.parametrize(
    ("question", "message", "hint"),
    [
        ({"config": "{", "file": "mine.json"}, "mine.json is not JSON", "config.json of Hugging Face"),
        ({"config": "[]"}, "config.json is not a mapping", "Hugging Face"),
        ({"config": '{"model_type": "lama"}'}, "'lama' is not one of gpt2, llama", "own-model.md"),
        ({"model": "lama3-8b"}, "'lama3-8b' is not known", "llama3-8b"),
        ({"tp": 3}, "heads", "layout.tp"),
        ({"fields": {"optimizer": "mine.py:Own"}}, "mine.py:Own', allowed: adamw", "update rule"),
        ({"fields": {"microbatches": "0"}}, "microbatches is '0'", ""),
    ],
    ids=str,
)
def test_a_bad_question_has_the_nearest_fix(question: dict[str, Any], message: str, hint: str) -> None:
    error = refused(**question)
    assert message in error["message"], error
    assert hint in error["hint"], error


def test_offload_to_files_leaves_the_device() -> None:
    on_device = count_memory({**JOB, "fields": FIELDS})
    moved = count_memory({**JOB, "fields": {**FIELDS, "offload": "nvme"}})
    assert moved["ranks"][0]["disk"] > 0
    assert moved["ranks"][0]["total"] < on_device["ranks"][0]["total"]
