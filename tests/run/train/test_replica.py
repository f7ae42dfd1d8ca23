"""A replica between steps: what has memory, and what is still being sent."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import on_ranks
from stretto import Layout
from stretto.engine.parallel.mesh import Mesh
from stretto.job.data_parallel import DataParallelSettings
from stretto.job.job import Job
from stretto.job.optimiser import Optimiser
from stretto.job.shape import ModelShape
from stretto.run.calibrate.host import random_step_done
from stretto.run.train.assemble import assemble
from stretto.run.train.memory_measured import random_step
from stretto.run.train.rank_model import RankModel, tensors_of

SHAPE = ModelShape(family="llama", layers=2, hidden=16, heads=2, kv_heads=1, ffn=16, vocab=32, sequence=8)


def sharded(mode: Any, layers: int = 2, **more: Any) -> RankModel:
    """A replica of two ranks that share gradients."""
    dp = DataParallelSettings(mode=mode, reduce="step", **more)
    shape, optimiser = replace(SHAPE, layers=layers), Optimiser(clip=None)
    job = Job(shape=shape, layout=Layout(dp=2), global_batch=4, dp=dp, optimiser=optimiser)
    return assemble(job, Mesh(job.layout, torch.device("cpu"), timedelta(seconds=20)), seed=0)


def coming(replica: RankModel) -> int:
    """How many units' weights are still being gathered."""
    return sum(unit._coming is not None for unit in replica.states._all())


def read_after_a_step() -> tuple[int, int]:
    """Gathers under way after a step, before and after a checkpoint's tensors are asked for."""
    replica = sharded("zero2")
    random_step(replica, 0)
    before = coming(replica)
    tensors_of(replica)
    after = coming(replica)
    replica.close()
    return before, after


def test_a_checkpoint_reads_no_memory_that_is_gathered_into() -> None:
    for before, after in on_ranks(2, read_after_a_step):
        assert before > 0
        assert after == 0


def gradient_bytes(mode: str) -> dict[str, tuple[int, int]]:
    """Bytes of whole gradients and of this rank's parts: at the start, after a step, in the next backward,
    and what all of them would have.
    """
    replica = sharded(mode)
    gradients = [g for buffer in replica.states.buffers.values() for g in buffer.gradients]
    measured = dict[str, tuple[int, int]]()

    def measure(when: str) -> None:
        tensors = ([g.flat for g in gradients], [g.accumulated for g in gradients])
        full, part = (sum(t.untyped_storage().nbytes() for t in of if t is not None) for of in tensors)
        measured.setdefault(when, (full, part))  # of a step of two microbatches: in the first backward

    measure("start")
    random_step_done(replica, 0)
    measure("after a step")
    weight = next(iter(replica.states.parameters.values()))
    weight.register_post_accumulate_grad_hook(lambda _: measure("backward"))
    random_step_done(replica, 1)
    size = sum(g.unit.size for g in gradients) * 4
    measured["all"] = (size, size // 2)
    replica.close()
    return measured


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_whole_gradients_and_parts_of_them_take_turns(mode: str) -> None:
    """The part exists from the reduction to the next step, the whole from the backward to the reduction."""
    for measured in on_ranks(2, gradient_bytes, mode):
        full, part = measured["all"]
        assert measured["start"] == (0, 0)
        assert measured["after a step"] == (0, part)
        assert measured["backward"][1] == 0
        assert 0 < measured["backward"][0] <= full


def trained(place: Any, path: str | None) -> dict[str, list[float]]:
    """Weights after two updates, of more units than fit into the memory for what is in files."""
    replica = sharded("zero3", layers=24, offload=place, offload_parameters=place, path=path)
    for step in range(2):
        random_step_done(replica, step)
    with replica.states.full_weights() as weights:
        values = {name: weight.flatten().tolist() for name, weight in weights.items()}
    replica.close()
    return values


def test_parameters_in_files_take_turns_in_little_memory(tmp_path: Path) -> None:
    """Without clipping, so that units could be updated while the backward runs."""
    assert on_ranks(2, trained, "nvme", str(tmp_path)) == on_ranks(2, trained, "cpu", None)
