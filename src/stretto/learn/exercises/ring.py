"""A sequence is too long for one rank, so each of n ranks has s/n positions of queries, keys and values.
Compute causal attention without holding the keys and values of all ranks, or scores of more than s/n by s/n.

Ring attention passes the shards of keys and values around: n - 1 times each rank sends the shard that it has
to rank r + 1, and receives another from r - 1. For each shard it computes attention of its queries to those
keys alone, and merges that with the result so far. Softmax over a row is a sum, so two parts with outputs o1,
o2 and log-sum-exps l1, l2 of their scores merge to

    l = log(exp(l1) + exp(l2)),    o = exp(l1 - l) o1 + exp(l2 - l) o2.

- Scores are q k^T / sqrt(head size); a query at position i sees keys at positions up to i. Rank r has
  positions r s/n to (r+1) s/n.
- Scores may be hundreds: subtract the maximum before exp (`torch.logsumexp` and `torch.logaddexp` do).
- A shard that no query of the rank sees adds nothing: leave it out, but pass it on.
- The forward alone is graded, with messages from rank to rank alone: n - 1 shards leave each rank.

Sources: Liu et al. 2023, "Ring attention", arXiv 2310.01889; Milakov and Gimelshein 2018, "Online
normalizer calculation for softmax".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stretto.engine.parallel.traffic import traffic
from stretto.learn.checks import Check, at_most, compared

RANKS = 3
TEMPLATE = '''import torch
import torch.distributed as dist
from torch import Tensor


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of this rank's queries to the keys of all ranks.

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
    """Compare the output with attention of one process, for small and for large scores; count messages."""
    batch, heads = random.randint(1, 2), random.randint(1, 3)
    size, positions = random.randint(3, 6), random.randint(7, 9)
    rank = dist.get_rank()
    for scale in (1.0, 30.0):
        full = torch.randn(3, batch, heads, RANKS * positions, size).double() * scale
        local = [tensor.chunk(RANKS, 2)[rank].contiguous() for tensor in full]
        with traffic() as sent, _Largest() as largest:
            actual = reader["ring_attention"](*local)
        causal = torch.ones(RANKS * positions, RANKS * positions).bool().tril()
        shard_of = torch.arange(RANKS * positions) // positions
        later, earlier = shard_of > shard_of[:, None], shard_of < shard_of[:, None]
        expected = _attention(full, causal).chunk(RANKS, 2)[rank]
        causes = {
            "it is attention to all keys: the causal mask is missing": _attention(full, causal | ~causal),
            "it also attends to shards of later positions": _attention(full, causal | later),
            "the causal mask inside the rank's own shard is missing": _attention(full, ~later),
            "it attends to the rank's own shard alone": _attention(full, causal & ~earlier),
            "the scores are not divided by the root of the head size": _attention(
                full * torch.tensor([size**0.5, 1, 1], dtype=torch.float64).view(3, 1, 1, 1, 1), causal
            ),
        }
        causes = {cause: output.chunk(RANKS, 2)[rank] for cause, output in causes.items()}
        yield compared(f"output at scores of about {scale**2 * size**0.5:.0f}", actual, expected, causes)

    shard = local[0].numel()
    yield at_most(
        "no tensor of all positions",
        largest.elements,
        max(2 * shard, batch * heads * positions**2),
        "an operation returns {actual} elements; keys and values of a shard, or its scores, are {limit}",
    )
    others = {kind: count for kind, count in sent.calls.items() if kind != "send"}
    yield Check("messages from rank to rank", f"it calls {', '.join(others)}" if others else None)
    yield at_most(
        "bytes: n - 1 shards of keys and values",
        sent.total,
        (RANKS - 1) * 2 * shard * 8,
        "{actual} bytes leave a rank, n - 1 shards are {limit}",
    )


def _attention(qkv: Tensor, mask: Tensor) -> Tensor:
    q, k, v = qkv
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
