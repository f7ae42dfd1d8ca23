"""Placements as TorchRec's sharding plan; held to TorchRec's own classes where it is installed."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.recommender.placement import TablePlacement, TableSpec
from stretto_interop.torchrec import FusedOptimizer, torchrec_module, torchrec_tables

WORLD, LOCAL = 4, 2
TABLES = [TableSpec(name=f"C{i}", rows=10 + i, dim=16, pooling="mean" if i else "sum") for i in range(6)]
PLACEMENTS = {
    "C0": TablePlacement("table", (3,)),
    "C1": TablePlacement("column", (1, 0)),
    "C2": TablePlacement("row", (2, 3, 0, 1), "cpu", 0.05),
    "C3": TablePlacement("row", (3, 2)),
    "C4": TablePlacement("data"),
    "C5": TablePlacement("table", (1,), "cpu", 0.2),
}


def module(rule: FusedOptimizer | None = None) -> str:
    fused_rule = rule or FusedOptimizer()
    return torchrec_module(TABLES, PLACEMENTS, world=WORLD, local=LOCAL, rule=fused_rule, about="a plan")


def test_each_split_is_a_sharding_type() -> None:
    shardings = torchrec_tables(TABLES, PLACEMENTS, world=WORLD, local=LOCAL)
    kernels = [(each.sharding_type, each.compute_kernel, each.load_factor) for each in shardings]
    assert kernels == [
        ("table_wise", "fused", None),
        ("column_wise", "fused", None),
        ("row_wise", "fused_uvm_caching", 0.05),
        ("table_row_wise", "fused", None),
        ("data_parallel", "dense", None),
        ("table_wise", "fused_uvm_caching", 0.2),
    ]
    shards = {each.name: each.shards for each in shardings}
    assert shards["C0"] == (((0, 0), (10, 16), 3),)
    assert shards["C1"] == (((0, 0), (11, 8), 1), ((0, 8), (11, 8), 0))
    assert shards["C2"] == tuple(((3 * rank, 0), (3, 16), rank) for rank in range(4))
    assert shards["C3"] == (((0, 0), (7, 16), 2), ((7, 0), (6, 16), 3))


def test_the_module_says_what_differs_and_what_is_left_to_fill_in() -> None:
    text = module(FusedOptimizer(name="lazy_adam", betas=(0.9, 0.99), eps=1e-6, wire="bfloat16"))
    assert text.startswith('"""a plan\n')
    for line in (
        "Rows are in blocks here and dealt out in Stretto",
        "Fill in the learning rate",
        '"optimizer": EmbOptimType.ADAM,',
        '"beta2": 0.99,',
        "QCommsConfig(forward_precision=CommType.BF16, backward_precision=CommType.BF16)",
        '{"name": "C1", "num_embeddings": 11, "embedding_dim": 16, "pooling": "mean"},',
    ):
        assert line in text, line
    assert "learning_rate" in module(FusedOptimizer(lr=0.1))
    assert "QComms" not in module()


def placed(table: TableSpec, placement: TablePlacement) -> None:
    torchrec_tables([table], {table.name: placement}, world=WORLD, local=LOCAL)


PLAIN = TableSpec(name="C", rows=100, dim=16)


@pytest.mark.parametrize(
    ("table", "placement", "message", "hint"),
    [
        (
            TableSpec(name="C", rows=100, dim=16, ids="hash"),
            TablePlacement("table", (0,)),
            "table C is ids: hash: TorchRec gives rows to new ids",
            "ids: modulo",
        ),
        (
            TableSpec(name="C", rows=100, dim=16, ids="quotient-remainder"),
            TablePlacement("table", (0,)),
            "table C is ids: quotient-remainder",
            "ids: modulo",
        ),
        (PLAIN, TablePlacement("table", (0,), "disk"), "table C is place: disk", "place: cpu"),
        (PLAIN, TablePlacement("data", (), "cpu"), "table C is place: cpu", "place: device"),
        (
            PLAIN,
            TablePlacement("row", (0, 1, 2)),
            "table C is split: row over ranks 0, 1, 2",
            "ranks: node 0",
        ),
        (PLAIN, TablePlacement("column", (0, 1, 2)), "table C is 3 parts of 16 columns", "nearest: 2 parts"),
        (
            TableSpec(name="C", rows=100, dim=18),
            TablePlacement("table", (0,)),
            "table C is dim: 18",
            "nearest: dim: 20",
        ),
    ],
)
def test_what_torchrec_cannot_hold_is_refused_by_name(
    table: TableSpec, placement: TablePlacement, message: str, hint: str
) -> None:
    with pytest.raises(StrettoError) as caught:
        placed(table, placement)
    assert caught.value.message.startswith(message)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (FusedOptimizer(name="split_sgd"), "optim.tables.name is split_sgd"),
        (FusedOptimizer(element=2), "tables is 2 bytes"),
    ],
)
def test_rules_of_updates_that_it_lacks_are_refused(rule: FusedOptimizer, message: str) -> None:
    with pytest.raises(StrettoError) as caught:
        module(rule)
    assert caught.value.message.startswith(message)


# ------------------------------------------------------------------ TorchRec's own classes


@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_torchrec_makes_the_same_plan(wire: Any) -> None:
    """By its own functions, which cut rows as its kernels do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchrec", reason="torchrec is not installed")
    torch = importlib.import_module("torch")
    plans = importlib.import_module("torchrec.distributed.sharding_plan")
    names: dict[str, Any] = {}
    exec(compile(module(FusedOptimizer(lr=0.1, eps=1e-8, wire=wire)), "plan.py", "exec"), names)
    configs = names["table_configs"]()
    collection = importlib.import_module("torchrec").EmbeddingBagCollection
    torchrec_plan = plans.construct_module_sharding_plan(
        collection(tables=configs, device=torch.device("meta")),
        {
            "C0": plans.table_wise(rank=3, compute_kernel="fused"),
            "C1": plans.column_wise(ranks=[1, 0], compute_kernel="fused"),
            "C2": plans.row_wise(compute_kernel="fused_uvm_caching"),
            "C3": plans.table_row_wise(host_index=1),
            "C4": plans.data_parallel(),
            "C5": plans.table_wise(rank=1, compute_kernel="fused_uvm_caching"),
        },
        local_size=LOCAL,
        world_size=WORLD,
        device_type="cuda",
    )
    stretto_plan = names["sharding_plan"]("here").get_plan_for_module("here")
    assert list(stretto_plan) == list(torchrec_plan)
    for name, sharding in torchrec_plan.items():
        sharding.cache_params = stretto_plan[name].cache_params
        if name == "C3":  # its function has no argument for the kernel
            sharding.compute_kernel = "fused"
        assert stretto_plan[name] == sharding, name
    assert stretto_plan["C2"].cache_params.load_factor == 0.05
    assert names["sharder"]().fused_params["learning_rate"] == 0.1
