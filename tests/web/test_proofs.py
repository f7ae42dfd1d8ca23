"""Commands that the studio starts: their output as it comes, a proof's verdict, and their end."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.web import jobs
from stretto.web.folder import StudioFolder
from stretto.web.jobs import StudioJobs
from stretto.web.proofs import Proofs

LAYOUT = {"tolerance": 1e-9, "worst_gradient": "blocks.0.mlp.up.weight", "worst_weight": "-"}
VERDICT = {
    "equal": False,
    "seconds": 1.5,
    "compared": ["losses"],
    "unseen": ["the plain model"],
    "layouts": [
        {"layout": "tp2", "loss_error": 1e-16, "grad_error": 2e-13, "equal": True, "diagnosis": "", **LAYOUT},
        {
            "layout": "pp2",
            "loss_error": None,
            "grad_error": 0.5,
            "equal": False,
            "diagnosis": "differs from blocks.0.mlp on",
            **LAYOUT,
        },
    ],
    "own_types": [
        {
            "layout": "tp2",
            "dtype": "bfloat16",
            "quantities": [{"name": "loss", "error": 0.001, "bound": 0.01}],
            "diagnosis": "",
            "equal": True,
        }
    ],
}


@pytest.fixture
def proofs(tmp_path: Path) -> Proofs:
    (tmp_path / "a.yaml").write_text("train: {}\n")
    folder = StudioFolder(tmp_path)
    return Proofs(folder, StudioJobs(folder), Event())


def command(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Make this code what every job runs."""
    monkeypatch.setattr(jobs, "_STRETTO", (sys.executable, "-c", code))


def test_lines_come_as_they_are_printed_and_the_verdict_last(
    proofs: Proofs, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = json.dumps(VERDICT)
    command(
        monkeypatch,
        "import sys, time; print('[1/2] equal tp2', file=sys.stderr); time.sleep(0.6); "
        f"print('[2/2] <b>', file=sys.stderr); print({verdict!r}); sys.exit(1)",
    )
    started = proofs.start({"config": "a.yaml", "overrides": "layout.tp=2", "layouts": "all"})
    answers = [answer for answer in proofs.watch(started) if answer is not None]
    assert answers[-1]["command"] == "stretto verify ./a.yaml layout.tp=2 --layouts all --json"
    assert ["[1/2] equal tp2"] in [answer["lines"] for answer in answers if answer["code"] is None]
    last: Any = answers[-1]
    assert (last["code"], last["equal"]) == (1, False)
    assert last["lines"] == ["[1/2] equal tp2", "[2/2] <b>"]
    assert last["table"] == [
        ["layout", "loss", "gradients", "bound", "equal", "worst"],
        ["tp2", "1.0e-16", "2.0e-13", "1.0e-09", "yes", "blocks.0.mlp.up.weight"],
        ["pp2", "-", "5.0e-01", "1.0e-09", "NO", "blocks.0.mlp.up.weight"],
    ]
    assert last["own_types"][1] == ["tp2", "bfloat16", "loss", "1.0e-03", "1.0e-02"]
    assert last["diagnoses"] == ["pp2: differs from blocks.0.mlp on"]
    assert [answer for answer in proofs.watch({}) if answer is not None][-1] == last  # the newest


def test_a_proof_that_fails_has_its_error_and_no_verdict(
    proofs: Proofs, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(monkeypatch, "import sys; print('error: bad', file=sys.stderr); sys.exit(2)")
    started = proofs.start({"config": "a.yaml"})
    *_, last = (answer for answer in proofs.watch(started) if answer is not None)
    assert (last["code"], last["lines"], "equal" in last) == (2, ["error: bad"], False)


def test_a_proof_is_stopped_and_what_there_is_not_is_told(
    proofs: Proofs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [*proofs.watch({})] == [{}]
    command(monkeypatch, "import time; time.sleep(60)")
    started = proofs.start({"config": "a.yaml"})
    time.sleep(0.2)
    proofs.stop(started)
    *_, last = (answer for answer in proofs.watch(started) if answer is not None)
    assert last["code"] != 0
    for job in (7, -1, "0", None):
        with pytest.raises(StrettoError, match="has no job"):
            proofs.stop({"job": job})
    for question in ({"config": "b.yaml"}, {"config": "a.yaml", "layouts": "some"}):
        with pytest.raises(StrettoError):
            proofs.start(question)
