"""Updates with states away: the same bits as in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stretto.engine.offload.scratch import OffloadError
from stretto.engine.offload.tensor_files import at_hand, is_away
from stretto.engine.optim import sharded_optimizer
from stretto.engine.optim.build import build_optimizer
from stretto.engine.optim.sharded_optimizer import ShardedOptimizer
from stretto.engine.optim.states import state_tensors
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement
from stretto.job.data_parallel import Offload
from stretto.job.optimiser import Optimiser

SHAPES = [(8, 6), (6,), (3,), (1,), (12, 4), (4,), (5, 5), (2, 3, 4), (7,), (64, 3)]
CONFIGS = [
    Optimiser(name="adamw"),
    Optimiser(name="adamw", states="bfloat16"),
    Optimiser(name="sgd", momentum=0.9),
    Optimiser(name="sgd", weight_decay=0.0),
    Optimiser(name="lamb"),
    Optimiser(name="adafactor"),
    Optimiser(name="muon"),
]


def fragments() -> list[ParameterFragment]:
    """Parameters of five units; those of a unit are views of one flat tensor, as masters are."""
    torch.manual_seed(0)
    results = list[ParameterFragment]()
    for unit in range(5):
        shapes = SHAPES[2 * unit : 2 * unit + 2]
        flat = torch.randn(sum(torch.Size(s).numel() for s in shapes))
        for shape, part in zip(shapes, flat.split([torch.Size(s).numel() for s in shapes]), strict=True):
            name = f"blocks.{unit}.weight"
            placed = ShardPlacement.unsharded(name, shape)
            results.append(
                ParameterFragment(
                    name=name,
                    parameter=nn.Parameter(part.view(shape)),
                    placed=placed,
                    gradient=None,
                    unit=unit,
                )
            )
    return results


def give_gradients(every: Sequence[ParameterFragment], step: int, dtype: torch.dtype) -> None:
    torch.manual_seed(100 + step)
    for at, fragment in enumerate(every):
        gradient = torch.randn(fragment.placed.shape).to(dtype)
        fragment.gradient = None if (at, step) == (4, 0) else gradient  # one gets none at first


def builder(config: Optimiser) -> Callable[[Sequence[ParameterFragment]], torch.optim.Optimizer]:
    return lambda some: build_optimizer(some, config)


def run(
    config: Optimiser, where: Offload, path: Path, dtype: torch.dtype = torch.float32, eager: bool = False
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Parameters after each of four steps as `copy` takes them, and all states at the end."""
    every, seen = fragments(), list[Tensor]()
    copied = dict[int, list[Tensor]]()
    of = {unit: [f for f in every if f.unit == unit] for unit in range(5)}
    after = list[int]()
    sharded = ShardedOptimizer(
        iter(every),
        builder(config),
        offload=where,
        path=path,
        rank=2,
        copy=lambda unit: copied.update({unit: [f.parameter.detach().clone() for f in of[unit]]}),
        after=after.append,
        eager=eager,
    )
    assert all(is_away(f.parameter) for f in every if f.parameter.numel() > 1) == (where == "nvme")
    sharded.set_rate(0.01)
    for step in range(4):
        give_gradients(every, step, dtype)
        if eager:
            for unit in (0, 1, 3):  # the rest is for `step` to begin
                sharded.gradient_ready(unit)
            sharded.step(0.01)
        else:
            sharded.step(0.01, 0.5)
        assert all(f.parameter.grad is None for f in every)
        seen += [value for unit in range(5) for value in copied.pop(unit)]
    assert after == list(range(5)) * 4
    states = list[dict[str, Tensor]]()
    for optimizer, fragment in sharded.owners():
        tensors = state_tensors(optimizer, fragment)
        states.append({name: at_hand(tensor.detach()).clone() for name, (tensor, _) in tensors.items()})
        states[-1]["parameter"] = at_hand(fragment.parameter).detach().clone()
    sharded.close()
    return seen, states


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.name}-{c.states}-{c.momentum}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_offloaded_states_give_bitwise_the_same_updates(
    config: Optimiser, dtype: torch.dtype, tmp_path: Path
):
    seen, states = run(config, "none", tmp_path, dtype)
    assert sum(map(len, states)) > len(states) or not config.weight_decay
    for where in ("cpu", "nvme"):
        offloaded, offloaded_states = run(config, where, tmp_path, dtype)
        assert all(torch.equal(a, b) for a, b in zip(seen, offloaded, strict=True))
        assert len(offloaded_states) == len(states)
        for state, other in zip(states, offloaded_states, strict=True):
            # states of a tensor that has had no gradient are there already
            assert state.keys() <= other.keys()
            assert all(torch.equal(state[name], other[name]) for name in state)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_updates_beside_the_backward(where: Offload, tmp_path: Path):
    config = CONFIGS[0]
    every = fragments()
    plain = ShardedOptimizer(every, builder(config))
    want = list[Tensor]()
    for step in range(4):
        give_gradients(every, step, torch.float32)
        plain.step(0.01)
        want += [f.parameter.detach().clone() for f in every]
    seen, _ = run(config, where, tmp_path, eager=True)
    assert all(torch.equal(a, b) for a, b in zip(want, seen, strict=True))


def test_masters_are_consumed_as_they_are_made(tmp_path: Path):
    """So that there are never all of them: two units at most."""
    yielded = list[ParameterFragment]()

    def one_by_one():
        for fragment in fragments():
            before = [f.parameter for f in yielded if f.unit < fragment.unit - 1 and f.parameter.numel() > 1]
            assert all(is_away(parameter) for parameter in before)
            yielded.append(fragment)
            yield fragment

    sharded = ShardedOptimizer(one_by_one(), builder(CONFIGS[0]), offload="nvme", path=tmp_path)
    assert len(yielded) == 10
    assert sharded.units == list(range(5))
    sharded.close()


def test_visits_read_and_change_offloaded_states(tmp_path: Path):
    every = fragments()
    values = [f.parameter.detach().clone() for f in every]
    sharded = ShardedOptimizer(every, builder(CONFIGS[0]), offload="nvme", path=tmp_path)
    for unit in sharded.visit(change=True):
        with torch.no_grad():
            for f in every:
                if f.unit == unit:
                    f.parameter.mul_(2)
    assert is_away(every[0].parameter)
    for unit in sharded.visit():
        for f, value in zip(every, values, strict=True):
            assert f.unit != unit or torch.equal(f.parameter, 2 * value)
    sharded.close()


def test_prepared_states_count_the_updates(tmp_path: Path):
    for where in ("none", "cpu", "nvme"):
        sharded = ShardedOptimizer(fragments(), builder(CONFIGS[0]), offload=where, path=tmp_path)
        sharded.prepare(7)
        steps = [float(o.state[f.parameter]["step"]) for o, f in sharded.owners()]
        assert steps == [7.0] * 10
        sharded.close()


def test_a_missing_offload_file_fails_the_step_with_its_name(tmp_path: Path):
    every = fragments()
    sharded = ShardedOptimizer(every, builder(CONFIGS[0]), offload="nvme", path=tmp_path)
    assert sharded.files is not None
    sharded.files.ring.drain()
    os.truncate(next(tmp_path.glob("*/block-00004")), 0)
    give_gradients(every, 1, torch.float32)
    message = r"reading optimiser states of unit 4 failed.*block-00004.*last checkpoint"
    with pytest.raises(OffloadError, match=message):
        sharded.step(0.01)
    sharded.close()


@pytest.mark.parametrize("eager", [False, True])
def test_an_error_in_the_update_thread_is_raised(eager: bool, tmp_path: Path):
    every = fragments()
    sharded = ShardedOptimizer(every, builder(CONFIGS[0]), offload="nvme", path=tmp_path, eager=eager)
    give_gradients(every, 1, torch.float32)
    every[7].gradient = torch.zeros(1)
    with pytest.raises(RuntimeError, match="gradient of size"):
        sharded.step(0.01)
    sharded.close()
    assert not os.listdir(tmp_path)


def test_copies_to_the_device_have_ended_before_states_go_back_to_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another unit gets the memory that the stream still reads, and the file what is half written."""
    every, calls = fragments(), list[str]()

    class Stream:
        def synchronize(self) -> None:
            calls.append("synchronize")

    sharded = ShardedOptimizer(
        every, builder(CONFIGS[0]), offload="nvme", path=tmp_path, copy=lambda unit: calls.append("copy")
    )
    sharded._device = torch.device("cpu")
    monkeypatch.setattr(sharded_optimizer, "current_stream", lambda device: Stream())
    put = sharded.files.put
    monkeypatch.setattr(sharded.files, "put", lambda unit: (calls.append("put"), put(unit))[1])
    give_gradients(every, 1, torch.float32)
    sharded.step()
    sharded.close()
    assert calls == ["copy", "synchronize", "put"] * 5
