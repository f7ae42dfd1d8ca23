"""Megatron-LM: what is written reads back as the same job, and scripts as people have them are read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.job.data_parallel import DataParallelSettings, Precision
from stretto.job.job import Job, Recompute
from stretto.job.optimiser import Optimiser, RateSchedule
from stretto.job.presets import preset
from stretto.job.rules import problems
from stretto.layout.layout import Layout
from stretto.layout.shards import Mode
from stretto.program import schedule
from stretto.program.text.megatron import megatron_layout
from stretto.run.config import load
from stretto.run.config.job import job_of
from stretto_interop.commands.migrate import run_script
from stretto_interop.frameworks.fields import JobValues, run_values, values_of
from stretto_interop.frameworks.mapping import ForeignJob, emit, read, settings_of
from stretto_interop.frameworks.megatron.command_line import arguments
from stretto_interop.frameworks.megatron.framework import MEGATRON

SIZES = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000 --seq-length 128"
    " --max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 64"
)


def script_of(job: Job) -> str:
    """The script of a job in full, with no choice left open."""
    return MEGATRON.render(*settings_of(MEGATRON, JobValues(values_of(job).values)))


def written_and_read(job: Job) -> Job:
    return read(MEGATRON, script_of(job), "run.sh").job


def read_script(text: str, devices: int | None = 8) -> ForeignJob:
    return read(MEGATRON, text, "run.sh", devices)


BFLOAT16 = Precision(dtype="bfloat16")
LLAMA = Job(
    shape=preset("llama3-8b"),
    layout=Layout(tp=2, cp=2, dp=4, pp=4),
    global_batch=64,
    schedule="interleaved",
    options={"chunks": 2},
    sequence_parallel=True,
    context="ulysses",
    dp=DataParallelSettings(mode="zero1"),
    precision=BFLOAT16,
    optimiser=Optimiser(),
    vocab_multiple=128,
)
JOBS: dict[str, Job] = {
    "llama": LLAMA,
    "uneven": replace(LLAMA, stage_layers=(3, 5, 4, 4, 4, 4, 5, 5), options={"chunks": 2, "group": 8}),
    "gpt": Job(
        shape=replace(preset("gpt3-175b"), dropout=0.1),
        layout=Layout(tp=8, dp=4, pp=8, order="tp-cp-ep-pp-dp"),
        global_batch=64,
        recompute=Recompute("full", blocks=3, shard_inputs=True),
        precision=Precision(dtype="float16", gradients="same", loss_scale=1024.0, loss_scale_steps=500),
    ),
    "experts": Job(
        shape=replace(preset("mixtral-8x7b"), family="llama"),
        layout=Layout(tp=2, dp=8, pp=2, ep=8, expert_tp=1),
        expert_tp=1,
        global_batch=64,
        dp=DataParallelSettings(mode="zero1", shard_states=4),
        recompute=Recompute("selective"),
        precision=replace(BFLOAT16, gradients="same"),
    ),
    "latent": Job(
        shape=replace(preset("deepseek-v3"), family="llama"),
        layout=Layout(dp=16, pp=8, ep=16),
        global_batch=64,
        stage_layers=(4, 8, 8, 9, 9, 9, 9, 7),
        precision=BFLOAT16,
        dp=DataParallelSettings(mode="zero1", offload="cpu"),
    ),
    "window": Job(
        shape=replace(preset("gpt-oss-120b"), family="llama", mlp="swiglu", rope=None),
        layout=Layout(dp=8, ep=8),
        global_batch=16,
        precision=BFLOAT16,
        dp=DataParallelSettings(mode="zero3"),
    ),
    "gpt-oss": Job(
        shape=replace(preset("gpt-oss-20b"), family="llama"),
        layout=Layout(dp=8, ep=8),
        global_batch=16,
        precision=BFLOAT16,
        dp=DataParallelSettings(mode="zero1"),
    ),
    "norms": Job(
        shape=replace(preset("qwen3-8b"), family="llama"),
        layout=Layout(dp=2),
        global_batch=4,
        precision=BFLOAT16,
    ),
    "fp8": replace(LLAMA, precision=replace(BFLOAT16, fp8="tensor"), optimiser=Optimiser(states="bfloat16")),
}


@pytest.mark.parametrize("name", JOBS)
def test_what_is_written_reads_back_as_the_same_job(name: str) -> None:
    """But for types where they mean nothing."""
    job = JOBS[name]
    again = written_and_read(job)
    depth = job.layout.pp * (job.options.get("chunks") or 1)
    cut = None if depth == 1 else tuple(len(stage) for stage in job.stages(depth))
    carried = ("framework", "bucket", "stage_layers", "precision", "options", "optimiser")
    same = {name: getattr(job, name) for name in carried}
    assert replace(again, **same) == job
    assert again.stage_layers == cut
    assert {k: v for k, v in again.options.items() if v is not None} == dict(job.options)
    assert (again.precision.dtype, again.precision.gradients) == (
        job.precision.dtype,
        job.precision.gradients,
    )
    assert again.precision.fp8 == job.precision.fp8
    assert again.optimiser == job.optimiser
    assert problems(again) == []


@pytest.mark.parametrize("name", JOBS)
def test_what_is_written_is_taken_by_the_schema_and_by_bash(name: str, tmp_path: Path) -> None:
    """Sourced, the script defines an array and starts nothing; each argument has values of its kind."""
    path = tmp_path / "run.sh"
    path.write_text(script_of(JOBS[name]))
    environment = {"DATA_SOURCE": "/data/tokens", "PATH": "/usr/bin:/bin"}
    code = f"source {path} && printf '%s\\n' \"${{MEGATRON_ARGS[@]}}\""
    done = subprocess.run(["bash", "-c", code], env=environment, capture_output=True, text=True, check=True)
    arguments_given = done.stdout.splitlines()
    starts = [at for at, word in enumerate(arguments_given) if word.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(arguments_given)], strict=True):
        argument = arguments()[arguments_given[start].removeprefix("--")]
        assert argument.read(arguments_given[start + 1 : end], "run.sh") is not None
    assert len({arguments_given[start] for start in starts}) == len(starts)


@pytest.mark.parametrize(
    "rate",
    [
        RateSchedule(schedule="constant", warmup=3, warmup_init=0.0),
        RateSchedule(schedule="linear", warmup=0.033, warmup_init=0.25, min_ratio=0.0),
        RateSchedule(schedule="inverse-sqrt", warmup=7, warmup_init=0.5, min_ratio=0.125, decay_steps=900),
        RateSchedule(schedule="cosine", warmup=0.01, warmup_init=0.0, decay_steps=70),
        RateSchedule(schedule="wsd", decay_fraction=0.25, decay="exponential", decay_steps=400),
        RateSchedule(schedule="wsd", decay_fraction=0.5, decay="sqrt"),
    ],
    ids=lambda rate: rate.schedule,
)
def test_a_rate_reads_back(rate: RateSchedule) -> None:
    job = replace(LLAMA, optimiser=Optimiser(lr=2e-4, rate=rate))
    assert written_and_read(job).optimiser == job.optimiser


def test_counts_of_samples_are_updates() -> None:
    counts = "--train-samples 6400 --lr-decay-samples 5760 --lr-warmup-samples 96 --lr 1e-3 --min-lr 1e-4"
    rate = read_script(f"{SIZES} {counts}").job.optimiser.rate
    assert (rate.decay_steps, rate.warmup_steps(100), rate.min_ratio) == (90, pytest.approx(1.5), 0.1)
    with pytest.raises(StrettoError, match="--train-samples needs --global-batch-size"):
        read_script(f"{SIZES.replace('--global-batch-size 64', '')} {counts}")


def test_a_plan_leaves_open_what_a_run_needs(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(emit(MEGATRON, LLAMA))
    done = subprocess.run(["bash", "-c", f"source {path}"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "OPTIM_LR: optim.lr, such as 0.0003" in done.stderr
    assert "--clip-grad" not in path.read_text()


def test_a_config_is_written_in_full() -> None:
    overrides = ["layout.dp=2", "train.dtype=bfloat16", "checkpoint.every=50", "train.device=cuda"]
    rate = ["optim.rate.schedule=wsd", "optim.rate.decay=sqrt"]
    config = load("configs/llama-tiny-tp2.yaml", [*overrides, *rate, "train.steps=200"])
    text = emit(MEGATRON, job_of(config), run_values(config))
    for part in ("--lr-decay-style WSD", "--lr-wsd-decay-style minus_sqrt", "--lr-wsd-decay-iters 20"):
        assert f"{part}\n" in text
    assert "--save runs/llama-tiny-tp2/checkpoints\n  --save-interval 50\n" in text
    assert "--seed 1234" in text
    assert "# train.seed=0: Megatron-LM takes seeds above 0, and this is 1234" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "zb-h1"}, "schedule.name is zb-h1: Megatron-LM has 1F1B and interleaved 1F1B"),
        (
            {"dp": DataParallelSettings(mode="server")},
            "dp.mode is server: Megatron-LM has no rank that updates",
        ),
        (
            {"dp": DataParallelSettings(mode="zero1", offload="nvme")},
            "dp.offload is nvme: Megatron-LM keeps",
        ),
        (
            {"dp": DataParallelSettings(mode="zero2", shard_gradients=4)},
            "dp.shard_gradients is 4: Megatron-LM shards all that it shards over the same ranks",
        ),
        ({"precision": replace(BFLOAT16, fp8="row")}, "precision.fp8 is row: Megatron-LM's scales are of"),
        ({"optimiser": Optimiser(name="lamb")}, "optim.name is lamb: Megatron-LM has Adam, SGD and Muon"),
        ({"recompute": Recompute("auto", memory_gib=60.0)}, "recompute.mode is auto: Megatron-LM recomputes"),
        ({"custom_program": schedule("1f1b", 4, 16)}, "schedule.file is "),
        ({"options": {"chunks": 2, "group": 2}}, "schedule.group is 2: Megatron-LM's groups have at least"),
    ],
)
def test_what_megatron_lacks_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    values = dict(values_of(replace(LLAMA, **changes)).values)
    if "custom_program" in changes:
        values["schedule.file"] = "program.csv"
    with pytest.raises(StrettoError) as caught:
        settings_of(MEGATRON, JobValues(values))
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize("mode", ["zero1", "zero2", "zero3"])
def test_shards_over_a_part_of_the_copies(mode: Mode) -> None:
    """Gradients and parameters are sharded as states are, where the config does not say otherwise."""
    dp = DataParallelSettings(mode=mode, shard_states=4)
    job = replace(JOBS["norms"], layout=Layout(dp=16), global_batch=64, dp=dp)
    assert written_and_read(job).dp.sizes(16) == dp.sizes(16)


# ------------------------------------------------------------------ the layout of a pipeline


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ([2, 4, 6, 8, 10], "Et|(tt|)*3tL"),
        ([1, 5, 9, 10], "E|t*4|t*4|L"),
        ([2, 3, 4, 5, 6, 7, 8, 10], "Et|(t|)*6tL"),
        ([2, 5, 8, 10], "Et|ttt|ttt|tL"),
    ],
)
def test_equal_stages_are_written_once(ends: list[int], text: str) -> None:
    stages = [range(start, end) for start, end in pairwise([0, *ends])]
    assert megatron_layout(stages, layers=8) == text


@pytest.mark.parametrize("name", ["llama", "uneven", "latent"])
def test_megatron_core_reads_a_layout_as_the_same_stages(name: str) -> None:
    """By Megatron-Core's own parser, in a process of its own since its import changes torch."""
    python = os.environ.get("MEGATRON_PYTHON", sys.executable)
    there = "import megatron.core.transformer.pipeline_parallel_layer_layout as m; "
    done = subprocess.run([python, "-c", there], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("megatron-core is not installed (or name a Python that has it in MEGATRON_PYTHON)")
    job = JOBS[name]
    text = settings_of(MEGATRON, JobValues(values_of(job).values))[0]["pipeline-model-parallel-layout"]
    code = f"{there}print([len(s) for s in m.PipelineParallelLayerLayout.parse_str_to_list({text!r})])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    depth = job.layout.pp * (job.options.get("chunks") or 1)
    assert done.stdout.split("\n")[-2] == str([len(stage) for stage in job.stages(depth)])


@pytest.mark.parametrize(
    ("more", "stages"),
    [
        ("", (3, 2, 2, 3)),
        ("--pipeline-model-parallel-layout 'Et|(tt|)*3tL'", None),
        ("--pipeline-model-parallel-layout 'E,t*3|tt|tt|tL'", (4, 2, 2, 2)),
        ("--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3", (2, 2, 2, 4)),
        ("--num-virtual-stages-per-pipeline-rank 2", (2, 1, 1, 1, 1, 1, 1, 2)),
        ("--num-layers-per-virtual-pipeline-stage 1", (2, 1, 1, 1, 1, 1, 1, 2)),
    ],
)
def test_the_cut_of_a_pipeline_is_read_as_megatron_makes_it(
    more: str, stages: tuple[int, ...] | None
) -> None:
    text = f"{SIZES} --pipeline-model-parallel-size 4 {more}"
    if stages is None:
        with pytest.raises(StrettoError, match="5 stages, no multiple of 4 pipeline ranks"):
            read_script(text)
    else:
        assert read_script(text).job.stage_layers == stages


def test_embedding_and_head_may_count_as_layers() -> None:
    text = SIZES.replace("--num-layers 8", "--num-layers 6") + " --pipeline-model-parallel-size 4"
    account = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    assert read_script(f"{text} {account}").job.stage_layers == (2, 2, 2, 2)


# ------------------------------------------------------------------ scripts as people have them

SCRIPT = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
# A run of ours.
set -e

GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-1}
WORLD_SIZE=$((GPUS_PER_NODE*$NNODES))
TP=4; PP=2
BATCH=128

DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS_PER_NODE \\
    --nnodes $NNODES \\
    --master_addr $(hostname) --master_port 6000
"

MODEL_ARGS=(
    --num-layers 24        # blocks
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 2048 --max-position-embeddings 2048
    --swiglu --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size ${BATCH}
    --train-iters 5000 --lr 3.0e-4 --bf16
    --use-distributed-optimizer
)
TRAINING_ARGS+=(--recompute-activations)
if [ ! -d "$DATA_PATH" ]; then
    echo "no $DATA_PATH"
fi
PARALLEL_ARGS="--tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP}"

torchrun ${DISTRIBUTED_ARGS} pretrain_gpt.py \\
    "${MODEL_ARGS[@]}" ${TRAINING_ARGS[@]} \\
    $PARALLEL_ARGS \\
    --data-path $DATA_PATH --vocab-file "$1/vocab.json" --tokenizer-type GPT2BPETokenizer \\
    --log-interval=10 --save_interval 1000 --split 949,50,1
"""


RECOMPUTES = "TRAINING_ARGS+=(--recompute-activations)\n"
BRANCHES = SCRIPT.replace("BATCH=128", "BATCH=$(( WORLD_SIZE * 4 ))").replace(
    RECOMPUTES, f'if [ "${{FP8:-0}}" -eq 1 ]; then\n  TRAINING_ARGS+=(--bf16)\nelse {RECOMPUTES}fi\n'
)


@pytest.mark.parametrize("branches", [False, True])
def test_a_script_with_variables_and_arrays_is_read(
    branches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With arithmetic and branches once it is run."""
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(BRANCHES)
    text = run_script(Path("run.sh"), [], {"DATA_PATH": "text"}) if branches else SCRIPT
    reading = read_script(text, devices=None)
    job = reading.job
    assert job.layout.sizes == {"tp": 4, "cp": 1, "ep": 1, "dp": 4, "pp": 2}
    assert (job.shape.layers, job.shape.hidden, job.shape.vocab) == (24, 1024, 50257)
    assert (job.shape.family, job.shape.mlp, job.shape.norm, job.shape.bias) == (
        "llama",
        "swiglu",
        "rms",
        False,
    )
    assert job.shape.ffn == 2688  # as Megatron-LM rounds 8/3 of the width
    assert (job.global_batch, job.micro_batch, job.dp.mode) == (128, 1, "zero1")
    assert (job.recompute.mode, job.precision.dtype, job.precision.fp8) == ("selective", "bfloat16", "none")
    assert not job.sequence_parallel
    assert not reading.assumptions.overlap
    ignored = {name for names in reading.ignored.values() for name in names}
    assert ignored == set()
    assert job.framework.fused_activation


def changed(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            changed("--swiglu", "--swiglo"),
            "run.sh:48: Megatron-LM core_v0.19.0 has no --swiglo\nhint: did",
        ),
        (changed("--swiglu", "--swiglu yes"), "run.sh:48: --swiglu takes no value, not 'yes'"),
        (
            changed("--hidden-size 1024", "--hidden-size wide"),
            "run.sh:48: --hidden-size is 'wide', not a",
        ),
        (
            changed("--hidden-size 1024", "--hidden-size $H"),
            "run.sh:48: --hidden-size is H, whose value",
        ),
        (changed("RMSNorm", "RmsNorm"), "run.sh:48: --normalization is RmsNorm\nhint: did you mean RMSNorm?"),
        (changed("--bf16", "--bf16 --mtp-num-layers 1"), "run.sh: mtp-num-layers is 1: it has no costs here"),
        (changed("TP=4", "TP=5"), "32 processes do not divide by tp=5 x cp=1 x pp=2\nhint: nearest: 30"),
        (
            changed(SCRIPT, BRANCHES),
            "run.sh:36: an assignment depends on a test, and tests are not read: if [",
        ),
        (
            changed("if [ ! -d", "for i in 1; do MODEL_ARGS+=(--bf16); done\nif [ ! -d"),
            "run.sh:5: `for` is not",
        ),
        (
            changed("GPT2BPETokenizer", "SentencePieceTokenizer"),
            "nothing tells how many entries the",
        ),
        (changed("--num-layers 24", ""), "run.sh lacks --num-layers"),
        (changed("${BATCH}", "101"), "batch.global_size is 101: it must be a multiple of"),
        (changed("TP=4", "TP=3"), "32 processes do not divide by tp=3"),
        (changed("pretrain_gpt.py", "server"), "run.sh starts no pretrain_gpt.py"),
        (changed('"${MODEL_ARGS', "${MODEL_ARGS"), 'run.sh:48: a quote " that does not end'),
    ],
)
def test_what_is_wrong_with_a_script_is_said_with_its_line(
    change: Callable[[str], str], message: str
) -> None:
    with pytest.raises(StrettoError) as caught:
        read_script(change(SCRIPT), devices=None)
    assert re.sub(r"run\.sh:\d+", "run.sh:48", str(caught.value)).startswith(
        re.sub(r"run\.sh:\d+", "run.sh:48", message)
    )


def test_arguments_alone_are_read_with_the_devices_of_the_cluster() -> None:
    job = read_script(SIZES + " --tensor-model-parallel-size 2 --sequence-parallel", devices=16).job
    assert job.layout.sizes == {"tp": 2, "cp": 1, "ep": 1, "dp": 8, "pp": 1}
    assert job.sequence_parallel
    assert (job.shape.family, job.shape.dropout, job.shape.ffn) == ("gpt", 0.1, 2048)
    with pytest.raises(StrettoError, match="nothing tells how many processes there are"):
        read_script(SIZES, devices=None)


def test_what_a_price_leaves_out_is_said() -> None:
    more = " --position-embedding-type rope --recompute-granularity full --recompute-method uniform"
    text = SIZES + more + " --recompute-num-layers 4 --fp8-format hybrid --fp8-recipe mxfp8 --bf16"
    assert [remark.split(":")[0] for remark in read_script(text).remarks] == [
        "dropout is left out",
        "each block's input is taken to be kept, not that of each --recompute-num-layers",
        "--fp8-recipe mxfp8 is priced as one scale for each tensor",
    ]


def test_selective_recomputation_knows_its_modules() -> None:
    text = f"{SIZES} --recompute-granularity selective --recompute-modules mlp layernorm"
    assert read_script(text).job.framework.operators == ("layernorm", "mlp")


@pytest.mark.parametrize(
    ("text", "dense", "every"),
    [("([0]*3+[1]*5)", 3, 1), ("2", None, 0), ("([0,1]*4)", 0, 2), ("[0, 0, 0, 1] * 2", 0, 4)],
)
def test_blocks_with_experts_are_read_from_their_pattern(text: str, dense: int | None, every: int) -> None:
    script = f"{SIZES} --num-experts 4 --moe-layer-freq '{text}'"
    if dense is None:  # the first of each two, which no job here has
        with pytest.raises(StrettoError, match="such a pattern of blocks is not priced"):
            read_script(script)
        return
    moe = read_script(script).job.shape.moe
    assert moe is not None
    assert (moe.dense_layers, moe.every) == (dense, every)


def test_a_pattern_is_never_executed() -> None:
    script = f"{SIZES} --num-experts 4 --moe-layer-freq '__import__(\"os\").getpid()'"
    with pytest.raises(StrettoError, match="gives no 0 or 1 for each of 8 layers"):
        read_script(script)


def test_every_argument_has_one_fate() -> None:
    """It is read by a rule, changes no price, or is refused."""
    names = {argument.name for argument in arguments().values()}
    mapped = set(MEGATRON.settings) - {"world-size"}
    fates = [mapped, set(MEGATRON.unpriced), set(MEGATRON.unread)]
    assert set().union(*fates) == names
    assert sum(map(len, fates)) == len(names)
