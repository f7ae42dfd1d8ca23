"""Deprecated names work for one more minor version, with a warning; then they are refused by name."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import stretto as package
from command_line import CommandLine
from stretto import versions
from stretto.errors import StrettoError
from stretto.recommender.config.load import parse_config
from stretto.versions import Deprecated, DeprecatedName

NAME = Deprecated(name="stretto.Box", instead="stretto.Layout", since="0.1")
OPTION = Deprecated(name="stretto layout --size", instead="stretto layout --world", since="0.1")
COMMAND = Deprecated(name="stretto ranks", instead="stretto layout", since="0.1")
FIELD = Deprecated(
    name="optim.rounds",
    instead="train.steps=N",
    since="0.1",
    kind=int,
    fields=lambda rounds: {"train.steps": 10 * rounds},
)


@pytest.fixture(autouse=True)
def _deprecated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "DEPRECATED", (NAME, OPTION, COMMAND, FIELD))
    monkeypatch.setattr(versions, "__version__", "0.1.3")


def test_a_name_warns_at_the_line_that_uses_it() -> None:
    with pytest.warns(
        DeprecatedName, match=r"stretto\.Box is deprecated, and version 0\.2 will not"
    ) as found:
        assert package.Box is package.Layout  # pyright: ignore[reportAttributeAccessIssue]
    assert Path(found[0].filename) == Path(__file__)


def test_the_next_minor_version_refuses_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.2.0", "0.10.1", "1.0.0"):
        monkeypatch.setattr(versions, "__version__", version)
        with pytest.raises(
            StrettoError, match=r"optim\.rounds was removed in version 0\.2.*\n.*train\.steps=N"
        ):
            parse_config("optim: {rounds: 2}")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["layout", "--size", "8"], OPTION.name),
        (["layout", "--size=8"], OPTION.name),
        (["ranks", "--world", "8"], COMMAND.name),
    ],
)
def test_commands_and_options(stretto: CommandLine, arguments: list[str], name: str) -> None:
    assert stretto(*arguments) == stretto("layout", "--world", 8)
    (line,) = stretto.error(*arguments, code=0).splitlines()
    assert line.startswith(
        f"warning: {name} is deprecated, and version 0.2 will not have it: write stretto layout"
    )


def test_other_words_of_a_command_line_stay() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for arguments in (
            ["plan", "--size", "8"],
            ["layout", "ranks"],
            ["layout", "--", "--size"],
            ["layout"],
        ):
            assert versions.replace_deprecated(arguments) == arguments


def test_a_field_of_a_file_or_an_override_sets_the_new_one() -> None:
    with pytest.warns(DeprecatedName, match=r"c\.yaml:2: optim\.rounds is deprecated"):
        assert parse_config("optim:\n  rounds: 2\nmodel: {preset: gpt2}", "c.yaml").train.steps == 20
    with pytest.warns(DeprecatedName, match=r"override 'optim\.rounds=3': optim\.rounds is"):
        assert (
            parse_config(
                "{train: {steps: 7}, model: {preset: gpt2}}", overrides=["optim.rounds=3"]
            ).train.steps
            == 30
        )
    with pytest.warns(DeprecatedName):
        assert (
            parse_config(
                "{optim: {rounds: 2}, model: {preset: gpt2}}", overrides=["train.steps=7"]
            ).train.steps
            == 7
        )


@pytest.mark.filterwarnings("ignore::stretto.versions.DeprecatedName")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {rounds: x}", "c.yaml:1: optim.rounds is wrong\nhint: write train.steps=N"),
        ("train: {steps: 7}\noptim: {rounds: 2}", "c.yaml:2: optim.rounds and train.steps are both given"),
        ("{optim: {rounds: -1}, model: {preset: gpt2}}", "c.yaml:1: train.steps is -10, must be"),
    ],
)
def test_wrong_values_of_a_deprecated_field(text: str, message: str) -> None:
    with pytest.raises(StrettoError) as error:
        parse_config(text, "c.yaml")
    assert str(error.value).startswith(message)
