"""Bubble rates of Qi et al. 2024, "Zero bubble pipeline parallelism" (ICLR): table 5, from the profiled times
of its appendix. The rate is (cost - m (F+B+W)) / cost, cost being the longest time of a rank from its first
start to its last end, hops included."""

from __future__ import annotations

import pytest

from stretto.program import schedule
from stretto.program.replay import Costs, simulate

# ranks, microbatches; F, B, W and hop in milliseconds; rates of 1F1B, ZB-H1, ZB-H2
PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837)),
    (8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
    (16, 64, (11.307, 11.254, 8.101, 0.379), (0.2082, 0.1088, 0.0516)),
    (16, 128, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0576, 0.0266)),
]


@pytest.mark.parametrize(("p", "m", "times", "rates"), PUBLISHED)
def test_published_bubble_rates(
    p: int, m: int, times: tuple[float, float, float, float], rates: tuple[float, ...]
):
    forward, back, weight, hop = times
    costs = Costs(F=forward, I=back, W=weight, hop=hop)
    actual = [simulate(schedule(name, p, m), costs).span_rate for name in ("1f1b", "zb-h1", "zb-h2")]
    assert tuple(round(rate, 4) for rate in actual) == rates
