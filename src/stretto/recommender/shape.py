"""Recommender models: the sizes of a DLRM, its parameters, FLOPs and bytes.

Sources: Naumov et al. 2019 (DLRM, arXiv 1906.00091); Wang et al. 2021 (DCN-V2, arXiv 2008.13535), section 3.2
for low-rank cross layers; the MLCommons reference of recommendation_v2 and facebookresearch/dlrm for layer
sizes and the cardinalities of the Criteo data sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from stretto.errors import StrettoError, nearest
from stretto.recommender.placement import TableSpec

Interaction = Literal["dot", "dcn"]
StateKind = Literal["sgd", "row-wise adagrad", "adagrad", "adam"]


@dataclass(frozen=True)
class TableShape:
    """An embedding table of `rows` x `dim`, with an average pooling factor of `pooling` ids per sample.

    skew: popularity of ids is proportional to 1 / rank^skew; None if uniform.
    """

    rows: int
    dim: int
    pooling: float = 1.0
    skew: float | None = None


@dataclass(frozen=True, kw_only=True)
class DlrmShape:
    """A DLRM.

    tables: one for each categorical feature, all with the same dim.
    dense: dense features per sample, the input of the bottom MLP.
    bottom: outputs of the bottom MLP's layers; the last is the dim of the tables.
    top: outputs of the top MLP's layers; the last is the logit.
    interaction: `dot`, the bottom MLP's output and the dot products of all pairs of vectors; `dcn`, low-rank
        cross layers.
    cross_layers, cross_rank: number and rank of the cross layers of `dcn`.
    """

    tables: tuple[TableShape, ...]
    dense: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    interaction: Interaction = "dot"
    cross_layers: int = 0
    cross_rank: int = 0

    def __post_init__(self) -> None:
        for name, sizes in (("bottom", self.bottom), ("top", self.top), ("tables", self.tables)):
            if not sizes:
                raise StrettoError(f"{name} is empty", hint=f"{name} needs one entry or more")
        numbers = [self.dense, *self.bottom, *self.top, *(n for t in self.tables for n in (t.rows, t.dim))]
        if min(numbers) < 1 or min(t.pooling for t in self.tables) < 0:
            raise StrettoError(
                "a size of the recommender is below 1", hint="sizes are 1 or more, pooling 0 or more"
            )
        wrong = sorted({t.dim for t in self.tables} - {self.dim})
        if wrong:
            raise StrettoError(
                f"tables of width {wrong[0]} with a bottom MLP that ends with {self.dim}",
                hint=f"all tables {self.dim} wide, or a bottom MLP that ends with {wrong[0]}",
            )
        crossed = self.cross_layers > 0 and self.cross_rank > 0
        if crossed != (self.interaction == "dcn"):
            raise StrettoError(
                f"interaction {self.interaction!r} with {self.cross_layers} cross layers of rank "
                f"{self.cross_rank}",
                hint="dcn needs both above 0, dot neither",
            )

    @property
    def dim(self) -> int:
        """Width of each vector in the interaction."""
        return self.bottom[-1]

    @property
    def vectors(self) -> int:
        """Number of vectors in the interaction: one per table, and the bottom MLP's output."""
        return len(self.tables) + 1

    @property
    def wide(self) -> int:
        """Width of all vectors concatenated."""
        return self.vectors * self.dim

    @property
    def interacted(self) -> int:
        """Width of the top MLP's input."""
        pairs = self.vectors * (self.vectors - 1) // 2
        return self.wide if self.interaction == "dcn" else self.dim + pairs

    @property
    def lookups(self) -> float:
        """Average lookups per sample, over all tables."""
        return sum(table.pooling for table in self.tables)


@dataclass(frozen=True)
class DlrmCount:
    """Parameter counts of a DLRM: the tables, and the dense layers with their biases."""

    tables: int
    bottom: int
    cross: int
    top: int

    @property
    def dense(self) -> int:
        """Dense parameters, whose gradients are all-reduced across data-parallel ranks."""
        return self.bottom + self.cross + self.top

    @property
    def total(self) -> int:
        return self.tables + self.dense


def count_dlrm(shape: DlrmShape) -> DlrmCount:
    """Exact parameter counts."""
    return DlrmCount(
        tables=sum(table.rows * table.dim for table in shape.tables),
        bottom=_mlp((shape.dense, *shape.bottom)),
        cross=shape.cross_layers * (2 * shape.wide * shape.cross_rank + shape.wide),
        top=_mlp((shape.interacted, *shape.top)),
    )


def dlrm_flops_per_sample(shape: DlrmShape) -> float:
    """Forward FLOPs of a sample, matrix products only; forward and backward together are three times as many.

    The dot interaction counts all vectors^2 products, as they are computed, not only the distinct pairs.
    """
    layers = [*pairwise((shape.dense, *shape.bottom)), *pairwise((shape.interacted, *shape.top))]
    products = 2.0 * sum(n * k for n, k in layers)
    if shape.interaction == "dot":
        return products + 2.0 * shape.vectors**2 * shape.dim
    return products + shape.cross_layers * 4.0 * shape.wide * shape.cross_rank


@dataclass(frozen=True, kw_only=True)
class DlrmBytes:
    """Bytes that one batch moves, summed over all ranks except for `dense`.

    Attributes:
        ids: ids of all lookups, 8 bytes each.
        rows: rows read from the tables.
        pooled: pooled embeddings; their gradients take the same again.
        exchanged: the part of `pooled` that the all-to-all sends to other ranks, in each direction.
        dense: bytes that one rank sends in a ring all-reduce of the dense gradients.
    """

    ids: float
    rows: float
    pooled: float
    exchanged: float
    dense: float


def dlrm_bytes(shape: DlrmShape, batch: int, ranks: int = 1, element: int = 4) -> DlrmBytes:
    """Bytes that a batch moves with table-wise sharding over `ranks` ranks, `element` bytes per value."""
    remote = (ranks - 1) / ranks
    pooled = float(batch * sum(table.dim for table in shape.tables) * element)
    return DlrmBytes(
        ids=8.0 * batch * shape.lookups,
        rows=batch * element * sum(table.pooling * table.dim for table in shape.tables),
        pooled=pooled,
        exchanged=pooled * remote,
        dense=2.0 * count_dlrm(shape).dense * element * remote,
    )


def dlrm_state_bytes(shape: DlrmShape, optimizer: StateKind) -> int:
    """Bytes of the tables' optimiser states in 32 bits; row-wise Adagrad has one number per row."""
    elements = count_dlrm(shape).tables
    rows = sum(table.rows for table in shape.tables)
    return 4 * {"sgd": 0, "row-wise adagrad": rows, "adagrad": elements, "adam": 2 * elements}[optimizer]


def table_specs(shape: DlrmShape) -> tuple[TableSpec, ...]:
    """The tables as specs for training and planning, named C1, C2, ..."""
    return tuple(
        TableSpec(name=f"C{i}", rows=table.rows, dim=table.dim, hot=table.pooling, skew=table.skew)
        for i, table in enumerate(shape.tables, start=1)
    )


def is_dlrm(name: str) -> bool:
    """True if a model's name begins with `dlrm`, even if no such preset exists."""
    return _normalise(name).startswith("dlrm")


def dlrm_preset(name: str) -> DlrmShape:
    """A published recommender by name.

    Raises:
        StrettoError: no such name.
    """
    preset = _normalise(name)
    if preset not in DLRM_PRESETS:
        close = nearest(preset, DLRM_PRESETS)
        hint = f"did you mean {close!r}?" if close else f"allowed are {', '.join(DLRM_PRESETS)}"
        raise StrettoError(f"no recommender {name!r}", hint=hint)
    return DLRM_PRESETS[preset]


def _normalise(name: str) -> str:
    return name.lower().replace("_", "-")


def _mlp(sizes: Sequence[int]) -> int:
    return sum(n * k + k for n, k in pairwise(sizes))


# Criteo Terabyte: cardinalities of its 26 features, which `_TERABYTE` caps at 40M rows. `_MULTI_HOT` has
# the ids per sample of each feature in MLCommons' synthetic multi-hot data.
_CAP = 40_000_000
_UNCAPPED = (
    227_605_432,
    39_060,
    17_295,
    7_424,
    20_265,
    3,
    7_122,
    1_543,
    63,
    130_229_467,
    3_067_956,
    405_282,
    10,
    2_209,
    11_938,
    155,
    4,
    976,
    14,
    292_775_614,
    40_790_948,
    187_188_510,
    590_152,
    12_973,
    108,
    36,
)
_TERABYTE = tuple(min(rows, _CAP) for rows in _UNCAPPED)
# Cardinalities with frequency thresholds of 3 and 15, in NVIDIA's order (NVIDIA/DeepLearningExamples,
# TensorFlow2 DLRM, generate_feature_spec.py). Popularity in its synthetic data is proportional to
# 1 / rank^1.45.
_THRESHOLD_3 = (
    45_833_188,
    36_747,
    1_572_176,
    345_139,
    11,
    2_209,
    11_268,
    128,
    4,
    975,
    15,
    48_937_457,
    17_246,
    11_316_796,
    40_094_537,
    452_104,
    12_607,
    105,
    36,
    7_414,
    20_244,
    4,
    7_115,
    1_442,
    63,
    29_275_261,
)
_THRESHOLD_15 = (
    7_912_889,
    33_823,
    17_139,
    7_339,
    20_046,
    4,
    7_105,
    1_382,
    63,
    5_554_114,
    582_469,
    245_828,
    11,
    2_209,
    10_667,
    104,
    4,
    968,
    15,
    8_165_896,
    2_675_940,
    7_156_453,
    302_516,
    12_022,
    97,
    35,
)
_NVIDIA_SKEW = 1.45
_MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
_KAGGLE = (
    1_460,
    583,
    10_131_227,
    2_202_608,
    305,
    24,
    12_517,
    633,
    3,
    93_145,
    5_683,
    8_351_593,
    3_194,
    27,
    14_992,
    5_461_306,
    10,
    5_652,
    2_173,
    4,
    7_046_547,
    18,
    15,
    286_181,
    105,
    142_572,
)


def _nvidia(rows: Sequence[int]) -> DlrmShape:
    """NVIDIA's DLRM for TensorFlow 2 and PyTorch, with these rows per table."""
    return DlrmShape(
        tables=tuple(TableShape(table_rows, 128, 1.0, _NVIDIA_SKEW) for table_rows in rows),
        dense=13,
        bottom=(512, 256, 128),
        top=(1024, 1024, 512, 256, 1),
    )


DLRM_PRESETS: dict[str, DlrmShape] = {
    "dlrm-dcnv2": DlrmShape(
        tables=tuple(TableShape(rows, 128, ids) for rows, ids in zip(_TERABYTE, _MULTI_HOT, strict=True)),
        dense=13,
        bottom=(512, 256, 128),
        top=(1024, 1024, 512, 256, 1),
        interaction="dcn",
        cross_layers=3,
        cross_rank=512,
    ),
    "dlrm-dot": DlrmShape(
        tables=tuple(TableShape(rows, 128) for rows in _TERABYTE),
        dense=13,
        bottom=(512, 256, 128),
        top=(1024, 1024, 512, 256, 1),
    ),
    "dlrm-4.2b": _nvidia(_THRESHOLD_15),
    "dlrm-22.8b": _nvidia(_THRESHOLD_3),
    "dlrm-113b": _nvidia(_UNCAPPED),
    "dlrm-kaggle": DlrmShape(
        tables=tuple(TableShape(rows, 16) for rows in _KAGGLE),
        dense=13,
        bottom=(512, 256, 64, 16),
        top=(512, 256, 1),
    ),
}
