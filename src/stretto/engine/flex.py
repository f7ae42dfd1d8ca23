"""Causal attention by torch's FlexAttention (Dong et al. 2024, arXiv 2412.05496): one compiled kernel for
scores with a window, a soft cap, sinks and documents, which skips blocks of keys that no query of a block
attends to.

It was not run on a GPU in development. Before its first use on a device, a trial therefore compares its
forward and backward with the formula (`NaiveAttention`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from stretto.engine import compiler
from stretto.engine.device import compute_capability
from stretto.engine.documents import DocumentStarts
from stretto.engine.kernels import NaiveAttention, ScoreOptions, add_sinks, sinks_gradient
from stretto.errors import StrettoError
from stretto.job.devices import HOST

BLOCK = 128  # queries and keys of a block
_GRAPHS = 64  # maximum number of graphs in a process, for all shapes and kinds of scores
_TRIED = 2 * BLOCK + 40  # positions of the trial
_CLOSE = 0.02  # tolerance relative to the largest element, for rounding of 16-bit types


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: ScoreOptions,
    *,
    sinks: Tensor | None = None,
    documents: DocumentStarts | None = None,
) -> Tensor:
    """Attend with q [b, heads, n, d] to k [b, kv_heads, n, d] and v [b, kv_heads, n, dv], like
    `CausalAttention`; return [b, heads, n, dv] in the memory layout of q.

    Args:
        sinks: [heads], an additional score in each softmax, whose value vector is zero.
        documents: documents of the samples; by default a sample is one document.
    """
    y, aux = _compiled()(
        q,
        k,
        v,
        score_mod=None if scores.softcap is None else _capped(scores.softcap),
        block_mask=block_mask(q.shape[2], scores.window, documents, q.device),
        scale=scores.scale,
        enable_gqa=k.shape[1] < q.shape[1],
        return_aux=AuxRequest(lse=True),
        kernel_options=_kernel_options(q),
    )
    if sinks is None:
        return cast(Tensor, y)
    remaining = torch.sigmoid(
        aux.lse - sinks.to(aux.lse.dtype).view(-1, 1)
    )  # what the sink leaves to the keys
    return cast(Tensor, y * remaining.unsqueeze(-1).to(y.dtype))


def _kernel_options(q: Tensor) -> dict[str, int] | None:
    """Return options of the kernels for queries such as q; None for torch's own.

    Torch runs most backwards in 16 bits, of 64 features and more, and float32 forwards of 128 in four warps,
    whose registers then spill up to 15 kB per thread; with eight warps a few hundred bytes at most
    (docs/evidence/gpu.md).
    """
    if compute_capability(q.device) < (8, 0):
        return None
    if q.dtype.itemsize == 2:
        return {"bwd_num_warps": 8} if q.shape[-1] >= 64 else None
    return {"fwd_num_warps": 8} if q.shape[-1] == 128 else None


def check_trains_on_host() -> None:
    """Raise StrettoError if FlexAttention does not train on the CPU.

    Accelerators are checked by the ranks, since a process that has used one cannot fork others.
    """
    host = torch.device(HOST)
    if (reason := refusal(host, torch.float32, group=1, d=16, dv=16)) is not None:
        raise does_not_train(host, reason)


def does_not_train(device: torch.device, reason: str) -> StrettoError:
    """Return the error for a configured FlexAttention on a device that refuses it."""
    return StrettoError(
        f"train.attention is flex, which does not train on {device.type} with torch {torch.__version__}: "
        f"{reason}",
        hint="train.attention=auto uses it on devices on which it trains",
    )


@lru_cache(maxsize=64)
def refusal(device: torch.device, dtype: torch.dtype, group: int, d: int, dv: int) -> str | None:
    """Return why FlexAttention does not train on the device, as the end of a sentence; None if it does.

    Args:
        group: query heads per key head.
        d, dv: widths of keys and of values.
    """
    case = _Trial(device, dtype, (group, d, dv))
    try:
        with torch.inference_mode(False), torch.enable_grad():
            q, k, v = case.leaves[:3]
            with (
                warnings.catch_warnings()
            ):  # if torch knows that it does not train, it raises before compiling
                warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
                flex_attention(q.detach().requires_grad_(), k, v, enable_gqa=True)
            with torch.autocast(device.type, enabled=False):
                results = case.results()
    except (NotImplementedError, ValueError) as error:  # torch rejects the device
        return _first_sentence(error)
    except Exception as error:  # any error of the compiler
        return _warn(f"{type(error).__name__}: {_first_sentence(error)}")
    for name, result, wanted in zip(
        ("output", "dq", "dk", "dv", "dsinks"), results, case.wanted(), strict=True
    ):
        if not float((result - wanted).abs().max()) <= _CLOSE * float(wanted.abs().max()):
            return _warn(f"its {name} is not that of the formula")
    return None


def _warn(refusal: str) -> str:
    """Warn of a failed trial, and return the reason."""
    warnings.warn(f"attention is written out, since FlexAttention fails its trial: {refusal}", stacklevel=4)
    return refusal


def _first_sentence(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    from torch._dynamo import config  # takes seconds to import

    config.recompile_limit = max(config.recompile_limit, _GRAPHS)
    compiler.one_thread(compiler.BACKEND)
    return torch.compile(flex_attention, backend=compiler.BACKEND, fullgraph=True, dynamic=False)


@lru_cache(maxsize=16)
def _capped(cap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def block_mask(
    n: int, window: int | None, documents: DocumentStarts | None, device: torch.device
) -> BlockMask:
    """Return the mask of n queries, by elements and by blocks.

    It is created once for all layers with this window, or with documents once per microbatch.
    """
    if documents is None:
        return _without_documents(n, None if window is None or window >= n else window, device)

    def make() -> BlockMask:
        first = documents.first_keys(n, window, device)

        def visible(b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) & (j >= first[b, i])

        return _blocks(first, visible)

    return documents.cached(("blocks", n, window, device), make)


@lru_cache(maxsize=16)
def _without_documents(n: int, window: int | None, device: torch.device) -> BlockMask:
    def causal(b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i

    farthest = n if window is None else window

    def inside(b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < farthest)

    with torch.inference_mode(False), torch.no_grad():
        first = torch.arange(n, device=device).sub_(farthest - 1).clamp_(min=0).unsqueeze(0)
        return _blocks(first, causal if window is None else inside)


def _blocks(first: Tensor, visible: Callable[..., Tensor]) -> BlockMask:
    """Return the mask of queries that attend to the keys from `first` to their own position.

    Torch's function for general masks would allocate n x n elements.

    Args:
        first: [b, n], not decreasing along n.
        visible: the same mask as a function of a pair, for FlexAttention.
    """
    n = first.shape[1]
    start = torch.arange(0, n, BLOCK, device=first.device)
    end = (start + BLOCK).clamp_(max=n) - 1
    first_query, last_query = start.unsqueeze(1), end.unsqueeze(1)
    partial = (start <= last_query) & (end >= first[:, start].unsqueeze(2))
    complete = (start + BLOCK - 1 <= first_query) & (start >= first[:, end].unsqueeze(2))
    complete &= first_query + BLOCK <= n  # torch treats a block that exceeds n as partial
    return BlockMask.from_kv_blocks(
        *_listed(partial & ~complete),
        *_listed(complete),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(n, n),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of selected blocks per row, int32 [b, 1, rows], and all columns, the selected
    first.
    """
    columns = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).unsqueeze(1), columns.to(torch.int32).unsqueeze(1)


class _Trial:
    """A small case with a window, a cap, sinks and documents."""

    def __init__(self, device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
        group, d, dv = sizes
        random = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(device, dtype)

        n = _TRIED
        self.scores = ScoreOptions(d**-0.5, 2.0, BLOCK + 9)
        self.leaves = [draw(1, 2 * group, n, d), draw(1, 2, n, d), draw(1, 2, n, dv), draw(2 * group)]
        self.dy = draw(1, 2 * group, n, dv)
        begins = torch.zeros(1, n, dtype=torch.int64)
        begins[:, BLOCK + 20 :] = BLOCK + 20
        self.documents = DocumentStarts(begins)

    def results(self) -> list[Tensor]:
        """Return output and gradients by FlexAttention."""
        q, k, v, sinks = (t.detach().requires_grad_() for t in self.leaves)
        y = attend(q, k, v, self.scores, sinks=sinks, documents=self.documents)
        return [y.detach(), *torch.autograd.grad(y, [q, k, v, sinks], self.dy)]

    def wanted(self) -> list[Tensor]:
        """Return output and gradients by the formula."""
        q, k, v, sinks = self.leaves
        kernel, window = NaiveAttention(self.scores), self.scores.window
        y, lse = self.documents.forward(kernel, q, k, v, window)
        y, lse = add_sinks(y, lse, sinks)
        grads = self.documents.backward(kernel, dy=self.dy, q=q, k=k, v=v, y=y, lse=lse, window=window)
        return [y, *grads, sinks_gradient(self.dy, y, lse, sinks)]
