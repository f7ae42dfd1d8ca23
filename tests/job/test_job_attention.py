"""Blocks of different kinds, latent attention, windows: their parameters, FLOPs and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.engine.models import build
from stretto.errors import StrettoError
from stretto.job.attention import AttentionShape, LatentShape
from stretto.job.experts import ExpertShape
from stretto.job.flops import (
    attention_flops,
    block_flops,
    forward_flops_per_token,
    hardware_flops_per_token,
    layer_costs,
    model_flops_per_token,
)
from stretto.job.parameters import block_shapes, count_parameters, parameter_shapes
from stretto.job.presets import PRESETS, preset
from stretto.job.shape import ModelShape, shape_from_record, shape_to_record
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.rank_parameters import Shares, layer_elements
from stretto.planner.memory.layer import layer_saved, total

PLAIN = ModelShape(family="llama", layers=6, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=50, sequence=64)


def test_which_blocks_have_experts() -> None:
    moe = ExpertShape(experts=4, ffn=16, dense_layers=2, every=2)
    shape = replace(PLAIN, moe=moe)
    assert [shape.block(i).moe is not None for i in range(6)] == [False, False, False, True, False, True]
    assert [many for _, many in shape.kinds()] == [4, 2]
    names = parameter_shapes(shape)
    assert names["blocks.0.mlp.gate_up.weight"] == (96, 32)
    assert names["blocks.3.mlp.experts.gate_up"] == (4, 32, 32)
    assert "blocks.3.mlp.gate_up.weight" not in names
    total = sum(
        count_parameters(replace(PLAIN, moe=m)).per_layer * n
        for m, n in ((None, 4), (ExpertShape(experts=4, ffn=16), 2))
    )
    assert count_parameters(shape).blocks == total


def test_alike_blocks_are_the_model_itself() -> None:
    for name in ("gpt2", "llama3-8b", "mixtral-8x7b"):
        shape = preset(name)
        replace(shape).block(3)  # an equal shape asked first
        assert shape.block(3) is shape
        assert shape.kinds() == ((shape, shape.layers),)


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b", "llama4-e128", "llama3-8b"])
def test_flops_are_the_blocks_sum(name: str) -> None:
    shape, s = preset(name), 2048
    each = [block_flops(shape.block(i), s) for i in range(shape.layers)]
    head = 2 * shape.hidden * shape.vocab
    assert forward_flops_per_token(shape, s) == pytest.approx(sum(each) + head, rel=1e-12)
    assert sum(layer_costs(shape, s)) == pytest.approx(sum(each) + head, rel=1e-12)
    assert block_flops(shape, s) * shape.layers == pytest.approx(sum(each), rel=1e-12)


def test_deepseek_v3_written_out() -> None:
    """Its report has 14.8T tokens of length 4096 in 2.664M hours of H800 (arXiv 2412.19437, table 1): near
    0.38 of the 16-bit peak.
    """
    shape, s = preset("deepseek-v3"), 4096
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    scores = 2 * s * 128 * (192 + 128)
    dense = 2 * (attention + 3 * 7168 * 18432) + scores
    routed = 2 * (attention + 7168 * 256 + 9 * 3 * 7168 * 2048) + scores
    full = 3 * dense + 58 * routed + 2 * 7168 * 129280
    assert forward_flops_per_token(shape, s) == full
    half = 3 * (full - 61 * scores / 2)
    assert model_flops_per_token(shape, s, causal=True) == pytest.approx(half, rel=1e-12)
    assert 14.8e12 * half / (2.664e6 * 3600 * 989e12) == pytest.approx(0.38, abs=0.03)


def test_recomputation_of_different_blocks() -> None:
    shape, s = preset("gpt-oss-20b"), 4096
    again = [attention_flops(shape.block(i), s, causal=True) for i in range(shape.layers)]
    assert again[0] < again[1]
    assert again[:2] == again[2:4]
    model = model_flops_per_token(shape, s, causal=True)
    selective = hardware_flops_per_token(shape, s, "selective", causal=True)
    assert selective == pytest.approx(model + sum(again), rel=1e-12)
    full = hardware_flops_per_token(shape, s, "full", causal=True)
    assert full == pytest.approx(model * 4 / 3 - 2 * shape.hidden * shape.vocab, rel=1e-12)


@pytest.mark.parametrize(("window", "sequence"), [(None, 64), (8, 64), (64, 64), (100, 64), (1, 5)])
def test_a_window_counts_the_pairs_within_it(window: int | None, sequence: int) -> None:
    """Against counting: position i sees min(i + 1, window), where s / 2 stands for (s + 1) / 2."""
    seen = AttentionShape(window=window).mean_context(sequence, causal=True)
    width = min(window or sequence, sequence)
    exact = sum(min(i + 1, width) for i in range(sequence)) / sequence
    assert seen == pytest.approx(exact - width / (2 * sequence))
    assert AttentionShape(window=window).mean_context(sequence, causal=False) == width


def test_latent_attention_by_tensor() -> None:
    latent = LatentShape(kv_rank=10, rope_dim=4, value_dim=6, q_rank=12)
    shape = replace(PLAIN, kv_heads=4, head_dim=12, attention=AttentionShape(latent=latent))
    shapes = {name: sizes for name, sizes in block_shapes(shape).items() if name.startswith("attn.")}
    assert shapes == {
        "attn.q_down.weight": (12, 32),
        "attn.q_down_norm.weight": (12,),
        "attn.q_up.weight": (48, 12),
        "attn.kv_down.weight": (14, 32),
        "attn.kv_down_norm.weight": (10,),
        "attn.kv_up.weight": (4 * (8 + 6), 10),
        "attn.proj.weight": (32, 24),
    }
    halves = layer_elements(shape, 1, Shares(tp=2))
    assert halves["blocks.0.attn.q_up.weight"] == 24 * 12
    assert halves["blocks.0.attn.kv_up.weight"] == 28 * 10
    assert halves["blocks.0.attn.kv_down.weight"] == 14 * 32
    assert halves["blocks.0.attn.proj.weight"] == 32 * 12


def test_ranks_hold_the_blocks_own_kind() -> None:
    shape = replace(PLAIN, moe=ExpertShape(experts=4, ffn=16, dense_layers=1))
    assert layer_elements(shape, 1, Shares(ep=2))["blocks.0.mlp.down.weight"] == 32 * 48
    assert layer_elements(shape, 2, Shares(ep=2))["blocks.1.mlp.experts.down"] == 2 * 32 * 16


def test_what_is_kept_before_heads() -> None:
    """Latent vectors before and after their norms, of a rank's own tokens; queries and keys before theirs, as
    parts of one product with the values. Values and the output are as wide as values are.
    """
    how = ComputeConfig(batch=2, sequence=8, tp=2)
    latent = LatentShape(kv_rank=10, rope_dim=4, value_dim=6, q_rank=12)
    shape = replace(PLAIN, kv_heads=4, head_dim=12, attention=AttentionShape(latent=latent))
    saved_bytes = {saved.name: saved.bytes for saved in layer_saved("block", shape, how)}
    assert saved_bytes["attn.kv_down_norm input"] == 2 * 16 * (10 + 4)
    assert saved_bytes["attn.kv_up input"] == 2 * 16 * 10
    assert saved_bytes["attn.q_down_norm input"] == saved_bytes["attn.q_up input"] == 2 * 16 * 12
    split = {s.name: s.bytes for s in layer_saved("block", shape, replace(how, sequence_parallel=True))}
    assert split["attn.kv_up input"] == 2 * 8 * 10
    assert saved_bytes["attn.core k, v"] == 2 * 16 * 2 * (12 + 6)
    assert saved_bytes["attn.proj input"] == 2 * 16 * 2 * 6
    normed = replace(PLAIN, attention=AttentionShape(norm="head"))
    more = total(layer_saved("block", normed, how)) - total(layer_saved("block", PLAIN, how))
    assert more == 2 * 16 * (2 + 2 * 1) * 8 + 4 * 16 * (2 + 1)


@pytest.mark.parametrize("name", PRESETS)
def test_a_record_reads_back(name: str) -> None:
    shape = preset(name)
    assert shape_from_record(shape_to_record(shape)) == shape


def test_a_record_leaves_out_defaults() -> None:
    assert not {"attention", "mlp", "norm", "unmodelled_features"} & set(shape_to_record(preset("gpt2")))
    assert "attention" not in shape_to_record(preset("qwen3-8b"))  # the family's
    assert shape_to_record(preset("mistral-7b"))["attention"]["window"] == 4096


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("olmo2-7b", "one norm of queries and keys over all heads"),
        ("nemotron4-15b", "relu2"),
        ("smollm3-3b", "every fourth block without positions"),
    ],
)
def test_what_is_planned_only_is_not_built(name: str, says: str) -> None:
    with pytest.raises(StrettoError, match=says):
        build(preset(name))


def test_wrong_values() -> None:
    with pytest.raises(StrettoError, match="rope_dim is 12: it must be below head_dim, which is 8"):
        replace(PLAIN, attention=AttentionShape(latent=LatentShape(kv_rank=4, rope_dim=12, value_dim=4)))
    with pytest.raises(StrettoError, match="mlp is swigl: it must be one of") as caught:
        ModelShape(family="gpt", layers=1, hidden=8, heads=1, vocab=9, sequence=4, mlp="swigl")  # pyright: ignore
    assert "swiglu" in (caught.value.hint or "")
    with pytest.raises(StrettoError, match="window is 0"):
        AttentionShape(window=0)
    with pytest.raises(StrettoError, match="every is 0"):
        ExpertShape(experts=4, every=0)
