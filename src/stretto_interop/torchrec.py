"""Placements of embedding tables as TorchRec's `ShardingPlan`: a Python module, of 1.9
(torchrec/distributed/types.py and sharding_plan.py).

TorchRec splits rows into blocks where Stretto deals them out: row r is on the rank r // block there, and on
r % ranks here. Sizes and traffic are the same; which rank has the popular rows is not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from stretto.errors import Problem
from stretto.recommender.config.schema import TableOptimConfig
from stretto.recommender.placement import Placements, TablePlacement, TableSpec
from stretto.recommender.planner.options import Option

Wire = Literal["float32", "float16", "bfloat16", "float64"]
_LANES = 4  # columns that FBGEMM's kernels read at once: widths are multiples
_OPTIMISERS = {
    "sgd": "EXACT_SGD",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
    "lazy_adam": "ADAM",
}
_WIRES: dict[Wire, str] = {"float16": "FP16", "bfloat16": "BF16"}


@dataclass(frozen=True, kw_only=True)
class FusedOptimizer:
    """How tables are updated and sent.

    Attributes:
        name: as in `optim.tables.name`.
        lr, eps, betas: settings, or None if left to the user.
        wire: dtype in which pooled vectors are sent.
        element: bytes per element of a table.
    """

    name: str = "rowwise_adagrad"
    lr: float | None = None
    eps: float | None = None
    betas: tuple[float, float] | None = None
    wire: Wire = "float32"
    element: int = 4

    @classmethod
    def of(cls, rule: TableOptimConfig, wire: Wire, dtype: str) -> FusedOptimizer:
        """Return the optimiser of a config; if weights are float64, vectors are sent as float64 too."""
        double = dtype == "float64"
        return cls(
            name=rule.name,
            lr=rule.lr,
            eps=rule.eps,
            betas=rule.betas,
            wire="float64" if double else wire,
            element=8 if double else 4,
        )


@dataclass(frozen=True, kw_only=True)
class TorchRecTable:
    """The sharding of a table in TorchRec's terms.

    Attributes:
        load_factor: fraction of the rows cached on the device, or None if all are on it.
        shards: first element (row, column), size (rows, columns) and rank of each shard; a copied table has
            one for each rank.
    """

    name: str
    sharding_type: str
    compute_kernel: str
    load_factor: float | None
    shards: tuple[tuple[tuple[int, int], tuple[int, int], int], ...]


def holds(table: TableSpec, option: Option) -> bool:
    """True if TorchRec supports this placement of a table."""
    if option.place == "disk" or (option.split == "data" and option.place != "device"):
        return False
    if option.split == "row":
        return option.scope != "any"
    parts = len(option.parts) if option.split == "column" else 1
    return table.dim % (parts * _LANES) == 0


def torchrec_tables(
    tables: Sequence[TableSpec], placements: Placements, *, world: int, local: int
) -> list[TorchRecTable]:
    """Return the sharding of each table, in order.

    Args:
        world: number of ranks.
        local: ranks per node.

    Raises:
        Problem: TorchRec does not support a table's placement; names the table.
    """
    return [_table(table, placements, world, local) for table in tables]


def _table(table: TableSpec, placements: Placements, world: int, local: int) -> TorchRecTable:
    if table.ids != "modulo":
        feature = {
            "hash": "TorchRec gives rows to new ids with ManagedCollisionModule, which evicts otherwise",
            "quotient-remainder": "TorchRec has one table for a feature, and no product of two",
        }[table.ids]
        raise Problem(f"table {table.name}", f"ids: {table.ids}", feature, "ids: modulo")
    placement = placements[table.name]
    if table.dim % _LANES:
        closest = -(-table.dim // _LANES) * _LANES
        rule = f"FBGEMM's kernels, which TorchRec uses, need a multiple of {_LANES} columns"
        raise Problem(f"table {table.name}", f"dim: {table.dim}", rule, f"nearest: dim: {closest}")
    kernel = _kernel(table, placement)
    kind, shards = _shards(table, placement, world, local)
    return TorchRecTable(
        name=table.name,
        sharding_type=kind,
        compute_kernel=kernel,
        load_factor=placement.cache if placement.place == "cpu" else None,
        shards=tuple(shards),
    )


def _kernel(table: TableSpec, placement: TablePlacement) -> str:
    if placement.place == "disk":
        rule = "TorchRec keeps no table in files of this kind (its key_value kernel is a RocksDB)"
        raise Problem(f"table {table.name}", "place: disk", rule, "place: cpu, or place: device")
    if placement.split == "data":
        if placement.place != "device":
            rule = "TorchRec's copies of a table are on the device"
            raise Problem(f"table {table.name}", f"place: {placement.place}", rule, "place: device")
        return "dense"
    return "fused" if placement.place == "device" else "fused_uvm_caching"


_Shards = list[tuple[tuple[int, int], tuple[int, int], int]]


def _shards(table: TableSpec, placement: TablePlacement, world: int, local: int) -> tuple[str, _Shards]:
    """Return the sharding type, and the shards as TorchRec cuts them."""
    complete = (table.rows, table.dim)
    ranks = placement.ranks
    if placement.split == "data":
        return "data_parallel", [((0, 0), complete, rank) for rank in range(world)]
    if placement.split == "table":
        return "table_wise", [((0, 0), complete, ranks[0])]
    if placement.split == "column":
        starts = [table.dim * part // len(ranks) for part in range(len(ranks) + 1)]
        widths = [stop - start for start, stop in pairwise(starts)]
        if any(width % _LANES for width in widths):
            rule = f"FBGEMM's kernels need a multiple of {_LANES} columns in each part"
            largest = max(n for n in range(1, len(ranks) + 1) if table.dim % (n * _LANES) == 0)
            fix = f"nearest: {largest} parts"
            raise Problem(f"table {table.name}", f"{len(ranks)} parts of {table.dim} columns", rule, fix)
        parts = zip(starts, widths, ranks, strict=False)
        return "column_wise", [((0, start), (table.rows, width), rank) for start, width, rank in parts]
    if set(ranks) == set(range(world)):
        return "row_wise", _blocks(table, range(world))
    node = min(ranks) // local
    if set(ranks) == set(range(node * local, min(world, (node + 1) * local))):
        return "table_row_wise", _blocks(table, sorted(ranks))
    raise Problem(
        f"table {table.name}",
        f"split: row over ranks {', '.join(map(str, ranks))}",
        "TorchRec splits rows over all ranks, or over those of one node",
        f"ranks: all, or ranks: node {node}",
    )


def _blocks(table: TableSpec, ranks: Sequence[int]) -> _Shards:
    """Return blocks of rows, the last ones smaller or empty."""
    block = -(-table.rows // len(ranks))
    starts = [min(table.rows, block * at) for at in range(len(ranks) + 1)]
    spans = zip(pairwise(starts), ranks, strict=True)
    return [((start, 0), (stop - start, table.dim), rank) for (start, stop), rank in spans]


def torchrec_module(
    tables: Sequence[TableSpec],
    placements: Placements,
    *,
    world: int,
    local: int,
    rule: FusedOptimizer,
    about: str = "",
) -> str:
    """Return the placements as a Python module with TorchRec's `ShardingPlan`, its tables and its sharder.

    Args:
        world, local: as in `torchrec_tables`.
        about: first lines of the module's docstring.

    Raises:
        Problem: as `torchrec_tables`; or a rule of updates, or a type of the tables, that TorchRec lacks.
    """
    shardings = torchrec_tables(tables, placements, world=world, local=local)
    _check(rule)
    notes = [*about.splitlines(), *_notes(shardings, rule)]
    configs = [
        f'    {{"name": {json.dumps(t.name)}, "num_embeddings": {t.rows}, "embedding_dim": {t.dim}, '
        f'"pooling": "{t.pooling}"}},'
        for t in tables
    ]
    lines = [
        '"""' + "\n".join([*notes, "", *_USE]) + '\n"""',
        "",
        _IMPORTS.replace("# codecs\n", _QCOMMS if rule.wire in _WIRES else ""),
        "",
        f"RANKS, RANKS_PER_NODE = {world}, {local}",
        "TABLES = [",
        *configs,
        "]",
        "# sharding type, kernel, share of rows that is cached, and of each shard: first element, size, rank",
        "SHARDINGS = {",
    ]
    for each in shardings:
        listed = (f"({list(first)}, {list(size)}, {rank})" for first, size, rank in each.shards)
        shards = "None" if each.sharding_type == "data_parallel" else f"[{', '.join(listed)}]"
        text = f'"{each.sharding_type}", "{each.compute_kernel}", {each.load_factor}'
        lines.append(f"    {json.dumps(each.name)}: ({text}, {shards}),")
    lines += ["}", *_fused(rule), "", "", _FUNCTIONS.strip("\n")]
    codecs = ""
    if rule.wire in _WIRES:
        kind = f"CommType.{_WIRES[rule.wire]}"
        config = f"QCommsConfig(forward_precision={kind}, backward_precision={kind})"
        codecs = "\n        qcomm_codecs_registry=get_qcomm_codecs_registry(\n"
        codecs += f"            {config}\n        ),"
    return "\n".join(lines).replace("@QCOMMS@", codecs) + "\n"


def _check(rule: FusedOptimizer) -> None:
    if rule.name not in _OPTIMISERS:
        raise Problem(
            "optim.tables.name",
            rule.name,
            "FBGEMM's fused optimisers have no such rule",
            f"one of {', '.join(_OPTIMISERS)}",
        )
    if rule.wire == "float64":
        raise Problem("tables.wire", "float64", "TorchRec sends 32 bits or fewer", "train.dtype=float32")
    if rule.element != 4:
        feature = f"{rule.element} bytes an element"
        raise Problem("tables", feature, "TorchRec's tables are written in float32 here", "weight=fp32")


def _notes(shardings: Sequence[TorchRecTable], rule: FusedOptimizer) -> list[str]:
    """Return what differs from Stretto, and what TorchRec needs elsewhere."""
    kinds = {each.sharding_type for each in shardings}
    notes = ["Ids are taken modulo a table's rows before they come here, as Stretto does."]
    if kinds & {"row_wise", "table_row_wise"}:
        notes.append(
            "Rows are in blocks here and dealt out in Stretto: if ids are in the order of their popularity, "
            "permute them, or the first rank has most of the work."
        )
    if "data_parallel" in kinds:
        notes.append("Copied tables have dense gradients: give their parameters to an optimiser of your own.")
    if rule.lr is None:
        notes.append("Fill in the learning rate in FUSED_PARAMS.")
    return notes


def _fused(rule: FusedOptimizer) -> list[str]:
    values = {"learning_rate": rule.lr, "eps": rule.eps}
    if rule.betas is not None and rule.name == "lazy_adam":
        values |= {"beta1": rule.betas[0], "beta2": rule.betas[1]}
    if rule.name == "sgd":
        del values["eps"]
    lines = [f'    "{name}": {value!r},' for name, value in values.items() if value is not None]
    return ["FUSED_PARAMS = {", f'    "optimizer": EmbOptimType.{_OPTIMISERS[rule.name]},', *lines, "}"]


_USE = (
    "    from this_module import sharder, sharding_plan",
    "    model = DistributedModelParallel(module, plan=sharding_plan(), sharders=[sharder()])",
)
_IMPORTS = """\
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
# codecs
from torchrec.distributed.types import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType"""
_QCOMMS = """\
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
"""
_FUNCTIONS = '''

def table_configs() -> list[EmbeddingBagConfig]:
    """The tables of an EmbeddingBagCollection, each with a feature of its name."""
    return [
        EmbeddingBagConfig(
            name=table["name"],
            num_embeddings=table["num_embeddings"],
            embedding_dim=table["embedding_dim"],
            feature_names=[table["name"]],
            pooling=PoolingType[table["pooling"].upper()],
        )
        for table in TABLES
    ]


def sharder() -> EmbeddingBagCollectionSharder:
    """The sharder with the optimiser of the tables."""
    return EmbeddingBagCollectionSharder(
        fused_params=FUSED_PARAMS,@QCOMMS@
    )


def sharding_plan(
    module: str = "model.sparse_arch.embedding_bag_collection", device: str = "cuda"
) -> ShardingPlan:
    """The plan of the EmbeddingBagCollection at this path of the model."""
    parameters = EmbeddingModuleShardingPlan()
    for name, (sharding_type, kernel, load_factor, shards) in SHARDINGS.items():
        spec = shards and EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=list(first),
                    shard_sizes=list(size),
                    placement=f"rank:{rank}/{device}:{rank % RANKS_PER_NODE}"
                    if device == "cuda"
                    else f"rank:{rank}/{device}",
                )
                for first, size, rank in shards
            ]
        )
        parameters[name] = ParameterSharding(
            sharding_type=sharding_type,
            compute_kernel=kernel,
            ranks=[rank for _, _, rank in shards] if shards else list(range(RANKS)),
            sharding_spec=spec,
            cache_params=None if load_factor is None else CacheParams(load_factor=load_factor),
        )
    return ShardingPlan(plan={module: parameters})
'''
