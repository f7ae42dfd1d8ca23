"""A backend's own reduce-scatter, which ranks on accelerators use over any backend."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ranks import on_ranks
from stretto.engine.parallel.collectives import native_collectives, start_scatter_sum


def summed_rows() -> None:
    """Of pieces that are matrices."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = torch.arange(6.0).view(1, 3, 2) + torch.arange(float(n)).view(n, 1, 1) + rank
    with native_collectives():
        out, work = start_scatter_sum(pieces, dist.group.WORLD)
        work.wait()
    assert torch.equal(out, n * (torch.arange(6.0).view(3, 2) + rank) + n * (n - 1) / 2)


def test_pieces_are_summed_by_gloo_s_own_reduce_scatter() -> None:
    on_ranks(2, summed_rows)
