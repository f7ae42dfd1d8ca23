"""Which samples a rank sees: arithmetic on indices, nothing kept.

The samples of one step are the same whatever the layout: only the global batch dp * microbatches *
micro_batch counts. Resuming is knowing how many samples have been seen.
"""

from __future__ import annotations


def microbatch_indices(
    step: int, microbatch: int, dp_rank: int, dp: int, micro_batch: int, microbatches: int
) -> range:
    """Global sample indices of microbatch `microbatch` of data-parallel rank `dp_rank` at `step` (from 0).

    `micro_batch` is the number of samples in a microbatch, `microbatches` their number per rank and step.
    """
    seen = step * dp * micro_batch * microbatches
    return indices_after(seen, microbatch, dp_rank, dp, micro_batch, microbatches)


def indices_after(
    seen: int, microbatch: int, dp_rank: int, dp: int, micro_batch: int, microbatches: int
) -> range:
    """As `microbatch_indices`, for the step after `seen` samples: for runs whose batch has changed."""
    assert seen >= 0
    assert 0 <= dp_rank < dp, f"dp rank {dp_rank} of {dp}"
    assert 0 <= microbatch < microbatches, f"microbatch {microbatch} of {microbatches}"
    assert micro_batch > 0
    first = seen + (microbatch * dp + dp_rank) * micro_batch
    return range(first, first + micro_batch)
