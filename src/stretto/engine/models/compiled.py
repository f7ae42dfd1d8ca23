"""Blocks whose computation between matrix products is compiled: residual sums with their norms, the split of
features into attention heads with norms and rotary positions, and activation functions.

Matrix products, attention kernels, dropout, routing and all communication are not compiled: they have their
own kernels, and side effects (weight gradients in place or deferred, asynchronous sums, masks drawn by key,
gathered weights) that a compiler could not move or repeat. The compiled functions have neither state nor
parameters, and are therefore the same for all blocks, under any layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engine.compiler import Compiler
from stretto.engine.models.attention import SelfAttention
from stretto.engine.models.language import LanguageModel, TransformerBlock, added
from stretto.engine.models.mlp import MLP, activate
from stretto.engine.models.moe import Experts
from stretto.engine.models.norms import RMSNorm1p
from stretto.engine.models.rotary import Rotary, rotate
from stretto.errors import StrettoError

_ONE_KERNEL = ("gelu", "gelu_exact", "relu")  # activation functions that torch computes in one kernel


def compile_blocks(model: LanguageModel, compiler: Compiler) -> None:
    """Compile the functions between the matrix products of all blocks, in place.

    Call it before parallelization and recomputation, which preserve it.
    """
    for stack in (model.encoder, model.blocks):
        for module in stack.modules():
            compiled = _CLASSES.get(type(module))
            if compiled is not None:
                module.__class__ = compiled
                cast(Any, module).compiler = compiler


class _CompiledBlock(TransformerBlock):
    compiler: Compiler

    def normed(self, x: Tensor) -> Tensor:
        return self.compiler(normed)(x, *_norm(self.norm1))

    def add_and_norm(
        self, x: Tensor, y: Tensor, after: nn.Module | None, norm: nn.Module
    ) -> tuple[Tensor, Tensor]:
        return self.compiler(add_and_norm)(x, y, *_norm(after), *_norm(norm))

    def add(self, x: Tensor, y: Tensor, after: nn.Module | None) -> Tensor:
        return super().add(x, y, None) if after is None else self.compiler(add_normed)(x, y, *_norm(after))


class _CompiledAttention(SelfAttention):
    compiler: Compiler

    def to_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rotary = self.rotary
        if not isinstance(rotary, Rotary) and isinstance(self.q_norm, nn.Identity):
            return super().to_heads(qkv)  # views
        sizes = HeadSizes(
            self.heads, self.kv_heads, self.head_dim, isinstance(rotary, Rotary) and rotary.interleaved
        )
        tables = rotary.tables(qkv) if isinstance(rotary, Rotary) else None
        q, k = _norm(self.q_norm), _norm(self.k_norm)
        return self.compiler(rotate_heads)(qkv, sizes, tables, *q, *k)


class _CompiledMLP(MLP):
    compiler: Compiler

    def activation(self, y: Tensor) -> Tensor:
        return super().activation(y) if self.kind in _ONE_KERNEL else self.compiler(activate)(y, self.kind)


class _CompiledExperts(Experts):
    compiler: Compiler

    def activation(self, y: Tensor) -> Tensor:
        if self.kind in _ONE_KERNEL:
            return super().activation(y)
        # the number of rows varies with the routing
        return self.compiler(activate, dynamic=True)(y, self.kind)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    TransformerBlock: _CompiledBlock,
    SelfAttention: _CompiledAttention,
    MLP: _CompiledMLP,
    Experts: _CompiledExperts,
}


def _norm(module: nn.Module | None) -> tuple[Weights, NormKind | None]:
    """Return a norm as arguments of the compiled functions."""
    if module is None or isinstance(module, nn.Identity):
        return (None, None), None
    weight, bias = cast("Tensor | None", module.weight), cast("Tensor | None", getattr(module, "bias", None))
    return (_exact(weight), _exact(bias)), NormKind.of(module)


def _exact(weight: Tensor | None) -> Tensor | None:
    """Return a norm's weight in float32 or wider, in which its gradient is then computed and accumulated."""
    return _Widened.apply(weight) if weight is not None and weight.dtype.itemsize < 4 else weight


class _Widened(torch.autograd.Function):
    """Convert x to float32; the gradient is not rounded to x's 16 bits, since autograd converts it to
    `parameter.grad_dtype`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.float()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0]


# ------------------------------------------------------------------ the compiled functions

Weights = tuple[Tensor | None, Tensor | None]  # of a norm: gain and bias


class NormKind(NamedTuple):
    """The constants of a norm over the last dimension."""

    name: str
    eps: float | None

    @classmethod
    def of(cls, norm: nn.Module) -> NormKind:
        """Return the kind of a module."""
        if isinstance(norm, nn.LayerNorm):
            return cls("layer", norm.eps)
        if isinstance(norm, RMSNorm1p):
            return cls("rms1p", norm.eps)
        if isinstance(norm, nn.RMSNorm):
            return cls("rms", norm.eps)
        raise StrettoError(f"a norm of type {type(norm).__name__} cannot be compiled")


def normed(x: Tensor, weights: Weights, kind: NormKind) -> Tensor:
    """Normalise x [..., n] over its last dimension, in float32 or wider; return x's dtype."""
    exact = torch.promote_types(x.dtype, torch.float32)
    gain, bias = (None if t is None else t.to(exact) for t in weights)
    if kind.name == "layer":
        assert kind.eps is not None
        return F.layer_norm(x.to(exact), x.shape[-1:], gain, bias, kind.eps).to(x.dtype)
    eps = torch.finfo(x.dtype).eps if kind.eps is None else kind.eps
    wide = x.to(exact)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if gain is not None:
        y = y * (1.0 + gain if kind.name == "rms1p" else gain)
    return y.to(x.dtype)


def add_and_norm(
    x: Tensor, y: Tensor, after: Weights, after_kind: NormKind | None, norm: Weights, kind: NormKind
) -> tuple[Tensor, Tensor]:
    """Add y, first normalised if `after_kind`, to the residual stream x; return the sum, and the sum
    normalised.
    """
    total = added(x, y if after_kind is None else normed(y, after, after_kind))
    return total, normed(total, norm, kind)


def add_normed(x: Tensor, y: Tensor, after: Weights, kind: NormKind) -> Tensor:
    """Add the normalised y to the residual stream x."""
    return added(x, normed(y, after, kind))


class HeadSizes(NamedTuple):
    """Sizes of the heads in features [q; k; v]; `interleaved` if rotary pairs are neighbours."""

    heads: int
    kv_heads: int
    head_dim: int
    interleaved: bool


def rotate_heads(
    qkv: Tensor,
    sizes: HeadSizes,
    tables: tuple[Tensor, Tensor] | None,
    q_norm: Weights,
    q_kind: NormKind | None,
    k_norm: Weights,
    k_kind: NormKind | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split features qkv [b, s, (heads + 2 kv_heads) d] into heads, and normalise and rotate them.

    Returns queries [b, heads, s, d], and keys and values [b, kv_heads, s, d], each in separate memory.

    Args:
        tables: cos and sin, [s, d / 2] or [b, 1, s, d / 2]; None without rotary positions.
    """
    widths = [sizes.heads * sizes.head_dim, *[sizes.kv_heads * sizes.head_dim] * 2]
    q, k, v = (part.unflatten(-1, (-1, sizes.head_dim)) for part in qkv.split(widths, dim=-1))
    q = q if q_kind is None else normed(q, q_norm, q_kind)
    k = k if k_kind is None else normed(k, k_norm, k_kind)
    if tables is not None:
        # positions before heads, as in qkv
        cos, sin = (t.unsqueeze(1) if t.dim() == 2 else t.transpose(1, 2) for t in tables)
        q, k = (rotate(t, cos, sin, sizes.interleaved) for t in (q, k))
    # the attention kernels preserve the memory layout of q, and copy v if it is a view
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2).contiguous()
