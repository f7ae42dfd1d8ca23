"""A rank's code on tensors without values, against the planner's counts and real ranks."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from ranks import on_ranks
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.traffic import traffic
from stretto.errors import StrettoError
from stretto.job.job import Job
from stretto.job.rules import problems
from stretto.layout.layout import axes_of
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import one_rank
from stretto.planner.rank_step.counts import counts
from stretto.run.config.job import job_of
from stretto.run.config.schema import TrainConfig
from stretto.run.config.source import Source
from stretto.run.config.validation import read_section
from stretto.run.dryrun.run import dry_run
from stretto.run.train.memory_measured import measure

GPT = "model.family=gpt"
LLAMA = "model.family=llama model.kv_heads=2 model.ffn=96"
MOE = f"{LLAMA} model.moe.experts=4 model.moe.top_k=2 model.moe.shared_ffn=32"
SP = "layout.sequence_parallel=true"
GQA = "model.kv_heads=2 model.ffn=96"
ROUTED = "model.moe.experts=8 model.moe.top_k=2 model.moe.ffn=32"
LATENT = (
    "model.ffn=96 model.head_dim=24 model.attention.latent.kv_rank=16 model.attention.latent.rope_dim=8 "
    "model.attention.latent.value_dim=16"
)
CASES = [
    f"1 {LLAMA} layout.cp=3 recompute.mode=selective",
    f"3 {LLAMA} layout.dp=2 layout.pp=2 dp.mode=zero3",
    f"3 {MOE} layout.tp=2 layout.dp=2 layout.ep=2 {SP}",
]
MORE = [
    f"1 {GPT} layout.tp=2",
    f"1 {LLAMA} layout.tp=2 {SP} recompute.mode=full",
    f"3 {LLAMA} layout.tp=4 {SP} recompute.mode=full",
    f"1 {LLAMA} layout.cp=4 recompute.mode=selective",
    f"5 {LLAMA} layout.dp=4 layout.pp=2 dp.mode=zero3",
    f"3 {GPT} layout.pp=4 layout.dp=2 schedule.name=zb-h1",
    f"3 model.family=gpt_oss {GQA} {ROUTED} layout.tp=2 layout.dp=2 layout.ep=2 {SP}",
    f"1 model.family=mistral {GQA} model.attention.window=16 layout.cp=2",
    f"1 {LLAMA} layout.cp=2 layout.context=ulysses",
    f"2 {GPT} layout.dp=4 dp.mode=zero2",
    f"1 model.family=qwen3 {GQA} layout.tp=2 {SP} recompute.mode=full",
    f"0 model.family=qwen3_moe {GQA} {ROUTED} layout.dp=2 layout.ep=2 dp.mode=zero1",
    f"0 {GPT} layout.tp=2 recompute.mode=full recompute.shard_inputs=true layout.pp=2",
    f"0 {GPT} layout.tp=2 {SP} recompute.mode=full model.dropout=0.1",
    f"0 {GPT} recompute.mode=selective train.attention=explicit",
    f"2 {LLAMA} layout.tp=4",
    f"1 {GPT} layout.cp=2 model.dropout=0.1",
    f"0 {LLAMA} layout.cp=4",
    f"2 {LLAMA} layout.cp=3 recompute.mode=full layout.tp=2 {SP}",
    f"1 {GPT} layout.cp=4 layout.context=ulysses recompute.mode=selective",
    f"3 {LLAMA} layout.dp=4 dp.mode=zero1",
    f"2 {GPT} layout.dp=4 dp.mode=zero3",
    f"2 {GPT} layout.dp=4 dp.mode=zero3 train.dtype=float32",
    f"2 {LLAMA} layout.dp=4 dp.mode=zero2 dp.reduce=step",
    f"5 {LLAMA} layout.dp=4 layout.pp=2 dp.mode=zero3 dp.shard_parameters=2",
    f"5 {LLAMA} layout.dp=4 layout.tp=2 {SP} dp.mode=zero2 dp.shard_states=2",
    f"0 {GPT} layout.dp=2 dp.mode=server",
    f"0 {GPT} layout.pp=2 schedule.name=gpipe",
    f"7 {GPT} layout.pp=4 layout.dp=2 schedule.name=zb-h1 dp.mode=zero2",
    f"1 {GPT} layout.pp=2 schedule.name=interleaved schedule.chunks=2 layout.dp=2 dp.mode=zero1",
    f"1 {GPT} layout.pp=2 schedule.name=zb-v dp.mode=zero3 layout.dp=2",
    f"1 {LLAMA} layout.pp=2 schedule.name=dualpipe",
    f"1 {GPT} layout.pp=2 schedule.name=chimera layout.dp=2",
    f"1 {MOE} layout.dp=2 layout.ep=2",
    f"1 {MOE} layout.tp=2",
    f"2 {MOE} layout.tp=2 layout.dp=2 layout.ep=4 layout.expert_tp=1",
    f"1 {MOE} layout.tp=2 layout.dp=2 layout.ep=2 layout.expert_tp=2 dp.mode=zero1",
    f"1 {MOE} layout.cp=2 layout.ep=2 recompute.mode=full",
    f"1 {MOE} layout.cp=2 layout.tp=2 model.moe.capacity=1.25",
    f"1 {MOE} layout.dp=4 layout.ep=2 dp.mode=zero3",
]
LONGER = "data.sequence=640"
NARROW = "model.attention.latent.q_rank=20"
WINDOW = "model.attention.window=48"
FAMILIES = [
    f"1 model.family=gemma2 {GQA} layout.tp=2 {SP}",
    f"1 model.family=deepseek_v3 {LATENT} {ROUTED} model.moe.dense_layers=1 layout.tp=2 {SP}",
]
MORE_FAMILIES = [
    # where activations outweigh weights and tables; gpipe holds the last stage's loss until the end
    f"0 model.family=gemma2 {GQA} {LONGER} layout.pp=2 schedule.name=gpipe",
    f"3 model.family=deepseek_v3 {LATENT} {NARROW} {LONGER} layout.tp=2 {SP} layout.pp=2",
    f"0 model.family=gemma3 {GQA} layout.pp=2",
    f"1 model.family=deepseek_v2 {LATENT} {ROUTED} layout.pp=2 schedule.name=dualpipe",
    # all blocks dense, since the family's first three are
    f"1 model.family=deepseek_v3 {LATENT} {ROUTED} layout.tp=2 {SP}",
    f"1 model.family=gemma3 {GQA} {LONGER} layout.tp=2 {SP}",
    f"0 model.family=gpt_oss {GQA} {ROUTED} {LONGER} layout.pp=2",
    f"1 model.family=qwen2 {GQA} layout.tp=2",
    f"1 model.family=mistral {GQA} model.attention.window=16 layout.cp=3 data.sequence=600",
    f"0 model.family=mistral {GQA} model.attention.window=100 layout.cp=2 layout.context=ulysses "
    "data.sequence=640",
    f"0 model.family=gemma2 {GQA} {LONGER} layout.cp=2",
    f"1 model.family=gemma2 {GQA} {LONGER} layout.tp=2 layout.pp=2 schedule.name=zb-h1",
    f"0 model.family=gemma2 {GQA} {LONGER} recompute.mode=full layout.pp=2",
    f"0 model.family=gemma3 {GQA} {LONGER} recompute.mode=selective layout.pp=2",
    f"0 model.family=gemma2 {GQA} train.attention=explicit layout.pp=2",
    f"1 model.family=gemma3 {GQA} {LONGER} train.dtype=float32 layout.dp=2 dp.mode=zero3",
    f"0 model.family=qwen3 {GQA} model.heads=16 model.head_dim=16 {LONGER} layout.pp=2",
    f"0 model.family=mistral {GQA} {WINDOW} model.heads=16 model.head_dim=16 {LONGER} layout.pp=2",
    f"2 model.family=gpt_oss {GQA} {ROUTED} {LONGER} layout.tp=2 layout.pp=2",
    f"0 model.family=gpt_oss {GQA} {LONGER} layout.cp=2 layout.context=ulysses",
    f"1 model.family=qwen2_moe {GQA} {ROUTED} model.moe.shared_ffn=32 {LONGER} layout.tp=2 {SP} layout.pp=2",
    f"0 model.family=deepseek_v2 {LATENT} {ROUTED} model.moe.shared_ffn=32 {LONGER} layout.pp=2",
    f"0 model.family=deepseek_v3 {LATENT} {NARROW} {LONGER} layout.cp=2",
    f"0 model.family=deepseek_v3 {LATENT} {NARROW} layout.tp=2 layout.pp=2 schedule.name=zb-h1",
    f"0 model.family=deepseek_v3 {LATENT} {NARROW} {LONGER} recompute.mode=full layout.pp=2",
]
T5 = "model.family=t5 model.encoder_layers=4 model.head_dim=16 data.target_sequence=24"
BART = "model.family=bart model.encoder_layers=4 data.target_sequence=24"
STACKS = [
    f"1 {T5} layout.pp=2 layout.encoder_pp=1",
]
MORE_STACKS = [
    f"2 {BART} layout.tp=2 {SP} layout.pp=2 layout.dp=2 dp.mode=zero1",
    f"0 {T5} layout.tp=2 {SP}",
    f"1 {T5} model.tied=false model.mlp=geglu layout.pp=4 layout.encoder_pp=1 schedule.name=zb-h1",
    f"2 {T5} layout.pp=4 layout.encoder_pp=2 schedule.name=gpipe",
    f"1 {T5} layout.pp=2 schedule.name=interleaved schedule.chunks=2",
    f"1 {T5} layout.dp=2 dp.mode=zero3",
    f"1 {T5} layout.pp=2 layout.dp=2 dp.mode=zero2",
    f"0 {T5} recompute.mode=full layout.tp=2",
    f"1 {BART} model.dropout=0.1 layout.tp=2 {SP} recompute.mode=selective",
]
MANY = "model.vocab=5003 data.vocab=5003"
CHUNKED = [
    f"1 {LLAMA} {MANY} train.loss_chunk=20 layout.tp=2 {SP}",
]
MORE_CHUNKED = [
    f"2 {GPT} {MANY} train.loss_chunk=20 layout.pp=2 schedule.name=zb-h1 layout.dp=2 dp.mode=zero2",
    f"0 {GPT} {MANY} train.loss_chunk=20 train.dtype=float32",
    f"1 model.family=gemma2 {GQA} {MANY} train.loss_chunk=20 layout.tp=2 layout.pp=2 schedule.name=zb-h1",
    f"3 {GPT} {MANY} train.loss_chunk=20 layout.pp=2 schedule.name=gpipe layout.dp=2 dp.mode=zero3",
    f"1 {LLAMA} {MANY} train.loss_chunk=20 layout.dp=2 dp.mode=zero3",
    f"1 {GPT} {MANY} train.loss_chunk=20 finetune.freeze=[head.*] model.tied=false layout.tp=2 {SP}",
    f"1 {LLAMA} {MANY} train.loss_chunk=20 layout.cp=2",
    f"1 {T5} {MANY} train.loss_chunk=20 layout.pp=2 layout.encoder_pp=1",
]
# Of models this small, tables and temporaries of a few KiB are percents.
MEMORY = 0.06


def described(overrides: str, **fields: Any) -> Job:
    all_sections: dict[str, Any] = {
        "model": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 301},
        "data": {"sequence": 48, "vocab": 301},
        "batch": {"micro_size": 2},
        "train": {"dtype": "bfloat16", "device": "cuda"},
    }
    for name, text in (override.split("=") for override in overrides.split()):
        at, (*sections, field) = all_sections, name.split(".")
        for section in sections:
            at = at.setdefault(section, {})
        at[field] = Source("overrides").read(text)
    all_sections["train"] |= fields
    layout: dict[str, int] = all_sections.get("layout", {})
    pipelined = "pp" in layout
    all_sections["model"]["layers"] = 2 * (layout.get("pp", 1) - layout.get("encoder_pp", 0))
    all_sections["batch"].setdefault("global_size", 2 * layout.get("dp", 1) * (4 if pipelined else 2))
    return job_of(read_section(TrainConfig, all_sections))


def check(case: str) -> None:
    rank, overrides = case.split(maxsplit=1)
    job = described(overrides)
    assert not problems(job)
    ran, memory = dry_run(job, int(rank)), memory_of(job)
    predicted = counts(job, ran.rank, memory)
    assert {key: count for key, count in ran.flops.items() if count} == predicted.flops
    assert ran.calls == predicted.calls
    assert ran.bytes == predicted.bytes
    assert ran.sent == pytest.approx(predicted.sent, rel=1e-3)  # halves of bytes are rounded in each call
    # a dry run has a table of distances in every block of T5, where training has one for all
    if "server" not in case and "t5" not in case:
        assert one_rank(memory, ran.coordinates["pp"]).total == pytest.approx(ran.peak, rel=MEMORY)


@pytest.mark.parametrize("case", CASES + FAMILIES + STACKS + CHUNKED)
def test_the_planner_counts_the_operations_of_a_rank(case: str) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE + MORE_FAMILIES + MORE_STACKS + MORE_CHUNKED)
def test_the_planner_counts_the_operations_of_more_ranks(case: str) -> None:
    check(case)


def test_a_head_holds_its_inputs_while_its_gradient_is_packed() -> None:
    """Whose product with the gradient of some tokens' logits at a time is the last of the head's backward."""
    job = described(
        f"{LLAMA} layout.dp=2 dp.mode=zero3 recompute.mode=full train.loss_chunk=64 data.sequence=512 "
        "model.hidden=256 model.vocab=20011 data.vocab=20011 model.tied=false"
    )
    ran = dry_run(job, 0, quick=True)
    assert one_rank(memory_of(job), 0).total == pytest.approx(ran.peak, rel=0.002)


LORA = "lora.rank=4"
ADAPTED = [
    pytest.param(f"1 {LLAMA} {LORA} layout.pp=2 layout.dp=2 dp.mode=zero3", marks=pytest.mark.slow),
    pytest.param(f"0 {LLAMA} {LORA} {LONGER} recompute.mode=full", marks=pytest.mark.slow),
    pytest.param(f"0 {GPT} {LORA} layout.pp=2", marks=pytest.mark.slow),
    pytest.param(f"1 {LLAMA} {LORA} layout.tp=2 {SP}", marks=pytest.mark.slow),
    pytest.param(f"0 {GPT} {LORA} layout.tp=2 layout.pp=2", marks=pytest.mark.slow),
    pytest.param(f"3 {LLAMA} {GQA} {LORA} layout.tp=4 {SP} recompute.mode=full", marks=pytest.mark.slow),
    f"1 {LLAMA} lora.rank=4 lora.targets=[q_proj,down_proj] layout.tp=2 {SP}",
    f"0 {GPT} finetune.freeze=[blocks.*.mlp.*] layout.tp=2 recompute.mode=full recompute.shard_inputs=true",
    # blocks that no gradient reaches keep nothing; what a stage receives has a gradient
    pytest.param(f"1 {LLAMA} finetune.freeze=[embed.*,blocks.0.*] layout.tp=2 {SP}", marks=pytest.mark.slow),
    f"1 {GPT} finetune.freeze=[embed.*,blocks.*] layout.tp=2 {SP}",
    pytest.param(
        f"0 {LLAMA} finetune.freeze=[embed.*,blocks.0.*,blocks.2.*] layout.pp=2", marks=pytest.mark.slow
    ),
    f"1 {LLAMA} finetune.freeze=[embed.*,blocks.0.*,blocks.2.*] layout.pp=2",
]


@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_and_frozen_weights_are_counted(case: str) -> None:
    check(case)


MICROBATCH_CASES = [
    f"model.family=gemma2 {GQA} layout.tp=2 {SP}",
    pytest.param(
        f"model.family=deepseek_v3 {LATENT} {NARROW} {ROUTED} model.moe.dense_layers=2",
        marks=pytest.mark.slow,
    ),
    pytest.param(f"model.family=gemma3 {GQA}", marks=pytest.mark.slow),
    pytest.param(f"model.family=gemma3 {GQA} train.dtype=float32", marks=pytest.mark.slow),
    pytest.param(f"model.family=gpt_oss {GQA} {ROUTED}", marks=pytest.mark.slow),
    pytest.param(f"model.family=qwen2_moe {GQA} {ROUTED} model.moe.shared_ffn=32", marks=pytest.mark.slow),
    pytest.param(f"model.family=deepseek_v2 {LATENT} {NARROW} layout.tp=2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", MICROBATCH_CASES)
def test_a_microbatch_more_keeps_what_was_counted(case: str) -> None:
    """With gpipe the last stage's peak grows by what a microbatch keeps."""
    peaks, counted = list[int](), list[int]()
    for samples in (4, 6):
        job = described(f"{case} layout.pp=2 schedule.name=gpipe batch.global_size={samples}")
        ran = dry_run(job, job.layout.world - 1)
        peaks.append(ran.peak)
        counted.append(one_rank(memory_of(job), ran.coordinates["pp"]).total)
    assert counted[1] - counted[0] == pytest.approx(peaks[1] - peaks[0], rel=2e-3)


def real(job: Job) -> tuple[Counter[tuple[str, str]], int]:
    """Bytes that two steps of a real rank are about, by axes and kind, and its peak."""
    sent_bytes = Counter[tuple[str, str]]()

    def heard(group: Any, kind: str, size: int) -> None:
        kind = "all-gather" if kind == "re-gather" else kind
        sent_bytes[axes_of(job.layout, torch.distributed.get_process_group_ranks(group)), kind] += size

    mesh = Mesh(job.layout)
    with traffic(heard):
        return sent_bytes, measure(job, mesh).peak


def test_real_ranks_send_and_hold_the_same() -> None:
    job = described(f"{LLAMA} layout.tp=2 {SP}", device="cpu")
    for rank, (sent_bytes, peak) in enumerate(on_ranks(2, real, job)):
        ran = dry_run(job, rank)
        assert sent_bytes == {key: 2 * size for key, size in ran.bytes.items()}
        # gloo's threads let go of tensors a moment late, on a machine that is busy later still
        assert 0.995 * ran.peak < peak < 1.15 * ran.peak


def test_one_rank_of_three_thousand() -> None:
    job = described(f"{GPT} layout.tp=8 layout.pp=4 layout.dp=96 model.heads=8")
    ran = dry_run(job, 3071)
    assert ran.coordinates == {"tp": 7, "cp": 0, "dp": 95, "pp": 3}
    assert ran.calls["tp", "all-reduce"] > 0
    predicted = counts(job, 3071)
    assert ran.bytes == predicted.bytes


QUICK = [
    pytest.param(f"1 {GPT} layout.dp=2 layout.pp=2 dp.mode=zero1", marks=pytest.mark.slow),
    f"3 {GPT} layout.pp=4 layout.dp=2 schedule.name=zb-h1 dp.mode=zero2 dp.reduce=step",
    pytest.param(f"1 {LLAMA} layout.pp=2 schedule.name=dualpipe", marks=pytest.mark.slow),
    pytest.param(
        f"1 {GPT} layout.pp=2 schedule.name=interleaved schedule.chunks=2 layout.dp=2 dp.mode=zero2",
        marks=pytest.mark.slow,
    ),
    pytest.param(f"0 {MOE} layout.dp=2 layout.ep=2 recompute.mode=full", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", QUICK)
def test_repeated_microbatches_count_as_if_they_were_run(case: str) -> None:
    rank, overrides = case.split(maxsplit=1)
    job = described(overrides)
    # up to four of them are run, six where they come from both ends
    microbatches = 12 if job.schedule == "dualpipe" else 8
    job = replace(job, global_batch=microbatches * job.micro_batch * job.layout.dp)
    full, quick = dry_run(job, int(rank)), dry_run(job, int(rank), quick=True)
    assert quick.operators < 0.65 * full.operators
    for name in ("flops", "bytes", "calls", "phases", "sent"):
        assert getattr(quick, name) == getattr(full, name)
    # losses of repeated microbatches, 4 bytes each, are not kept
    assert abs(quick.peak - full.peak) <= 4 * microbatches
    assert sum(quick.kinds.values()) == quick.peak


def test_repeated_microbatches_of_an_embedding_alone_leave_no_reductions() -> None:
    """One unit starts one reduction a microbatch, so the third is the first that waits for another."""
    overrides = "layout.pp=2 layout.dp=2 layout.stages=[1,5] dp.mode=zero2 model.vocab=8192 data.vocab=8192"
    job = described(f"{LLAMA} {overrides}")
    job = replace(job, global_batch=8 * job.micro_batch * job.layout.dp)
    assert dry_run(job, 0).peak == pytest.approx(one_rank(memory_of(job), 0).total, rel=0.03)


TILED = [
    "model.family=gemma2",
    pytest.param(
        "model.family=deepseek_v2 model.head_dim=24 model.attention.latent.kv_rank=16 "
        "model.attention.latent.rope_dim=8 model.attention.latent.value_dim=16",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("overrides", TILED)
def test_attention_in_tiles_counts_as_if_every_call_were_run(
    overrides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = described(f"{overrides} data.sequence=130 batch.global_size=2")
    once = dry_run(job, 0)
    monkeypatch.setattr("stretto.run.dryrun.run.tiles_once", nullcontext)
    each = dry_run(job, 0)
    assert once.operators < 0.8 * each.operators
    for name in ("flops", "bytes", "calls", "peak", "peak_action", "kinds"):
        assert getattr(once, name) == getattr(each, name)


DEPENDING = [
    "layout.dp=2 dp.mode=zero3",
    "layout.pp=2 schedule.name=pipedream model.tied=false",
    pytest.param("layout.pp=2 layout.dp=2 schedule.name=zb-h1 dp.mode=zero2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("overrides", DEPENDING)
def test_where_microbatches_depend_on_those_before_them_all_are_run(overrides: str) -> None:
    job = described(f"{GPT} {overrides}")
    job = replace(job, global_batch=4 * job.micro_batch * job.layout.dp)
    job = replace(job, shape=replace(job.shape, layers=job.layout.pp))
    full, quick = dry_run(job, 0), dry_run(job, 0, quick=True)
    assert (quick.operators, quick.peak, quick.flops) == (full.operators, full.peak, full.flops)


def test_progress_reaches_the_end_of_both_steps() -> None:
    seen = dict[str, list[tuple[int, int]]]()
    dry_run(
        described(f"{GPT} layout.pp=2"),
        1,
        quick=True,
        progress=lambda phase, done, of: seen.setdefault(phase, []).append((done, of)),
    )
    assert list(seen) == ["assembly of the stages", "step 1 of 2", "step 2 of 2"]
    for step in ("step 1 of 2", "step 2 of 2"):
        done, of = zip(*seen[step], strict=True)
        assert list(done) == list(range(1, of[0] + 1))
        assert set(of) == {of[0]}


def test_weights_that_layers_gather_are_not_there_between_steps() -> None:
    job = described(f"{LLAMA} layout.dp=4 dp.mode=zero3 dp.shard_parameters=2 recompute.mode=full")
    job = replace(job, shape=replace(job.shape, layers=4))
    ran, predicted = dry_run(job, 1), one_rank(memory_of(job), 0)
    assert ran.peak_action.startswith("0B")
    assert predicted.total == pytest.approx(ran.peak, rel=MEMORY)


def test_muon_s_exchange_of_sharded_matrices_is_refused() -> None:
    dry_run(described(f"{GPT} optim.name=muon layout.dp=2"), 1)
    for layout in ("layout.tp=2", "layout.dp=2 dp.mode=zero1"):
        with pytest.raises(StrettoError, match="a dry run does not follow how it gathers matrices"):
            dry_run(described(f"{GPT} optim.name=muon {layout}"), 1)


def test_a_rank_that_is_none() -> None:
    with pytest.raises(StrettoError, match="rank 2 is outside the layout"):
        dry_run(described(f"{GPT} layout.tp=2"), 2)


def test_nothing_is_left_behind() -> None:
    dry_run(described(f"{GPT} layout.dp=2"), 1)
    assert not torch.distributed.is_initialized()
    assert float(torch.ones(2).sum()) == 2.0
    assert type(torch.empty(1)) is torch.Tensor
