from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from example_counts import scaled
from stretto.errors import Problem, StrettoError
from stretto.job.attention import AttentionShape
from stretto.job.experts import ExpertShape
from stretto.job.job import Job, Recompute, nearest_values
from stretto.job.optimiser import Optimiser, RateSchedule
from stretto.job.rules import fits_tp, problems
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout

SHAPE = ModelShape(
    family="llama", layers=6, hidden=64, heads=8, kv_heads=2, ffn=96, vocab=512, sequence=128, head_dim=8
)
JOB = Job(shape=SHAPE, layout=Layout(tp=2, dp=2, pp=2), global_batch=16, micro_batch=2, sequence=128)
GPT = ModelShape(family="gpt", layers=8, hidden=64, heads=8, vocab=512, sequence=128, dropout=0.1)
TIED = {"shape": replace(SHAPE, tied=True)}
EXPERTS = {"shape": replace(SHAPE, moe=ExpertShape(experts=6, ffn=20, shared_ffn=12))}


def only(job: Job) -> Problem:
    broken = problems(job)
    assert len(broken) == 1, broken
    return broken[0]


def test_a_legal_job() -> None:
    assert problems(JOB) == []
    assert problems(replace(JOB, world=8, devices=8)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": Layout(cp=4, pp=2), "sequence": 127, "sequence_parallel": True},  # padded
        {"layout": Layout(tp=2, cp=4), "context": "ulysses", "sequence_parallel": True},
        {**EXPERTS, "layout": Layout(tp=4, dp=2)},  # the model's own ffn is nowhere
        {**EXPERTS, "layout": Layout(tp=2, cp=3, dp=2, ep=6, expert_tp=2), "expert_tp": 2},
        {**EXPERTS, "layout": Layout(tp=2, dp=2), "expert_tp": 2},
        {**EXPERTS, "layout": Layout(dp=3, ep=3), "global_batch": 6},
        {"recompute": Recompute("selective")},
        {"recompute": Recompute("full", blocks=1, shard_inputs=True)},
        {"recompute": Recompute("full", shard_inputs=True), "sequence_parallel": True, "layout": Layout()},
        {"recompute": Recompute("auto", memory_gib=1.5), "schedule": "zb-h1"},
    ],
)
def test_what_is_legal(changes: dict[str, Any]) -> None:
    assert problems(replace(JOB, **changes)) == []


@pytest.mark.parametrize(
    ("changes", "field", "rule", "fix"),
    [
        ({"layout": Layout(dp=2, ep=2)}, "layout.ep", "the model has no experts", "moe.experts=2"),
        ({"expert_tp": 1}, "layout.expert_tp", "the model has no experts", "layout.expert_tp=null"),
        (
            {**EXPERTS, "layout": Layout(dp=8, ep=4)},
            "layout.ep",
            "divide model.moe.experts, which is 6",
            "layout.ep=2",
        ),
        ({**EXPERTS, "expert_tp": 4}, "layout.expert_tp", "with layout.ep=1 experts are split over", "=null"),
        (
            {**EXPERTS, "layout": Layout(tp=2, dp=8, ep=2, expert_tp=8), "expert_tp": 8},
            "layout.expert_tp",
            "the width of an expert, model.moe.ffn=20",
            "nearest: layout.expert_tp=10 or 5",
        ),
        (
            {"shape": replace(SHAPE, moe=ExpertShape(experts=4, ffn=27))},
            "layout.tp",
            "the width of an expert, model.moe.ffn=27",
            "nearest: layout.tp=1",
        ),
        (
            {"shape": replace(SHAPE, moe=ExpertShape(experts=4, shared_ffn=27))},
            "layout.tp",
            "it must divide model.moe.shared_ffn, which is 27",
            "nearest: layout.tp=1",
        ),
        (
            {"layout": Layout(tp=2, cp=3), "context": "ulysses"},
            "layout.context",
            "layout.tp=2 x layout.cp=3 must divide model.heads, which is 8",
            "layout.context=ring, or nearest: layout.cp=2 or 4",
        ),
        ({"recompute": Recompute("auto")}, "recompute.mode", "memory_gib is not set", "memory_gib=16"),
        (
            {"recompute": Recompute("full", memory_gib=2.0)},
            "recompute.memory_gib",
            "recompute.mode=full has no memory budget",
            "recompute.memory_gib=null, or recompute.mode=auto",
        ),
        (
            {"recompute": Recompute("selective", blocks=2)},
            "recompute.blocks",
            "selective does not select a number",
            "recompute.blocks=null, or recompute.mode=full",
        ),
        (
            {"recompute": Recompute("none", shard_inputs=True)},
            "recompute.shard_inputs",
            "none does not store inputs",
            "recompute.mode=full",
        ),
        (
            {"recompute": Recompute("full", shard_inputs=True), "sequence_parallel": True},
            "recompute.shard_inputs",
            "already splits the inputs of blocks over tp",
            "recompute.shard_inputs=false",
        ),
        ({"world": 12}, "layout", "but 12 processes were started", "start 8 processes, or dp=3"),
        ({"world": 6}, "layout", "but 6 processes were started", "start 8 processes"),
        ({"devices": 4}, "layout", "but there are 4 devices", "train.device=cpu"),
        (
            {"global_batch": 18},
            "batch.global_size",
            "multiple of batch.micro_size=2 x layout.dp=2",
            "16 or 20",
        ),
        ({"global_batch": 3}, "batch.global_size", "multiple of", "batch.global_size=4"),
        ({"global_batch": 4 * 10**17}, "batch.global_size", "at most 65,536", "batch.global_size=262144"),
        ({"layout": Layout(pp=9)}, "layout.pp", "9 stages (pp x 1 chunks) for 8 layers", "layout.pp=8"),
        (
            {"schedule": "interleaved", "options": {"chunks": 5}},
            "layout.pp",
            "10 stages (pp x 5",
            "layout.pp=1",
        ),
        (
            {"schedule": "interleaved", "options": {"chunks": 4}, "layout": Layout(pp=3)},
            "layout.pp",
            "12 st",
            "layout.pp=2",
        ),
        (
            {"schedule": "interleaved", "options": {"chunks": 10**18}},
            "schedule",
            "actions, of at most 1,024 with 2,097,152",
            "fewer",
        ),
        (
            {"layout": Layout(pp=10**30)},
            "schedule",
            "actions, of at most 1,024 with 2,097,152",
            "smaller layout.pp",
        ),
        ({"schedule": "1f2b"}, "schedule", "not one of", "did you mean '1f1b'?"),
        ({"options": {"chunks": 2}}, "schedule", "chunks is 2, but schedule '1f1b' takes chunks=1", None),
        ({"schedule": "interleaved", "options": {"group": 9}}, "schedule", "group is 9, must be", "group=4"),
        ({"schedule": "hanayo", "options": {"waves": 3}}, "layout.pp", "12 stages (pp x 6", "layout.pp=1"),
        ({"options": {"waves": 3}}, "schedule", "waves is 3, but schedule '1f1b' takes no waves", "hanayo"),
        ({"schedule": "forward-only"}, "schedule", "no backwards, so it cannot train", "1f1b"),
        # two copies of four stages are four stages to cut the layers into
        ({"schedule": "dualpipe", "layout": Layout(pp=10)}, "layout.pp", "10 stages", "layout.pp=8"),
        ({"schedule": "chimera", "layout": Layout(pp=3)}, "schedule", "must be even", "ranks=4"),
        (
            {**TIED, "schedule": "pipedream"},
            "model.tied",
            "updates each stage separately",
            "model.tied=false",
        ),
        (
            {"schedule": "pipedream-2bw", "optimiser": Optimiser(clip=1.0)},
            "optim.clip",
            "the norm of all gradients is not available",
            "optim.clip=null",
        ),
        ({"sequence": 129}, "data.sequence", "the model has 128 positions", "model.positions=129"),
        (
            {"attention": "sdpa", "shape": GPT},
            "train.attention",
            "attention dropout needs the probabilities",
            "train.attention=auto",
        ),
        (
            {"attention": "sdpa", "shape": replace(SHAPE, attention=AttentionShape(softcap=50.0))},
            "train.attention",
            "do not support model.attention.softcap=50.0",
            "train.attention=auto",
        ),
        (
            {"attention": "flex", "layout": Layout(cp=2)},
            "train.attention",
            "layout.context=ring has its own kernels",
            "train.attention=auto",
        ),
        (
            {"attention": "flex", "shape": replace(SHAPE, attention=AttentionShape(causal=False))},
            "train.attention",
            "not used for encoders",
            "train.attention=auto",
        ),
    ],
)
def test_one_broken_rule(changes: dict[str, Any], field: str, rule: str, fix: str | None) -> None:
    problem = only(replace(JOB, **changes))
    assert problem.field == field
    assert rule in problem.rule
    assert fix is None or (problem.fix is not None and fix in problem.fix)


def test_what_asynchronous_schedules_allow() -> None:
    assert problems(replace(JOB, schedule="pipedream", options={"vertical_sync": True})) == []
    assert problems(replace(JOB, schedule="1f1b", optimiser=Optimiser(clip=1.0), **TIED)) == []
    slowly = Optimiser(clip=None, rate=RateSchedule(rescheduling_steps=100))
    three = Layout(pp=3)
    assert problems(replace(JOB, schedule="pipedream", layout=three, optimiser=slowly)) == []
    for name, layout, late in (
        ("pipedream", Layout(pp=2), "at most one update late"),
        ("pipedream-2bw", three, "at most one update late"),
        ("1f1b", three, "not late"),
    ):
        problem = only(replace(JOB, schedule=name, layout=layout, optimiser=slowly))
        assert problem.field == "optim.rate.rescheduling_steps"
        assert late in problem.rule
    assert problems(replace(JOB, schedule="pipedream", layout=Layout(), **TIED)) == []


def test_tensor_parallel_names_every_size_it_does_not_divide() -> None:
    broken = problems(replace(JOB, layout=Layout(tp=3)))
    assert [p.rule for p in broken] == [
        "it must divide model.heads, which is 8",
        "it must divide model.kv_heads, which is 2, or be a multiple of it",
    ]
    assert broken[0].fix == "nearest: layout.tp=2 or 4"
    assert "each rank needs a part" in problems(replace(JOB, shape=replace(SHAPE, vocab=1)))[0].rule


def test_a_problem_is_an_error_in_one_line() -> None:
    error = only(replace(JOB, sequence=256))
    assert error.message == "data.sequence is 256: the model has 128 positions"
    assert str(error) == f"{error.message}\nhint: {error.fix}"


def test_errors_carry_their_field_to_other_processes_and_into_sections() -> None:
    with pytest.raises(Problem) as caught:
        replace(SHAPE, head_dim=7)
    problem = pickle.loads(pickle.dumps(caught.value)).within("model")
    assert (problem.field, problem.value) == ("model.head_dim", 7)
    assert problem.message.startswith("model.head_dim is 7: it must be even")
    plain = StrettoError("no such model", hint="gpt2").within("model")
    assert (plain.field, plain.message, plain.hint) == ("model", "model: no such model", "gpt2")


def test_nearest_values() -> None:
    assert nearest_values(5, [1, 2, 4, 8]) == [4, 8]
    assert nearest_values(7, [1, 2, 4, 8]) == [8, 4]
    assert nearest_values(9, [1, 2]) == [2]
    assert nearest_values(9, []) == []


def divides_evenly(items: int, ranks: int) -> bool:
    """True if `items` dealt out to `ranks` in turn give every rank the same number."""
    dealt = [0] * ranks
    for i in range(items):
        dealt[i % ranks] += 1
    return len(set(dealt)) == 1


def heads_fit(shape: ModelShape, tp: int) -> bool:
    """Whether contiguous query heads and the K/V heads they read make equal, whole shares.

    With fewer K/V heads than ranks, each rank holds a copy of one head, that of all its query heads.
    """
    if not divides_evenly(shape.heads, tp):
        return False
    each, per_kv = shape.heads // tp, shape.heads // shape.kv_heads
    read = [{q // per_kv for q in range(r * each, (r + 1) * each)} for r in range(tp)]
    sizes = {len(kv) for kv in read}
    shared = sum(map(len, read)) > shape.kv_heads
    return sizes == {1} if shared else len(sizes) == 1


SMALL = st.integers(1, 9)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    kv_heads = draw(SMALL)
    return ModelShape(
        family="gpt",
        layers=draw(SMALL),
        hidden=8,
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=4,
        ffn=draw(st.integers(1, 24)),
        vocab=draw(st.integers(1, 12)),
        sequence=draw(SMALL),
    )


@given(
    shape=shapes(),
    tp=SMALL,
    dp=SMALL,
    pp=SMALL,
    batch=st.integers(1, 48),
    micro=st.integers(1, 4),
    sequence=SMALL,
    extra=st.sampled_from([None, 0, 0, 1]),
    schedule=st.sampled_from(["1f1b", "gpipe", "naive", "interleaved"]),
    chunks=st.none() | st.integers(1, 3),
    group=st.none() | st.integers(1, 9),
)
@settings(max_examples=scaled(400), deadline=None)
def test_legal_exactly_when_the_brute_statement_holds(
    shape: ModelShape,
    tp: int,
    dp: int,
    pp: int,
    batch: int,
    micro: int,
    sequence: int,
    extra: int | None,
    schedule: str,
    chunks: int | None,
    group: int | None,
) -> None:
    layout = Layout(tp=tp, dp=dp, pp=pp)
    world = None if extra is None else layout.world + extra
    options = {"chunks": chunks, "group": group}
    job = Job(
        shape=shape,
        layout=layout,
        global_batch=batch,
        micro_batch=micro,
        sequence=sequence,
        schedule=schedule,
        options=options,
        world=world,
    )
    stages = pp * (chunks or (2 if schedule == "interleaved" else 1))
    microbatches = [m for m in range(1, batch + 1) if m * micro * dp == batch]
    low, high = sorted((pp, *(microbatches or [0])))
    legal = (
        extra in (None, 0)
        and heads_fit(shape, tp)
        and divides_evenly(shape.ffn, tp)
        and shape.vocab >= tp
        and bool(microbatches)
        and stages <= shape.layers + 2
        and sequence <= shape.sequence
        and (schedule == "interleaved" or (group is None and chunks in (None, 1)))
        and (schedule != "interleaved" or group is None or low <= group <= high)
    )
    broken = problems(job)
    assert (broken == []) == legal, broken


@given(heads=st.integers(1, 16), kv=st.integers(1, 16), ffn=st.integers(1, 64), tp=st.integers(1, 16))
def test_fits_tp_is_the_brute_statement(heads: int, kv: int, ffn: int, tp: int) -> None:
    if heads % kv:
        kv = 1
    shape = ModelShape(
        family="gpt", layers=1, hidden=4, heads=heads, kv_heads=kv, head_dim=4, ffn=ffn, vocab=99, sequence=1
    )
    assert fits_tp(shape, tp) == (heads_fit(shape, tp) and divides_evenly(ffn, tp))


@given(
    experts=SMALL,
    width=st.integers(1, 24),
    shared=st.integers(0, 8),
    layout=st.tuples(SMALL, SMALL, SMALL),
    ep=SMALL,
    expert_tp=st.none() | SMALL,
    context=st.sampled_from(["ring", "ulysses"]),
)
@settings(max_examples=scaled(400), deadline=None)
def test_experts_and_contexts_are_legal_exactly_when_the_brute_statement_holds(
    experts: int,
    width: int,
    shared: int,
    layout: tuple[int, int, int],
    ep: int,
    expert_tp: int | None,
    context: str,
) -> None:
    tp, cp, dp = layout
    moe = ExpertShape(experts=experts, top_k=1, ffn=width, shared_ffn=shared)
    shape = replace(SHAPE, heads=12, kv_heads=12, ffn=7, moe=moe)
    each = tp if expert_tp is None else expert_tp
    over = tp * cp * dp
    if not any(each * ep * rest == over for rest in range(1, over + 1)):
        if ep > 1:
            with pytest.raises(StrettoError, match="does not divide the"):
                Layout(tp=tp, cp=cp, ep=ep, dp=dp, expert_tp=expert_tp)
        return
    job = Job(
        shape=shape,
        layout=Layout(tp=tp, cp=cp, ep=ep, dp=dp, expert_tp=expert_tp if ep > 1 else None),
        global_batch=dp,
        micro_batch=1,
        sequence=1,
        expert_tp=expert_tp,
        context=context,
    )
    legal = (
        divides_evenly(12, tp)
        and divides_evenly(shared, tp)
        and divides_evenly(experts, ep)
        and divides_evenly(width, each)
        and (ep > 1 or each == tp)
        and (context == "ring" or divides_evenly(12, tp * cp))
    )
    broken = problems(job)
    assert (broken == []) == legal, broken


@given(shape=shapes(), tp=SMALL, dp=SMALL, batch=st.integers(1, 64))
def test_the_fix_is_legal(shape: ModelShape, tp: int, dp: int, batch: int) -> None:
    for problem in problems(
        Job(shape=shape, layout=Layout(tp=tp, dp=dp), global_batch=batch, micro_batch=1, sequence=1)
    ):
        assert problem.fix is None or problem.fix.startswith("nearest: ")
        for value in map(int, (problem.fix or "=").split("=")[1].split(" or ") if problem.fix else []):
            if problem.field == "layout.tp":
                assert fits_tp(shape, value)
            else:
                assert problem.field == "batch.global_size"
                assert value % dp == 0
