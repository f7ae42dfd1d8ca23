"""Memory over time agrees with the peaks that the order alone gives."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from random_programs import random_program, with_moves
from test_bound import EVERY, drawn

from stretto.program import lower
from stretto.program.memory import peak_held
from stretto.program.replay import Costs, simulate


@pytest.mark.parametrize("name", EVERY)
def test_peaks_of_every_schedule(name: str):
    random = Random(name)
    for _ in range(5):
        program = drawn(random, name)
        line = simulate(lower(program), Costs(F=random.random(), hop=random.random()))
        assert line.peak_bytes == peak_held(program)
        for curve in line.live_bytes:
            assert all(a <= b for (a, _), (b, _) in pairwise(curve))
            assert all(size >= 0 for _, size in curve)
            assert curve[-1][1] == 0


def test_peaks_of_repeated_and_moved_activations():
    for seed in range(200):
        random = Random(seed)
        program = with_moves(random_program(random), random)
        line = simulate(program)  # moves take no time: they are over in their places
        assert line.peak_bytes == peak_held(program)
        assert all(curve[-1][1] == 0 for curve in line.live_bytes if curve)


def test_bytes_of_stages_that_differ():
    line = simulate(drawn(Random(1), "gpipe"), Costs(activations=7))
    assert line.peak_bytes == [7 * count for count in peak_held(line.program)]
