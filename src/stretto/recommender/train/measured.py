"""Measured memory and traffic of one rank of a recommender in training."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist
from torch import Tensor

from stretto.engine.parallel.traffic import traffic
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import Placements
from stretto.recommender.stores.store import DeviceStore
from stretto.recommender.train.clicks import ClickData
from stretto.recommender.train.engine import Recommender
from stretto.recommender.train.task import ClickRun
from stretto.run.train.memory_measured import MeasuredMemory, MemoryTracker
from stretto.run.train.start import process_group


def measure_recommender_rank(
    config: RecommenderConfig, clicks: ClickData, placements: Placements
) -> MeasuredMemory:
    """Train two steps on the job's clicks as one rank of the job that RANK and WORLD_SIZE describe, and
    follow the second; the first creates what is kept. Tables in files have no tensors, and do not count.
    """
    memory = MemoryTracker()
    with ExitStack() as cleanup:
        device = cleanup.enter_context(process_group(config.train))
        folder = Path(cleanup.enter_context(TemporaryDirectory(prefix="stretto-tables-")))
        cleanup.enter_context(memory)
        recommender = Recommender(config, clicks.tables, placements, device, folder=folder)
        cleanup.callback(recommender.close)
        task = ClickRun(recommender, clicks, placements, device)
        cleanup.callback(task.close)

        def step(number: int) -> None:
            task.forward_backward(task.batch(number, number * task.global_batch), number)
            norm = task.statistics().get("norm")
            task.update(number, None if norm is None else float(norm), apply=True)

        step(0)
        pools = (*recommender.tables.replicated_pools, *recommender.tables.pools)
        stores = [pool.store for pool in pools if isinstance(pool.store, DeviceStore)]
        memory.name(
            "tables", (tensor for store in stores for tensor in (store.weight, *store.states.values()))
        )
        memory.name("weights", recommender.net.parameters())
        states = (state for of in recommender.dense.optimizer.state.values() for state in of.values())
        memory.name("optimizer", (state for state in states if isinstance(state, Tensor)))
        memory.name("gradients", (p.grad for p in recommender.net.parameters() if p.grad is not None))
        memory.restart()
        with traffic() as sent:
            step(1)
        dist.barrier()  # no rank closes its groups while others still use them
        return MeasuredMemory(
            rank=dist.get_rank(),
            pipeline=0,
            peak=memory.peak,
            between_actions=memory.allocated,
            kinds={kind: size for kind, size in memory.peak_kinds.items() if size},
            sent=sent.total,
            samples=(),
        )
