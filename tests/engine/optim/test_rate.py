from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from stretto.engine.optim.rate import LearningRate, delay_ratio
from stretto.job.optimiser import DecayShape, RateSchedule, RateShape

PEAK, STEPS, WARMUP, FLOOR = 3e-3, 50, 10, 0.1


def torch_rates(make: Callable[[torch.optim.Optimizer], LRScheduler], steps: int = STEPS) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler = make(optimizer)
    rates: list[float] = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def rates(steps: int = STEPS, **options: object) -> list[float]:
    rate = LearningRate(RateSchedule(**options), PEAK, STEPS)  # pyright: ignore[reportArgumentType]
    return [rate(step) for step in range(steps)]


def warmed(optimizer: torch.optim.Optimizer, then: LRScheduler) -> LRScheduler:
    # 1/WARMUP at the first update, 1 at update number WARMUP, which is WARMUP - 1 steps later
    warm = LinearLR(optimizer, start_factor=1 / WARMUP, total_iters=WARMUP - 1)
    return SequentialLR(optimizer, [warm, then], milestones=[WARMUP])


def test_cosine_is_torchs() -> None:
    left = STEPS - WARMUP
    reference = torch_rates(lambda o: CosineAnnealingLR(o, T_max=left, eta_min=FLOOR * PEAK))
    results = rates(schedule="cosine", warmup=WARMUP, min_ratio=FLOOR)
    assert results[WARMUP:] == pytest.approx(reference[:left], rel=1e-12)


def test_linear_with_warmup_is_torchs() -> None:
    reference = torch_rates(
        lambda o: warmed(o, LinearLR(o, start_factor=1.0, end_factor=FLOOR, total_iters=STEPS - WARMUP)),
        steps=STEPS + 5,
    )
    results = rates(STEPS + 5, schedule="linear", warmup=WARMUP, min_ratio=FLOOR)
    assert results == pytest.approx(reference, rel=1e-9)


def test_constant_with_warmup_is_torchs() -> None:
    reference = torch_rates(lambda o: warmed(o, ConstantLR(o, factor=1.0)))
    assert rates(schedule="constant", warmup=WARMUP) == pytest.approx(reference, rel=1e-12)


def test_wsd_holds_then_decays_as_torchs_linear() -> None:
    down = STEPS // 5
    reference = torch_rates(
        lambda o: SequentialLR(
            o,
            [ConstantLR(o, factor=1.0), LinearLR(o, start_factor=1.0, end_factor=FLOOR, total_iters=down)],
            milestones=[STEPS - down],
        )
    )
    assert rates(schedule="wsd", min_ratio=FLOOR, decay_fraction=0.2) == pytest.approx(reference, rel=1e-12)


def test_wsd_decay_shapes_differ_between_the_same_ends() -> None:
    halves: dict[str, float] = {}
    for decay in get_args(DecayShape):
        schedule = RateSchedule(schedule="wsd", min_ratio=0.2, decay_fraction=0.4, decay=decay)
        rate = LearningRate(schedule, peak=1.0, steps=100)
        assert rate(60) == 1.0
        assert rate(100) == pytest.approx(0.2)
        halves[decay] = rate(70)  # a quarter of the way down
    assert halves["linear"] == pytest.approx(0.2 + 0.8 * 0.75)
    assert halves["sqrt"] == pytest.approx(0.2 + 0.8 * 0.5)
    assert halves["cosine"] == pytest.approx(0.2 + 0.8 * 0.8535533905932737)


def test_the_first_update_already_learns() -> None:
    rate = LearningRate(RateSchedule(warmup=4), peak=1.0, steps=100)
    assert [rate(step) for step in (0, 3, 4)] == [0.25, 1.0, 1.0]


@given(
    schedule=st.sampled_from(get_args(RateShape)),
    steps=st.integers(1, 200),
    warmup=st.integers(0, 200),
    floor=st.floats(0, 1),
    fraction=st.floats(0, 1),
)
def test_rises_then_never_rises_again_and_ends_at_the_floor(
    schedule: RateShape, steps: int, warmup: int, floor: float, fraction: float
) -> None:
    how = RateSchedule(schedule=schedule, warmup=warmup, min_ratio=floor, decay_fraction=fraction)
    rate = LearningRate(how, peak=2.0, steps=steps)
    rates = [rate(step) for step in range(steps + warmup + 3)]
    assert all(0.0 < r <= 2.0 or floor == 0.0 for r in rates)
    warmup = int(how.warmup_steps(steps))
    assert rates[:warmup] == sorted(rates[:warmup])
    after = rates[warmup:]
    assert all(a >= b - 1e-12 for a, b in pairwise(after))
    if schedule == "constant":
        assert set(after) == {2.0}
    else:
        assert rates[-1] == pytest.approx(2.0 * floor)


def megatron(
    step: float,
    *,
    peak: float,
    least: float,
    warmup: float,
    decay: float,
    style: str,
    first: float = 0.0,
    anneal: float = 0.0,
    shape: str = "linear",
) -> float:
    """The rate after `step` steps as Megatron-LM core_v0.16.1 describes it, in the units of its scheduler
    (megatron/core/optimizer_param_scheduler.py, `OptimizerParamScheduler.get_lr`).
    """
    if warmup > 0 and step <= warmup:
        return first + (peak - first) * step / warmup
    if style == "constant":
        return peak
    if step > decay:
        return least
    if style == "inverse-square-root":
        return max(least, peak * max(warmup, 1) ** 0.5 / max(step, 1) ** 0.5)
    if style == "WSD":
        past = step - (decay - anneal)
        done = past / anneal if past > 0 else 0.0
        left = {
            "linear": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "exponential": 2 * 0.5**done - 1,
            "minus_sqrt": 1 - math.sqrt(done),
        }[shape]
    else:
        done = (step - warmup) / (decay - warmup)
        left = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[style]
    return least + left * (peak - least)


@pytest.mark.parametrize("decay", [None, 130, 400])
@pytest.mark.parametrize("warmup", [0, 40, 0.1, 0.033])
@pytest.mark.parametrize("first", [0.0, 0.25])
@pytest.mark.parametrize(
    ("schedule", "style", "shape"),
    [
        ("cosine", "cosine", "linear"),
        ("linear", "linear", "linear"),
        ("constant", "constant", "linear"),
        ("inverse-sqrt", "inverse-square-root", "linear"),
        *(("wsd", "WSD", shape) for shape in ("linear", "cosine", "exponential", "minus_sqrt")),
    ],
)
def test_every_step_has_megatrons_rate_also_after_the_decay(
    schedule: RateShape, style: str, shape: str, first: float, warmup: float, decay: int | None
) -> None:
    """Megatron-LM counts samples; a part of the steps is no whole number of them, here of 3.3 and 20."""
    steps, batch = 200, 8
    kinds: dict[str, DecayShape] = {"minus_sqrt": "sqrt", "cosine": "cosine", "exponential": "exponential"}
    how = RateSchedule(
        schedule=schedule,
        warmup=warmup,
        warmup_init=first,
        min_ratio=0.1,
        decay_steps=decay,
        decay_fraction=0.3,
        decay=kinds.get(shape, "linear"),
    )
    end = decay or steps
    of_end = warmup * end if isinstance(warmup, float) else warmup
    if style == "inverse-square-root" and not warmup:
        batch = 1  # without a warm-up its curve starts from the first sample, whatever the batch
    rate = LearningRate(how, PEAK, steps)
    for step in range(steps + 50):
        wanted = megatron(
            step * batch,
            peak=PEAK,
            least=0.1 * PEAK,
            first=first * PEAK,
            warmup=of_end * batch,
            decay=end * batch,
            style=style,
            anneal=round(0.3 * end) * batch,
            shape=shape,
        )
        assert rate(step) == pytest.approx(wanted, rel=1e-12, abs=1e-18), step


def test_a_warmup_that_does_not_fit_is_cut() -> None:
    assert RateSchedule(warmup=20).warmup_steps(6) == 6
    assert RateSchedule(warmup=20, decay_steps=12).warmup_steps(300) == 12
    assert RateSchedule(warmup=20, schedule="wsd", decay_fraction=0.5).warmup_steps(30) == 15
    rate = LearningRate(RateSchedule(warmup=20), peak=1.0, steps=6)
    assert [rate(step) for step in range(6)] == pytest.approx([(step + 1) / 6 for step in range(6)])


def test_learning_rates_import_no_torch() -> None:
    code = "import sys, stretto.engine.optim.rate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("delay", [0, 1, 2, 7])
def test_late_stages_learn_slowly_at_first(delay: int) -> None:
    """Yang et al. 2021, PipeMare: the rate over delay^p, p falling from 1 to 0 over the steps."""
    assert delay_ratio(0, delay, 50) == 1 / max(1, delay)
    assert delay_ratio(25, delay, 50) == pytest.approx(1 / max(1, delay) ** 0.5)
    assert delay_ratio(40, delay, 50) == pytest.approx(max(1, delay) ** -0.2)
    assert delay_ratio(50, delay, 50) == delay_ratio(9000, delay, 50) == 1.0
