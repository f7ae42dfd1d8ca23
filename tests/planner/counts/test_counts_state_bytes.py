"""Bytes of weights, gradients and states by mode, against sums made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stretto.layout.shards import ShardSizes, shard_sizes
from stretto.planner.counts.rank_parameters import Parameter
from stretto.planner.counts.state_bytes import StateBytes, StateConfig, cut_units, state_bytes

# 48 elements of matrices, 10 of vectors
LAYERS = [
    (1, [Parameter("blocks.0.norm1.weight", 4, (4,)), Parameter("blocks.0.attn.qkv.weight", 24, (6, 4))]),
    (2, [Parameter("blocks.1.attn.qkv.weight", 24, (6, 4)), Parameter("blocks.1.attn.qkv.bias", 6, (6,))]),
]
EXPERT = Parameter("blocks.0.mlp.experts.up", 40, (8, 2, 5), expert=True)
HALF = {"element": 2, "keep": ("*norm*",)}


def states_of(mode: Any, copies: int = 2, sizes: ShardSizes | None = None, **fields: Any) -> StateBytes:
    state_config = StateConfig(mode=mode, sizes=sizes or shard_sizes(mode, copies), copies=copies, **fields)
    return state_bytes(cut_units(LAYERS, state_config))


@pytest.mark.parametrize(
    ("mode", "weights", "gradients", "states"),
    [
        # one unit of 58 elements, or 2 x 29; AdamW's two means, and a count of 4 tensors
        ("ddp", 4 * 58, 4 * 58, 8 * 58 + 16),
        ("server", 4 * 58, 4 * 58, 8 * 58 + 16),
        ("zero1", 4 * 58, 4 * 58, 8 * 29 + 16),
        ("zero2", 4 * 58, 4 * 29, 8 * 29 + 16),
        # of each layer: 28 and 30 elements
        ("zero3", 4 * 29, 4 * 29, 8 * 29 + 16),
    ],
)
def test_state_bytes_in_32_bits_by_mode(mode: str, weights: int, gradients: int, states: int) -> None:
    assert states_of(mode) == StateBytes(weights=weights, gradients=gradients, optimizer=states)
    twice = states_of(mode, element=8)
    assert twice == StateBytes(weights=2 * weights, gradients=2 * gradients, optimizer=2 * (states - 16) + 16)


@pytest.mark.parametrize(
    ("mode", "weights", "gradients", "masters", "states"),
    [
        # 54 elements of 16 bits and a norm of 4 in 32
        ("ddp", 2 * 54 + 16, 4 * 58, 4 * 54, 8 * 58 + 16),
        ("zero1", 2 * 54 + 16, 4 * 58, 4 * 27, 8 * (27 + 2) + 16),
        ("zero2", 2 * 54 + 16, 4 * 29, 4 * 27, 8 * 29 + 16),
        ("zero3", 2 * 27 + 8, 4 * 29, 4 * 27, 8 * 29 + 16),
    ],
)
def test_state_bytes_in_16_bits_by_mode(
    mode: str, weights: int, gradients: int, masters: int, states: int
) -> None:
    assert states_of(mode, **HALF) == StateBytes(
        weights=weights, gradients=gradients, optimizer=states, masters=masters
    )
    same = states_of(mode, **HALF, gradient=2)
    shared = 2 if mode in ("zero2", "zero3") else 1
    assert same.gradients == (2 * 54 + 16) // shared
    assert replace(same, gradients=gradients) == states_of(mode, **HALF)


def test_units_are_padded_for_the_ranks_that_share_them() -> None:
    assert states_of("zero1", 8) == StateBytes(weights=4 * 64, gradients=4 * 64, optimizer=8 * 8 + 16)
    assert states_of("zero3", 8) == StateBytes(
        weights=4 * (4 + 4), gradients=4 * (4 + 4), optimizer=8 * (4 + 4) + 16
    )  # 28 to 32, 30 to 32
    last = states_of("zero1", 8, copy=7)
    assert last == StateBytes(
        weights=4 * 64, gradients=4 * 64, optimizer=8 * 2 + 16
    )  # 6 of its 8 are padding
    assert [unit.size for unit in cut_units(LAYERS, StateConfig(bucket=1))] == [6, 24, 24, 4]
    every = StateConfig(mode="zero1", sizes=ShardSizes(1, 1, 8), copies=8, bucket=1)
    assert state_bytes(cut_units(LAYERS, every)).weights == 4 * (8 + 24 + 24 + 8)


def test_parameters_gradients_and_states_may_be_sharded_differently() -> None:
    sizes = ShardSizes(2, 4, 8)
    state = states_of("zero3", 16, sizes)
    assert state == StateBytes(weights=4 * 64 // 2, gradients=4 * 64 // 4, optimizer=8 * 8 + 16)


def test_experts_with_fewer_copies_are_sharded_less() -> None:
    layers = [(1, [*LAYERS[0][1], EXPERT])]
    state_config = StateConfig(mode="zero3", sizes=shard_sizes("zero3", 4), copies=4, expert_copies=2)
    dense, expert = 28 // 4, 40 // 2
    state = state_bytes(cut_units(layers, state_config))
    assert state == StateBytes(
        weights=4 * (dense + expert), gradients=4 * (dense + expert), optimizer=8 * (dense + expert) + 12
    )
    alone = state_bytes(cut_units(layers, replace(state_config, expert_copies=1)))
    assert alone.weights == 4 * (dense + 40)


@pytest.mark.parametrize(
    ("optimiser", "states"),
    [
        ({"optimiser": "sgd"}, 0),
        ({"optimiser": "sgd", "momentum": 0.9}, 4 * 58),
        ({"optimiser": "lamb"}, 8 * 58 + 16),
        ({"moment": 2}, 4 * 58 + 16),
        # rows and columns of two matrices of 6 x 4, all of the vectors
        ({"optimiser": "adafactor"}, 4 * (2 * (6 + 4) + 10) + 16),
        # momentum of the matrices, two means of the vectors
        ({"optimiser": "muon", "momentum": 0.95}, 4 * 48 + 8 * 10 + 8),
    ],
)
def test_states_of_optimisers(optimiser: dict[str, Any], states: int) -> None:
    assert states_of("ddp", 1, **optimiser).optimizer == states


def test_adafactor_s_means_are_whole_on_every_rank() -> None:
    # the first of two has the second layer, 30 elements less 1, the other one and the norm
    assert states_of("zero1", optimiser="adafactor").optimizer == 4 * (2 * (6 + 4) + 6) + 16
    state_config = StateConfig(optimiser="adafactor")
    stacked = cut_units(
        [(1, [EXPERT, Parameter("blocks.0.mlp.experts.up_bias", 16, (8, 2), True)])], state_config
    )
    assert state_bytes(stacked).optimizer == 4 * (8 * (2 + 5) + 16) + 8


def test_only_a_server_s_first_rank_has_states() -> None:
    assert states_of("server", copy=1) == StateBytes(weights=4 * 58, gradients=4 * 58, optimizer=16)
    assert states_of("server", **HALF, copy=1) == StateBytes(
        weights=2 * 54 + 16, gradients=4 * 58, optimizer=16
    )
    (unit,) = cut_units(LAYERS, StateConfig(mode="server", copies=3))
    assert unit.arriving == 3 * unit.full_gradient


def test_offloaded_states_and_parameters_leave_the_device() -> None:
    states, masters = 8 * 29 + 16, 4 * 29
    away = StateBytes(weights=4 * 58, gradients=4 * 29, host=states + masters)
    assert states_of("zero2", offload="cpu") == away
    # where host and device are one, masters come on top
    assert states_of("zero2", offload="cpu", unified_memory=True) == StateBytes(
        weights=4 * 58, gradients=4 * 29, optimizer=states, masters=masters
    )
    files = states_of("zero2", offload="nvme", bucket=1)
    assert files == StateBytes(
        weights=4 * 58, gradients=4 * 29, host=_ring([3, 12, 12, 2]), disk=states + masters
    )
    moved = states_of("zero3", offload_parameters="cpu")
    assert (moved.weights, moved.host) == (0, 4 * 29)
    assert states_of("zero3", offload_parameters="nvme").disk == 4 * 29
    assert states_of("zero3", offload_parameters="cpu", unified_memory=True).weights == 4 * 29


def _ring(sizes: list[int]) -> int:
    """Three times the largest unit: 4 bytes of master and 8 of moments an element, and a step counter."""
    return min(3 * (12 * max(sizes) + 4), sum(12 * size + 4 for size in sizes))


def test_a_tied_weight_has_a_unit_of_its_own_and_is_split_with_its_last_layer() -> None:
    tied = Parameter("embed.tok.weight", 12, (3, 4))
    layers = [(0, [tied]), *LAYERS, (3, [Parameter("head.norm.weight", 4, (4,)), tied])]
    units = cut_units(layers, StateConfig(), frozenset({tied.name}))
    assert [p.name for p in units[0].parameters] == [tied.name]
    assert sum(unit.size for unit in units) == 58 + 12 + 4
    assert {0, 3} <= units[0].users
    assert units[0].gradient_of(tied.name) == units[0].full_gradient == 4 * 12


def test_gradients_that_stay_beside_wider_ones() -> None:
    """2 bytes more for each element of 16 bits, whole on every rank; none for those of 32."""
    for mode in ("ddp", "zero1"):
        plain, both = (states_of(mode, copied=copied, **HALF) for copied in (False, True))
        assert both.gradients - plain.gradients == 2 * 54
        assert replace(both, gradients=0) == replace(plain, gradients=0)
    assert states_of("ddp", copied=True) == states_of("ddp")


def test_float32_shards_need_no_masters() -> None:
    """16 bytes a parameter, in place of 18, where parameters are sharded."""
    wide, plain = (states_of("zero3", wide_shards=w, **HALF) for w in (True, False))
    assert wide.masters == 0
    assert wide.weights == 2 * (plain.weights - 4 * 2) + 4 * 2  # of the norm's 4 elements, 2 are here
    assert (wide.gradients, wide.optimizer) == (plain.gradients, plain.optimizer)
    assert states_of("zero1", wide_shards=True, **HALF) == states_of("zero1", **HALF)


def test_masters_as_the_16_bits_that_weights_lack() -> None:
    plain, halved = (states_of("zero1", remainders=remainders, **HALF) for remainders in (False, True))
    assert 2 * halved.masters == plain.masters
    assert replace(halved, masters=0) == replace(plain, masters=0)
    assert states_of("zero1", remainders=True) == states_of("zero1")
