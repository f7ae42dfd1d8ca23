"""Bytes that a rank sends, by kind, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks
from stretto.engine.parallel.collectives import (
    all_sum,
    exchange,
    gather,
    gather_uneven,
    scatter_sum,
    scatter_uneven,
    start_regather,
)
from stretto.engine.parallel.traffic import traffic


def kinds() -> None:
    rank, n, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    x = torch.ones(4 * n, 2)  # 32 n bytes
    with traffic() as sent:
        all_sum(x, group)
    assert dict(sent.bytes) == {"all-reduce": 2 * 32 * (n - 1)}
    with traffic() as sent:
        gather(x, group, 0)
        gather_uneven(x[: rank + 1], [r + 1 for r in range(n)], group)
    assert dict(sent.bytes) == {"all-gather": 32 * n * (n - 1) + 8 * (rank + 1) * (n - 1)}
    with traffic() as sent:
        start_regather(x, group)[1].wait()
    assert dict(sent.bytes) == {"re-gather": 32 * n * (n - 1)}
    with traffic() as sent:
        scatter_sum(x, group, 0)
        sizes = [1] * (n - 1) + [3 * n + 1]
        scatter_uneven(x, sizes, group)
    assert dict(sent.bytes) == {"reduce-scatter": 32 * (n - 1) + 8 * (4 * n - sizes[rank])}
    assert sent.calls["reduce-scatter"] == 2
    with traffic() as sent:
        counts = [[(i + 2 * j) % 3 for j in range(n)] for i in range(n)]
        exchange(x[: sum(counts[rank])], counts[rank], [row[rank] for row in counts], group)
        exchange(x[:0], [0] * n, [0] * n, group)
    assert dict(sent.bytes) == {"all-to-all": 8 * (sum(counts[rank]) - counts[rank][rank])}


def from_and_to_one() -> None:
    rank, n, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    x, into = torch.ones(5), [torch.empty(5) for _ in range(n)]
    last = n - 1
    with traffic() as sent:
        group.broadcast([x]).wait()
        dist.broadcast(x, last)
        group.gather([into] if rank == 0 else [], [x]).wait()
        dist.gather(x, into if rank == last else None, last)
    from_me, to_others = (rank == 0) + (rank == last), (rank != 0) + (rank != last)
    assert dict(sent.bytes) == {"broadcast": 20 * (n - 1) * from_me, "gather": 20 * to_others}


def by_torchs_functions() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    x, full = torch.ones(3), torch.ones(3 * n)
    with traffic() as sent:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(full, x)
        dist.all_gather(list(full.chunk(n)), x)
        dist.reduce_scatter_tensor(x, full)
        dist.all_to_all_single(torch.empty(3 * n), full)
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(x, 0)
    others = 12 * (n - 1)
    expected = {
        "all-reduce": 2 * others // n,
        "all-gather": 2 * others,
        "reduce-scatter": others,
        "all-to-all": others,
    }
    assert dict(sent.bytes) == expected | ({"send": 12} if rank == 0 else {})
    assert sent.total == sum(sent.bytes.values())


def nested_and_off() -> None:
    x, group = torch.ones(4), dist.group.WORLD
    before = dict(vars(dist.ProcessGroup))
    with traffic() as outer:
        all_sum(x, group)
        with traffic() as inner:
            all_sum(x, group)
        all_sum(x, group)
    assert (outer.calls["all-reduce"], inner.calls["all-reduce"]) == (3, 1)
    all_sum(x, group)
    assert outer.calls["all-reduce"] == 3
    with pytest.raises(KeyError), traffic():
        raise KeyError
    assert dict(vars(dist.ProcessGroup)) == before, "the methods are what they were"
    all_sum(x, group)


def all_of_it() -> None:
    kinds()
    from_and_to_one()
    by_torchs_functions()
    nested_and_off()


@pytest.mark.parametrize("ranks", [2, 3])
def test_traffic_counts_bytes_by_kind(ranks):
    on_ranks(ranks, all_of_it)
