"""Freed memory is kept: the next step faults in no pages."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

from ranks import on_ranks
from stretto.recommender.train.worker import keep_freed_memory


def faults(keep: bool) -> tuple[bool, int]:
    """Whether the process could be told to keep memory, and the pages that steps after others fault in."""
    could, held = keep and keep_freed_memory(), list[torch.Tensor]()

    def step() -> None:
        held.clear()
        held.extend(torch.ones(1 << 19) for _ in range(8))  # 2 MiB each

    for _ in range(4):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    return could, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_a_step_after_others_faults_in_next_to_nothing() -> None:
    ((could, kept),) = on_ranks(1, faults, True)
    if not could:
        pytest.skip("another C library")
    assert kept < 100  # of 40960 pages written
    ((_, usual),) = on_ranks(1, faults, False)
    assert usual > 1000
