"""Training on the simulated NPU with and without graphs of its microbatches, step by step."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto import Layout
from stretto.engine.device import moved
from stretto.engine.models.rotary import _cached_tables
from stretto.engine.optim.rate import LearningRate
from stretto.engine.parallel.mesh import Mesh
from stretto.job.data_parallel import DataParallelSettings, Precision
from stretto.job.job import Job, Recompute
from stretto.job.optimiser import Optimiser
from stretto.job.rules import problems
from stretto.job.shape import ModelShape
from stretto.run.data.dataset import Batch
from stretto.run.launch.local import run_ranks
from stretto.run.train.assemble import assemble
from stretto.run.train.async_step import AsyncTrainer
from stretto.run.train.language_task import LanguageTask, TextProgress
from stretto.run.train.rank_model import RankModel
from stretto.run.train.trainer import Trainer

fake_graphs: Any = sys.modules["fake_graphs"]  # torch has loaded it
NPU = torch.device("npu", 0)
SIZES: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "ffn": 16, "vocab": 32, "sequence": 8}
GPT = ModelShape(family="gpt", **SIZES)
LLAMA = ModelShape(family="llama", kv_heads=1, **SIZES)
DOUBLE = Precision(dtype="float64")
PLAIN = Job(shape=LLAMA, global_batch=4, precision=DOUBLE, optimiser=Optimiser(clip=1.0), loss_chunk=0)
ALONE = {
    "llama": PLAIN,
    "gpt, one microbatch": replace(PLAIN, shape=GPT, micro_batch=4),
    "recomputed blocks": replace(PLAIN, recompute=Recompute(mode="full")),
    "recomputed attention": replace(PLAIN, recompute=Recompute(mode="selective"), attention="explicit"),
    "loss in chunks": replace(PLAIN, loss_chunk=3, micro_batch=2),
    "float16": replace(PLAIN, precision=Precision(dtype="float16", loss_scale=2.0**22, loss_scale_steps=1)),
    "8 bits": replace(PLAIN, precision=Precision(dtype="bfloat16", fp8="row")),
    "states on the host": replace(PLAIN, dp=DataParallelSettings(offload="cpu")),
}
TOGETHER = {
    "ddp": replace(PLAIN, layout=Layout(dp=2)),
    "zero1": replace(PLAIN, layout=Layout(dp=2), dp=DataParallelSettings(mode="zero1")),
    "zero2": replace(PLAIN, layout=Layout(dp=2), dp=DataParallelSettings(mode="zero2", reduce="step")),
    "tp": replace(PLAIN, layout=Layout(tp=2)),
    "sequence": replace(PLAIN, layout=Layout(tp=2), sequence_parallel=True, shape=GPT),
    "tp recomputed": replace(PLAIN, layout=Layout(tp=2), recompute=Recompute(mode="full")),
}
STEPS = 6


class Samples:
    """Tokens that depend on the number of the sample."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def batch(self, indices: Sequence[int]) -> Batch:
        """Some of them."""
        job = self._job
        draw = [torch.Generator().manual_seed(i) for i in indices]
        ids = torch.stack(
            [torch.randint(job.shape.vocab, (job.sequence + 1,), generator=generator) for generator in draw]
        )
        return Batch(inputs=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous())


@dataclass
class Trained:
    """What came of some steps.

    numbers: losses, norms and evaluations, in order.
    scales: losses' after each step, with float16.
    """

    numbers: list[float]
    scales: list[float]
    weights: dict[str, Tensor]


def trained(job: Job) -> Trained:
    """After `STEPS` steps, with evaluations of other shapes before and between them."""
    replica = assemble(job, Mesh(job.layout, NPU, timedelta(seconds=30)), seed=0)
    samples = Samples(job)
    task = LanguageTask(replica, samples, LearningRate.of(job.optimiser, STEPS))
    trainer = (AsyncTrainer if replica.asynchronous else Trainer)(task, TextProgress())
    numbers, scales = [held_out(replica, samples, 0)], list[float]()
    for number in range(STEPS):
        numbers += [x for result in trainer.step() for x in (result.loss, result.norm) if x is not None]
        if number % 2:  # an evaluation waits for the weights, which a step must do by itself
            numbers.append(held_out(replica, samples, number))
        if number == STEPS // 2:
            _cached_tables.cache_clear()  # as other shapes would do it
        if replica.loss_scale is not None:
            scales.append(replica.loss_scale.value)
    replica.states.ready()
    with replica.states.full_weights() as weights:
        trained = {name: value.double().cpu() for name, value in weights.items()}
    replica.close()
    return Trained(numbers, scales, trained)


def held_out(replica: RankModel, samples: Samples, number: int) -> float:
    """The loss of a batch of other sizes than those of a step."""
    batch = samples.batch(range(100 + number, 103 + number))
    inputs, targets = moved(batch.inputs, NPU), moved(batch.targets, NPU)
    losses = replica.pipeline.evaluate([inputs], [targets])
    return float(losses.sum())


def both(job: Job) -> dict[str, Any]:
    """The job with and without graphs."""
    torch.get_device_module(NPU).set_device(NPU)
    for problem in problems(job):
        raise problem
    plain, before = trained(job), fake_graphs.replayed
    graphed = trained(replace(job, graphs="microbatch"))
    return {
        "plain": plain.numbers,
        "graphed": graphed.numbers,
        "scales": [plain.scales, graphed.scales],
        "weights": max(
            float((value - graphed.weights[name]).abs().max() / value.abs().max().clamp(min=1e-3))
            for name, value in plain.weights.items()
        ),
        "replayed": fake_graphs.replayed - before,
        "microbatches": STEPS * (job.microbatches or 0),
    }


def _on_rank(name: str) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("hccl", timeout=timedelta(seconds=30))
    return both(TOGETHER[name])


def graphs(folder: Path) -> dict[str, Any]:
    """Two jobs of one process, with most of what a graph may get wrong."""
    return {name: both(ALONE[name]) for name in ("llama", "float16")}


def graphs_all(folder: Path) -> dict[str, Any]:
    """Jobs of every kind that there are graphs of."""
    return {name: both(job) for name, job in ALONE.items()} | {
        name: run_ranks(2, _on_rank, name)[0] for name in TOGETHER
    }
