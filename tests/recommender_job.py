"""A tiny recommender's job for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from stretto.recommender.clicks.index import CategoricalFeature
from stretto.recommender.clicks.writer import ClickWriter
from stretto.recommender.config.load import parse_config
from stretto.recommender.config.schema import RecommenderConfig

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
    config = parse_config(text, "job.yaml", overrides)
    assert isinstance(config, RecommenderConfig)
    return config


def job_file(folder: Path) -> Path:
    """The job as a file."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**JOB, "run": {"dir": str(folder / "runs")}}))
    return path


def folder_of(path: Path, samples: int = 300) -> Path:
    """A click folder of two features, of which the second has a number of ids that varies."""
    rng = np.random.default_rng(0)
    features = [CategoricalFeature("user", 50), CategoricalFeature("tags", 9, None)]
    with ClickWriter(path, features, ["a", "b", "c"]) as writer:
        lengths = np.stack([np.ones(samples, int), rng.integers(0, 4, samples)], 1)
        ids = np.concatenate(
            [np.concatenate(([rng.integers(50)], rng.integers(0, 9, n))) for n in lengths[:, 1]]
        )
        dense = rng.random((samples, 3), dtype=np.float32)
        writer.add(dense, rng.integers(0, 2, samples), ids, lengths)
        writer.commit()
    return path
