"""A forward saves every activation for its backward. Keep a block's input only, and run the forward again.

Activation checkpointing trades a second forward for memory. Write it as an autograd function:

- forwards, run the block without building a graph (autograd functions do), and save its input;
- backwards, run the block again from a detached copy of the input, now with a graph, and go backward through
  it: the gradient of the copy is returned, those of the parameters add up in their `grad`;
- the block may have dropout. The second forward must draw the masks of the first, so save the state of the
  random number generator (`torch.get_rng_state`) and set it; and when the backward is over, the generator
  must be where it was before, or the next forward draws other masks than without recomputation.

An input that does not require a gradient still has parameters behind it: hand `Function.apply` something that
requires one, such as a parameter, or the backward is never called.

Sources: Chen et al. 2016, "Training deep nets with sublinear memory cost"; Griewank and Walther 2000.
"""

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
