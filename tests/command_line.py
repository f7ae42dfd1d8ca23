"""Commands of `stretto` in the process of the test."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stretto.cli.main import BAD_INPUT, DONE, run


class CommandLine:
    """Runs commands, checks their exit codes, and returns what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def _run(self, arguments: tuple[object, ...], code: int) -> Any:
        self._capsys.readouterr()
        ended = run([str(word) for word in arguments])
        printed = self._capsys.readouterr()
        assert ended == code, printed.out[-2000:] + printed.err[-2000:]
        return printed

    def __call__(self, *arguments: object, code: int = DONE) -> str:
        """Return the text on stdout."""
        return self._run(arguments, code).out

    def error(self, *arguments: object, code: int = BAD_INPUT) -> str:
        """Return the text on stderr."""
        return self._run(arguments, code).err

    def json(self, *arguments: object, code: int = DONE, silent: bool = False) -> Any:
        """Return the object that --json prints; `silent` commands print nothing on stderr."""
        printed = self._run((*arguments, "--json"), code)
        assert not (silent and printed.err), printed.err
        printed_object = json.loads(printed.out)
        assert printed_object.pop("schema").startswith("stretto ")
        return printed_object
