"""Scripts of Megatron-LM become configs: every argument is mapped, needless, or named with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from migrated import NONE, ROTARY, RUN, SIZES, arguments_of, config_of, moved, moved_by_run

from stretto.cli.main import run
from stretto.errors import StrettoError
from stretto.run.config import load
from stretto.run.config.job import job_of
from stretto.run.config.schema import TrainConfig
from stretto.run.config.validation import read_section
from stretto_interop.frameworks.fields import run_values
from stretto_interop.frameworks.mapping import emit
from stretto_interop.frameworks.megatron.command_line import NEEDLESS, arguments, lost, with_reasons
from stretto_interop.frameworks.megatron.framework import MEGATRON

GPT = """#!/bin/bash
# 48 layers on one node, tensor parallel over 2, a pipeline of 4.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-1}
CHECKPOINTS=$1
LOGS=$2
VOCAB=$3
MERGES=${4:?the merges}
DATA=$5

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES
    --master_addr ${MASTER_ADDR:-localhost} --master_port 6000
)
GPT_MODEL_ARGS=(
    --num-layers 48
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 16     # samples
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --fp16
    --lr 1.5e-4 --min-lr 1.0e-5
    --lr-decay-style cosine --lr-warmup-fraction .01 --lr-decay-iters 320000
)
MODEL_PARALLEL_ARGS=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4)
DATA_ARGS=(
    --data-path $DATA
    --vocab-file $VOCAB --merge-file $MERGES
    --split 949,50,1
)
LOGGING_ARGS=(
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10
    --save $CHECKPOINTS --load $CHECKPOINTS
    --tensorboard-dir $LOGS
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} \\
    ${MODEL_PARALLEL_ARGS[@]} \\
    ${DATA_ARGS[@]} \\
    ${LOGGING_ARGS[@]}
"""
LLAMA = """#!/bin/bash
CHECKPOINTS=${1:-"checkpoints/llama3_8b"}
TOKENIZER=${2:-MOCK}
DATA=${3:-MOCK}
mkdir -p "$(dirname "$CHECKPOINTS")"
CACHE="$HOME/cache"
DTYPE=${DTYPE:-fp8}
MODEL_ARGS=(
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0
    --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --normalization RMSNorm
    --init-method-std 0.0134 --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-backend fused
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 128
    --train-samples 1280000 --lr-decay-samples 1152000 --lr-warmup-samples 12800
    --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --bf16 --cross-entropy-loss-fusion --calculate-per-token-loss
    --manual-gc --exit-duration-in-mins 235
)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=("--fp8-format hybrid" "--fp8-recipe tensorwise" "--fp8-param-gather")
fi
PARALLEL_ARGS=(--tensor-model-parallel-size 1 --context-parallel-size 2 --sequence-parallel)
PARALLEL_ARGS+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
if [[ "$TOKENIZER" == "MOCK" ]] || [[ "$DATA" == "MOCK" ]]; then
    DATA_ARGS=("--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 128255" "--split '99,1,0'")
else
    DATA_ARGS=("--data-path $DATA" "--tokenizer-type HuggingFaceTokenizer" "--tokenizer-model $TOKENIZER")
    DATA_ARGS+=("--data-cache-path ${CACHE}" "--num-workers 1")
fi
if [ ! -f pretrain_gpt.py ]; then
    echo "pretrain_gpt.py is not here"
    exit 1
fi
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \\
    ${DTYPE_ARGS[@]} ${PARALLEL_ARGS[@]} ${DATA_ARGS[@]} --save "$CHECKPOINTS" --save-interval 1000
"""
MIXTRAL = """#!/bin/bash
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
TOKENIZER_MODEL=/models/tokenizer.model
options=" \\
    --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32 \\
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 \\
    --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope \\
    --swiglu --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 \\
    --no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000 \\
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss \\
    --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall \\
    --tokenizer-type Llama2Tokenizer --tokenizer-model ${TOKENIZER_MODEL} --data-path $DATA_PATH \\
    --split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 \\
    --lr-decay-iters 320000 --lr-decay-style WSD --lr-wsd-decay-style minus_sqrt \\
    --lr-wsd-decay-iters 32000 --min-lr 1.0e-5 --lr-warmup-iters 500 --weight-decay 0.1 --bf16 \\
    --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \\
    --use-distributed-optimizer --overlap-grad-reduce \\
    --no-load-optim"
if [ -n "${WANDB_API_KEY}" ]; then
    options+=" --wandb-project mixtral"
fi
run_cmd="python -u /opt/megatron/pretrain_gpt.py ${options}"
DATETIME=`date +'%y-%m-%d'`
srun -l --container-image "nvcr.io/pytorch" --output=logs/%x_%j_$DATETIME.log sh -c "${run_cmd}"
"""


def test_a_script_of_48_layers_converts_whole(tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("text")
    vocab = tmp_path / "vocab.json"
    migration = moved(GPT, "runs/gpt", "boards", str(vocab), str(tmp_path / "merges.txt"), str(data))
    assert (migration.lost, migration.needless, migration.differs, migration.notes) == ({}, {}, {}, [])
    config, job = config_of(migration), job_of(config_of(migration), vocab=50257)
    assert job.layout.sizes == {"tp": 2, "cp": 1, "ep": 1, "dp": 1, "pp": 4}
    assert (job.shape.layers, job.shape.hidden, job.shape.heads, job.shape.dropout) == (48, 1024, 16, 0.1)
    assert (job.stage_layers, job.schedule, job.microbatches) == ((13, 12, 12, 13), "1f1b", 4)
    assert (job.initial.init_std, job.precision.dtype, job.precision.gradients) == (0.006, "float16", "same")
    assert (config.data.source, config.data.tokenizer) == (str(data), str(vocab))
    rate = config.optim.rate
    assert (rate.decay_steps, rate.warmup_steps(500000), rate.warmup_init) == (320000, 3200, 0.0)
    assert rate.min_ratio * config.optim.lr == pytest.approx(1e-5)
    assert (config.optim.betas, config.optim.weight_decay, config.optim.clip) == ((0.9, 0.95), 0.1, 1.0)
    assert (config.train.steps, config.eval.every, config.eval.batches) == (500000, 1000, 10)
    assert (config.run.folder, config.checkpoint.resume, config.checkpoint.every) == (
        Path("runs/gpt"),
        "auto",
        10000,
    )
    assert (config.metrics.tensorboard_dir, config.metrics.every) == ("boards", 100)


def test_with_its_files_the_config_is_right_on_this_machine(tmp_path: Path) -> None:
    """An indexed dataset and GPT-2's two files, as `stretto config` checks them."""
    (tmp_path / "text.txt").write_text("hello world, hello words\n" * 200)
    prefix = tmp_path / "text_document"
    build = ["data", "build", str(tmp_path / "text.txt"), "--vocab", "270", "--format", "megatron"]
    assert run([*build, "--out", str(prefix)]) == 0
    model = json.loads((tmp_path / "text_document.tokenizer.json").read_text())["model"]
    vocab, merges = tmp_path / "gpt2-vocab.json", tmp_path / "gpt2-merges.txt"
    vocab.write_text(json.dumps(model["vocab"]))
    merges.write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]) + "\n")
    (tmp_path / "runs").mkdir()
    migration = moved(
        GPT, str(tmp_path / "runs/gpt"), str(tmp_path / "b"), str(vocab), str(merges), str(prefix)
    )
    assert (migration.lost, migration.missing) == ({}, [])
    (tmp_path / "gpt.yaml").write_text(migration.text)
    assert run(["config", str(tmp_path / "gpt.yaml")]) == 0


def test_checkpoints_of_megatron_are_brought_over_first(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    assert "stretto checkpoint import" in moved(GPT, str(tmp_path), *"bcde").differs["load"]


@pytest.mark.parametrize(
    ("vocab", "merges", "tokenizer"),
    [
        ("v/vocab.json", "v/merges.txt", "v/vocab.json"),
        ("v/gpt2-vocab.json", "v/gpt2-merges.txt", "v/gpt2-vocab.json"),
        ("v/vocab.json", "w/merges.txt", ["v/vocab.json", "w/merges.txt"]),
        ("v/gpt2-vocab.json", "v/merges.txt", ["v/gpt2-vocab.json", "v/merges.txt"]),
    ],
)
def test_two_files_are_one_tokenizer(vocab: str, merges: str, tokenizer: str | list[str]) -> None:
    migration = moved(GPT, "runs/gpt", "boards", vocab, merges, "text")
    fields = {name: value for mapping in migration.mapped for name, value in mapping.fields.items()}
    assert fields["data.tokenizer"] == tokenizer


def test_what_is_not_said_is_left_to_fill_in() -> None:
    migration = moved(GPT)
    assert migration.required == ("data.source",)
    assert "data.source is to be filled in" in migration.notes[0]
    assert "--data-path is $5, whose value nothing here tells" in migration.lost["data-path"]
    assert "REQUIRED  # text, JSONL" in migration.text
    assert "# not mapped: data-path: " in migration.text


@pytest.fixture
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the program that scripts start."""
    monkeypatch.chdir(tmp_path)
    Path("pretrain_gpt.py").touch()
    return tmp_path


@pytest.mark.parametrize("script", [LLAMA, MIXTRAL])
def test_arguments_that_depend_on_a_test_are_not_read(script: str) -> None:
    with pytest.raises(StrettoError, match="an assignment depends on a test") as caught:
        moved(script)
    assert "stretto migrate --run" in str(caught.value.hint)


@pytest.mark.usefixtures("megatron")
def test_a_llama_by_samples_and_with_fp8() -> None:
    migration = moved_by_run(LLAMA, "ck/llama", "tokenizer.json", "text")
    assert (migration.lost, migration.differs) == ({}, {})
    config = config_of(migration)
    job = job_of(config)
    assert (job.shape.family, job.shape.kv_heads, job.shape.rope_theta) == ("llama", 8, 500000.0)
    assert (job.layout.dp, job.layout.cp, job.dp.mode, job.precision.fp8) == (4, 2, "zero1", "tensor")
    assert (config.train.steps, config.optim.rate.decay_steps, config.optim.rate.warmup) == (10000, 9000, 100)
    assert config.data.cache == "/home/me/cache"
    assert {
        "manual-gc",
        "cross-entropy-loss-fusion",
        "exit-duration-in-mins",
        "calculate-per-token-loss",
        "rotary-percent",
    } <= {name for names in migration.needless.values() for name in names}
    mock = config_of(moved_by_run(LLAMA))
    assert (mock.data.source, mock.data.tokenizer, mock.model.vocab) == ("python-stdlib", None, 128256)
    assert mock.data.split == "99,1,0"


@pytest.mark.usefixtures("megatron")
def test_a_mixture_of_experts_under_slurm() -> None:
    migration = moved_by_run(MIXTRAL.replace("$DATA_PATH", "text"))
    assert migration.lost == {}
    assert "balances experts" in migration.differs["moe-router-load-balancing-type"]
    config = config_of(migration)
    job = job_of(config)
    assert job.layout.sizes == {"tp": 1, "cp": 1, "ep": 8, "dp": 16, "pp": 4}
    assert job.shape.moe is not None
    assert (job.shape.moe.experts, job.shape.moe.top_k, job.shape.moe.balance) == (8, 2, 0.01)
    assert (config.optim.rate.schedule, config.optim.rate.decay) == ("wsd", "sqrt")
    assert config.optim.rate.decay_length(500000) == 32000
    assert (config.data.tokenizer, config.model.vocab) == ("/models/tokenizer.model", None)
    # Megatron-LM's own values where the script says nothing
    assert (config.optim.betas, config.optim.clip, config.eval.every) == ((0.9, 0.999), 1.0, 1000)


@pytest.mark.parametrize(
    "overrides",
    [
        "layout.dp=2 dp.mode=zero1 train.dtype=bfloat16 data.tokenizer=tokenizer.json checkpoint.every=5",
        "layout.dp=1 optim.rate.schedule=wsd optim.rate.decay=exponential optim.rate.warmup=0.1",
        "train.dtype=float16 model.init_std=0.01 optim.rate.decay_steps=70 metrics.tensorboard_dir=boards",
    ],
)
def test_what_is_written_for_megatron_comes_back(overrides: str) -> None:
    """All of the job; of the run what Megatron-LM has a word for."""
    base_overrides = [
        "train.device=cuda",
        "optim.rate.warmup_init=0.0",
        "train.seed=3",
        "eval.every=50",
        "data.split=90,8,2",
    ]
    config = load("configs/llama-tiny-tp2.yaml", [*base_overrides, *overrides.split()])
    job = job_of(config, vocab=config.data.vocab)
    text = emit(MEGATRON, job, run_values(config)).replace(
        '"${DATA_SOURCE:?data.source, such as PREFIX}"', "prefix"
    )
    back = config_of(moved(text))
    again = job_of(back, vocab=config.data.vocab)
    # alike in what is computed: an even cut is written out, and types mean nothing in 32 bits
    loose: dict[str, Any] = {name: getattr(job, name) for name in ("stage_layers", "precision", "bucket")}
    assert replace(again, shape=replace(again.shape, family=job.shape.family), **loose) == job
    for path in ("train.steps", "train.seed", "eval.every", "eval.batches", "data.split", "run.name"):
        section, name = path.split(".")
        assert getattr(getattr(back, section), name) == getattr(getattr(config, section), name), path
    assert back.metrics.tensorboard_dir == config.metrics.tensorboard_dir
    assert back.data.tokenizer == config.data.tokenizer


def test_the_text_is_the_config_with_what_is_said_beside_it() -> None:
    migration = moved(f"{SIZES} {RUN} {NONE}", devices=8, overrides=("layout.dp=1", "optim.rate.warmup=3"))
    config = config_of(migration)
    values = yaml.safe_load(migration.text)
    assert (values["layout"]["dp"], values["optim"]["rate"]["warmup"]) == (1, 3)
    assert (config.layout.dp, config.optim.rate.warmup) == (1, 3)
    assert read_section(TrainConfig, values) == config


@pytest.mark.parametrize(
    ("more", "name", "why"),
    [
        ("--rampup-batch-size 2 2 100", "rampup-batch-size", "it changes training"),
        ("--mtp-num-layers 1", "mtp-num-layers", "Stretto has no such model"),
        ("--rotary-percent 0.5", "rotary-percent", "it changes what the model computes"),
        ("--fim-data", "fim-data", "Stretto has no such way to read text"),
        ("--reset-position-ids", "reset-position-ids", "together are data.packing: documents"),
        ("--optimizer lion", "optimizer", "--optimizer is lion: not modelled here"),
        ("--mup-width-mult 2", "mup-width-mult", "it changes what the model computes"),
        (
            "--dataloader-inter-document-masking",
            "dataloader-inter-document-masking",
            "packing=documents",
        ),
        ("--valid-data-path v", "valid-data-path", "what data.split holds out of data.source"),
        ("--moe-router-topk 3", "moe-router-topk", "by itself it has no field"),
        ("--deepspeed_config gone.json", "deepspeed_config", "cannot read gone.json"),
        ("--deepspeed_config $DS", "deepspeed_config", "nothing tells which file"),
        ("--grpo-iterations 3", "grpo-iterations", "it is for other programs"),
        ("--swiglo", "swiglo", "has no --swiglo (did you mean --swiglu?)"),
        ("--zero-stage 5", "zero-stage", "has no --zero-stage"),
        ("--lr-decay-style sine", "lr-decay-style", "--lr-decay-style is sine"),
        ("--window-size 5,3", "window-size", "such windows are not priced"),
        ("--softmax-type off-by-one", "softmax-type", "such a softmax is not built here"),
        ("--tokenizer-type BertWordPieceLowerCase", "tokenizer-type", "does not say how text is cleaned"),
        ("--tokenizer-type TikTokenizer", "tokenizer-type", "neither the special tokens"),
        ("--tokenizer-type MultimodalTokenizer", "tokenizer-type", "it is for text with images"),
        ("--data-path 0.5 a 0.5", "data-path", "2 weights for 1 prefixes"),
        ("--bf16 $EXTRA", "$EXTRA", "nothing tells what $EXTRA holds"),
        ("--bf16 $(extra)", "$(extra)", "nothing tells what $(extra) holds"),
    ],
)
def test_what_has_no_counterpart_is_named_with_the_reason(more: str, name: str, why: str) -> None:
    migration = arguments_of(more)
    assert list(migration.lost) == [name]
    assert why in migration.lost[name]


@pytest.mark.parametrize(
    ("more", "name", "why"),
    [
        (f"{ROTARY} --hidden-dropout 0.1", "hidden-dropout", "no dropout here"),
        ("--attention-dropout 0.2", "attention-dropout", "there is one probability"),
        ("--fp16 --loss-scale 1024", "loss-scale", "not kept fixed"),
        ("--load elsewhere", "load", "stretto checkpoint import elsewhere --format megatron"),
        ("--dataloader-type external", "dataloader-type", "a loader of the script's own"),
        ("--mock-data", "mock-data", "tokens are made up there"),
        ("--fp8-format e4m3 --bf16", "fp8-format", "hybrid"),
        ("--min-lr 1e-4 --lr $LR", "min-lr", "which nothing tells"),
    ],
)
def test_what_is_not_as_said_is_told(more: str, name: str, why: str) -> None:
    migration = arguments_of(more)
    assert list(migration.lost) in ([], ["lr"])
    assert why in migration.differs[name]


def test_arguments_of_megatron_deepspeed_are_read_as_megatrons() -> None:
    more = "--deepspeed --zero-stage 3 --no-pipeline-parallel --deepspeed-activation-checkpointing"
    more += " --num-key-value-heads 2"
    migration = moved(f"deepspeed --num_gpus 8 pretrain_gpt.py {SIZES} {RUN} {NONE} {more}")
    assert migration.lost == {}
    config = config_of(migration)
    assert (config.dp.mode, config.recompute.mode, config.model.kv_heads) == ("zero3", "full", 2)
    assert migration.needless["read as --group-query-attention --num-query-groups 2"] == [
        "num-key-value-heads"
    ]


JSON: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "gradient_clipping": 0.5,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 30}},
}


def test_the_json_of_deepspeed_is_read_beside_the_arguments(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(JSON))
    migration = arguments_of(f"--deepspeed --deepspeed_config {path}")
    config = config_of(migration)
    assert migration.lost == {}
    assert {name.partition(" ")[2] for name in migration.differs} == {
        "optim.rate.schedule",
        "optim.rate.warmup",
    }
    assert (config.dp.mode, config.dp.offload, config.train.dtype) == ("zero2", "cpu", "bfloat16")
    assert (config.optim.clip, config.optim.rate.schedule, config.optim.rate.warmup) == (0.5, "constant", 30)


def test_what_the_json_contradicts_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    more = {"optimizer": {"type": "Adam", "params": {"lr": 1}}, "zero_quantized_weights": False}
    path.write_text(json.dumps({**JSON, **more, "train_batch_size": 16}))
    migration = arguments_of(f"--zero-stage 1 --fp16 --deepspeed_config={path}")
    config = config_of(migration)
    assert (config.dp.mode, config.train.dtype, config.batch.global_size) == ("zero2", "bfloat16", 16)
    assert config.optim.lr == 1e-3
    names = {name.partition(" ")[2] for name in migration.differs}
    assert {"dp.mode", "train.dtype", "batch.global_size", "optimizer"} <= names
    path.write_text('{"train_batch_size": 8}')
    assert arguments_of(f"--deepspeed_config {path}").differs == {}  # the microbatch is the arguments'
    assert "it is zero2 in" in migration.differs["deepspeed_config dp.mode"]
    path.write_text(json.dumps({**JSON, "curriculum_learning": {"enabled": True}}))
    assert "deepspeed_config curriculum_learning.enabled" in arguments_of(f"--deepspeed_config {path}").lost


@pytest.mark.usefixtures("megatron")
def test_a_json_that_the_script_writes_itself_is_read() -> None:
    written = json.dumps({**JSON, "train_batch_size": "BATCH"}).replace('"BATCH"', "$BATCH")
    arguments = f"{SIZES} {RUN} {NONE} --deepspeed_config ${{DS}}".replace("--global-batch-size 8", "")
    script = f"BATCH=8\nDS=./ds.json\ncat <<EOT > $DS\n{written}\nEOT\n"
    script += f"deepspeed --num_gpus 8 pretrain_gpt.py {arguments} --global-batch-size $BATCH"
    with pytest.raises(StrettoError, match="a here-document is not read"):
        moved(script)
    migration = moved_by_run(script)
    assert (migration.lost, config_of(migration).dp.mode) == ({}, "zero2")


def test_every_argument_has_a_fate() -> None:
    """A rule reads it, it is needless, or it is lost with a reason, at any but its usual value."""
    names = {argument.name for argument in arguments().values()} - set(MEGATRON.settings)
    for name in names:
        assert (name in with_reasons(NEEDLESS)) == (lost(name, object()) is None), name
    unread = {name for rule in MEGATRON.rules if rule.read is None for name in rule.settings}
    assert not unread


def test_documents_stay_apart_where_three_flags_say_so() -> None:
    migration = arguments_of("--reset-position-ids --reset-attention-mask --eod-mask-loss")
    assert (migration.lost, config_of(migration).data.packing) == ({}, "documents")


def test_data_in_object_storage() -> None:
    migration = arguments_of("--data-path s3://bucket/data/d --object-storage-cache-path /scratch")
    assert {"data.source": "s3://bucket/data/d"} in [mapping.fields for mapping in migration.mapped]
    assert {"data.cache": "/scratch"} in [mapping.fields for mapping in migration.mapped]


def test_several_prefixes_are_a_mixture_by_weights() -> None:
    migration = arguments_of("--data-path 0.5 a 1.5 b 0.25 a")
    assert {"data.source": {"a": 0.75, "b": 1.5}} in [mapping.fields for mapping in migration.mapped]
    assert {"data.source": ["a", "b"]} in [
        mapping.fields for mapping in arguments_of("--data-path a b").mapped
    ]


def test_prefixes_in_files_and_of_each_split(tmp_path: Path) -> None:
    arguments = SIZES + " " + RUN.replace("--data-path t", "") + " " + NONE
    (tmp_path / "blend.txt").write_text("0.5 a\n0.5 b\n")
    (tmp_path / "splits.json").write_text('{"train": ["0.7", "a", "0.3", "b"], "valid": ["1", "c"]}')
    config = config_of(moved(f"{arguments} --data-args-path {tmp_path}/blend.txt --split 90,10", devices=8))
    assert (config.data.source, config.data.split) == ({"a": 0.5, "b": 0.5}, "90,10,0")
    migration = moved(f"{arguments} --per-split-data-args-path {tmp_path}/splits.json", devices=8)
    config = config_of(migration)
    assert config.data.source == {"a": 0.7, "b": 0.3}
    assert (config.data.split, config.eval.every) == ("100,0,0", None)
    assert "all of it is trained on" in migration.differs["per-split-data-args-path"]
    migration = moved(
        f"{arguments} --train-data-path a --valid-data-path b --dataloader-type cyclic", devices=8
    )
    assert (config_of(migration).data.source, config_of(migration).data.split) == ("a", "100,0,0")
    assert list(migration.lost) == ["valid-data-path"]
    migration = moved(f"{arguments} --data-args-path {tmp_path}/gone.txt", devices=8)
    assert "cannot read" in migration.lost["data-args-path"]
    assert migration.required == ("data.source",)


def test_indexed_datasets_and_their_mixture_are_written_and_come_back(tmp_path: Path) -> None:
    for name in "ab":
        for suffix in (".bin", ".idx"):
            (tmp_path / f"{name}{suffix}").touch()
    a, b = (str(tmp_path / name) for name in "ab")
    for source in (a, [a, b], {a: 0.25, b: 0.75}):
        base = load("configs/llama-tiny-tp2.yaml", ["train.device=cuda", "layout.dp=2"])
        config = replace(base, data=replace(base.data, source=source))
        text = emit(MEGATRON, job_of(config), run_values(config))
        assert config_of(moved(text)).data.source == source


def test_a_job_that_is_not_legal_is_an_error() -> None:
    with pytest.raises(StrettoError, match="8 processes do not divide by tp=3"):
        arguments_of("--tensor-model-parallel-size 3")
    with pytest.raises(StrettoError, match=r"batch\.global_size is 8"):
        moved(f"{SIZES} {RUN} {NONE}", devices=3)


def test_devices_win_over_the_script() -> None:
    assert config_of(moved(GPT, *"abcde", devices=16)).layout.dp == 2


@pytest.mark.parametrize(
    ("launcher", "dp"),
    [
        ("deepspeed --num_gpus 4 --num_nodes 2", 8),
        ("mpirun -np 4 python", 4),
        ("srun --ntasks 8 python", 8),
        ("srun --nodes 2 --ntasks-per-node=4 python", 8),
        ("python -m torch.distributed.launch --nproc_per_node=2", 2),
    ],
)
def test_processes_are_those_of_the_launcher(launcher: str, dp: int) -> None:
    migration = moved(f"{launcher} pretrain_gpt.py {SIZES} {RUN} {NONE}")
    assert config_of(migration).layout.dp == dp
