"""Users' hooks in training: the three examples on real ranks, ends that one rank asks for, and errors."""

from __future__ import annotations

import re
from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest
import torch

from recommender_job import job_file
from stretto.engine.checkpoint.read import read_whole
from stretto.errors import Problem
from stretto.recommender.config.load import load_config
from stretto.recommender.train.job import RECOMMENDER
from stretto.run.config.check import find_problems
from stretto.run.launch.local import RankFailed
from stretto.run.train.language_job import LANGUAGE
from stretto.run.train.launch import run_job
from stretto.run.train.metrics import read_lines
from tiny_job import job
from train_runs import tensors

EXAMPLES = Path(__file__).parents[3] / "examples" / "hooks"
COMMON = ("layout.dp=2", "train.steps=6", "checkpoint.every=2", "eval.every=2", "sample.tokens=0")


def hooked(folder: Path, *references: str, overrides: tuple[str, ...] = ()) -> tuple[str, ...]:
    return (*COMMON, f"train.hooks=[{', '.join(references)}]", *overrides)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_examples(tmp_path: Path) -> None:
    stopping = write(
        tmp_path / "impatient.py",
        "import sys\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "from early_stopping import EarlyStopping\n"
        "class Impatient(EarlyStopping):\n"
        "    def __init__(self):\n"
        "        super().__init__(patience=1)\n"
        "    def on_evaluation(self, run, record):\n"
        "        super().on_evaluation(run, {'loss': [3.0, 2.0, 2.5, 9.0][run.step // 2 - 1]})\n",
    )
    references = [f"{stopping}:Impatient", f"{EXAMPLES / 'layer_norms.py'}:before_update"]
    references.append(f"{EXAMPLES / 'weights_ema.py'}:WeightsEMA")
    config = job(tmp_path, *hooked(tmp_path, *references, overrides=("layout.pp=2", "train.steps=8")))
    outcome = run_job(LANGUAGE, config, quiet=True).outcome
    assert outcome is not None
    assert (outcome["step"], outcome["stopped"]) == (7, False), "worse at 6, agreed in step 7"
    logged = list(read_lines(config.run.folder / "logged.jsonl"))
    norms = {row["step"]: row for row in logged if any(name.startswith("grad_norm/") for name in row)}
    recorded = {row["step"]: row["grad_norm"] for row in read_lines(config.run.folder / "metrics.jsonl")}
    assert list(norms) == [2, 4, 6]
    for step, row in norms.items():
        squares = [value**2 for name, value in row.items() if name.startswith("grad_norm/")]
        assert sqrt(sum(squares)) == pytest.approx(recorded[step], rel=1e-5)
    average, loaded = read_whole(config.run.folder / "ema" / "step-00000007")
    assert loaded.step == 7
    weights = tensors(config, 7)
    assert any(not torch.equal(average[name], weights[f"model.{name}"]) for name in average)
    assert [row["early_stopping/worse"] for row in logged if "early_stopping/worse" in row] == [0, 0, 1, 2]


CALLS = """
import json, os
from torch import distributed as dist

class Calls:
    def __init__(self):
        self.seen = 0
    def state_dict(self):
        return {"seen": self.seen}
    def load_state_dict(self, state):
        self.seen = state["seen"]
    def note(self, run, name):
        with open(run.folder / f"calls-{run.rank}", "a") as file:
            file.write(f"{name} {run.step} {self.seen}\\n")
    def on_start(self, run):
        self.note(run, "start")
    def before_update(self, run):
        self.note(run, "update")
    def on_step_end(self, run, record):
        self.seen += 1
        assert record["step"] == run.step
        self.note(run, "step")
        if run.rank == 1 and run.step == STOP:
            run.stop("enough")
    def on_evaluation(self, run, record):
        self.note(run, "evaluation")
    def on_checkpoint(self, run, path):
        self.note(run, "checkpoint")
    def on_end(self, run):
        self.note(run, "end")

def on_step_end(run, record):
    return record["nothing"]
"""


@pytest.mark.parametrize("kind", ["language", "recommender"])
def test_every_rank_calls_them_and_one_may_end_the_run(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path / "calls.py", CALLS.replace("STOP", "2"))
    if kind == "language":
        config, of_kind = job(tmp_path, *hooked(tmp_path, f"{file}:Calls")), LANGUAGE
    else:
        overrides = ("train.steps=6", "checkpoint.every=2", "eval.every=2", f"train.hooks=[{file}:Calls]")
        config, of_kind = load_config(str(job_file(tmp_path)), [*overrides, "layout.ranks=2"]), RECOMMENDER
    outcome = run_job(of_kind, config, quiet=True).outcome
    assert outcome is not None
    assert (outcome["step"], outcome["stopped"]) == (3, False)
    calls = [(config.run.folder / f"calls-{rank}").read_text().splitlines() for rank in (0, 1)]
    assert calls[0] == calls[1]
    steps = ["update 1 0", "step 1 1", "update 2 1", "step 2 2", "evaluation 2 2", "checkpoint 2 2"]
    last = ["update 3 2", "step 3 3", "evaluation 3 3", "checkpoint 3 3", "end 3 3"]
    assert calls[0] == ["start 0 0", *steps, *last]
    write(file, CALLS.replace("STOP", "99"))
    run_job(of_kind, replace(config, checkpoint=replace(config.checkpoint, resume="auto")), quiet=True)
    resumed = (config.run.folder / "calls-0").read_text().splitlines()[len(calls[0]) :]
    assert (resumed[0], resumed[-1]) == ("start 3 3", "end 6 6"), "with its state"


def test_an_error_in_a_hook_names_it(tmp_path: Path) -> None:
    file = write(tmp_path / "calls.py", CALLS)
    config = job(tmp_path, *hooked(tmp_path, f"{file}:on_step_end"))
    with pytest.raises(RankFailed) as caught:
        run_job(LANGUAGE, config, quiet=True)
    message = rf"hook {file}:on_step_end, line \d+, step 1: KeyError: 'nothing'"
    assert re.search(message, caught.value.failure.message)


def test_hooks_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.py", "def on_step_ends(run, record): ...\ndef on_start(): ...\n")

    def problem(reference: str) -> Problem:
        (found,) = find_problems(job(tmp_path, f"train.hooks=[{reference}]"))
        assert found.field.startswith("train.hooks")
        return found

    assert "did you mean on_step_end?" in str(problem("mine.py:on_step_ends"))
    assert "takes other arguments than (run)" in str(problem("mine.py:on_start"))
    assert "did you mean 'on_start'?" in str(problem("mine.py:on_starts"))
