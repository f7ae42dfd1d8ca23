"""Rows of tables of measured runs: what they mean, what is taken where they are silent."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.planner.table.cells import Cells, read_table
from stretto.planner.table.row import Row, read_row

TABLES = Path(__file__).parents[4] / "shared" / "tables"
needs_tables = pytest.mark.skipif(not TABLES.exists(), reason=f"no measured tables at {TABLES}")

# Korthikanti et al. 2022, tables 3 and 5: 175B with selective recomputation
KORTHIKANTI = {
    "source": "arXiv 2205.05198 Table 5",
    "model": "GPT",
    "layers": "96",
    "hidden": "12288",
    "heads": "96",
    "kv_heads": "96",
    "ffn": "49152",
    "seq": "2048",
    "vocab": "51200",
    "gpu": "A100-80GB-SXM",
    "gpus": "64",
    "dp": "1",
    "tp": "8",
    "pp": "8",
    "vp": "3",
    "cp": "1",
    "sp": "1",
    "zero": "0",
    "recompute": "selective(attention)",
    "micro_batch": "1",
    "global_batch": "64",
    "precision": "fp16/bf16 mixed",
    "iter_time_s": "13.75",
}
# a run of today: GPT-3 on H100, most cells empty
TODAY = {
    "source": "NVIDIA/NeMo performance_summary.md (2024-11-27)",
    "model": "LLAMA3-70B",
    "seq": "8192",
    "gpu": "H100",
    "gpus": "64",
    "tp": "4",
    "pp": "4",
    "vp": "5",
    "cp": "2",
    "micro_batch": "1",
    "global_batch": "128",
    "precision": "FP8",
    "tokens_per_s_per_gpu": "1524",
}


def row(base: dict[str, str], **cells: str) -> Row:
    return read_row({**base, **cells})


def test_a_whole_row_is_its_job() -> None:
    found = row(KORTHIKANTI)
    job = found.job
    assert str(job.layout) == "tp8 pp8"
    assert (job.schedule, job.options) == ("interleaved", {"chunks": 3})
    assert (job.shape.layers, job.shape.hidden, job.shape.vocab) == (96, 12288, 51200)
    assert (job.recompute.mode, job.sequence_parallel, job.dp.mode) == ("selective", True, "ddp")
    assert (job.precision.dtype, job.precision.gradients) == ("float16", "float32")
    assert (job.microbatches, found.hardware) == (64, "a100-80gb-sxm")
    assert (found.measured.seconds, found.measured.by) == (13.75, "iter_time_s")


def test_software_before_fused_attention() -> None:
    """The arXiv number dates the row; GPT had dropout then, which it tells."""
    found = row(KORTHIKANTI)
    assert found.running.attention == "explicit"
    assert found.job.shape.dropout == 0.1
    assert {"attention", "dropout"} <= found.defaults.keys()


def test_software_of_today() -> None:
    found = row(TODAY)
    job = found.job
    assert found.running.attention == "flash"
    assert job.shape.dropout == 0.0
    assert (job.layout.dp, job.dp.mode, job.sequence_parallel, job.recompute.mode) == (
        2,
        "zero1",
        True,
        "none",
    )
    assert (job.shape.kv_heads, job.shape.ffn, job.shape.vocab) == (8, 28672, 128256)
    assert {"dp", "zero", "sp", "recompute", "schedule", "vocab", "attention"} <= found.defaults.keys()
    assert found.measured.seconds == pytest.approx(128 * 8192 / (1524 * 64))


def test_whose_loss_is_fused() -> None:
    mpt = {
        "source": "mosaicml/llm-foundry README.md@HEAD",
        "model": "MPT-7b",
        "gpu": "a100_80gb",
        "gpus": "8",
    }
    mpt |= {
        "notes": "attn flash; doc version 2025-07-21",
        "global_batch": "8",
        "micro_batch": "1",
        "zero": "3",
    }
    assert read_row(mpt).running.fused_loss
    assert not row(TODAY).running.fused_loss
    assert not row(KORTHIKANTI).running.fused_loss


def test_what_is_told_is_no_default() -> None:
    told = row(
        TODAY, dp="2", zero="2", sp="0", recompute="full", schedule="1F1B", vocab="128000", attention="flash"
    )
    assert not told.defaults.keys() & {"dp", "zero", "sp", "recompute", "schedule", "vocab", "attention"}
    assert (told.job.dp.mode, told.job.sequence_parallel, told.job.schedule) == ("zero2", False, "1f1b")


@pytest.mark.parametrize(
    ("words", "schedule", "options"),
    [
        ("ZB-2p", "zb-h2", {}),
        ("ZB-1p", "zb-h1", {}),
        ("ZBV", "zb-v", {}),
        ("1F1B", "1f1b", {}),
        ("1F1B-I", "interleaved", {"chunks": 2}),
        ("Interleaved1F1B", "interleaved", {"chunks": 2}),
        ("AFAB", "gpipe", {}),
        ("ScheduleGPipe", "gpipe", {}),
    ],
)
def test_schedules_by_the_names_of_others(words: str, schedule: str, options: dict[str, int]) -> None:
    found = row(KORTHIKANTI, schedule=words, vp="").job
    assert (found.schedule, found.options) == (schedule, options)
    assert row(KORTHIKANTI, notes=f"schedule {words}; 64 microbatches", vp="").job.schedule == schedule


def test_one_layer_a_chunk() -> None:
    """Zero Bubble's tables: embedding and head stand for a layer each."""
    found = row(
        KORTHIKANTI, layers="46", pp="16", gpus="128", vp="max (1 layer per chunk)", schedule="1F1B-I"
    )
    assert found.job.options == {"chunks": 3}


@pytest.mark.parametrize(
    ("cells", "by", "seconds"),
    [
        ({"tokens_per_s_per_gpu": "1000"}, "tokens_per_s_per_gpu", 64 * 2048 / (1000 * 64)),
        ({"tflops_per_gpu": "140"}, "tflops_per_gpu (model FLOPs)", 1.0),
        ({"tflops_per_gpu": "140", "notes": "HARDWARE flops"}, "tflops_per_gpu (hardware FLOPs)", 4 / 3),
        ({"mfu_pct": "44.871794871794876"}, "mfu_pct", 1.0),
        ({"hfu_pct": "44.871794871794876"}, "hfu_pct", 4 / 3),
    ],
)
def test_seconds_by_each_figure(cells: dict[str, str], by: str, seconds: float) -> None:
    """140 TFLOP/s are 44.87% of 312; with full recomputation hardware does 4/3 of a block's FLOPs."""
    found = row(KORTHIKANTI, **{"iter_time_s": "", "recompute": "full", **cells}).measured
    assert found.by == by
    model = (
        72 * 64 * 96 * 2048 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (12 * 12288 * 96)) / (140e12 * 64)
    )
    assert found.seconds == pytest.approx(seconds if "tokens" in by else seconds * model, rel=0.004)


def test_degrees_that_are_no_product_of_the_gpus() -> None:
    found = row(TODAY, dp="4")
    assert found.job.layout.dp == 2
    assert "not 4" in found.defaults["dp"]
    with pytest.raises(StrettoError, match="does not divide 60 GPUs"):
        row(TODAY, gpus="60")


def test_a_sequence_that_is_not_told() -> None:
    assert row(TODAY, seq="").job.sequence == 8192  # what Llama 3 was pretrained with
    assert row(KORTHIKANTI, seq="").job.sequence == 2048
    assert "seq" in row(TODAY, seq="").defaults


def test_parameters_stand_for_sizes_that_are_missing() -> None:
    """52B is between Megatron's 39.1B and 76.1B: as wide as the nearer, with more layers."""
    sizes = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), "")
    for told in ({"params_b": "52"}, {"params_b": "52B"}, {"params_b": "?", "model": "GPT-52B"}):
        shape = row(KORTHIKANTI, **{**sizes, "vp": "", "pp": "8", **told}).job.shape
        assert (shape.layers, shape.hidden, shape.heads) == (64, 8192, 64)
    assert row(KORTHIKANTI, params_b="many").job.shape.layers == 96  # its sizes are there


def test_model_parallelism_without_its_parts() -> None:
    found = row(KORTHIKANTI, tp="", pp="", vp="", gpus="128", dp="2", notes="model-parallel size 64")
    assert str(found.job.layout) == "tp8 dp2 pp8"
    assert {"tp", "pp"} <= found.defaults.keys()


def test_a_batch_that_does_not_divide_is_compared_by_tokens() -> None:
    found = row(KORTHIKANTI, dp="2", gpus="128", global_batch="65", iter_time_s="65")
    assert found.job.global_batch == 64
    assert found.measured.seconds == pytest.approx(64)
    assert "65" in found.defaults["global_batch"]


def test_sharing_that_fits_where_none_is_told() -> None:
    """52B on 64 GPUs of 32 GB without a pipeline ran, so states were shared."""
    cells = {
        "source": "bigscience gpt2.md",
        "model": "GPT-52B",
        "gpu": "V100-32GB",
        "seq": "1024",
        "precision": "fp16",
    }
    found = row({**cells, "gpus": "64", "dp": "64", "tp": "1", "recompute": "full", "micro_batch": "16"})
    assert found.job.dp.mode == "zero3"
    assert "what fits" in found.defaults["zero"]
    assert (found.cluster.name, found.cluster.node) == ("jean-zay-v100-32gb", 4)
    assert (found.job.shape.layers, found.job.shape.hidden) == (64, 8192)


def test_out_of_memory_is_no_time() -> None:
    found = row(KORTHIKANTI, notes="printed notes: OOM", iter_time_s="")
    assert found.measured.out_of_memory
    assert found.measured.seconds is None
    assert not row(KORTHIKANTI, notes="16GB borderline OOM").measured.out_of_memory


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"notes": "LAYER time not iteration"}, "one layer"),
        ({"notes": "Finetuning LoRA"}, "LoRA"),
        ({"gpus": "", "dp": ""}, "no number of GPUs"),
        ({"gpu": ""}, "no GPU"),
        ({"gpu": "Quantum9000"}, "not known"),
        ({"layers": "", "model": "Foo"}, "not known"),
        ({"tp": "7", "gpus": "56"}, "model.heads"),
        ({"micro_batch": "one"}, "no number"),
        ({"precision": "int3"}, "precision"),
        ({"recompute": "sometimes"}, "recompute"),
        ({"schedule": "clockwise"}, "schedule"),
        ({"zero": "7"}, "zero"),
        ({"model": "Nemotron-H 8B"}, "state-space"),
    ],
)
def test_what_cannot_be_predicted_says_why(cells: dict[str, str], why: str) -> None:
    with pytest.raises(StrettoError, match=why):
        row(KORTHIKANTI, **cells)


def test_columns_by_other_names() -> None:
    cells = Cells({"Num GPUs": "1,024", "MBS": "2.0", "seq_len": "64K", "GBS": "-", "colour": "red"})
    assert (cells.whole("gpus"), cells.whole("micro_batch"), cells.whole("seq")) == (1024, 2, 65536)
    assert cells.text("global_batch") is None


@given(
    st.sets(st.sampled_from(sorted(KORTHIKANTI))), st.sampled_from(["", "0", "x", "3", "-1", "1e9", "nan"])
)
@settings(max_examples=60, deadline=None)
def test_no_row_breaks_the_reader(changed: set[str], value: str) -> None:
    """Whatever is missing or wrong: a row, or a reason."""
    try:
        found = read_row({**KORTHIKANTI, **dict.fromkeys(changed, value)})
    except StrettoError:
        return
    assert found.job.microbatches


@needs_tables
def test_the_published_tables() -> None:
    """Every row is a job or refused for a reason that is known."""
    rows = read_table(TABLES / "megatron_sc21_a100.csv")
    table = [cells for cells in rows if "Table 1" in cells["source"] or "text" in cells["source"]]
    found, refused = list[Row](), list[str]()
    for cells in table:
        try:
            found.append(read_row(cells))
        except StrettoError as error:
            refused.append(error.message)
    assert len(found) == 11
    assert sorted(set(refused)) == ["the row has no number of GPUs", "the row tells no degrees for 1024 GPUs"]
    trillion = next(r for r in found if r.cells["params_b"] == "1008.0")
    assert str(trillion.job.layout) == "tp8 dp6 pp64"
    # 502 petaFLOP/s in all, of the FLOPs with recomputation (Narayanan et al. 2021, table 1)
    assert trillion.measured.by == "tflops_per_gpu (hardware FLOPs)"
    assert trillion.measured.seconds == pytest.approx(102.6, rel=0.001)


def test_files_that_are_no_table(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match="cannot read"):
        read_table(tmp_path / "none.csv")
    empty = tmp_path / "empty.csv"
    empty.write_text("gpus,tp\n")
    with pytest.raises(StrettoError, match="no rows"):
        read_table(empty)
    empty.write_text("a,b\n1,2\n")
    with pytest.raises(StrettoError, match="no column gpus"):
        read_table(empty)
