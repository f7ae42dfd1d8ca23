"""Grades `pipeline`: a pipeline step in the order of 1F1B."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.engine.parallel.traffic import traffic
from stretto.learn.checks import Check, at_most, proved
from stretto.learn.models import random_blocks, square_loss
from stretto.program import schedule
from stretto.prove import prove

RANKS = 3
TEMPLATE = '''import torch
import torch.distributed as dist
from torch import Tensor, nn


def run_step(stage: nn.Module, inputs: list[Tensor], targets: list[Tensor], loss) -> Tensor | None:
    """Run forwards and backwards of all microbatches in the order of 1F1B; gradients add up in `grad`.

    Args:
        stage: this rank's part of the model; its input and output have the shape of an input.
        inputs: one tensor per microbatch; all ranks have them, and only the first may compute with them (the
            others may use their shape and dtype).
        targets: one tensor per microbatch; only the last rank may compute with them.
        loss: `loss(output, target)`, a mean.

    Returns:
        On the last rank the mean loss of the microbatches, detached; None on the others.
    """
    raise NotImplementedError
'''


def checks(reader: Mapping[str, Any], random: Random) -> Iterator[Check]:
    """Compare steps of several numbers of microbatches with one process, and their order with 1F1B's."""
    width, rows = random.randint(4, 7), random.randint(2, 3)
    rank = dist.get_rank()
    for count in (random.randint(RANKS + 1, 2 * RANKS), RANKS - 1):
        batch = torch.randn(2, count, rows, width).double().unbind()
        order = list[str]()

        def step(stage: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, order: Any = order) -> Any:
            def began(_module: Any, _inputs: Any, output: Tensor) -> None:
                order.append("F")
                output.register_hook(lambda gradient: order.append("B"))

            order.clear()
            hook = stage.register_forward_hook(began)
            nothing = torch.full_like(batch[0], torch.nan)
            inputs, targets = batch[0] if rank == 0 else nothing, batch[1] if rank == RANKS - 1 else nothing
            loss = reader["run_step"](stage, [*inputs], [*targets], nn.functional.mse_loss)
            hook.remove()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        with traffic() as sent:
            report = prove(
                lambda: random_blocks(RANKS, width, width),
                lambda model: cast(nn.Sequential, model)[rank],
                batch,
                step,
                loss=square_loss,
                steps=1,
                timeout=15.0,
            )
        yield proved(f"a step of {count} microbatches is that of one process", report)
        yield Check(f"order of {count} microbatches", _order_problem(order, count))
        ends = rank in (0, RANKS - 1)
        yield at_most(
            f"messages of {count} microbatches",
            sent.calls["send"],
            count if ends else 2 * count,
            "{actual} messages leave this rank, {limit} are enough",
        )


def _order_problem(order: list[str], count: int) -> str | None:
    """What differs from the order of 1F1B on this rank."""
    expected = [action.kind.value for action in schedule("1f1b", RANKS, count).orders[dist.get_rank()]]
    if order == expected:
        return None
    peaks = [
        max(sum(+1 if kind == "F" else -1 for kind in kinds[: end + 1]) for end in range(len(kinds)))
        for kinds in (order, expected)
    ]
    return (
        f"it runs {' '.join(order)} and holds up to {peaks[0]} microbatches, "
        f"1F1B {' '.join(expected)} and {peaks[1]}"
    )
