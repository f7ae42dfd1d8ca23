"""The section model.moe: alone, over a preset, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.job.experts import ExpertShape
from stretto.job.presets import preset
from stretto.run.config.check import check, find_problems
from stretto.run.config.load import dump, load, parse

ROOT = Path(__file__).parents[3]
TINY = "model: {family: llama, layers: 2, hidden: 32, heads: 4%s}\ndata: {source: python-stdlib}\n"


def experts(text: str, *overrides: str) -> ExpertShape | None:
    config = parse(text, overrides=overrides)
    assert parse(dump(config)) == config
    assert parse(dump(config)).shape() == config.shape()
    return config.shape().moe


def test_dense_unless_configured() -> None:
    assert experts(TINY % "") is None


def test_what_is_left_out_takes_the_usual_value() -> None:
    assert experts(TINY % ", moe: {experts: 4}") == ExpertShape(experts=4)


def test_every_field_arrives() -> None:
    section = ", moe: {experts: 6, top_k: 3, ffn: 20, shared_ffn: 8, score: sigmoid, normalise: false, "
    section += "balance: 0, z: 1e-3, capacity: 1.5, drop: position}"
    expected = ExpertShape(
        experts=6,
        top_k=3,
        ffn=20,
        shared_ffn=8,
        score="sigmoid",
        normalise=False,
        balance=0.0,
        z=1e-3,
        capacity=1.5,
        drop="position",
    )
    assert experts(TINY % section) == expected


def test_laid_over_a_preset() -> None:
    text = "model: {preset: mixtral-8x7b}\ndata: {source: python-stdlib, tokenizer: t.json}\n"
    assert experts(text) == preset("mixtral-8x7b").moe
    assert experts(text, "model.moe.capacity=1.25") == ExpertShape(
        experts=8, top_k=2, balance=0.02, capacity=1.25
    )
    assert experts(text, "model.moe.experts=16") == ExpertShape(experts=16, top_k=2, balance=0.02)
    dense = text.replace("mixtral-8x7b", "llama3-8b")
    assert experts(dense) is None
    assert experts(dense, "model.moe.experts=4", "model.moe.ffn=64") == ExpertShape(experts=4, ffn=64)


@pytest.mark.parametrize(
    ("moe", "says", "hint"),
    [
        (
            "experts: 4, top_k: 5",
            "model.moe.top_k is 5: it must be at most model.moe.experts=4",
            "model.moe.top_k=4",
        ),
        ("experts: 4, top_k: 0", "model.moe.top_k is 0, must be a whole number above 0", ""),
        ("experts: 0", "model.moe.experts is 0, must be", ""),
        ("experts: 4, capacity: 0", "model.moe.capacity is 0, must be a number above 0", ""),
        ("experts: 4, balance: -1", "model.moe.balance is -1, must be a number at least 0", ""),
        (
            "experts: 4, score: sigmod",
            "model.moe.score is 'sigmod', must be one of",
            "did you mean sigmoid?",
        ),
        (
            "experts: 4, drop: prob",
            "model.moe.drop is 'prob', must be one of",
            "did you mean probs?",
        ),
        ("experts: 4, topk: 2", "there is no field model.moe.topk", "top_k"),
    ],
)
def test_wrong_fields_are_named_with_their_line(moe: str, says: str, hint: str) -> None:
    with pytest.raises(StrettoError) as caught:
        parse(TINY % f",\n  moe: {{{moe}}}")
    assert caught.value.message.startswith("config:2: " + says)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("moe", "says", "hint"),
    [
        ("experts: 1", "model.moe.top_k is 2: there are 1 experts", "top_k: 1"),
        ("top_k: 3", "model.moe.top_k is 3: the model has no experts", "model.moe.experts=8"),
        (
            "capacity: 1.0",
            "model.moe.capacity is 1.0: the model has no experts",
            "model.moe.capacity=null",
        ),
    ],
)
def test_problems_that_only_the_whole_config_shows(moe: str, says: str, hint: str) -> None:
    with pytest.raises(StrettoError) as caught:
        check(parse(TINY % f", moe: {{{moe}}}"))
    assert caught.value.message == says
    assert hint in (caught.value.hint or "")


def test_more_choices_than_a_preset_has_experts() -> None:
    text = "model: {preset: mixtral-8x7b, moe: {top_k: 9}}\ndata: {source: python-stdlib}\n"
    assert "model.moe.top_k is 9: there are 8 experts" in [p.message for p in find_problems(parse(text))]


def test_the_shipped_config_shares_its_experts_out() -> None:
    config = load(ROOT / "configs" / "moe-tiny.yaml")
    check(config, world=2)
    shape, layout = config.shape(), config.layout.to_layout()
    assert shape.moe is not None
    assert (layout.world, layout.ep, layout.dp) == (2, 2, 2)
