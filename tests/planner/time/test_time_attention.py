"""Times of attention: published rates, the scores in memory, masks, measured devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from stretto.job.framework import Framework
from stretto.job.presets import preset
from stretto.job.shape import ModelShape
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.machines.catalogue import entries, find_device
from stretto.planner.time.kernels import KernelTimes, kernel_times
from stretto.planner.time.operators import attention_seconds, matmul_seconds, pass_seconds

# device, queries, keys, heads, head_dim, causal, backward, TFLOP/s: FlashAttention-2 on A100
# (liangan1/GPU_travel performance/flash-attn), FlashAttention-3 on H100 (Shah et al. 2024, figure 5),
# FlashAttention-2 on RTX 4090 (apache/tvm tl_doc/flash_perf.md)
PUBLISHED = (
    ("a100-80gb-sxm", 1024, 1024, 512, 128, False, False, 177.7),
    ("a100-80gb-sxm", 1024, 4096, 128, 128, False, False, 183.3),
    ("a100-80gb-sxm", 4096, 4096, 32, 128, False, False, 185.6),
    ("h100-80gb-sxm", 16384, 16384, 32, 64, False, False, 497),
    ("h100-80gb-sxm", 16384, 16384, 32, 64, True, False, 475),
    ("h100-80gb-sxm", 16384, 16384, 16, 128, False, False, 649),
    ("h100-80gb-sxm", 16384, 16384, 16, 128, True, False, 616),
    ("h100-80gb-sxm", 16384, 16384, 8, 256, False, False, 756),
    ("h100-80gb-sxm", 16384, 16384, 8, 256, True, False, 642),
    ("rtx-4090", 2048, 2048, 128, 64, False, False, 168.9),
    ("rtx-4090", 2048, 2048, 128, 128, True, False, 151.2),
    ("rtx-4090", 2048, 2048, 128, 128, False, True, 124.6),
    ("rtx-4090", 2048, 2048, 128, 128, True, True, 99.2),
)


@pytest.mark.parametrize("row", PUBLISHED, ids=str)
def test_published_rates(row: tuple[str, int, int, int, int, bool, bool, float]) -> None:
    name, queries, keys, heads, head_dim, causal, backward, tflops = row
    device = find_device(name)
    if name.startswith("h100"):  # at a fixed clock, of which sustained power leaves as much as of products
        tflops *= device.sustained["bf16"] / device.tflops["bf16"]
    seconds = attention_seconds(
        device=device,
        batch=1,
        queries=queries,
        keys=keys,
        heads=heads,
        head_dim=head_dim,
        causal=causal,
        backward=backward,
    )
    flops = 4 * heads * queries * keys * head_dim * (2.5 if backward else 1) / (2 if causal else 1)
    assert flops / seconds / 1e12 == pytest.approx(tflops, rel=0.12)


def test_the_core_of_a_22b_layer_takes_as_long_as_published() -> None:
    """Korthikanti et al. 2022, table 4: repeating it costs 1.3 ms a layer, eight ways split, 4 sequences."""
    device = find_device("a100-80gb-sxm")
    core = attention_seconds(
        device=device, batch=4, queries=2048, keys=2048, heads=8, head_dim=96, precision="fp16", flash=False
    )
    assert core == pytest.approx(1.3e-3, rel=0.15)
    back = attention_seconds(
        device=device,
        batch=4,
        queries=2048,
        keys=2048,
        heads=8,
        head_dim=96,
        precision="fp16",
        flash=False,
        backward=True,
    )
    assert 1.2 * core < back < 2.5 * core
    fused = attention_seconds(
        device=device, batch=4, queries=2048, keys=2048, heads=8, head_dim=96, precision="fp16"
    )
    assert fused < core / 3


@pytest.mark.parametrize("name", [entry.device.name for entry in entries()])
@pytest.mark.parametrize("flash", [True, False])
def test_larger_attention_takes_no_less_time(name: str, flash: bool) -> None:
    device = find_device(name)
    for backward in (False, True):
        lengths = [
            attention_seconds(
                device=device,
                batch=2,
                queries=s,
                keys=s,
                heads=4,
                head_dim=128,
                flash=flash,
                backward=backward,
            )
            for s in (64, 512, 1000, 4096, 65536)
        ]
        assert all(0 < before < after for before, after in pairwise(lengths))
        # in the long run four times as long where it is twice
        longer = attention_seconds(
            device=device,
            batch=2,
            queries=131072,
            keys=131072,
            heads=4,
            head_dim=128,
            flash=flash,
            backward=backward,
        )
        assert longer / lengths[-1] == pytest.approx(4, rel=0.1)
    forward, back = (
        attention_seconds(
            device=device, batch=8, queries=4096, keys=4096, heads=16, head_dim=128, flash=flash, backward=b
        )
        for b in (False, True)
    )
    assert 1.4 * forward < back < 5 * forward


def test_a_mask_halves_long_sequences_of_a_fused_kernel_only() -> None:
    device = find_device("a100-80gb-sxm")

    def ratio(length: int, flash: bool) -> float:
        both = (
            attention_seconds(
                device=device,
                batch=4,
                queries=length,
                keys=length,
                heads=16,
                head_dim=128,
                causal=c,
                flash=flash,
            )
            for c in (True, False)
        )
        masked, full = both
        return masked / full

    assert ratio(65536, True) == pytest.approx(0.5, abs=0.02)
    assert ratio(1024, True) > 0.6
    assert ratio(2048, False) == 1
    # queries that are a part of the positions see keys that a mask takes none of away here
    args = (device, 1, 1024, 4096, 16, 128)
    assert attention_seconds(*args, causal=True) == attention_seconds(*args, causal=False)


def test_few_heads_of_few_queries_leave_the_device_idle() -> None:
    device = find_device("h100-80gb-sxm")
    few, many = (
        attention_seconds(device=device, batch=1, queries=1024, keys=1024, heads=heads, head_dim=128)
        for heads in (2, 16)
    )
    assert many < 1.2 * few


def test_measured_attention_replaces_the_model() -> None:
    base = find_device("cpu")
    rows = [
        [1, 128, 128, 4, 64, 1, 0, 1e-3],
        [1, 128, 128, 4, 64, 1, 1, 3e-3],
        [1, 1024, 1024, 4, 64, 1, 0, 50e-3],
    ]
    device = replace(base, kernels={"attention": rows})
    assert attention_seconds(
        device=device, batch=1, queries=128, keys=128, heads=4, head_dim=64, precision="fp32"
    ) == pytest.approx(1e-3)
    assert attention_seconds(
        device=device, batch=1, queries=128, keys=128, heads=4, head_dim=64, precision="fp32", backward=True
    ) == pytest.approx(3e-3)
    assert attention_seconds(
        device=device, batch=1, queries=1024, keys=1024, heads=4, head_dim=64, precision="fp32"
    ) == pytest.approx(50e-3)
    between = attention_seconds(
        device=device, batch=1, queries=512, keys=512, heads=4, head_dim=64, precision="fp32"
    )
    assert 1e-3 * 16 * 0.75 < between < 50e-3
    # the table is of fused kernels: scores in memory are products and passes, which may have tables too
    with_products = replace(device, kernels={**device.kernels, "matmul": {"fp32": [[128, 128, 64, 4, 1e-2]]}})
    explicit = attention_seconds(
        device=with_products,
        batch=1,
        queries=128,
        keys=128,
        heads=4,
        head_dim=64,
        precision="fp32",
        flash=False,
    )
    assert explicit == pytest.approx(
        2 * matmul_seconds(device=with_products, m=128, n=128, k=64, precision="fp32", batch=4)
        + pass_seconds(device, "softmax", 8.0 * 4 * 128 * 128)
        + pass_seconds(device, "dropout", 9.0 * 4 * 128 * 128)
    )


def kernels(shape: ModelShape, compute: ComputeConfig, kind: str = "block") -> KernelTimes:
    device = find_device("h100-80gb-sxm")
    return kernel_times(shape=shape, kind=kind, compute=compute, device=device, precision="bf16")


def test_what_gemma_has_beside_a_plain_block_takes_its_time() -> None:
    """Soft-capped scores, which FlexAttention fuses, norms after attention and MLP, soft-capped logits."""
    compute = ComputeConfig(batch=1, sequence=8192)
    gemma = preset("gemma2-9b").block(1)  # one that sees all positions
    uncapped = replace(gemma, attention=replace(gemma.attention, softcap=None))
    assert kernels(gemma, compute).core == pytest.approx(kernels(uncapped, compute).core / 0.90)
    assert kernels(gemma, compute).core_back == pytest.approx(kernels(uncapped, compute).core_back / 0.85)
    ring, ulysses = (replace(compute, cp=2, context=context) for context in ("ring", "ulysses"))
    assert (
        kernels(gemma, ring).core > 2 * kernels(uncapped, ring).core
    )  # in tiles whose scores are written out
    assert kernels(gemma, ulysses).core == pytest.approx(kernels(uncapped, ulysses).core / 0.90)
    flex = replace(compute, attention="flex")
    assert kernels(gemma, compute).core == kernels(gemma, flex).core == kernels(uncapped, flex).core
    elsewhere = replace(compute, framework=Framework(fused_softmax=True))
    assert kernels(gemma, elsewhere).core == kernels(uncapped, elsewhere).core
    device, stream = find_device("h100-80gb-sxm"), 2 * 8192 * gemma.hidden
    two = 2 * pass_seconds(device, "norm", 2 * stream)
    before = replace(uncapped, block_norms="pre")
    assert kernels(uncapped, compute).forward - kernels(before, compute).forward == pytest.approx(two)
    logits = 2 * 8192 * gemma.vocab
    three = 3 * pass_seconds(device, "loss", 2 * logits)
    plain = replace(gemma, logit_softcap=0.0)
    capped = kernels(gemma, compute, "head").forward - kernels(plain, compute, "head").forward
    assert capped == pytest.approx(three)
