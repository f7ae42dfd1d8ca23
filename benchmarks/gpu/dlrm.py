"""A recommender's step on one device: Stretto's, plain PyTorch's and TorchRec's where it can be imported.

MLPerf's DLRM with one id a feature: 26 tables of its benchmark's sizes, the five largest cut so that all
take 20 GiB in float32, 128 wide, row-wise Adagrad; 65,536 samples; networks 512-256-128 and
1024-1024-512-256-1 with pairwise dot products. Ids are drawn uniformly, and as popular as 1 / rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu.setting import Setting
from gpu.speed import attempt, timed
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.planner.uniform import uniform
from stretto.recommender.tables.jagged import Jagged
from stretto.recommender.train.engine import Recommender
from stretto.run.config.validation import read_section

LARGE = 7_550_000  # rows of a table that MLPerf caps at 40 million
ROWS = (
    *(LARGE, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, LARGE, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, LARGE, LARGE, LARGE, 590152, 12973, 108, 36),
)
DRAWN = 8  # batches, over and over
RULE, RATE = "rowwise_adagrad", 0.01


@dataclass(frozen=True)
class Size:
    """Of the job."""

    rows: tuple[int, ...]
    width: int
    samples: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]


FULL = Size(ROWS, 128, 65536, (512, 256), (1024, 1024, 512, 256))
TINY = Size((50, 3, 400), 16, 64, (32,), (32,))
Raw = tuple[Tensor, Tensor, Tensor]  # numbers [b, 13], ids [tables, b], labels [b]


def batches(size: Size, popular: bool, device: torch.device) -> list[Raw]:
    """On the device."""
    draw, made = torch.Generator().manual_seed(0), list[Raw]()
    for _ in range(DRAWN):
        part = torch.rand(len(size.rows), size.samples, generator=draw, dtype=torch.float64)
        rows = torch.tensor(size.rows, dtype=torch.float64)[:, None]
        ids = (rows**part - 1 if popular else part * rows).long()
        numbers = torch.rand(size.samples, 13, generator=draw)
        labels = (torch.rand(size.samples, generator=draw) < 0.25).float()
        made.append((numbers.to(device), ids.to(device), labels.to(device)))
    return made


def network(sizes: tuple[int, ...], last_linear: bool) -> nn.Sequential:
    layers = list[nn.Module]()
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[: -1 if last_linear else None])


class Dense(nn.Module):
    """Bottom network, pairwise dot products, top network."""

    pairs: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        vectors = len(size.rows) + 1
        self.bottom = network((13, *size.bottom, size.width), last_linear=False)
        pairs = vectors * (vectors - 1) // 2
        self.top = network((pairs + size.width, *size.top, 1), last_linear=True)
        row, column = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", row * vectors + column, persistent=False)

    def forward(self, numbers: Tensor, looked_up: Tensor) -> Tensor:
        x = self.bottom(numbers)
        all_vectors = torch.cat([x[:, None], looked_up], dim=1)
        dots = torch.bmm(all_vectors, all_vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, dots[:, self.pairs]], dim=1)).squeeze(1)


def plain(size: Size, data: list[Raw], setting: Setting) -> Callable[[], None]:
    """`nn.EmbeddingBag(sparse=True)` for each table, the networks compiled, row-wise Adagrad by indices."""
    with setting.device:
        tables = [nn.EmbeddingBag(rows, size.width, mode="sum", sparse=True) for rows in size.rows]
        sums = [torch.zeros(rows) for rows in size.rows]
        dense: Any = torch.compile(Dense(size), backend=setting.compiler)
    parameters = list(dense.parameters())
    optimizer = torch.optim.SGD(parameters, lr=RATE, fused=True)
    turn = itertools.cycle(data)

    def step() -> None:
        numbers, ids, labels = next(turn)
        vectors = [table(one[:, None]) for table, one in zip(tables, ids, strict=True)]
        loss = F.binary_cross_entropy_with_logits(dense(numbers, torch.stack(vectors, dim=1)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for table, total in zip(tables, sums, strict=True):
                assert table.weight.grad is not None
                gradient = table.weight.grad.coalesce()
                rows, values = gradient.indices()[0], gradient.values()
                total.index_add_(0, rows, values.square().mean(1))
                factor = -RATE / total[rows].sqrt().add_(1e-8)
                table.weight.index_add_(0, rows, values * factor[:, None])
                table.weight.grad = None

    return step


def stretto(size: Size, data: list[Raw], setting: Setting, *, overlap: bool) -> Callable[[], None]:
    """Stretto's step, with the next batch's rows looked up early or not."""
    config = read_section(
        RecommenderConfig,
        {
            "model": {
                "family": "dlrm",
                "dense": 13,
                "bottom": [*size.bottom, size.width],
                "top": [*size.top, 1],
                "tables": [{"name": f"C{i + 1}", "rows": rows} for i, rows in enumerate(size.rows)],
            },
            "layout": {"ranks": 1},
            "batch": {"global_size": size.samples},
            "tables": {"overlap": overlap},
            "optim": {"dense": {"name": "sgd", "lr": RATE}, "tables": {"name": RULE, "lr": RATE}},
            "train": {"device": setting.device.type},
        },
    )
    specs = config.table_specs()
    # tables of zeros: initial values of 20 GiB, computed on the host, would take minutes
    made = Recommender(config, specs, uniform(specs, "table", 1, None), setting.device, fresh=False)
    turn = itertools.cycle(ClickBatch(n, Jagged.fixed(list(ids[..., None])), y) for n, ids, y in data)
    coming = next(turn)

    def step() -> None:
        nonlocal coming
        batch, coming = coming, next(turn)
        made.forward_backward(batch, coming)
        made.update(1.0, made.gradient_norm())

    return step


def torchrec(size: Size, data: list[Raw], setting: Setting) -> Callable[[], None]:
    """TorchRec's fused tables on one device, without its sharding, and the networks compiled.

    Raises:
        ImportError: there is no TorchRec, or no FBGEMM for it.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType  # pyright: ignore[reportMissingImports]
    from torchrec.modules.embedding_configs import EmbeddingBagConfig  # pyright: ignore[reportMissingImports]
    from torchrec.modules.fused_embedding_modules import (  # pyright: ignore[reportMissingImports]
        FusedEmbeddingBagCollection,
    )
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad  # pyright: ignore[reportMissingImports]
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # pyright: ignore[reportMissingImports]

    assert EmbOptimType  # what the fused rule is made of
    keys = [f"f{i}" for i in range(len(size.rows))]
    configs = [
        EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=size.width, num_embeddings=rows, feature_names=[keys[i]]
        )
        for i, rows in enumerate(size.rows)
    ]
    tables: Any = FusedEmbeddingBagCollection(
        tables=configs, optimizer_type=RowWiseAdagrad, optimizer_kwargs={"lr": RATE}, device=setting.device
    )
    with setting.device:
        dense: Any = torch.compile(Dense(size), backend=setting.compiler)
    optimizer = torch.optim.SGD(list(dense.parameters()), lr=RATE, fused=True)
    lengths = torch.ones(len(keys) * size.samples, dtype=torch.int64, device=setting.device)
    turn = itertools.cycle(
        (n, KeyedJaggedTensor(keys, ids.flatten(), lengths=lengths), y) for n, ids, y in data
    )

    def step() -> None:
        numbers, ids, labels = next(turn)
        vectors = tables(ids).values().unflatten(1, (len(keys), size.width))
        F.binary_cross_entropy_with_logits(dense(numbers, vectors), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def race(setting: Setting) -> dict[str, Any]:
    """All contestants, with both kinds of ids."""
    size = TINY if setting.tiny else FULL
    torch.set_float32_matmul_precision("high")  # of all contestants alike
    contestants: dict[str, Callable[[list[Raw]], Callable[[], None]]] = {
        "Stretto": lambda data: stretto(size, data, setting, overlap=True),
        "Stretto, no lookup ahead": lambda data: stretto(size, data, setting, overlap=False),
        "plain PyTorch": lambda data: plain(size, data, setting),
        "TorchRec": lambda data: torchrec(size, data, setting),
    }
    rows = dict[str, dict[str, Any]]()
    for popular in (False, True):
        data = batches(size, popular, setting.device)
        for name, make in contestants.items():
            key = f"{name}, {'popular' if popular else 'uniform'} ids"
            setting.forget_peak()
            rows[key] = attempt(lambda make=make, data=data: timed(make(data), setting, steps=30))
            setting.keep({"rows": rows})
    return {"rows": rows, "samples": size.samples, "table_bytes": 4 * size.width * sum(size.rows)}
