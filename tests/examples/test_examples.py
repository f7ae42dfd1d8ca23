"""Every example runs, and prints what its first lines promise."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Generator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from stretto import Costs, schedule, simulate
from stretto.job.huggingface import shape_from_huggingface

pytestmark = pytest.mark.apart

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Make examples importable, by ranks too; restore the number of threads."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    torch.set_num_threads(threads)


def output(name: str) -> str:
    """What an example prints. Its file is imported and the block that makes it a script is run here, where
    PyTorch is imported already.
    """
    module = import_module(name.removesuffix(".py"))
    tree = ast.parse((EXAMPLES / name).read_text(encoding="utf-8"), name)
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "__name__ == '__main__'"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(ast.Module(block.body, []), name, "exec"), vars(module))
    return out.getvalue()


def test_a_planned_network_equals_one_process():
    printed = output("split_layers.py")
    assert "all equal to one process" in printed
    styles = {
        line.split()[0]: line.split()[3]
        for line in printed.splitlines()
        if " Conv2d " in line or " Linear " in line
    }
    assert styles == {"0.0": "batch", "0.3": "batch", "1.0": "replicate", "1.2": "column", "1.4": "row"}


@pytest.mark.slow
def test_an_example_is_a_script():
    command = [sys.executable, str(EXAMPLES / "own_module.py")]
    script = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert script.returncode == 0, script.stderr
    assert output("own_module.py") == script.stdout


def test_own_module_equals_one_process():
    printed = output("own_module.py")
    differences = [float(n) for n in re.findall(r"(?:output|gradients) (\S+?),?(?:\s|$)", printed)]
    assert len(differences) == 4, printed
    assert max(differences) < 1e-11
    assert "rank 1 holds up.weight [128, 64]" in printed
    assert "down.weight [64, 128]" in printed


def test_a_model_that_fsdp2_shards_is_proved():
    lines = output("prove_fsdp.py").splitlines()
    assert lines[0] == "largest relative difference from one process, float64, 2 steps"
    assert [line.split()[-1] for line in lines[2:7]] == ["yes"] * 5
    assert re.fullmatch(r"2 ranks in [\d.]+ s, all equal to one process", lines[8])


def test_every_mode_of_data_parallelism_equals_one_process():
    printed = output("data_parallel.py").splitlines()
    assert [line.partition(":")[0] for line in printed] == ["server", "ddp", "zero1", "zero2", "zero3"]
    for line in printed:
        off = re.search(r"off by (\S+),", line)
        assert off is not None, line
        assert float(off[1]) < 1e-12, line
    states = {line.partition(":")[0]: line.partition("states of ")[2] for line in printed}
    assert states["ddp"] == "4417, 4417"
    assert states["server"] == "4417, 0"
    assert states["zero2"] == "2209, 2208"


def test_pipeline_learns():
    losses = [float(n) for n in re.findall(r"loss (\S+)", output("pipeline_30_lines.py"))]
    assert len(losses) == 6
    assert losses[-1] < 0.3 * losses[0]


def test_one_weird_trick_sends_less_and_equals_one_process():
    printed = output("one_weird_trick.py").splitlines()
    matches = [
        re.fullmatch(r"(.+): a rank sends (\S+) bytes in a step; off by (.+)", line) for line in printed
    ]
    ways = {match[1]: (int(match[2].replace(",", "")), match[3]) for match in matches if match is not None}
    assert list(ways) == ["all", "turns", "shares", "data parallel"], printed
    for sent, off in ways.values():
        assert max(float(error) for error in re.findall(r"\d\S*e-\d+", off)) < 1e-10, off
        assert sent == ways["all"][0] or sent > 10 * ways["all"][0]
    assert ways["data parallel"][0] > 10 * ways["all"][0]


def test_a_planned_cut_gives_the_wide_layers_to_one_rank_and_changes_nothing_else():
    printed = output("uneven_layers.py").splitlines()
    matches = [
        re.fullmatch(r"(\w+): (\d+) \+ (\d+) layers, predicted (\S+) ms, took (\S+) ms, loss (\S+)", line)
        for line in printed
    ]
    even, planned = (match.groups() for match in matches if match is not None)
    assert even[:3] == ("even", "7", "7")
    assert int(planned[1]) > 7
    assert float(planned[3]) < float(even[3])
    assert planned[5] == even[5] != "0.000000"


def test_every_placement_of_tables_trains_the_same():
    printed = output("dlrm_placement.py").splitlines()
    matches = [re.fullmatch(r"(.+): loss (\S+) to (\S+), off by (\S+)", line) for line in printed]
    assert [match and match[1][:6] for match in matches] == ["table", "column", "row", "data", "{C1: {"]
    for match in matches:
        assert match is not None
        assert float(match[3]) < float(match[2])
        assert float(match[4]) < 1e-12


def test_a_tiny_published_model_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["tiny_llama.py", str(tmp_path / "tiny")])
    assert output("tiny_llama.py").endswith("parameters\n")
    shape = shape_from_huggingface(json.loads((tmp_path / "tiny" / "config.json").read_text()))
    assert not shape.unsupported_parts
    assert shape.rope is not None
    assert shape.rope.type == "llama3"


def test_schedules_of_a_file_are_as_their_docstrings_say():
    name = f"{EXAMPLES}/my_schedule.py"
    timelines = {at: simulate(schedule(f"{name}:{at}", 4, 8)) for at in ("lifo", "lifo:depth=8", "one_ahead")}
    peaks = {at: list(timeline.peak_activations) for at, timeline in timelines.items()}
    assert peaks == {"lifo": [4] * 4, "lifo:depth=8": [8] * 4, "one_ahead": [5, 4, 3, 1]}
    assert timelines["lifo:depth=8"].makespan == simulate(schedule("gpipe", 4, 8)).makespan == 33
    late = Costs(hop=0.5)
    ahead, plain = (simulate(schedule(at, 4, 8), late).makespan for at in (f"{name}:one_ahead", "1f1b"))
    assert ahead < plain


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_says_how_to_run_it_and_is_short(path: Path):
    text = path.read_text()
    assert re.search(rf"(python|stretto [a-z]+) examples/{path.stem}\b", text)
    assert len(text.splitlines()) <= (100 if path.stem == "my_parts" else 80)  # it has a part of each kind
    users = Path(__file__).parents[1] / "run" / "train"
    tests = [Path(__file__), users / "test_train_user_parts.py", users / "test_train_user_model.py"]
    assert any(path.name in test.read_text() for test in tests)
