"""The check of JSON keys, which runs beside all tests of commands, sees what it is there for."""

from __future__ import annotations

import json
from typing import Any

import pytest

import json_keys
from command_line import CommandLine
from stretto.cli.main import COMMANDS, run
from stretto.cli.report import JSON_VERSIONS, CommandReport

LISTED = json_keys.listing("$: a b? parts\nparts[]: *\nparts[].*: size\n    unit?\n")
RIGHT = {"a": 1, "parts": [{"x": {"size": 1}}, {}]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (RIGHT, []),
        ({**RIGHT, "b": None}, []),
        ({**RIGHT, "c": 1}, ["$ has the key c"]),
        ({"a": 1}, ["$ lacks parts"]),
        ({**RIGHT, "a": {"new": 1}}, ["a is an object with the keys ['new']"]),
        ({**RIGHT, "parts": [{"x": {"bytes": 1}}]}, ["parts[].* has the key bytes", "parts[].* lacks size"]),
    ],
)
def test_differences_are_seen(value: Any, expected: list[str]) -> None:
    assert [*json_keys.differences(value, LISTED)] == expected


def test_every_command_has_a_section() -> None:
    listed = {json_keys.title_words(title)[0] for title in json_keys.sections()}
    assert listed == {*COMMANDS}


def test_a_renamed_key_of_a_command_is_an_error(
    stretto: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    print_report = CommandReport.print

    def renamed(report: CommandReport, as_json: bool, *arguments: Any) -> None:
        assert callable(report.record)
        report.record = {("size" if k == "world" else k): v for k, v in report.record().items()}
        print_report(report, as_json, *arguments)

    stretto.json("layout", "--world", 4, "--tp", 2)
    monkeypatch.setattr(CommandReport, "print", renamed)
    with pytest.raises(AssertionError, match=r"layout: \$ has the key size; \$ lacks world"):
        stretto.json("layout", "--world", 4, "--tp", 2)


def test_the_schema_has_its_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(JSON_VERSIONS, "layout", 2)
    for command, schema in (("layout --world 2", "stretto layout/2"), ("init", "stretto init/1")):
        assert run([*command.split(), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["schema"] == schema
