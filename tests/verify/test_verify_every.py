"""The cases that `--layouts all` chooses, against brute-force statements of what they must cover, and the
reasons for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from stretto.job.job import Job
from stretto.job.rules import problems
from stretto.job.shape import ModelShape
from stretto.program import names
from stretto.run.config import TrainConfig
from stretto.verify.language.cases import (
    SHARDING,
    configured_job,
    describe,
    describe_layout,
    smaller,
    vary,
)
from stretto.verify.language.every import Every, content, ways
from tiny_job import EIGHT, GPT, LLAMA, job

SIZES = {
    4: {
        *((4, 1, 1, 1), (1, 4, 1, 1), (1, 1, 4, 1), (1, 1, 1, 4), (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2)),
        *((1, 2, 2, 1), (1, 2, 1, 2), (1, 1, 2, 2)),
    },
    2: {(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)},
}
ASYNCHRONOUS = {"pipedream", "pipedream-2bw"}
MODES = ("none", "selective", "full")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("every")


@cache
def chosen(folder: Path, ranks: int = 4, model: str = GPT, *overrides: str) -> Every:
    """The cover of a job's cases."""
    return every_of(job(folder, *overrides, model=model), ranks)


def every_of(config: TrainConfig, ranks: int, all_combinations: bool = False) -> Every:
    return Every(configured_job(config), ranks, all_combinations)


def sizes(case: Job) -> tuple[int, int, int, int]:
    layout = case.layout
    return layout.tp, layout.cp, layout.dp, layout.pp


SETTINGS: dict[str, Callable[[Job], object]] = {
    "ep": lambda case: case.layout.ep > 1,
    "sequence_parallel": lambda case: case.sequence_parallel,
    "context": lambda case: case.context,
    "recompute": lambda case: case.recompute.mode,
    "shard_inputs": lambda case: case.recompute.shard_inputs,
    "mode": lambda case: case.dp.mode,
    "reduce": lambda case: case.dp.reduce,
    "gather": lambda case: case.dp.gather,
    "offload": lambda case: case.dp.offload,
}


def cell_text(cell: tuple[int, int | None, bool, str, str, bool]) -> str:
    return " ".join(map(str, cell))


def cells(tp: int, cp: int, ep: list[tuple[int, int | None]]) -> set[str]:
    """All combinations of features, by hand."""
    legal = set[str]()
    for experts, sp, context, mode, shard in product(
        ep, (False, True), ("ring", "ulysses"), MODES, (False, True)
    ):
        if (sp and tp == 1) or (context == "ulysses" and cp == 1):
            continue
        if shard and (mode != "full" or tp == 1 or sp):
            continue
        legal.add(cell_text((*experts, sp, context, mode, shard)))
    return legal


def cell(case: Job) -> str:
    recompute = case.recompute
    expert_split = (case.layout.ep, case.expert_tp, case.sequence_parallel, case.context)
    return cell_text((*expert_split, recompute.mode, recompute.shard_inputs))


def shared(case: Job) -> str:
    """The data-parallel mode and its options, as in the name of the case."""
    return describe_layout(case).removeprefix(describe_layout(vary(case, **SHARDING))).strip()


def said_ways(copies: int) -> list[str]:
    shape = ModelShape(family="gpt", layers=2, hidden=8, heads=2, vocab=16, sequence=8)
    base = vary(Job(shape=shape), dp=copies)
    return [shared(vary(base, **way)) for way in ways(copies)]


def can(schedule: str, way: str) -> bool:
    """Schedules that update within the step have whole weights, and reduce for each update."""
    return schedule not in ASYNCHRONOUS or ("zero3" not in way and "reduce=microbatch" not in way)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_is_covered_with_every_combination_of_features(folder: Path, ranks: int) -> None:
    every = chosen(folder, ranks)
    assert {sizes(case) for case in every.cases} == SIZES[ranks]
    for tp, cp, dp, pp in SIZES[ranks]:
        covered = {cell(case) for case in every.cases if sizes(case) == (tp, cp, dp, pp)}
        assert covered == cells(tp, cp, [(1, None)])
    assert len(set(map(describe, every.cases))) == len(every.cases)


def test_every_split_of_experts_is_covered(folder: Path) -> None:
    every = chosen(folder, 4, LLAMA, "model.moe.experts=4")
    for tp, cp, dp, pp in SIZES[4]:
        legal = [
            (ep, None if expert_tp == tp else expert_tp)
            for ep in (2, 4)
            for expert_tp in (1, 2, 4)
            if tp * cp * dp % (ep * expert_tp) == 0
        ]
        covered = {cell(case) for case in every.cases if sizes(case) == (tp, cp, dp, pp)}
        assert covered == cells(tp, cp, [(1, None), *legal])
    assert not any("experts" in refusal.reason for refusal in every.impossible)
    (three,) = [
        refusal
        for refusal in every_of(job(folder, "model.moe.experts=3"), 2).impossible
        if "layout.ep" in refusal.reason
    ]
    assert three.reason == "layout.ep is 2: it must divide model.moe.experts, which is 3"
    assert three.left_out == [
        "tp1 dp2 pp1 ep2",
        "tp1 cp2 dp1 pp1 ep2",
        "tp2 dp1 pp1 ep2 expert_tp1",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_every_schedule_is_covered_on_every_layout_and_with_every_value_of_every_feature(
    folder: Path, model: str
) -> None:
    config = job(folder, model=model)
    every, product = chosen(folder, 4, model), every_of(config, 4, all_combinations=True)
    assert len(every.cases) < len(product.cases) / 40
    assert set(map(describe, every.cases)) <= set(map(describe, product.cases))

    def by(key: str, cases: list[Job]) -> set[tuple[object, ...]]:
        return {(case.schedule, case.layout.pp > 1, SETTINGS[key](case)) for case in cases}

    for key in ("sequence_parallel", "context", "recompute", "shard_inputs", "ep"):
        assert by(key, every.cases) == by(key, product.cases), key
    for case in product.cases[::10]:  # by brute force: the options on the layouts
        assert problems(case) == []
    wanted = {(sizes(c), c.schedule, str(c.options)) for c in product.cases}
    assert {(sizes(c), c.schedule, str(c.options)) for c in every.cases} == wanted
    schedules = {c.schedule for c in every.cases if sizes(c) == (1, 1, 2, 2)}
    tied = ASYNCHRONOUS if model == GPT else set[str]()
    assert schedules == set(names()) - {"forward-only"} - tied


def test_every_layout_is_covered_with_every_data_parallel_mode(folder: Path) -> None:
    every = chosen(folder)
    for at in SIZES[4]:
        covered = {shared(case) for case in every.cases if sizes(case) == at}
        assert covered == set(said_ways(at[1] * at[2]))
    assert len(every.cases) < 1.6 * 251  # as many without data-parallel modes


def test_data_parallel_modes_come_with_all_their_options() -> None:
    assert said_ways(1) == ["", "offload=cpu", "offload=nvme"]
    two, four = said_ways(2), said_ways(4)
    assert set(two) <= set(four)
    assert all("shard_" not in way for way in two)
    extra = {way.split(" ")[0] for way in four if "shard_" in way}
    assert extra == {"zero1", "zero2", "zero3"}
    assert {part.split("=")[0] for way in four for part in way.split(" ") if "shard_" in part} == {
        "shard_states",
        "shard_gradients",
        "shard_parameters",
    }
    for mode in ("server", "zero1", "zero2", "zero3"):
        places = {way.partition(" offload=")[2].split(" ")[0] or "none" for way in two if mode in way}
        assert places >= {"none", "cpu"}, mode
    three = [way for way in two if way.startswith("zero3")]
    moments = {(f"reduce={r}", f"gather={g}") for r in ("step", "microbatch") for g in ("layer", "stage")}
    assert {tuple(way.split(" ")[1:3]) for way in three} == moments
    assert {way for way in two if "offload_parameters" in way} <= set(three)
    assert set(said_ways(6)) - set(two) == {way for way in said_ways(6) if "=2" in way}


@pytest.mark.parametrize(("model", "overrides"), [(GPT, ()), (LLAMA, ("model.moe.experts=4",))])
def test_every_schedule_and_every_feature_meet_every_mode(
    folder: Path, model: str, overrides: tuple[str, ...]
) -> None:
    every = chosen(folder, 4, model, *overrides)
    pipelined = [case for case in every.cases if case.layout.pp > 1]
    synchronous = {case.schedule for case in pipelined} - ASYNCHRONOUS
    for key, wanted in (
        ("mode", {"server", "ddp", "zero1", "zero2", "zero3"}),
        ("reduce", {"step", "microbatch"}),
        ("gather", {"layer", "stage"}),
        ("offload", {"cpu", "nvme"}),
    ):
        met = {(case.schedule, SETTINGS[key](case)) for case in pipelined}
        assert met >= set(product(synchronous, wanted)), key
        for feature in ("recompute", "context", "sequence_parallel", "ep"):
            alone = [case for case in every.cases if case.copies > 1 and case.layout.pp == 1]
            values = {SETTINGS[feature](case) for case in alone}
            both = {(SETTINGS[feature](case), SETTINGS[key](case)) for case in alone}
            assert both >= set(product(values, wanted)), (feature, key)
    late = {(c.schedule, c.dp.mode) for c in pipelined if c.schedule in ASYNCHRONOUS}
    tied = model == GPT
    assert late == (set() if tied else set(product(ASYNCHRONOUS, ("server", "ddp", "zero1", "zero2"))))
    for case in every.cases:
        assert problems(case) == []
        assert case.copies > 1 or case.dp.mode == "ddp"


def test_the_whole_product_is_enumerated(folder: Path) -> None:
    product = every_of(job(folder), 2, all_combinations=True)
    for at in SIZES[2]:
        here = [case for case in product.cases if sizes(case) == at]
        schedules = {(case.schedule, str(case.options)) for case in here}
        combinations = {(case.schedule, str(case.options), cell(case), shared(case)) for case in here}
        assert len(combinations) == len(here)
        legal = [
            (with_options, way)
            for with_options in schedules
            for way in said_ways(at[1] * at[2])
            if can(with_options[0], way)
        ]
        assert len(here) == len(legal) * len(cells(at[0], at[1], [(1, None)]))
        assert {(*with_options, way) for with_options, way in legal} == {
            (s, options, way) for s, options, _, way in combinations
        }


def runs(cases: list[Job]) -> int:
    return len({(describe_layout(case), content(case.program())) for case in cases})


def test_equal_programs_are_proved_once_on_a_layout(folder: Path) -> None:
    """On one pipeline rank many schedules are the same program: they share a run."""
    config = job(folder)
    alone = [case for case in every_of(config, 4).cases if case.layout.pp == 1]
    assert runs(alone) < 0.85 * len(alone)


@pytest.mark.slow
def test_options_other_than_the_defaults_are_tried(folder: Path) -> None:
    deep = every_of(job(folder, "model.layers=6"), 2).cases
    tried = {(c.schedule, *sorted(c.options.items())) for c in deep if c.layout.pp == 2}
    for wanted in (
        ("interleaved",),
        ("interleaved", ("chunks", 3), ("group", 3)),
        ("bfs", ("chunks", 3)),
        ("hanayo",),
        ("hanayo", ("waves", 2)),
        ("dualpipe",),
        ("auto", ("effort", 0.0)),
        ("auto", ("chunks", 3), ("effort", 0.0), ("memory", 2.0), ("split", False)),
    ):
        assert wanted in tried
    # four layers (embedding, two blocks, head) make four stages at most
    cases = chosen(folder, 4, GPT, EIGHT).cases
    assert not [c for c in cases if c.schedule == "interleaved" and c.layout.pp == 4]
    taken = {str(c.options) for c in cases if c.schedule == "interleaved" and sizes(c) == (1, 1, 2, 2)}
    assert taken == {"{}", "{'group': 3}"}


def test_impossible_layouts_have_reasons(folder: Path) -> None:
    every = every_of(job(folder, "model.heads=2"), 4)
    reasons = {refusal.reason: refusal.left_out for refusal in every.impossible}
    assert reasons["layout.tp is 4: it must divide model.heads, which is 2"] == ["tp4 dp1 pp1"]
    assert reasons["layout.ep is above 1: the model has no experts"] == ["every layout"]
    ulysses = "layout.context is ulysses: layout.tp={} x layout.cp={} must divide model.heads, which is 2: "
    for tp, cp in ((1, 4), (2, 2)):
        (reason,) = [reason for reason in reasons if reason.startswith(ulysses.format(tp, cp))]
        assert [where.startswith(f"tp{tp} cp{cp}") for where in reasons[reason]] == [True]
    (late,) = [reason for reason in reasons if reason.startswith("model.tied is true: schedule pipedream u")]
    assert "tp1 dp1 pp4" in reasons[late]
    (stages,) = [
        refusal for refusal in every.impossible if refusal.reason.startswith("layout.pp is 4: 8 stages")
    ]
    assert "zb-v" in stages.left_out
    assert str(stages).endswith("(bfs, interleaved, interleaved-zb, zb-v, v-half, v-min and 2 more)")
    untied = every_of(job(folder, "model.tied=false"), 4)
    assert not any("tied" in refusal.reason for refusal in untied.impossible)
    assert {c.schedule for c in untied.cases if c.layout.pp == 2} >= ASYNCHRONOUS


def test_layouts_that_the_model_cannot_take_are_left_out(folder: Path) -> None:
    three = every_of(job(folder, "batch.global_size=6", model=LLAMA), 3)  # 4 heads do not divide
    assert {sizes(case) for case in three.cases} == {(1, 3, 1, 1), (1, 1, 3, 1), (1, 1, 1, 3)}
    assert {case.context for case in three.cases} == {"ring"}
    seven = every_of(job(folder), 7)
    assert {sizes(case) for case in seven.cases} == {(1, 7, 1, 1)}
    batch = "batch.global_size is 4: it must be a multiple of batch.micro_size=1 x layout.dp=7"
    assert batch in [refusal.reason for refusal in seven.impossible]


@pytest.mark.slow
def test_eight_ranks(folder: Path) -> None:
    config = smaller(job(folder, "model.layers=8"), 8)
    every = every_of(config, 8)
    assert len({sizes(case) for case in every.cases}) == 19  # all but tp=8
    assert (2, 2, 1, 2) in {sizes(c) for c in every.cases if c.schedule == "interleaved"}
    parts = {c.dp.shard_parameters for c in every.cases if c.copies == 8}
    assert parts == {None, 2}
    assert runs(every.cases) < 500
