"""What a run's files say, which combinations compute the same, and whether their losses agree."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.run.compare.result import (
    CombinationResult,
    Mathematics,
    Repeat,
    RunComparison,
    fingerprint,
    load_all,
    mathematics,
    measured,
    save,
)
from stretto.run.config.job import job_of
from tiny_job import LLAMA, job


def run(number: int, seconds: float, began: float = 0.0, others: float | None = None) -> Repeat:
    figures = dict.fromkeys(("median", "q1", "q3"), seconds)
    return Repeat(round=number, began=began, wall=9.0, speed=100 / seconds, others=others, **figures)


DONE = CombinationResult(
    name="a", overrides=[], status="done", fingerprint="1", repeats=[run(1, 2.0)], losses=[4.0, 3.0]
)


def of(folder: Path, *overrides: str) -> Mathematics:
    config = job(folder, *overrides, model=LLAMA)
    return mathematics(config, job_of(config))


def test_layouts_compute_the_same_and_other_settings_do_not(tmp_path: Path) -> None:
    plain = of(tmp_path)
    same = (
        "layout.tp=2",
        "dp.mode=zero3",
        "recompute.mode=full",
        "batch.micro_size=2",
        "run.name=other",
        "train.attention=explicit",
    )
    assert {of(tmp_path, override) for override in same} == {plain}
    assert of(tmp_path, "layout.pp=2", "schedule.name=zb-h1") == plain
    others = (
        "optim.lr=1e-3",
        "train.seed=2",
        "batch.global_size=16",
        "train.dtype=bfloat16",
        "train.steps=9",
    )
    assert plain not in {of(tmp_path, override) for override in others}
    late = [
        of(tmp_path, "layout.pp=2", "optim.clip=null", f"schedule.name={name}")
        for name in ("1f1b", "pipedream")
    ]
    assert late[0] != late[1]


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    """Over the steps after the warm-up, in which one is slow."""
    seconds = [9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 50.0]
    rows = [
        {"step": at, "loss": 10.0 - at, "tokens_per_s": 100 / s, "step_time_s": s, "memory_gib": None}
        for at, s in enumerate(seconds, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pending = replace(DONE, repeats=[], losses=[])
    result = measured(pending, tmp_path, warmup=2)
    assert (result.median, result.q1, result.q3) == (3.0, 2.0, 4.0)
    assert result.speed == pytest.approx(100 / 3)
    assert (result.loss, result.memory, result.predicted) == (3.0, None, None)
    (tmp_path / "prediction.json").write_text('{"predicted_s": 2.5, "low_s": 2, "high_s": 3}')
    assert measured(pending, tmp_path, warmup=2).predicted == 2.5
    twice = measured(replace(DONE, status="failed", error="!", repeats=[run(2, 7.0)]), tmp_path, warmup=2)
    assert (twice.status, twice.error, twice.losses) == ("done", None, DONE.losses)
    assert [each.round for each in twice.repeats] == [1, 2]
    assert (twice.fastest, twice.median, twice.slowest) == (3.0, 5.0, 7.0)


def test_results_are_kept_by_what_ran(tmp_path: Path) -> None:
    key = fingerprint({"run": {"name": "a"}, "model": {"layers": 2}}, 23)
    assert key == fingerprint({"run": {"name": "b"}, "model": {"layers": 2}}, 23)
    assert key != fingerprint({"run": {"name": "a"}, "model": {"layers": 2}}, 24)
    assert key != fingerprint({"run": {"name": "a"}, "model": {"layers": 3}}, 23)
    save(DONE, tmp_path / "a.json")
    (tmp_path / "half.json").write_text('{"name": "b", "wor')
    (tmp_path / "other.json").write_text('{"name": "b", "length": 3}')
    assert load_all(tmp_path) == {"1": DONE}


def compared(
    *results: CombinationResult, kinds: dict[str, str] | None = None, dtype: str = "float32"
) -> RunComparison:
    groups = kinds or {result.fingerprint: "same" for result in results}
    return RunComparison(
        title="t", results=results, baseline="a", kinds={key: (dtype, group) for key, group in groups.items()}
    )


def test_losses_of_what_computes_the_same_are_compared_step_by_step() -> None:
    near = replace(DONE, name="b", fingerprint="2", losses=[4.0, 3.0001])
    early = replace(DONE, name="c", fingerprint="3", losses=[4.1, 3.0])
    (line,) = compared(DONE, near).losses
    assert line.startswith("losses of 2 combinations that compute the same agree: at most 3.3e-05 apart")
    (line,) = compared(DONE, near, early).losses
    assert "DIFFER: at most 2.5e-02 apart" in line
    assert "stretto verify" in line
    assert compared(DONE, early, kinds={"1": "same", "3": "another"}).losses == []
    (line,) = compared(DONE, early, near, kinds={"1": "same", "2": "same", "3": "another"}).losses
    assert line.endswith("(a; b)")
    (line,) = compared(DONE, replace(near, losses=[4.0, 3.03]), dtype="bfloat16").losses
    assert " agree: at most 1.0e-02 apart in any step, 0.02 is rounding in bfloat16" in line


def test_ranked_against_the_baseline_or_the_first_with_a_time() -> None:
    slow = replace(DONE, name="b", fingerprint="2", repeats=[run(1, 8.0)])
    failed = replace(DONE, name="c", status="failed", error="out of memory")
    comparison = compared(slow, DONE, failed)
    assert [row.name for row in comparison.ranked] == ["a", "b"]
    assert comparison.untimed == [failed]
    assert [comparison.speedup(result) for result in (DONE, slow)] == [(1.0, None, None), (0.25, None, None)]
    assert comparison.verdicts == ["one round does not show whether a difference is noise (--repeats 3): b"]
    without = replace(comparison, baseline="c")
    assert without.base is slow
    assert (without.speedup(DONE) or (0,))[0] == 4.0


def test_speed_is_compared_within_rounds() -> None:
    """The machine becomes three times slower; B is always 10% faster, and C by turns faster and slower.

    The logarithms of B's ratios have the mean 0.0980 and the standard deviation 0.0127, and t is 4.303.
    """
    base = replace(DONE, repeats=[run(1, 1.0), run(2, 2.0), run(3, 3.0)])
    faster = replace(base, name="b", repeats=[run(3, 2.7), run(1, 0.9), run(2, 1.84)])
    like = replace(base, name="c", repeats=[run(1, 0.9), run(2, 2.1), run(3, 2.9), run(4, 50.0)])
    slower = replace(base, name="d", repeats=[run(1, 1.21), run(2, 2.4), run(3, 3.6)])
    comparison = compared(base, faster, like, slower)
    speedup = comparison.speedup(faster)
    assert speedup is not None
    assert speedup == pytest.approx((1.103, 1.068, 1.139), abs=1e-3)
    found = [comparison.speedup(each) for each in (faster, like, slower)]
    assert [each and each.difference for each in found] == ["faster", "within the noise", "slower"]
    (line,) = comparison.verdicts
    assert line.endswith("covers 1: c")


def test_reasons_to_doubt_are_printed() -> None:
    day = 86400.0
    base = replace(DONE, repeats=[run(1, 1.0, others=0.02), run(2, 1.0, others=0.31)])
    late = replace(base, name="b", repeats=[run(1, 1.0, began=day), run(2, 1.0, others=0.1)])
    busy, apart = compared(base, late).warnings
    assert busy == (
        "warning: other processes used at least 10% of the cores during 2 of 4 runs, at most 31% (round 2, a)"
    )
    assert "b and of the baseline in a round are up to 24.0 hours apart" in apart
    assert compared(DONE, replace(DONE, name="b")).warnings == []
    (line,) = compared(replace(DONE, unmeasured="no room")).warnings
    assert line == "not measured: a: traffic and memory: no room"
