"""Grades `ring`: ring attention, merged by log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stretto.engine.parallel.traffic import traffic
from stretto.learn.checks import Check, at_most, compared, saved_bytes

RANKS = 3
TEMPLATE = '''import torch
import torch.distributed as dist
from torch import Tensor


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of this rank's queries to the keys of all ranks, differentiable.

    Args:
        q, k, v: [batch, heads, s / n, size], this rank's positions; contiguous.

    Returns:
        [batch, heads, s / n, size].
    """
    raise NotImplementedError
'''


class _Largest(TorchDispatchMode):
    """Records the elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.elements = max([self.elements, *(tensor.numel() for tensor in tensors)])
        return result


def checks(reader: Mapping[str, Any], random: Random) -> Iterator[Check]:
    """Compare output and gradients with attention of one process, for small and for large scores; then count
    what is saved, and messages.
    """
    batch, heads = random.randint(1, 2), random.randint(1, 3)
    size, positions = random.randint(3, 6), random.randint(7, 9)
    rank, largest = dist.get_rank(), _Largest()
    causal = torch.ones(RANKS * positions, RANKS * positions).bool().tril()
    shard_of = torch.arange(RANKS * positions) // positions
    later, earlier = shard_of > shard_of[:, None], shard_of < shard_of[:, None]

    def shard_here(tensor: Tensor) -> Tensor:
        return tensor.chunk(RANKS, -2)[rank]

    for scale in (1.0, 30.0):
        full = torch.randn(3, batch, heads, RANKS * positions, size).double() * scale
        local = [shard_here(tensor).contiguous().requires_grad_() for tensor in full]
        with traffic() as sent, largest:
            actual = reader["ring_attention"](*local)
        expected = shard_here(_attention(full.requires_grad_(), causal))
        causes = {
            "it is attention to all keys: the causal mask is missing": _attention(full, causal | ~causal),
            "it also attends to shards of later positions": _attention(full, causal | later),
            "the causal mask inside the rank's own shard is missing": _attention(full, ~later),
            "it attends to the rank's own shard alone": _attention(full, causal & ~earlier),
            "the scores are not divided by the root of the head size": _attention(
                full * torch.tensor([size**0.5, 1, 1], dtype=torch.float64).view(3, 1, 1, 1, 1), causal
            ),
        }
        causes = {cause: shard_here(output) for cause, output in causes.items()}
        scores = f"at scores of about {scale**2 * size**0.5:.0f}"
        yield compared(f"output {scores}", actual, expected, causes)

        no_graph = "it has none: torch does not differentiate messages, so write an autograd function"
        yield Check(f"graph of the output {scores}", None if actual.requires_grad else no_graph)
        slope = torch.randn(batch, heads, RANKS * positions, size).double()
        with traffic() as sent_back, largest:
            (actual * shard_here(slope)).sum().backward()
        (gradient,) = torch.autograd.grad((_attention(full, causal) * slope).sum(), full)
        (alone,) = torch.autograd.grad((expected * shard_here(slope)).sum(), full)
        # at large scores each query sees one key, so the gradients of scores are the rounding's
        for index, name in [*enumerate("qkv")][2 * (scale > 1) :]:
            causes = {"it lacks what the queries of other ranks add to it": shard_here(alone[index])}
            causes |= {
                f"it is that of the keys and values of rank {other}: pass it on until it is home": part
                for other, part in enumerate(gradient[index].chunk(RANKS, -2))
            }
            yield compared(
                f"gradient of {name} {scores}", local[index].grad, shard_here(gradient[index]), causes
            )

    shard = local[0].numel()
    yield at_most(
        "no tensor of all positions",
        largest.elements,
        max(2 * shard, batch * heads * positions**2),
        "an operation returns {actual} elements; keys and values of a shard, or its scores, are {limit}",
    )
    yield at_most(
        "saved: q, k, v, the output and a log-sum-exp for each of its rows",
        saved_bytes(nn.Module(), lambda: reader["ring_attention"](*local)),
        (4 * shard + shard // size) * 8,
        "{actual} bytes are saved for the backward, {limit} are enough: shards come around again",
    )
    others = {kind for kind in (*sent.calls, *sent_back.calls) if kind != "send"}
    yield Check("messages from rank to rank", f"it calls {', '.join(others)}" if others else None)
    for case, counted, shards in (
        ("n - 1 shards of keys and values", sent, RANKS - 1),
        ("in the backward, those and n of their gradients", sent_back, 2 * RANKS - 1),
    ):
        yield at_most(
            f"bytes: {case}",
            counted.total,
            shards * 2 * shard * 8,
            "{actual} bytes leave a rank, {limit} are enough",
        )


def _attention(qkv: Tensor, mask: Tensor) -> Tensor:
    q, k, v = qkv
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
