"""`stretto verify` from the command line: what it prints, how it ends."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import stretto.verify.run as verify_run
from stretto.cli.main import run
from stretto.engine.pipeline import Pipeline
from stretto.verify.compare import Quantity
from stretto.verify.evidence import Verdict
from tiny_job import EIGHT, job_file

pytestmark = pytest.mark.apart


def halve_gradients() -> None:
    original = Pipeline.step

    def step(self: Pipeline, inputs: Any, targets: Any, scale: Any, *rest: Any) -> Tensor | None:
        return original(self, inputs, targets, [factor / 2 for factor in scale], *rest)

    Pipeline.step = step


def fail() -> None:
    raise KeyError("planted")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(job_file(tmp_path_factory.mktemp("verify")))


def test_equal_layouts_end_with_0(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", config, "layout.pp=2", "--json"]) == 0
    out = capfd.readouterr().out
    report = json.loads(out)
    assert (report["equal"], report["dtype"], report["tolerance"], report["steps"]) == (
        True,
        "float64",
        1e-9,
        3,
    )
    assert "the plain model itself" in report["unseen"]
    assert report["compared"][-1] == "weights after updates by torch.optim.AdamW"
    assert "learning rates" in report["shared"]
    (layout,) = report["layouts"]
    assert layout["layout"] == "tp1 dp1 pp2 1f1b"
    assert layout["equal"] is True
    assert layout["diagnosis"] is None
    for key in ("loss_error", "grad_error", "norm_error", "weight_error"):
        assert 0 <= layout[key] <= 1e-9


@pytest.mark.parametrize("command", ["verify", "train"])
def test_flex_attention_is_refused_on_cpus(
    config: str, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([command, config, "train.attention=flex", "model.dropout=0"]) == 2
    errors = capfd.readouterr().err
    assert "train.attention is flex, which does not train on cpu with torch" in errors
    assert "train.attention=auto" in errors


def test_a_layout_that_differs_ends_with_1_and_a_diagnosis(
    config: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_run, "run_proof", partial(verify_run.run_proof, on_rank=halve_gradients))
    layouts = tmp_path / "layouts.yaml"
    layouts.write_text("- {tp: 2}\n- {pp: 2, schedule: interleaved, chunks: 2}\n")
    assert run(["verify", config, "--layouts", str(layouts), "--steps", "1"]) == 1
    text = capfd.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert len(rows) == 2
    assert all("NO" in row for row in rows)
    assert "tp1 dp1 pp2 interleaved chunks=2: every gradient is 0.5 times the reference" in text
    assert re.search(
        r"\n2 layouts in \d+ s, 2 DIFFER\n"
        r"compared with an independent reference: losses, gradients, their norm, weights after updates by "
        r"torch.optim.AdamW\n"
        r"shared with the reference: the plain model's layers, initial values, samples, learning rates\n"
        r"not seen here: the plain model itself, .* CPUs\s*$",
        text,
    )


def test_asynchronous_schedules_say_after_how_many_updates(
    config: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["verify", config, "model.tied=false", "optim.name=sgd", EIGHT, "--steps", "1"]
    layouts = tmp_path / "layouts.yaml"
    layouts.write_text("- {pp: 2, schedule: pipedream-2bw, group: 4}\n- {pp: 2, schedule: zb-h2}\n")
    assert run([*command, "--layouts", str(layouts), "--json"]) == 0
    late, _ = json.loads(capfd.readouterr().out)["layouts"]
    assert (late["updates"], late["tolerance"], late["equal"]) == (4, 1e-12, True)
    assert late["grad_error"] is late["norm_error"] is late["worst_gradient"] is None
    assert 0 <= late["weight_error"] <= 1e-12
    assert run([*command, "optim.clip=null", "layout.pp=2", "schedule.name=pipedream"]) == 0
    text = capfd.readouterr().out
    assert "after 16" in text
    assert "delayed updates" in " ".join(text.replace("│", " ").split())
    compared = "compared with an independent reference: losses, weights after updates by torch.optim.SGD"
    assert f"\n1 layout, all equal to one process\n{compared}\n" in text


def test_all_lists_impossible_layouts(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", config, "--layouts", "all", "--ranks", "1", "--steps", "1"]) == 0
    text = capfd.readouterr().out
    assert "tied" not in text  # one rank has one stage, or several with the tied embedding among them
    lines = text[text.index("impossible:") :].splitlines()
    assert "  layout.ep is above 1: the model has no experts (every layout)" in lines
    assert "  schedule forward-only: it has no backwards, so it cannot train (tp1 dp1 pp1)" in lines
    assert "pipedream vertical_sync=true" in " ".join(text.replace("│", " ").split())
    assert re.search(
        r"\n\d+ layouts \([1-9]\d* with the program of another\) in \d+ s, all equal to one", text
    )


@pytest.mark.slow
def test_what_is_impossible_is_in_the_json(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["model.tied=false", "model.moe.experts=3", "optim.name=sgd", "optim.clip=null"]
    assert (
        run(["verify", config, *command, "--layouts", "all", "--ranks", "1", "--steps", "1", "--json"]) == 0
    )
    report = json.loads(capfd.readouterr().out)
    (first,) = [
        refusal for refusal in report["impossible"] if refusal["reason"].startswith("schedule dualpipe:")
    ]
    assert first == {
        "reason": "schedule dualpipe: ranks is 1, must be even for schedule 'dualpipe'",
        "left_out": ["tp1 dp1 pp1"],
    }
    assert report["equal"] is True
    assert {"tp1 dp1 pp1 recompute=selective", "tp1 dp1 pp1 recompute=full"} <= {
        " ".join(word for word in layout["layout"].split() if "=" in word or word[-1].isdigit())
        for layout in report["layouts"]
    }


def test_progress_counts(capsys: pytest.CaptureFixture[str]) -> None:
    tell = partial(verify_run.Progress(), cases=2)
    loss = Quantity("loss", 0.0, 1e-9)
    first = Verdict(layout="tp1 dp1 pp1 naive", quantities=[loss], diagnosis=None, seconds=1.23)
    tell(first)
    wrong = [replace(loss, error=1.0)]
    tell(replace(first, layout="tp1 dp1 pp1 1f1b", same_as=first.layout, quantities=wrong))
    assert capsys.readouterr().out == (
        "[1/2] equal   tp1 dp1 pp1 naive  (1.2 s)\n[2/2] DIFFERS tp1 dp1 pp1 1f1b  (as tp1 dp1 pp1 naive)\n"
    )


def test_a_rank_that_fails_ends_with_1_and_its_traceback(
    config: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_run, "run_proof", partial(verify_run.run_proof, on_rank=fail))
    assert run(["verify", config, "layout.tp=2"]) == 1
    err = capfd.readouterr().err
    assert "in fail" in err
    assert "failed: KeyError: 'planted'; the job was ended" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "3"], "--ranks 3 goes with --layouts all"),
        (["--layouts", "all", "--ranks", "100000"], "100000 ranks are too many for the"),
        (["--layouts", "none.yaml"], "none.yaml: cannot be read"),
        (["layout.tp=3"], "layout.tp is 3: it must divide model.heads"),
        (["layout.dp=1000", "batch.global_size=1000"], "1000 ranks are too many"),
        (["data.split=0,1,0"], "data.split is 0,1,0"),
        (["data.sequence=100000"], "one sample of sequence 100000 needs 100001"),
    ],
)
def test_bad_input_ends_with_2(
    config: str, arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", config, *arguments]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    # that data are made ready may be told before
    error = next(line for line in captured.err.splitlines() if line.startswith("error: "))
    assert says in error
