"""A tiny recommender's job for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from stretto.config.recommender.load import parse_any
from stretto.config.recommender.schema import RecommenderConfig

JOB: dict[str, Any] = {
    "model": {
        "family": "dlrm",
        "bottom": [16, 8],
        "top": [16, 1],
        "tables": [{"rows": 40}, {"rows": 60, "hot": 2}],
    },
    "data": {"synthetic": {"samples": 2000}},
    "tables": {"placement": "row"},
    "layout": {"ranks": 2},
    "batch": {"global_size": 33},
    "train": {"steps": 6, "device": "cpu", "dtype": "float64", "timeout_s": 60},
    "eval": {"every": 3, "batches": 2},
    "checkpoint": {"every": 2},
    "metrics": {"every": 1},
}


def config_of(folder: Path, *overrides: str) -> RecommenderConfig:
    """The job with its runs in `folder`."""
    text = yaml.safe_dump({**JOB, "run": {"name": "tiny", "dir": str(folder / "runs")}})
    found = parse_any(text, "job.yaml", overrides)
    assert isinstance(found, RecommenderConfig)
    return found


def job_file(folder: Path) -> Path:
    """The job as a file."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**JOB, "run": {"dir": str(folder / "runs")}}))
    return path
