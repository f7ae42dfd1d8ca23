"""Operations of layers, against the formulas of model FLOPs and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.job.experts import ExpertShape
from stretto.job.flops import attention_flops, block_flops, head_flops
from stretto.job.shape import ModelShape
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.rank_step.counts import layer_flops

GPT = ModelShape(family="gpt", layers=2, hidden=64, heads=8, vocab=512, sequence=32)
LLAMA = ModelShape(family="llama", layers=2, hidden=64, heads=8, kv_heads=4, vocab=512, sequence=32)
COMPUTE = ComputeConfig(batch=2, sequence=32)


@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_one_rank_does_all_operations_of_the_model(shape: ModelShape) -> None:
    flops = layer_flops(shape, "block", COMPUTE)
    assert sum(flops.forward) == COMPUTE.tokens * block_flops(shape, 32)
    assert flops.forward[1] == COMPUTE.tokens * attention_flops(shape, 32)
    assert flops.backward[0] == 2 * flops.forward[0]
    assert 2 * flops.backward[1] == 5 * flops.forward[1]  # fused: scores are formed again
    assert layer_flops(shape, "head", COMPUTE).forward == (COMPUTE.tokens * head_flops(shape), 0)


def test_kept_probabilities_are_not_recomputed() -> None:
    flops = layer_flops(GPT, "block", replace(COMPUTE, attention="explicit"))
    assert flops.backward[1] == 2 * flops.forward[1]


@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_tensor_parallel_ranks_share_all_operations(shape: ModelShape) -> None:
    full, part = (layer_flops(shape, "block", replace(COMPUTE, tp=tp)) for tp in (1, 4))
    assert [4 * n for n in part.forward] == list(full.forward)


def test_copied_key_heads_count_on_every_rank() -> None:
    full, part = (layer_flops(LLAMA, "block", replace(COMPUTE, tp=tp)) for tp in (1, 8))
    assert 8 * part.forward[0] - full.forward[0] == 2 * COMPUTE.tokens * 64 * (2 * 4 * LLAMA.head_dim)


def test_a_ring_skips_what_no_query_sees() -> None:
    full_flops = layer_flops(GPT, "block", COMPUTE).forward[1]
    part = layer_flops(GPT, "block", replace(COMPUTE, cp=4)).forward[1]
    # three of the four quarters of its own block, for lower queries see no upper keys; half of three others
    assert part == full_flops // 16 * (3 / 4 + 3 / 2)
    exchanged = layer_flops(GPT, "block", replace(COMPUTE, cp=4, context="ulysses")).forward[1]
    assert 4 * exchanged == full_flops


def test_recomputed_operations_by_mode() -> None:
    forward = layer_flops(GPT, "block", COMPUTE).forward
    assert layer_flops(GPT, "block", COMPUTE).again == (0, 0)
    assert layer_flops(GPT, "block", replace(COMPUTE, recompute="full")).again == forward
    assert layer_flops(GPT, "block", replace(COMPUTE, recompute="selective")).again == (0, forward[1])


def test_experts_work_on_the_tokens_routed_to_them() -> None:
    moe = replace(LLAMA, moe=ExpertShape(experts=4, top_k=2, ffn=32, shared_ffn=16))
    flops = layer_flops(moe, "block", COMPUTE).forward
    mixing = 2 * COMPUTE.tokens * 2 * 64
    assert sum(flops) == COMPUTE.tokens * block_flops(moe, 32) + mixing
