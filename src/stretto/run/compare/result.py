"""What is known of one combination, in a file of its own; and whether losses agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import quantiles
from typing import Any, Literal

from stretto.run.config.schema import TrainConfig
from stretto.run.train.metrics import read_lines
from stretto.spec.job import Job

Status = Literal["done", "predicted", "failed", "refused", "stopped"]

# Largest relative difference of the losses of layouts that compute the same: rounding in this type, grown
# over some tens of steps. A small GPT on four layouts differed by 2.7e-7 in float32 after 33 steps at a rate
# of 3e-3, and by 4.7e-3 in bfloat16.
LOSS_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}

Mathematics = tuple[str, str]  # type of the computation, and a hash of all else that it depends on


@dataclass(frozen=True, kw_only=True)
class Result:
    """A combination and what was measured or predicted; None where that is not known.

    Attributes:
        words: overrides of the config.
        fingerprint: of the resolved job and how long it runs.
        error: why there is no result.
        median, q1, q3: seconds of a step, over the steps after the warm-up.
        speed: tokens or samples per second of the whole job, by `unit`.
        losses: of every step.
        memory: bytes of the fullest rank; predicted_memory beside it.
        traffic: bytes that the busiest rank sends in a step, as counted by the planner.
        predicted, low, high: seconds of a step.
        verdict: whether the predicted memory fits the device.
    """

    name: str
    words: list[str]
    status: Status
    fingerprint: str = ""
    error: str | None = None
    median: float | None = None
    q1: float | None = None
    q3: float | None = None
    speed: float | None = None
    unit: str = "tokens/s"
    losses: list[float] = field(default_factory=list[float])
    memory: int | None = None
    predicted_memory: int | None = None
    traffic: int | None = None
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: str | None = None

    @property
    def seconds(self) -> float | None:
        """A step as it was measured, otherwise as predicted."""
        return self.median if self.status != "predicted" else self.predicted

    @property
    def loss(self) -> float | None:
        """After the last step."""
        return self.losses[-1] if self.losses else None


def fingerprint(config: Mapping[str, Any], *further: object) -> str:
    """A hash of the resolved config, but for where its results go, and of what else decides the result."""
    job = {section: values for section, values in config.items() if section != "run"}
    return hashlib.blake2b(json.dumps([job, further], sort_keys=True).encode(), digest_size=16).hexdigest()


def save(result: Result, path: Path) -> None:
    """Write the result beside its file, then rename: an interrupted write leaves no half of one."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def load_all(folder: Path) -> dict[str, Result]:
    """The results in a folder, by fingerprint; files that hold none are left out."""
    results = dict[str, Result]()
    for path in sorted(folder.glob("*.json")):
        try:
            result = Result(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        results[result.fingerprint] = result
    return results


def measured(result: Result, folder: Path, warmup: int) -> Result:
    """The result with what the run in `folder` recorded of its steps, and the prediction that it began with.

    Args:
        warmup: first steps, which do not count.
    """
    steps = list(read_lines(folder / "metrics.jsonl"))
    seconds = [step["step_time_s"] for step in steps[warmup:]]
    q1, median, q3 = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    unit = "samples/s" if "samples_per_s" in steps[-1] else "tokens/s"
    speeds = sorted(step[unit.replace("/", "_per_")] for step in steps[warmup:])
    memory = steps[-1]["memory_gib"]
    known = replace(
        result,
        status="done",
        median=median,
        q1=q1,
        q3=q3,
        speed=speeds[len(speeds) // 2],
        unit=unit,
        losses=[float(step["loss"]) for step in steps],
        memory=None if memory is None else round(memory * 2**30),
    )
    try:
        row = json.loads((folder / "prediction.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return known
    return replace(known, predicted=row["predicted_s"], low=row["low_s"], high=row["high_s"])


# of a config, what changes how a step is computed and not what it computes
_LAYOUT = ("layout", "elastic", "dp", "recompute", "run", "metrics", "checkpoint", "eval", "sample")
_MACHINE = (
    "threads",
    "timeout_s",
    "start_s",
    "hang_s",
    "restarts",
    "grace_s",
    "attention",
    "loss_chunk",
    "compile",
    "vocab_multiple",
    "bucket_mib",
    "device",
)


def mathematics(config: TrainConfig, job: Job) -> Mathematics:
    """What a job computes: two jobs with the same differ in layout only, so that their losses agree but for
    rounding.
    """
    values = config.model_dump(mode="json")
    versions = job.program().versions  # a step then depends on the schedule, and on how the batch is cut
    for section in _LAYOUT:
        values.pop(section)
    for name in _MACHINE:
        values["train"].pop(name)
    if versions:
        values["versions"] = [versions, job.layout.pp, job.stage_layers]
    else:
        values.pop("schedule")
        values["batch"].pop("micro_size")
    key = hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
    return config.train.dtype, key


def loss_difference(one: Result, other: Result) -> float:
    """The largest relative difference of the losses of the same step."""
    pairs = zip(one.losses, other.losses, strict=False)
    return max((abs(a - b) / max(abs(b), 1e-30) for a, b in pairs), default=0.0)


def agreement(
    results: Sequence[Result], kinds: Mapping[str, Mathematics]
) -> list[tuple[str, list[Result], float]]:
    """Results that compute the same, at least two each: the type that they compute in, and the largest
    difference of their losses from those of the first.

    Args:
        kinds: `mathematics` of each combination, by fingerprint.
    """
    groups = dict[Mathematics, list[Result]]()
    for one in results:
        if one.losses and one.fingerprint in kinds:
            groups.setdefault(kinds[one.fingerprint], []).append(one)
    return [
        (dtype, group, max(loss_difference(one, group[0]) for one in group[1:]))
        for (dtype, _), group in groups.items()
        if len(group) > 1
    ]
