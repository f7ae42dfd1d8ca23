"""The schedule `auto`: the best program that can be found for given costs and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stretto.errors import StrettoError
from stretto.schedule.action import Action, Kind
from stretto.schedule.check import check
from stretto.schedule.lower import lower
from stretto.schedule.program import Program
from stretto.schedule.registry import at_least_one
from stretto.search.bound import lower_bound
from stretto.search.evaluate import Times, makespan, replay, span
from stretto.search.fixed import fixed_programs
from stretto.search.hunt import hunt
from stretto.search.improve import Found, Value
from stretto.search.inputs import choice, chunk_counts, limits, placements
from stretto.search.problem import I, Orders, Problem, W, problem_of
from stretto.simulate import Costs, Timeline, simulate


@dataclass(frozen=True)
class Result:
    """The best program found, and how good it is; times in the unit of the costs."""

    program: Program
    value: float  # of the objective, as the replay gives it
    bound: float  # no program on the placements looked at is better; of the plain costs alone
    optimal: bool  # proved: nothing on the placements looked at is better
    source: str  # what it was made from
    fixed: str | None  # the best schedule by name that fits, with its options
    fixed_value: float | None


def auto(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory: float | Sequence[float | None] | None = None,
    chunks: int | None = None,
    placement: str | None = None,
    split: bool = True,
    objective: str = "barrier",
    effort: float = 1.0,
) -> Program:
    """The best program found; its parameters say what it is: see `search`, whose arguments it takes.

    Parameters of the program: `chunks`; `warmup`, forwards of rank 0 before its first backward; `optimal`, 1
    if it is proved that nothing is better; `gap_ppm`, how far it is above the lower bound, in millionths.
    """
    return search(ranks, microbatches, costs, memory, chunks, placement, split, objective, effort).program


def search(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory: float | Sequence[float | None] | None = None,
    chunks: int | None = None,
    placement: str | None = None,
    split: bool = True,
    objective: str = "barrier",
    effort: float = 1.0,
) -> Result:
    """Search for the program of least makespan. The same input gives the same program on every machine.

    Never worse than the best schedule by name that fits, on any costs; proved optimal for small problems.
    What costs have beyond F, I, W and transfers (contention, reductions, ...) counts when the best are
    compared, not while they are looked for.

    Args:
        costs: `per_stage` says how many stages there are; without it, `chunks` does.
        memory: the most activations that a rank may hold, in rank units (one microbatch through the rank's
            whole share is 1); one number, or one for each rank with None for no limit.
        chunks: stages a rank; None: as `per_stage` says, else 1, 2 and 4 are looked at.
        placement: one of `layout.placement.PLACEMENTS`; None: all that have so many chunks.
        split: whether backwards may be split into I and W.
        objective: "barrier", the makespan; "span", the longest time of a rank from its first start to its
            last end, for optimisers that do not wait for all ranks.
        effort: how long to search, 1 for a few seconds at 8 ranks and 32 microbatches.

    Raises:
        StrettoError: an argument is out of range, or no program keeps to `memory`; says which could.
    """
    at_least_one("ranks", ranks)
    at_least_one("microbatches", microbatches)
    costs = costs or Costs()
    memories = limits(memory, ranks)
    counts = chunk_counts(ranks, costs, chunks)
    where = placements(ranks, counts, placement)
    by_span = choice("objective", objective, ("barrier", "span")) == "span"
    if isinstance(effort, bool) or not isinstance(effort, int | float) or not 0 <= effort < float("inf"):
        raise StrettoError(f"effort is {effort!r}, must be a number >= 0", hint="say effort=1")
    value: Value = span if by_span else _barrier
    problems = [problem_of(place, microbatches, costs, memories, split) for place in where]
    fixed = _fixed(problems, microbatches, counts, memories, costs, by_span)
    found = hunt(problems, [(name, program) for _, name, program in fixed], value, effort, not by_span)
    bounds = [_work(problem) if by_span else lower_bound(problem) for problem in problems]
    rated = [(*_rated(each, costs, by_span), each.source) for each in found.best]
    rated += [(worth, program, name) for worth, name, program in fixed[:1]]
    worth, program, source = min(rated, key=lambda one: one[0])
    optimal = found.complete and all(worth <= one[0] for one in rated)
    bound = worth if optimal else min(min(bounds), worth)
    parameters = {
        "chunks": program.stages // ranks,
        "warmup": _warmup(program),
        "optimal": int(optimal),
        "gap_ppm": round(1e6 * (worth / bound - 1)) if bound else 0,
    }
    program = replace(program, name="auto", parameters=parameters)
    check(lower(program))
    best = fixed[0] if fixed else None
    return Result(program, worth, bound, optimal, source, best and best[1], best and best[0])


def _barrier(problem: Problem, ends: Times) -> float:
    return makespan(ends)


def _work(problem: Problem) -> float:
    """The busiest rank's."""
    return problem.microbatches * max(sum(problem.cost[op] for op in ops) for ops in problem.operations)


def _objective(timeline: Timeline, by_span: bool) -> float:
    if not by_span:
        return timeline.makespan
    pairs = zip(timeline.starts, timeline.ends, strict=True)
    return max(ends[-1] - starts[0] for starts, ends in pairs if starts)


def _fixed(
    problems: Sequence[Problem],
    microbatches: int,
    counts: Sequence[int],
    memories: Sequence[float | None],
    costs: Costs,
    by_span: bool,
) -> list[tuple[float, str, Program]]:
    """The schedules by name on the placements that are allowed, the best first."""
    allowed = {problem.placement for problem in problems}
    split = problems[0].split
    fixed = [
        (_objective(simulate(program, costs), by_span), name, program)
        for name, program in fixed_programs(len(memories), microbatches, counts, memories, split)
        if program.placement in allowed
    ]
    return sorted(fixed, key=lambda one: one[0])


def _rated(found: Found, costs: Costs, by_span: bool) -> tuple[float, Program]:
    """The program of what was found, with full backwards where that costs nothing, and its replayed value."""
    problem = found.problem
    program = problem.program(found.orders)
    worth = _objective(simulate(program, costs), by_span)
    if problem.split:
        joined = _joined(problem, found.orders, program)
        again = _objective(simulate(joined, costs), by_span)
        if again <= worth:
            return again, joined
    return worth, program


def _joined(problem: Problem, orders: Orders, program: Program) -> Program:
    """I and the W right behind it as one B where nobody waits for I's result."""
    ends = replay(problem, orders)
    assert ends is not None
    rows: list[tuple[Action, ...]] = []
    for order in program.orders:
        row: list[Action] = []
        at = 0
        while at < len(order):
            stage, kind, i = order[at]
            assert i is not None
            if kind is Kind.I and order[at + 1 : at + 2] == (Action(stage, Kind.W, i),):
                op = 3 * stage + I
                after = problem.follower[op]
                if after < 0 or _start(problem, ends, after, i) >= ends[op - I + W][i] + problem.delay[after]:
                    row.append(Action(stage, Kind.B, i))
                    at += 2
                    continue
            row.append(order[at])
            at += 1
        rows.append(tuple(row))
    return replace(program, orders=tuple(rows))


def _start(problem: Problem, ends: Times, op: int, microbatch: int) -> float:
    return ends[op][microbatch] - problem.cost[op]


def _warmup(program: Program) -> int:
    """Forwards of rank 0 before its first backward."""
    order = program.orders[0]
    return next((at for at, action in enumerate(order) if action.kind is not Kind.F), len(order))
