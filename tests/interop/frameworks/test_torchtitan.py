"""torchtitan's configs from jobs and back; held to its own classes where it is installed."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.job.data_parallel import DataParallelSettings, Precision
from stretto.job.job import Job, Recompute
from stretto.job.optimiser import Optimiser, RateSchedule
from stretto.job.parameters import count_parameters
from stretto.job.presets import preset
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.program import schedule
from stretto.run.config import load
from stretto.run.config.job import job_of
from stretto.run.config.schema import TrainConfig
from stretto_interop.frameworks.fields import JobValues, run_values, values_of
from stretto_interop.frameworks.mapping import emit, read, settings_of
from stretto_interop.frameworks.torchtitan import FLAVOURS, TORCHTITAN

BF16 = Precision(dtype="bfloat16")
SMALL = ModelShape(family="llama", layers=6, hidden=64, heads=4, kv_heads=2, vocab=512, sequence=128)
JOB = Job(
    shape=preset("llama3-8b"),
    layout=Layout(dp=8),
    global_batch=64,
    micro_batch=2,
    sequence=4096,
    dp=DataParallelSettings(mode="zero3"),
    precision=BF16,
)
PIPELINE = replace(
    JOB,
    layout=Layout(dp=2, tp=2, pp=4),
    sequence_parallel=True,
    micro_batch=1,
    dp=DataParallelSettings(mode="zero2", reduce="step"),
    stage_layers=(8, 9, 9, 8),
)
EIGHT = (4, 4, 4, 5, 5, 4, 4, 4)
JOBS = {
    "fsdp": JOB,
    "replicas": replace(JOB, dp=DataParallelSettings(mode="ddp")),
    "hybrid": replace(
        JOB, dp=DataParallelSettings(mode="zero3", shard_states=4, shard_gradients=4, shard_parameters=4)
    ),
    "kept": replace(JOB, dp=DataParallelSettings(mode="zero2")),
    "host": replace(JOB, dp=DataParallelSettings(mode="zero3", offload="cpu", offload_parameters="cpu")),
    "context": replace(JOB, layout=Layout(dp=4, cp=2)),
    "float32": replace(JOB, precision=Precision()),
    "8 bits": replace(JOB, precision=replace(BF16, fp8="row")),
    "recomputed": replace(JOB, recompute=Recompute("full")),
    "small": replace(JOB, shape=SMALL, sequence=128),
    "tied": replace(JOB, shape=preset("llama3.2-1b")),
    "experts": replace(
        JOB, shape=preset("qwen3-30b-a3b"), layout=Layout(dp=4, tp=2, ep=8, expert_tp=1), expert_tp=1
    ),
    "1f1b": PIPELINE,
    "gathered": replace(PIPELINE, dp=DataParallelSettings(mode="zero3", reduce="step", gather="layer")),
    "gpipe": replace(PIPELINE, schedule="gpipe"),
    "interleaved": replace(
        PIPELINE, schedule="interleaved", options={"chunks": 2}, stage_layers=EIGHT, global_batch=32
    ),
    "bfs": replace(PIPELINE, schedule="bfs", options={"chunks": 2}, stage_layers=EIGHT),
    "interleaved-zb": replace(PIPELINE, schedule="interleaved-zb", options={"chunks": 2}, stage_layers=EIGHT),
    "zb-v": replace(PIPELINE, schedule="zb-v", stage_layers=EIGHT),
    "dualpipe-v": replace(PIPELINE, schedule="dualpipe-v", stage_layers=EIGHT),
    "optimiser": replace(
        JOB,
        optimiser=Optimiser(
            betas=(0.9, 0.99),
            eps=1e-6,
            weight_decay=0.0,
            states="bfloat16",
            rate=RateSchedule(schedule="wsd", warmup=7, decay_fraction=0.2, decay="sqrt", min_ratio=0.0),
        ),
    ),
    "constant": replace(JOB, optimiser=Optimiser(clip=None, rate=RateSchedule(schedule="constant"))),
}


def without_ways(job: Job) -> Job:
    """The job as it was before torchtitan ran it; a plan leaves the peak of the learning rate open."""
    plain = Job(shape=job.shape)
    job = replace(job, optimiser=replace(job.optimiser, lr=1e-3))
    names = ("framework", "bucket", "loss_chunk", "vocab_multiple")
    return replace(job, **{name: getattr(plain, name) for name in names})


@pytest.mark.parametrize("name", JOBS)
def test_what_is_written_reads_back_as_the_same_job(name: str) -> None:
    job = JOBS[name]
    text = TORCHTITAN.render(*settings_of(TORCHTITAN, JobValues(values_of(job).values)))
    assert without_ways(read(TORCHTITAN, text, "x.py").job) == without_ways(job)


@pytest.mark.parametrize(
    ("schedule_", "options", "stages", "kind"),
    [
        ("v-half", {}, EIGHT, "ZBVZeroBubble"),
        ("1f1b-eager", {}, (8, 9, 9, 8), "PipelineScheduleMulti"),
        ("interleaved", {"chunks": 2, "group": 8}, EIGHT, "PipelineScheduleMulti"),
    ],
)
def test_a_schedule_that_torch_has_no_name_for_is_in_the_file_itself(
    schedule_: str, options: dict[str, int], stages: tuple[int, ...], kind: str
) -> None:
    job = replace(PIPELINE, schedule=schedule_, options=options, stage_layers=stages)
    text = emit(TORCHTITAN, job)
    assert f'pipeline_parallel_schedule="{kind}"' in text
    program = read(TORCHTITAN, text, "x.py").job.custom_program
    assert program is not None
    assert program.orders == schedule(schedule_, 4, 32, **options).orders


def config(*overrides: str) -> TrainConfig:
    return load("configs/llama-tiny-tp2.yaml", ["train.device=auto", *overrides])


def test_a_config_is_written_whole() -> None:
    job = config("checkpoint.every=20", "train.seed=5", "run.name=mine")
    text = emit(TORCHTITAN, job_of(job), run_values(job))
    assert "fill_in" not in text
    for line in (
        "steps=100",
        "interval=20",
        "seed=5",
        '"lr": 0.002',
        "warmup_steps=10",
        "model_spec = sized()",
    ):
        assert line in text, line
    assert "left out: run.name=mine (it is torchtitan's own way)" in text


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (replace(JOB, shape=preset("gpt2")), "model.family is gpt: torchtitan has no GPT-2"),
        (replace(JOB, shape=preset("mixtral-8x7b")), "model.moe.experts is 8: torchtitan has"),
        (replace(JOB, shape=replace(SMALL, norm_eps=1e-6)), "model.norm_eps is 1e-06"),
        (replace(PIPELINE, shape=preset("llama3.2-1b"), stage_layers=None), "model.tied is true"),
        (replace(JOB, dp=DataParallelSettings(mode="zero1")), "dp.mode is zero1: torchtitan replicates"),
        (replace(JOB, dp=DataParallelSettings(mode="zero3", shard_parameters=2)), "dp.shard_parameters is 2"),
        (
            replace(JOB, layout=Layout(dp=4, cp=2), dp=DataParallelSettings()),
            "dp.mode is ddp: torchtitan",
        ),
        (replace(JOB, layout=Layout(dp=4, cp=2), context="ulysses"), "layout.context is ulysses"),
        (
            replace(PIPELINE, dp=DataParallelSettings(mode="zero2", reduce="microbatch")),
            "dp.reduce is microbatch",
        ),
        (
            replace(PIPELINE, dp=DataParallelSettings(mode="zero3")),
            "dp.gather is auto: torchtitan's pipelines",
        ),
        (replace(JOB, dp=DataParallelSettings(mode="zero3", offload="cpu")), "dp.offload_parameters is none"),
        (
            replace(PIPELINE, schedule="hanayo", options={"waves": 2}, stage_layers=None),
            "schedule.name is hanayo",
        ),
        (replace(PIPELINE, schedule="chimera", dp=DataParallelSettings()), "schedule.name is chimera"),
        (replace(PIPELINE, stage_layers=(1, 11, 11, 11)), "layout.stages is [1, 11, 11, 11]"),
        (replace(JOB, schedule="gpipe"), "schedule.name is gpipe: without a pipeline"),
        (replace(JOB, precision=Precision(dtype="float16")), "train.dtype is float16"),
        (replace(JOB, precision=replace(BF16, gradients="same")), "precision.gradients is same"),
        (replace(JOB, precision=replace(BF16, fp8="tensor")), "precision.fp8 is tensor"),
        (replace(JOB, attention="explicit"), "train.attention is explicit"),
        (replace(JOB, recompute=Recompute("selective")), "recompute.mode is selective"),
        (replace(JOB, recompute=Recompute("full", blocks=3)), "recompute.blocks is 3"),
        (replace(JOB, optimiser=Optimiser(name="muon")), "optim.name is muon"),
        (replace(JOB, optimiser=Optimiser(no_decay=("*head*",))), "optim.no_decay is"),
    ],
)
def test_what_torchtitan_lacks_is_refused_by_name(job: Job, message: str) -> None:
    with pytest.raises(StrettoError) as caught:
        emit(TORCHTITAN, job)
    assert caught.value.message.startswith(message)
    assert caught.value.hint is not None


# ------------------------------------------------------------------ what people run today

REGISTRY = """
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

def base() -> Trainer.Config:
    model_spec = model_registry("70B")
    return Trainer.Config(
        model_spec=model_spec,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),
        optimizer=default_adamw(lr=1.5e-4),
        training=TrainingConfig(local_batch_size=2 * 4, seq_len=8192, steps=1000),
        parallelism=ParallelismConfig(tensor_parallel_degree=8),
        profiler=Profiler.Config(enable_profiling=True),
        activation_checkpoint=FullAC.Config(),
    )


def mine() -> Trainer.Config:
    config = base()
    config.compile = CompileConfig(enable=True)
    config.training.local_batch_size = 1
    config.activation_checkpoint = SelectiveAC.Config()
    return config
"""


def test_a_config_function_is_read_without_running_it() -> None:
    reading = read(TORCHTITAN, REGISTRY, "mine.py", 64)
    job = reading.job
    assert job.shape == preset("llama3-70b")
    assert (job.layout.dp, job.layout.tp, job.sequence_parallel, job.dp.mode) == (8, 8, True, "zero3")
    assert (job.global_batch, job.micro_batch, job.sequence) == (8, 1, 8192)
    assert (job.recompute.mode, job.framework.operators) == ("selective", ("alternate_mm",))
    assert (job.framework.wide_shards, job.framework.fused_activation) == (True, True)
    assert reading.assumptions.software.passes < 2  # of compiled kernels
    assert reading.remarks == ("the loss in chunks takes less memory for logits than is counted",)
    assert reading.ignored == {"logging, profiling and checks": ("profiler.enable_profiling",)}


TOML = """
[model]
name = "llama3"
flavor = "70B"
converters = ["float8"]
[optimizer]
lr = 1.5e-4
[training]
batch_size = 8
seq_len = 8192
compile = true
[parallelism]
data_parallel_replicate_degree = 2
tensor_parallel_degree = 2
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "interleaved1f1b"
[activation_checkpoint]
mode = "full"
"""


def test_a_toml_file_of_older_versions_is_read() -> None:
    job = read(TORCHTITAN, TOML, "train.toml", 64).job
    assert (job.layout.dp, job.layout.pp, job.dp.mode, job.dp.shard_states) == (8, 4, "zero2", 4)
    assert (job.schedule, job.options, job.micro_batch) == ("interleaved", {"chunks": 2}, 1)
    assert job.stage_layers == (11, 11, 10, 10, 10, 10, 10, 10)
    assert job.precision.fp8 == "tensor"


TWO = "def a() -> Trainer.Config:\n    return Trainer.Config()\n" * 2
PYTHON = "def a() -> Trainer.Config:\n    return Trainer.Config({})\n"


@pytest.mark.parametrize(
    ("text", "source", "message", "hint"),
    [
        ("x = 1", "x.py", "x.py has no function that returns Trainer.Config", "is it"),
        ("def f(:", "x.py", "x.py line 1: ", "is it Python?"),
        (
            PYTHON.format("") + PYTHON.format("").replace("a()", "b()"),
            "x.py",
            "x.py has 2 configs: a, b",
            "keep",
        ),
        (
            "def a() -> Trainer.Config:\n    for i in range(3):\n        pass\n    return Trainer.Config()",
            "x.py",
            "x.py line 2: a has a for, which cannot be read without running it",
            "literal",
        ),
        (
            PYTHON.format("training=TrainingConfig(local_batch_size=os.cpu_count())"),
            "x.py",
            "x.py: training.local_batch_size is 'os.cpu_count'",
            "a whole number",
        ),
        (
            PYTHON.format("training=TrainingConfig(seq_length=3)"),
            "x.py",
            "x.py: torchtitan 0.3.0 has no",
            "seq_len",
        ),
        (PYTHON.format("model_spec=build()"), "x.py", "x.py: model_spec is not made by", "--model"),
        ("[training]\nseq_len =", "x.toml", "x.toml: ", "TOML"),
        ("[model]\nname='llama9'\nflavor='8B'", "x.toml", "the model is llama9 8B: not known", "llama3 8B"),
        (
            "[experimental]\ncustom_import='a'",
            "x.toml",
            "x.toml: experimental.custom_import is a: it has",
            "leave",
        ),
        (
            "[parallelism]\ntensor_parallel_degree=0",
            "x.toml",
            "x.toml: parallelism.tensor_parallel_d",
            "above 0",
        ),
        (
            "[parallelism]\ntensor_parallel_degree=3",
            "x.toml",
            "x.toml: 64 devices are no multiple of the 3",
            "63",
        ),
        (
            "[training]\nlocal_batch_size=8\nglobal_batch_size=100",
            "x.toml",
            "training.global_batch_size=100 is no multiple of local_batch_size=8 x 64 replicas",
            "nearest: 512",
        ),
    ],
)
def test_what_cannot_be_read_says_why(text: str, source: str, message: str, hint: str) -> None:
    with pytest.raises(StrettoError) as caught:
        read(TORCHTITAN, text, source, 64)
    assert caught.value.message.startswith(message)
    assert hint in (caught.value.hint or "")


# ------------------------------------------------------------------ torchtitan's own classes


def built(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """What torchtitan makes of a config function, through its own command line."""
    manager = pytest.importorskip("torchtitan.config.manager", reason="torchtitan is not installed")
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    try:
        return manager.ConfigManager().parse_args(["--module", name, "--config", "planned"])
    finally:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", sorted(JOBS))
def test_torchtitan_itself_takes_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "8 bits":
        pytest.importorskip("torchao", reason="torchao is not installed")
    job = JOBS[name]
    text = emit(TORCHTITAN, job).replace("raise SystemExit(", "return 100  # ")
    titan_config = built(text, tmp_path, monkeypatch, f"planned_{sorted(JOBS).index(name)}")
    parallelism = titan_config.parallelism
    assert (
        parallelism.data_parallel_shard_degree * parallelism.data_parallel_replicate_degree == job.layout.dp
    )
    assert parallelism.pipeline_parallel_degree == job.layout.pp
    assert titan_config.training.seq_len == job.sequence
    assert len(titan_config.model_spec.model.layers) == job.shape.layers
    dims = importlib.import_module("torchtitan.distributed.parallel_dims")
    dims.ParallelDims.from_config(parallelism, job.layout.world)


def test_a_model_of_other_sizes_has_as_many_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    text = emit(TORCHTITAN, JOBS["small"]).replace("raise SystemExit(", "return 100  # ")
    titan_config = built(text, tmp_path, monkeypatch, "planned_small")
    with torch.device("meta"):
        model = titan_config.model_spec.model.build()
    assert sum(p.numel() for p in model.parameters()) == count_parameters(SMALL).total


def test_flavours_have_the_sizes_of_their_presets() -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    for (module, flavour), name in FLAVOURS.items():
        titan_model = importlib.import_module(f"torchtitan.models.{module}").model_registry(flavour).model
        shape = preset(name)
        last = titan_model.layers[-1]
        assert (len(titan_model.layers), titan_model.dim, titan_model.vocab_size) == (
            shape.layers,
            shape.hidden,
            shape.vocab,
        )
        assert last.attention.n_heads == shape.heads
        assert titan_model.enable_weight_tying == shape.tied
        assert (last.moe is None) == (shape.moe is None)
        if last.moe is None:
            assert last.feed_forward.w1.out_features == shape.ffn


@pytest.mark.parametrize("more", ["**BASE", "steps={**BASE}"])
def test_values_that_a_star_brings_are_not_dropped(more: str) -> None:
    text = emit(TORCHTITAN, JOB).replace("training=TrainingConfig(", f"training=TrainingConfig({more},", 1)
    assert more in text
    with pytest.raises(StrettoError, match=r"\*\* in it, which cannot be read"):
        read(TORCHTITAN, text, "run.py", 8)
