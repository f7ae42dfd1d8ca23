"""Folders of runs as training writes them, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HOSTILE = "<img src=x onerror=alert(1)>"


def write_run(root: Path, name: str, *steps: dict[str, Any], config: str = "train: {steps: 4}\n") -> Path:
    """A run's folder with these records of steps."""
    run = root / "runs" / name
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(config)
    append(run, *steps)
    return run


def append(run: Path, *steps: dict[str, Any], name: str = "metrics.jsonl") -> None:
    with (run / name).open("a") as file:
        file.writelines(json.dumps(step) + "\n" for step in steps)


def step(number: int, **more: Any) -> dict[str, Any]:
    record = {"step": number, "loss": 5.0 - number, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s": 10.0}
    return record | more
