"""Results of a comparison: in files, ranked, against a baseline, and whether their losses agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import quantiles
from typing import Any, Literal

from stretto.job.job import Job
from stretto.run.config.schema import TrainConfig
from stretto.run.config.section import plain_section
from stretto.run.train.metrics import read_lines

Status = Literal["done", "predicted", "failed", "refused", "stopped"]

# Largest relative difference of the losses of layouts that compute the same: rounding in this type, grown
# over some tens of steps. A small GPT on four layouts differed by 2.7e-7 in float32 after 33 steps at a rate
# of 3e-3, and by 4.7e-3 in bfloat16.
LOSS_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}

Mathematics = tuple[str, str]  # type of the computation, and a hash of all else that it depends on


@dataclass(frozen=True, kw_only=True)
class CombinationResult:
    """A combination with what was measured or predicted; None if that is not known.

    Attributes:
        overrides: those of the config that make the combination; `words` in JSON.
        fingerprint: a hash of the resolved job and its length.
        error: the reason why there is no result.
        median, q1, q3: seconds of a step, over the steps after the warm-up.
        speed: tokens or samples per second of the whole job, by `unit`.
        losses: the loss of every step.
        memory, predicted_memory: bytes of the fullest rank.
        traffic: bytes that the busiest rank sends in a step, as counted by the planner.
        predicted, low, high: seconds of a step.
        verdict: whether the predicted memory fits the device.
    """

    name: str
    overrides: list[str]
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

    def as_record(self) -> dict[str, Any]:
        """Return the result as JSON."""
        record = asdict(self)
        return {"name": record.pop("name"), "words": record.pop("overrides"), **record}

    @property
    def seconds(self) -> float | None:
        """The measured time of a step, otherwise the predicted one."""
        return self.median if self.status != "predicted" else self.predicted

    @property
    def loss(self) -> float | None:
        """The loss of the last step."""
        return self.losses[-1] if self.losses else None


def fingerprint(config: Mapping[str, Any], *further: object) -> str:
    """Hash the resolved config, without its section `run`, and what else decides the result."""
    job = {section: values for section, values in config.items() if section != "run"}
    return hashlib.blake2b(json.dumps([job, further], sort_keys=True).encode(), digest_size=16).hexdigest()


def save(result: CombinationResult, path: Path) -> None:
    """Write the result to a temporary file, then rename it: an interrupted write leaves no half of one."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(result.as_record(), indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def load_all(folder: Path) -> dict[str, CombinationResult]:
    """Read the results in a folder, by fingerprint; other files are ignored."""
    results = dict[str, CombinationResult]()
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            result = CombinationResult(overrides=record.pop("words"), **record)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
        results[result.fingerprint] = result
    return results


def measured(result: CombinationResult, folder: Path, warmup: int) -> CombinationResult:
    """Add what the run in `folder` recorded of its steps, and the prediction at its start, to a result.

    Args:
        warmup: number of steps at the start that do not count.
    """
    steps = list(read_lines(folder / "metrics.jsonl"))
    seconds = [step["step_time_s"] for step in steps[warmup:]]
    q1, median, q3 = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    unit = "samples/s" if "samples_per_s" in steps[-1] else "tokens/s"
    speeds = sorted(step[unit.replace("/", "_per_")] for step in steps[warmup:])
    memory = steps[-1]["memory_gib"]
    done = replace(
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
        return done
    return replace(done, predicted=row["predicted_s"], low=row["low_s"], high=row["high_s"])


# sections of a config, and fields of `train`, that change how a step is computed and not its result
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
    """Identify the computation of a job: two jobs with the same one differ in layout only, and their losses
    differ by rounding only.
    """
    values = plain_section(config)
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


def loss_difference(result: CombinationResult, reference: CombinationResult) -> float:
    """Return the largest relative difference of the losses of the same step."""
    pairs = zip(result.losses, reference.losses, strict=False)
    return max((abs(a - b) / max(abs(b), 1e-30) for a, b in pairs), default=0.0)


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """All results of one comparison.

    Attributes:
        title: the config and how it was measured or predicted.
        results: one per combination, in the order of the command line.
        baseline: the name of the combination that others are compared with.
        kinds: `mathematics` of each combination, by fingerprint.
    """

    title: str
    results: Sequence[CombinationResult]
    baseline: str
    kinds: Mapping[str, Mathematics]

    @property
    def ranked(self) -> list[CombinationResult]:
        """The combinations with a step time, fastest first."""
        timed = [result for result in self.results if result.seconds is not None]
        return sorted(timed, key=lambda result: result.seconds or 0.0)

    @property
    def untimed(self) -> list[CombinationResult]:
        """The combinations without one: refused, failed or stopped."""
        return [result for result in self.results if result.seconds is None]

    @property
    def base(self) -> CombinationResult | None:
        """The baseline, or the first combination with a step time if the baseline has none."""
        timed = [result for result in self.results if result.seconds is not None]
        return next((r for r in timed if r.name == self.baseline), timed[0] if timed else None)

    def speedup(self, result: CombinationResult) -> float | None:
        """Return the baseline's step time over this one's."""
        base = self.base
        if base is None or base.seconds is None or not result.seconds:
            return None
        return base.seconds / result.seconds

    @property
    def losses(self) -> list[str]:
        """A line for each group of combinations that compute the same: whether their losses agree."""
        groups = dict[Mathematics, list[CombinationResult]]()
        for result in self.results:
            if result.losses and result.fingerprint in self.kinds:
                groups.setdefault(self.kinds[result.fingerprint], []).append(result)
        lines = list[str]()
        for (dtype, _), group in groups.items():
            if len(group) == 1:
                continue
            difference = max(loss_difference(result, group[0]) for result in group[1:])
            tolerance = LOSS_TOLERANCE[dtype]
            names = "" if len(group) == len(self.ranked) else f" ({'; '.join(r.name for r in group)})"
            agree = "agree" if difference <= tolerance else "DIFFER"
            lines.append(
                f"losses of {len(group)} combinations that compute the same {agree}: at most "
                f"{difference:.1e} apart in any step, {tolerance:g} is rounding in {dtype}{names}"
                + ("" if difference <= tolerance else "; `stretto verify` shows which tensor differs first")
            )
        return lines
