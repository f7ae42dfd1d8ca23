from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.run.data.permutation import WINDOW, Permutation, positions


@given(st.integers(1, 3000), st.integers(), st.integers(0, 1 << 40))
def test_every_value_once(size: int, seed: int, epoch: int):
    assert sorted(Permutation(size, seed, epoch)(range(size))) == list(range(size))


@given(st.integers(1, 1 << 61), st.integers(0, 100), st.data())
def test_one_position_at_a_time_gives_the_same(size: int, seed: int, data: st.DataObject):
    positions = data.draw(st.lists(st.integers(0, size - 1), unique=True, min_size=1, max_size=20))
    permutation = Permutation(size, seed)
    together = permutation(positions)
    assert [int(permutation([p])[0]) for p in positions] == together.tolist()
    assert len(set(together.tolist())) == len(positions)
    assert together.min() >= 0
    assert together.max() < size


def test_seeds_and_epochs_give_other_orders():
    orders = {tuple(Permutation(50, seed, epoch)(range(50))) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_all_orders_of_four_are_equally_likely():
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(12_000):
        order = tuple(Permutation(4, seed)(range(4)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    # chi-squared with 23 degrees of freedom: 50 is passed once in a thousand; the seeds are fixed
    assert sum((n - 500) ** 2 / 500 for n in counts.values()) < 50


def test_values_look_shuffled():
    size = 100_003
    values = Permutation(size, 1)(range(size)).astype(float)
    # serial correlation of a random permutation is 0 with deviation 1 / sqrt(n) = 0.003
    for lag in (1, 2, 3, 317, 318):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 0.013
    assert abs(np.corrcoef(values, np.arange(size))[0, 1]) < 0.013
    # a tenth of the positions reach each tenth of the values alike
    table, _, _ = np.histogram2d(np.arange(size), values, bins=10)
    assert abs(table / (size / 100) - 1).max() < 0.16


def test_the_order_is_the_same_in_every_version_of_this_program():
    assert Permutation(10, 7, 3)(range(10)).tolist() == [6, 4, 5, 8, 3, 7, 9, 1, 0, 2]


def test_memory_does_not_grow_with_the_size():
    tracemalloc.start()
    Permutation(1 << 60, 0)([0, 1, (1 << 60) - 1])
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


@given(st.integers(1, 3000), st.integers(0, 40), st.integers(0, 3), st.integers(0, 2))
def test_an_epoch_is_a_permutation(size: int, block: int, seed: int, epoch: int):
    order = positions(np.arange(size), size, seed, epoch, block)
    assert sorted(order.tolist()) == list(range(size))
    some = np.array([size - 1, 0, size // 2])
    assert np.array_equal(positions(some, size, seed, epoch, block), order[some])


def test_blocks_move_as_runs():
    """Within a window of batches only its blocks are read; every sample may come anywhere."""
    size, block = 100_000, 100
    order = positions(np.arange(size), size, 0, 0, block)
    for start in (0, 3 * WINDOW * block):
        window = order[start : start + WINDOW * block]
        assert len(np.unique(window // block)) == WINDOW
        assert len(np.unique(window[:block] // block)) > WINDOW // 3
    first = [positions(np.arange(1), size, seed, 0, block)[0] for seed in range(300)]
    assert np.std(first) / size == pytest.approx(1 / 12**0.5, rel=0.1)
