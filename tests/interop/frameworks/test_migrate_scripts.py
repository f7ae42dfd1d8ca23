"""Which scripts become configs: programs, launches, and models of one family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from migrated import NONE, ROTARY, RUN, SIZES, arguments_of, config_of, moved

from stretto.cli.main import run
from stretto.errors import StrettoError
from stretto.job.presets import preset
from stretto.run.config.job import job_of
from stretto_interop.frameworks.mapping import Start, read
from stretto_interop.frameworks.megatron.framework import MEGATRON
from stretto_interop.frameworks.migrate import migrate


@pytest.mark.parametrize(
    ("program", "trained"),
    [
        ("pretrain_bert.py", "BERT"),
        ("pretrain_t5.py", "T5"),
        ("/opt/Megatron-LM/pretrain_mamba.py", "Mamba"),
        ("pretrain_hybrid.py", "hybrids"),
        ("$MEGATRON/pretrain_vision_classify.py", "models of images"),
        ("pretrain_retro.py", "Retro"),
        ("pretrain_vlm.py", "models of text and images"),
        ("examples/multimodal/train.py", "models of text and images"),
        ("train_rl.py", "models by rewards"),
    ],
)
def test_programs_that_train_something_else_are_refused_by_name(program: str, trained: str) -> None:
    script = f"torchrun --nproc-per-node 8 {program} {SIZES} {RUN} {NONE}"
    for program_name in (None, "gpt"):
        with pytest.raises(StrettoError, match=f"trains {trained}.*only scripts of pretrain_gpt.py are read"):
            migrate(MEGATRON, script, "run.sh", Start(program=program_name))


def test_a_program_of_another_name_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun --nproc-per-node 8 train_mine.py {SIZES} {RUN} {NONE}")
    assert run(["migrate", str(script)]) == 2
    assert "what train_mine.py trains is unknown" in (error := capsys.readouterr().err)
    assert "--program gpt" in error
    assert run(["migrate", str(script), "--program", "gpt", "--out", str(tmp_path / "mine.yaml")]) == 0
    assert run(["migrate", str(script), "--program", "bert"]) == 2


LAUNCH = f"torchrun --nproc-per-node 8 pretrain_gpt.py {SIZES} {RUN} {NONE}\n"


@pytest.mark.parametrize(
    "behind",
    [
        "for log in logs/*; do ARGS+=(--bf16); done",
        "case $X in a) ARGS=(--bf16) ;; esac",
        "while read line; do ARGS+=(--bf16); done < log",
        "echo 'never ended",
    ],
)
def test_what_stands_behind_the_launch_is_passed_over_with_a_note(behind: str) -> None:
    migration = moved(f"{LAUNCH}{behind}\n")
    assert (migration.lost, config_of(migration).model.layers) == ({}, 4)
    assert "run.sh:2: " in migration.notes[0]
    assert "after the launch, and is passed over" in migration.notes[0]


@pytest.mark.parametrize(
    "script",
    [
        f"for lr in 1 2; do\n{LAUNCH}done",
        f"{LAUNCH}for lr in 1 2; do\n{LAUNCH}done",
        f"{LAUNCH}for lr in 1 2; do torchrun $PROGRAM; done",
    ],
)
def test_a_loop_around_a_launch_is_refused(script: str) -> None:
    with pytest.raises(StrettoError, match="`for` is not read"):
        moved(script)


def test_of_two_launches_the_last_is_read_with_a_note() -> None:
    migration = moved(LAUNCH + LAUNCH.replace("--num-layers 4", "--num-layers 6"))
    assert config_of(migration).model.layers == 6
    assert migration.notes == ["run.sh starts 2 trainings: the last is read"]


def test_without_a_length_of_samples_no_script_is_read() -> None:
    with pytest.raises(StrettoError, match=r"run\.sh lacks --seq-length"):
        moved(LAUNCH.replace("--seq-length 32", ""))


GPT_OSS = """--num-layers 4 --hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 8 --kv-channels 8
--group-query-attention --num-query-groups 2 --normalization RMSNorm --untie-embeddings-and-output-weights
--num-experts 4 --moe-ffn-hidden-size 64 --moe-router-topk 2 --moe-router-load-balancing-type none
--position-embedding-type yarn --rotary-base 150000 --rotary-scaling-factor 32.0
--no-yarn-correction-range-round-to-int --quick-geglu --glu-linear-offset 1.0
--activation-func-clamp-value 7.0 --softmax-type learnable --window-size 15,0 --window-attn-skip-freq 2
--seq-length 64 --max-position-embeddings 64"""


def test_gpt_oss_is_read() -> None:
    """Its gate, sinks, windows and positions, and yarn without rounding."""
    migration = moved(f"{GPT_OSS} {RUN} {NONE}", devices=4)
    assert migration.lost == {}
    shape = job_of(config_of(migration)).shape
    wanted = preset("gpt-oss-20b")
    assert (shape.mlp, shape.rope, shape.rope_theta) == (wanted.mlp, wanted.rope, wanted.rope_theta)
    assert (shape.bias, shape.norm, shape.tied) == (wanted.bias, wanted.norm, wanted.tied)
    assert shape.attention == replace(wanted.attention, window=16)
    assert shape.moe is not None
    assert (shape.moe.router_bias, shape.moe.normalise, shape.moe.score) == (True, True, "softmax")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (("--glu-linear-offset 1.0", ""), "quick-geglu"),
        (("clamp-value 7.0", "clamp-value 10"), "activation-func-clamp-value"),
        (("--rotary-scaling-factor 32.0", "--rotary-scaling-factor 32.0 --mscale 0.7"), "mscale"),
        (("--no-yarn", "--yarn-correction-range-round-to-int --no-yarn"), "rotary-scaling-factor"),
    ],
)
def test_what_is_not_quite_gpt_oss_is_lost_by_name(change: tuple[str, str], name: str) -> None:
    migration = moved(f"{GPT_OSS.replace(*change)} {RUN} {NONE}", devices=4)
    assert name in migration.lost


def test_bounds_of_another_gate_are_no_part_of_a_model_here() -> None:
    migration = arguments_of(f"{ROTARY} --activation-func-clamp-value 10")
    assert {"swiglu", "activation-func-clamp-value"} == set(migration.lost)
    assert "no such gate is here" in migration.lost["swiglu"]


def test_what_predict_leaves_unread_of_the_data_is_a_remark() -> None:
    reading = read(MEGATRON, f"{SIZES} {RUN} {NONE} --per-split-data-args-path gone.json", "run.sh", 8)
    assert not any("not read" in remark for remark in reading.remarks)  # --data-path comes first
    run_arguments = RUN.replace("--data-path t", "--per-split-data-args-path gone.json")
    reading = read(MEGATRON, f"{SIZES} {run_arguments} {NONE}", "run.sh", 8)
    assert any("no part of the price: cannot read gone.json" in remark for remark in reading.remarks)
