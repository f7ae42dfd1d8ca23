"""Freed memory is kept: the next step faults in no pages."""

from __future__ import annotations

import resource
import sys
from statistics import median

import pytest
import torch

from ranks import on_ranks
from stretto.recommender.train.job import keep_freed_memory


def faults(keep: bool) -> tuple[bool, float]:
    """Whether the process could be told to keep memory, and the pages that a step after others faults in."""
    could, tensors, counts = keep and keep_freed_memory(), list[torch.Tensor](), list[int]()
    for number in range(14):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors.clear()
        # 2 MiB each, and larger than those of the step before: glibc's own limit grows to what was freed last
        tensors.extend(torch.ones((1 << 19) + (number << 10)) for _ in range(8))
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return could, median(counts[4:])


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_a_step_after_others_faults_in_next_to_nothing() -> None:
    ((could, with_freed_memory),) = on_ranks(1, faults, True)
    if not could:
        pytest.skip("another C library")
    assert with_freed_memory < 100  # of 4,096 pages written
    ((_, by_default),) = on_ranks(1, faults, False)
    assert by_default > 1000
