from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from command_line import CommandLine
from stretto.cli.main import run
from stretto.run.data.token_folder import TokenFolder

TEXT = Path(__file__).read_text()


def answer(stretto: CommandLine, *arguments: str) -> dict[str, Any]:
    return stretto.json("data", *arguments, silent=True)


def test_build_and_info_say_the_same(tmp_path: Path, stretto: CommandLine):
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": TEXT}) + "\n" + json.dumps({"body": "two"}))
    out = str(tmp_path / "out")
    built = answer(
        stretto, "build", f"{tmp_path}/a.jsonl", "--out", out, "--vocab", "300", "--text-field", "body"
    )
    folder = TokenFolder(out)
    assert (built["documents"], built["tokens"], built["path"]) == (2, len(folder.tokens), out)
    assert built["vocab"] == 300
    assert answer(stretto, "info", out) == built
    assert answer(stretto, "info", out, "--verify") == built | {"verified": True}
    assert answer(stretto, "build", f"{tmp_path}/a.jsonl", "--text-field", "body", "--out", f"{out}2",
                  "--tokenizer", f"{out}/tokenizer.json")["tokens"] == built["tokens"]  # fmt: skip


def test_text_for_people(tmp_path: Path, stretto: CommandLine):
    (tmp_path / "a.txt").write_text(TEXT)
    shown = stretto("data", "build", f"{tmp_path}/a.txt", "--out", f"{tmp_path}/out", "--vocab", "300")
    assert shown.index("train tokenizer") < shown.index("encode") < shown.index("documents")
    assert ["blank", "documents", "0"] in [line.split() for line in shown.splitlines()]


def test_training_and_held_out_text_is_kept_apart_or_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = [tmp_path / name for name in ("train.txt", "valid.txt")]
    for file in files:
        file.write_text(TEXT)
    assert run(["data", "build", *map(str, files), "--vocab", "300", "--out", f"{tmp_path}/two"]) == 0
    printed = capsys.readouterr()
    assert re.search(
        r"splits +train [\d,]+ tokens of train.txt, valid [\d,]+ tokens of valid.txt\n", printed.out
    )
    assert printed.err == ""
    megatron = ["--format", "megatron", "--vocab", "300", "--out", f"{tmp_path}/m"]
    assert run(["data", "build", *map(str, files), *megatron]) == 0
    assert f"warning: {files[0]} and {files[1]} become one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["build", "nowhere.txt", "--out", "x"], "nowhere.txt: no such file"),
        (["build", "bad.txt", "--out", "x"], "bad.txt: not UTF-8 at byte 3"),
        (["build", "empty.txt", "--out", "x"], "empty.txt: empty file"),
        (["build", "good.txt", "--out", "x", "--vocab", "9"], "vocab 9"),
        (["build", "good.txt", "--vocab", "300", "--tokenizer", "t"], "has its own vocabulary"),
        (["build", "good.txt", "--tokenizer", "t"], "tokenizer t: no such file"),
        (["build"], "Missing argument"),
        (["info", "."], "not a token folder"),
    ],
)
def test_bad_input_is_one_error_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stretto: CommandLine,
    arguments: list[str],
    error: str,
):
    monkeypatch.chdir(tmp_path)
    for name, content in (("bad.txt", b"caf\xe9"), ("empty.txt", b""), ("good.txt", b"good")):
        (tmp_path / name).write_bytes(content)
    lines = stretto.error("data", *arguments).splitlines()
    assert lines[0].startswith("error: ")
    assert error in lines[0]
    assert [line.startswith("hint: ") for line in lines[1:]] == [True]


def test_a_corrupt_folder_is_refused(tmp_path: Path, stretto: CommandLine):
    (tmp_path / "a.txt").write_text(TEXT)
    answer(stretto, "build", f"{tmp_path}/a.txt", "--out", f"{tmp_path}/out", "--vocab", "300")
    data = bytearray((tmp_path / "out" / "tokens.bin").read_bytes())
    data[40] ^= 1
    (tmp_path / "out" / "tokens.bin").write_bytes(data)
    assert "corrupt in chunk 0 of 1" in stretto.error("data", "info", f"{tmp_path}/out", "--verify")


def test_urls(tmp_path: Path, stretto: CommandLine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text(TEXT)
    built = answer(stretto, "build", f"file://{tmp_path}/a.txt", "--out", f"{tmp_path}/out", "--vocab", "300")
    url = f"file://{tmp_path}/out"
    assert answer(stretto, "info", url, "--verify") == built | {"path": url, "verified": True}
    assert "«from __fut" in stretto("data", "show", url, "--tokens", "9")
    error = stretto.error("data", "build", "x.txt", "--out", "s3://bucket/tokens")
    assert "--out s3://bucket/tokens: a build is written to a disk" in error
    assert "aws s3 cp --recursive DIR s3://bucket/tokens" in error
    assert "pip install 'stretto[s3]'" in stretto.error("data", "info", "s3://bucket/tokens")
