"""Laws of the count of kept bytes; that the real layers keep so much, tests/models/test_activation_bytes.py
measures.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.job.flops import Recompute
from stretto.job.presets import preset
from stretto.job.shape import BlockNorms, ModelShape
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.published_activations import published_formula
from stretto.planner.memory.layer import layer_memory, layer_saved, total

GPT = replace(preset("korthikanti-22b"), dropout=0.1)
BASE = ComputeConfig(batch=4, sequence=2048, attention="explicit")
MODES: tuple[Recompute, ...] = ("none", "selective", "full")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (8, False), (8, True)])
def test_tensors_add_up_to_the_published_form(mode: Recompute, tp: int, sequence_parallel: bool):
    compute = replace(BASE, tp=tp, sequence_parallel=sequence_parallel, recompute=mode)
    closed, saved = published_formula(GPT, compute), layer_saved("block", GPT, compute)
    assert closed is not None
    statistics = sum(s.bytes for s in saved if "norm" in s.name and "statistics" in s.name)
    assert total(saved) - statistics == closed.bytes


def test_published_figures():
    """Megatron's 22B model, microbatch of 4, in units of sbh: figures worked out by hand."""
    unit = 4 * 2048 * 6144
    assert published_formula(GPT, BASE).bytes / unit == pytest.approx(34 + 5 * 64 * 2048 / 6144)  # type: ignore[union-attr]
    selective = replace(BASE, tp=8, sequence_parallel=True, recompute="selective")
    assert published_formula(GPT, selective).bytes / unit == 34 / 8  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("shape", "compute"),
    [
        (preset("llama3-8b"), BASE),
        (replace(GPT, dropout=0.0), BASE),
        (GPT, replace(BASE, element=4)),
        (GPT, replace(BASE, cp=2)),
    ],
)
def test_other_models_have_no_published_form(shape: ModelShape, compute: ComputeConfig):
    assert published_formula(shape, compute) is None


@pytest.mark.parametrize("shape", [GPT, preset("llama3-8b")], ids=["gpt", "llama"])
def test_every_mode_keeps_less_than_the_one_before(shape: ModelShape):
    for tp, cp, sp in ((1, 1, False), (4, 1, False), (4, 1, True), (2, 2, True)):
        sizes = [
            total(
                layer_saved("block", shape, replace(BASE, tp=tp, cp=cp, sequence_parallel=sp, recompute=mode))
            )
            for mode in MODES
        ]
        assert sizes[0] > sizes[1] > sizes[2]


def test_sequence_parallel_splits_all_of_a_block():
    plain, split = replace(BASE, tp=1), replace(BASE, tp=8, sequence_parallel=True)
    assert total(layer_saved("block", GPT, plain)) == 8 * total(layer_saved("block", GPT, split))


def test_padding_is_counted():
    compute = ComputeConfig(batch=2, sequence=30, tp=2, cp=2, sequence_parallel=True)
    assert compute.tokens == 2 * 32 // 2
    assert compute.shard == 2 * 32 // 4


def test_the_vocabulary_is_counted_padded():
    compute = ComputeConfig(batch=1, sequence=8, tp=2, vocab_multiple=64)
    shape = replace(GPT, vocab=100)
    probabilities = [s for s in layer_saved("head", shape, compute) if s.name == "loss probabilities"]
    assert [s.bytes for s in probabilities] == [4 * 8 * 64]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_fused_loss_keeps_the_16_bit_logits(tp: int):
    compute = ComputeConfig(batch=1, sequence=8, tp=tp, vocab_multiple=64, fused_loss=True)
    loss_bytes = {
        s.name: s.bytes
        for s in layer_saved("head", replace(GPT, vocab=128), compute)
        if s.name.startswith("loss")
    }
    assert loss_bytes == {"loss logits": 2 * 8 * 128 // tp, "loss statistics": 4 * 8}


def test_the_embedding_keeps_a_mask():
    assert layer_saved("embed", preset("llama3-8b"), BASE) == ()
    masks = [s.bytes for s in layer_saved("embed", GPT, BASE) if s.name == "embed.drop mask"]
    assert masks == [4 * 2048 * 6144]


def test_formulas_name_their_divisors():
    compute = replace(BASE, tp=2, cp=2)
    texts = {s.name: s.formula for s in layer_saved("block", GPT, compute)}
    assert texts["norm1 input"] == "2sbh/c"
    assert texts["attn.core q"] == "2sbad/(tc)"


@pytest.mark.parametrize("block_norms", ["pre", "sandwich", "post"])
def test_every_norm_of_a_decoder_block_has_temporaries(block_norms: BlockNorms):
    t5 = ModelShape(family="t5", layers=1, hidden=64, heads=4, vocab=64, sequence=32, block_norms=block_norms)
    compute = ComputeConfig(batch=1, sequence=32, target=32)
    tensors = layer_memory(t5, compute, t5.chain - 2).tensors
    norms = [tensor for tensor in tensors if tensor.name.startswith("norm")]
    assert len(norms) == 2 * (6 if block_norms == "sandwich" else 3)
    assert all(tensor.forward for tensor in norms if tensor.name.endswith("statistics"))
    assert all(tensor.backward for tensor in norms if tensor.name.endswith("input"))
