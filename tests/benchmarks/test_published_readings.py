"""Cells as papers fill them in: what they are taken for, and what is assumed where they say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from published.recomputation import (  # pyright: ignore[reportMissingImports]
    Recomputation,
    parse_recomputation,
)
from published.rows import predict_rows, read_row  # pyright: ignore[reportMissingImports]
from published.software import month_in  # pyright: ignore[reportMissingImports]
from published.values import is_blank, read_number  # pyright: ignore[reportMissingImports]

from stretto.errors import StrettoError
from stretto.job.framework import CORE
from stretto.planner.run_scores import added_columns
from stretto.planner.runs import RunRecord

RUN = {
    "model": "llama2-7b",
    "gpu": "H100",
    "gpus": "16",
    "tp": "2",
    "pp": "2",
    "micro_batch": "1",
    "global_batch": "64",
    "recompute": "none",
    "iter_time_s": "5",
}
GPT = {
    **RUN,
    "model": "GPT",
    "layers": "24",
    "hidden": "2048",
    "heads": "16",
    "gpu": "A100",
    "gpus": "8",
    "recompute": "full",
}


def row(base: dict[str, str], **cells: str) -> RunRecord:
    return read_row({**base, **cells})


@pytest.mark.parametrize(
    ("column", "cell", "plain"),
    [
        ("zero", "1 (all DP)", "1"),
        ("zero", "ZeRO-1, distributed optimizer", "1"),
        ("zero", "stage 2", "2"),
        ("zero", "FSDP2", "3"),
        ("zero", "none", "0"),
        ("precision", "bf16 mixed", "bf16"),
        ("precision", "amp_bf16", "bf16"),
        ("precision", "FP8 (hybrid, delayed scaling)", "fp8"),
        ("precision", "fp16/bf16 mixed", "fp16"),
        ("recompute", "none (not stated)", "none"),
        ("recompute", "full, uniform 1", "full"),
        ("recompute", "Full activation checkpointing", "full"),
        ("recompute", "selective (core attention)", "selective"),
        ("recompute", "selective(attention)", "selective"),
        ("attention", "FlashAttention-2 (2.5.6)", "flash-2"),
        ("attention", "eager", "unfused"),
        ("schedule", "1F1B (non-interleaved)", "1f1b"),
        ("schedule", "ZB-H1", "zb-h1"),
        ("schedule", "PipeDream-Flush", "1f1b"),
        ("gpus", "~16 GPUs", "16"),
        ("global_batch", "64 sequences", "64"),
        ("seq", "4k", "4096"),
        ("seq", "4,096 tokens", "4096"),
        ("sp", "yes (Megatron)", "1"),
        ("iter_time_s", "5000 ms", "5"),
        ("iter_time_s", "5.0 ± 0.1", "5"),
        ("peak_mem_gib", "40960 MiB", "40"),
        ("recompute", "yes (selective)", "selective"),
        ("recompute", "act ckpt full", "full"),
        ("recompute", "AC: full", "full"),
        ("recompute", "activation checkpointing", "full"),
        ("recompute", "recompute attention only", "selective"),
        ("attention", "FlashAttention 2.3", "flash-2"),
        ("precision", "fp8-E4M3", "fp8"),
        ("precision", "mixed precision", ""),
        ("zero", "dist. optimizer", "1"),
        ("schedule", "Megatron interleaved 1F1B, v=2", "interleaved"),
        ("global_batch", "256K tokens", "64"),
        ("sp", "2", "1"),
        ("chunks", "VPP=2", "2"),
        ("offload", "ZeRO-Offload", "optimizer"),
        ("offload", "optimizer to CPU", "optimizer"),
        ("cp", "0", "1"),
        ("ep", "none", "1"),
        ("chunks", "-", "1"),
        ("micro_batch", "1 (per GPU)", "1"),
    ],
)
def test_cells_mean_what_their_first_words_say(column: str, cell: str, plain: str) -> None:
    read, expected = row(RUN, **{column: cell}), row(RUN, **{column: plain})
    assert read.job == expected.job
    assert (read.measured.seconds, read.measured.memory) == (
        expected.measured.seconds,
        expected.measured.memory,
    )
    assert read.assumptions == expected.assumptions


@pytest.mark.parametrize(
    ("cells", "column", "value"),
    [
        ({"zero": "1 (all DP)"}, "zero", "1 (read from '1 (all DP)')"),
        ({"gpus": "~16"}, "gpus", "16 (read from '~16')"),
        ({"recompute": "full, uniform 1"}, "recompute", "full (read from 'full, uniform 1')"),
        (
            {"network": "4x100G RoCE"},
            "network",
            "RoCE, 6.25 GB/s a device (read from '4x100G RoCE', 8 devices a node)",
        ),
        ({"iter_time_s": "OOM"}, "oom", "1 (step_time_s is 'OOM')"),
    ],
)
def test_what_a_cell_was_taken_for_is_reported(cells: dict[str, str], column: str, value: str) -> None:
    assert row(RUN, **cells).defaults[column] == value
    assert column not in row(RUN).defaults or row(RUN).defaults[column] != value


@pytest.mark.parametrize(
    ("cells", "read"),
    [
        ({"iter_time_s": "OOM"}, lambda r: r.measured.out_of_memory and r.measured.seconds is None),
        ({"zero": "3 + offload"}, lambda r: (r.job.dp.mode, r.job.dp.offload) == ("zero3", "cpu")),
        (
            {"zero": "3", "pp": "1", "offload": "optimizer and parameters"},
            lambda r: (r.job.dp.offload, r.job.dp.offload_parameters) == ("cpu", "cpu"),
        ),
        ({"schedule": "1F1B interleaved v=4"}, lambda r: r.job.options == {"chunks": 4}),
        ({"schedule": "interleaved, 2 chunks"}, lambda r: r.job.options == {"chunks": 2}),
        ({"vpp": "max (1 layer per chunk)"}, lambda r: r.job.options == {"chunks": 17}),
        ({"gpus": "", "nodes": "2"}, lambda r: r.job.layout.world == 16),
        ({"gpu": "8xH100"}, lambda r: (r.cluster.node, r.job.layout.world) == (8, 16)),
        (
            {"gpus": "", "gpu": "4xH100", "nodes": "4"},
            lambda r: (r.cluster.node, r.job.layout.world) == (4, 16),
        ),
        ({"tp": "", "pp": "", "dp": "2"}, lambda r: str(r.job.layout) == "tp8 dp2"),
        ({"tp": "", "dp": "4"}, lambda r: str(r.job.layout) == "tp2 dp4 pp2"),
        ({"global_batch": "", "batch_tokens": "1M"}, lambda r: r.job.global_batch == 256),
        ({"node_gbits": "800"}, lambda r: r.cluster.outer.bandwidth == 12.5e9),
        ({"network": "800 Gbit a node"}, lambda r: r.cluster.outer.bandwidth == 12.5e9),
        ({"network": "the lab's"}, lambda r: "the cluster's" in r.defaults["network"]),
        (
            {"island": "4"},
            lambda r: (r.cluster.node, r.cluster.nodes, r.cluster.outer.kind) == (4, 4, "InfiniBand NDR"),
        ),
        (
            {"island": "4", "gpus": "8"},
            lambda r: (r.cluster.node, r.cluster.nodes, r.cluster.outer.kind) == (4, 2, "PCIe 5"),
        ),
        (
            {"iter_time_s": "", "tokens_per_s": "1,000k"},
            lambda r: r.measured.seconds == pytest.approx(64 * 4096 / 1e6),
        ),
        ({"iter_time_s": "", "samples_per_s": "32"}, lambda r: r.measured.seconds == 2.0),
        ({"iter_time_s": "", "iter_time_ms": "2500"}, lambda r: r.measured.seconds == 2.5),
        (
            {"iter_time_s": "", "mfu": "0.4"},
            lambda r: r.measured.seconds == row(RUN, iter_time_s="", mfu_pct="40").measured.seconds,
        ),
        ({"precision": "NVFP4"}, lambda r: r.assumptions.products == "fp4"),
        ({"framework": "DeepSpeed"}, lambda r: r.job.framework.lasting_gradients),
        ({"software": "DeepSpeed 0.12"}, lambda r: r.job.framework.lasting_gradients),
    ],
)
def test_what_rows_say_in_prose(cells: dict[str, str], read: Callable[[RunRecord], bool]) -> None:
    assert read(row(RUN, **cells))


def test_a_row_that_trains_adapters_says_of_which_rank_they_are_taken_to_be() -> None:
    read = row(RUN, training="LoRA")
    assert read.job.shape.lora is not None
    assert (read.job.shape.lora.rank, read.defaults["lora_rank"]) == (16, "16 (usual)")
    assert row(RUN, training="LoRA", lora_rank="4").job.shape.lora.rank == 4  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"gpus": "16-32"}, "gpus is '16-32', allowed: a whole number above 0"),
        ({"iter_time_s": "5 h"}, "step_time_s is '5 h', allowed: a number above 0"),
        ({"iter_time_s": "4.5-5"}, "allowed: a number above 0"),
        ({"chunks": "2", "schedule": "interleaved v=4"}, "chunks is 2, but schedule is 'interleaved v=4'"),
        ({"recompute": "perhaps"}, "recompute is 'perhaps', allowed: none, selective, full"),
        ({"nodes": "3", "node_size": "8"}, "16 GPUs are not on 3 nodes of 8"),
        ({"gpus": "", "tp": "", "pp": ""}, "neither gpus nor degrees"),
        ({"network_gbs": "25", "node_gbits": "400"}, "network_gbs and node_gbits are both there"),
        ({"training": "QLoRA"}, "training is 'QLoRA', allowed: full, frozen"),
        ({"offload": "sometimes"}, "offload is 'sometimes', allowed: none, optimizer"),
        ({"island": "3"}, "island is 3, which does not divide nodes of 8"),
    ],
)
def test_contradictions_and_gaps_are_refused_by_name(cells: dict[str, str], why: str) -> None:
    with pytest.raises(StrettoError, match=why):
        row(RUN, **cells)


def test_a_refusal_carries_its_remedy() -> None:
    (refused,) = predict_rows([{**RUN, "gpu": ""}], memory=False)
    assert added_columns(refused)["refused"] == "the row has no GPU; fill in gpu, as in A100-80GB-SXM"


# ------------------------------------------------------------------ experts and sizes


def test_columns_of_experts_are_read_by_every_name_and_change_the_prediction() -> None:
    """A model of sizes: routed experts, their width, and experts that every token visits."""
    base = {**GPT, "family": "llama", "ffn": "8192", "pp": "1", "software": "today", "recompute": "none"}
    names = {"num_experts": "8", "experts_per_token": "2", "moe_ffn_hidden_size": "1024"}
    routed = row(base, **names)
    shared = row(base, **names, moe_shared_expert_intermediate_size="2048")
    counted = row(base, **names, n_shared_experts="2")
    moe = shared.job.shape.moe
    assert moe is not None
    assert (moe.experts, moe.top_k, moe.ffn, moe.shared_ffn) == (8, 2, 1024, 2048)
    assert counted.job.shape == shared.job.shape
    assert row(base, **names, first_k_dense_replace="3").job.shape.kinds()[0][1] == 3
    plain, without, with_shared = (
        prediction.estimate.seconds
        for cells in ({}, names, {**names, "shared_ffn": "2048"})
        for prediction in predict_rows([{**base, **cells}], memory=False)
        if prediction.estimate is not None
    )
    assert routed.job.shape.moe is not None
    assert without < with_shared
    assert without != plain


def test_sizes_of_a_gpt_follow_from_its_parameters() -> None:
    """52e9 parameters: as wide as Megatron's 39.1e9, with more layers, in whole stages."""
    named = row(RUN, model="GPT-52B", gpu="A100").job.shape
    stated = row(RUN, model="our GPT", params_b="52", gpu="A100").job.shape
    assert named == stated
    assert (named.hidden, named.layers, named.family) == (8192, 64, "gpt")
    with pytest.raises(StrettoError, match="did you mean 'llama3-8b'"):
        row(RUN, model="lama3-8b")


def test_the_family_of_a_model_of_sizes_follows_from_its_name() -> None:
    assert row(GPT, model="Our-LLaMA").job.shape.family == "llama"
    assert row(GPT, model="mine", kv_heads="4").job.shape.family == "llama"
    assert row(GPT).job.shape.family == "gpt"


# ------------------------------------------------------------------ recomputation


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("core_attn, moe_act, layernorm", {"operators": ("core_attn", "moe_act", "layernorm")}),
        ("attention + mlp", {"operators": ("core_attn", "mlp")}),
        ("selective: mlp", {"operators": ("mlp",)}),
        ("selective", {"operators": CORE}),
        ("selective op", {"operators": ("alternate_mm",)}),
        ("layernorm", {"operators": ("layernorm",)}),
        ("full, 4 layers", {"mode": "full", "blocks": 4}),
        ("block, 4", {"mode": "full", "blocks": 4}),
        ("full (block, 4)", {"mode": "full", "blocks": 4}),
        ("full, uniform 4", {"mode": "full"}),
        ("every 2nd layer", {"mode": "full", "share": 0.5}),
        ("selective 2", {"mode": "full", "share": 0.5}),
        ("4 of 8 layers", {"mode": "full", "share": 0.5}),
        ("25% of the layers", {"mode": "full", "share": 0.25}),
        ("full + CPU checkpointing", {"mode": "full", "to_host": True}),
        ("per layer", {"mode": "full"}),
        ("off", {"mode": "none"}),
    ],
)
def test_words_of_recomputation(text: str, read: dict[str, Any]) -> None:
    expected: dict[str, Any] = {"mode": "selective", **read}
    assert parse_recomputation(text) == Recomputation(**expected)


def test_a_part_of_the_blocks_is_recomputed_in_each_stage() -> None:
    assert row(RUN, recompute="full, 4 layers").job.recompute.blocks == 4
    assert row(RUN, recompute="every 2nd layer").job.recompute.blocks == 8  # of 16 on each of two stages
    assert row(RUN, recompute="full", recompute_num_layers="3").job.recompute.blocks == 3
    assert row(RUN, recompute="full, 16 layers").job.recompute.blocks is None


def test_an_empty_recompute_is_the_least_that_fits() -> None:
    """A run that was measured has fitted; of one that is planned nothing is known."""
    roomy = row(RUN, recompute="")
    assert (roomy.job.recompute.mode, roomy.defaults["recompute"]) == ("none", "none (the least that fits)")
    tight = {**RUN, "micro_batch": "16", "recompute": ""}
    some = read_row(tight).job.recompute
    assert some.mode == "full"
    assert some.blocks is not None
    assert 0 < some.blocks < 16
    scores = read_row({**GPT, "micro_batch": "16", "seq": "2048", "recompute": ""})
    assert scores.job.recompute.mode == "selective"  # of 2021: the stored scores are what does not fit
    assert read_row({**tight, "iter_time_s": "OOM"}).job.recompute.mode == "none"


# ------------------------------------------------------------------ software


@pytest.mark.parametrize(
    ("text", "month"),
    [
        ("2024-11-27", "2024-11"),
        ("Nov 2024", "2024-11"),
        ("11/2024", "2024-11"),
        ("September 27, 2020", "2020-09"),
        ("2023", "2023-07"),
        ("arXiv 2205.05198 Table 5", "2021-05"),  # a publication's software is a year older
        ("arXiv:2401.10241", "2023-01"),
        ("(SC21) Table 1", "2020-07"),
        ("NeMo 24.07", "2024-07"),
        ("nvcr.io/nvidia/pytorch:24.03-py3", "2024-03"),
        ("PyTorch 2.4 + torch.compile", "2024-07"),
        ("Megatron-Core 0.8", "2024-08"),
        ("README.md@HEAD", ""),
        ("DeepSpeed", ""),
    ],
)
def test_months_in_texts(text: str, month: str) -> None:
    assert month_in(text) == month


@pytest.mark.parametrize(
    ("base", "cells", "profile", "attention"),
    [
        # no date: what was usual a year after the device, or when the model came; never the newest
        (GPT, {}, "unfused", "explicit"),
        (GPT, {"seq": "16384"}, "fused", "auto"),
        (GPT, {"gpu": "V100-32GB"}, "serial", "explicit"),
        (GPT, {"gpu": "H100"}, "today", "auto"),
        (GPT, {"gpu": "B200"}, "today", "auto"),
        (RUN, {"gpu": "A100"}, "fused", "auto"),
        (RUN, {"model": "llama3-8b", "gpu": "A100"}, "today", "auto"),
        # dated
        (GPT, {"date": "2021-02"}, "serial", "explicit"),
        (GPT, {"date": "2021"}, "unfused", "explicit"),
        (GPT, {"date": "2023-05"}, "fused", "auto"),
        (GPT, {"date": "2024"}, "today", "auto"),
        (GPT, {"gpu": "H100", "date": "2019"}, "today", "auto"),  # no run is older than its device
        (GPT, {"source": "arXiv 2205.05198"}, "unfused", "explicit"),
        (GPT, {"software": "PyTorch 1.12"}, "eager", "explicit"),
        (GPT, {"software": "PyTorch 2.4 + torch.compile"}, "compiled", "auto"),
        (RUN, {"software": "NeMo 24.07"}, "engine", "auto"),
        (RUN, {"source": "NVIDIA/NeMo performance_summary.md (2025-03-01)"}, "tuned", "auto"),
        (RUN, {"date": "2025-03"}, "today", "auto"),
        # kernels
        (GPT, {"attention": "flash"}, "fused", "auto"),
        (RUN, {"attention": "unfused"}, "unfused", "explicit"),
        (RUN, {"software": "tuned", "attention": "unfused"}, "tuned", "explicit"),
    ],
)
def test_the_software_of_a_run(
    base: dict[str, str], cells: dict[str, str], profile: str, attention: str
) -> None:
    read = row(base, **cells)
    assert read.defaults.get("software", cells.get("software", "")).split(" ")[0] == profile
    assert read.job.attention == attention


def test_a_kernel_brings_its_speed_and_leaves_the_rest() -> None:
    today = row(RUN, software="today").assumptions.software
    faster = row(RUN, software="today", attention="flash-3").assumptions.software
    assert (faster.hopper, faster.host, faster.passes) == (1.0, today.host, today.passes)
    assert row(RUN, software="today", attention="flash-1").assumptions.software.hopper < today.hopper


def test_software_of_2021_brings_its_habits() -> None:
    """Megatron of that time, as Narayanan et al. 2021 describe it; a row that says otherwise is believed."""
    read = row(GPT, precision="fp16")
    job = read.job
    assert (job.shape.dropout, job.sequence_parallel, job.dp.mode) == (0.1, False, "ddp")
    assert (job.precision.gradients, read.assumptions.overlap, read.assumptions.blocking) == (
        "same",
        False,
        True,
    )
    stated = row(GPT, dropout="0", sp="1", zero="1", overlap="1", blocking="0", gradients="fp32")
    assert (stated.job.shape.dropout, stated.job.sequence_parallel, stated.job.dp.mode) == (
        0.0,
        True,
        "zero1",
    )
    assert (stated.assumptions.overlap, stated.assumptions.blocking) == (True, False)
    assert row(GPT, date="2024").job.shape.dropout == 0.0


@pytest.mark.parametrize(
    ("cells", "counted"),
    [
        ({}, "hardware"),
        ({"date": "2024"}, "model"),
        ({"date": "2024", "hfu_pct": "44.9"}, "hardware"),  # 140 of 312
        ({"mfu_pct": "44.9"}, "model"),
        ({"recompute": "none"}, "model"),
        ({"flops_counted": "model"}, "model"),
    ],
)
def test_what_a_rate_counts(cells: dict[str, str], counted: str) -> None:
    read = row(GPT, iter_time_s="", tflops_per_gpu="140", **cells)
    assert read.measured.by == f"tflops_per_gpu ({counted} FLOPs)"


# ------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("cell", "number"),
    [
        ("1,024", 1024.0),
        ("1 024", 1024.0),
        ("12,345,678", 12345678.0),
        ("~12.5", 12.5),
        ("≈ 3", 3.0),
        ("1e4", 1e4),
        (".5", 0.5),
        ("12 (per node)", 12.0),
        ("12 ± 1", 12.0),
        ("1,2", None),
        ("70-75", None),
        ("8x8", None),
        ("1/2", None),
        ("", None),
        ("many", None),
        ("12.5.1", None),
    ],
)
def test_numbers(cell: str, number: float | None) -> None:
    read = read_number(cell)
    assert (read and read[0]) == number


def test_blank_cells() -> None:
    assert all(is_blank(cell) for cell in ("", " - ", "n/a", "N/A", "—", "?", "Not stated", "NaN"))
    assert not any(is_blank(cell) for cell in ("0", "none", "no"))
