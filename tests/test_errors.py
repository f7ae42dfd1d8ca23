"""Messages to users: as long as can be read, and the same wherever they are made anew."""

from __future__ import annotations

import pickle

import pytest

from stretto.cli.output import print_error
from stretto.errors import LONGEST, Problem, StrettoError, joined


def test_a_message_of_megabytes_keeps_its_ends() -> None:
    error = StrettoError(f"begins {'x' * 10**7} ends", hint="y" * 3000)
    assert len(error.message) <= LONGEST
    assert error.message.startswith("begins x")
    assert "characters ...]" in error.message
    assert error.message.endswith("x ends")
    assert error.hint is not None
    assert len(error.hint) <= LONGEST


def test_a_message_is_cut_once() -> None:
    """Ranks send errors to the launcher, and sections of a config add their name."""
    error = StrettoError("x" * 10**6)
    assert pickle.loads(pickle.dumps(error)).message == error.message
    problem = Problem("field", "v" * 5000, "is too long", "shorten it")
    again = pickle.loads(pickle.dumps(problem))
    assert (str(again), again.field) == (str(problem), "field")
    assert len(problem.within("section").message) <= LONGEST


def test_problems_of_one_input_are_printed_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    problems = [StrettoError(f"field {number} is wrong", hint="mend it") for number in (*range(8), 3)]
    error = pickle.loads(pickle.dumps(joined(problems)))
    print_error(error.message, error.hint, error.others)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:12] == [
        line for number in range(6) for line in (f"error: field {number} is wrong", "hint: mend it")
    ]
    assert lines[12:] == ["2 more problems after these"]
