"""What the planner says of a run before it starts, and how far off it was when the run ends.

Nothing here may stop a training: what goes wrong is told in a line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from stretto.errors import StrettoError
from stretto.planner.estimate import Estimate, estimate
from stretto.planner.machines.catalogue import (
    add_history,
    cluster_here,
    driver_name,
    is_measured,
    profile_path,
)
from stretto.run.config.job import job_of
from stretto.run.config.schema import TrainConfig

WARM_UP = 3  # first steps, in which memory and messages find their places
FEWEST_STEPS = 20  # after them, from which a later prediction is corrected
FILE = "prediction.json"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of a step.

    Attributes:
        low, high: the interval that the measured step lies in nine times of ten.
        tokens_per_s: of all ranks.
        cluster: on which; `correction` of it, by earlier runs, is in the seconds.
        measured_machine: it comes from a profile of this machine.
    """

    seconds: float
    low: float
    high: float
    tokens_per_s: float
    cluster: str
    correction: float
    measured_machine: bool
    job: str


def predict(config: TrainConfig) -> Prediction:
    """The time of a step on this machine.

    Raises:
        StrettoError: it is not known how such a job runs here; says why.
    """
    device = _device(config)
    _check(config, device)
    job = job_of(config)
    cluster = cluster_here(job.layout.world, device)
    found: Estimate = estimate(job, cluster, memory=False)
    low, high = (found.low, found.high) if is_measured(cluster) else (found.seconds / 3, found.seconds * 3)
    return Prediction(
        seconds=found.seconds,
        low=low,
        high=high,
        tokens_per_s=found.tokens_per_s,
        cluster=cluster.name,
        correction=cluster.correction,
        measured_machine=is_measured(cluster),
        job=_words(config),
    )


def first_line(config: TrainConfig) -> str:
    """What the banner says of it."""
    try:
        found = predict(config)
    except Exception as error:  # no prediction is worth a training
        return f"no prediction: {_reason(error)}"
    speed = f"{found.seconds:.3g} s a step ({found.low:.2g} to {found.high:.2g}), "
    speed += f"{float(f'{found.tokens_per_s:.3g}'):.0f} tokens/s"
    if not found.measured_machine:
        return f"predicted: {speed}; rough, for `stretto calibrate` has not measured this machine"
    told = f", corrected by {found.correction:.2f} from earlier runs" if found.correction != 1.0 else ""
    return f"predicted: {speed}, from profile {found.cluster}{told}"


class Forecast:
    """One run's prediction beside its steps, on the rank that reports."""

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._seconds = config, list[float]()
        self._found: Prediction | None = None
        self._why = ""
        try:
            self._found = predict(config)
        except Exception as error:
            self._why = _reason(error)

    def add(self, seconds: float) -> None:
        """A step took so long."""
        self._seconds.append(seconds)

    def end(self) -> str | None:
        """Write what was predicted and what was measured; the line that tells both, None where there is
        nothing to tell.
        """
        steps = self._seconds[WARM_UP:] or self._seconds[1:]
        if self._found is None or not steps:
            return None
        measured, found = median(steps), self._found
        try:
            self._write(found, measured, len(steps))
        except (OSError, StrettoError) as error:
            return f"prediction not kept: {_reason(error)}"
        return (
            f"predicted {found.seconds:.3g} s a step, measured {measured:.3g} "
            f"(median of {len(steps)}): {measured / found.seconds:.2f} times"
        )

    def _write(self, found: Prediction, measured: float, steps: int) -> None:
        row: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "cluster": found.cluster,
            "job": found.job,
            "predicted_s": found.seconds,
            "low_s": found.low,
            "high_s": found.high,
            "measured_s": measured,
            "steps": steps,
            "correction": found.correction,
            # without the correction, so that it does not correct itself
            "ratio": measured * found.correction / found.seconds,
        }
        folder: Path = self._config.run.folder
        (folder / FILE).write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
        if found.measured_machine and steps >= FEWEST_STEPS:
            add_history(profile_path(), row)


def _device(config: TrainConfig) -> str:
    wanted = config.train.device
    if wanted == "auto":
        return "cpu" if driver_name() is None else "cuda"
    return wanted


def _check(config: TrainConfig, device: str) -> None:
    """Raise where what is known of machines is not of such a job."""
    train = config.train
    if device != "cpu":
        return
    if train.threads != 1:
        raise StrettoError(f"what is known is of ranks with one thread, train.threads is {train.threads}")
    if train.dtype not in ("float32", "bfloat16") or config.precision.fp8 != "none":
        raise StrettoError(f"what is known of CPUs is of float32 and bfloat16, not of {train.dtype}")


def _words(config: TrainConfig) -> str:
    """The job, as a person would name it."""
    model = config.model
    layout = config.layout.to_layout()
    batch = config.batch
    return (
        f"{model.family} {model.layers} x {model.hidden}, {layout.describe()}, {config.schedule.name}, "
        f"{config.dp.mode}, {batch.global_size} x {config.data.sequence} by {batch.micro_size}"
    )


def _reason(error: Exception) -> str:
    """One line."""
    text = error.message if isinstance(error, StrettoError) else str(error) or type(error).__name__
    return " ".join(str(text).split())[:200]


__all__ = ["Forecast", "Prediction", "first_line", "predict"]
