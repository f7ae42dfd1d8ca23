"""A DLRM's training step compared with plain PyTorch and TorchRec, on one process and by placement.

26 tables of 10^3 to 10^6 rows, 64 wide, 2048 samples per step, networks 512-256-64 and 512-512-256-1, one
thread per rank. Plain PyTorch is `EmbeddingBag(sparse=True)` with its optimiser, on several ranks with
whole tables and hand-written all-to-alls; both come from `--peers`, a folder with dlrm_torch.py. TorchRec
takes part if it can be imported (`--torchrec table_wise,column_wise`).

    python benchmarks/dlrm.py --peers ../shared/peers --ranks 2 --hot 10 --placements table,row
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Mapping
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import Placements
from stretto.recommender.planner.uniform import uniform
from stretto.recommender.tables.jagged import Jagged
from stretto.recommender.train.engine import Recommender
from stretto.recommender.train.job import keep_freed_memory
from stretto.run.config.validation import read_section

DIM, BATCH, BATCHES = 64, 2048, 10
BOTTOM, TOP = [512, 256], [512, 512, 256]
Raw = tuple[Tensor, Tensor, Tensor]  # numbers, ids [tables, samples, hot], labels


def table_rows(tables: int = 26) -> list[int]:
    """Rows of the tables, in geometric progression."""
    return [round(1000 * 1000 ** (i / (tables - 1))) for i in range(tables)]


def batches(rank: int, world: int, hot: int, zipf: bool) -> list[Raw]:
    """This rank's samples of some batches; ids uniform, or as popular as 1 / rank."""
    draw, share, drawn = torch.Generator().manual_seed(99 + rank), BATCH // world, list[Raw]()
    for _ in range(BATCHES):
        ids = list[Tensor]()
        for rows in table_rows():
            u = torch.rand(share, hot, generator=draw, dtype=torch.float64)
            ids.append(((rows**u if zipf else u * rows).long() - (1 if zipf else 0)).clamp(0, rows - 1))
        numbers = torch.rand(share, 13, generator=draw)
        drawn.append((numbers, torch.stack(ids), (torch.rand(share, generator=draw) < 0.25).float()))
    return drawn


def stretto_step(
    rule: str, placement: str, world: int, data: list[Raw], overlap: bool, wire: str
) -> harness.Step:
    """Stretto's step."""
    tables = [{"name": f"C{i + 1}", "rows": rows} for i, rows in enumerate(table_rows())]
    model = {
        "family": "dlrm",
        "dense": 13,
        "bottom": [*BOTTOM, DIM],
        "top": [*TOP, 1],
        "tables": tables,
    }
    config = read_section(
        RecommenderConfig,
        {
            "model": model,
            "layout": {"ranks": world},
            "batch": {"global_size": BATCH},
            "tables": {"overlap": overlap, "wire": wire},
            "optim": {"dense": {"name": "sgd", "lr": 0.01}, "tables": {"name": rule, "lr": 0.01}},
        },
    )
    specs = config.table_specs()
    placements: Placements = uniform(specs, placement, world, None)
    recommender = Recommender(config, specs, placements)
    batches = [ClickBatch(numbers, Jagged.fixed(list(ids)), labels) for numbers, ids, labels in data]
    at = 0

    def step() -> None:
        nonlocal at
        recommender.forward_backward(batches[at % BATCHES], batches[(at + 1) % BATCHES])
        recommender.update(1.0, recommender.gradient_norm())
        at += 1

    return step


def plain(peers: str, rule: str, rank: int, world: int, data: list[Raw]) -> harness.Step:
    """The step of plain PyTorch."""
    sys.path.insert(0, peers)
    import dlrm_torch  # pyright: ignore[reportMissingImports]

    sizes = {"tables": 26, "rows_min": 1000, "rows_max": 1_000_000, "dim": DIM, "dense_grad": False}
    options = types.SimpleNamespace(**sizes, bottom=BOTTOM, top=TOP, opt=rule, lr=0.01)
    trainer = dlrm_torch.Trainer(options, rank, world)
    return _cycle(data, lambda numbers, ids, labels: trainer.step(numbers, ids, labels))


def torchrec(rule: str, sharding: str, rank: int, world: int, data: list[Raw]) -> harness.Step:
    """TorchRec's step, with the update fused into the backward."""
    from torchrec.datasets.utils import Batch  # pyright: ignore[reportMissingImports]
    from torchrec.distributed import DistributedModelParallel  # pyright: ignore[reportMissingImports]
    from torchrec.distributed.model_parallel import (  # pyright: ignore[reportMissingImports]
        get_default_sharders,
    )
    from torchrec.distributed.planner import (  # pyright: ignore[reportMissingImports]
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec.models.dlrm import DLRM, DLRMTrain  # pyright: ignore[reportMissingImports]
    from torchrec.modules.embedding_configs import (  # pyright: ignore[reportMissingImports]
        EmbeddingBagConfig,
    )
    from torchrec.modules.embedding_modules import (  # pyright: ignore[reportMissingImports]
        EmbeddingBagCollection,
    )
    from torchrec.optim.apply_optimizer_in_backward import (  # pyright: ignore[reportMissingImports]
        apply_optimizer_in_backward,
    )
    from torchrec.optim.optimizers import (  # pyright: ignore[reportMissingImports]
        in_backward_optimizer_filter,
    )
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad  # pyright: ignore[reportMissingImports]
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # pyright: ignore[reportMissingImports]

    cpu, keys = torch.device("cpu"), [f"f{i}" for i in range(26)]
    tables = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=DIM, num_embeddings=rows, feature_names=[keys[i]])
        for i, rows in enumerate(table_rows())
    ]
    bags = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    model: Any = DLRMTrain(DLRM(bags, 13, [*BOTTOM, DIM], [*TOP, 1], dense_device=cpu))
    rules = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}
    apply_optimizer_in_backward(rules[rule], model.model.sparse_arch.parameters(), {"lr": 0.01})
    limits = {f"t{i}": ParameterConstraints(sharding_types=[sharding]) for i in range(26)}
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, local_world_size=world, compute_device="cpu"),
        batch_size=BATCH // world,
        constraints=limits,
    )
    plan = planner.collective_plan(model, get_default_sharders(), dist.GroupMember.WORLD)
    model = DistributedModelParallel(module=model, device=cpu, plan=plan)
    dense = [p for _, p in in_backward_optimizer_filter(model.named_parameters())]
    optimizer = torch.optim.SGD(dense, lr=0.01)
    hot = data[0][1].shape[2]
    lengths = torch.full((26 * (BATCH // world),), hot, dtype=torch.long)
    inputs = [
        Batch(
            dense_features=numbers,
            labels=labels,
            sparse_features=KeyedJaggedTensor(keys=keys, values=ids.reshape(-1), lengths=lengths),
        )
        for numbers, ids, labels in data
    ]
    at = 0

    def step() -> None:
        nonlocal at
        optimizer.zero_grad()
        loss, _ = model(inputs[at % BATCHES])
        loss.backward()
        optimizer.step()
        at += 1

    return step


def _cycle(data: list[Raw], step: Any) -> harness.Step:
    at = 0

    def run_step() -> None:
        nonlocal at
        step(*data[at % BATCHES])
        at += 1

    return run_step


def compete(options: Mapping[str, Any]) -> list[harness.Timing]:
    """The main function of each rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    rule, wire = options["rule"], options["wire"]
    keep_freed_memory()  # as on a training rank; applies to all contestants
    data = batches(rank, world, options["hot"], bool(options["zipf"]))
    contestants = dict[str, harness.Step]()
    if options["peers"]:
        contestants["plain"] = plain(options["peers"], rule, rank, world, data)
    for sharding in filter(None, options["torchrec"].split(",")):
        os.environ.update(LOCAL_WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        contestants[f"torchrec {sharding}"] = torchrec(rule, sharding, rank, world, data)
    for placement in options["placements"].split(","):
        contestants[f"stretto {placement}"] = stretto_step(
            rule, placement, world, data, bool(options["overlap"]), wire
        )
    reference = options["reference"] or next(iter(contestants))
    return harness.race(contestants, reference, options["rounds"], inner=options["inner"])


def main() -> None:
    args = harness.arguments(
        __doc__,
        rounds=11,
        ranks=1,
        hot=1,
        zipf=0,
        rule="rowwise_adagrad",
        placements="table",
        torchrec="",
        peers="",
        wire="float32",
        overlap=1,
        inner=3,
        reference="",
    )
    options = vars(args)
    timings = harness.on_ranks(args.ranks, compete, options)[0]
    ids = "one id" if args.hot == 1 else f"{args.hot} ids"
    drawn = "Zipf" if args.zipf else "uniform"
    title = f"DLRM, {args.ranks} ranks, {ids} a feature ({drawn}), {args.rule}"
    names = [timing.name for timing in timings]
    harness.report(title, timings, args.reference or names[0], args.out)
    for timing in timings:
        print(f"{timing.name}: {BATCH / timing.median_ms * 1e3:,.0f} samples/s")


if __name__ == "__main__":
    main()
