"""Plans of users' networks: what tracing finds, and plans that run as one process does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ranks import on_ranks
from stretto.autosplit.network import OperatorGraph, StyleName
from stretto.autosplit.plan_module import ModulePlan, plan_module
from stretto.autosplit.trace import trace_network
from stretto.engine.parallel.follow import propagate_splits
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import parallelize
from stretto.engine.parallel.styles import BatchParallel
from stretto.engine.parallel.traffic import traffic
from stretto.engine.pipeline import sum_gradients
from stretto.errors import StrettoError
from stretto.layout import Layout

BATCH = 8
EXAMPLE = torch.empty(BATCH, 3, 8, 8, dtype=torch.float64)


class Convolutions(nn.Module):
    """Convolutions with BatchNorm and a shortcut, then linear layers; one of each thing that plans meet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.linear = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.GELU())
        self.inner = nn.Linear(32, 32)
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = self.pool(self.relu(self.second(x) + x))
        x = self.linear(x.view(x.size(0), -1))
        return self.last(self.inner(x) + x)


def plan(fix: Mapping[str, StyleName] | None = None, **more: Any) -> ModulePlan:
    return plan_module(Convolutions().double(), EXAMPLE, cluster="v100-32gb-pcie:2", fix=fix, **more)


PLANS: list[dict[str, StyleName]] = [
    {},
    {"*": "batch"},
    {
        "first": "batch",
        "norm": "batch",
        "second": "batch",
        "linear.0": "column",
        "linear.2": "row",
        "last": "row",
    },
    {
        "first": "batch",
        "norm": "batch",
        "second": "batch",
        "linear.0": "row",
        "linear.2": "column",
        "inner": "row",
    },
    {"first": "replicate", "norm": "batch", "second": "batch", "linear.0": "replicate", "inner": "column"},
    {"linear.2": "row", "inner": "batch", "last": "column"},
]


def test_plans_run_as_one_process_does() -> None:
    """Loss and gradients in float64, and what each rank sends to the byte."""
    for fix, (sent, worst) in zip(PLANS, on_ranks(2, _train)[0], strict=True):
        planned = plan(fix)
        assert worst < 1e-12, fix
        assert sent == planned.splits.sent, (fix, planned.table())


def _train() -> list[tuple[int, float]]:
    """For each plan the bytes that this rank sends in a step, and the largest relative error."""
    return [_step(plan(fix)) for fix in PLANS]


def _step(planned: ModulePlan) -> tuple[int, float]:
    torch.manual_seed(3)
    plain = Convolutions().double()
    x, y = torch.randn(BATCH, 3, 8, 8, dtype=torch.float64), torch.randint(0, 10, (BATCH,))
    expected = F.cross_entropy(plain(x), y)
    expected.backward()
    torch.manual_seed(3)
    model = Convolutions().double()
    table = parallelize(model, planned.plan, Mesh(Layout(tp=2)), convert=True)
    with traffic() as counted:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        sum_gradients(model, table)
    errors = [abs(float((loss - expected) / expected))]
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        gradient = wanted[name]
        assert gradient is not None
        assert parameter.grad is not None
        part = torch.empty_like(parameter)
        table[name].placed.fill(part, gradient)
        errors.append(float((part - parameter.grad).abs().max() / gradient.abs().max()))
    return counted.total, max(errors)


def network(model: nn.Module, *example: Tensor, **more: Any) -> OperatorGraph:
    return trace_network(model, example, **more)


def test_tracing_finds_operators_shapes_and_parameters() -> None:
    """By hand: kernels of 3 x 3 over 3 channels are sums of 27; 4 channels of 4 x 4 are 64 features."""
    by_name = {
        operator.name: operator for operator in network(Convolutions(), torch.empty(BATCH, 3, 8, 8)).operators
    }
    assert list(by_name)[:6] == ["x", "first", "norm", "relu()", "second", "add()"]
    first, add, view = by_name["first"], by_name["add()"], by_name["view()"]
    assert first.product is not None
    assert (first.product.rows, first.product.inner, first.product.columns) == (BATCH * 64, 27, 4)
    assert (first.weight, first.bias, first.styles) == (108, 0, ("replicate", "batch"))
    assert first.saved == first.size == 4 * BATCH * 4 * 64
    assert by_name["norm"].statistics == 4
    assert add.inputs == ("relu()", "second")
    assert add.splits == ("whole", "batch", "features")
    assert (view.shape, view.saved, view.moved, view.splits) == ((BATCH, 64), 0, 0, ("whole", "batch"))
    assert by_name["relu"].saved == 0  # in place
    assert by_name["relu"].moved == 2 * add.size
    assert by_name["inner"].styles == ("replicate", "batch", "column", "row")
    assert (by_name["inner"].weight, by_name["inner"].bias) == (1024, 32)
    assert by_name["output"].inputs == ("last",)
    assert not by_name["x"].gradient


def test_models_are_neither_changed_nor_computed_with() -> None:
    model = Convolutions()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    plan_module(model, torch.empty(BATCH, 3, 8, 8), cluster="a100:2")
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Scaled(nn.Module):
    """Not of torch.nn, with a parameter and no sum over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_modules_that_are_not_known_are_tried_on_random_samples() -> None:
    traced = network(nn.Sequential(Scaled(), Centred(), nn.Linear(16, 16)), torch.empty(8, 16))
    scaled, centred = traced.operators[1:3]
    assert (scaled.splits, scaled.styles) == (("whole", "batch"), ("replicate", "batch"))
    assert centred.splits == ("whole",)
    assert traced.notes == (
        "'0' may be split by batch: it computes random samples alone",
        "'1' is replicated: its samples depend on one another",
    )
    lstm = network(nn.Sequential(nn.LSTM(16, 8)), torch.empty(8, 4, 16)).operators[1]
    assert lstm.styles == ("replicate",)  # samples are along dimension 1


class FixedView(nn.Module):
    """Says how many samples there are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).view(16, 8)).sum()


def test_a_view_with_the_number_of_samples_is_not_split() -> None:
    planned = plan_module(FixedView(), torch.empty(8, 16), cluster="a100:2", fix={"first": "batch"})
    lines = {line.operator.name: line.choice for line in planned.splits.lines}
    assert lines["view()"].takes == "whole"
    assert planned.plan["first"] == BatchParallel(output="whole")


def test_shared_parameters_are_split_alike_and_counted_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.other, self.act = nn.Linear(16, 16), nn.Linear(16, 16), nn.ReLU()
            self.other.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.act(self.first(self.act(self.first(x)))))

    traced = network(Twice(), torch.empty(8, 16))
    names = [operator.name for operator in traced.operators]
    assert names == ["x", "first", "act", "first (call 2)", "act (call 2)", "other", "output"]
    assert {frozenset(tie) for tie in traced.ties} == {
        frozenset(("first", "first (call 2)")),
        frozenset(("act", "act (call 2)")),
        frozenset(("first", "first (call 2)", "other")),
    }
    assert [operator.shared for operator in traced.operators if operator.styles] == [False, True, True]
    styles = plan_module(Twice(), torch.empty(8, 16), cluster="a100:2").plan
    assert styles["first"] == styles["other"]


def test_a_module_of_several_calls_converts_alike_each_time() -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.encoder, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.last(self.encoder(self.first(x)) - self.encoder(y))

    model, example = Siamese(), (torch.empty(8, 8), torch.empty(8, 8))
    plans: list[dict[str, StyleName]] = [
        {"*": "batch"},
        {"first": "batch", "encoder": "column"},
        {"first": "column", "encoder": "batch"},
    ]
    for fix in plans:
        planned = plan_module(model, example, cluster="a100:2", fix=fix)
        assert planned.plan["first"].output in ("whole", None)  # as y comes
        propagate_splits(
            model,
            {name: (model.get_submodule(name), planned.plan[name]) for name in planned.plan},
            "whole",
            "whole",
        )


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(x)
        if x.sum() > 0:
            return x
        return -x


def test_errors_say_what_to_do() -> None:
    linear, x = nn.Sequential(nn.Linear(4, 4)), torch.empty(8, 4)
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: plan_module(Branching(), x, cluster="a100:2"),
            r"Branching cannot be traced.*test_plan_module.py, line \d+: if x.sum\(\) > 0",
        ),
        (
            lambda: plan_module(linear, torch.empty(9, 4), cluster="a100:4"),
            "batch of 9 samples does not divide",
        ),
        (lambda: plan_module(linear, torch.empty(8, 5), cluster="a100:2"), "the model fails on inputs"),
        (lambda: plan_module(linear, torch.tensor(1.0), cluster="a100:2"), "no batch dimension"),
        (lambda: plan_module(linear, x, cluster="a100:2", leaves=["part"]), "no module 'part'"),
        (lambda: plan_module(linear, x, cluster="a100:2", memory_gib=1e-9), "no split fits: a rank needs"),
        (lambda: plan_module(linear[0], x, cluster="a100:2"), "the model itself is Linear"),
        (lambda: plan(fix={"lest": "row"}), "'lest' matches no module"),
        (lambda: plan(fix={"norm": "row"}), r"'norm' \(BatchNorm2d\) cannot have the style 'row'"),
        (lambda: plan(fix={"last": "rows"}), "'rows' is no style"),  # pyright: ignore[reportArgumentType]
    ]
    for call, text in cases:
        with pytest.raises(StrettoError, match=text):
            call()


def test_what_cannot_be_traced_is_one_operator_where_it_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Branching())
    with pytest.raises(StrettoError, match="cannot be traced"):
        network(model, torch.empty(8, 4))
    traced = network(model, torch.empty(8, 4), leaves=["1"])
    assert [operator.kind for operator in traced.operators] == ["input", "Linear", "Branching", "output"]


def test_tables_and_pictures_show_every_operator_and_conversion() -> None:
    planned = plan(
        {"first": "batch", "norm": "batch", "second": "batch", "linear.0": "column", "last": "row"}
    )
    table, svg = planned.table(), planned.svg()
    for line in planned.splits.lines:
        assert f"\n{line.operator.name}" in f"\n{table}"
        assert line.operator.name in svg
    assert "all-gather + reduce-scatter" in table
    assert svg.count("all-gather + reduce-scatter") == table.count("all-gather + reduce-scatter")
    for rule in ("data parallel", "tensor parallel", "one weird trick", "replicated"):
        assert rule in table
        assert rule in svg
    assert planned._repr_svg_() == svg
    styles = "3 BatchParallel, 1 ColumnParallel, 2 Replicate, 1 RowParallel"
    assert repr(planned) == f"ModulePlan({styles} on 2 x v100-32gb-pcie: {planned.seconds:.3g} s a step)"
