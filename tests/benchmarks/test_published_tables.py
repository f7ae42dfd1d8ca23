"""benchmarks/published: tables of published runs in the columns of `predict --table`."""

from __future__ import annotations

from collections import Counter

import pytest
from published import ADAPTERS, adapted  # pyright: ignore[reportMissingImports]
from published.cells import SPELLINGS, column_name  # pyright: ignore[reportMissingImports]
from published.rows import read_row  # pyright: ignore[reportMissingImports]

from pages import ROOT
from stretto.errors import StrettoError
from stretto.planner.assumptions import software_profile
from stretto.planner.runs import RunRecord

TABLES = ROOT.parent / "shared" / "tables"
needs_tables = pytest.mark.skipif(not TABLES.exists(), reason=f"no measured tables at {TABLES}")


def adapt(table: str, **cells: str) -> RunRecord:
    """A row of the table as it is read, all other cells empty."""
    return read_row(ADAPTERS[table]({**EMPTY, **cells}))


EMPTY = {**dict.fromkeys(set(SPELLINGS) - {"chunks", "step_time_s"}, ""), "vp": "", "iter_time_s": ""}
GPT = {
    "model": "GPT",
    "layers": "96",
    "hidden": "12288",
    "heads": "96",
    "seq": "2048",
    "gpu": "A100-80GB-SXM",
    "gpus": "128",
    "micro_batch": "1",
    "global_batch": "128",
    "precision": "fp16",
}
BIGSCIENCE = {
    "model": "GPT-52B",
    "params_b": "52",
    "gpu": "V100-32GB",
    "gpus": "64",
    "seq": "1024",
    "precision": "fp16",
    "recompute": "full",
    "micro_batch": "16",
    "global_batch": "1024",
}


def test_megatron_s_software_depends_on_the_year() -> None:
    read = adapt(
        "korthikanti_2022_a100", **GPT, tp="8", pp="8", vp="3", sp="1", recompute="selective(attention)"
    )
    assert (read.job.recompute.mode, read.job.sequence_parallel, read.job.dp.mode) == (
        "selective",
        True,
        "ddp",
    )
    assert (read.job.attention, read.assumptions.software) == ("explicit", software_profile("unfused"))
    assert (read.job.shape.dropout, read.assumptions.blocking, read.assumptions.overlap) == (0.1, True, False)


def test_narayanan_counts_hardware_flops() -> None:
    read = adapt("megatron_sc21_a100", **GPT, tp="8", pp="8", tflops_per_gpu="140", notes="HARDWARE flops")
    assert read.measured.by == "tflops_per_gpu (hardware FLOPs)"
    assert read.job.recompute.mode == "full"


def test_model_parallelism_without_its_split_is_refused() -> None:
    read = adapt("megatron_sc21_a100", **GPT, dp="2", notes="model-parallel size 64 (split not printed)")
    assert str(read.job.layout) == "tp8 dp2 pp8"


def test_an_interleaving_that_is_not_stated() -> None:
    read = adapt("megatron_sc21_a100", **GPT, tp="8", pp="16", notes="interleaving factor not stated per row")
    assert (read.job.schedule, read.job.options) == ("interleaved", {"chunks": 2})


@pytest.mark.parametrize(
    ("spelling", "vp", "schedule", "options"),
    [
        ("ZB-2p", "1", "zb-h2", {}),
        ("ZB-1p", "1", "zb-h1", {}),
        ("1F1B", "1", "1f1b", {}),
        ("1F1B-I", "max (1 layer per chunk)", "interleaved", {"chunks": 3}),
    ],
)
def test_zero_bubble_s_schedules(spelling: str, vp: str, schedule: str, options: dict[str, int]) -> None:
    """One layer a chunk: embedding and head stand for a layer each."""
    cells = {**GPT, "layers": "46", "gpus": "16", "pp": "16", "vp": vp, "notes": f"schedule {spelling}; RoCE"}
    job = adapt("zero_bubble_a100", **cells).job
    assert (job.schedule, job.options, job.precision.dtype) == (schedule, options, "bfloat16")


def test_llm_foundry() -> None:
    cells = {
        "model": "MPT-7b",
        "gpu": "a100_80gb",
        "gpus": "8",
        "zero": "3",
        "seq": "2048",
        "global_batch": "8",
    }
    read = adapt(
        "mosaicml_llm_foundry_a100", **cells, notes="FSDP mixed_precision PURE", precision="amp_bf16"
    )
    assert (read.cluster.name, read.job.fused_loss) == ("mosaicml-a100-80gb", True)
    assert (read.job.precision.gradients, read.assumptions.software) == ("same", software_profile("fused"))
    default = adapt("mosaicml_llm_foundry_a100", **cells, notes="FSDP mixed_precision DEFAULT")
    assert default.job.precision.gradients == "float32"


def test_nemo() -> None:
    cells = {
        "model": "LLAMA3-70B",
        "layers": "80",
        "gpu": "H100",
        "gpus": "64",
        "tp": "4",
        "pp": "4",
        "cp": "2",
    }
    cells |= {"dp": "4", "seq": "8192", "micro_batch": "1", "global_batch": "128", "precision": "FP8"}
    read = adapt("nemo_legacy_h100_b200", **cells, notes="container NeMo24.07")
    assert (read.job.layout.dp, read.job.options, read.job.precision.fp8) == (2, {"chunks": 20}, "tensor")
    assert read.assumptions.software == software_profile("engine")
    later = adapt("nemo_legacy_h100_b200", **cells, notes="")
    assert later.assumptions.software == software_profile("tuned")
    before = adapt("nemo_legacy_h100_b200", **cells, notes="container NeMo24.03.01.framework")
    assert before.assumptions.software == software_profile("engine")
    with pytest.raises(StrettoError, match="LoRA"):
        adapt("nemo_legacy_h100_b200", **cells, notes="Finetuning LoRA")


def test_bigscience_s_parameters_stand_for_sizes() -> None:
    """52B has the sizes of its scripts. It ran on 64 GPUs of 32 GB without a pipeline, so states were shared;
    and its script keeps the inputs of recomputed blocks in host memory.
    """
    read = adapt("bigscience_v100", **BIGSCIENCE, dp="64", tp="1")
    assert (read.job.shape.layers, read.job.shape.hidden, read.job.shape.heads) == (64, 8192, 32)
    assert (read.job.dp.mode, read.cluster.name, read.cluster.node) == ("zero3", "jean-zay-v100-32gb", 4)
    split = adapt("bigscience_v100", **BIGSCIENCE, dp="16")
    assert str(split.job.layout) == "tp4 dp16"
    assert split.job.recompute.shard_inputs
    assert split.job.framework.inputs_on_host
    toggled = adapt("bigscience_v100", **BIGSCIENCE, dp="16", notes="ScatEmb=Y; PA_CPU=N")
    assert not toggled.job.framework.inputs_on_host


def test_bigscience_s_notes() -> None:
    assert adapt("bigscience_v100", **BIGSCIENCE, notes="printed notes: OOM").measured.out_of_memory
    assert not adapt("bigscience_v100", **BIGSCIENCE, notes="16GB borderline OOM").measured.out_of_memory
    dp = adapt("bigscience_v100", **BIGSCIENCE, zero="3", notes="Full Offload; Opt Offl=Y; Par Offl=N").job.dp
    assert (dp.offload, dp.offload_parameters) == ("cpu", "none")
    dp = adapt("bigscience_v100", **BIGSCIENCE, notes="HF + Deepspeed Zero 3 + Full Offload; ").job.dp
    assert (dp.mode, dp.offload, dp.offload_parameters) == ("zero3", "cpu", "cpu")


@needs_tables
@pytest.mark.slow
def test_every_published_row_is_a_job_or_has_a_reason() -> None:
    """The refusals that docs/evidence/prediction-errors.md counts."""
    refused = Counter[str]()
    count = 0
    for table in ADAPTERS:
        for cells, why in adapted(TABLES, table):
            count += 1
            for name in cells:
                column_name(name)
            try:
                if not why:
                    read_row(cells)
            except StrettoError as error:
                why = error.message
            refused[why] += bool(why)
    assert count == 1263
    assert +refused == {
        "the time is of one layer, not of a step": 5,
        "the row has no number of GPUs": 4,
        "the row tells no degrees for 1024 GPUs": 1,
        "tp=4 x cp=1 x pp=8 does not divide 16 GPUs": 5,
        "tp=4 x cp=1 x pp=32 does not divide 64 GPUs": 1,
        "a step of LoRA over packed documents, whose attention no column states": 9,
    }


@needs_tables
def test_a_row_of_narayanan() -> None:
    """502 petaFLOP/s in all, of the FLOPs with recomputation (Narayanan et al. 2021, table 1)."""
    rows = [cells for cells, _ in adapted(TABLES, "megatron_sc21_a100")]
    trillion = read_row(next(c for c in rows if c["params_b"] == "1008.0" and "Table 1" in c["source"]))
    assert str(trillion.job.layout) == "tp8 dp6 pp64"
    assert trillion.measured.by == "tflops_per_gpu (hardware FLOPs)"
    assert trillion.measured.seconds == pytest.approx(102.6, rel=0.001)
