"""The library's face: what `import stretto` gives and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

import stretto


def test_the_face_is_whole() -> None:
    assert stretto.schedule("1f1b", 2, 2).ranks == 2
    assert stretto.simulate(stretto.schedule("1f1b", 2, 2)).makespan == 9
    assert stretto.Layout(dp=2).world == 2
    assert all(getattr(stretto, name) for name in stretto.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = stretto.nothing  # type: ignore[attr-defined]


def test_names_stay_functions_whatever_was_imported_first() -> None:
    code = (
        "import stretto.program.replay, stretto.program.lower; from stretto import schedule, simulate;"
        "print(callable(schedule) and callable(simulate))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


def test_import_is_light() -> None:
    heavy = "('torch', 'numpy', 'pydantic', 'rich')"
    code = f"import sys, stretto; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
