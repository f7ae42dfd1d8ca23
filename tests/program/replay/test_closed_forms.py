"""The replay agrees with the closed forms wherever they are valid."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from closed_forms import FORMS, Case, Form

from stretto.program import Program, lower, schedule
from stretto.program.replay import Costs, simulate

RATIOS = [(1.0, 1.0, 1.0), (1.0, 1.25, 0.5), (0.75, 1.0, 1.5)]
HALVES = (1.0, 0.5, 0.5)  # backward as long as forward
HOPS = [0.0, 0.02]
IDS = [f"{at}-{form.schedule}{form.options.get('chunks', '')}" for at, form in enumerate(FORMS)]


def cases(ranks: tuple[int, ...], microbatches: range | tuple[int, ...]) -> Iterator[Case]:
    """The grid; `microbatches` in eighths of p."""
    for p in ranks:
        for m in sorted({max(p, p * eighths // 8) for eighths in microbatches}):
            for ratio in (*RATIOS, HALVES):
                for hop in HOPS:
                    yield Case(p, m, *ratio, hop)


def agrees(form: Form, case: Case, lowered: bool = False) -> int:
    """Number of compared figures."""
    holds, peak_holds = form.valid(case), form.peak_valid(case)
    if form.group is not None:
        peak_holds = peak_holds and holds  # the option itself depends on what is valid
    if not (holds or peak_holds):
        return 0
    group = form.group(case) if form.group else None
    program = schedule(form.schedule, case.p, case.m, group=group, **form.options)
    costs = Costs(F=case.F, I=case.B, W=case.W, hop=case.c, pair=1.0 if form.pair else None)
    line = simulate(lower(program) if lowered else program, costs)
    compared = 0
    passes = 1.0 if program.trains else case.F / case.work
    if holds and form.barrier is not None:
        assert line.ideal == pytest.approx(case.m * case.work * passes)
        assert line.bubble.barrier == pytest.approx(form.barrier(case), abs=1e-9), case
        assert line.bubble.rate == pytest.approx(line.bubble.barrier / line.makespan)
        compared += 1
    if holds and form.span is not None:
        assert line.bubble.span == pytest.approx(form.span(case), abs=1e-9), case
        compared += 1
    if peak_holds and form.peak is not None:
        peaks = [form.peak(case, rank) for rank in range(case.p)]
        assert [peak / chunks(program, rank) for rank, peak in enumerate(line.peak_bytes)] == peaks, case
        if program.copies == 1:
            assert line.peak_activations == peaks
        compared += case.p
    assert line.bound <= line.makespan + 1e-9
    return compared


def chunks(program: Program, rank: int) -> int:
    """Stages of one copy on a rank."""
    return program.placement[: program.depth].count(rank)


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_closed_forms(form: Form):
    compared = sum(agrees(form, case) for case in cases((2, 4, 8), (8, 12, 16)))
    compared += sum(agrees(form, case) for case in cases((2, 4), (64,)))
    compared += sum(agrees(form, case) for case in cases((16,), (16, 32)) if case.F == case.B == case.W)
    assert compared >= 6


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_closed_forms_on_the_whole_grid(form: Form):
    assert sum(agrees(form, case) for case in cases((2, 4, 8, 16), range(8, 65))) >= 8


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_lowered_programs_have_the_same_closed_forms(form: Form):
    assert sum(agrees(form, case, lowered=True) for case in cases((4,), (8, 16, 20))) > 0


# Liu et al. 2023, BW = 2F; their rate is no golden value: other orders of their rule need less, few more
@pytest.mark.parametrize(("p", "waves"), [(4, 1), (4, 2), (8, 1), (8, 2), (8, 4), (16, 2)])
def test_hanayo_needs_no_more_than_its_formula(p: int, waves: int):
    line = simulate(schedule("hanayo", p, p, waves=waves))
    assert line.bubble.rate <= (2 * p - 2) / (3 * p * waves + p - 1) + 1e-12


# F = B = W = 1 without hops, from an independent event simulation
@pytest.mark.parametrize(
    ("name", "options", "makespans"),
    [
        ("gpipe", {}, (33, 69, 93, 117)),
        ("1f1b", {}, (33, 69, 93, 117)),
        ("interleaved", {"chunks": 2}, (28.5, 58.5, 82.5, 106.5)),
        ("interleaved", {"chunks": 4}, (26.25, 53.25, 77.25, 101.25)),
        ("bfs", {"chunks": 2}, (28.5, 58.5, 82.5, 106.5)),
        ("zb-h1", {}, (27, 55, 79, 103)),
        ("zb-h2", {}, (27, 55, 79, 103)),
        ("zb-v", {}, (25.5, 51.5, 75.5, 99.5)),
        ("dualpipe-v", {}, (25.5, 51.5, 75.5, 99.5)),
        ("dualpipe", {}, (25, 51, 75, 99)),
    ],
)
def test_reference_makespans(name: str, options: dict[str, int], makespans: tuple[float, ...]):
    sizes = [(4, 8), (8, 16), (8, 24), (8, 32)]
    assert tuple(simulate(schedule(name, p, m, **options)).makespan for p, m in sizes) == makespans


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_asynchronous_schedules_have_no_bubble_after_start_up(name: str, p: int):
    line = simulate(schedule(name, p, 6 * p), Costs(F=1.0, I=1.25, W=0.5))
    assert line.steady_rate == pytest.approx(0, abs=1e-12)
    assert line.weight_versions == (tuple(range(p, 0, -1)) if name == "pipedream" else (2,) * p)
    # an update takes its time in the place where it stands
    slow = simulate(schedule(name, p, 6 * p), Costs(update=0.25))
    updates = [event for event in slow.events if str(event.action.kind) == "U"]
    assert updates
    assert all(event.end - event.start == 0.25 for event in updates)
    assert slow.makespan > simulate(schedule(name, p, 6 * p)).makespan
