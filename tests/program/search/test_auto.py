"""The schedule `auto`: never worse than the schedules by name, within its limits, deterministic."""

from __future__ import annotations

from random import Random

import pytest

from stretto.errors import StrettoError
from stretto.program import check, lower, names, options, schedule
from stretto.program.memory import peak_activations
from stretto.program.program import Program
from stretto.program.replay import Costs, simulate
from stretto.program.search import search


def uneven(stages: int, seed: int = 0) -> Costs:
    """A light first stage, a heavy last one, and noise."""
    random = Random(seed)
    scale = [random.uniform(0.9, 1.1) for _ in range(stages)]
    scale[0] *= 0.7
    scale[-1] *= 1.5
    return Costs(hop=0.05, per_stage=[(s, s * random.uniform(0.9, 1.1), 0.5 * s) for s in scale])


def fixed_makespans(ranks: int, m: int, costs: Costs, memory: float) -> list[tuple[str, float]]:
    """Every schedule by name that fits, with its default options."""
    makespans: list[tuple[str, float]] = []
    for name in names():
        if name == "auto":
            continue
        program = schedule(name, ranks, m)
        stages = len(costs.per_stage or ()) or program.stages
        plain = program.trains and not program.versions and program.copies == 1
        if plain and program.stages == stages and max(peak_activations(program)) <= memory:
            makespans.append((name, simulate(program, costs).makespan))
    return makespans


def holds(program: Program, memory: float) -> bool:
    return max(peak_activations(program)) <= memory


@pytest.mark.parametrize(
    "memory", [1, 2.5, 4, 100, *(pytest.param(limit, marks=pytest.mark.slow) for limit in (2, 3, 7))]
)
@pytest.mark.parametrize("stages", [4, 8])
def test_no_schedule_by_name_is_better(stages: int, memory: float) -> None:
    costs = uneven(stages)
    result = search(4, 8, costs, memory, effort=0.3)
    assert holds(result.program, memory)
    assert check(lower(result.program)).stages == stages
    assert result.value == simulate(result.program, costs).makespan
    assert result.bound <= result.value
    for name, makespan in fixed_makespans(4, 8, costs, memory):
        assert result.value <= makespan, name
        assert result.fixed_value is not None
        assert result.fixed_value <= makespan, name


def test_equal_costs_choose_the_chunks() -> None:
    """ZB-V's 25.5 for p=4, m=8 and F=I=W=1 is the best by name with one copy of the weights."""
    result = search(4, 8)
    assert result.value <= 25.5
    assert all(result.value <= makespan for _, makespan in fixed_makespans(4, 8, Costs(), 100))


def test_uneven_stages_gain() -> None:
    """Costs that the fixed orders ignore."""
    result = search(4, 12, uneven(8), 2)
    assert result.fixed_value is not None
    assert result.value < 0.97 * result.fixed_value


def test_the_same_input_gives_the_same_program() -> None:
    first, second = (search(4, 8, uneven(8), 2.5, effort=0.3).program for _ in range(2))
    assert first == second


def test_limits_rank_by_rank() -> None:
    memory = [4, None, 1, 2.5]
    program = search(4, 6, uneven(8), memory, effort=0.3).program
    for peak, limit in zip(peak_activations(program), memory, strict=True):
        assert limit is None or peak <= limit


def test_whole_backwards_stay_whole() -> None:
    result = search(3, 6, uneven(6), 2, split=False, effort=0.3)
    kinds = {action.kind.value for order in result.program.orders for action in order}
    assert kinds == {"F", "B"}
    assert holds(result.program, 2)


def test_less_memory_is_never_faster_where_it_is_proved() -> None:
    values = [search(3, 4, uneven(3), memory, placement="linear").value for memory in (3, 2, 1)]
    assert values == sorted(values)
    assert values[0] < values[-1]


def test_span_lets_ranks_end_apart() -> None:
    """Without a barrier ZB-H2's order has no bubble for F=I=W=1 (Qi et al. 2024, table 2)."""
    result = search(4, 12, Costs(), chunks=1, objective="span", effort=0.3)
    assert result.value == 12 * 3
    assert result.fixed_value is not None
    assert result.value <= result.fixed_value


def test_costs_beyond_the_plain_ones_count_in_the_end() -> None:
    """Messages that queue and reductions: the value is the replay's, and no schedule by name has a better."""
    costs = Costs(hop=0.1, message_bytes=4.0, bandwidth=10.0, contention=True, reduce=1.0, update=0.5)
    result = search(4, 6, costs, chunks=2, effort=0.3)
    assert result.value == simulate(result.program, costs).makespan
    for name, makespan in fixed_makespans(4, 6, costs, 100):
        if schedule(name, 4, 6).stages == 8:
            assert result.value <= makespan, name


def test_by_name() -> None:
    program = schedule("auto", 2, 4, costs=uneven(4), memory=2)
    assert program.name == "auto"
    assert program.parameters["chunks"] == 2
    assert set(program.parameters) == {"chunks", "warmup", "optimal", "gap_ppm"}
    assert {"costs", "memory", "chunks", "split"} <= set(options("auto"))


@pytest.mark.parametrize(("ranks", "m"), [(1, 1), (1, 5), (2, 1), (5, 2), (3, 7)])
def test_any_ranks_and_microbatches(ranks: int, m: int) -> None:
    result = search(ranks, m, effort=0.1)
    check(lower(result.program))
    assert result.value >= result.bound


def test_stages_that_take_no_time() -> None:
    result = search(2, 3, Costs(per_stage=[(0, 0, 0), (1, 0, 0)]))
    assert result.value == 3
    assert search(2, 3, Costs(F=0, I=0, W=0)).value == 0


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"memory": 0.5}, "memory is 0.5 on rank 0", "memory=1"),
        ({"memory": [1, 2, 0.9]}, "memory is 0.9 on rank 2", "memory=1"),
        ({"memory": [1, 2]}, "memory has 2 entries", "give 3 numbers"),
        ({"memory": "8"}, "memory is '8'", "memory=1"),
        ({"memory": float("nan")}, "memory is nan", "memory=1"),
        ({"chunks": 0}, "chunks is 0", "chunks=1"),
        ({"chunks": 2, "costs": uneven(3)}, "chunks is 2, but per_stage has 3", "chunks=1"),
        ({"costs": uneven(4)}, "per_stage has 4 entries", "nearest is 3 stages"),
        ({"placement": "zig"}, "placement is 'zig'", "zigzag"),
        ({"placement": "vee", "chunks": 3}, "placement is 'vee'", "zigzag"),
        ({"objective": "bariers"}, "objective is 'bariers'", "barrier"),
        ({"effort": -1}, "effort is -1", "effort=1"),
    ],
)
def test_bad_input_is_named(options: dict[str, object], message: str, hint: str) -> None:
    with pytest.raises(StrettoError) as error:
        schedule("auto", 3, 4, **options)  # pyright: ignore[reportArgumentType]
    assert message in error.value.message
    assert error.value.hint is not None
    assert hint in error.value.hint


def test_the_smallest_limit_is_one_that_can_be_met() -> None:
    for stages in (3, 6):
        assert holds(search(3, 4, uneven(stages), 1, effort=0.1).program, 1)
