"""Forward and backward of attention: what `train.attention` chooses, and each backend of torch's
scaled_dot_product_attention that the device has, compared with the formula that keeps its probabilities.

A contestant that cannot compute a style here is listed with its reason. The backends are raced on causal
attention alone, since none of them caps scores or takes sinks, and a window would need a mask.

    python benchmarks/attention.py [--device cuda] [--dtype bfloat16] [--sequence 4096] [--styles window]
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from harness import Step, arguments, race, report
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from stretto.engine.device import device_kind, synchronize
from stretto.engine.documents import DocumentStarts
from stretto.engine.models.causal import CausalAttention
from stretto.job.attention import AttentionKernel

KERNELS: tuple[AttentionKernel, ...] = ("auto", "sdpa", "flex")
EXPLICIT = "explicit"
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True, kw_only=True)
class Style:
    """A kind of attention.

    Attributes:
        window: as a share of the sequence.
        documents: in a sample, all equally long.
    """

    kv_share: int = 1
    window: float | None = None
    softcap: float | None = None
    sinks: bool = False
    documents: int = 1

    def core(self, kernel: AttentionKernel, n: int, device: torch.device) -> CausalAttention:
        """Stretto's module."""
        window = None if self.window is None else max(int(self.window * n), 1)
        core = CausalAttention(0.0, kernel == EXPLICIT, window=window, softcap=self.softcap)
        core.kernel = kernel
        if self.documents > 1:
            length = n // self.documents
            begins = (torch.arange(n) // length).clamp(max=self.documents - 1) * length
            core.packing.documents = DocumentStarts(begins.unsqueeze(0))
        return core.to(device).train()


STYLES = {
    "causal": Style(),
    "grouped": Style(kv_share=4),
    "window": Style(kv_share=4, window=0.125),
    "softcap": Style(kv_share=2, softcap=50.0),
    "window and softcap": Style(kv_share=2, window=0.25, softcap=50.0),
    "sinks": Style(kv_share=4, window=0.125, sinks=True),
    "documents": Style(kv_share=4, documents=8),
}


@dataclass(frozen=True)
class Sizes:
    """Of q, k and v."""

    heads: int
    sequence: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def drawn(self, style: Style) -> list[Tensor]:
        """Leaves q, k and v of one sample, and sinks, in memory as projections give them."""
        draw, n = torch.Generator().manual_seed(0), self.sequence
        tensors = [
            torch.randn(1, n, heads, self.head_dim, generator=draw)
            for heads in (self.heads, *2 * (self.heads // style.kv_share,))
        ]
        there = [t.to(self.device, self.dtype).transpose(1, 2) for t in tensors]
        if style.sinks:
            there.append(torch.zeros(self.heads, dtype=self.dtype, device=self.device))
        return [t.requires_grad_() for t in there]


def step_of(attend: Callable[..., Tensor], leaves: list[Tensor], device: torch.device) -> Step:
    """Forward and backward."""

    def step() -> None:
        y = attend(*leaves)
        torch.autograd.grad(y, leaves, y.detach())
        synchronize(device)

    return step


def by_backend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's function by one of its backends, which raises where it cannot."""
    with sdpa_kernel([backend]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1])


def by_implementation(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention 3 or 4, where installed, in place of torch's own."""
    torch_attention.activate_flash_attention_impl(name)
    try:
        return by_backend(SDPBackend.FLASH_ATTENTION, q, k, v)
    finally:
        torch_attention.restore_flash_attention_impl()


def contestants(style: Style, sizes: Sizes) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """What computes the style, by name."""
    for kernel in (EXPLICIT, *KERNELS):
        yield kernel, style.core(kernel, sizes.sequence, sizes.device)
    if style.window is None and style.softcap is None and not style.sinks and style.documents == 1:
        for name, backend in BACKENDS.items():
            yield f"torch: {name}", partial(by_backend, backend)
        for name in torch_attention.list_flash_attention_impls():
            yield f"torch: {name}", partial(by_implementation, name)


def possible(style: Style, sizes: Sizes) -> tuple[dict[str, Step], dict[str, str]]:
    """Steps of those that compute the style here, each run once, and why the others do not."""
    steps, reasons = dict[str, Step](), dict[str, str]()
    for name, attend in contestants(style, sizes):
        step = step_of(attend, sizes.drawn(style), sizes.device)
        try:
            with warnings.catch_warnings():  # of every backend that torch does not take
                warnings.simplefilter("ignore")
                step()
        except Exception as error:
            reasons[name] = str(error).strip().partition("\n")[0]
            continue
        steps[name] = step
    return steps, reasons


def main() -> None:
    args = arguments(
        __doc__,
        9,
        device="auto",
        dtype="float32",
        heads=16,
        head_dim=64,
        sequence=1024,
        styles=",".join(STYLES),
    )
    torch.set_num_threads(1)
    device = torch.device(device_kind(args.device))
    sizes = Sizes(args.heads, args.sequence, args.head_dim, getattr(torch, args.dtype), device)
    for name in args.styles.split(","):
        steps, reasons = possible(STYLES[name], sizes)
        for who, why in reasons.items():
            print(f"{name}, {who}: {why}")
        timings = race(steps, EXPLICIT, args.rounds, warmup=2)
        size = (
            f"{args.heads} heads of {args.head_dim}, {args.sequence} positions, {args.dtype}, {device.type}"
        )
        report(f"{name}: {size}", timings, EXPLICIT, args.out)


if __name__ == "__main__":
    main()
