"""Matrix products of linear layers in 8 bits (Micikevicius et al. 2022, "FP8 formats for deep learning").

Forward: x weight^T with both factors in E4M3. Backward: the input gradient, from the output gradient in E5M2,
which trades precision for range, and the weight in E4M3. The weight gradient is computed in the training
dtype from the unquantised input: it is the product that 8 bits hurt most, it may be deferred for long (W),
and saving the input takes no more memory than training without fp8.

Scales are computed from the current tensors ("current scaling"): one for each tensor, or one for each row
along the dimension that is summed. They are powers of two, so scaling and unscaling are exact. If several
ranks hold parts of a tensor that one scale covers in one process, the maximum over these ranks is used, so
the result does not depend on the layout. This excludes padded microbatches with one scale for each tensor,
and key heads with copies on several ranks, each of which has a part of their gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from stretto.engine.device import compute_capability
from stretto.engine.parallel.collectives import all_max
from stretto.engine.parallel.tensor.linear import AdoptedLinear, FusedLinear
from stretto.errors import StrettoError, nearest

if TYPE_CHECKING:
    from stretto.engine.parallel.mesh import Mesh

SCALINGS = ("tensor", "row")
LAYERS = ("qkv", "proj", "up", "gate_up", "down")  # linears of blocks
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # hardware requires multiples of this for both sizes of a matrix
_MIN_SCALE = 2.0**-126  # the smallest scale: a smaller one has no inverse in float32


def enable_fp8(model: nn.Module, scaling: str, mesh: Mesh | None = None) -> None:
    """Make the linear layers of attention, MLPs and shared experts in `model`'s blocks multiply in 8 bits; in
    place. Embedding, head, routers and routed experts are unchanged.

    Args:
        model: a model of `stretto.engine.models`, plain or after `parallelize`.
        scaling: "tensor": a scale for each tensor; "row": a scale for each row.
        mesh: this rank's mesh, or None in one process.

    Raises:
        StrettoError: `scaling` is unknown, or the model has no such layers.
    """
    if scaling not in SCALINGS:
        suggestion = nearest(scaling, SCALINGS)
        raise StrettoError(
            f"precision.fp8 is {scaling!r}: it must be one of {', '.join(SCALINGS)}",
            hint=f"did you mean {suggestion!r}?" if suggestion else None,
        )
    all_parts = None if mesh is None else mesh.group("tp-cp")
    enabled = 0
    for name, layer in model.named_modules():
        parts = name.split(".")
        if parts[0] != "blocks" or parts[-1] not in LAYERS:
            continue
        if type(layer) is nn.Linear:
            layer.__class__ = AdoptedLinear
        if isinstance(layer, FusedLinear):
            rows = scaling == "row"
            layer.products = Products8(
                rows, layer.output_group if rows else all_parts, layer.input_group if rows else all_parts
            )
            enabled += 1
    if not enabled:
        raise StrettoError(
            f"no layer of {type(model).__name__} can multiply in 8 bits",
            hint="it has none named blocks.*.qkv, proj, up, gate_up or down",
        )


@dataclass(frozen=True)
class Products8:
    """The 8-bit products of a layer.

    Attributes:
        rows: one scale for each row of a factor; otherwise one for the entire factor.
        forward_group, backward_group: ranks over which the maximum of a scale is taken: with `rows` those
            that split the dimension that is summed, otherwise all that hold parts of the microbatch or
            weight.
    """

    rows: bool
    forward_group: ProcessGroup | None = None
    backward_group: ProcessGroup | None = None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x weight^T + bias; x [..., in], weight [out, in]."""
        y = self._multiply(x, weight, E4M3, self.forward_group)
        return y if bias is None else y.add_(bias)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return dy weight; dy [..., out], weight [out, in]."""
        return self._multiply(dy, weight.t(), E5M2, self.backward_group)

    def _multiply(self, a: Tensor, b: Tensor, kind: torch.dtype, group: ProcessGroup | None) -> Tensor:
        """Return a b^T [..., m] of a [..., k], in the 8-bit type `kind`, and b [m, k], in E4M3."""
        flat = a.reshape(-1, a.shape[-1])
        largest = [self._largest(flat), self._largest(b)]
        if group is not None:
            largest = all_max(torch.cat(largest), group).split([len(part) for part in largest])
        left, right = (
            Quantised.of(t, power_of_two(m / torch.finfo(k).max), k)
            for t, m, k in zip((flat, b), largest, (kind, E4M3), strict=True)
        )
        return product(left, right, a.dtype, fast=kind is E4M3).view(*a.shape[:-1], len(b))

    def _largest(self, t: Tensor) -> Tensor:
        """Return the largest magnitude in each row of t [n, k], as [n], or in all of t, as [1]; at least
        float32.
        """
        over = torch.linalg.vector_norm(t, float("inf"), dim=-1 if self.rows else None)
        return over.reshape(-1).to(torch.promote_types(t.dtype, torch.float32))


@dataclass(frozen=True)
class Quantised:
    """A matrix in 8 bits: values [n, k] times scale, which is [n] (per row) or [1]."""

    values: Tensor
    scale: Tensor

    @classmethod
    def of(cls, t: Tensor, scale: Tensor, kind: torch.dtype) -> Quantised:
        """Return t [n, k] / scale, rounded to nearest."""
        work = _work(t.dtype)
        return cls((t.to(work) / scale.to(work).unsqueeze(-1)).to(kind), scale)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the values times the scale: exact in bfloat16 and all wider types."""
        return self.values.to(dtype) * self.scale.to(dtype).unsqueeze(-1)


def power_of_two(bound: Tensor) -> Tensor:
    """Return the next power of two above each element, or NaN if it is not finite, to propagate overflow."""
    bound = bound.clamp(min=_MIN_SCALE)
    return bound / torch.frexp(bound).mantissa


def product(a: Quantised, b: Quantised, dtype: torch.dtype, fast: bool) -> Tensor:
    """Return a b^T [n, m], of a [n, k] and b [m, k], in `dtype`: in hardware if possible, else emulated, with
    sums in at least that type's precision.

    Args:
        fast: allow the hardware to accumulate in its shorter type.
    """
    sizes = (*b.values.shape, len(a.values))
    fits = sizes[0] % MULTIPLE == 0 and sizes[1] % MULTIPLE == 0 and sizes[2] > 0
    if not (fits and dtype != torch.float64 and _multiplies(a.values.device)):
        work = _work(dtype)
        return functional.linear(a.dequantised(work), b.dequantised(work)).to(dtype)
    rows = a.scale.numel() > 1 or b.scale.numel() > 1
    y = torch._scaled_mm(
        a.values.contiguous(),
        b.values.contiguous().t(),
        scale_a=a.scale.unsqueeze(1) if rows else a.scale.squeeze(),
        scale_b=b.scale.unsqueeze(0) if rows else b.scale.squeeze(),
        out_dtype=torch.bfloat16 if rows else dtype,  # with row scales, the only type on all hardware
        use_fast_accum=fast,
    )
    return y.to(dtype)


@cache
def _multiplies(device: torch.device) -> bool:
    """True if a device has 8-bit matrix products."""
    return compute_capability(device) >= (8, 9)


def _work(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scales and emulated products: float16 has too little range."""
    return torch.float32 if dtype == torch.float16 else dtype
