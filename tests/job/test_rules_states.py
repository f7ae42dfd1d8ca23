"""Rules of shards, offload and types: the field, its value, what must hold, the nearest fix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stretto.job.data_parallel import DataParallelSettings, Precision
from stretto.job.experts import ExpertShape
from stretto.job.job import Job
from stretto.job.rules import problems
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout

SHAPE = ModelShape(
    family="llama", layers=6, hidden=64, heads=8, kv_heads=2, ffn=96, vocab=512, sequence=128, head_dim=16
)
JOB = Job(shape=SHAPE, layout=Layout(cp=2, dp=6, pp=2), global_batch=24, micro_batch=2, sequence=128)
LATE = {"schedule": "pipedream"}
HALF = Precision(dtype="bfloat16")


def dp(mode: Any, **fields: Any) -> DataParallelSettings:
    return DataParallelSettings(mode=mode, **fields)


@pytest.mark.parametrize(
    "changes",
    [
        *({"dp": DataParallelSettings(mode=mode)} for mode in ("server", "ddp", "zero1", "zero2", "zero3")),
        {"dp": dp("zero3", shard_states=12, shard_gradients=6, shard_parameters=3, gather="layer")},
        {"dp": dp("zero3", shard_parameters=4)},
        {"dp": dp("zero3", shard_states=1)},
        {"dp": dp("zero2", shard_gradients=4, reduce="microbatch")},
        {"dp": dp("zero1", reduce="step", offload="nvme", path="/fast")},
        {"dp": dp("zero3", offload_parameters="cpu", offload="cpu")},
        {"dp": dp("server", offload="cpu")},
        {"dp": dp("ddp", path="/fast")},  # unused
        {"dp": dp("zero2"), **LATE},
        {
            "precision": Precision(
                dtype="float16",
                gradients="same",
                keep=("*qkv*", "head.*"),
                fp8="row",
                loss_scale=2.0,
                loss_scale_steps=10,
            )
        },
        {"precision": Precision(dtype="bfloat16", keep=())},
        # what is proved is any job in float64
        {
            "precision": Precision(
                dtype="float64",
                gradients="same",
                keep=("*qkv*",),
                fp8="tensor",
                loss_scale=2.0,
                loss_scale_steps=10,
            )
        },
        {"precision": Precision(dtype="bfloat16", fp8="row"), "layout": Layout(tp=2, dp=4)},
        {"precision": Precision(fp8="row"), "shape": replace(SHAPE, moe=ExpertShape(experts=4, ffn=40))},
    ],
)
def test_what_is_legal(changes: dict[str, Any]) -> None:
    assert problems(replace(JOB, **changes)) == []


@pytest.mark.parametrize(
    ("changes", "field", "rule", "fix"),
    [
        (
            {"dp": dp("ddp", shard_states=2)},
            "dp.shard_states",
            "is 2: dp.mode=ddp shards no states",
            "dp.shard_states=null, or dp.mode=zero1",
        ),
        (
            {"dp": dp("zero1", shard_gradients=2)},
            "dp.shard_gradients",
            "is 2: dp.mode=zero1 shards no gradients",
            "dp.shard_gradients=null, or dp.mode=zero2",
        ),
        (
            {"dp": dp("zero2", shard_parameters=2)},
            "dp.shard_parameters",
            "is 2: dp.mode=zero2 shards no parameters",
            "dp.shard_parameters=null, or dp.mode=zero3",
        ),
        (
            {"dp": dp("zero1", shard_states=5)},
            "dp.shard_states",
            "is 5: it must divide layout.cp=2 x layout.dp=6, which is 12",
            "nearest: dp.shard_states=4 or 6",
        ),
        (
            {"dp": dp("zero2", shard_states=6, shard_gradients=4)},
            "dp.shard_gradients",
            "is 4: it must divide dp.shard_states=6",
            "nearest: dp.shard_gradients=3 or 6",
        ),
        (
            {"dp": dp("zero3", shard_gradients=4, shard_parameters=3)},
            "dp.shard_parameters",
            "is 3: it must divide dp.shard_gradients=4",
            "nearest: dp.shard_parameters=2 or 4",
        ),
        (
            {"dp": dp("zero3", shard_parameters=24)},
            "dp.shard_parameters",
            "is 24: it must divide layout.cp=2 x layout.dp=6",
            "nearest: dp.shard_parameters=12",
        ),
        (
            {"dp": dp("zero1", reduce="microbatch")},
            "dp.reduce",
            "is microbatch: with dp.mode=zero1 ranks store all gradients",
            "dp.reduce=auto, or dp.mode=zero2",
        ),
        (
            {"dp": dp("zero2", gather="layer")},
            "dp.gather",
            "is layer: dp.mode=zero2 does not shard parameters",
            "dp.gather=auto, or dp.mode=zero3",
        ),
        (
            {"dp": dp("zero2", offload_parameters="cpu")},
            "dp.offload_parameters",
            "is cpu: dp.mode=zero2 does not shard parameters",
            "dp.offload_parameters=none, or dp.mode=zero3",
        ),
        ({"dp": dp("zero1", offload="nvme")}, "dp.path", "dp.offload=nvme needs a folder", "dp.path=/"),
        (
            {"dp": dp("zero3", offload_parameters="nvme")},
            "dp.path",
            "is null: dp.offload_parameters=nvme needs a folder",
            "dp.path=/",
        ),
        (
            {"dp": dp("zero3"), **LATE},
            "dp.mode",
            "is zero3: schedule pipedream updates each stage separately",
            "dp.mode=zero2, or a schedule that",
        ),
        (
            {"dp": dp("zero2", reduce="microbatch"), **LATE},
            "dp.reduce",
            "is microbatch: schedule pipedream updates each stage",
            "dp.reduce=auto, or a schedule that",
        ),
        (
            {"precision": Precision(gradients="same")},
            "precision.gradients",
            "is same: with train.dtype=float32 weights and gradients have one type",
            "precision.gradients=float32, or train.dtype=bfloat16",
        ),
        (
            {"precision": Precision(keep=("*norm*",))},
            "precision.keep",
            "is ['*norm*']: with train.dtype=float32",
            "precision.keep=['*norm*', '*router*'], or train.dtype=bfloat16",
        ),
        (
            {"precision": replace(HALF, loss_scale=2.0)},
            "precision.loss_scale",
            "is 2.0: train.dtype=bfloat16 needs no loss scaling",
            "precision.loss_scale=65536.0, or train.dtype=float16",
        ),
        (
            {"precision": Precision(loss_scale_steps=3)},
            "precision.loss_scale_steps",
            "is 3: train.dtype=float32 needs no loss scaling",
            "precision.loss_scale_steps=2000, or train.dtype=float16",
        ),
        (
            {"precision": replace(HALF, keep=("*norm*", "*nrom*"))},
            "precision.keep",
            "is *nrom*: it matches no parameter's name",
            "embed.tok.weight, blocks.0.norm1.weight",
        ),
        (
            {"precision": replace(HALF, fp8="row"), "shape": replace(SHAPE, ffn=104)},
            "precision.fp8",
            "is row: the inner width of the MLP of a rank must be a multiple of 16 and is 104",
            "precision.fp8=none",
        ),
        (
            {"precision": replace(HALF, fp8="tensor"), "layout": Layout(tp=4, dp=2)},
            "precision.fp8",
            "layout.tp=4 must divide model.kv_heads, which is 2",
            "smaller layout.tp",
        ),
    ],
)
def test_what_is_not(changes: dict[str, Any], field: str, rule: str, fix: str) -> None:
    broken = problems(replace(JOB, **changes))
    assert len(broken) == 1, broken
    assert broken[0].field == field
    assert rule in str(broken[0])
    assert fix in str(broken[0].fix)


def test_one_wrong_size_is_one_problem() -> None:
    settings = dp("zero3", shard_states=5, shard_gradients=7, shard_parameters=11)
    assert [p.field for p in problems(replace(JOB, dp=settings))] == ["dp.shard_states"]


def test_an_unknown_schedule_is_one_problem() -> None:
    broken = problems(replace(JOB, schedule="1f2b", dp=dp("zero3")))
    assert [p.field for p in broken] == ["schedule"]


def test_gathers_by_layer_without_a_pipeline_and_by_stage_with_one() -> None:
    assert [dp("zero3").gathers(pp) for pp in (1, 2)] == ["layer", "stage"]
    assert [dp("zero3", gather="layer").gathers(pp) for pp in (1, 2)] == ["layer", "layer"]
    assert dp("zero3", gather="stage").gathers(1) == "stage"
    assert dp("zero2").gathers(2) is None
