"""The plain recommender: its size, its parts by hand, and the fast dense half beside the plain one."""

from __future__ import annotations

import copy
import importlib
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stretto.errors import StrettoError
from stretto.recommender.models import interaction
from stretto.recommender.models.dlrm import DenseNet, Dlrm, initialise_dense, pool
from stretto.recommender.placement import TableSpec
from stretto.recommender.shape import DlrmShape, TableShape, count_dlrm
from stretto.recommender.tables.jagged import Jagged

ROWS = (5, 9, 3)
DIM = 4
KINDS: list[dict[str, Any]] = [{}, {"interaction": "dcn", "cross_layers": 2, "cross_rank": 3}]


def shape_of(**kind: Any) -> DlrmShape:
    return DlrmShape(
        tables=tuple(TableShape(n, DIM) for n in ROWS), dense=6, bottom=(8, DIM), top=(7, 5, 1), **kind
    )


def specs(**more: Any) -> list[TableSpec]:
    return [TableSpec(name=f"C{i + 1}", rows=n, dim=DIM, **more) for i, n in enumerate(ROWS)]


def filled(shape: DlrmShape, tables: list[TableSpec]) -> Dlrm:
    model = Dlrm(shape, tables).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def ragged(samples: int, weighted: bool = True) -> Jagged:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(0, 4, (len(ROWS), samples), generator=generator)
    n = int(lengths.sum())
    weights = torch.rand(n, generator=generator, dtype=torch.float64) if weighted else None
    return Jagged(torch.randint(0, 2**62, (n,), generator=generator), lengths, weights)


def by_hand(model: Dlrm, dense: Tensor, ids: Jagged) -> Tensor:
    """The model for one sample after another, by loops over vectors."""
    shape, net = model.specs, model.net

    def mlp(layers: Any, x: Tensor, relu_last: bool) -> Tensor:
        for at, layer in enumerate(layers):
            x = layer.weight @ x + layer.bias
            x = torch.clamp(x, min=0) if relu_last or at < len(layers) - 1 else x
        return x

    logits = list[Tensor]()
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), ids.lengths.flatten().cumsum(0)])
    for s in range(ids.samples):
        vectors = [mlp(net.bottom, dense[s], True)]
        for f, spec in enumerate(shape):
            at = range(*bounds[f * ids.samples + s :][:2].tolist())
            total = torch.zeros(DIM, dtype=torch.float64)
            for k in at:
                row = model.table(spec.name)[int(ids.ids[k]) % spec.rows]
                total = total + row * (1.0 if ids.weights is None else ids.weights[k])
            vectors.append(total / max(1, len(at)) if spec.pooling == "mean" else total)
        if net.shape.interaction == "dot":
            pairs = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
            crossed = torch.cat([vectors[0], torch.stack(pairs)])
        else:
            first = crossed = torch.cat(vectors)
            for layer in net.cross:
                v: Any = layer
                crossed = first * (v.u.weight @ (v.v.weight @ crossed) + v.u.bias) + crossed
        logits.append(mlp(net.top, crossed, False)[0])
    return torch.stack(logits)


@pytest.mark.parametrize("kind", KINDS, ids=["dot", "dcn"])
def test_parameters_are_those_that_are_counted(kind: dict[str, Any]) -> None:
    shape = shape_of(**kind)
    model, count = Dlrm(shape, specs()), count_dlrm(shape)
    assert sum(p.numel() for p in model.parameters()) == count.total
    assert sum(p.numel() for p in model.tables) == count.tables
    assert sum(p.numel() for p in DenseNet(shape).parameters()) == count.dense


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=["dot", "dcn"])
def test_logits_are_those_of_loops(kind: dict[str, Any], weighted: bool, pooling: str) -> None:
    model = filled(shape_of(**kind), specs(pooling=pooling))
    dense, ids = torch.randn(6, 6, dtype=torch.float64), ragged(6, weighted)
    torch.testing.assert_close(model(dense, ids), by_hand(model, dense, ids), rtol=1e-12, atol=1e-12)


def test_a_quotient_remainder_row_is_the_product_of_two() -> None:
    tables = [TableSpec(name="C1", rows=10, dim=DIM, ids="quotient-remainder", divisor=4), *specs()[1:]]
    shape = DlrmShape(
        tables=(TableShape(10, DIM), *(TableShape(n, DIM) for n in ROWS[1:])),
        dense=6,
        bottom=(8, DIM),
        top=(7, 5, 1),
    )
    model = filled(shape, tables)
    assert [t.name for t in model.stored] == ["C1.quotient", "C1.remainder", "C2", "C3"]
    assert model.table("C1.quotient").shape == (3, DIM)
    rows = model.rows(tables[0], torch.tensor([7, 2**62 + 9]))
    for row, id_ in zip(rows, (7, (2**62 + 9) % 10), strict=True):
        both = model.table("C1.quotient")[id_ // 4] * model.table("C1.remainder")[id_ % 4]
        assert torch.equal(row, both)


def test_a_sample_without_ids_has_zeros_also_of_a_mean() -> None:
    rows = torch.ones(3, DIM, dtype=torch.float64)
    pooled = pool(rows, torch.tensor([0, 3, 0]), None, TableSpec(name="C1", rows=5, dim=DIM, pooling="mean"))
    assert pooled.tolist() == [[0.0] * DIM, [1.0] * DIM, [0.0] * DIM]


def away_from_zero(net: DenseNet, dense: Tensor, pooled: Tensor) -> Tensor:
    """Samples [b] (bool) of which no layer's output is so close to zero that rounding could change the
    gradient of the ReLU after it, which would differ by all of it.
    """
    away = torch.ones(len(dense), dtype=torch.bool)
    exact = copy.deepcopy(net).double()

    def keep(_layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        away.logical_and_((output.abs() > 1e-5).all(1))

    for layer in (*exact.bottom, *exact.top):
        layer.register_forward_hook(keep)
    exact(dense.double(), pooled.double())
    return away


@pytest.mark.parametrize("laid_out", ["samples", "features"])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-12), pytest.param(torch.float32, 2e-5, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("way", "kind"), [("products", KINDS[0]), ("compiled", KINDS[0]), ("cross", KINDS[1])]
)
def test_the_fast_dense_half_is_the_plain_one(
    way: str,
    kind: dict[str, Any],
    dtype: torch.dtype,
    close: float,
    laid_out: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits and all gradients, of pooled vectors by sample and by feature, as lookups give them."""
    shape = DlrmShape(
        tables=tuple(TableShape(9, 32) for _ in range(6)), dense=13, bottom=(96, 32), top=(80, 40, 1), **kind
    )
    fast, plain = (DenseNet(shape, fast=quick).to(dtype) for quick in (True, False))
    initialise_dense(plain, 1)
    fast.load_state_dict(plain.state_dict())
    dense, pooled = torch.randn(300, 13, dtype=dtype), torch.randn(300, 6, 32, dtype=dtype)
    away = away_from_zero(plain, dense, pooled)
    dense, pooled, samples = dense[away], pooled[away], int(away.sum())
    assert samples > 290
    if laid_out == "features":
        pooled = pooled.transpose(0, 1).contiguous().transpose(0, 1)
    if way == "compiled":
        pytest.importorskip("numba")
        monkeypatch.setattr(interaction, "LARGE", 0)
    results = list[list[Tensor]]()
    for net in (fast, plain):
        leaf = pooled.detach().requires_grad_()
        logits = net(dense, leaf)
        loss = (logits * torch.arange(samples, dtype=dtype)).sum() / samples
        grads = torch.autograd.grad(loss, [leaf, *net.parameters()])
        results.append([logits.detach(), *grads])
    for computed, reference in zip(*results, strict=True):
        assert float((computed - reference).abs().max()) <= close * float(
            reference.abs().max().clamp(min=1e-3)
        )


@pytest.mark.parametrize("compiled", [False, True])
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 19), st.integers(0, 2**31))
def test_pairs_of_any_sizes_and_their_gradient(
    compiled: bool, samples: int, tables: int, dim: int, seed: int
) -> None:
    if compiled:
        pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, dim, generator=generator, dtype=torch.float64, requires_grad=True)
    pooled = torch.randn(tables, samples, dim, generator=generator, dtype=torch.float64).transpose(0, 1)
    pooled.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interaction, "LARGE", 0 if compiled else 2**62)
        computed, plain = interaction.dot_interaction(x, pooled), interaction.pair_products(x, pooled)
        torch.testing.assert_close(computed, plain, rtol=1e-12, atol=1e-12)
        given_back = torch.randn(plain.shape, generator=generator, dtype=torch.float64)
        for mine, reference in zip(
            torch.autograd.grad(computed, (x, pooled), given_back),
            torch.autograd.grad(plain, (x, pooled), given_back),
            strict=True,
        ):
            torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    net, other, third = (DenseNet(shape_of()) for _ in range(3))
    initialise_dense(net, 1)
    initialise_dense(other, 1)
    initialise_dense(third, 2)
    for (name, a), b, c in zip(net.named_parameters(), other.parameters(), third.parameters(), strict=True):
        assert torch.equal(a, b)
        assert name.endswith("bias") == torch.equal(a, c)
    wide = DenseNet(DlrmShape(tables=(TableShape(3, 64),), dense=200, bottom=(300, 64), top=(100, 1)))
    initialise_dense(wide, 1)
    std = float(wide.get_parameter("bottom.0.weight").detach().std())
    assert abs(std / (2 / 500) ** 0.5 - 1) < 0.02


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (specs()[:2], "2 tables for a recommender with 3"),
        ([TableSpec(name="C1", rows=5, dim=8), *specs()[1:]], "table C1 is 8 wide, the interaction 4"),
        ([TableSpec(name="C1", rows=5, dim=DIM, ids="hash"), *specs()[1:]], "table C1 has ids: hash"),
    ],
)
def test_tables_that_do_not_fit_are_named(tables: list[TableSpec], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        Dlrm(shape_of(), tables)


def test_the_interaction_needs_no_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    for module in ("stretto.recommender.tables.kernels.compiled", interaction.__name__):
        monkeypatch.delitem(sys.modules, module, raising=False)
    fresh = importlib.import_module(interaction.__name__)
    monkeypatch.setattr(fresh, "LARGE", 0)
    x, pooled = torch.randn(4, DIM), torch.randn(4, 3, DIM)
    torch.testing.assert_close(fresh.dot_interaction(x, pooled), fresh.pair_products(x, pooled))
    assert fresh._compile_loops() is None
