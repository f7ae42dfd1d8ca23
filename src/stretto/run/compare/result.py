"""Results of a comparison: in files, ranked, against a baseline, and whether their losses agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median, quantiles, stdev
from typing import Any, Literal, NamedTuple

from stretto.job.job import Job
from stretto.run.config.schema import TrainConfig
from stretto.run.config.section import plain_section
from stretto.run.train.metrics import read_lines
from stretto.run.watch.machine import BUSY

Status = Literal["done", "predicted", "failed", "refused", "stopped"]

# Largest relative difference of the losses of layouts that compute the same: rounding in this type, grown
# over some tens of steps. A small GPT on four layouts differed by 2.7e-7 in float32 after 33 steps at a rate
# of 3e-3, and by 4.7e-3 in bfloat16.
LOSS_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}

Mathematics = tuple[str, str]  # type of the computation, and a hash of all else that it depends on


# quantiles of Student's t of 1, 2, ... degrees of freedom, between which and their opposites 95% lie
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_HOUR = 3600.0

Difference = Literal["faster", "slower", "within the noise"]


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """One run of a combination.

    Attributes:
        round: the round that it belongs to, from 1.
        began: when it began, seconds since 1970.
        wall: seconds of the whole run, its start included.
        median, q1, q3: seconds of a step, over the steps after the warm-up.
        speed: tokens or samples per second of the whole job.
        others: share of all core time that other processes used meanwhile; None if not measured.
    """

    round: int
    began: float
    wall: float
    median: float
    q1: float
    q3: float
    speed: float
    others: float | None = None


class Speedup(NamedTuple):
    """How many times as fast as the baseline a combination is: the geometric mean over the rounds, and its
    95% interval (Student's t of the logarithms), None with fewer than two rounds in common.
    """

    ratio: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        """Such as "1.31x (1.27-1.36)"."""
        return f"{self.ratio:.2f}x" + ("" if self.low is None else f" ({self.low:.2f}-{self.high:.2f})")

    @property
    def difference(self) -> Difference | None:
        """Whether it is faster, as far as the rounds can tell; None without an interval."""
        if self.low is None or self.high is None:
            return None
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "within the noise"


@dataclass(frozen=True, kw_only=True)
class CombinationResult:
    """A combination with what was measured or predicted; None if that is not known.

    Attributes:
        overrides: those of the config that make the combination; `words` in JSON.
        fingerprint: a hash of the resolved job and its length.
        error: the reason why there is no result.
        repeats: its runs, by round.
        unit: of the speed.
        losses: the loss of every step, in the first run.
        memory, predicted_memory: bytes of the fullest rank.
        sent, traffic: bytes that the busiest rank sends in a step, measured and as counted by the planner.
        unmeasured: the reason why memory or traffic is not measured.
        predicted, low, high: seconds of a step.
        verdict: whether the predicted memory fits the device.
    """

    name: str
    overrides: list[str]
    status: Status
    fingerprint: str = ""
    error: str | None = None
    repeats: Sequence[Repeat] = ()
    unit: str = "tokens/s"
    losses: list[float] = field(default_factory=list[float])
    memory: int | None = None
    predicted_memory: int | None = None
    sent: int | None = None
    traffic: int | None = None
    unmeasured: str | None = None
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    predicted_speed: float | None = None
    verdict: str | None = None

    def as_record(self) -> dict[str, Any]:
        """Return the result as JSON."""
        record = asdict(self)
        figures = {
            name: getattr(self, name) for name in ("median", "q1", "q3", "fastest", "slowest", "speed")
        }
        return {"name": record.pop("name"), "words": record.pop("overrides"), **record, **figures}

    @property
    def median(self) -> float | None:
        """Seconds of a step: the median over the runs of the median of their steps."""
        return self._middle("median")

    @property
    def q1(self) -> float | None:
        """The first quartile of the steps of a run, seconds; the median over the runs."""
        return self._middle("q1")

    @property
    def q3(self) -> float | None:
        """The third quartile of the steps of a run, seconds; the median over the runs."""
        return self._middle("q3")

    @property
    def speed(self) -> float | None:
        """Tokens or samples per second of the whole job, by `unit`; predicted if it is not measured."""
        return self._middle("speed") or self.predicted_speed

    @property
    def fastest(self) -> float | None:
        """The least median step time of a run, seconds."""
        return min((each.median for each in self.repeats), default=None)

    @property
    def slowest(self) -> float | None:
        """The largest median step time of a run, seconds."""
        return max((each.median for each in self.repeats), default=None)

    def _middle(self, name: str) -> float | None:
        return median(getattr(each, name) for each in self.repeats) if self.repeats else None

    @property
    def seconds(self) -> float | None:
        """The measured time of a step, otherwise the predicted one; None if it failed."""
        return {"done": self.median, "predicted": self.predicted}.get(self.status)

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
            names = {each.name for each in fields(CombinationResult)}
            rounds = [Repeat(**each) for each in record.pop("repeats")]
            values = {name: value for name, value in record.items() if name in names}
            result = CombinationResult(overrides=record["words"], repeats=rounds, **values)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
        results[result.fingerprint] = result
    return results


def measured(
    result: CombinationResult,
    folder: Path,
    warmup: int,
    *,
    number: int = 1,
    began: float = 0.0,
    wall: float = 0.0,
    others: float | None = None,
) -> CombinationResult:
    """Add what the run in `folder` recorded of its steps, and the prediction at its start, to a result.

    Args:
        warmup: number of steps at the start that do not count.
        number: the round.
        began, wall, others: see `Repeat`.
    """
    steps = list(read_lines(folder / "metrics.jsonl"))
    seconds = [step["step_time_s"] for step in steps[warmup:]]
    q1, middle, q3 = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    unit = "samples/s" if "samples_per_s" in steps[-1] else "tokens/s"
    speeds = sorted(step[unit.replace("/", "_per_")] for step in steps[warmup:])
    memory = steps[-1]["memory_gib"]
    run = Repeat(
        round=number,
        began=began,
        wall=wall,
        median=middle,
        q1=q1,
        q3=q3,
        speed=speeds[len(speeds) // 2],
        others=others,
    )
    done = replace(
        result,
        status="done",
        error=None,
        repeats=sorted([*result.repeats, run], key=lambda each: each.round),
        unit=unit,
        losses=result.losses or [float(step["loss"]) for step in steps],
        memory=result.memory if memory is None else round(memory * 2**30),
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

    def speedup(self, result: CombinationResult) -> Speedup | None:
        """Return the baseline's step time over this one's, run by run of the same round."""
        base = self.base
        if base is None or base.seconds is None or not result.seconds:
            return None
        if base is result:
            return Speedup(1.0)
        logs = [log(base_run.median / run.median) for base_run, run in self._pairs(result)]
        if not logs:
            return Speedup(base.seconds / result.seconds)
        mean, n = fmean(logs), len(logs)
        if n == 1:
            return Speedup(exp(mean))
        t = _T95[n - 2] if n - 2 < len(_T95) else 1.96 + 2.5 / (n - 1)
        half = t * stdev(logs) / sqrt(n)
        return Speedup(exp(mean), exp(mean - half), exp(mean + half))

    def as_record(self, result: CombinationResult) -> dict[str, Any]:
        """Return a result as JSON, with its speed relative to the baseline."""
        speedup = self.speedup(result)
        values = (None,) * 4 if speedup is None else (*speedup, speedup.difference)
        names = ("speedup", "speedup_low", "speedup_high", "difference")
        return {
            **result.as_record(),
            "seconds": result.seconds,
            **dict(zip(names, values, strict=True)),
        }

    def _pairs(self, result: CombinationResult) -> list[tuple[Repeat, Repeat]]:
        """The baseline's and this one's runs of each round that both have."""
        rounds = {each.round: each for each in ([] if self.base is None else self.base.repeats)}
        return [(rounds[each.round], each) for each in result.repeats if each.round in rounds]

    @property
    def verdicts(self) -> list[str]:
        """Lines about which differences from the baseline the rounds cannot tell from noise."""
        others = [(r.name, self.speedup(r)) for r in self.ranked if r is not self.base and r.repeats]
        noise = [name for name, speedup in others if speedup and speedup.difference == "within the noise"]
        single = [name for name, speedup in others if speedup and speedup.difference is None]
        lines = list[str]()
        if noise:
            lines.append(
                "within the noise, as the 95% interval of the ratio to the baseline covers 1: "
                + "; ".join(noise)
            )
        if single:
            lines.append(
                f"one round does not show whether a difference is noise (--repeats 3): {'; '.join(single)}"
            )
        return lines

    @property
    def warnings(self) -> list[str]:
        """A line for each reason to doubt the figures: other processes, and rounds that lie far apart."""
        ranked = [result for result in self.ranked if result.repeats]
        shares = [
            (each.others or 0.0, each.round, result.name) for result in ranked for each in result.repeats
        ]
        lines = list[str]()
        if busy := [share for share, *_ in shares if share >= BUSY]:
            largest, number, name = max(shares)
            lines.append(
                f"warning: other processes used at least {BUSY:.0%} of the cores during {len(busy)} of "
                f"{len(shares)} runs, at most {largest:.0%} (round {number}, {name})"
            )
        lines += [
            f"not measured: {r.name}: traffic and memory: {r.unmeasured}" for r in ranked if r.unmeasured
        ]
        for result in ranked:
            distance = max(
                (abs(base_run.began - run.began) for base_run, run in self._pairs(result)), default=0.0
            )
            if distance > _HOUR:
                lines.append(
                    f"warning: runs of {result.name} and of the baseline in a round are up to "
                    f"{distance / _HOUR:.1f} hours apart, and the machine may have changed; --again runs all"
                )
        return lines

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
