"""The planner's prediction of a run's step time, and how it compares with the measured one at the end.

Nothing here may stop a training run: an error becomes one line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
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
from stretto.run.config.schema import LoopConfig, TrainConfig
from stretto.spec.job import Job

WARM_UP = 3  # first steps, in which buffers and connections are made
FEWEST_STEPS = 20  # after WARM_UP; a shorter run does not correct later predictions
FILE = "prediction.json"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of a step.

    Attributes:
        low, high: the interval that the measured step lies in nine times out of ten.
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


def predict(job: Job, train: LoopConfig) -> Prediction:
    """The time of a step on this machine.

    Args:
        train: device and threads of each rank.

    Raises:
        StrettoError: there is no model of such a job on this machine; says why.
    """
    device = _device(train)
    _check(job, train, device)
    cluster = cluster_here(job.layout.world, device)
    estimated: Estimate = estimate(job, cluster, memory=False)
    low, high = (
        (estimated.low, estimated.high)
        if is_measured(cluster)
        else (estimated.seconds / 3, estimated.seconds * 3)
    )
    return Prediction(
        seconds=estimated.seconds,
        low=low,
        high=high,
        tokens_per_s=estimated.tokens_per_s,
        cluster=cluster.name,
        correction=cluster.correction,
        measured_machine=is_measured(cluster),
        job=_describe(job),
    )


def first_line(job: Job, train: LoopConfig) -> str:
    """The line that follows the banner: seconds of a step and tokens/s, or why there is no prediction."""
    try:
        prediction = predict(job, train)
    except Exception as error:  # a failed prediction must not end the run
        return f"no prediction: {_reason(error)}"
    speed = f"{prediction.seconds:.3g} s a step ({prediction.low:.2g} to {prediction.high:.2g}), "
    speed += f"{float(f'{prediction.tokens_per_s:.3g}'):.0f} tokens/s"
    if not prediction.measured_machine:
        return f"predicted: {speed}; rough, for `stretto calibrate` has not measured this machine"
    corrected = (
        f", corrected by {prediction.correction:.2f} from earlier runs"
        if prediction.correction != 1.0
        else ""
    )
    return f"predicted: {speed}, from profile {prediction.cluster}{corrected}"


class Forecast:
    """One run's prediction beside its steps, on the rank that reports."""

    def __init__(self, job: Job, config: TrainConfig) -> None:
        self._folder, self._seconds = config.run.folder, list[float]()
        self._prediction: Prediction | None = None
        self._why = ""
        try:
            self._prediction = predict(job, config.train)
        except Exception as error:
            self._why = _reason(error)

    def add(self, seconds: float) -> None:
        """Add a measured step, in seconds."""
        self._seconds.append(seconds)

    def end(self) -> str | None:
        """Write prediction and measurement to the run's folder; returns a line with both, None without steps
        or prediction.
        """
        steps = self._seconds[WARM_UP:] or self._seconds[1:]
        if self._prediction is None or not steps:
            return None
        measured, prediction = median(steps), self._prediction
        try:
            self._write(prediction, measured, len(steps))
        except (OSError, StrettoError) as error:
            return f"prediction not kept: {_reason(error)}"
        return (
            f"predicted {prediction.seconds:.3g} s a step, measured {measured:.3g} "
            f"(median of {len(steps)}): {measured / prediction.seconds:.2f} times"
        )

    def _write(self, prediction: Prediction, measured: float, steps: int) -> None:
        row: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "cluster": prediction.cluster,
            "job": prediction.job,
            "predicted_s": prediction.seconds,
            "low_s": prediction.low,
            "high_s": prediction.high,
            "measured_s": measured,
            "steps": steps,
            "correction": prediction.correction,
            # without the correction, so that it does not correct itself
            "ratio": measured * prediction.correction / prediction.seconds,
        }
        (self._folder / FILE).write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
        if prediction.measured_machine and steps >= FEWEST_STEPS:
            add_history(profile_path(), row)


def _device(train: LoopConfig) -> str:
    if train.device == "auto":
        return "cpu" if driver_name() is None else "cuda"
    return train.device


def _check(job: Job, train: LoopConfig, device: str) -> None:
    """Raise StrettoError where profiles of machines do not cover such a job."""
    dtype = job.precision.dtype
    if device != "cpu":
        return
    if train.threads != 1:
        raise StrettoError(f"profiles of CPUs are of ranks with one thread, train.threads is {train.threads}")
    if dtype not in ("float32", "bfloat16") or job.precision.fp8 != "none":
        raise StrettoError(f"profiles of CPUs are of float32 and bfloat16, not of {dtype}")


def _describe(job: Job) -> str:
    """The job in a line."""
    shape = job.shape
    return (
        f"{shape.family} {shape.layers} x {shape.hidden}, {job.layout.describe()}, {job.schedule_name}, "
        f"{job.dp.mode}, {job.global_batch} x {job.sequence} by {job.micro_batch}"
    )


def _reason(error: Exception) -> str:
    """One line."""
    text = error.message if isinstance(error, StrettoError) else str(error) or type(error).__name__
    return " ".join(str(text).split())[:200]


__all__ = ["Forecast", "Prediction", "first_line", "predict"]
