"""Blocks whose computation between matrix products is compiled: sums of the residual stream with the norms
around them, heads of attention with their norms and rotary positions, and activation functions.

Products, attention kernels, dropout, routing and all communication stay uncompiled: they have kernels of
their own and side effects (weight gradients in place or deferred, asynchronous sums, masks drawn by key,
gathered weights) that a compiler could not move or repeat. The compiled regions between them have neither
state nor parameters, and are therefore the same for all blocks, under any layout.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from stretto.engine.compiler import Compiler
from stretto.engine.models.attention import SelfAttention
from stretto.engine.models.language import LanguageModel, TransformerBlock
from stretto.engine.models.mlp import MLP, activate
from stretto.engine.models.moe import Experts
from stretto.engine.models.regions import (
    HeadSizes,
    NormKind,
    Weights,
    add_and_norm,
    add_normed,
    normed,
    rotate_heads,
)
from stretto.engine.models.rotary import Rotary

_ONE_KERNEL = ("gelu", "gelu_exact", "relu")  # activation functions that torch computes by one


def compile_blocks(model: LanguageModel, compiler: Compiler) -> None:
    """Compile the regions between the matrix products of all blocks, in place; before parallelization and
    recomputation, which preserve it.
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
        # as many rows as the router chose
        return self.compiler(activate, dynamic=True)(y, self.kind)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    TransformerBlock: _CompiledBlock,
    SelfAttention: _CompiledAttention,
    MLP: _CompiledMLP,
    Experts: _CompiledExperts,
}


def _norm(module: nn.Module | None) -> tuple[Weights, NormKind | None]:
    """Arguments for a norm in `regions`."""
    if module is None or isinstance(module, nn.Identity):
        return (None, None), None
    weight, bias = cast("Tensor | None", module.weight), cast("Tensor | None", getattr(module, "bias", None))
    return (_exact(weight), _exact(bias)), NormKind.of(module)


def _exact(weight: Tensor | None) -> Tensor | None:
    """A norm's weight in float32 at least, in which its gradient is then computed and accumulated."""
    return _Widened.apply(weight) if weight is not None and weight.dtype.itemsize < 4 else weight


class _Widened(torch.autograd.Function):
    """x in float32; its gradient is not rounded to x's 16 bits, since autograd converts it to
    `parameter.grad_dtype`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.float()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0]
