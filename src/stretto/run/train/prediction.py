"""The planner's prediction of a run's step time, and how it compares with the measured one at the end.

Nothing here may stop a training run: an error becomes one line.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from math import inf
from statistics import median
from typing import Any

from stretto.errors import StrettoError
from stretto.job.devices import AUTO, HOST
from stretto.job.job import Job
from stretto.planner.estimate import Estimate, estimate
from stretto.planner.machines.catalogue import (
    add_history,
    cluster_here,
    is_measured,
    profile_path,
)
from stretto.planner.machines.cluster import Cluster
from stretto.run.config.schema import LoopConfig, TrainConfig

WARM_UP = 3  # first steps, in which buffers and connections are made
FEWEST_STEPS = 20  # after WARM_UP; a shorter run does not correct later predictions
FILE = "prediction.json"


def machine_of(job: Job, train: LoopConfig) -> Cluster:
    """This machine with as many devices as the job has ranks, as its ranks would use it.

    Args:
        train: device and threads of each rank.

    Raises:
        StrettoError: there is no model of such a job on this machine; says why.
    """
    kind = kind_here(train)
    _check(job, train, kind)
    return cluster_here(job.layout.world, kind)


def predict(job: Job, train: LoopConfig) -> Estimate:
    """Time and memory of the job on this machine: what `stretto predict --cluster here` prints.

    Args:
        train: device and threads of each rank.

    Raises:
        StrettoError: there is no model of such a job on this machine; says why.
    """
    return estimate(job, machine_of(job, train))


def first_line(job: Job, train: LoopConfig) -> str:
    """The line that follows the banner: seconds of a step, tokens/s, bubble and memory, or why there is no
    prediction.
    """
    try:
        prediction = predict(job, train)
    except Exception as error:  # a failed prediction must not end the run
        return f"no prediction: {_reason(error)}"
    cluster = prediction.cluster
    expected = (
        f"{prediction.seconds:.3g} s a step ({prediction.low:.2g} to {prediction.high:.2g}), "
        f"{float(f'{prediction.tokens_per_s:.3g}'):.0f} tokens/s, bubble {prediction.bubble:.1%}"
    )
    if prediction.memory is not None:
        held = prediction.memory
        of = "" if held.capacity == inf else f" of {held.capacity / 2**30:.3g}"
        expected += f", {held.device.mid / 2**30:.2g}{of} GiB a rank ({held.verdict})"
    if not is_measured(cluster):
        return f"predicted: {expected}; rough, for `stretto calibrate` has not measured this machine"
    corrected = (
        f", corrected by {cluster.correction:.2f} from earlier runs" if cluster.correction != 1.0 else ""
    )
    return f"predicted: {expected}, from profile {cluster.name}{corrected}"


class StepTimePrediction:
    """One run's prediction beside its steps, on the rank that reports.

    Attributes:
        estimate: None where there is none; `why` says the reason.
    """

    def __init__(self, job: Job, config: TrainConfig) -> None:
        self._folder, self._seconds = config.run.folder, list[float]()
        self.estimate: Estimate | None = None
        self.why = ""
        try:
            self.estimate = predict(job, config.train)
        except Exception as error:
            self.why = _reason(error)

    def add(self, seconds: float) -> None:
        """Add a measured step, in seconds."""
        self._seconds.append(seconds)

    def end(self) -> str | None:
        """Write prediction and measurement to the run's folder; returns a line with both, None without steps
        or prediction.
        """
        steps = self._seconds[WARM_UP:] or self._seconds[1:]
        if self.estimate is None or not steps:
            return None
        measured, prediction = median(steps), self.estimate
        try:
            self._write(prediction, measured, len(steps))
        except (OSError, StrettoError) as error:
            return f"prediction not kept: {_reason(error)}"
        return (
            f"predicted {prediction.seconds:.3g} s a step, measured {measured:.3g} "
            f"(median of {len(steps)}): {measured / prediction.seconds:.2f} times"
        )

    def _write(self, prediction: Estimate, measured: float, steps: int) -> None:
        correction = prediction.cluster.correction
        row: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "cluster": prediction.cluster.name,
            "job": _describe(prediction.job),
            "predicted_s": prediction.seconds,
            "low_s": prediction.low,
            "high_s": prediction.high,
            "measured_s": measured,
            "steps": steps,
            "correction": correction,
            # without the correction, so that it does not correct itself
            "ratio": measured * correction / prediction.seconds,
        }
        (self._folder / FILE).write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
        if is_measured(prediction.cluster) and steps >= FEWEST_STEPS:
            add_history(profile_path(), row)


def kind_here(train: LoopConfig) -> str:
    """The kind of device that ranks on this machine compute on; torch is asked only for `auto`."""
    if train.device != AUTO:
        return train.device
    from stretto.engine.device import device_kind

    return device_kind(AUTO)


def accelerator_named(train: LoopConfig) -> tuple[str, ...]:
    """The kind of the ranks' devices where these are accelerators, for the first line of a run."""
    kind = kind_here(train)
    return () if kind == HOST else (kind,)


def _check(job: Job, train: LoopConfig, kind: str) -> None:
    """Raise StrettoError where profiles of machines do not cover such a job."""
    dtype = job.precision.dtype
    if kind != HOST:
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


__all__ = ["StepTimePrediction", "accelerator_named", "first_line", "kind_here", "machine_of", "predict"]
