"""Recommenders: published totals, a torch model of the same sizes, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stretto.errors import StrettoError
from stretto.recommender.shape import (
    DLRM_PRESETS,
    DlrmShape,
    TableShape,
    count_dlrm,
    dlrm_bytes,
    dlrm_flops_per_sample,
    dlrm_preset,
    dlrm_state_bytes,
    is_dlrm,
    table_specs,
)


def test_mlperf_as_it_is_published() -> None:
    """204.2M rows, 26.1B parameters of 104.5e9 bytes, 214 ids a sample, 16.0M dense ones; of a batch of 65536
    872 MB of sums, 95 MB a rank of 8 leave it, 112 MB of ids; 0.8 GB of row-wise Adagrad for 104 of Adagrad.
    """
    shape = dlrm_preset("DLRM_DCNv2")
    count = count_dlrm(shape)
    assert sum(table.rows for table in shape.tables) == 204_184_588
    assert count.tables == 26_135_627_264
    assert count.dense == 16_044_545
    assert shape.lookups == 214
    moved = dlrm_bytes(shape, 65_536, ranks=8)
    assert moved.pooled == pytest.approx(872e6, rel=1e-3)
    assert moved.exchanged / 8 == pytest.approx(95e6, rel=5e-3)
    assert moved.ids == pytest.approx(112e6, rel=5e-3)
    assert moved.dense == pytest.approx(2 * 64e6 * 7 / 8, rel=5e-3)
    assert dlrm_state_bytes(shape, "row-wise adagrad") == pytest.approx(0.8e9, rel=0.03)
    assert dlrm_state_bytes(shape, "adagrad") == pytest.approx(104.5e9, rel=1e-3)


def test_kaggle_has_the_published_rows() -> None:
    shape = dlrm_preset("dlrm-kaggle")
    assert sum(table.rows for table in shape.tables) == 33_762_577
    assert count_dlrm(shape).tables == 540_201_232


def test_three_sizes_of_nvidia() -> None:
    """4.2B, 22.8B and 113B parameters in 15.6, 84.9 and 421 GiB (NVIDIA/DeepLearningExamples, DLRM.md)."""
    for name, billions, gib in (
        ("dlrm-4.2b", 4.2, 15.6),
        ("dlrm-22.8b", 22.8, 84.9),
        ("dlrm-113b", 113, 421),
    ):
        count = count_dlrm(dlrm_preset(name))
        assert count.total / 1e9 == pytest.approx(billions, rel=5e-3)
        assert count.tables * 4 / 2**30 == pytest.approx(gib, rel=2e-3)
    assert sum(table.rows for table in dlrm_preset("dlrm-113b").tables) == 882_774_559
    specs = table_specs(dlrm_preset("dlrm-dcnv2"))
    assert [(specs[0].name, specs[25].name), (specs[20].hot, specs[20].rows)] == [
        ("C1", "C26"),
        (100, 40_000_000),
    ]
    assert is_dlrm("DLRM_dot")
    assert not is_dlrm("llama3-8b")


def mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(n, k) for n, k in pairwise(sizes)))


class Cross(nn.Module):
    """One cross layer: x0 * (W V x + b) + x."""

    def __init__(self, wide: int, rank: int) -> None:
        super().__init__()
        self.v, self.w = nn.Linear(wide, rank, bias=False), nn.Linear(rank, wide)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0 * self.w(self.v(x)) + x


class Dlrm(nn.Module):
    """The model that the shape stands for, as the papers have it."""

    def __init__(self, shape: DlrmShape) -> None:
        super().__init__()
        self.dot = shape.interaction == "dot"
        self.tables = nn.ModuleList(nn.EmbeddingBag(t.rows, t.dim, mode="sum") for t in shape.tables)
        self.bottom = mlp(shape.dense, *shape.bottom)
        self.cross = nn.ModuleList(Cross(shape.wide, shape.cross_rank) for _ in range(shape.cross_layers))
        self.top = mlp(shape.interacted, *shape.top)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(ids) for table in self.tables)], dim=1)
        if self.dot:
            rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
            pairs = torch.bmm(vectors, vectors.transpose(1, 2))[:, rows, columns]
            return self.top(torch.cat([x, pairs], dim=1))
        wide = crossed = vectors.flatten(1)
        for layer in self.cross:
            crossed = layer(wide, crossed)
        return self.top(crossed)


@pytest.mark.parametrize("interaction", ["dot", "dcn"])
def test_as_torch_counts_it(interaction: str) -> None:
    crossed = {"interaction": "dcn", "cross_layers": 2, "cross_rank": 5} if interaction == "dcn" else {}
    tables = (TableShape(11, 8, 3), TableShape(7, 8), TableShape(5, 8))
    shape = DlrmShape(tables=tables, dense=4, bottom=(9, 8), top=(6, 1), **crossed)  # pyright: ignore
    model, batch = Dlrm(shape), 6
    assert sum(parameter.numel() for parameter in model.parameters()) == count_dlrm(shape).total
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(batch, 4), torch.zeros(batch, 3, dtype=torch.int64))
    assert counter.get_total_flops() == batch * dlrm_flops_per_sample(shape)


def test_one_rank_exchanges_nothing() -> None:
    moved = dlrm_bytes(DLRM_PRESETS["dlrm-dot"], 128)
    assert moved.exchanged == moved.dense == 0
    assert moved.rows == moved.pooled == 128 * 26 * 128 * 4


def test_what_is_refused() -> None:
    with pytest.raises(StrettoError, match="no recommender 'dlrm-dcn'") as caught:
        dlrm_preset("dlrm-dcn")
    assert "dlrm-dcnv2" in (caught.value.hint or "")
    with pytest.raises(StrettoError, match="tables of width 4 with a bottom MLP that ends with 8"):
        DlrmShape(tables=(TableShape(3, 4),), dense=2, bottom=(8,), top=(1,))
    with pytest.raises(StrettoError, match="'dcn' with 0 cross layers"):
        DlrmShape(tables=(TableShape(3, 8),), dense=2, bottom=(8,), top=(1,), interaction="dcn")
    with pytest.raises(StrettoError, match="tables is empty"):
        DlrmShape(tables=(), dense=2, bottom=(8,), top=(1,))
    with pytest.raises(StrettoError, match="below 1"):
        DlrmShape(tables=(TableShape(0, 8),), dense=2, bottom=(8,), top=(1,))
