"""Examples: listed, written, and trained by name in a folder that has no configs."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from command_line import CommandLine
from stretto.cli.main import BAD_INPUT
from stretto.errors import StrettoError
from stretto.recommender.config.load import load_config
from stretto.run.config.load import EXAMPLES, example_configs


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_examples_are_listed_with_what_they_train(stretto: CommandLine) -> None:
    listed = stretto.json("init")["examples"]
    assert {*listed} == {path.stem for path in EXAMPLES.glob("*.yaml")}
    assert listed["llama-tiny-tp2"] == "A tiny Llama with tensor parallelism over 2 processes on one CPU"
    assert all(10 < len(about) < 110 for about in listed.values()), listed
    assert "llama-tiny-tp2" in stretto("init")


@pytest.mark.parametrize("name", example_configs())
def test_an_example_that_was_written_is_the_example(stretto: CommandLine, name: str) -> None:
    assert stretto.json("init", name) == {"path": f"{name}.yaml", "example": name}
    text = Path(f"{name}.yaml").read_text(encoding="utf-8")
    assert "configs/" not in text
    written, example = load_config(f"{name}.yaml"), load_config(EXAMPLES / f"{name}.yaml")
    assert written == example == load_config(name)  # the name alone: the file is nearer, and the same


def test_an_example_that_is_trained_by_name_is_announced(stretto: CommandLine) -> None:
    announced = "config quickstart: comes with the package; a copy to change: stretto init quickstart\n"
    with mock.patch("stretto.cli.train._train_locally", side_effect=StrettoError("trained")):
        for options, expected in (((), announced), (("--json",), "")):
            assert stretto("train", "quickstart", *options, code=BAD_INPUT) == expected
        Path("quickstart").write_text((EXAMPLES / "quickstart.yaml").read_text())
        assert stretto("train", "quickstart", code=BAD_INPUT) == ""


def test_nothing_is_overwritten(stretto: CommandLine) -> None:
    Path("quickstart.yaml").write_text("mine")
    assert "quickstart.yaml exists" in stretto.error("init", "quickstart")
    assert Path("quickstart.yaml").read_text() == "mine"
    stretto("init", "quickstart", "--out", "other.yaml")
    assert Path("other.yaml").is_file()


def test_what_is_missing_or_misspelled_is_one_error(stretto: CommandLine) -> None:
    assert "did you mean quickstart?" in stretto.error("init", "quikstart")
    assert "did you mean quickstart? `stretto init` lists the examples" in stretto.error("train", "quikstart")
    assert "as in `stretto launch slurm quickstart`" in stretto.error("launch", "slurm")
    Path("link.yaml").symlink_to("nothing.yaml")
    assert "no config in ." in stretto.error("config", "link.yaml")
    Path("link.yaml").unlink()
    assert "no config in ." in stretto.error("config", "nothing.yaml")


def test_a_file_comes_before_an_example_of_its_name(stretto: CommandLine) -> None:
    assert stretto.json("config", "quickstart")["run"]["name"] == "quickstart"
    Path("quickstart").write_text((EXAMPLES / "quickstart.yaml").read_text() + "run: {name: mine}\n")
    assert stretto.json("config", "quickstart")["run"]["name"] == "mine"
