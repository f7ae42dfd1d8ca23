"""Grades `recompute`: activation recomputation as an autograd function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from stretto.learn.checks import Check, at_most, compared, saved_bytes
from stretto.learn.models import random_blocks

RANKS = 1
TEMPLATE = '''import torch
from torch import Tensor, nn


def checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    """Return block(x), whose backward keeps x alone and runs the block again.

    Args:
        block: its parameters require gradients; it may draw random numbers of the CPU's generator.
        x: may or may not require a gradient.
    """
    raise NotImplementedError
'''
Run = Callable[[nn.Module, Tensor], Tensor]


def checks(reader: Mapping[str, Any], random: Random) -> Iterator[Check]:
    """Compare outputs and gradients of two steps, without dropout and with it, then count what is saved."""
    width, rows = random.randint(5, 9), random.randint(3, 6)
    seed = random.randrange(1000)
    x, run = torch.randn(rows, width).double(), reader["checkpoint"]
    for dropout, hint in ((0.0, ""), (0.3, "; without dropout it is right: are the masks others?")):
        blocks = [nn.Sequential(block, nn.Dropout(dropout)) for block in random_blocks(2, width, 2 * width)]
        expected = _two_steps(blocks, x, seed, lambda block, x: block(x))
        for name, actual in _two_steps(blocks, x, seed, run).items():
            check = compared(f"{name}{', with dropout' * bool(dropout)}", actual, expected[name])
            yield check._replace(problem=check.problem and check.problem + hint)

    block, leaf = random_blocks(1, width, 2 * width), x.clone().requires_grad_()
    yield at_most(
        "saved: the input alone",
        saved_bytes(block, lambda: run(block, leaf)),
        x.nbytes,
        "{actual} bytes are saved for the backward; the input is {limit}",
    )


def _two_steps(blocks: list[nn.Sequential], x: Tensor, seed: int, run: Run) -> dict[str, Any]:
    """Outputs and gradients of two forwards and backwards; the first block's input requires no gradient."""
    torch.manual_seed(seed)
    results = dict[str, Any]()
    for step in (1, 2):
        first = run(blocks[0], x)
        output = run(blocks[1], first)
        results[f"output of step {step}"] = output.detach().clone()
        (output * x).sum().backward()
        for index, block in enumerate(blocks):
            weight = next(block.parameters())
            results[f"gradient of block {index} in step {step}"] = weight.grad
            block.zero_grad()
    return results
