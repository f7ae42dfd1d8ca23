"""Traffic of layers against counts by hand; `tests/run/dryrun` compares it with the real code."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from stretto.job.experts import ExpertShape
from stretto.job.shape import ModelShape
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.traffic import Message, block_traffic, embedding_traffic, head_traffic

GPT = ModelShape(family="gpt", layers=2, hidden=64, heads=8, vocab=512, sequence=32)
COMPUTE = ComputeConfig(batch=2, sequence=32, tp=4)
ACTIVATION = 2 * 2 * 32 * 64  # bytes of an activation


def sizes(messages: tuple[Message, ...]) -> Counter[tuple[str, str, str]]:
    """Bytes by axis, kind and phase."""
    traffic = Counter[tuple[str, str, str]]()
    for message in messages:
        traffic[message.axis, message.kind, message.phase] += message.times * message.size
    return traffic


def test_one_rank_communicates_nothing() -> None:
    alone = ComputeConfig(batch=2, sequence=32)
    assert block_traffic(GPT, alone) == embedding_traffic(GPT, alone) == head_traffic(GPT, alone) == ()


def test_tensor_parallelism_reduces_four_times_a_block() -> None:
    traffic = sizes(block_traffic(GPT, COMPUTE))
    assert traffic == {("tp", "all-reduce", "F"): 2 * ACTIVATION, ("tp", "all-reduce", "I"): 2 * ACTIVATION}


def test_sequence_parallelism_moves_as_much_and_gathers_inputs_again() -> None:
    traffic = sizes(block_traffic(GPT, replace(COMPUTE, sequence_parallel=True)))
    assert traffic.pop(("tp", "all-gather", "W")) == 2 * ACTIVATION
    assert traffic == {
        ("tp", kind, phase): 2 * ACTIVATION for kind in ("all-gather", "reduce-scatter") for phase in "FI"
    }


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_repeats_communication(recompute: str) -> None:
    compute = replace(COMPUTE, cp=2, recompute=recompute)
    traffic = sizes(block_traffic(GPT, compute))
    assert traffic["cp", "send", "R"] == traffic["cp", "send", "F"] > 0
    full = recompute == "full"
    assert traffic["tp", "all-reduce", "R"] == (traffic["tp", "all-reduce", "F"] if full else 0)


def test_sharded_inputs_are_gathered_before_recomputation() -> None:
    compute = replace(COMPUTE, recompute="full", shard_inputs=True)
    assert sizes(block_traffic(GPT, compute))["tp", "all-gather", "R"] == ACTIVATION


def test_ranks_of_a_ring_send_a_quarter_less_than_whole_blocks() -> None:
    compute = replace(COMPUTE, tp=1, cp=8)
    sent = [sizes(block_traffic(GPT, compute, index))["cp", "send", "F"] for index in range(8)]
    block = 2 * 2 * (32 // 8 * 2) * 64  # keys and values of a rank's positions
    assert max(sent) == 7 * block == sizes(block_traffic(GPT, compute))["cp", "send", "F"]
    assert sum(sent) == 8 * 7 * block * 3 // 4


def test_gradients_of_a_ring_follow_in_32_bits() -> None:
    compute = replace(COMPUTE, tp=1, cp=2)
    first, second = (sizes(block_traffic(GPT, compute, index)) for index in range(2))
    assert first["cp", "send", "I"] - first["cp", "send", "F"] == 2 * ACTIVATION
    # of the first rank's block only the lower half matters to others
    assert second["cp", "send", "I"] - second["cp", "send", "F"] == ACTIVATION


def test_ulysses_exchanges_heads_for_positions() -> None:
    compute = replace(COMPUTE, tp=1, cp=2, context="ulysses")
    traffic = sizes(block_traffic(GPT, compute))
    assert traffic == {("cp", "all-to-all", phase): 4 * ACTIVATION // 2 for phase in "FI"}


def test_ulysses_repeats_key_heads_for_more_ranks() -> None:
    """Two key heads for four ranks: k and v travel as four heads each, half of q's eight."""
    compute = replace(COMPUTE, tp=1, cp=4, context="ulysses")
    traffic = sizes(block_traffic(replace(GPT, family="llama", kv_heads=2), compute))
    assert traffic == {("cp", "all-to-all", phase): 3 * ACTIVATION // 4 for phase in "FI"}


def test_copies_of_tokens_go_to_their_experts_and_back() -> None:
    moe = replace(GPT, moe=ExpertShape(experts=8, top_k=2, balance=0.0))
    traffic = sizes(block_traffic(moe, replace(COMPUTE, tp=1, ep=4, expert_tp=1)))
    assert traffic["ep", "all-to-all", "F"] == traffic["ep", "all-to-all", "I"] == 2 * 2 * ACTIVATION
    assert traffic["expert_tp-ep", "all-gather", "F"] == 8 * 8 * 4


def test_the_loss_reduces_three_numbers_a_token() -> None:
    traffic = sizes(head_traffic(GPT, COMPUTE))
    assert traffic["tp", "all-reduce", "F"] == 3 * 4 * 2 * 32
    assert traffic["tp", "all-reduce", "I"] == ACTIVATION
