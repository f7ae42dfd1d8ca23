"""The planner's prediction of a run's step time, and how it compares with the measured one at the end.

No error in this module may stop a training run: it becomes one line.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from math import inf
from pathlib import Path
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
    local_profile,
    probe_path,
)
from stretto.planner.machines.cluster import Cluster

WARM_UP = 3  # first steps, in which buffers and connections are made
FEWEST_STEPS = 20  # after WARM_UP; a shorter run does not correct later predictions
FILE = "prediction.json"


def machine_of(job: Job, device: str, threads: int) -> Cluster:
    """Return this machine with as many devices as the job has ranks.

    Args:
        device: `train.device`.
        threads: of each rank.

    Raises:
        StrettoError: no profile of this machine covers the job; says why.
    """
    kind, dtype = local_device_kind(device), job.precision.dtype
    if kind == HOST and threads != 1:
        raise StrettoError(f"profiles of CPUs are of ranks with one thread, train.threads is {threads}")
    if kind == HOST and (dtype not in ("float32", "bfloat16") or job.precision.fp8 != "none"):
        raise StrettoError(f"profiles of CPUs are of float32 and bfloat16, not of {dtype}")
    return cluster_here(job.layout.world, kind, probed=True)


def predict(job: Job, device: str, threads: int) -> Estimate:
    """Return time and memory of the job on this machine: what `stretto predict --cluster here` prints.
    Arguments and errors are those of `machine_of`.
    """
    return estimate(job, machine_of(job, device, threads))


def prediction_line(job: Job, device: str, threads: int) -> str:
    """Return the line that follows the banner: seconds of a step, tokens/s, bubble and memory, or why there
    is no prediction.
    """
    try:
        prediction = predict(job, device, threads)
    except Exception as error:  # a failed prediction must not end the run
        return f"no prediction: {_reason(error)}"
    cluster = prediction.cluster
    expected = (
        f"{prediction.seconds:.3g} s a step ({prediction.low:.2g} to {prediction.high:.2g}), "
        f"{float(f'{prediction.tokens_per_s:.3g}'):.0f} tokens/s, bubble {prediction.bubble:.1%}"
    )
    if prediction.memory is not None:
        memory = prediction.memory
        of = "" if memory.capacity == inf else f" of {memory.capacity / 2**30:.3g}"
        host = f", {memory.host_text}" if memory.host else ""
        expected += f", {memory.device.mid / 2**30:.2g}{of} GiB a rank{host} ({memory.verdict})"
    if not is_measured(cluster):
        return f"predicted: {expected}; rough, for `stretto calibrate` has not measured this machine"
    source = f"profile {cluster.name}"
    if local_profile() == probe_path():
        source = "the probe of this machine, which `stretto calibrate` makes exact"
    corrected = (
        f", corrected by {cluster.correction:.2f} from earlier runs" if cluster.correction != 1.0 else ""
    )
    return f"predicted: {expected}, from {source}{corrected}"


class StepTimePrediction:
    """The prediction of a run and its measured steps, on the rank that reports.

    Args:
        folder: the run's, to which both are written.

    Attributes:
        estimate: the prediction, or None; then `reason` says why.
    """

    def __init__(self, job: Job, folder: Path, device: str, threads: int) -> None:
        self._folder, self._seconds = folder, list[float]()
        self.estimate: Estimate | None = None
        self.reason = ""
        try:
            self.estimate = predict(job, device, threads)
        except Exception as error:
            self.reason = _reason(error)

    def add(self, seconds: float) -> None:
        """Add a measured step, in seconds."""
        self._seconds.append(seconds)

    def end(self) -> str | None:
        """Write prediction and measurement to the run's folder, and return a line with both, or None without
        steps or prediction.
        """
        steps, prediction = self._seconds[WARM_UP:] or self._seconds[1:], self.estimate
        if prediction is None or not steps:
            return None
        measured = median(steps)
        job, correction = prediction.job, prediction.cluster.correction
        shape = job.shape
        row: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "cluster": prediction.cluster.name,
            "job": f"{shape.family} {shape.layers} x {shape.hidden}, {job.layout.describe()}, "
            f"{job.schedule_name}, {job.dp.mode}, {job.global_batch} x {job.sequence} by {job.micro_batch}",
            "predicted_s": prediction.seconds,
            "low_s": prediction.low,
            "high_s": prediction.high,
            "measured_s": measured,
            "steps": len(steps),
            "correction": correction,
            # without the correction, so that it does not correct itself
            "ratio": measured * correction / prediction.seconds,
        }
        try:
            (self._folder / FILE).write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
            if is_measured(prediction.cluster) and len(steps) >= FEWEST_STEPS:
                add_history(local_profile(), row)
        except (OSError, StrettoError) as error:
            return f"prediction not kept: {_reason(error)}"
        return (
            f"predicted {prediction.seconds:.3g} s a step, measured {measured:.3g} "
            f"(median of {len(steps)}): {measured / prediction.seconds:.2f} times"
        )


def local_device_kind(device: str) -> str:
    """Return the kind of device that ranks on this machine compute on; torch is asked only for `auto`."""
    if device != AUTO:
        return device
    from stretto.engine.device import device_kind

    return device_kind(AUTO)


def _reason(error: Exception) -> str:
    """Return the error as one line."""
    text = error.message if isinstance(error, StrettoError) else str(error) or type(error).__name__
    return " ".join(str(text).split())[:200]


__all__ = ["StepTimePrediction", "local_device_kind", "machine_of", "predict", "prediction_line"]
