"""Bubbles and peak memory of schedules in closed form, with the range in which each holds.

Letters are those of Qi et al. 2024, "Zero bubble pipeline parallelism": F, B, W are a rank's forward,
activation gradient and weight gradient (in Stretto F, I, W), c is the time of one hop, p ranks, m
microbatches, v chunks a rank. Peaks are in rank units: one microbatch through a rank's whole share is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple


class Case(NamedTuple):
    """A point at which a form is evaluated."""

    p: int
    m: int
    F: float
    B: float
    W: float
    c: float = 0.0

    @property
    def work(self) -> float:
        return self.F + self.B + self.W


Formula = Callable[[Case], float]


def always(_: Case) -> bool:
    return True


def no_hop(case: Case) -> bool:
    return case.c == 0


def whole_rounds(case: Case) -> bool:
    """p divides m, and c is small: neighbours that wait on each other do so for the hops only."""
    return case.m % case.p == 0 and small_hop(case)


def small_hop(case: Case) -> bool:
    return case.c <= 0.1 * min(case.F, case.B + case.W)


def long_enough(case: Case) -> bool:
    return case.m >= 2 * case.p and no_hop(case)


def ordered(case: Case) -> bool:
    return case.W <= case.F <= case.B and long_enough(case)


def equal_thirds(case: Case) -> bool:
    return case.F == case.B == case.W and long_enough(case)


def even(case: Case) -> bool:
    """DualPipe sends half of the microbatches each way."""
    return equal_thirds(case) and case.m % 2 == 0


def one_unit(case: Case) -> bool:
    """Chimera's unit is p microbatches."""
    return case.m == case.p and no_hop(case) and case.B + case.W in (case.F, 2 * case.F)


@dataclass(frozen=True)
class Form:
    """One schedule's figures; a figure that is None has no closed form here."""

    schedule: str
    source: str
    barrier: Formula | None = None  # time from the busiest rank's work to the makespan
    span: Formula | None = None  # most idle time between a rank's own first and last action
    peak: Callable[[Case, int], float] | None = None  # of a rank
    valid: Callable[[Case], bool] = always
    peak_valid: Callable[[Case], bool] = always
    options: Mapping[str, int] = field(default_factory=dict[str, int])
    group: Callable[[Case], int] | None = None  # option that depends on the case
    pair: bool = False  # overlapped pairs are one block of F + B + W


def _interleaved(v: int) -> list[Form]:
    """Narayanan et al. 2021, section 2.2; group N = p, wider groups hide the wrap-around messages."""

    def peak(group: Callable[[Case], int]) -> Callable[[Case, int], float]:
        return lambda k, r: min(k.m, ((v - 1) * group(k) + 2 * (k.p - 1 - r) + 1) / v)

    def narrow(k: Case) -> int:
        return k.p

    def wide(k: Case) -> int:
        return k.p + ceil(k.p * k.c * v / k.F)

    def double(k: Case) -> int:
        return 2 * k.p

    source = "Narayanan et al. 2021, section 2.2; hops by event simulation"

    def form(group: Callable[[Case], int], hops: Formula, valid: Callable[[Case], bool]) -> Form:
        return Form(
            *("interleaved", source),
            barrier=lambda k: (k.p - 1) * k.work / v + hops(k) * k.c,
            peak=peak(group),
            valid=valid,
            peak_valid=valid,
            options={"chunks": v},
            group=group,
        )

    def fits(group: Callable[[Case], int]) -> Callable[[Case], bool]:
        return lambda k: group(k) <= k.m and k.m % group(k) == 0 and k.c * v <= 0.1 * min(k.F, k.B + k.W)

    forms = [
        form(narrow, lambda k: 2 * (v * k.p - 1), fits(narrow)),
        form(double, lambda k: 2 * (k.p - 1), fits(double)),
    ]
    if v > 1:
        forms.append(form(wide, lambda k: 2 * (k.p - 1), lambda k: k.c > 0 and fits(wide)(k)))
    return forms


def _bfs(v: int) -> Form:
    return Form(
        *("bfs", "Lamy-Poirier 2023, section 3"),
        barrier=lambda k: (k.p - 1) * (k.work / v + 2 * k.c),
        peak=lambda k, _: k.m,
        valid=lambda k: k.m >= 2 * k.p and k.c * v <= 0.1 * min(k.F, k.B + k.W),
        options={"chunks": v},
    )


FORMS = [
    Form(
        *("naive", "one rank at a time"),
        barrier=lambda k: k.m * (k.p - 1) * (k.work + 2 * k.c),
        peak=lambda k, _: 1,
    ),
    Form(
        *("gpipe", "Huang et al. 2019, section 2.3"),
        barrier=lambda k: (k.p - 1) * (k.work + 2 * k.c),
        peak=lambda k, _: k.m,
    ),
    Form(
        *("1f1b", "Narayanan et al. 2021; hops by event simulation"),
        barrier=lambda k: (k.p - 1) * k.work + k.c * (2 * (k.p - 1) * k.m / k.p + 2 * (k.p - 2)),
        peak=lambda k, r: min(k.m, k.p - r),
        valid=lambda k: no_hop(k) or whole_rounds(k),
    ),
    Form(
        *("1f1b-eager", "twice the warm-up hides the hops"),
        barrier=lambda k: (k.p - 1) * (k.work + 2 * k.c),
        peak=lambda k, r: min(k.m, 2 * (k.p - 1 - r) + 1),
        valid=lambda k: no_hop(k) or whole_rounds(k),
    ),
    *_interleaved(1),
    *_interleaved(2),
    *_interleaved(4),
    _bfs(2),
    _bfs(4),
    Form(
        *("zb-h1", "Qi et al. 2024, table 1, generalised by event simulation"),
        barrier=lambda k: (k.p - 1) * max(k.F + k.B - k.W, k.F, k.B),
        span=lambda k: (k.p - 1) * max(k.F + k.B - k.W, k.B),
        peak=lambda k, _: k.p,
        valid=long_enough,
        peak_valid=lambda k: k.m >= k.p,
    ),
    Form(
        *("zb-h1", "hops by event simulation"),
        barrier=lambda k: (k.p - 1) * (k.F + k.B - k.W + 4 * k.c),
        valid=lambda k: k.W <= k.F and k.W <= k.B and k.m >= 2 * k.p and small_hop(k),
    ),
    Form(
        *("zb-h2", "Qi et al. 2024, table 1, generalised by event simulation"),
        barrier=lambda k: (k.p - 1) * max(k.F, k.F + k.B - 2 * k.W, k.B - k.F),
        span=lambda k: (k.p - 1) * max(0, k.F + k.B - 2 * k.W, k.B - k.F),
        peak=lambda k, _: 2 * k.p - 1,
        valid=long_enough,
        peak_valid=lambda k: k.m >= 2 * k.p - 1,
    ),
    Form(
        *("zb-v", "Qi et al. 2024, section 6"),
        barrier=lambda k: (k.p - 1) * max(k.B / 2, k.B - k.W),
        span=lambda k: (k.p - 1) * (k.B - k.W),
        peak=lambda k, _: k.p,
        valid=ordered,
        peak_valid=lambda k: k.m >= 2 * k.p,
    ),
    Form(
        *("v-half", 'Qi et al. 2024, "Pipeline parallelism with controllable memory", section 3'),
        peak=lambda k, _: (k.p + 2) // 2,
        peak_valid=lambda k: k.m >= 2 * k.p,
    ),
    Form(
        *("v-min", 'Qi et al. 2024, "Pipeline parallelism with controllable memory", section 3'),
        peak=lambda k, _: (k.p + 4) // 3,
        peak_valid=lambda k: k.m >= 2 * k.p,
    ),
    Form(
        *("dualpipe", "DeepSeek-AI 2024, table 2; FB = F + B + W"),
        barrier=lambda k: (k.p / 2 - 1) * (k.work + k.B + k.W - 3 * k.W),
        peak=lambda k, _: k.p + 1,
        valid=even,
        peak_valid=lambda k: k.m >= 2 * k.p and k.m % 2 == 0,
        pair=True,
    ),
    Form(
        *("dualpipe-v", "DeepSeek-AI 2025, DualPipe; FB = F + B + W"),
        barrier=lambda k: (k.p - 1) * (k.work + k.B + k.W - 3 * k.W) / 2,
        peak=lambda k, _: k.p + 0.5,
        valid=equal_thirds,
        peak_valid=lambda k: k.m >= 2 * k.p,
        pair=True,
    ),
    Form(
        *("dualpipe", "run one after the other, a forward's result leaves at once: half the bubble"),
        barrier=lambda k: (k.p / 2 - 1) * k.F,
        valid=even,
    ),
    Form(
        *("dualpipe-v", "run one after the other, a forward's result leaves at once: half the bubble"),
        barrier=lambda k: (k.p - 1) * k.F / 2,
        valid=equal_thirds,
    ),
    Form(
        *("chimera", "Li & Hoefler 2021, table 2"),
        # rate (p-2)/(2m+p-2) for B+W=F, (p-2)/(1.5m+p-2) for B+W=2F
        barrier=lambda k: (k.p - 2) * (k.B + k.W),
        valid=one_unit,
    ),
    Form(
        *("pipedream", "Narayanan et al. 2019: as 1F1B with its start-up and drain"),
        barrier=lambda k: (k.p - 1) * k.work,
        peak=lambda k, r: min(k.m, k.p - r),
        valid=no_hop,
    ),
    Form(
        *("forward-only", "fill of the pipeline"),
        barrier=lambda k: (k.p - 1) * (k.F + k.c),
        peak=lambda k, _: 1,
    ),
]
