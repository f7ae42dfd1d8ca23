"""The backward of any module in two halves: they equal the whole, and each does its own work only."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from stretto.pipeline.walk import GraphSplit, _Graph

Tensors = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(was)


def tuple_of(y: Any) -> Tensors:
    return y if isinstance(y, tuple) else (y,)


def whole(module: nn.Module, inputs: Tensors, gradients: Sequence[Tensor | None]) -> None:
    """A plain backward."""
    given = [(y, dy) for y, dy in zip(tuple_of(module(*inputs)), gradients, strict=True)]
    given = [(y, dy) for y, dy in given if y.requires_grad and dy is not None]
    torch.autograd.backward([y for y, _ in given], [dy for _, dy in given])


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
    for m, backward in ((module, whole), (other, halves)):
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

    def forward(self, *given: Tensor) -> Any:
        return self.function(self, *given)


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


@pytest.mark.parametrize("name", CASES)
def test_halves_are_the_whole(name: str) -> None:
    module, inputs = CASES[name]()
    check_equal(module, *inputs)


# ---------------------------------------------------------------- what each half does


class Products(TorchDispatchMode):
    """Counts matrix products and the parts of a convolution's backward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            self.count += 1
        elif func is torch.ops.aten.convolution_backward.default:
            self.count += sum(args[-1][:2])  # of the output mask: input, weight, bias
        return func(*args, **(kwargs or {}))


def counted(work: Callable[[], Any]) -> int:
    with Products() as products:
        work()
    return products.count


@pytest.mark.parametrize(
    ("make", "weights"),
    [
        (lambda: (nn.Sequential(lin(), nn.GELU(), lin()), x(3, 4)), 2),
        (lambda: (encoder_layer(), x(2, 5, 8)), 4),  # projections to q, k, v at once, from them, and the MLP
        (lambda: (nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Conv1d(3, 2, 2)), x(2, 2, 8)), 2),
        (lambda: (shared_weight(), x(3, 4)), 2),
    ],
    ids=["linear", "attention", "convolution", "shared"],
)
def test_each_product_is_made_once_and_weights_only_in_w(
    make: Callable[[], tuple[nn.Module, Tensor]], weights: int
) -> None:
    module, t = make()
    split = GraphSplit(module.parameters())
    dy = torch.randn_like(module(t))
    plain = counted(lambda: module(t).backward(dy)) - counted(lambda: module(t))
    t.grad = None
    module.zero_grad(set_to_none=True)
    seen = fired_by(module)
    root, rests = get_gradient_edge(module(t)), list[Any]()
    first = counted(lambda: rests.append(split.input_gradients([root], [dy], [t])))
    assert all(p.grad is None for p in module.parameters())
    assert not seen
    second = counted(lambda: split.weight_gradients(rests.pop()))
    assert (first, second) == (plain - weights, weights)
    assert all(isinstance(p.grad, Tensor) for p in module.parameters())


def test_no_node_of_weights_runs_in_i_and_none_twice_in_w() -> None:
    module, t = encoder_layer(), x(2, 5, 8)
    y, dy = module(t), torch.randn(2, 5, 8)
    graph = _Graph([get_gradient_edge(y)], [get_gradient_edge(t).node])
    ran, weight_outputs = Counter[Any](), Counter[Any]()
    for node in graph.edges:

        def note(outputs: Tensors, _: Tensors, node: Any = node) -> None:
            ran[node] += 1
            for dw, (nearer, _slot) in zip(outputs, node.next_functions, strict=False):
                weight_outputs[node] += dw is not None and nearer is not None and nearer not in graph.passed  # pyright: ignore[reportUnnecessaryComparison]

        if node not in graph.passed or any(n and n not in graph.passed for n, _ in graph.edges[node]):
            node.register_hook(note)
    split = GraphSplit(module.parameters())
    rest = split.input_gradients([get_gradient_edge(y)], [dy], [t])
    assert all(node in graph.passed for node in ran)
    assert not +weight_outputs
    ran.clear()
    split.weight_gradients(rest)
    assert set(ran.values()) == {1}
    assert len(ran) >= 12 + 6  # every parameter's, and the nodes that they branch off from


def test_first_stage_leaves_all_to_w() -> None:
    module = nn.Sequential(nn.Embedding(7, 4), lin())
    y = module(torch.tensor([1, 2]))
    split = GraphSplit(module.parameters())
    assert counted(lambda: split.input_gradients([y], [torch.ones_like(y)], [])) == 0
    assert all(p.grad is None for p in module.parameters())


def test_a_loss_needs_no_gradient() -> None:
    module, t = nn.Sequential(lin(), lin()), x(3, 4)
    (module(t) ** 2).sum().backward()
    dx, plain = t.grad, [p.grad for p in module.parameters()]
    t.grad = None
    module.zero_grad(set_to_none=True)
    split = GraphSplit(module.parameters())
    split.weight_gradients(split.input_gradients([(module(t) ** 2).sum()], [None], [t]))
    torch.testing.assert_close([t.grad, *(p.grad for p in module.parameters())], [dx, *plain])


def test_outputs_that_nobody_learns_from() -> None:
    module, t = Of(lambda m, t: (m.a(t), m.b(t)), a=lin(), b=lin()), x(3, 4)
    a, b = module(t)
    split = GraphSplit(module.parameters())
    roots = [get_gradient_edge(a), get_gradient_edge(b)]
    split.weight_gradients(split.input_gradients(roots, [torch.ones_like(a), None], [t]))
    assert module.get_parameter("a.weight").grad is not None
    assert module.get_parameter("b.weight").grad is None
    split.weight_gradients(split.input_gradients(roots, [None, None], [t]))


@pytest.mark.parametrize(
    "name", ["encoder layer", "shared weight", "a layer twice", "first stage", "all frozen"]
)
def test_the_graph_is_freed_without_the_collector(name: str) -> None:
    module, inputs = CASES[name]()
    split, alive = GraphSplit(module.parameters()), list[weakref.ref[Tensor]]()

    def pack(t: Tensor) -> Tensor:
        t = t.detach()
        alive.append(weakref.ref(t))
        return t

    gc.collect()
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = module(*inputs)
        given = torch.randn_like(y)
        assert alive
        assert all(ref() is not None for ref in alive)
        rest = split.input_gradients([get_gradient_edge(y)], [given], [t for t in inputs if t.requires_grad])
        del y
        split.weight_gradients(rest)
        assert not [ref for ref in alive if ref() is not None]
    finally:
        gc.enable()


def test_what_is_above_the_weights_is_freed_by_i() -> None:
    module, t, alive = lin(), x(3, 4), list[weakref.ref[Tensor]]()

    def pack(t: Tensor) -> Tensor:
        t = t.detach()
        alive.append(weakref.ref(t))
        return t

    h = module(t)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = h.exp().sin()
    edge = get_gradient_edge(y)
    del y
    rest = GraphSplit(module.parameters()).input_gradients([edge], [torch.ones(3, 4)], [t])
    del edge
    assert alive
    assert not [ref for ref in alive if ref() is not None]
    assert rest.alone


def test_hooks_of_weights_change_the_gradient_once() -> None:
    module, t = (lambda a: nn.Sequential(a, nn.Tanh(), a))(lin()), x(3, 4)
    other = copy.deepcopy(module)
    for m in (module, other):
        for p in m.parameters():
            p.register_hook(lambda g: 3 * g)
    whole(module, (t,), [torch.ones(3, 4)])
    halves(other, (t.detach().requires_grad_(),), [torch.ones(3, 4)], edges=False)
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_function_of_its_own_runs_once() -> None:
    module, inputs = CASES["a function of its own"]()
    Scaled.calls = 0
    halves(module, inputs, [torch.ones(3, 4)])
    assert Scaled.calls == 1


# ---------------------------------------------------------------- nets of all shapes


STEPS = [
    *("linear", "weight", "bias", "scale", "norm", "add"),
    *("multiply", "tanh", "view", "inplace", "attend", "mix"),
]


@st.composite
def nets(draw: st.DrawFn) -> nn.Module:
    """Chains of operations on [3, 4] in which weights and activations are used again at random."""
    layers = [lin() for _ in range(draw(st.integers(1, 3)))]
    scales = [nn.Parameter(torch.randn(4)) for _ in range(2)]
    norm = nn.LayerNorm(4)
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(STEPS),
                st.integers(0, 7),
                st.integers(0, 7),
            ),
            min_size=1,
            max_size=9,
        )
    )
    outputs = draw(st.integers(1, 3))

    def run(m: Any, *xs: Tensor) -> Any:
        made = [*xs, m.scales[0] * torch.ones(3, 4)]
        for kind, i, j in steps:
            t, o = made[-1 - i % len(made)], made[-1 - j % len(made)]
            layer, scale = m.layers[j % len(m.layers)], m.scales[j % 2]
            made.append(_step(kind, t, o, layer, scale, m.norm))
        return tuple(made[-outputs:])

    frozen_at = draw(st.integers(0, 5))
    net = Of(run, layers=nn.ModuleList(layers), norm=norm)
    net.scales = nn.ParameterList(scales)
    for at, p in enumerate(net.parameters()):
        p.requires_grad_(at != frozen_at)
    return net


def _step(kind: str, t: Tensor, o: Tensor, layer: nn.Linear, scale: Tensor, norm: nn.Module) -> Tensor:
    match kind:
        case "linear":
            return layer(t)
        case "weight":
            return t @ layer.weight
        case "bias":
            return t + layer.bias
        case "scale":
            return t * scale.exp()
        case "norm":
            return norm(t)
        case "add":
            return t + o
        case "multiply":
            return t * o.tanh()
        case "tanh":
            return t.tanh()
        case "view":
            return t.reshape(4, 3).transpose(0, 1).flip(0)
        case "inplace":
            h = t.clone()
            h[:, 1:3] += layer.bias[1:3]
            return h
        case "attend":
            return F.scaled_dot_product_attention(t[None], o[None], layer(o)[None])[0]
        case _:
            return torch.cat([t[:, :2], F.linear(o, layer.weight[:2], scale[:2])], 1)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))  # pyright: ignore[reportArgumentType]
@given(nets(), st.integers(1, 2))
def test_any_net(net: nn.Module, inputs: int) -> None:
    check_equal(net, *(x(3, 4) for _ in range(inputs)))
