"""The schedule `auto`: the best program that can be found for given costs and memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import fsum, isnan
from typing import Any

from stretto.errors import StrettoError, nearest
from stretto.layout.placement import PLACEMENTS, place
from stretto.program.action import Action, ActionKind
from stretto.program.checks.check import check
from stretto.program.lower import lower
from stretto.program.memory import peak_activations
from stretto.program.program import Program
from stretto.program.replay import Costs, Timeline, simulate
from stretto.program.schedules.registry import at_least_one, names, options, register, schedule
from stretto.program.search.evaluate import Times, makespan, replay, span
from stretto.program.search.improve import ScheduleCandidate, Value
from stretto.program.search.problem import I, SchedulingProblem, W, lower_bound, problem_of
from stretto.program.search.solve import solve

MOST_CHUNKS = 4  # the largest number tried if neither costs nor caller determine it


def limits(memory: float | str | Sequence[float | None] | None, ranks: int) -> list[float | None]:
    """Return the limit of activations of every rank, in rank units, or None for no limit.

    Raises:
        StrettoError: no program obeys it, or it is neither a number nor one for each rank.
    """
    # a string is also a sequence
    if isinstance(memory, str):
        raise StrettoError(
            f"memory is {memory!r}, must be a number of microbatches or one for each rank",
            hint="use memory=1 or more, or leave it out for no limit",
        )
    requested = list(memory) if isinstance(memory, Sequence) else [memory] * ranks
    if len(requested) != ranks:
        raise StrettoError(
            f"memory has {len(requested)} entries, must be one number or one each for {ranks} ranks",
            hint=f"give {ranks} numbers, None for a rank without a limit",
        )
    for rank, limit in enumerate(requested):
        if limit is None:
            continue
        if isinstance(limit, bool) or not isinstance(limit, int | float) or isnan(limit):
            raise StrettoError(
                f"memory is {limit!r} on rank {rank}, must be a number of microbatches",
                hint="use memory=1 or more, or leave it out for no limit",
            )
        # all forwards of a microbatch come before its first backward, on every placement
        if limit < 1:
            raise StrettoError(
                f"memory is {limit} on rank {rank}, but every program holds a whole microbatch at once",
                hint="the smallest possible limit is memory=1",
            )
    return [None if limit == float("inf") else limit for limit in requested]


def chunk_counts(ranks: int, costs: Costs, chunks: int | None) -> list[int]:
    """Return the numbers of stages that a rank may hold.

    Raises:
        StrettoError: the costs' stages do not divide evenly among ranks, or not into `chunks` per rank.
    """
    if chunks is not None and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
        raise StrettoError(
            f"chunks is {chunks!r}, must be a whole number of at least 1", hint="nearest is chunks=1"
        )
    if costs.per_stage is None:
        return [chunks] if chunks is not None else [c for c in (1, 2, MOST_CHUNKS) if c == 1 or ranks > 1]
    stages = len(costs.per_stage)
    if not stages or stages % ranks:
        nearest_stages = max(1, round(stages / ranks)) * ranks
        raise StrettoError(
            f"per_stage has {stages} entries, which {ranks} ranks cannot share evenly",
            hint=f"nearest is {nearest_stages} stages, {nearest_stages // ranks} a rank",
        )
    if chunks is not None and chunks * ranks != stages:
        raise StrettoError(
            f"chunks is {chunks}, but per_stage has {stages} entries, {stages // ranks} for each rank",
            hint=f"use chunks={stages // ranks} or leave it out",
        )
    return [stages // ranks]


def placements(ranks: int, counts: Iterable[int], only: str | None) -> list[tuple[int, ...]]:
    """Return the placements to search, without duplicates; `only` restricts them to one name.

    Raises:
        StrettoError: `only` is not a placement, or has another number of chunks.
    """
    if only is not None and only not in PLACEMENTS:
        suggestion = nearest(only, PLACEMENTS)
        hint = f"did you mean {suggestion!r}? " * bool(suggestion) + f"placements are {', '.join(PLACEMENTS)}"
        raise StrettoError(f"placement is {only!r}, which is not one", hint=hint)
    chosen: dict[tuple[int, ...], None] = {}
    for count in counts:
        for name in ("zigzag", "loop", "linear") if only is None else (only,):
            if name == "vee" and count != 2:
                continue
            chosen.setdefault(place(name, ranks, count))
    if not chosen:
        raise StrettoError(
            f"placement is 'vee', but ranks hold {' or '.join(map(str, counts))} chunks",
            hint="vee has 2 chunks; zigzag takes any number",
        )
    return list(chosen)


def choice(name: str, value: object, allowed: Sequence[str]) -> str:
    """Return the value if it is one of the allowed words; raise StrettoError otherwise."""
    if not isinstance(value, str) or value not in allowed:
        suggestion = nearest(str(value), allowed)
        raise StrettoError(
            f"{name} is {value!r}, must be {' or '.join(map(repr, allowed))}",
            hint=f"did you mean {suggestion!r}?" if suggestion else None,
        )
    return value


def fixed_programs(
    ranks: int, microbatches: int, chunks: Sequence[int], memory: Sequence[float | None], split: bool
) -> Iterator[tuple[str, Program]]:
    """Yield every synchronous training schedule with one copy of the weights that fits, with its name.

    Args:
        chunks: numbers of stages that a rank may hold.
        memory: per rank, the limit of activations in rank units, or None.
        split: backwards may be split into I and W.
    """
    keys: set[tuple[object, ...]] = set()
    for name in names():
        if name == "auto":
            continue
        for values in _options(name, ranks, microbatches, chunks):
            try:
                program = schedule(name, ranks, microbatches, **values)
            except StrettoError:
                continue
            key = (program.placement, program.orders)
            if key not in keys and _fits(program, chunks, memory, split):
                keys.add(key)
                yield " ".join([name, *(f"{option}={value}" for option, value in values.items())]), program


def _options(name: str, ranks: int, microbatches: int, chunks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield option values to try for a schedule; the caller skips those that the schedule rejects."""
    accepted = options(name)
    values: dict[str, list[int]] = {}
    if "chunks" in accepted:
        values["chunks"] = [c for c in chunks if c > 1] or [1]
    if "waves" in accepted:
        values["waves"] = [c // 2 for c in chunks if c % 2 == 0] or [1]
    if "group" in accepted:
        groups = {ranks, ranks + 1, ranks + 2, 2 * ranks, microbatches}
        values["group"] = sorted({min(group, microbatches) for group in groups})
    for chosen in product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


def _fits(program: Program, chunks: Sequence[int], memory: Sequence[float | None], split: bool) -> bool:
    """True if the program trains synchronously within the limits."""
    if not program.trains or program.versions or program.copies > 1:
        return False
    if any(program.placement.count(rank) not in chunks for rank in range(program.ranks)):
        return False
    kinds = {action.kind for order in program.orders for action in order}
    if not kinds <= {ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W} or (
        not split and ActionKind.I in kinds
    ):
        return False
    peaks = peak_activations(program)
    return all(limit is None or peak <= limit + 1e-9 for peak, limit in zip(peaks, memory, strict=True))


@dataclass(frozen=True, kw_only=True)
class ScheduleSearchResult:
    """The best program found, and its quality; times in the unit of the costs."""

    program: Program
    value: float  # replayed value of the objective
    bound: float  # lower bound over all programs on the searched placements, from F, I, W and transfers only
    optimal: bool  # proved: no program on the searched placements is better
    source: str  # the candidate that it was derived from
    fixed: str | None  # the best named schedule that fits, with its options
    fixed_value: float | None


@register("auto", "the best program found for given costs and a limit of memory")
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
    """Return the best program found by `search`, with the same arguments.

    Parameters of the program: `chunks`; `warmup`, forwards of rank 0 before its first backward; `optimal`, 1
    if it is proved optimal; `gap_ppm`, its distance above the lower bound, in millionths.
    """
    return search(
        ranks=ranks,
        microbatches=microbatches,
        costs=costs,
        memory=memory,
        chunks=chunks,
        placement=placement,
        split=split,
        objective=objective,
        effort=effort,
    ).program


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
) -> ScheduleSearchResult:
    """Search for the program with the smallest makespan. The same input gives the same program on every
    machine.

    Never worse than the best named schedule that fits, for any costs; proved optimal for small problems.
    Costs other than F, I, W and transfers (contention, reductions, ...) count when the best candidates are
    compared, not during the search.

    Args:
        costs: costs, whose `per_stage`, if given, determines the number of stages instead of `chunks`.
        memory: largest activations that a rank may hold, in rank units (one microbatch through the rank's
            entire share is 1); one number, or one for each rank with None for no limit.
        chunks: stages per rank; by default the number in `per_stage`, else 1, 2 and 4 are tried.
        placement: one of `layout.placement.PLACEMENTS`; by default all that have that number of chunks.
        split: backwards may be split into I and W.
        objective: "barrier", the makespan; "span", the longest time of a rank from its first start to its
            last end, for optimisers that do not wait for all ranks.
        effort: search effort; 1 takes a few seconds for 8 ranks and 32 microbatches.

    Raises:
        StrettoError: an argument is out of range, or no program obeys `memory`; the hint has a limit that one
            obeys.
    """
    at_least_one("ranks", ranks)
    at_least_one("microbatches", microbatches)
    costs = costs or Costs()
    memories = limits(memory, ranks)
    counts = chunk_counts(ranks, costs, chunks)
    allowed = placements(ranks, counts, placement)
    by_span = choice("objective", objective, ("barrier", "span")) == "span"
    if isinstance(effort, bool) or not isinstance(effort, int | float) or not 0 <= effort < float("inf"):
        raise StrettoError(f"effort is {effort!r}, must be a number >= 0", hint="use effort=1")
    value: Value = span if by_span else _barrier
    problems = [problem_of(place, microbatches, costs, memories, split) for place in allowed]
    fixed = _fixed(
        problems=problems,
        microbatches=microbatches,
        counts=counts,
        memories=memories,
        costs=costs,
        by_span=by_span,
    )
    solution = solve(problems, [(name, program) for _, name, program in fixed], value, effort, not by_span)
    bounds = [_work(problem) if by_span else lower_bound(problem) for problem in problems]
    rated = [(*_rated(each, costs, by_span), each.source) for each in solution.best]
    rated += [(worth, program, name) for worth, name, program in fixed[:1]]
    worth, program, source = min(rated, key=lambda entry: entry[0])
    optimal = solution.complete and all(worth <= entry[0] for entry in rated)
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
    return ScheduleSearchResult(
        program=program,
        value=worth,
        bound=bound,
        optimal=optimal,
        source=source,
        fixed=best and best[1],
        fixed_value=best and best[0],
    )


def _barrier(problem: SchedulingProblem, ends: Times) -> float:
    return makespan(ends)


def _work(problem: SchedulingProblem) -> float:
    """Return the work of the busiest rank."""
    return problem.microbatches * max(fsum(problem.cost[op] for op in ops) for ops in problem.operations)


def _objective(timeline: Timeline, by_span: bool) -> float:
    if not by_span:
        return timeline.makespan
    pairs = zip(timeline.starts, timeline.ends, strict=True)
    return max(ends[-1] - starts[0] for starts, ends in pairs if starts)


def _fixed(
    problems: Sequence[SchedulingProblem],
    microbatches: int,
    counts: Sequence[int],
    memories: Sequence[float | None],
    costs: Costs,
    by_span: bool,
) -> list[tuple[float, str, Program]]:
    """Return the named schedules on the allowed placements, the best first."""
    allowed = {problem.placement for problem in problems}
    split = problems[0].split
    fixed = [
        (_objective(simulate(program, costs), by_span), name, program)
        for name, program in fixed_programs(len(memories), microbatches, counts, memories, split)
        if program.placement in allowed
    ]
    return sorted(fixed, key=lambda entry: entry[0])


def _rated(candidate: ScheduleCandidate, costs: Costs, by_span: bool) -> tuple[float, Program]:
    """Return the replayed value and the candidate's program, with I and W joined if that costs no time."""
    problem = candidate.problem
    program = problem.program(candidate.orders)
    worth = _objective(simulate(program, costs), by_span)
    if problem.split:
        # join I and the W right after it to one B if no rank waits for I's result
        ends = replay(problem, candidate.orders)
        assert ends is not None
        rows: list[tuple[Action, ...]] = []
        for order in program.orders:
            row: list[Action] = []
            at = 0
            while at < len(order):
                stage, kind, i = order[at]
                assert i is not None
                if kind is ActionKind.I and order[at + 1 : at + 2] == (Action(stage, ActionKind.W, i),):
                    op = 3 * stage + I
                    after = problem.follower[op]
                    arrival = 0.0 if after < 0 else ends[op - I + W][i] + problem.delay[after]
                    if after < 0 or ends[after][i] - problem.cost[after] >= arrival:
                        row.append(Action(stage, ActionKind.B, i))
                        at += 2
                        continue
                row.append(order[at])
                at += 1
            rows.append(tuple(row))
        joined = replace(program, orders=tuple(rows))
        again = _objective(simulate(joined, costs), by_span)
        if again <= worth:
            return again, joined
    return worth, program


def _warmup(program: Program) -> int:
    """Return the number of forwards of rank 0 before its first backward."""
    order = program.orders[0]
    return next((at for at, action in enumerate(order) if action.kind is not ActionKind.F), len(order))
