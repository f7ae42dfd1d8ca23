from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stretto.engine.models import build
from stretto.job.experts import ExpertShape
from stretto.job.flops import (
    attention_flops,
    forward_flops_per_token,
    hardware_flops_per_step,
    hardware_flops_per_token,
    model_flops_per_step,
    model_flops_per_token,
    model_flops_utilisation,
)
from stretto.job.parameters import count_parameters
from stretto.job.presets import preset
from stretto.job.shape import ModelShape

SHAPES = {
    "gpt": ModelShape(family="gpt", layers=3, hidden=48, heads=4, vocab=101, sequence=16),
    "gpt, wide heads": ModelShape(
        family="gpt", layers=2, hidden=48, heads=3, head_dim=20, ffn=70, vocab=33, sequence=16, tied=False
    ),
    "llama": ModelShape(family="llama", layers=2, hidden=48, heads=4, vocab=101, sequence=16),
    "llama, grouped": ModelShape(
        family="llama", layers=2, hidden=64, heads=8, kv_heads=2, ffn=100, vocab=77, sequence=16, bias=True
    ),
    "llama, experts": ModelShape(
        family="llama",
        layers=2,
        hidden=48,
        heads=4,
        ffn=64,
        vocab=77,
        sequence=16,
        moe=ExpertShape(experts=5),
    ),
    "gpt, experts": ModelShape(
        family="gpt",
        layers=2,
        hidden=48,
        heads=4,
        vocab=77,
        sequence=16,
        moe=ExpertShape(experts=4, top_k=3, ffn=20, shared_ffn=36, z=0.1),
    ),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_forward_and_backward_as_torch_counts_them(shape: ModelShape):
    """With attention written out, torch counts every matrix product, all positions of the scores included."""
    batch, length = 2, 12
    model = build(shape)
    ids = torch.zeros(batch, length, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        loss = model.loss(model(ids), ids)
    assert forward.get_total_flops() == forward_flops_per_token(shape, length) * batch * length
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()
    assert model_flops_per_step(shape, length, batch) == 3 * forward.get_total_flops()


def megatron(shape: ModelShape, s: int, head_share: int, factor: int) -> float:
    """Narayanan et al. 2021, equation 3, per token: factor L h^2 (1 + s/(6h) + V/(head_share L h))."""
    h, layers = shape.hidden, shape.layers
    return factor * layers * h**2 * (1 + s / (6 * h) + shape.vocab / (head_share * layers * h))


@pytest.mark.parametrize("name", ["gpt2", "megatron-145.6b", "korthikanti-1000b"])
def test_papers_equations(name: str):
    shape = preset(name)
    assert model_flops_per_token(shape, 2048) == pytest.approx(megatron(shape, 2048, 12, 72), rel=1e-12)
    full = hardware_flops_per_token(shape, 2048, "full")
    assert full == pytest.approx(megatron(shape, 2048, 16, 96), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "gpus", "batch", "seconds", "mfu"),
    [
        ("korthikanti-22b", 8, 4, 1.10, 41.5),
        ("korthikanti-175b", 64, 64, 13.75, 51.4),
        ("korthikanti-530b", 280, 280, 37.83, 56.0),
        ("korthikanti-1000b", 512, 512, 71.49, 56.3),
    ],
)
def test_published_utilisation(name: str, gpus: int, batch: int, seconds: float, mfu: float):
    """Korthikanti et al. 2022, table 5, times given to 10 ms: within half a percent."""
    flops = model_flops_per_step(preset(name), 2048, batch)
    percent = 100 * model_flops_utilisation(flops, seconds, gpus, 312e12)
    assert percent == pytest.approx(mfu, rel=0.005)


@pytest.mark.parametrize(
    ("gpus", "tflops", "days"), [(384, 144, 90), (384, 153, 84), (768, 149, 43), (1536, 141, 23)]
)
def test_published_training_time(gpus: int, tflops: int, days: int):
    """Narayanan et al. 2021, table 2: 300B tokens of the 174.6B model, in days."""
    flops = 300e9 * hardware_flops_per_token(preset("korthikanti-175b"), 2048, "full")
    assert flops / (gpus * tflops * 1e12) / 86400 == pytest.approx(days, abs=1)


def test_palm_appendix_b():
    shape = preset("llama3-8b")
    count = count_parameters(shape)
    norms = (2 * shape.layers + 1) * shape.hidden
    weights = count.total - count.embedding - norms
    attention = 12 * shape.layers * shape.heads * shape.head_dim * 8192
    assert model_flops_per_token(shape, 8192) == 6 * weights + attention


def test_of_experts_those_that_a_token_goes_to():
    """Mixtral, written out: attention, router, two of eight experts, head."""
    shape, s = preset("mixtral-8x7b"), 4096
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    block = 2 * (attention + 4096 * 8 + 2 * 3 * 4096 * 14336) + 4 * s * 4096
    assert forward_flops_per_token(shape, s) == 32 * block + 2 * 4096 * 32000
    count = count_parameters(shape)
    norms = (2 * shape.layers + 1) * shape.hidden
    weights = count.active - count.embedding - norms
    assert model_flops_per_token(shape, s) == 6 * weights + 12 * shape.layers * shape.attention_width * s


@given(s=st.integers(1, 4096))
def test_causal_halves_attention_and_nothing_else(s: int):
    shape = SHAPES["llama, grouped"]
    full, half = model_flops_per_token(shape, s), model_flops_per_token(shape, s, causal=True)
    assert full - half == 3 * shape.layers * attention_flops(shape, s) / 2


def test_recomputation_only_adds():
    shape = SHAPES["gpt"]
    none, selective, full = (hardware_flops_per_token(shape, 16, r) for r in ("none", "selective", "full"))
    assert none == model_flops_per_token(shape, 16)
    assert selective == none + shape.layers * attention_flops(shape, 16)
    assert none < selective < full
    assert hardware_flops_per_step(shape, 16, 3, "full") == 48 * full
