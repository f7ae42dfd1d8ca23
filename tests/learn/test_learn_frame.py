"""What `stretto learn` does with files that are unfinished, raise, hang, or lack a function."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import CommandLine
from stretto.errors import StrettoError
from stretto.learn.catalogue import EXERCISES, find_exercise, states
from stretto.learn.grade import grade

SOLUTIONS = Path(__file__).with_name("solutions")
HEAD = "import time\nimport torch.distributed as dist\n\n\ndef reduce_gradients(model, bucket_bytes):\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problem(body: str, folder: Path, limit_s: float = 30.0) -> str:
    path = folder / "mine.py"
    path.write_text(HEAD + body)
    problem = grade(find_exercise("ddp"), path, 1, limit_s=limit_s).checks[-1].problem
    assert problem is not None
    return problem


@pytest.mark.parametrize("name", [exercise.name for exercise in EXERCISES])
def test_a_template_is_not_written_yet(name: str, stretto: CommandLine) -> None:
    begun = stretto.json("learn", name)
    assert begun["written"]
    assert begun["state"] == "not begun"
    template = Path(begun["file"])
    code = template.read_text() + "# mine\n"
    template.write_text(code)
    assert not stretto.json("learn", name)["written"]
    assert template.read_text() == code
    if name in ("ddp", "tensor"):  # the others take the same path
        (*_, check) = stretto.json("learn", name, template, code=1)["checks"]
        line = 1 + template.read_text().splitlines().index(
            f"{' ' * 4 * (1 + (name == 'tensor'))}raise NotImplementedError"
        )
        assert f"{name}.py, line {line} is not written yet" in check["problem"]
        assert states()[name] == "attempted"


def test_a_rank_that_is_aborted(folder: Path) -> None:
    """As gloo aborts a process that receives more bytes than it expects."""
    found = problem("    import os\n    dist.get_rank() == 2 and os.abort()\n    dist.barrier()\n", folder)
    assert found.startswith("rank 2 was killed by SIGABRT: did ranks make different calls")


def test_progress(stretto: CommandLine) -> None:
    assert {each["state"] for each in stretto.json("learn")["exercises"]} == {"not begun"}
    printed = stretto("learn", "ddp", SOLUTIONS / "ddp.py", "--seed", 7)
    assert "  ok  gradients and weights are those of one process\n" in printed
    assert "solved in" in printed
    Path("wrong.py").write_text(HEAD + "    pass\n")
    printed = stretto("learn", "ddp", "wrong.py", code=1)
    assert "  NO  gradients" in printed
    assert "their mean is the reference: the reduction over them is missing" in printed
    assert states()["ddp"] == "solved", "once solved, always"
    assert "1 of " in stretto("learn")
    Path("learn/progress.json").write_text('{"ddp": "done"}')
    assert "progress.json is no progress of exercises" in stretto.error("learn")


def test_an_exception_is_reported_with_its_line(folder: Path) -> None:
    text = problem(
        "    if dist.get_rank() == 1:\n        model.head.weight += [1]\n    dist.barrier()\n", folder
    )
    assert text.startswith("mine.py, line 7: TypeError")


def test_an_exception_outside_the_file(folder: Path) -> None:
    text = problem("    model.head.weight.grad = 'none'\n", folder)
    assert "mine.py, line 6: TypeError" in text


def test_a_loop_without_end_and_those_that_wait_for_it(folder: Path) -> None:
    body = "    while dist.get_rank() == 1:\n        time.sleep(0.1)\n    dist.barrier()\n"
    text = problem(body, folder, limit_s=3.0)
    assert "rank 0 is at line 8: dist.barrier()" in text
    assert "rank 1 is at line 7: time.sleep(0.1)" in text


def test_a_rank_that_leaves_the_others_alone(folder: Path) -> None:
    text = problem(
        "    if dist.get_rank() == 0:\n        dist.all_reduce(model.head.weight.grad)\n", folder, 3.0
    )
    assert "rank 0 is at line 7: dist.all_reduce(model.head.weight.grad)" in text
    assert "rank 2 has left your code" in text


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def reduce_gradient(model, bucket_bytes): ...", "did you mean 'reduce_gradient'?"),
        ("def reduce_gradients(model): ...", "takes other arguments than (model, bucket_bytes)"),
        ("def reduce_gradients(:", "line 1: invalid syntax"),
    ],
)
def test_a_file_that_cannot_be_graded(code: str, expected: str, folder: Path) -> None:
    (folder / "mine.py").write_text(code)
    with pytest.raises(StrettoError) as caught:
        grade(find_exercise("ddp"), folder / "mine.py", 1)
    assert expected in str(caught.value)


def test_mistaken_commands(stretto: CommandLine) -> None:
    assert "did you mean 'zero1'" in stretto.error("learn", "zero")
    assert "--seed is for grading" in stretto.error("learn", "ddp", "--seed", 1)


def test_a_problem_of_one_rank_is_reported_with_the_rank(folder: Path) -> None:
    solution = (SOLUTIONS / "pipeline.py").read_text()
    path = folder / "mine.py"
    path.write_text(solution.replace("warm_up = min(count, ranks - 1 - rank)", "warm_up = min(count, 2)"))
    problem = grade(find_exercise("pipeline"), path, 1).checks[-1].problem
    assert problem is not None
    assert problem.startswith("rank 1: it runs F F F B")
