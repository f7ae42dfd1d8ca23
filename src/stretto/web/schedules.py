"""Answers about schedules: which exist, and programs replayed against costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any

from stretto.errors import StrettoError, nearest
from stretto.layout.placement import PLACEMENTS
from stretto.program import Action, Program, ScheduleError, entry, names, options, schedule, unlower
from stretto.program.checks.check import prove
from stretto.program.replay import Costs, Timeline, simulate
from stretto.program.replay.costs import Prices
from stretto.program.replay.sweep import encode
from stretto.program.text import read_text_program
from stretto.program.transforms.activations import recompute
from stretto.view.panel import figures_table, peak, with_path
from stretto.view.panel_record import panels_record
from stretto.web.bubbles import bubble_table

Question = Mapping[str, Any]

MOST_ACTIONS = 200_000  # of a program, and far more than anybody reads
_CHOICES = {"placement": ["", *PLACEMENTS], "objective": ["barrier", "span"]}


def list_schedules(question: Question) -> dict[str, Any]:
    """Every schedule: its name, description and options, with their defaults and kinds."""
    return {
        "schedules": [
            {
                "name": name,
                "description": description,
                "options": [
                    {
                        "name": option,
                        "default": default,
                        "kind": _kind(name, option, default),
                        "choices": _CHOICES.get(option, []),
                    }
                    for option, default in options(name).items()
                    if option != "costs"  # those of the question
                ],
            }
            for name, description in names().items()
        ]
    }


def _kind(name: str, option: str, default: object) -> str:
    """Return which values an option has: choice, boolean, whole (a number), number or text."""
    if option in _CHOICES:
        return "choice"
    if option in entry(name).numbers:
        return "whole"
    return "boolean" if isinstance(default, bool) else "number" if isinstance(default, float) else "numbers"


def replay(question: Question) -> dict[str, Any]:
    """Replay the programs of a question under one time axis.

    A program is a schedule (`name`, `ranks`, `microbatches`, `options`, `recompute`) or a file's `text`; with
    `orders`, it is in an order of its own: a line of actions for each rank, or "" for that of the schedule.
    """
    described: Sequence[Question] = question["programs"]
    cost_fields: Question = question.get("costs", {})
    replayed = [replay_program(each, cost_fields) for each in described]
    timelines = [titled(timeline, each) for (timeline, _), each in zip(replayed, described, strict=True)]
    record = panels_record([with_path(timeline) for timeline in timelines])
    record["held"] = 0.0
    for panel, timeline, (_, verdict), description in zip(
        record["panels"], timelines, replayed, described, strict=True
    ):
        panel["orders"] = [[str(action) for action in order] for order in timeline.program.orders]
        panel |= verdict
        if description.get("orders"):
            unedited, _ = replay_program({**description, "orders": []}, cost_fields)
            panel["before"] = figures_of(unedited)
        if verdict["legal"]:
            panel["figures"] = figures_of(timeline)
        else:  # the rest of the picture is of actions that never start
            panel.pop("path", None)
            panel["line"] = "this order does not run"
            panel["held"] = [[at for at in curve if at[0] <= verdict["stalls"]] for curve in panel["held"]]
        record["held"] = max(record["held"], *map(peak, panel["held"]))
    legal = [at for at, (_, verdict) in enumerate(replayed) if verdict["legal"]]
    complete = [timelines[at] for at in legal]
    schedules = ["" if described[at].keys() & {"orders", "text"} else described[at]["name"] for at in legal]
    return {
        "timelines": record,
        "table": figures_table(complete) if complete else [],
        "bubbles": bubble_table(complete, schedules) if complete else [],
        "versions": _versions_table(complete),
    }


def figures_of(timeline: Timeline) -> dict[str, float]:
    """Return the figures that an edit changes: makespan, both bubbles as shares, peak of activations."""
    return {
        "makespan": timeline.makespan,
        "bubble": timeline.bubble.rate,
        "over_ideal": timeline.bubble.over_ideal,
        "peak": max(timeline.peak_activations, default=0.0),
    }


def replay_program(description: Question, cost_fields: Question) -> tuple[Timeline, dict[str, Any]]:
    """Replay a program as far as it runs; return its timeline, and what the checker says.

    Actions that never start follow one another after the others, from `stalls` on.
    """
    program = program_of(description, cost_fields)
    costs = costs_of(cost_fields, program.ranks)
    verdict: dict[str, Any] = {"legal": True}
    try:
        prove(program)
    except ScheduleError as error:
        cycle = [[str(action), str(awaited)] for action, awaited in error.cycle]
        verdict = {"legal": False, "message": error.message, "hint": error.hint or "", "cycle": cycle}
    if verdict["legal"]:
        return simulate(program, costs), verdict
    completed = encode(program).completed
    prefixes = [order[:count] for order, count in zip(program.orders, completed, strict=True)]
    timeline = simulate(replace(program, orders=tuple(prefixes), pairs=frozenset()), costs)
    verdict |= {"completed": completed, "stalls": timeline.makespan}
    prices = Prices(program, costs)
    for rank, order in enumerate(program.orders):
        clock = timeline.makespan
        for action in order[completed[rank] :]:
            timeline.starts[rank].append(clock)
            clock += prices.times(action.stage).get(action.kind, 0.0)
            timeline.ends[rank].append(clock)
    drawn = Timeline(
        program=program,
        starts=timeline.starts,
        ends=timeline.ends,
        work=timeline.work,
        transfers=timeline.transfers,
        costs=costs,
    )
    return drawn, verdict


def program_of(description: Question, cost_fields: Question) -> Program:
    """Return the program that a question describes.

    Raises:
        StrettoError: no such schedule, an option that it does not take, too many actions, a text that is no
            program, orders of other actions.
    """
    costs = cost_fields if description.get("name") == "auto" else {}
    key = {name: value for name, value in description.items() if name != "orders"}
    program, actions = _base(json.dumps([key, costs], sort_keys=True))
    lines = description.get("orders")
    if not lines:
        return program
    if len(lines) != program.ranks:
        raise StrettoError(
            f"{len(lines)} ranks have an order, {program.name} has {program.ranks}", hint="reset the edits"
        )
    orders, pairs = [*program.orders], program.pairs
    for rank, (line, named) in enumerate(zip(lines, actions, strict=True)):
        row = line.split(",") if line else [*named]
        if row == [*named]:
            continue
        if len(row) != len(named) or {*row} != {*named}:
            raise StrettoError(
                f"the edited order is of another program than {program.name} on {program.ranks} ranks with "
                f"{program.microbatches} microbatches",
                hint="reset the edits",
            )
        orders[rank] = order = tuple(map(named.__getitem__, row))
        if pairs:  # only adjacent actions overlap
            adjacent, placement = {*pairwise(order)}, program.placement
            pairs = frozenset(p for p in pairs if placement[p[0].stage] != rank or p in adjacent)
    return replace(program, orders=tuple(orders), pairs=pairs)


@lru_cache(maxsize=16)
def _base(key: str) -> tuple[Program, list[dict[str, Action]]]:
    """Return the program of a description without orders of its own, and each rank's actions by name."""
    description, costs = json.loads(key)
    if text := description.get("text"):
        program = read_text_program(text, description.get("name") or "program")
        program = unlower(program) if program.lowered else program
    else:
        name, ranks, microbatches = (description.get(field) for field in ("name", "ranks", "microbatches"))
        if name not in names():
            close = nearest(str(name), names())
            raise StrettoError(
                f"there is no schedule {name!r}", hint=f"did you mean {close!r}?" if close else None
            )
        settings = {k: v for k, v in description.get("options", {}).items() if v not in (None, "")}
        sizes = [n for n in (ranks, microbatches, *settings.values()) if isinstance(n, int) and n > 0]
        if prod(sizes) > MOST_ACTIONS:
            raise StrettoError(
                f"{name} on {ranks} ranks with {microbatches} microbatches has more than {MOST_ACTIONS:,} "
                "actions",
                hint="fewer ranks or microbatches show the same; `stretto schedule` has no limit",
            )
        if name == "auto":
            settings["costs"] = costs_of(costs, ranks)
        program = schedule(name, ranks, microbatches, **settings)
    program = recompute(program) if description.get("recompute") else program
    return program, [{str(action): action for action in order} for order in program.orders]


def costs_of(cost_fields: Question, ranks: int) -> Costs:
    """Return the costs of a question: those of `Costs` by name; a list of F, I or W is by stage."""
    allowed = [field.name for field in fields(Costs) if field.name not in ("per_stage", "links")]
    for name in cost_fields:
        if name not in allowed:
            raise StrettoError(f"there is no cost {name!r}", hint=f"costs are {', '.join(allowed)}")
    values = dict(cost_fields)
    times: dict[str, Any] = {kind: values.pop(kind, 1.0) for kind in "FIW"}
    lists = [time for time in times.values() if isinstance(time, list)]
    if not lists:
        values |= times
    else:
        stages = len(lists[0])
        if any(len(each) != stages for each in lists):
            raise StrettoError(
                f"the times of stages are {' and '.join(str(len(each)) for each in lists)} numbers",
                hint="give F, I and W as many numbers, or one number for all stages",
            )
        shares = [
            time if isinstance(time, list) else [time * ranks / stages] * stages for time in times.values()
        ]
        values["per_stage"] = list(zip(*shares, strict=True))
    return Costs(**values)


def titled(timeline: Timeline, description: Question) -> Timeline:
    """Return the timeline under a name that tells it from others of its schedule."""
    name = timeline.program.name
    values = {k: v for k, v in description.get("options", {}).items() if v not in (None, "")}
    name = ":".join([name, *(f"{key}={value}" for key, value in values.items())])
    name += ", recomputed" * bool(description.get("recompute")) + ", edited" * bool(description.get("orders"))
    return replace(timeline, program=replace(timeline.program, name=name))


def _versions_table(timelines: Sequence[Timeline]) -> list[list[str]]:
    """Return how many versions of its weights a rank holds at most; empty if all are synchronous."""
    asynchronous = [timeline for timeline in timelines if timeline.program.versions]
    ranks = max((timeline.program.ranks for timeline in asynchronous), default=0)
    rows = [["schedule", *(f"rank {rank}" for rank in range(ranks))]] if asynchronous else []
    for timeline in asynchronous:
        counts = timeline.weight_versions
        cells = [
            ", ".join(str(counts[stage]) for stage in timeline.program.stages_of(rank))
            for rank in range(timeline.program.ranks)
        ]
        rows.append([timeline.program.name, *cells, *[""] * (ranks - len(cells))])
    return rows
