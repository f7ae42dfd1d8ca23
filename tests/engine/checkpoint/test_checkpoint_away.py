"""Checkpoints of states that are in files: written and read with a few units in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stretto.engine.checkpoint.load import load
from stretto.engine.checkpoint.save import save
from stretto.engine.checkpoint.shards import Tensors
from stretto.engine.offload.tensor_files import at_hand, is_away
from stretto.engine.optim.build import build_optimizer
from stretto.engine.optim.sharded_optimizer import ShardedOptimizer
from stretto.engine.optim.states import state_tensors
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement
from stretto.job.data_parallel import Offload
from stretto.job.optimiser import Optimiser

UNITS, ROWS, COLUMNS = 6, 40, 33
SIZE = ROWS * COLUMNS


def optimizer_of(where: Offload, path: Path, seed: int) -> tuple[ShardedOptimizer, list[ParameterFragment]]:
    """Units of a matrix with a row of padding, and of a flat one in two parts, from inside a row."""
    torch.manual_seed(seed)
    every, shape = list[ParameterFragment](), (ROWS, COLUMNS)
    for unit in range(UNITS):
        padded = torch.zeros(ROWS + 1, COLUMNS)
        padded[:ROWS] = torch.randn(shape)
        every.append(
            ParameterFragment(
                name=f"{unit}.a",
                parameter=nn.Parameter(padded),
                placed=ShardPlacement.unsharded(f"{unit}.a", shape),
                unit=unit,
            )
        )
        flat = ShardPlacement.unsharded(f"{unit}.b", shape).part(shape, 0, SIZE)
        every.append(
            ParameterFragment(
                name=f"{unit}.b", parameter=nn.Parameter(torch.randn(SIZE)), placed=flat, unit=unit
            )
        )
    config = Optimiser(name="adamw")
    return ShardedOptimizer(
        every, lambda some: build_optimizer(some, config), offload=where, path=path
    ), every


def train(sharded: ShardedOptimizer, every: Sequence[ParameterFragment], steps: int) -> None:
    for _ in range(steps):
        for fragment in every:
            fragment.gradient = torch.randn(fragment.parameter.shape)
            if fragment.name.endswith("a"):
                fragment.gradient[ROWS:] = 0.0
        sharded.step(0.01)


def table(sharded: ShardedOptimizer) -> Tensors:
    results = dict[str, tuple[Tensor, ShardPlacement]]()
    for optimizer, fragment in sharded.owners():
        results[f"model.{fragment.name}"] = fragment.parameter.detach(), fragment.counted
        for key, value in state_tensors(optimizer, fragment).items():
            results[f"optim.{key}.{fragment.name}"] = value
    return results


def values(sharded: ShardedOptimizer) -> dict[str, Tensor]:
    return {name: at_hand(tensor).clone() for name, (tensor, _) in table(sharded).items()}


@pytest.mark.parametrize(("saved", "loaded"), [("nvme", "nvme"), ("nvme", "none"), ("cpu", "nvme")])
def test_states_in_files_go_through_a_checkpoint(saved: Offload, loaded: Offload, tmp_path: Path):
    sharded, every = optimizer_of(saved, tmp_path / "a", 0)
    train(sharded, every, 2)
    want = values(sharded)
    assert len(want) == 6 * UNITS
    assert is_away(every[3].parameter) == (saved == "nvme")
    moved = sharded.files.ring.moved if sharded.files is not None else 0
    path = save(tmp_path / "checkpoints", 2, table(sharded), {})
    if sharded.files is not None:  # each unit was read once, and none of them written
        assert sharded.files.ring.moved - moved <= UNITS * (2**12 + 3 * 4 * (2 * SIZE + COLUMNS))
    train(sharded, every, 1)  # and goes on
    sharded.close()

    other, others = optimizer_of(loaded, tmp_path / "b", 1)
    other.prepare(2)
    load(path, table(other))
    results = values(other)
    assert results.keys() == want.keys()
    assert all(torch.equal(want[name], results[name]) for name in want)
    again, again_fragments = optimizer_of("none", tmp_path, 2)  # and goes on as one in memory does
    again.prepare(2)
    load(path, table(again))
    for each, fragments in ((other, others), (again, again_fragments)):
        torch.manual_seed(7)
        train(each, fragments, 2)
    assert all(torch.equal(a, b) for a, b in zip(values(other).values(), values(again).values(), strict=True))
    other.close()
