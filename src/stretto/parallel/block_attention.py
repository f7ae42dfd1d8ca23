"""Attention of some queries to one block of keys, and the sum of blocks.

Each block's softmax is normalised over its own keys and comes with the logarithm of what it was divided by,
so that blocks add up to attention over all keys without the scores being kept (Milakov & Gimelshein 2018; Dao
et al. 2022, section 3.1). For the backward the sums over all blocks are enough: every block's probabilities
are exp(score - log-sum-exp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.parallel import explicit_attention
from stretto.parallel.explicit_attention import Kept

_aten: Any = torch.ops.aten


class Kernel(Protocol):
    """Attention of one block, forward and backward; causal needs as many queries as keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """q [b, heads, n, d], k and v [b, kv_heads, m, d] to the block's own output [b, heads, n, d] and
        log-sum-exp [b, heads, n] (float32; float64 for float64).
        """
        ...

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The block's part of the gradients of q, k and v; y and lse are those of all blocks together."""
        ...


class Cpu:
    """Torch's tiled attention on CPUs: any strides, any floating type, heads grouped."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(dy, q, k, v, y, lse, 0.0, causal)


class Flash:
    """FlashAttention on CUDA: 16-bit types, heads grouped."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout's random state
        return _aten._scaled_dot_product_flash_attention_backward(
            dy, q, k, v, y, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused
        )


class Efficient:
    """Memory-efficient attention on CUDA, which has float32 too, but no grouped heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        k, v = (_spread(t, q.shape[1]) for t in (k, v))
        y, lse = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[:2]
        return y, lse[..., : q.shape[2]]

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))  # the kernel's alignment
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        wide = (_spread(t, q.shape[1]) for t in (k, v))
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dy, q, *wide, None, y, lse, unused, unused, 0.0, [True, True, True, False], causal
        )
        return dq, _gather(dk, k.shape[1]), _gather(dv, k.shape[1])


@dataclass(frozen=True)
class Explicit:
    """The formula written out: any device and type, and dropout."""

    kept: Kept | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return explicit_attention.forward(q, k, v, causal, self.kept)

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return explicit_attention.backward(dy, q, k, v, y, lse, causal, self.kept)


def _spread(x: Tensor, heads: int) -> Tensor:
    """[b, kv_heads, m, d] to one key head for every query head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _gather(x: Tensor, kv_heads: int) -> Tensor:
    """Gradients of spread heads, summed over their group."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)


def kernel_for(q: Tensor, explicit: bool = False, kept: Kept | None = None) -> Kernel:
    """The fastest kernel for queries like q; with `explicit` or dropout the formula written out."""
    if explicit or kept is not None:
        return Explicit(kept)
    d = q.shape[-1]
    if q.device.type == "cpu" and q.is_floating_point():
        return Cpu()
    if q.device.type == "cuda" and d % 8 == 0:
        if q.dtype in (torch.float16, torch.bfloat16) and d <= 256:
            return Flash()
        if q.dtype == torch.float32:
            return Efficient()
    return Explicit(None)


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """In which blocks are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_block(y: Tensor, lse: Tensor, block_y: Tensor, block_lse: Tensor) -> None:
    """Take a block into the sum of others, in place: outputs [b, heads, n, d], log-sum-exps [b, heads, n]."""
    both = torch.logaddexp(lse, block_lse)
    y.mul_((lse - both).exp_().unsqueeze(-1))
    y.addcmul_(block_y.to(y.dtype), (block_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)
