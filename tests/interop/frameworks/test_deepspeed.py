"""DeepSpeed's JSON from jobs and back; held to DeepSpeed's own parser where it is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.job.data_parallel import DataParallelSettings, Precision
from stretto.job.job import Job, Recompute
from stretto.job.optimiser import Optimiser, RateSchedule
from stretto.job.parameters import count_parameters
from stretto.job.presets import preset
from stretto.layout.layout import Layout
from stretto.planner.memory.short_step import short_step_memory
from stretto_interop.frameworks.deepspeed import DEEPSPEED
from stretto_interop.frameworks.fields import values_of
from stretto_interop.frameworks.mapping import emit, others, read

BF16 = Precision(dtype="bfloat16")
JOB = Job(
    shape=preset("llama3-8b"),
    layout=Layout(dp=8),
    global_batch=64,
    micro_batch=2,
    sequence=4096,
    dp=DataParallelSettings(mode="zero3"),
    precision=BF16,
)
EXPERTS = replace(JOB, shape=preset("mixtral-8x7b"), layout=Layout(dp=8, ep=4))
JOBS = {
    "zero3": JOB,
    "float32": replace(JOB, precision=Precision(), dp=DataParallelSettings(mode="ddp")),
    "16-bit gradients": replace(
        JOB,
        precision=replace(BF16, gradients="same"),
        dp=DataParallelSettings(mode="ddp"),
        optimiser=Optimiser(),
    ),
    "float16": replace(JOB, precision=Precision(dtype="float16", loss_scale=2.0**12, loss_scale_steps=500)),
    "hpz": replace(JOB, dp=DataParallelSettings(mode="zero3", shard_parameters=4)),
    "host": replace(JOB, dp=DataParallelSettings(mode="zero2", offload="cpu")),
    "files": replace(
        JOB, dp=DataParallelSettings(mode="zero3", offload="nvme", offload_parameters="cpu", path="/local")
    ),
    "autotp": replace(JOB, layout=Layout(dp=4, tp=2), dp=DataParallelSettings(mode="zero1")),
    "ulysses": replace(JOB, layout=Layout(dp=4, cp=2), context="ulysses"),
    "experts": EXPERTS,
    "experts, tp": replace(EXPERTS, layout=Layout(dp=4, tp=2, ep=4, expert_tp=1), expert_tp=1),
    "recomputed": replace(JOB, recompute=Recompute("full", shard_inputs=True)),
    "lamb": replace(JOB, optimiser=Optimiser(name="lamb", clip=None, rate=RateSchedule(warmup=9))),
    "sgd": replace(
        JOB,
        optimiser=Optimiser(name="sgd", momentum=0.9, rate=RateSchedule(schedule="constant", min_ratio=0.1)),
    ),
    "muon": replace(
        JOB, optimiser=Optimiser(name="muon", rate=RateSchedule(schedule="linear", min_ratio=0.0))
    ),
}


def settings_elsewhere(job: Job) -> Mapping[str, Any]:
    """What a JSON of DeepSpeed does not say, and a reader of it says beside it."""
    values = values_of(job).values
    return {
        name: value for name, value in values.items() if name.startswith("model.") or name == "data.sequence"
    }


def without_ways(job: Job) -> Job:
    """The job as it was before DeepSpeed ran it; a plan says nothing of buckets and padding."""
    plain = Job(shape=job.shape)
    names = ("framework", "bucket", "loss_chunk", "vocab_multiple")
    return replace(job, **{name: getattr(plain, name) for name in names})


def decided(job: Job) -> Job:
    """The job without what a plan leaves open, the peak of the learning rate; a warm-up that says nothing of
    its first rate begins at 0 there.
    """
    default = 0.95 if job.optimiser.name == "muon" else job.optimiser.momentum
    rate = replace(job.optimiser.rate, warmup_init=job.optimiser.rate.warmup_init or 0.0)
    return replace(job, optimiser=replace(job.optimiser, lr=1e-3, momentum=default, rate=rate))


def settings(text: str) -> dict[str, Any]:
    return json.loads(text)


@pytest.mark.parametrize("name", JOBS)
def test_what_is_written_reads_back_as_the_same_job(name: str) -> None:
    job = JOBS[name]
    reading = read(DEEPSPEED, emit(DEEPSPEED, job), "x.json", job.layout.world, settings_elsewhere(job))
    assert decided(without_ways(reading.job)) == decided(without_ways(job))


def test_a_config_of_zero_3_with_offload() -> None:
    job = replace(JOBS["files"], optimiser=Optimiser(clip=0.5))
    config = settings(emit(DEEPSPEED, job, about="the plan"))
    comments = config.pop("//")
    assert comments[0] == "the plan"
    assert 'in the script: llama3-8b, with attn_implementation="sdpa"' in comments
    assert "fill in optimizer.params.lr (optim.lr), such as 0.0003" in comments
    assert config["optimizer"].pop("params")["lr"] == "auto"
    assert config.pop("scheduler")["params"]["total_num_steps"] == "auto"
    assert config == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local"},
            "offload_param": {"device": "cpu"},
        },
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "optimizer": {"type": "AdamW"},
        "gradient_clipping": 0.5,
    }


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (replace(JOB, layout=Layout(dp=4, pp=2)), "layout.pp is 2: DeepSpeed's JSON has no pipeline"),
        (replace(JOB, layout=Layout(dp=4, cp=2)), "layout.context is ring: DeepSpeed exchanges heads"),
        (replace(JOB, layout=Layout(dp=2, cp=2, tp=2)), "layout.cp is 2: DeepSpeed has sequence"),
        (replace(JOB, schedule="gpipe"), "schedule.name is gpipe"),
        (
            replace(JOB, layout=Layout(dp=4, tp=2), sequence_parallel=True),
            "layout.sequence_parallel is true: DeepSpeed's AutoTP keeps",
        ),
        (replace(JOB, dp=DataParallelSettings(mode="server")), "dp.mode is server"),
        (replace(JOB, dp=DataParallelSettings(mode="zero3", shard_states=4)), "dp.shard_states is 4"),
        (replace(JOB, dp=DataParallelSettings(mode="zero2", reduce="step")), "dp.reduce is step"),
        (replace(JOB, dp=DataParallelSettings(mode="zero3", gather="stage")), "dp.gather is stage"),
        (
            replace(JOB, dp=DataParallelSettings(mode="zero1", offload="nvme", path="/x")),
            "dp.offload is nvme",
        ),
        (
            replace(JOB, dp=DataParallelSettings(mode="ddp")),
            "precision.gradients is float32: DeepSpeed without ZeRO",
        ),
        (replace(JOB, precision=replace(BF16, fp8="row")), "precision.fp8 is row"),
        (replace(JOB, precision=replace(BF16, keep=("*norm*", "*head*"))), "precision.keep is"),
        (
            replace(JOB, precision=Precision(dtype="float16", loss_scale=1000.0)),
            "precision.loss_scale is 1000.0",
        ),
        (replace(JOB, recompute=Recompute("selective")), "recompute.mode is selective"),
        (replace(JOB, optimiser=Optimiser(name="adafactor")), "optim.name is adafactor"),
        (replace(JOB, optimiser=Optimiser(states="bfloat16")), "optim.states is bfloat16"),
        (replace(JOB, optimiser=Optimiser(no_decay=("*bias",))), "optim.no_decay is"),
        (replace(JOB, optimiser=Optimiser(rate=RateSchedule(schedule="wsd"))), "optim.rate.schedule is wsd"),
        (
            replace(JOB, optimiser=Optimiser(rate=RateSchedule(schedule="linear"))),
            "optim.rate.min_ratio is 0.1",
        ),
        (
            replace(EXPERTS, layout=Layout(dp=4, tp=2, ep=2, expert_tp=2), expert_tp=2),
            "layout.expert_tp is 2",
        ),
    ],
)
def test_what_deepspeed_lacks_is_refused_by_name(job: Job, message: str) -> None:
    with pytest.raises(StrettoError) as caught:
        emit(DEEPSPEED, job)
    assert caught.value.message.startswith(message)
    assert caught.value.hint is not None


TODAY = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": False,
        "reduce_bucket_size": 2e8,
        "zero_quantized_weights": False,
        "offload_optimizer": {"device": "none", "ratio": 1.0},
    },
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": False},
    "steps_per_print": 10,
    "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
}


def today(**changes: Any) -> str:
    return json.dumps({**TODAY, "bf16": {"enabled": True}, **changes})


def test_a_config_of_today_is_read_and_what_changes_no_price_is_listed() -> None:
    reading = read(DEEPSPEED, today(), "ds.json", 16, settings_elsewhere(JOB))
    job = reading.job
    assert (job.global_batch, job.micro_batch, job.microbatches, job.layout.dp) == (128, 4, 2, 16)
    assert (job.dp.mode, job.precision.dtype, job.precision.gradients) == ("zero2", "bfloat16", "same")
    assert (job.framework.buckets, reading.assumptions.overlap) == (4 * 10**8, False)
    assert reading.ignored == {"logging, profiling and checks": ("steps_per_print",)}


def test_inputs_on_the_host_and_old_names_are_read() -> None:
    text = today(
        zero_optimization={
            "stage": 3,
            "cpu_offload": True,
            "stage3_prefetch_bucket_size": 1,
            "mics_shard_size": 4,
        },
        activation_checkpointing={"cpu_checkpointing": True},
    )
    job = read(DEEPSPEED, text, "ds.json", 16, settings_elsewhere(JOB)).job
    assert job.framework.inputs_on_host
    assert (job.recompute.mode, job.dp.offload, job.dp.shard_states) == ("full", "cpu", 4)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (today(train_batch_sise=3), "ds.json: DeepSpeed 0.19.8 has no train_batch_sise", "train_batch_size"),
        (json.dumps(TODAY), "ds.json: bf16.enabled is auto", "write the number"),
        (today(zero_optimization={"stage": 4}), "zero_optimization.stage is 4", "0, 1, 2, 3"),
        (
            today(train_batch_size=100),
            "train_batch_size=100 is not train_micro",
            "leave one of the three out",
        ),
        (
            today(zero_optimization={"stage": "2"}),
            "ds.json: zero_optimization.stage is '2'",
            "a whole number",
        ),
        (
            today(torch_autocast={"enabled": True}),
            "ds.json: torch_autocast.enabled is true: it has no",
            "leave",
        ),
        (
            today(amp={"enabled": True}),
            "ds.json: amp.enabled is true: it was removed from DeepSpeed",
            "leave",
        ),
        (today(pipeline={"stages": 4}), "ds.json: pipeline.stages is 4: the stages of a", "leave"),
        (today(optimizer={"type": "OneBitAdam"}), "optimizer.type is OneBitAdam", "adamw"),
        ("{", "ds.json line 1: ", "is it DeepSpeed's JSON?"),
        ("[]", "ds.json is no JSON object", "is it DeepSpeed's JSON?"),
        ('{"bf16": {}, "bf16": {}}', "ds.json: bf16 is there twice", "DeepSpeed refuses"),
        (today(sequence_parallel_size=3), "ds.json: 16 devices are not a multiple of 3", "nearest: 15"),
    ],
)
def test_what_cannot_be_read_says_why(text: str, message: str, hint: str) -> None:
    with pytest.raises(StrettoError) as caught:
        read(DEEPSPEED, text, "ds.json", 16, settings_elsewhere(JOB))
    assert caught.value.message.startswith(message)
    assert hint in (caught.value.hint or "")


def test_the_model_and_the_devices_are_said_beside_it() -> None:
    with pytest.raises(StrettoError, match="does not say which model"):
        read(DEEPSPEED, today(), "ds.json", 16)
    with pytest.raises(StrettoError, match="how many devices"):
        read(DEEPSPEED, today(), "ds.json", None, settings_elsewhere(JOB))


def test_a_search_counts_of_each_mode_what_a_prediction_does() -> None:
    """Gradients of 16 bits last beside those of 32 with ZeRO 1 and 2, and not with 3."""
    template = DEEPSPEED.as_run(replace(JOB, dp=DataParallelSettings()), {}).framework
    halves = 2 * count_parameters(JOB.shape).total
    for dp, lasting in (
        (DataParallelSettings(mode="zero1"), halves),
        (DataParallelSettings(mode="zero3"), 0),
    ):
        job = replace(JOB, dp=dp)
        (plain,) = short_step_memory(job)
        for run in (replace(job, framework=template), DEEPSPEED.as_run(job, {})):
            (memory,) = short_step_memory(run)
            assert memory.gradients == pytest.approx(plain.gradients + lasting, rel=1e-3)


# ------------------------------------------------------------------ DeepSpeed's own parser


@pytest.mark.parametrize("name", JOBS)
def test_deepspeed_itself_takes_it(name: str) -> None:
    config = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed")
    job = JOBS[name]
    written = settings(emit(DEEPSPEED, job).replace('"auto"', "1"))

    # as its constructor does, with the number of replicas that a launch would tell it
    engine_config = config.DeepSpeedConfig.__new__(config.DeepSpeedConfig)
    engine_config._param_dict = written
    config._reject_removed_config_keys(written)
    engine_config.global_rank, engine_config.world_size = 0, job.layout.dp
    engine_config._initialize_params(written)
    engine_config._configure_train_batch_size()
    engine_config._do_sanity_check()
    assert engine_config.train_batch_size == job.global_batch
    assert (
        engine_config.zero_optimization_stage == {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[job.dp.mode]
    )
    assert engine_config.gradient_clipping == (job.optimiser.clip or 0)
    assert engine_config.tensor_parallel_config.autotp_size == (job.layout.tp if job.layout.tp > 1 else 0)


def test_deepspeed_has_every_setting_of_the_sections_that_are_known_here() -> None:
    zero = pytest.importorskip("deepspeed.runtime.zero.config", reason="deepspeed is not installed")
    offload = pytest.importorskip("deepspeed.runtime.zero.offload_config")
    precision = pytest.importorskip("deepspeed.runtime.precision_config")
    sections = {
        "zero_optimization": zero.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload.DeepSpeedZeroOffloadOptimizerConfig,
        "bf16": precision.DeepSpeedBF16Config,
        "fp16": precision.DeepSpeedFP16Config,
    }
    here = {*DEEPSPEED.settings, *others("deepspeed", "unpriced"), *others("deepspeed", "unread")}
    here |= {name.removesuffix(".*") for name in here}
    gone = {"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param", "pipeline"}
    for section, model in sections.items():
        in_deepspeed = {f"{section}.{name}" for name in model.model_fields}
        in_stretto = {name for name in here if name.rpartition(".")[0] == section and "*" not in name}
        nested = {name for name in in_deepspeed if any(other.startswith(f"{name}.") for other in here)}
        old = {f"{section}.cpu_offload", f"{section}.cpu_offload_param"}
        old |= {f"{section}.stage3_gather_fp16_weights_on_model_save"}
        assert in_deepspeed - in_stretto - nested - old == set()
        assert {name for name in in_stretto - in_deepspeed if name.rpartition(".")[2] not in gone} <= {
            "zero_optimization.gather_fp16_weights_on_model_save"
        }
