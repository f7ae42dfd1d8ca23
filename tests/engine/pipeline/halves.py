"""A backward in two halves against a whole one, and modules of all sorts to try it on."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from stretto.engine.pipeline.walk import GraphSplit

Tensors = tuple[Tensor, ...]


@contextmanager
def double() -> Generator[None]:
    """Everything in float64, from one seed."""
    torch.manual_seed(0)
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(was)


def tuple_of(y: Any) -> Tensors:
    return y if isinstance(y, tuple) else (y,)


def full_backward(module: nn.Module, inputs: Tensors, gradients: Sequence[Tensor | None]) -> None:
    """A plain backward."""
    arguments = [(y, dy) for y, dy in zip(tuple_of(module(*inputs)), gradients, strict=True)]
    arguments = [(y, dy) for y, dy in arguments if y.requires_grad and dy is not None]
    torch.autograd.backward([y for y, _ in arguments], [dy for _, dy in arguments])


def halves(
    module: nn.Module, inputs: Tensors, gradients: Sequence[Tensor | None], edges: bool = True
) -> None:
    """I, then W."""
    split = GraphSplit(module.parameters())
    ys = tuple_of(module(*inputs))
    live = [(y, dy) for y, dy in zip(ys, gradients, strict=True) if y.requires_grad]
    roots = [get_gradient_edge(y) if edges else y for y, _ in live]
    rest = split.input_gradients(roots, [dy for _, dy in live], [x for x in inputs if x.requires_grad])
    split.weight_gradients(rest)


def leaves_like(inputs: Sequence[Tensor]) -> Tensors:
    return tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)


def gradients_for(module: nn.Module, inputs: Tensors) -> list[Tensor]:
    return [torch.randn_like(y) for y in tuple_of(module(*inputs))]


def fired_by(module: nn.Module) -> Counter[str]:
    """Counts what post-accumulate hooks see."""
    seen = Counter[str]()
    for name, p in module.named_parameters():
        if p.requires_grad:

            def note(_: Tensor, name: str = name) -> None:
                seen[name] += 1

            p.register_post_accumulate_grad_hook(note)
    return seen


def flat_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Gradients as views of one buffer that holds something already."""
    learning = {n: p for n, p in module.named_parameters() if p.requires_grad}
    flat, at = torch.linspace(-1, 1, sum(p.numel() for p in learning.values())), 0
    views = dict[str, Tensor]()
    for name, p in learning.items():
        views[name] = p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    return views


def check_equal(module: nn.Module, *inputs: Tensor) -> None:
    """Two microbatches in halves against the same in whole backwards: gradients, buffers and hooks."""
    other = copy.deepcopy(module)
    gradients = gradients_for(copy.deepcopy(module), inputs)
    results = list[tuple[list[Any], dict[str, Tensor], Counter[str]]]()
    for m, backward in ((module, full_backward), (other, halves)):
        views, seen, xs = flat_gradients(m), fired_by(m), leaves_like(inputs)
        torch.manual_seed(1)
        for at in range(2):
            backward(m, xs, [dy * (1 + at) for dy in gradients])
        for name, p in m.named_parameters():
            assert not p.requires_grad or p.grad is views[name], f"{name}.grad was replaced"
        results.append(([x.grad for x in xs], views, seen))
    (dxs, plain, fired), (other_dxs, split, other_fired) = results
    for at, (a, b) in enumerate(zip(dxs, other_dxs, strict=True)):
        assert (a is None) == (b is None), f"input {at}"
        if a is not None:
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
    for name, view in plain.items():
        torch.testing.assert_close(split[name], view, rtol=1e-12, atol=1e-12, msg=name)
    assert other_fired == fired


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


# ---------------------------------------------------------------- modules of all sorts


class Of(nn.Module):
    """A module made of a function over parts."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


class Scaled(torch.autograd.Function):
    """x * w, which counts its backwards."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, Tensor]:
        Scaled.calls += 1
        x, w = ctx.saved_tensors
        return dys[0] * w, (dys[0] * x).sum(0)


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)


def in_place(m: Any, t: Tensor) -> Tensor:
    h = m.a(t).clone()
    h[:, 0:2] *= m.w
    h[:, 2:4].add_(m.b(h[:, 0:2].clone()))
    return h.relu_()


def untouched(m: Any, t: Tensor) -> tuple[Tensor, Tensor]:
    return m.a(t), m.b(torch.ones(3, 4)) + m.w


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def lin(before: int = 4, after: int = 4) -> nn.Linear:
    return nn.Linear(before, after)


def shared_weight() -> nn.Module:
    m = nn.Sequential(lin(), nn.Tanh(), lin())
    m[2].weight = m[0].weight
    return m


def tied_ends() -> nn.Module:
    """A table that is looked up, added on the way, and used as the head."""
    table, head = nn.Embedding(7, 4), lin(4, 7)
    head.weight = table.weight
    ids = torch.tensor([1, 3, 3])
    return Of(lambda m, t: m.head(F.gelu(m.a(t + m.table(ids)))), table=table, head=head, a=lin())


CASES: dict[str, Callable[[], tuple[nn.Module, Tensors]]] = {
    "linear": lambda: (lin(), (x(3, 4),)),
    "linear of three dimensions": lambda: (nn.Sequential(lin(), lin(4, 2)), (x(2, 3, 4),)),
    "no bias": lambda: (nn.Linear(4, 4, bias=False), (x(3, 4),)),
    "encoder layer": lambda: (encoder_layer(dropout=0.1), (x(2, 5, 8),)),
    "encoder layer, norm first": lambda: (encoder_layer(norm_first=True, dropout=0.0), (x(2, 5, 8),)),
    "decoder layer": lambda: (
        nn.TransformerDecoderLayer(8, 2, 16, batch_first=True),
        (x(2, 5, 8), x(2, 3, 8)),
    ),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 2, groups=1)),
        (x(2, 2, 6, 6),),
    ),
    "recurrent": lambda: (Of(lambda m, t: m.r(t)[0], r=nn.GRU(4, 4, batch_first=True)), (x(2, 3, 4),)),
    "bilinear": lambda: (nn.Bilinear(3, 4, 5, bias=True), (x(2, 3), x(2, 4))),
    "norms": lambda: (nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4), nn.PReLU()), (x(3, 4),)),
    "weight norm": lambda: (
        nn.Sequential(
            nn.utils.parametrizations.weight_norm(lin()), nn.utils.parametrizations.spectral_norm(lin())
        ),
        (x(3, 4),),
    ),
    "shared weight": lambda: (shared_weight(), (x(3, 4),)),
    "a layer twice": lambda: ((lambda a: nn.Sequential(a, nn.Tanh(), a, a))(lin()), (x(3, 4),)),
    "a convolution twice": lambda: ((lambda a: nn.Sequential(a, a))(nn.Conv1d(2, 2, 3)), (x(2, 2, 8),)),
    "a norm twice": lambda: (
        (lambda a: nn.Sequential(a, lin(), a, lin()))(nn.LayerNorm(4)),
        (x(3, 4),),
    ),
    "tied table and head": lambda: (tied_ends(), (x(3, 4),)),
    "weight and its square": lambda: (
        Of(lambda m, t: t * m.w * m.w.exp() + m.w, w=torch.randn(4)),
        (x(3, 4),),
    ),
    "one product of weights in two places": lambda: (
        Of(
            lambda m, t: (lambda p: m.a(t @ p) @ p)(m.u @ m.v),
            u=torch.randn(4, 2),
            v=torch.randn(2, 4),
            a=lin(),
        ),
        (x(3, 4),),
    ),
    "a weight direct and through an operation": lambda: (
        Of(lambda m, t: F.linear(F.linear(t, m.w.t()), m.w) * m.w[0], w=torch.randn(4, 4)),
        (x(3, 4),),
    ),
    "own bias, shared weight": lambda: (
        Of(lambda m, t: m.a(F.linear(t, m.a.weight, m.b)), a=lin(), b=torch.randn(4)),
        (x(3, 4),),
    ),
    "shared bias, own weight": lambda: (
        Of(lambda m, t: F.linear(m.a(t), m.w, m.a.bias), a=lin(), w=torch.randn(4, 4)),
        (x(3, 4),),
    ),
    "a node with weights of all sorts": lambda: (
        Of(
            lambda m, t: torch.stack([m.a(t) * m.v.exp(), m.w, m.w.exp(), m.v.exp()]),
            a=lin(),
            w=torch.randn(3, 4),
            v=torch.randn(3, 4),
        ),
        (x(3, 4),),
    ),
    "several inputs and outputs": lambda: (
        Of(lambda m, s, t: (m.a(s) * m.b(t), m.a(t), t), a=lin(), b=lin()),
        (x(3, 4), x(3, 4)),
    ),
    "an input that is not used": lambda: (Of(lambda m, s, t: m.a(s), a=lin()), (x(3, 4), x(3, 4))),
    "an output without the input": lambda: (
        Of(untouched, a=lin(), b=lin(), w=torch.randn(4)),
        (x(3, 4),),
    ),
    "an output without the input, shared": lambda: (
        Of(lambda m, t: (m.a(t), m.a.weight.t() @ m.a.weight, m.a.bias), a=lin()),
        (x(3, 4),),
    ),
    "output and what comes of it": lambda: (
        Of(lambda m, t: (lambda p: (p, m.a(t) * p, p.exp()))(m.w * 2), a=lin(), w=torch.randn(4)),
        (x(3, 4),),
    ),
    "nothing needs the input": lambda: (
        Of(lambda m, t: m.a(torch.ones(3, 4)) + t.detach(), a=lin()),
        (x(3, 4),),
    ),
    "first stage": lambda: (
        nn.Sequential(nn.Embedding(7, 4), lin(), nn.Tanh()),
        (torch.tensor([[1, 2], [3, 1]]),),
    ),
    "input of whole numbers beside": lambda: (
        Of(lambda m, t, ids: m.a(t) + m.e(ids), a=lin(), e=nn.Embedding(7, 4)),
        (x(2, 4), torch.tensor([1, 2])),
    ),
    "hands its input on": lambda: (Of(lambda m, t: (t, m.a(t)), a=lin()), (x(3, 4),)),
    "no weights": lambda: (nn.Sequential(nn.GELU(), nn.Softmax(-1)), (x(3, 4),)),
    "frozen weights": lambda: (
        frozen(nn.Sequential(lin(), nn.GELU(), lin()), "0.weight", "2.weight", "2.bias"),
        (x(3, 4),),
    ),
    "all frozen": lambda: (frozen(lin(), "weight", "bias"), (x(3, 4),)),
    "in place and views": lambda: (
        Of(in_place, a=lin(), b=lin(2, 2), w=torch.randn(2)),
        (x(3, 4),),
    ),
    "pieces": lambda: (
        Of(lambda m, t: torch.cat([m.a(p) for p in m.a(t).chunk(2, 0)], 0).split(2, -1), a=lin()),
        (x(4, 4),),
    ),
    "a function of its own": lambda: (
        Of(lambda m, t: m.a(Scaled.apply(m.a(t), m.w)), a=lin(), w=torch.randn(4)),
        (x(3, 4),),
    ),
    "checkpoint without re-entry": lambda: (
        Of(
            lambda m, t: m.a(checkpoint(m.b, t, use_reentrant=False)),
            a=lin(),
            b=nn.Sequential(lin(), nn.GELU()),
        ),
        (x(3, 4),),
    ),
    "checkpoint with re-entry": lambda: (
        Of(
            lambda m, t: m.a(checkpoint(m.b, t, use_reentrant=True)),
            a=lin(),
            b=nn.Sequential(lin(), nn.GELU()),
        ),
        (x(3, 4),),
    ),
}
