"""Messages and collectives that never come end a proof."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from plain_models import batch, loss, plain, samples, step
from ranks import on_ranks
from stretto.errors import StrettoError
from stretto.prove import Report, prove
from stretto.run.launch.local import RankFailed


def receives_first(model: Any, optimizer: Any, batch: Any) -> Tensor:
    """Both ranks do, and neither has sent."""
    mean = step(model, optimizer, batch)
    dist.recv(torch.empty(()).double(), 1 - dist.get_rank())
    dist.send(mean.detach(), 1 - dist.get_rank())
    return mean


def receives_alone(model: Any, optimizer: Any, batch: Any) -> Tensor:
    """Rank 1 waits for what rank 0 never sends."""
    mean = step(model, optimizer, batch)
    if dist.get_rank() == 1:
        dist.recv(torch.empty(()).double(), 0)
    return mean


def reduces_alone(model: Any, optimizer: Any, batch: Any) -> Tensor:
    """Rank 0 makes a collective that rank 1 does not."""
    mean = step(model, optimizer, batch)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(3))
    return mean


def deadlocked(own_step: Any) -> Report:
    return prove(plain, DistributedDataParallel, batch(), own_step, loss=loss, share=samples, timeout=2.0)


@pytest.mark.parametrize(
    ("own_step", "message"),
    [
        (
            receives_first,
            r"after 2 s rank 0 waits for its recv from rank 1 \(test_prove_waits.py:\d+\), "
            r"rank 1 waits for its recv from rank 0 \(test_prove_waits.py:\d+\): a deadlock",
        ),
        (
            receives_alone,
            r"after 2 s rank 0 waits for the other ranks, to compare, "
            r"rank 1 waits for its recv from rank 0 \(test_prove_waits.py:\d+\): a deadlock",
        ),
        (
            reduces_alone,
            r"after 2 s rank 0 waits for its collective \(test_prove_waits.py:\d+\), "
            r"rank 1 waits for the other ranks, to compare: a deadlock",
        ),
    ],
)
@pytest.mark.timeout(60)
def test_messages_that_never_come_are_an_error_that_names_ranks_and_calls(
    own_step: Any, message: str
) -> None:
    with pytest.raises((RankFailed, StrettoError), match=message):
        on_ranks(2, deadlocked, own_step)
