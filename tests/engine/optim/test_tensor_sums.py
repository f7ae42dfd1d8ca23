"""Every optimiser's update and states, however tensors are split over ranks, are those of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import SHAPES, Split, set_gradients, unsplit, values
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ranks import on_ranks
from stretto.engine.optim import base
from stretto.engine.optim.build import build_optimizer
from stretto.engine.optim.states import prepare, state_tensors
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement, TensorBox
from stretto.errors import StrettoError
from stretto.job.optimiser import Optimiser

CONFIGS = {
    "adamw": Optimiser(name="adamw", lr=0.1, weight_decay=0.3),
    "bfloat16": Optimiser(name="adamw", states="bfloat16", lr=0.1, weight_decay=0.3),
    "sgd": Optimiser(name="sgd", lr=0.1, weight_decay=0.3, momentum=0.9),
    "lamb": Optimiser(name="lamb", lr=0.1, weight_decay=0.3, no_decay=("*.proj.*",)),
    "adafactor": Optimiser(name="adafactor", lr=0.7, weight_decay=0.3),
    "muon": Optimiser(name="muon", lr=0.1, weight_decay=0.3),
}
FULL_TENSOR_RULES = ("lamb", "adafactor", "muon")  # that look at whole tensors
SPLITS = [Split(4, 1), Split(1, 4), Split(2, 2), Split(2, 2, seed=3), Split(2, 1), Split(1, 2, seed=2)]
STEPS = 3


def train(fragments: list[ParameterFragment], config: Optimiser, steps: int = STEPS) -> torch.optim.Optimizer:
    optimizer = build_optimizer(fragments, config)
    for step in range(steps):
        set_gradients(fragments, values(100 + step))
        optimizer.step()
    return optimizer


@cache
def one_process(name: str) -> tuple[list[ParameterFragment], torch.optim.Optimizer]:
    plain = unsplit(values(0))
    return plain, train(plain, CONFIGS[name])


def difference(fragments: list[ParameterFragment], name: str) -> float:
    """Train them: how far any part of a weight or state is then from that of one process, by its size."""
    results, (plain, wanted), worst = train(fragments, CONFIGS[name]), one_process(name), 0.0
    for fragment, plain_fragment in zip(fragments, plain, strict=True):
        pairs = [(fragment.parameter.detach(), fragment.placed, plain_fragment.parameter.detach())]
        states = state_tensors(wanted, plain_fragment)
        mine = state_tensors(results, fragment)
        assert mine.keys() == states.keys(), fragment.name
        pairs += [(tensor, placed, states[key][0]) for key, (tensor, placed) in mine.items()]
        for local, placed, full in pairs:
            assert placed.shape == full.shape, fragment.name
            part = torch.zeros_like(local)
            placed.fill(part, full)
            if local.numel():
                worst = max(worst, float((local - part).abs().max() / full.abs().max()))
    return worst


def groups() -> dict[int, ProcessGroup]:
    """The group of this rank among runs of 2 and of 4."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return {2: pairs[dist.get_rank() // 2], 4: dist.group.WORLD}


def every_split() -> dict[str, list[float]]:
    results = {name: [] for name in (*CONFIGS, "alone")}
    by_size = groups()
    for split in SPLITS:
        size = split.tp * split.shards
        rank = dist.get_rank() % size
        for name in CONFIGS:
            fragments = split.of(rank, by_size[size], values(0))
            results[name].append(difference(fragments, name))
        for name in ("lamb", "adafactor"):  # as if the part were the tensor; muon has no whole matrix then
            fragments = [replace(f, holders=None) for f in split.of(rank, by_size[size], values(0))]
            results["alone"].append(difference(fragments, name))
    for name in CONFIGS:  # as the clients of a server, tensor-parallel among themselves
        train(nothing(by_size[2]), CONFIGS[name])
    return results


def nothing(holders: ProcessGroup | None = None) -> list[ParameterFragment]:
    return [
        ParameterFragment(
            name=n,
            parameter=nn.Parameter(torch.zeros(0, dtype=torch.float64)),
            placed=ShardPlacement(n, shape, ()),
            gradient=None,
            holders=holders,
        )
        for n, shape in SHAPES.items()
    ]


def test_every_split_is_one_process():
    results = on_ranks(4, every_split)
    for name in CONFIGS:
        for at, split in enumerate(SPLITS):
            assert max(rank[name][at] for rank in results) < 1e-12, f"{name} {split}"
    assert all(max(column) > 1e-3 for column in zip(*(rank["alone"] for rank in results), strict=True))


def padding(fragments: list[ParameterFragment]) -> list[Tensor]:
    """Return the elements that belong to no box."""
    results = list[Tensor]()
    for fragment in fragments:
        rest = torch.ones_like(fragment.parameter, dtype=torch.bool)
        for piece in fragment.placed.pieces:
            piece.of_local(rest).fill_(False)
        results.append(fragment.parameter.detach()[rest])
    return results


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_stays_zero(name: str):
    fragments = Split(1, 1).of(0, None, values(0))
    train(fragments, CONFIGS[name])
    empty = torch.cat(padding(fragments))
    assert empty.numel() == 12
    assert not empty.any()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_rank_that_holds_nothing_steps_too(name: str):
    train(nothing(), CONFIGS[name])
    empty = build_optimizer([], CONFIGS[name])
    empty.step()
    assert empty.param_groups


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_without_gradient_are_not_updated(name: str):
    fragments = unsplit(values(0))
    optimizer = build_optimizer(fragments, CONFIGS[name])
    set_gradients(fragments, values(1))
    for fragment in fragments[::2]:
        fragment.parameter.grad = None
    optimizer.step()
    for at, fragment in enumerate(fragments):
        same = torch.equal(fragment.parameter, values(0)[fragment.name])
        assert same == (at % 2 == 0), fragment.name
        assert bool(state_tensors(optimizer, fragment)) == (at % 2 == 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_optimiser_continues_from_loaded_states(name: str):
    config = CONFIGS[name]
    straight = unsplit(values(0))
    train(straight, config)

    first = unsplit(values(0))
    saved = train(first, config, STEPS - 1)
    second = [
        ParameterFragment(name=f.name, parameter=nn.Parameter(f.parameter.detach().clone()), placed=f.placed)
        for f in first
    ]
    resumed = build_optimizer(second, config)
    assert not any(state_tensors(resumed, f) for f in second)
    prepare(resumed, second, STEPS - 1)
    for old, new in zip(first, second, strict=True):
        states = state_tensors(saved, old)
        into = state_tensors(resumed, new)
        assert states.keys() == into.keys()
        for key, (tensor, placed) in into.items():
            assert tensor.dtype == states[key][0].dtype
            assert placed == states[key][1]
            tensor.copy_(states[key][0])
    set_gradients(second, values(100 + STEPS - 1))
    resumed.step()
    for a, b in zip(straight, second, strict=True):
        assert torch.equal(a.parameter, b.parameter), a.name


@pytest.mark.parametrize("name", ["bfloat16", *FULL_TENSOR_RULES])
def test_batches_of_any_size_make_the_same_update(name: str, monkeypatch: pytest.MonkeyPatch):
    """On a CPU a batch is closed once it would leave the cache; here after each fragment."""
    plain, _ = one_process(name)
    monkeypatch.setattr(base, "CACHED", 1)
    alone = unsplit(values(0))
    optimizer = train(alone, CONFIGS[name])
    assert isinstance(optimizer, base.FragmentOptimizer)
    set_gradients(alone, values(1))
    assert {len(batch.fragments) for batch in optimizer.begin()} == {1}
    for plain_fragment, fragment in zip(plain, alone, strict=True):
        torch.testing.assert_close(fragment.parameter, plain_fragment.parameter, rtol=1e-12, atol=1e-14)


def owners(split: Split, away: bool = False) -> dict[str, dict[str, int]]:
    """Return the least and the largest number of writes per element of each state."""
    results: dict[str, dict[str, int]] = {}
    counts: dict[tuple[str, str], Tensor] = {}
    for rank in range(split.tp * split.shards):
        fragments = split.of(rank, None, values(0))
        for fragment in fragments:
            fragment.counted_elsewhere = away
        optimizer = build_optimizer(fragments, CONFIGS["adafactor"])
        prepare(optimizer, fragments, 0)
        for fragment in fragments:
            for key, (_, placed) in state_tensors(optimizer, fragment).items():
                count = counts.setdefault((fragment.name, key), torch.zeros(placed.shape))
                for piece in placed.pieces:
                    piece.of_full(count).add_(float(piece.owned))
    for (name, key), count in counts.items():
        results.setdefault(name, {})[key] = int(count.min()) if count.min() == count.max() else -1
    return results


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_one_holder_writes_each_state(split: Split):
    once = owners(split)
    assert once["embed.tok.weight"] == {"row_var": 1, "col_var": 1}
    assert once["blocks.0.norm1.weight"] == {"variance": 1}
    assert {n for states in once.values() for n in states.values()} == {1}
    assert {n for states in owners(split, away=True).values() for n in states.values()} == {0}


@settings(max_examples=15, deadline=None)
@given(data=st.data(), name=st.sampled_from(FULL_TENSOR_RULES))
def test_any_pieces_of_a_tensor_make_its_update(data: st.DataObject, name: str):
    """Boxes that tile the tensors, in any order in flat memory with gaps, in one process."""
    tiled = list[ParameterFragment]()
    for full, shape in SHAPES.items():
        boxes = [((0,) * len(shape), shape)]
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, len(boxes) - 1))
            dim = data.draw(st.integers(0, len(shape) - 1))
            offsets, sizes = boxes[at]
            if sizes[dim] > 1:
                cut = data.draw(st.integers(1, sizes[dim] - 1))
                left, two = (
                    (*sizes[:dim], cut, *sizes[dim + 1 :]),
                    (*sizes[:dim], sizes[dim] - cut, *sizes[dim + 1 :]),
                )
                moved = (*offsets[:dim], offsets[dim] + cut, *offsets[dim + 1 :])
                boxes[at : at + 1] = [(offsets, left), (moved, two)]
        pieces, end = list[TensorBox](), 0
        for offsets, sizes in data.draw(st.permutations(boxes)):
            strides = tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))
            pieces.append(TensorBox(offsets=offsets, sizes=sizes, local=(end,), owned=True, strides=strides))
            end += prod(sizes) + data.draw(st.integers(0, 2))
        placed = ShardPlacement(full, shape, tuple(pieces))
        parameter = nn.Parameter(torch.zeros(end, dtype=torch.float64))
        placed.fill(parameter, values(0)[full])
        tiled.append(ParameterFragment(name=full, parameter=parameter, placed=placed))
    assert difference(tiled, name) < 1e-12
    assert not torch.cat(padding(tiled)).any()


@pytest.mark.parametrize("name", FULL_TENSOR_RULES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_gradients_that_are_not_finite_spoil_their_weights(name: str, value: float):
    fragments = unsplit(values(0))
    optimizer = build_optimizer(fragments, CONFIGS[name])
    gradients = values(1)
    for gradient in gradients.values():
        gradient.view(-1)[gradient.numel() // 2] = value
    set_gradients(fragments, gradients)
    optimizer.step()
    assert all(not fragment.parameter.isfinite().all() for fragment in fragments)


@pytest.mark.parametrize("name", ["lamb", "adafactor"])
def test_sums_of_many_elements_keep_their_digits(name: str):
    """Half a million squares in float32, against float64."""
    results = list[Tensor]()
    for dtype in (torch.float32, torch.float64):
        fragments = unsplit({"w.weight": torch.full((1 << 10, 1 << 9), 0.1, dtype=dtype)})
        optimizer = build_optimizer(fragments, CONFIGS[name])
        set_gradients(fragments, {"w.weight": torch.full((1 << 10, 1 << 9), 0.3, dtype=dtype)})
        optimizer.step()
        results.append(fragments[0].parameter.detach())
    torch.testing.assert_close(results[0].double(), results[1], rtol=0.0, atol=2e-8)


@pytest.mark.parametrize("name", ["lamb", "adafactor"])
def test_states_of_other_shapes_are_not_loaded(name: str) -> None:
    fragments = unsplit(values(0))
    optimizer = train(fragments, CONFIGS[name], steps=1)
    states = optimizer.state_dict()
    optimizer.load_state_dict(states)
    number, moments = next((n, s) for n, s in states["state"].items() if len(s))
    key = next(key for key in moments if key != "step")
    for change, about in ((moments[key].new_zeros(3), r"of shape \[3\]"), (None, "missing")):
        wrong = {k: v for k, v in moments.items() if k != key} | ({} if change is None else {key: change})
        with pytest.raises(StrettoError, match=f"state {key} of .* is {about}"):
            optimizer.load_state_dict({**states, "state": {**states["state"], number: wrong}})
