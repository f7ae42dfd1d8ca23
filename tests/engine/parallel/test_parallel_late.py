"""Messages kept back until they are waited for: right use changes no bit, wrong use is always seen."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import on_ranks
from stretto.engine.parallel.collectives import (
    all_sum,
    exchange,
    gather,
    scatter_sum,
    start_gather_into,
    start_sum,
)
from stretto.engine.parallel.late import delay_messages


def both_ways(communicate: Callable[[], list[Tensor]]) -> None:
    """The results are those without delays."""
    expected = communicate()
    with delay_messages(seed=1) as late:
        results = communicate()
    assert late.broken == []
    assert late.messages > 0
    for result, right in zip(results, expected, strict=True):
        assert torch.equal(result, right)


def everything() -> list[Tensor]:
    rank, n, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    x = torch.arange(4.0 * n).view(n, 4) + 10 * rank
    results = [all_sum(x.clone(), group), gather(x, group, 1), scatter_sum(x, group, 0)]
    results.append(exchange(x, [1] * n, [1] * n, group))
    gathered = torch.zeros(3 * n)
    part = gathered[3 * rank : 3 * rank + 3].fill_(rank + 1)  # a part of the result
    start_gather_into(gathered, part, group).wait()
    passed, count = x.new_empty(4), torch.tensor([rank], dtype=torch.int64)
    work = [group.send([x[0].contiguous()], (rank + 1) % n, 0), group.recv([passed], (rank - 1) % n, 0)]
    for request in work:
        request.wait()
    dist.broadcast(count, n - 1)
    mine, parts = x.new_empty(4), [row.contiguous() for row in x]
    group.scatter([mine], [parts] if rank == 0 else []).wait()
    into = [torch.empty(4) for _ in range(n)] if rank == 0 else []
    group.gather([into] if into else [], [mine]).wait()
    return [*results, gathered, passed, count, mine, *into]


def right_use() -> None:
    before = dict(vars(dist.ProcessGroup))
    submit = ThreadPoolExecutor.submit
    both_ways(everything)
    assert dict(vars(dist.ProcessGroup)) == before, "the methods are what they were"
    assert ThreadPoolExecutor.submit is submit


def wrong_use() -> None:
    rank, n, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    x = torch.full((4,), float(rank))
    with delay_messages(seed=1) as late:
        work = start_sum(x, group)
        assert bool(x.isnan().all()), "nothing has arrived before the wait"
        assert not work.is_completed()
        work.wait()
        assert x.tolist() == [sum(range(n))] * 4
        work.wait()
        assert x.tolist() == [sum(range(n))] * 4
    assert late.broken == []

    gathered, part = torch.zeros(2 * n), torch.ones(2)
    with delay_messages(seed=1) as late:
        work = start_gather_into(gathered, part, group)
        part.fill_(5)
        work.wait()
    assert [violation.split(" that ")[1] for violation in late.broken] == [
        f"{__name__}.wrong_use starts is in flight while what it sends is overwritten"
    ]
    assert gathered.tolist() == [1] * (2 * n)

    with delay_messages(seed=1) as late:
        start_gather_into(gathered, part, group)
    (violation,) = late.broken
    assert violation.startswith("the allgather over ranks 0, 1")
    assert violation.endswith("starts is never waited for")

    with delay_messages(seed=1) as late:
        first, other = start_sum(x, group), start_sum(x[:2], group)
        first.wait()
        other.wait()
    assert [" uses memory of another one in flight: " in violation for violation in late.broken] == [True]

    with delay_messages(seed=1) as late:
        work = start_gather_into(gathered, part, group)
        gathered.untyped_storage().resize_(0)
        work.wait()
    (violation,) = late.broken
    assert violation.endswith("is in flight while its memory is freed")


def all_of_it() -> None:
    right_use()
    wrong_use()


@pytest.mark.parametrize("ranks", [2, 3])
def test_late_messages(ranks: int) -> None:
    on_ranks(ranks, all_of_it)
