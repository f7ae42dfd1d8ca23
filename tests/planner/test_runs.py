"""Runs from the rows of a table: the meaning of columns, defaults of empty cells, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.job.framework import Framework
from stretto.planner.assumptions import software_profile
from stretto.planner.columns import COLUMNS, allowed_values, column_reference, read_cells
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.names import normalised
from stretto.planner.run_scores import ADDED, read_table
from stretto.planner.runs import RunRecord, read_run

DOCS = Path(__file__).parents[2] / "docs"

# Korthikanti et al. 2022, tables 3 and 5: 175B with selective recomputation
KORTHIKANTI = {
    "model": "GPT of the paper",
    "layers": "96",
    "hidden": "12288",
    "heads": "96",
    "ffn": "49152",
    "seq": "2048",
    "vocab": "51200",
    "dropout": "0.1",
    "gpu": "A100-80GB-SXM",
    "gpus": "64",
    "tp": "8",
    "pp": "8",
    "chunks": "3",
    "sp": "1",
    "zero": "0",
    "recompute": "selective",
    "micro_batch": "1",
    "global_batch": "64",
    "precision": "fp16",
    "gradients": "fp32",
    "attention": "unfused",
    "overlap": "0",
    "blocking": "1",
    "framework": "megatron",
    "software": "unfused",
    "step_time_s": "13.75",
}
# most cells empty
LLAMA = {
    "model": "LLAMA3-70B",
    "gpu": "H100",
    "gpus": "64",
    "tp": "4",
    "pp": "4",
    "chunks": "5",
    "cp": "2",
    "micro_batch": "1",
    "global_batch": "128",
    "precision": "fp8",
    "tokens_per_s_per_gpu": "1524",
}
MIXTRAL = {"model": "mixtral-8x7b", "gpu": "H100", "gpus": "16", "tp": "2", "ep": "4", "global_batch": "32"}


def row(base: dict[str, str], **cells: str) -> RunRecord:
    return read_run({**base, **cells})


def test_a_full_row_determines_its_job() -> None:
    read = row(KORTHIKANTI)
    job = read.job
    assert str(job.layout) == "tp8 pp8"
    assert (job.schedule, job.options) == ("interleaved", {"chunks": 3})
    assert (job.shape.family, job.shape.layers, job.shape.hidden, job.shape.vocab) == (
        "gpt",
        96,
        12288,
        51200,
    )
    assert (job.shape.kv_heads, job.shape.dropout) == (96, 0.1)
    assert (job.recompute.mode, job.sequence_parallel, job.dp.mode) == ("selective", True, "ddp")
    assert (job.precision.dtype, job.precision.gradients) == ("float16", "float32")
    assert (job.microbatches, read.cluster.device.name) == (64, "a100-80gb-sxm")
    assert (read.measured.seconds, read.measured.by) == (13.75, "step_time_s")
    assumptions = read.assumptions
    assert (job.attention, assumptions.overlap, assumptions.blocking) == ("explicit", False, True)
    assert assumptions.software == software_profile("unfused")
    assert read.defaults == {
        "family": "gpt",
        "kv_heads": "96 (the family's)",
        "schedule": "interleaved",
    }


def test_defaults_of_empty_cells_are_reported() -> None:
    read = row(LLAMA)
    job = read.job
    assert (job.layout.dp, job.dp.mode, job.sequence_parallel) == (2, "zero1", True)
    assert (job.recompute.mode, job.precision.fp8, job.shape.dropout) == ("none", "tensor", 0.0)
    assert (job.sequence, job.shape.kv_heads, job.shape.ffn, job.shape.vocab) == (8192, 8, 28672, 128256)
    assert (read.job.attention, read.assumptions.overlap, read.job.fused_loss) == ("auto", True, False)
    assert read.assumptions.software == software_profile("today")
    reported = {
        "seq",
        "dp",
        "zero",
        "sp",
        "recompute",
        "schedule",
        "attention",
        "software",
        "vocab",
        "gradients",
        "framework",
    }
    assert read.defaults.keys() == reported
    assert read.measured.seconds == pytest.approx(128 * 8192 / (1524 * 64))


def test_filled_cells_are_not_reported_as_defaults() -> None:
    cells = {"seq": "4096", "dp": "2", "zero": "2", "sp": "0", "recompute": "full", "schedule": "bfs"}
    read = row(LLAMA, **cells, attention="fused", software="tuned", vocab="128000", gradients="same")
    assert read.defaults == {"framework": "stretto"}
    job = read.job
    assert (job.dp.mode, job.sequence_parallel, job.schedule, job.sequence) == ("zero2", False, "bfs", 4096)
    assert read.assumptions.software == software_profile("tuned")


@pytest.mark.parametrize(
    ("cells", "read"),
    [
        ({"family": "llama", "dropout": ""}, lambda r: r.job.shape.family == "llama"),
        ({"kv_heads": "8"}, lambda r: r.job.shape.kv_heads == 8),
        ({"head_dim": "64"}, lambda r: r.job.shape.head_dim == 64),
        (
            {"experts": "16", "top_k": "4"},
            lambda r: (r.job.shape.moe.experts, r.job.shape.moe.top_k) == (16, 4),
        ),
        ({"experts": "8", "expert_ffn": "4096"}, lambda r: r.job.shape.expert_ffn == 4096),
        ({"node_size": "4"}, lambda r: (r.cluster.node, r.cluster.outer.bandwidth) == (4, 50e9)),
        ({"network": "RoCE"}, lambda r: (r.cluster.outer.kind, r.cluster.outer.bandwidth) == ("RoCE", 25e9)),
        ({"network_gbs": "12.5"}, lambda r: r.cluster.outer.bandwidth == 12.5e9),
        ({"group": "16"}, lambda r: r.job.options == {"chunks": 3, "group": 16}),
        ({"schedule": "hanayo", "chunks": "", "waves": "2"}, lambda r: r.job.options == {"waves": 2}),
        ({"micro_batch": "", "microbatches": "16"}, lambda r: r.job.micro_batch == 4),
        ({"global_batch": "", "microbatches": "16"}, lambda r: r.job.global_batch == 16),
        ({"gpus": ""}, lambda r: r.job.layout.world == 64),
        ({"gpus": "128", "zero": "3", "shard": "2"}, lambda r: r.job.dp.shard_parameters == 2),
        ({"gpus": "128", "zero": "1", "shard": "2"}, lambda r: r.job.dp.shards["shard_gradients"] is None),
        ({"gpus": "128", "zero": "1", "offload": "optimizer"}, lambda r: r.job.dp.offload == "cpu"),
        (
            {"zero": "3", "gpus": "128", "offload": "parameters"},
            lambda r: r.job.dp.offload_parameters == "cpu",
        ),
        ({"sp": "0", "recompute": "full", "shard_inputs": "1"}, lambda r: r.job.recompute.shard_inputs),
        ({"precision": "fp32"}, lambda r: r.job.precision.dtype == "float32"),
        ({"gradients": "same"}, lambda r: r.job.precision.gradients == "same"),
        ({"software": "compiled"}, lambda r: r.assumptions.software == software_profile("compiled")),
        ({"attention": "fused"}, lambda r: r.job.attention == "auto"),
        ({"fused_loss": "1"}, lambda r: r.job.fused_loss),
        ({"peak_mem_gib": "55"}, lambda r: (r.measured.memory, r.measured.kind) == (55 * 2**30, "allocated")),
        ({"peak_mem_gib": "55", "memory_count": "device"}, lambda r: r.measured.kind == "device"),
        (
            {"lora_rank": "8", "lora_targets": "c_attn + c_proj"},
            lambda r: (r.job.shape.lora.rank, r.job.shape.lora.targets) == (8, ("c_attn", "c_proj")),
        ),
        ({"oom": "1"}, lambda r: r.measured.out_of_memory and r.measured.seconds is None),
        (
            {"notes": "OOM; LoRA; schedule ZB-2p", "source": "arXiv 2405.00001", "x_hue": "red"},
            lambda r: r.job == row(KORTHIKANTI).job,
        ),
        (
            {"gpu": "jean-zay-v100-32gb"},
            lambda r: (r.cluster.name, r.cluster.node) == ("jean-zay-v100-32gb", 4),
        ),
    ],
)
def test_every_column_is_read(cells: dict[str, str], read: Callable[[RunRecord], bool]) -> None:
    assert read(row(KORTHIKANTI, **cells))


def test_the_kind_of_context_parallelism_is_read() -> None:
    assert row(LLAMA).job.context == "ring"
    assert row(LLAMA, context="ulysses").job.context == "ulysses"


def test_experts_are_whole_by_default() -> None:
    read = row(MIXTRAL)
    assert (read.job.expert_tp, read.job.layout.expert_tp) == (1, 1)
    assert "expert_tp" in read.defaults
    assert row(MIXTRAL, expert_tp="2").job.expert_tp == 2
    assert row(MIXTRAL, ep="", expert_tp="").job.expert_tp is None
    changed = row(MIXTRAL, experts="16", expert_ffn="7168").job.shape
    assert changed.moe is not None
    assert (changed.moe.experts, changed.moe.top_k, changed.moe.ffn, changed.ffn) == (16, 2, 7168, 14336)


def test_devices_before_bfloat16_use_float16_and_other_frameworks_unfused_attention() -> None:
    small = {"model": "gpt2", "gpu": "V100-32GB", "precision": "", "tp": "1", "pp": "1", "cp": "1"}
    read = row(LLAMA, **small, chunks="", framework="megatron")
    assert (read.job.precision.dtype, read.job.attention) == ("float16", "explicit")
    assert read.assumptions.software == software_profile("unfused")
    own = row(LLAMA, **small, chunks="")
    assert (own.job.precision.dtype, own.job.attention) == ("float16", "auto")
    assert own.assumptions.software == software_profile("today")


def test_a_kernel_brings_its_speed_and_leaves_the_rest() -> None:
    today = row(LLAMA).assumptions.software
    faster = row(LLAMA, attention="flash-3").assumptions.software
    assert (faster.hopper, faster.host, faster.passes) == (1.0, today.host, today.passes)
    assert row(LLAMA, attention="flash-1").assumptions.software.hopper < today.hopper


def test_a_published_model_with_other_sizes() -> None:
    shape = row(LLAMA, layers="40").job.shape
    assert shape == replace(row(LLAMA).job.shape, layers=40)


@pytest.mark.parametrize(
    ("cells", "by", "seconds"),
    [
        ({"tokens_per_s_per_gpu": "1000"}, "tokens_per_s_per_gpu", 64 * 2048 / (1000 * 64)),
        ({"tokens_per_s": "64000"}, "tokens_per_s", 64 * 2048 / 64000),
        ({"samples_per_s": "32"}, "samples_per_s", 2.0),
        ({"tflops_per_gpu": "140"}, "tflops_per_gpu (model FLOPs)", 1.0),
        ({"tflops_per_gpu": "140", "flops_counted": "hardware"}, "tflops_per_gpu (hardware FLOPs)", 4 / 3),
        ({"mfu_pct": "44.871794871794876"}, "mfu_pct", 1.0),
        ({"hfu_pct": "44.871794871794876"}, "hfu_pct", 4 / 3),
    ],
)
def test_seconds_follow_from_each_measured_column(cells: dict[str, str], by: str, seconds: float) -> None:
    """140 TFLOP/s are 44.87% of 312; with full recomputation hardware does 4/3 of a block's FLOPs."""
    read = row(KORTHIKANTI, **{"step_time_s": "", "recompute": "full", **cells})
    assert read.measured.by == by
    model = (
        72 * 64 * 96 * 2048 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (12 * 12288 * 96)) / (140e12 * 64)
    )
    assert read.measured.seconds == pytest.approx(seconds if "_per_s" in by else seconds * model, rel=0.004)
    assert ("flops_counted" in read.defaults) == (by.startswith("tflops") and "flops_counted" not in cells)


# KORTHIKANTI's step of 13.75 s has 64 x 2048 tokens on 64 devices: 9532.5 tokens/s, 148.95 each
@pytest.mark.parametrize(
    ("cells", "filled", "reason"),
    [
        ({"global_batch": "", "tokens_per_s": "9532.5"}, (64, 2048), "tokens_per_s x step_time_s / seq"),
        ({"global_batch": "", "tokens_per_s_per_gpu": "149"}, (64, 2048), "gpus x step_time_s / seq"),
        ({"global_batch": "", "samples_per_s": "4.65"}, (64, 2048), "samples_per_s x step_time_s"),
        (
            {"global_batch": "", "tokens_per_s": "9532.5", "micro_batch": "2", "gpus": "128"},
            (64, 2048),
            "/ seq",
        ),
        ({"seq": "", "tokens_per_s": "9500"}, (64, 2048), "tokens_per_s x step_time_s / global_batch"),
        (
            {"seq": "", "global_batch": "", "samples_per_s": "4.655", "tokens_per_s_per_gpu": "149"},
            (64, 2048),
            "step_time_s / global_batch",
        ),
        ({"seq": "", "global_batch": "", "tokens_per_s": "76260"}, (512, 2048), "step_time_s / seq"),
    ],
)
def test_a_missing_batch_or_sequence_follows_from_speed_and_time(
    cells: dict[str, str], filled: tuple[int, int], reason: str
) -> None:
    read = row(KORTHIKANTI, **cells)
    assert (read.job.global_batch, read.job.sequence) == filled
    assert any(text.endswith(f"{reason})") for text in read.defaults.values())


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        (
            {"tokens_per_s": "76260"},
            "step_time_s is 13.75, but tokens_per_s=76260 with 64 x 2048 tokens a step makes it 1.719",
        ),
        (
            {"step_time_s": "", "tokens_per_s_per_gpu": "149", "samples_per_s": "2"},
            "tokens_per_s_per_gpu is 149, but samples_per_s=2 with 64 x 2048 tokens a step makes it 64",
        ),
        ({"samples_per_s": "2"}, "samples_per_s=2 with 64 x 2048 tokens a step makes it 32"),
        ({"global_batch": ""}, "step_time_s is given, but neither global_batch nor the speed"),
        (
            {"global_batch": "", "microbatches": "3", "micro_batch": "", "tokens_per_s": "745"},
            "global_batch is empty and tokens_per_s x step_time_s / seq is 5.002, no multiple of 3",
        ),
    ],
)
def test_a_row_that_contradicts_itself_names_columns_and_figures(cells: dict[str, str], why: str) -> None:
    with pytest.raises(StrettoError, match=re.escape(why)):
        row(KORTHIKANTI, **cells)
    # as rounding, and a mean over other steps, differ
    assert row(KORTHIKANTI, tokens_per_s="9200", samples_per_s="4.7").measured.seconds == 13.75


@pytest.mark.parametrize(
    ("column", "cells", "value"),
    [
        (
            "precision",
            "amp_fp8 AMP_BF16 bfloat16 bf16-mixed 16-mixed torch.float32",
            "fp8 bf16 bf16 bf16 fp16 fp32",
        ),
        (
            "recompute",
            "granularity:full --recompute-granularity=selective selective(attention)",
            "full selective selective",
        ),
        ("recompute", "activation_checkpoint.mode=full full-recompute No", "full full none"),
        ("zero", "ZeRO-3 stage=2 optim_grads_params FULL_SHARD --use-distributed-optimizer", "3 2 3 3 1"),
        (
            "attention",
            "flash_attention_2 --attention-backend=flash sdpa eager FA3",
            "flash-2 fused fused unfused flash-3",
        ),
        ("framework", "Megatron-LM torchtitan NeMo2 mcore", "megatron fsdp nemo megatron"),
        ("schedule", "Interleaved1F1B LoopedBFS ZBVZeroBubble 1F1B", "interleaved bfs zb-v 1f1b"),
        ("memory_count", "nvidia-smi max_memory_allocated", "device allocated"),
    ],
)
def test_values_are_understood_as_other_programs_spell_them(column: str, cells: str, value: str) -> None:
    read = [read_cells({column: cell.replace(":", " ")}).values[column] for cell in cells.split()]
    assert read == value.split()


@pytest.mark.parametrize(
    ("column", "cell", "meant"),
    [("precision", "fp8_mixd", "fp8"), ("recompute", "granularity ful", "full"), ("zero", "zero4", "[0-3]")],
)
def test_values_that_are_nearly_a_spelling_are_named(column: str, cell: str, meant: str) -> None:
    with pytest.raises(
        StrettoError, match=f"{column} is '{cell}', allowed: .*\nhint: did you mean '{meant}'"
    ):
        read_cells({column: cell})


@pytest.mark.parametrize("cell", ["-1", "1.0", "+1", ".1", "1."])
def test_a_number_is_no_spelling(cell: str) -> None:
    with pytest.raises(StrettoError, match="allowed: 0, 1, 2, 3"):
        read_cells({"zero": cell})


def test_every_spelling_means_one_value() -> None:
    for name, column in COLUMNS.items():
        assert {*column.spellings} <= {*column.choices}, name
        meanings = [
            (normalised(each), value) for value, listed in column.spellings.items() for each in listed
        ]
        meanings += [(normalised(value), value) for value in column.choices]
        assert len({spelling for spelling, _ in meanings}) == len(meanings), name
        assert all(column.readings()[spelling] == value for spelling, value in meanings)


def test_the_94_gib_of_some_sites_are_the_card_of_96_gb() -> None:
    assert {find_cluster(name).device.name for name in ("H100-SXM-94GB", "H100 SXM5 94GB")} == {
        "h100-96gb-sxm"
    }
    assert find_cluster("H100-94GB").device.name == "h100-94gb-nvl"


def test_an_empty_zero_shards_as_much_as_fits() -> None:
    cells = {"model": "llama3-8b", "gpu": "dgx-h100", "gpus": "8"}
    assert (row(cells).job.dp.mode, row(cells, lora_rank="16").job.dp.mode) == ("zero2", "zero1")
    """Llama 3 70B on 16 devices of 80 GB with tp 2: 14 bytes a parameter would not fit."""
    read = row(LLAMA, gpus="16", tp="2", pp="1", cp="1", chunks="", precision="")
    assert read.job.dp.mode == "zero3"
    assert "what fits" in read.defaults["zero"]
    alone = row(LLAMA, model="llama3-8b", gpus="1", tp="1", pp="1", cp="1", chunks="")
    assert alone.job.dp.mode == "ddp"


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"gpu": ""}, "no GPU"),
        ({"gpu": "Quantum9000"}, "'Quantum9000' is not known"),
        ({"model": "lama3-8b", "layers": ""}, "did you mean 'llama3-8b'"),
        ({"model": "", "hidden": ""}, "no model"),
        ({"model": "", "heads": ""}, "fill in model, or layers, hidden and heads"),
        ({"model": "llama3-8b", "family": "gpt"}, "a llama"),
        ({"top_k": "2"}, "no experts"),
        ({"tp": "7", "gpus": "56"}, "model.heads"),
        ({"gpus": "60"}, "tp=8 x cp=1 x pp=8 does not divide 60 GPUs\nhint: nearest: gpus=64"),
        ({"dp": "3"}, "dp=3 is not 64 GPUs\nhint: nearest: dp=1"),
        ({"global_batch": "65", "gpus": "128"}, "multiple of batch.micro_size=1 x layout.dp=2"),
        ({"microbatches": "16"}, "global_batch is 64, but 16 microbatches of 1 on dp=1 are 16"),
        ({"global_batch": "16000000"}, "forwards in a step"),
        ({"schedule": "gpipe"}, "takes chunks=1 or none"),
        ({"micro_batch": "one"}, "micro_batch is 'one', allowed: a whole number above 0"),
        ({"micro_batch": "1.5"}, "allowed: a whole number above 0"),
        ({"micro_batch": "0"}, "allowed: a whole number above 0"),
        ({"seq": "4k"}, "allowed: a whole number above 0"),
        ({"gpus": "~64"}, "allowed: a whole number above 0"),
        ({"step_time_s": "0"}, "allowed: a number above 0"),
        ({"step_time_s": "inf"}, "allowed: a number above 0"),
        ({"step_time_s": "OOM"}, "allowed: a number above 0"),
        ({"dropout": "1"}, "allowed: a number from 0 to below 1"),
        ({"dropout": "-0.1"}, "allowed: a number from 0 to below 1"),
        ({"lora_rank": "8", "lora_targets": "c_attm"}, "lora_targets is c_attm.*\nhint: did you mean c_attn"),
        ({"lora_targets": "c_attn"}, "lora_targets without a rank"),
        ({"lora_rank": "8", "precision": "fp8", "framework": ""}, "adapters do not support 8-bit"),
        ({"sp": "perhaps"}, "sp is 'perhaps', allowed: 0 or 1"),
        ({"precision": "int3"}, "allowed: bf16, fp16, fp8, fp4, fp32"),
        ({"recompute": "ful"}, "allowed: none, selective, full\nhint: did you mean 'full'"),
        ({"schedule": "ZB-3p"}, "schedule is 'ZB-3p', allowed: naive"),
        ({"zero": "7"}, "zero is '7', allowed: 0, 1, 2, 3"),
        ({"flops_counted": "both"}, "allowed: model, hardware"),
        ({"tensor": "8"}, "no column 'tensor'"),
        ({"micro": "1"}, "micro_batch is given under two names"),
        ({"vp": "3"}, "no column 'vp'"),
        ({"offload": "sometimes"}, "allowed: none, optimizer, parameters, both"),
        ({"network": "the lab's"}, "names no kind and no speed"),
        ({"zero": "1", "offload": "parameters"}, "offload_parameters"),
    ],
)
def test_rows_that_cannot_be_predicted_say_why(cells: dict[str, str], why: str) -> None:
    with pytest.raises(StrettoError, match=why):
        row(KORTHIKANTI, **cells)


def test_a_model_that_is_no_transformer_is_refused() -> None:
    with pytest.raises(StrettoError, match="Mamba"):
        row(LLAMA, model="Nemotron-H 8B")


def test_cells_are_read_by_name_or_alias() -> None:
    cells = read_cells(
        {"GPUs": "1024", "micro": "2.0", "seq": "1e4", "batch": " ", "x_hue": "red", "sp": "True"}
    )
    assert cells.values == {"gpus": 1024, "micro_batch": 2, "seq": 10000, "sp": True}
    assert read_cells({"sequence": "4096"}).values == {"seq": 4096}
    names = [name for name, column in COLUMNS.items() for name in (name, column.alias) if name]
    assert len(names) == len(set(names))
    assert not set(names) & set(ADDED)


def test_degrees_that_are_empty_follow_from_the_devices() -> None:
    some = {"tp": "", "cp": "", "pp": "", "chunks": "", "dp": "4"}
    assert str(row(LLAMA, **some).job.layout) == "tp8 dp4 pp2"
    assert str(row(LLAMA, **{**some, "tp": "4"}).job.layout) == "tp4 dp4 pp4"
    assert str(row(LLAMA, **{**some, "pp": "4"}).job.layout) == "tp4 dp4 pp4"
    assert row(LLAMA, gpu="dgx-h100:128", gpus="").job.layout.world == 128


@given(
    st.sets(st.sampled_from(sorted(KORTHIKANTI))), st.sampled_from(["", "0", "x", "3", "-1", "1e9", "nan"])
)
@settings(max_examples=60, deadline=None)
def test_no_row_breaks_the_reader(changed: set[str], value: str) -> None:
    """Any row is read, or refused with a reason."""
    try:
        read = read_run({**KORTHIKANTI, **dict.fromkeys(changed, value)})
    except StrettoError:
        return
    assert read.job.microbatches


def test_a_cluster_and_a_model_replace_those_of_the_row() -> None:
    shape = row(LLAMA).job.shape
    read = read_run({**LLAMA, "gpu": "", "model": "none"}, find_cluster("dgx-a100-80gb"), shape)
    assert (read.cluster.device.name, read.job.shape) == ("a100-80gb-sxm", shape)


# ------------------------------------------------------------------ files


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    return path


def test_a_file_and_its_rows(tmp_path: Path) -> None:
    rows = read_table(write(tmp_path, "\ufeffmodel,tp,x_hue,verdict\nllama3-8b,4,red,fits\n\n,8\n"))
    assert rows == [{"model": "llama3-8b", "tp": "4", "x_hue": "red"}, {"model": "", "tp": "8", "x_hue": ""}]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gpus,tp\n", "no rows"),
        ("", "no rows"),
        ("gpus,microbatch\n8,1\n", "no column 'microbatch'\nhint: did you mean 'micro_batch'"),
        ("gpus,hue\n8,red\n", "columns of your own with x_"),
        ("tp,TP\n8,1\n", "'tp' and 'TP' are one column"),
        ("micro,micro_batch\n8,1\n", "'micro' and 'micro_batch' are one column"),
        ("tp,pp\n8,1\n1,2,3\n", "row 2: 3 cells for 2 columns"),
    ],
)
def test_files_that_are_no_table_are_errors(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(StrettoError, match=why):
        read_table(write(tmp_path, text))


def test_unreadable_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match="cannot read"):
        read_table(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StrettoError, match="UTF-8"):
        read_table(tmp_path / "binary.csv")


def test_operators_mean_selective_recomputation() -> None:
    job = row(LLAMA, recompute_operators="core_attn, mlp").job
    assert (job.recompute.mode, job.framework.operators) == ("selective", ("core_attn", "mlp"))
    assert row(LLAMA, recompute="selective").job.framework.operators == ("core_attn",)
    with pytest.raises(StrettoError, match="recompute_operators is core_attn, but recompute is full"):
        row(LLAMA, recompute="full", recompute_operators="core_attn")
    with pytest.raises(StrettoError, match="several with"):
        row(LLAMA, recompute_operators="core_attn+everything")


def test_inputs_in_host_memory_mean_full_recomputation() -> None:
    job = row(LLAMA, offload_inputs="cpu").job
    assert (job.recompute.mode, job.framework.inputs_on_host) == ("full", True)
    assert not row(LLAMA).job.framework.inputs_on_host
    with pytest.raises(StrettoError, match="offload_inputs is cpu, but recompute is none"):
        row(LLAMA, recompute="none", offload_inputs="cpu")


def test_frameworks_keep_states_in_their_ways() -> None:
    """FSDP shards float32 weights, and beside a pipeline sums whole gradients; DeepSpeed keeps gradients of
    16 bits beside float32 ones.
    """
    sharded = row(LLAMA, zero="3", cp="1", tp="2", framework="fsdp")
    assert sharded.job.framework.wide_shards
    assert sharded.job.framework.dtensor_loss
    assert sharded.job.dp.reduce == "step"
    assert row(LLAMA, zero="3", cp="1", tp="2", framework="deepspeed").job.dp.reduce == "auto"
    megatron, deepspeed = (row(LLAMA, framework=name) for name in ("megatron", "deepspeed"))
    assert (megatron.job.framework.wide_shards, megatron.job.dp.reduce) == (False, "auto")
    assert deepspeed.job.framework.lasting_gradients
    assert not row(LLAMA, framework="deepspeed", gradients="same").job.framework.lasting_gradients
    assert megatron.repeat != deepspeed.repeat
    assert [run.job.framework.buckets for run in (megatron, deepspeed)] == [0, 10**9]
    nemo = row(LLAMA, framework="nemo").job.framework
    assert (nemo.remainders, nemo.inputs_in_8_bits) == (True, True)
    assert not row(LLAMA, framework="nemo", precision="bf16").job.framework.inputs_in_8_bits


def test_a_run_keeps_what_stretto_keeps() -> None:
    """As `stretto plan` counts it, unless the row names another framework."""
    for cells in ({}, {"zero": "3", "tp": "2", "cp": "1"}, {"attention": "unfused"}):
        assert row(LLAMA, **cells).job.framework == Framework()
    assert row(LLAMA, recompute_operators="mlp").job.framework == Framework(operators=("mlp",))


def test_the_docs_contain_the_reference_of_all_columns() -> None:
    text = column_reference()
    for name, column in COLUMNS.items():
        assert f"| `{name}` | {column.alias} | {column.meaning} | {allowed_values(name)} |" in text
    columns = (DOCS / "reference" / "columns.md").read_text(encoding="utf-8")
    assert text in columns, "put the output of `stretto predict --table-columns` into reference/columns.md"
    planning = (DOCS / "evidence" / "planning-evidence.md").read_text(encoding="utf-8")
    assert not [name for name in ADDED if f"`{name}`" not in planning]


def test_a_row_explains_what_zero_2_costs_in_a_pipeline_and_nemo_fuses_its_loss() -> None:
    cells = {"model": "llama3-70b", "gpu": "dgx-h100", "gpus": "64", "tp": "4", "pp": "4", "zero": "2"}
    cells |= {"global_batch": "64", "framework": "megatron"}
    assert "whole gradients are kept beside shards" in row(cells).defaults["zero"]
    assert "zero" not in row(cells, zero="1").defaults
    assert "zero" not in row(cells, pp="1").defaults
    assert row(cells, framework="nemo", software="tuned").job.fused_loss
    assert not row(cells, framework="nemo", software="tuned", fused_loss="0").job.fused_loss
    assert not row(cells, software="tuned").job.fused_loss
