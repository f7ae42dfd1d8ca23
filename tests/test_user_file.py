"""Functions in users' files: found without running them, loaded once, failures with the user's line."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.user_file import find_function, load_module

SOURCE = """
import sys
loads = []
loads.append(1)

def build(ranks, *more, width=2):
    if width == 3:
        return len(None)
    return ranks + width

constant = 3
if sys.argv:
    from math import floor as floored
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_function_is_found_without_running_its_file_and_loaded_once(folder: Path) -> None:
    file = folder / "stretto_test_mine.py"
    file.write_text(SOURCE)
    function = find_function(f"{file}:build", "x", ("ranks", "microbatches"))
    assert file.stem not in sys.modules
    assert pickle.loads(pickle.dumps(function)) == function  # so ranks may be sent one
    assert function(1, width=4) == 5
    file.write_text(SOURCE.replace("loads.append(1)", "raise SystemExit"))
    assert function(2) == 4
    assert load_module(file).loads == [1]
    assert find_function(f"{file}:build", "x", ("ranks",)).load() is function.load()


def test_a_file_may_have_the_name_of_another_module(folder: Path) -> None:
    (folder / "one").mkdir()
    for file in (folder / "random.py", folder / "one" / "twin.py", folder / "twin.py"):
        file.write_text(f"def where(): return {str(file)!r}")
        assert find_function(f"{file}:where", "x")() == str(file)
        assert find_function(f"{file}:where", "x")() == str(file)
    assert sys.modules["random"] is random


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mine.py:build", "mine.py, line 8: TypeError: object of type 'NoneType' has no len()"),
        ("mine.py:build", "hint: the line is: return len(None)"),
        ("mine.py:constant", "mine.py:constant is int, not a function"),
        ("mine.py:bild", "did you mean 'build'?"),
        ("mein.py:build", "mine.py?"),
        ("mine.csv:build", "does not name a function in a file"),
        ("broken.py:build", "line 1: invalid syntax"),
        ("exits.py:build", "exits.py, line 3: SystemExit: 4"),
    ],
)
def test_mistakes_are_errors_with_the_users_line(target: str, message: str, folder: Path) -> None:
    (folder / "mine.py").write_text(SOURCE)
    (folder / "broken.py").write_text("def build(:")
    (folder / "exits.py").write_text("def build(ranks): ...\nimport sys\nsys.exit(4)")
    for name in ("mine", "exits"):
        sys.modules.pop(name, None)
    with pytest.raises(StrettoError) as raised:
        find_function(f"{folder}/{target}", "x", ("ranks",))(1, width=3)
    assert message in str(raised.value)
    assert "exits" not in sys.modules
