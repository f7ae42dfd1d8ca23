from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.run.data.dataset import indices_after


def ordered_factors(product: int) -> list[tuple[int, int, int]]:
    """Every (dp, micro_batch, microbatches) with that product."""
    ones = [d for d in range(1, product + 1) if product % d == 0]
    return [(d, b, product // d // b) for d in ones for b in ones if product // d % b == 0]


def global_batch(step: int, dp: int, micro_batch: int, microbatches: int) -> list[int]:
    return [
        index
        for rank in range(dp)
        for microbatch in range(microbatches)
        for index in indices_after(
            samples_before=step * dp * micro_batch * microbatches,
            microbatch=microbatch,
            dp_rank=rank,
            dp=dp,
            micro_batch=micro_batch,
            microbatches=microbatches,
        )
    ]


@given(st.integers(0, 10**12), st.integers(1, 60))
def test_every_layout_sees_the_same_batch(step: int, batch: int):
    wanted = list(range(step * batch, (step + 1) * batch))
    for layout in ordered_factors(batch):
        assert sorted(global_batch(step, *layout)) == wanted


@given(st.integers(0, 100), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_a_microbatch_over_all_ranks_is_the_larger_microbatch_of_one(
    step: int, dp: int, micro_batch: int, microbatches: int
):
    for m in range(microbatches):
        parts = [
            indices_after(
                samples_before=step * dp * micro_batch * microbatches,
                microbatch=m,
                dp_rank=rank,
                dp=dp,
                micro_batch=micro_batch,
                microbatches=microbatches,
            )
            for rank in range(dp)
        ]
        full = indices_after(
            samples_before=step * dp * micro_batch * microbatches,
            microbatch=m,
            dp_rank=0,
            dp=1,
            micro_batch=dp * micro_batch,
            microbatches=microbatches,
        )
        assert [i for part in parts for i in part] == list(full)


def test_going_on_with_another_batch_size_misses_and_repeats_nothing():
    seen = [i for step in range(3) for i in global_batch(step, 2, 2, 3)]
    after = [
        i
        for m in range(2)
        for r in range(4)
        for i in indices_after(
            samples_before=len(seen), microbatch=m, dp_rank=r, dp=4, micro_batch=5, microbatches=2
        )
    ]
    assert sorted(seen + after) == list(range(36 + 40))


@pytest.mark.parametrize(("microbatch", "rank"), [(2, 0), (-1, 0), (0, 3), (0, -1)])
def test_what_is_not_there_is_a_programming_error(microbatch: int, rank: int):
    with pytest.raises(AssertionError):
        indices_after(
            samples_before=0, microbatch=microbatch, dp_rank=rank, dp=3, micro_batch=1, microbatches=2
        )
