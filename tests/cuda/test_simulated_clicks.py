"""Steps of a recommender on the simulated GPU: what torch, CUDA or NCCL refuses, and where the host waits.

As `test_simulated_jobs.py`, for embedding tables by table, column, row, copied and mixed, as one rank. Other
ranks seem to ask this one for what it asks of itself.
"""

from __future__ import annotations

import gc
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

if torch.version.cuda is None or not (shutil.which("cc") or shutil.which("gcc")):
    pytest.skip("it takes torch's CUDA build and a C compiler", allow_module_level=True)

import stretto
from recommender_jobs import Job, batch_of, config_of, placements_of
from stretto.layout.layout import Layout
from stretto.recommender.placement import physical_tables
from stretto.recommender.tables import lookup_plan
from stretto.recommender.tables.exchange import Requests
from stretto.recommender.tables.kernels import plain
from stretto.recommender.tables.kernels.plain import Divided
from stretto.recommender.tables.replicated import ReplicatedLookups
from stretto.recommender.train.engine import Recommender
from stretto.recommender.train.task import ClickProgress, RecommenderTask
from stretto.run.dryrun.allocator import simulated_rank
from stretto.run.dryrun.simulated_gpu import SimulatedGpu
from stretto.run.train.trainer import Trainer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
SETTING: Any = import_module("gpu.setting").Setting(torch.device("cuda", 0), True, Path())
PACKAGE = str(Path(stretto.__file__).parent) + "/"  # with a planted fault, if there is one


@pytest.fixture(scope="module")
def on_gpu() -> Generator[Callable[..., Any]]:
    """Calls a function of this file in a process that has the simulated GPU."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=SimulatedGpu) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@dataclass(frozen=True)
class Answer:
    """A tensor of the device that the host reads as `numbers`; it waits for the device all the same."""

    tensor: torch.Tensor
    numbers: Any

    def tolist(self) -> Any:
        self.tensor.tolist()
        return self.numbers

    def wait(self) -> Answer:
        return self

    def view(self, *_: int) -> Answer:
        return self

    @property
    def T(self) -> Answer:  # noqa: N802
        return self

    def sum(self, axis: int) -> Answer:
        return Answer(self.tensor.sum(axis), [sum(row) for row in self.numbers])

    def __getitem__(self, at: Any) -> Answer:
        return Answer(self.tensor[at], [row[at[1]] for row in self.numbers])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.tensor)


@contextmanager
def even_lookups() -> Generator[None]:
    """Inside the `with`, rows are spread evenly over the shards of a table, and every rank asks another for
    what this one asks of itself, since no value tells.
    """
    ask, copy, divide, search = (
        Requests.__init__,
        ReplicatedLookups.__init__,
        plain.divide_by,
        torch.bucketize,
    )

    def send_requests(self: Any, **arguments: Any) -> None:
        ask(self, **arguments)
        if arguments["group"] is not None:
            bags_here = arguments["bags_to"][arguments["rank"]]
            header = [n for bags in bags_here for n in (bags.samples, len(bags.ids), bags.hot)]
            self._header = Answer(self._header.wait(), header * arguments["shard_map"].world)

    def copied(self: Any, *arguments: Any) -> None:
        copy(self, *arguments)
        if self._counting is not None:
            sizes = (len(self._grouped.rows), len(self._rows), len(self._lengths), self._scale is not None)
            self._counting.wait()
            self._counts = Answer(self._counts, [[int(n)] * arguments[2].size() for n in sizes])

    def divided(shard: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, parts: int) -> Divided:
        division, bags = divide(shard, rows, offsets, parts), len(offsets) - 1
        each = [len(rows) // parts + (part < len(rows) % parts) for part in range(parts)]
        lengths: Any = Answer(division.lengths, [[n, *[0] * (bags - 1)] for n in each])
        return replace(division, lengths=lengths)

    def searched(edges: torch.Tensor, rows: torch.Tensor) -> Any:
        return Answer(search(edges, rows), [len(rows) * at // (len(edges) - 1) for at in range(len(edges))])

    with (
        patch.object(Requests, "__init__", send_requests),
        patch.object(ReplicatedLookups, "__init__", copied),
        patch.object(plain, "divide_by", divided),
        patch.object(lookup_plan, "divide_by", divided),
        patch.object(torch, "bucketize", searched),
    ):
        yield


@dataclass
class Clicks:
    """The batches of a job, as a rank reads them."""

    job: Job

    def __len__(self) -> int:
        return 10**6

    def batch(self, first: int, count: int, part: tuple[int, int] | None = None) -> Any:
        return batch_of(self.job, first // count).part(*(part or (0, count)))


def stepped(job: Job, ranks: int, rank: int) -> tuple[dict[str, int], dict[str, int]]:
    """Take two steps as a rank. Return how often the host waited in the second, by file, and its work."""
    config = replace(config_of(job, ranks), train=replace(config_of(job, ranks).train, device="cuda"))
    tables = config.table_specs()
    with simulated_rank(Layout(dp=ranks), rank) as mesh, even_lookups():
        placements = placements_of(job, physical_tables(tables), ranks)
        recommender = Recommender(config, tables, placements, mesh.device)
        trainer = Trainer(RecommenderTask(recommender, Clicks(job), mesh.device), ClickProgress())
        try:
            trainer.step()
            before = SimulatedGpu().counts()
            with SETTING.synchronisations() as calls:
                trainer.step()
            work = SimulatedGpu().counts().since(before)
        finally:
            recommender.close()
    del trainer, recommender
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < 40 * 2**20, "more than the workspaces of cuBLAS outlives a job"
    files: list[str] = [call.rpartition(":")[0].removeprefix(PACKAGE) for call in calls]
    return dict(Counter(NAMES.get(file, file) for file in files)), work


# of what the host reads: the numbers that ranks agree on, how many rows are asked for, how many differ, and
# which rows are not in a cache
AGREED, SIZES, DIFFERENT, CACHED = "agreement", "sizes", "rows", "cache"
NAMES = {
    "run/train/agreement.py": AGREED,
    __file__: SIZES,
    str(torch.functional.__file__): DIFFERENT,
    "recommender/stores/cached.py": CACHED,
}
MIX = ("row", "column", "data", "table")
VARIED = Job("adagrad", hot=None, weighted=True, pooling="mean", dtype="float32")
CASES: dict[str, tuple[Job, int, dict[str, int]]] = {
    "one rank": (Job(dtype="float32"), 1, {DIFFERENT: 1}),
    "one rank, weighted means": (VARIED, 1, {DIFFERENT: 1}),
    "by table": (Job(splits=("table",), dtype="float32"), 2, {SIZES: 1, DIFFERENT: 6}),
    "by column": (Job(splits=("column",), dtype="float32"), 2, {SIZES: 2, DIFFERENT: 6}),
    "by row": (Job(splits=("row",), dtype="float32"), 2, {SIZES: 6, DIFFERENT: 6}),
    "copied": (Job(splits=("data",), dtype="float32"), 2, {SIZES: 1, DIFFERENT: 2}),
    "mixed": (replace(VARIED, rule="lazy_adam", splits=MIX), 4, {SIZES: 4, DIFFERENT: 8}),
    "products": (
        replace(VARIED, rule="rowwise_adagrad", splits=MIX, ids="quotient-remainder"),
        2,
        {SIZES: 5, DIFFERENT: 6},
    ),
    "split rows, 16 bits on the wire": (
        Job("split_sgd", MIX, dtype="float32", wire="bfloat16"),
        2,
        {SIZES: 4, DIFFERENT: 8},
    ),
    "cached": (replace(VARIED, splits=MIX, place="cpu"), 2, {SIZES: 4, DIFFERENT: 10, CACHED: 3}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_a_recommender(name: str, on_gpu: Callable[..., Any]) -> None:
    """The host waits for sizes alone, which messages need."""
    job, ranks, expected = CASES[name]
    for rank in {0, ranks - 1}:
        waits, work = on_gpu(stepped, job, ranks, rank)
        if rank == ranks - 1:
            assert waits == {AGREED: 1, **expected}
        assert (work["messages"] > 10) == (ranks > 1)
        assert work["kernels"] > 100
