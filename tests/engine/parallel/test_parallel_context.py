"""Ring and all-to-all attention on real ranks: outputs and gradients are those of the plain core on the whole
sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from closeness import check_close
from ranks import on_ranks
from stretto.engine.documents import DocumentStarts
from stretto.engine.models.causal import CausalAttention
from stretto.engine.parallel.context.style import ContextAttention
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.styles import SplitDropout
from stretto.engine.parallel.tensor.dropout import DropoutKeys, KeyedDropout
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.layout.layout import Layout


@dataclass(frozen=True)
class Case:
    method: str
    length: int
    heads: int = 4
    kv_heads: int = 4
    batch: int = 1
    p: float = 0.0
    dtype: torch.dtype = torch.float64
    explicit: bool = False
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    dv: int = 8  # features of a value; a key has 8
    dropout_first: bool = False  # which of the two styles swaps first
    documents: tuple[int, ...] = ()  # where they begin in the first sample; in each further one a token later

    @property
    def tolerance(self) -> float:
        return {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[self.dtype]


def core_of(case: Case) -> CausalAttention:
    core = CausalAttention(0.0, window=case.window, softcap=case.softcap, scale=case.scale)
    if case.p:
        keys = DropoutKeys(3)
        keys.samples = range(11, 11 + case.batch)
        core.drop = KeyedDropout(case.p, "core", keys)
    core.explicit = case.explicit
    if case.documents:
        edges = torch.zeros(case.batch, case.length, dtype=torch.int64)
        for row in range(case.batch):
            firsts = [first + row for first in case.documents if first + row < case.length]
            edges[row, firsts] = torch.tensor(firsts)
        core.packing.documents = DocumentStarts(edges.cummax(1).values)
    return core


def swapped(case: Case, mesh: Mesh) -> nn.Module:
    """The core as a plan makes it, whichever of the styles comes first."""
    core, style = core_of(case), ContextAttention(case.method, case.length)
    drop = SplitDropout(heads=(1, case.heads))
    if case.dropout_first:
        core.drop = drop.replace_module(core.get_submodule("drop"), mesh)
        return style.replace_module(core, mesh)
    module = style.replace_module(core, mesh)
    module.drop = drop.replace_module(module.get_submodule("drop"), mesh)
    return module


def inputs(case: Case) -> list[Tensor]:
    """q, k, v and the output's gradient as [b, heads, s, d] views of what linears give, whole."""
    torch.manual_seed(case.length + case.batch)
    shapes = ((case.heads, 8), (case.kv_heads, 8), (case.kv_heads, case.dv), (case.heads, case.dv))
    return [
        torch.randn(case.batch, case.length, h, d, dtype=torch.float64).to(case.dtype).transpose(1, 2)
        for h, d in shapes
    ]


def share(x: Tensor, split: SequenceSplit, mesh: Mesh, fill: float) -> Tensor:
    """This rank's heads and positions. A key head of which there is none for each rank is held by several."""
    tp, at = mesh.size("tp"), mesh.index("tp")
    heads = x.chunk(tp, 1)[at] if x.shape[1] >= tp else x[:, at * x.shape[1] // tp, None]
    return split.take(heads, 2, fill).clone()


def cancelling(case: Case, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> dict[str, float]:
    """The size of what cancels in the gradients of q and k where each query sees a single key.

    The softmax of one score is 1 whatever the score, so the score's gradient, dy v - dy y, is zero but for
    rounding; each of the two terms is at most |dy| |v|.
    """
    if case.length > 1 and case.window != 1 and len(case.documents) < case.length:
        return {}
    dy_size, v_size, q_size, k_size = (float(x.detach().norm(dim=-1).max()) for x in (dy, v, q, k))
    score = 2 * dy_size * v_size / q.shape[-1] ** 0.5
    return {"q": score * k_size, "k": score * q_size * case.heads / case.kv_heads}


def check(case: Case, mesh: Mesh, padding: bool = True) -> None:
    q, k, v, dy = (x.requires_grad_() for x in inputs(case))
    sinks = torch.linspace(-1.0, 2.0, case.heads, dtype=case.dtype).requires_grad_() if case.sinks else None
    plain = core_of(case)(q, k, v, sinks)
    split = SequenceSplit.of(mesh, case.length, padding)
    module = swapped(case, mesh)
    # what stands in padding is of no consequence, as long as its output gets no gradient
    local = [share(x.detach(), split, mesh, 7.0).requires_grad_() for x in (q, k, v)]
    tp, at = mesh.size("tp"), mesh.index("tp")
    my_sinks = None if sinks is None else sinks.detach().chunk(tp)[at].clone().requires_grad_()
    with torch.no_grad():
        first = module(*local, my_sinks)  # as recomputation does it
    output = module(*local, my_sinks)
    assert torch.equal(output, first), case
    assert output.dtype == case.dtype
    assert output.isfinite().all(), case
    output.backward(share(dy.detach(), split, mesh, 0.0))
    grads = torch.autograd.grad(plain, [q, k, v, *([] if sinks is None else [sinks])], dy)
    real = split.positions < case.length
    check_close(
        output * real[:, None], share(plain.detach(), split, mesh, 0.0), case.tolerance, f"output of {case}"
    )
    terms = cancelling(case, q, k, v, dy)
    shared = case.kv_heads < tp
    for name, x, full in zip("qkv", local, grads[:3], strict=True):
        assert x.grad is not None
        assert not x.grad[:, :, ~real].any(), f"padding of {name} has a gradient: {case}"
        if shared and name != "q":  # a part of the gradient each
            torch.distributed.all_reduce(x.grad, group=mesh.split("tp", tp // case.kv_heads))
        wanted = share(full, split, mesh, 0.0)
        assert x.grad.dtype == wanted.dtype
        check_close(
            x.grad, wanted, case.tolerance, f"gradient of {name} of {case}", terms=terms.get(name, 0.0)
        )
    if my_sinks is not None:  # each rank has the part of its queries, or of its heads
        assert my_sinks.grad is not None
        torch.distributed.all_reduce(my_sinks.grad, group=mesh.group("cp"))
        check_close(my_sinks.grad, grads[3].chunk(tp)[at], case.tolerance, f"gradient of sinks of {case}")


def cases(cp: int, tp: int) -> Iterator[Case]:
    for method in ("ring", "ulysses"):
        for length, kv_heads, batch in product((4 * cp * tp, 4 * cp + 3, 1), (4, 2, 1), (1, 2)):
            if method == "ulysses" and 4 // tp % cp:
                continue
            yield Case(method, length, 4, kv_heads, batch)
        case = Case(method, 6 * cp + 1, 4, 2, 2, p=0.4)
        if method == "ulysses" and 4 // tp % cp:
            case = replace(case, heads=4 * cp * tp)
        yield case
        yield replace(case, dropout_first=True, kv_heads=case.heads)
        yield replace(case, p=0.0, explicit=True)
        for dtype in (torch.float32, torch.bfloat16):
            yield replace(case, p=0.0, dtype=dtype, length=96)
            yield replace(case, dtype=dtype, length=96)


def family_cases(cp: int, tp: int) -> Iterator[Case]:
    """What families add: windows below, at and above a rank's half of positions, its positions, and the
    sequence; soft-capped scores, scales, sinks, and values narrower than keys.
    """
    half, length = 5, 2 * cp * 5
    ulysses = ("ulysses",) if 4 // tp % cp == 0 else ()
    for method in ("ring", *ulysses):
        for window in (1, half - 1, half, half + 1, 2 * half - 1, 2 * half + 1, length - 2, length, 10**6):
            yield Case(method, length - 3, 4, 2, 2, window=window, sinks=window % 2 == 0)
        yield Case(method, length - 1, 4, 1, window=7, softcap=2.0, scale=0.4)
        yield Case(method, length, 4, 2, softcap=3.0, sinks=True)
        yield Case(method, length - 3, 4, 4, 2, dv=6, scale=0.3)
        yield Case(method, length - 3, 4, 2, 2, dv=12, window=half, sinks=True, softcap=5.0)
        yield Case(method, length - 3, 4, 2, window=half, p=0.4)
        yield Case(method, length - 3, 4, 2, window=half + 2, p=0.4, sinks=True, softcap=2.0)
        yield Case(method, length - 3, 4, 2, window=half + 2, explicit=True, sinks=True)
        for dtype in (torch.float32, torch.bfloat16):
            yield Case(method, 96, 4, 2, window=17, sinks=True, dtype=dtype)


def packed_cases(cp: int, tp: int) -> Iterator[Case]:
    """Samples of several documents: edges at those of ranks and halves and beside them, documents of one
    token, and of nearly the whole sample.
    """
    half, length = 5, 2 * cp * 5
    every = tuple(range(length))
    ulysses = ("ulysses",) if 4 // tp % cp == 0 else ()
    for method in ("ring", *ulysses):
        for documents in ((half,), (half - 1, half + 1), (length // 2,), (1, length - 5), every[::3], every):
            yield Case(method, length - 3, 4, 2, 2, documents=documents)
        mixed = Case(method, length - 1, 4, 2, 3, documents=(3, half, half + 1, length // 2 + 2))
        yield replace(mixed, length=length)
        yield replace(mixed, window=4, sinks=True)
        yield replace(mixed, window=half + 2, softcap=2.0, scale=0.4)
        yield replace(mixed, dv=6)
        yield replace(mixed, p=0.4)
        yield replace(mixed, p=0.4, window=half + 2, sinks=True)
        yield replace(mixed, explicit=True, sinks=True)
        for dtype in (torch.float32, torch.bfloat16):
            yield Case(method, 96, 4, 2, 2, dtype=dtype, documents=(7, 40, 48, 90))


def every_case(tp: int, cp: int, step: int) -> int:
    mesh = Mesh(Layout(tp=tp, cp=cp))
    done = 0
    for case in [*cases(cp, tp), *family_cases(cp, tp), *packed_cases(cp, tp)][::step]:
        check(case, mesh)
        done += 1
    # tiles of explicit attention that do not divide, longer than one
    check(Case("ring", 2 * cp * 300 + 5, 1 * tp, 1 * tp, p=0.2), mesh)
    mesh.close()
    return done


@pytest.mark.parametrize(
    ("tp", "cp", "step"),
    [
        (1, 3, 3),
        pytest.param(1, 2, 3, marks=pytest.mark.slow),
        *(pytest.param(*sizes, 1, marks=pytest.mark.slow) for sizes in ((1, 2), (1, 3), (1, 4), (2, 2))),
    ],
)
def test_attention_of_split_sequences_is_that_of_whole_ones(tp: int, cp: int, step: int) -> None:
    """Every case of all, or every third, which has both kinds of attention in all three lists."""
    assert min(on_ranks(tp * cp, every_case, tp, cp, step)) > 20


def other_orders(case: Case) -> list[Tensor]:
    """What a CPU that sums in another order makes of the gradients of q and k of one token, in exact
    arithmetic zero.
    """
    q, k, v, dy = inputs(case)
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (k, v))
    products = dy * v
    there, back = (x.cumsum(-1)[..., -1:] for x in (products, products.flip(-1)))
    dscore = (there - back) / q.shape[-1] ** 0.5
    dk = (dscore * q).unflatten(1, (case.kv_heads, case.heads // case.kv_heads)).sum(2)
    return [dscore * k, dk]


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_gradients_of_one_token_are_compared_to_what_cancels_in_them(kv_heads: int) -> None:
    """Rounding on either side passes, whatever the other's; errors far below the size of the terms fail."""
    noises = list[float]()
    for batch in range(1, 30):
        case = Case("ring", 1, 4, kv_heads, batch)
        q, k, v, dy = inputs(case)
        terms = cancelling(case, q, k, v, dy)
        for name, noise in zip("qk", other_orders(case), strict=True):
            size = terms[name]
            noises.append(float(noise.abs().max()) / size)
            zero = torch.zeros_like(noise)
            for computed, plain in ((noise, zero), (zero, noise), (noise, 0.1 * noise), (-noise, noise)):
                check_close(computed, plain, case.tolerance, name, terms=size)
            for error in (1e-6 * size, 1e-12 * size):
                wrong = noise.clone()
                wrong[0, 0, 0, 0] += error
                with pytest.raises(AssertionError, match="off"):
                    check_close(wrong, noise, case.tolerance, name, terms=size)
    assert max(noises) > 1e-17, "the other order was to round otherwise"


def test_gradients_that_do_not_cancel_are_compared_to_themselves() -> None:
    case = Case("ring", 2)
    assert not cancelling(case, *inputs(case))
    plain = torch.tensor([1e-3, 1.0], dtype=torch.float64)
    check_close(plain + 0.9e-12, plain, 1e-12, "close")
    with pytest.raises(AssertionError, match="off"):
        check_close(plain + 1.1e-12, plain, 1e-12, "far", terms=1.0)
    with pytest.raises(AssertionError, match="off"):
        check_close(plain * float("nan"), plain, 1e-12, "not a number", terms=1.0)
