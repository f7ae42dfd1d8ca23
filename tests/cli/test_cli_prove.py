"""`stretto prove` from the command line: what it prints, how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.cli.main import run

pytestmark = pytest.mark.apart

EXAMPLE = Path(__file__).parents[2] / "examples" / "prove_fsdp.py"
WRONG = """
from prove_fsdp import *


def forgetful():
    return prove(plain, lambda model: model, batch(), step, loss=loss)


def batch():
    torch.manual_seed(1)
    return torch.randn(16, 32), torch.randint(10, (16,))


def nothing():
    return 7


def needs(one, two=2):
    return one


def fails():
    raise KeyError("planted")
"""


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    """A file beside a copy of the example, which it imports."""
    (tmp_path / EXAMPLE.name).write_text(EXAMPLE.read_text())
    (tmp_path / "wrong.py").write_text(WRONG)
    return str(tmp_path / "wrong.py")


def test_an_equal_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prove", f"{EXAMPLE}:check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["equal"], report["ranks"], report["steps"], report["dtype"]) == (True, 2, 2, "float64")
    assert [quantity["name"] for quantity in report["quantities"]] == [
        *("loss", "gradients", "norm", "weights", "states", "buffers")
    ]


def test_a_model_that_differs(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prove", f"{wrong}:forgetful"]) == 1
    printed = capsys.readouterr().out
    assert "every gradient differs between the 2 ranks, and their mean is the reference" in printed
    assert "DIFFERS from one process" in printed


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("{wrong}:nothing", 2, "wrong.py:nothing returned int, must return the report of a proof"),
        ("{wrong}:fails", 1, "failed: KeyError: 'planted'"),
        ("{wrong}:forgetfull", 2, "did you mean 'forgetful'?"),
        ("{wrong}:needs", 2, "wrong.py:needs takes other arguments than (none)"),
        ("{wrong}", 2, "does not name a function in a file"),
        ("nowhere.py:check", 2, "there is no file nowhere.py"),
    ],
)
def test_mistakes(
    target: str, code: int, message: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["prove", target.format(wrong=wrong)]) == code
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def check(:")
    assert run(["prove", f"{path}:check"]) == 2
    assert "broken.py, line 1: invalid syntax" in capsys.readouterr().err
