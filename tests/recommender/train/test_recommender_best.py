from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.cli.main import run

CONFIG = Path(__file__).parents[3] / "configs" / "dlrm.yaml"


@pytest.mark.slow
def test_the_shipped_job_comes_within_three_percent_of_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(["train", str(CONFIG), f"run.dir={tmp_path}", "checkpoint.every=null", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    above = report["entropy"] / report["best_entropy"] - 1
    # without the products of features it would stay 5% above
    assert 0 < above < 0.03, f"{above:.2%} above the best"
    assert report["best_entropy"] < 0.8
    assert report["calibration"] == pytest.approx(1, abs=0.05)
