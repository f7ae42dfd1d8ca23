"""The copy from which a checkpoint is written in the background: what it takes, where, and on real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.job.parameters import count_parameters
from stretto.planner.machines.catalogue import find_device
from stretto.planner.memory.fits import fit
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import RankMemory, rank_memory
from stretto.run.config import TrainConfig
from stretto.run.config.job import job_of
from stretto.run.config.load import parse
from tiny_job import job
from train_runs import Hook, train

CONFIG = """
model: {family: llama, layers: 4, hidden: 128, heads: 4, ffn: 256, vocab: 512}
data: {vocab: 512, sequence: 32}
batch: {global_size: 8, micro_size: 1}
train: {device: cuda, vocab_multiple: 1}
checkpoint: {async_save: true, every: 10}
"""


def ranks(*overrides: str) -> list[RankMemory]:
    return rank_memory(memory_of(job_of(parse(CONFIG, overrides=overrides))))


@pytest.mark.parametrize(
    ("overrides", "bytes_each"),
    [
        ((), 12),  # weights and AdamW's two moments
        (("train.dtype=bfloat16",), 12),  # masters in place of weights
        (("optim.name=sgd", "optim.momentum=0"), 4),
        (("train.dtype=bfloat16", "optim.states=bfloat16"), 8),
        (("dp.offload=nvme", "dp.path=/tmp"), 0),  # lie in files already
        (("finetune.freeze=['*']", "lora={rank: 1, targets: [q_proj]}"), 4),
        (("checkpoint.async_save=false",), 0),
        (("checkpoint.every=null",), 0),  # the last is waited for
    ],
)
@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero3"])
def test_a_rank_copies_its_part_of_what_is_saved(
    overrides: tuple[str, ...], bytes_each: int, mode: str
) -> None:
    expected = bytes_each * count_parameters(parse(CONFIG).shape()).total / 4
    with_copy = ranks(*overrides, "layout.dp=4", f"dp.mode={mode}")[0]
    without = ranks(*overrides, "layout.dp=4", f"dp.mode={mode}", "checkpoint.async_save=false")[0]
    assert with_copy.host - without.host == pytest.approx(expected, rel=2e-3)
    assert with_copy.total == without.total


def test_ranks_that_hold_both_copies_of_the_weights_divide_it() -> None:
    pipeline = ("layout.pp=2", "schedule.name=dualpipe")
    both = ranks(*pipeline)
    expected = 12 * count_parameters(parse(CONFIG).shape()).total
    assert sum(memory.host for memory in both) == pytest.approx(expected, rel=2e-3)


def test_where_host_and_device_share_their_memory_it_is_the_device_s() -> None:
    cpu = ("train.device=cpu", "layout.pp=2", "batch.micro_size=2")
    with_copy, without = ranks(*cpu), ranks(*cpu, "checkpoint.async_save=false")
    for memory, other in zip(with_copy, without, strict=True):
        assert memory.saving > 0 == memory.host
        assert (memory.total - other.total, memory.between_actions - other.between_actions) == (
            memory.saving,
            memory.saving,
        )
    device = find_device("cpu")
    assert fit(with_copy, device).allocated.mid > fit(without, device).allocated.mid


# ------------------------------------------------------------------ beside real ranks


def keep_sizes(path: str) -> Hook:
    return _keep_sizes, (path,)


def _keep_sizes(path: str) -> None:
    from torch.distributed import get_rank

    from stretto.engine.checkpoint.host_copy import HostCopy

    inner = HostCopy.copy

    def copy(self: HostCopy, *arguments: Any) -> Any:
        copies = inner(self, *arguments)
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps([get_rank(), self._memory.numel()]) + "\n")
        return copies

    HostCopy.copy = copy


def test_it_is_what_ranks_copy(tmp_path: Path) -> None:
    overrides = ("layout.dp=2", "dp.mode=zero3", "train.dtype=bfloat16", "train.steps=2")
    overrides += ("checkpoint.async_save=true", "checkpoint.every=1")
    config: TrainConfig = job(tmp_path, *overrides, model="{family: llama, layers: 4, hidden: 128, heads: 4}")
    train(config, keep_sizes(str(tmp_path / "sizes")))
    copied = dict(json.loads(line) for line in (tmp_path / "sizes").read_text().splitlines())
    assert copied.keys() == {0, 1}
    (predicted,) = rank_memory(memory_of(job_of(config)))
    for size in copied.values():  # beside weights and states, each tensor begins at a multiple of 64 bytes
        assert predicted.saving == pytest.approx(size, rel=5e-3)
