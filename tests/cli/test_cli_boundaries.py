"""The tokens that end and begin texts, from the command that builds data to the one that writes text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from command_line import CommandLine
from stretto.engine.checkpoint.manifest import read_manifest
from stretto.run.generate.text import Wording
from tiny_job import LLAMA, job_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder whose texts begin, and nothing that says so, and a run that says it."""
    folder = tmp_path_factory.mktemp("boundaries")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<bos>", "<eos>", "<turn>"])
    (folder / "model").mkdir()
    inner.save(str(folder / "model" / "tokenizer.json"))
    config = {"eos_token": "<turn>", "chat_template": "{{ m }}<turn>"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def command(folder: Path, *overrides: str, at: str = "data") -> list[str]:
    tokenizer = f"data.tokenizer={folder / 'model'}"
    return ["train", str(job_file(folder, LLAMA)), tokenizer, "data.vocab=300", "train.steps=2", *overrides]


ENDS = ("data.end_of_text=<eos>", "data.begin_of_text=<bos>")


def test_a_run_asks_says_keeps_and_compares_them(folder: Path, stretto: CommandLine) -> None:
    errors = stretto.error(*command(folder))
    assert "no end-of-text token that the model's files agree on; in question: <turn> (258)" in errors
    assert "data.end_of_text=TOKEN" in errors
    assert "texts end with <eos> (257) and begin with <bos> (256); " in stretto(
        *command(folder, *ENDS, "sample.tokens=0")
    )
    meta: dict[str, Any] = read_manifest(folder / "runs" / "tiny" / "checkpoints" / "step-00000002").meta
    assert (meta["end_of_text"], meta["begin_of_text"]) == (257, 256)
    more = ["train.steps=3", "checkpoint.resume=auto", "sample.tokens=0"]
    errors = stretto.error(*command(folder, ENDS[0], "data.begin_of_text=''", *more))
    assert (
        "texts end with token 257 and begin with token 256 there, and here texts end with token 257" in errors
    )
    assert "data.end_of_text=257 data.begin_of_text=256" in errors
    stretto(*command(folder, "data.end_of_text=257", "data.begin_of_text=256", *more))


def test_prompts_begin_as_texts_do(folder: Path) -> None:
    checkpoint = folder / "runs" / "tiny" / "checkpoints" / "step-00000002"
    wording = Wording.load(checkpoint)
    assert wording.prompt("a").ids == [256, wording.tokenizer.encode("a")[0]]
    assert wording.prompt("").ids == [256]
    assert wording.stops == [257]


def test_evaluation_reads_text_with_the_same(folder: Path, stretto: CommandLine) -> None:
    other = folder / "other.txt"
    other.write_text("abc " * 20)
    report = stretto.json("evaluate", str(folder / "runs" / "tiny"), "--data", str(other))
    assert report["tokens"] == 81  # predicted: 80 bytes and the end, after the begin
    built = [
        "data",
        "build",
        str(other),
        "--tokenizer",
        str(folder / "model"),
        "--out",
        str(folder / "tokens"),
    ]
    assert (
        stretto.json(*built, "--end-of-text", "<eos>", "--begin-of-text", "")["boundaries"]
        == "texts end with <eos> (257)"
    )
    assert "texts end with <eos> (257), and the config says" in stretto.error(
        "evaluate", str(folder / "runs" / "tiny"), "--data", str(folder / "tokens")
    )


def test_an_export_has_them(folder: Path, stretto: CommandLine) -> None:
    out = folder / "exported"
    stretto("checkpoint", "export", str(folder / "runs" / "tiny"), "--out", str(out))
    config = json.loads((out / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"]) == (257, 256)
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["bos_token"], settings["add_bos_token"]) == (
        "<eos>",
        "<bos>",
        True,
    )


def test_tokens_of_another_tokenizer_than_the_config_names(folder: Path, stretto: CommandLine) -> None:
    other = folder / "text.txt"
    stretto("data", "build", str(other), "--vocab", "300", "--out", str(folder / "trained"))
    errors = stretto.error(*command(folder, f"data.source={folder / 'trained'}", "run.name=other"))
    assert (
        f"data.tokenizer is {folder / 'model'}: the tokens of {folder / 'trained'} are of another" in errors
    )
