"""Rows of tables of runs: the meaning of columns, defaults of empty cells, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.planner.assumptions import software_profile
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.table.cells import Cells
from stretto.planner.table.columns import COLUMNS, SECTIONS, column, reference
from stretto.planner.table.predicting import ADDED, read_table
from stretto.planner.table.row import Row, read_row
from stretto.spec.framework import Framework

DOCS = Path(__file__).parents[3] / "docs" / "planning.md"

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
    "iter_time_s": "13.75",
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


def row(base: dict[str, str], **cells: str) -> Row:
    return read_row({**base, **cells})


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
    assert (job.microbatches, read.hardware) == (64, "a100-80gb-sxm")
    assert (read.measured.seconds, read.measured.by) == (13.75, "iter_time_s")
    assumptions = read.assumptions
    assert (job.attention, assumptions.overlap, assumptions.blocking) == ("explicit", False, True)
    assert assumptions.software == software_profile("unfused")
    assert read.defaults == {
        "family": "gpt",
        "kv_heads": "96 (the family's)",
        "schedule": "interleaved",
        "software": "unfused (no date; usual on this device in 2021-11)",
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
        "gpu",
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
    }
    assert read.defaults.keys() == reported
    assert read.measured.seconds == pytest.approx(128 * 8192 / (1524 * 64))


def test_filled_cells_are_not_reported_as_defaults() -> None:
    cells = {"seq": "4096", "dp": "2", "zero": "2", "sp": "0", "recompute": "full", "schedule": "bfs"}
    read = row(LLAMA, **cells, attention="fused", software="tuned", vocab="128000", gradients="same")
    assert read.defaults == {"gpu": "h100-80gb-sxm, dgx-h100 (read from 'H100')"}
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
        ({"gpus": "128", "zero": "1", "offload": "cpu"}, lambda r: r.job.dp.offload == "cpu"),
        (
            {"zero": "3", "gpus": "128", "offload_parameters": "cpu"},
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
        ({"oom": "1"}, lambda r: r.measured.out_of_memory and r.measured.seconds is None),
        (
            {"notes": "OOM; LoRA; schedule ZB-2p", "source": "arXiv 2405.00001"},
            lambda r: r.job == row(KORTHIKANTI).job,
        ),
        (
            {"gpu": "jean-zay-v100-32gb"},
            lambda r: (r.cluster.name, r.cluster.node) == ("jean-zay-v100-32gb", 4),
        ),
    ],
)
def test_every_column_is_read(cells: dict[str, str], read: Callable[[Row], bool]) -> None:
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


def test_devices_before_bfloat16_use_float16_and_unfused_attention() -> None:
    read = row(LLAMA, model="gpt2", gpu="V100-32GB", precision="", tp="1", pp="1", cp="1", chunks="")
    assert (read.job.precision.dtype, read.job.attention) == ("float16", "explicit")
    assert read.assumptions.software == software_profile("unfused")


def test_a_published_model_with_other_sizes() -> None:
    shape = row(LLAMA, layers="40").job.shape
    assert shape == replace(row(LLAMA).job.shape, layers=40)
    wider = row(LLAMA, hidden="4096", heads="32", pp="1", chunks="", dp="", gpus="8").job.shape
    assert (wider.kv_heads, wider.ffn, wider.head_dim) == (8, 14336, 128)


@pytest.mark.parametrize(
    ("cells", "by", "seconds"),
    [
        ({"tokens_per_s_per_gpu": "1000"}, "tokens_per_s_per_gpu", 64 * 2048 / (1000 * 64)),
        ({"tflops_per_gpu": "140"}, "tflops_per_gpu (hardware FLOPs)", 4 / 3),
        ({"tflops_per_gpu": "140", "software": "today"}, "tflops_per_gpu (model FLOPs)", 1.0),
        ({"tflops_per_gpu": "140", "flops_counted": "hardware"}, "tflops_per_gpu (hardware FLOPs)", 4 / 3),
        ({"mfu_pct": "44.871794871794876"}, "mfu_pct", 1.0),
        ({"hfu_pct": "44.871794871794876"}, "hfu_pct", 4 / 3),
    ],
)
def test_seconds_follow_from_each_measured_column(cells: dict[str, str], by: str, seconds: float) -> None:
    """140 TFLOP/s are 44.87% of 312; with full recomputation hardware does 4/3 of a block's FLOPs."""
    read = row(KORTHIKANTI, **{"iter_time_s": "", "recompute": "full", **cells})
    assert read.measured.by == by
    model = (
        72 * 64 * 96 * 2048 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (12 * 12288 * 96)) / (140e12 * 64)
    )
    assert read.measured.seconds == pytest.approx(seconds if "tokens" in by else seconds * model, rel=0.004)
    assert ("flops_counted" in read.defaults) == (by.startswith("tflops") and "flops_counted" not in cells)


def test_an_empty_zero_shards_as_much_as_fits() -> None:
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
        ({"seq": "2-4K"}, "allowed: a whole number above 0"),
        ({"iter_time_s": "0"}, "allowed: a number above 0"),
        ({"iter_time_s": "inf"}, "allowed: a number above 0"),
        ({"dropout": "1"}, "allowed: a number from 0 to below 1"),
        ({"sp": "perhaps"}, "sp is 'perhaps', allowed: 0 or 1"),
        ({"precision": "int3"}, "allowed: bf16, fp16, fp8, fp4, fp32"),
        ({"recompute": "ful"}, "allowed: none, selective, full, operators .*\nhint: did you mean 'full'"),
        ({"schedule": "ZB-3p"}, "schedule is 'ZB-3p', allowed: naive"),
        ({"zero": "7"}, "zero is '7', allowed: 0, 1, 2, 3"),
        ({"flops_counted": "both"}, "allowed: model, hardware"),
        ({"tensor": "8"}, "no column 'tensor'"),
        ({"vp": "3"}, "chunks is there under two names"),
    ],
)
def test_rows_that_cannot_be_predicted_say_why(cells: dict[str, str], why: str) -> None:
    with pytest.raises(StrettoError, match=why):
        row(KORTHIKANTI, **cells)


def test_a_model_that_is_no_transformer_is_refused() -> None:
    with pytest.raises(StrettoError, match="Mamba"):
        row(LLAMA, model="Nemotron-H 8B")


def test_aliases_and_spellings_are_read() -> None:
    cells = Cells(
        {"Num_GPUs": "1024", "MBS": "2.0", "seq_len": "1e4", "gbs": " ", "x_hue": "red", "sp": "True"}
    )
    assert (cells.whole("gpus"), cells.whole("micro_batch"), cells.whole("seq")) == (1024, 2, 10000)
    assert (cells.whole("global_batch"), cells.flag("sp"), cells.flag("oom")) == (None, True, False)
    assert column("VP").name == "chunks"
    names = [name for one in COLUMNS.values() for name in (one.name, *one.aliases)]
    assert len(names) == len(set(names))
    assert not set(names) & set(ADDED)


@given(
    st.sets(st.sampled_from(sorted(KORTHIKANTI))), st.sampled_from(["", "0", "x", "3", "-1", "1e9", "nan"])
)
@settings(max_examples=60, deadline=None)
def test_no_row_breaks_the_reader(changed: set[str], value: str) -> None:
    """Any row is read, or refused with a reason."""
    try:
        read = read_row({**KORTHIKANTI, **dict.fromkeys(changed, value)})
    except StrettoError:
        return
    assert read.job.microbatches


def test_a_cluster_and_a_model_replace_those_of_the_row() -> None:
    shape = row(LLAMA).job.shape
    read = read_row({**LLAMA, "gpu": "", "model": "none"}, find_cluster("dgx-a100-80gb"), shape)
    assert (read.hardware, read.job.shape) == ("a100-80gb-sxm", shape)


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
        ("gpus,hue\n8,red\n", "your own start with x_"),
        ("tp,TP\n8,1\n", "'tp' and 'TP' are one column"),
        ("vp,chunks\n8,1\n", "'vp' and 'chunks' are one column"),
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
    job = row(LLAMA, recompute_modules="Core_attn, mlp").job
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
    plain, sharded = row(LLAMA), row(LLAMA, zero="3", cp="1", tp="2")
    assert not plain.job.framework.wide_shards
    assert sharded.job.framework.wide_shards
    assert sharded.defaults["framework"] == "fsdp"
    assert (plain.job.dp.reduce, sharded.job.dp.reduce) == ("auto", "step")
    assert row(LLAMA, zero="3", cp="1", tp="2", framework="deepspeed").job.dp.reduce == "auto"
    assert row(LLAMA, framework="deepspeed").job.framework.lasting_gradients
    assert not row(LLAMA, framework="deepspeed", gradients="same").job.framework.lasting_gradients
    assert plain.repeat != row(LLAMA, framework="deepspeed").repeat
    assert [r.job.framework.buckets for r in (plain, row(LLAMA, framework="deepspeed"))] == [0, 10**9]
    assert sharded.job.framework.dtensor_loss


def test_the_framework_follows_from_software_and_source() -> None:
    assert row(LLAMA, software="Megatron-DeepSpeed 0.6").job.framework.lasting_gradients
    assert row(LLAMA, source="bigscience-workshop/bigscience, 2022-02").job.framework.lasting_gradients
    assert not row(LLAMA, source="NVIDIA/Megatron-LM, 2022-02").job.framework.lasting_gradients
    assert row(LLAMA, zero="3", tp="2", cp="1", software="DeepSpeed 0.15").job.dp.reduce == "auto"
    nemo = row(LLAMA, software="NeMo 24.07").job.framework
    assert (nemo.remainders, nemo.inputs_in_8_bits) == (True, True)
    assert not row(LLAMA, software="NeMo 24.07", precision="bf16").job.framework.inputs_in_8_bits


def test_a_planned_layout_keeps_what_stretto_keeps() -> None:
    """As `stretto plan` counts it."""
    for cells in ({}, {"zero": "3", "tp": "2", "cp": "1"}, {"attention": "unfused"}):
        assert read_row({**LLAMA, **cells}, planned=True).job.framework == Framework()
    assert read_row({**LLAMA, "framework": "fsdp", "zero": "3"}, planned=True).job.framework.wide_shards
    again = read_row({**LLAMA, "recompute_operators": "mlp"}, planned=True).job.framework
    assert again == Framework(operators=("mlp",))


def test_the_docs_contain_the_reference_of_all_columns() -> None:
    text = reference()
    for section in SECTIONS.values():
        for one in section:
            assert one.meaning, one.name
            assert f"| `{one.name}` | {', '.join(one.aliases)} | {one.meaning} | {one.allowed} |" in text
    docs = DOCS.read_text(encoding="utf-8")
    assert text in docs, "put the output of `stretto predict --table-columns` into docs/planning.md"
    assert not [name for name in ADDED if f"`{name}`" not in docs]
