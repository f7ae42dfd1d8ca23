"""Fields that a config leaves open: marked, kept through reading and writing, and refused by training."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.recommender.config.load import parse_config
from stretto.run.config.check import check
from stretto.run.config.load import dump, parse
from stretto.run.config.required import check_required, comment_required_markers
from stretto.run.data.prepare import check_vocabulary
from stretto.run.train.language_job import LANGUAGE
from stretto.run.train.launch import run_job
from texts import open_tokens
from tiny_job import job

OPEN = """
model: {family: gpt, layers: 2, hidden: 64, heads: 4}
train: {steps: REQUIRED}
optim: {lr: REQUIRED, rate: {warmup: 2000}}
"""


def test_marked_fields_take_their_defaults_and_are_written_back() -> None:
    config = parse(OPEN)
    assert config.required == ("train.steps", "optim.lr")
    assert (config.train.steps, config.optim.lr) == (300, 3e-4)
    check(config)  # 2000 steps of warm-up fit into a number of steps that is still open
    assert parse(dump(config)) == config
    assert pickle.loads(pickle.dumps(config)).required == config.required
    assert parse(OPEN, overrides=["train.steps=5000"]).required == ("optim.lr",)
    assert parse(OPEN, overrides=["checkpoint.every=REQUIRED"]).required[-1] == "checkpoint.every"


def test_training_refuses_and_names_every_open_field() -> None:
    with pytest.raises(StrettoError) as caught:
        run_job(LANGUAGE, parse(OPEN))
    assert caught.value.message == (
        "2 fields are marked REQUIRED in the config, and training needs them: train.steps, optim.lr"
    )
    assert "train.steps=1000 optim.lr=3e-4" in (caught.value.hint or "")
    check_required(parse(OPEN, overrides=["train.steps=5000", "optim.lr=1e-3"]))


def test_other_fields_cannot_be_left_open() -> None:
    with pytest.raises(StrettoError, match=r"layout\.tp is 'REQUIRED', must be a whole number"):
        parse(OPEN, overrides=["layout.tp=REQUIRED"])


def test_a_recommenders_fields_are_its_own() -> None:
    config = parse_config("model: {preset: dlrm-113b}\ntrain: {steps: REQUIRED}\n")
    assert config.required == ("train.steps",)
    with pytest.raises(StrettoError, match=r"there is no field optim\.lr"):
        parse_config("model: {preset: dlrm-113b}\noptim: {lr: REQUIRED}\n")


def test_comments_explain_marked_fields_of_their_section_only() -> None:
    text = "data:\n  source: REQUIRED\ntrain:\n  source: REQUIRED\n"
    lines = comment_required_markers(text).splitlines()
    assert lines[1] == "  source: REQUIRED  # text, JSONL or Parquet files, or a token folder"
    assert lines[3] == "  source: REQUIRED"


def test_a_vocabulary_that_the_data_does_not_fill_is_refused(tmp_path: Path) -> None:
    """One that the run trains is judged before the text is read, any other by its entries."""
    config = job(tmp_path, "model.vocab=400")
    with pytest.raises(StrettoError, match=r"model\.vocab is 400: .* has 300 entries, so 100 rows"):
        run_job(LANGUAGE, config)
    assert not (tmp_path / "cache").exists()
    config = job(tmp_path, "model.vocab=310")
    check_vocabulary(config.data, config.model.vocab, config.corruption)
    tokens = Path(open_tokens(job(tmp_path)).name)
    for source in (f"data.source={tokens}", f"data.tokenizer={tokens / 'tokenizer.json'}"):
        for vocab, message in ((400, "so 100 rows"), (200, "and each needs a row")):
            with pytest.raises(StrettoError, match=rf"model\.vocab is {vocab}: .* 300 entries, {message}"):
                run_job(LANGUAGE, job(tmp_path, source, f"model.vocab={vocab}", "data.vocab=257"))
