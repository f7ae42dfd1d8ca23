"""The backward of any module in two halves: they equal the whole, and each does its own work only."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from halves import (
    CASES,
    Of,
    Scaled,
    Tensors,
    check_equal,
    double,
    encoder_layer,
    fired_by,
    full_backward,
    halves,
    lin,
    shared_weight,
    x,
)
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.engine.pipeline.walk import GraphSplit, _Graph


@pytest.fixture(autouse=True)
def _double() -> Any:
    with double():
        yield


@pytest.mark.parametrize("name", CASES)
def test_i_and_w_together_equal_autograd(name: str) -> None:
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


def test_a_loss_without_gradient_is_accepted() -> None:
    module, t = nn.Sequential(lin(), lin()), x(3, 4)
    (module(t) ** 2).sum().backward()
    dx, plain = t.grad, [p.grad for p in module.parameters()]
    t.grad = None
    module.zero_grad(set_to_none=True)
    split = GraphSplit(module.parameters())
    split.weight_gradients(split.input_gradients([(module(t) ** 2).sum()], [None], [t]))
    torch.testing.assert_close([t.grad, *(p.grad for p in module.parameters())], [dx, *plain])


def test_outputs_without_gradient() -> None:
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

    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = module(*inputs)
        arguments = torch.randn_like(y)
        assert alive
        assert all(ref() is not None for ref in alive)
        rest = split.input_gradients(
            [get_gradient_edge(y)], [arguments], [t for t in inputs if t.requires_grad]
        )
        del y
        split.weight_gradients(rest)
        assert not [ref for ref in alive if ref() is not None]
    finally:
        gc.enable()


def test_i_frees_activations_after_the_last_weight() -> None:
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
    full_backward(module, (t,), [torch.ones(3, 4)])
    halves(other, (t.detach().requires_grad_(),), [torch.ones(3, 4)], edges=False)
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_an_autograd_function_runs_its_backward_once() -> None:
    module, inputs = CASES["a function of its own"]()
    Scaled.calls = 0
    halves(module, inputs, [torch.ones(3, 4)])
    assert Scaled.calls == 1
