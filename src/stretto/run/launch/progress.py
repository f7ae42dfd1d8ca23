"""The progress of a Kubeflow TrainJob: step and loss of the run, sent to the cluster's status of the job.

Kubeflow Trainer from 2.2, with its feature gate `TrainJobStatus`, gives pods an address for it. The agent of
node 0 reads what the run has written, so that training neither waits for the cluster nor fails with it.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

PROGRESS = "STRETTO_PROGRESS"  # the steps of the run and its folder, as "300 runs/mine"
SERVER = "KUBEFLOW_TRAINER_SERVER_URL"  # set by Kubeflow, with files of a certificate and of a token
CERTIFICATE, TOKEN = "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN"

_EVERY_S = 10.0
_TIMEOUT_S = 5.0
_TAIL = 1 << 16  # bytes at the end of the metrics, in which the newest lines lie


@contextmanager
def report_progress(environment: Mapping[str, str] = os.environ) -> Generator[None]:
    """Report the run's progress until the `with` ends, on node 0 of a TrainJob that is asked for it."""
    if not (
        environment.get(SERVER) and environment.get(PROGRESS) and environment.get("PET_NODE_RANK") == "0"
    ):
        yield
        return
    steps, folder = environment[PROGRESS].split(" ", 1)
    ended = Event()
    thread = Thread(target=_report, args=(int(steps), Path(folder), environment, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * _TIMEOUT_S)


def _report(steps: int, folder: Path, environment: Mapping[str, str], ended: Event) -> None:
    """Send the newest step whenever there is one, once more after the end."""
    reported, failure = None, None
    while True:
        last = ended.wait(_EVERY_S)
        record = newest(folder / "metrics.jsonl")
        if record is not None and record["step"] != reported:
            try:
                _send(status(record, steps), environment)
                reported = record["step"]
            except (OSError, ValueError) as error:
                if str(error) != failure:  # once, not every ten seconds
                    print(f"the cluster was not told of the progress: {error}", file=sys.stderr)
                failure = str(error)
        if last:
            return


def newest(metrics: Path) -> dict[str, Any] | None:
    """Return the last whole record of a step, None if there is none yet."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            return record
    return None


def status(record: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return `trainerStatus` of a TrainJob (trainer.kubeflow.org/v1alpha1) for a record of the metrics."""
    trainer_status: dict[str, Any] = {
        "progressPercentage": min(100, 100 * record["step"] // steps),
        "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds"),
        "metrics": [
            {"name": name, "value": f"{record[name]:.6g}"}
            for name in ("step", "loss", "tokens_per_s", "samples_per_s")
            if isinstance(record.get(name), int | float)
        ],
    }
    if isinstance(seconds := record.get("step_time_s"), int | float):
        trainer_status["estimatedRemainingSeconds"] = max(0, round(seconds * (steps - record["step"])))
    return trainer_status


def _send(trainer_status: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    headers = {"Content-Type": "application/json"}
    if token := environment.get(TOKEN):  # read each time: it expires and is replaced
        headers["Authorization"] = f"Bearer {Path(token).read_text(encoding='utf-8').strip()}"
    certificate = environment.get(CERTIFICATE)
    request = urllib.request.Request(
        environment[SERVER], json.dumps({"trainerStatus": trainer_status}).encode(), headers, method="POST"
    )
    context = ssl.create_default_context(cafile=certificate) if certificate else None
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context):
        pass
