"""Messages to users: as long as can be read, and the same wherever they are made anew."""

from __future__ import annotations

import pickle

from stretto.errors import LONGEST, Problem, StrettoError


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
