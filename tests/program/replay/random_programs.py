"""Programs drawn at random that do a step's work and complete: any placement, any legal order."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from random import Random

from stretto.program import Action, ActionKind, Program

Orders = list[list[Action]]


def random_program(random: Random) -> Program:
    """Up to 4 ranks, 5 stages and 4 microbatches, one or two copies of the weights, whole and split
    backwards; the order in which a random player would do the work."""
    ranks, depth, copies = random.randint(1, 4), random.randint(1, 5), random.choice([1, 1, 2])
    microbatches = random.randint(1, 4)
    placement = tuple(random.randrange(ranks) for _ in range(depth * copies))
    split = random.random()
    todo: list[tuple[Action, list[Action]]] = []  # with what each needs
    for i in range(microbatches):
        first = depth * random.randrange(copies)
        makes: Action | None = None  # what yields the gradient of the stage's output
        for stage in reversed(range(first, first + depth)):
            forward = Action(stage, ActionKind.F, i)
            todo.append((forward, [Action(stage - 1, ActionKind.F, i)] if stage > first else []))
            needs = [forward] if makes is None else [forward, makes]
            makes = Action(stage, ActionKind.I if random.random() < split else ActionKind.B, i)
            todo.append((makes, needs))
            if makes.kind is ActionKind.I:
                todo.append((Action(stage, ActionKind.W, i), [makes]))
    orders: Orders = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while todo:
        ready = [work for work in todo if done.issuperset(work[1])]
        action, needs = random.choice(ready)
        todo.remove((action, needs))
        done.add(action)
        orders[placement[action.stage]].append(action)
    unpaired = Program(
        name="random",
        placement=placement,
        microbatches=microbatches,
        orders=tuple(map(tuple, orders)),
        copies=copies,
    )
    return replace(unpaired, pairs=_pairs(unpaired, random))


def _pairs(program: Program, random: Random) -> frozenset[tuple[Action, Action]]:
    """Some of the (F, B) neighbours of two microbatches."""
    pairs: set[tuple[Action, Action]] = set()
    for order in program.orders:
        at = 0
        while at + 1 < len(order):
            first, second = order[at : at + 2]
            apart = first.microbatch != second.microbatch
            if first.kind is ActionKind.F and second.kind is ActionKind.B and apart and random.random() < 0.6:
                pairs.add((first, second))
                at += 1
            at += 1
    return frozenset(pairs)


def with_updates(program: Program, random: Random) -> Program:
    """The program made asynchronous: an update of a stage after some of its gradients and after the last."""
    orders: Orders = []
    versions = [[0] * program.microbatches for _ in program.placement]
    for order in program.orders:
        last = {a.stage: a for a in order if a.kind in (ActionKind.B, ActionKind.W)}
        updates: defaultdict[int, int] = defaultdict(int)
        orders.append([])
        for action in order:
            stage, kind, i = action
            orders[-1].append(action)
            if kind is ActionKind.F:
                assert i is not None
                versions[stage][i] = updates[stage]
            elif kind in (ActionKind.B, ActionKind.W) and (last[stage] == action or random.random() < 0.4):
                orders[-1].append(Action(stage, ActionKind.UPDATE, i))
                updates[stage] += 1
    return replace(
        program, orders=tuple(map(tuple, orders)), versions=tuple(map(tuple, versions)), pairs=frozenset()
    )


def with_moves(program: Program, random: Random) -> Program:
    """Some activations repeated or moved away and back, some stages gathered before their work."""
    orders: Orders = []
    for order in program.orders:
        moved = list(order)
        for action in order:
            if action.kind is not ActionKind.F or random.random() < 0.5:
                continue
            stage, _, i = action
            begin = moved.index(action)
            end = next(
                at for at, a in enumerate(moved) if a in ((stage, ActionKind.B, i), (stage, ActionKind.I, i))
            )
            if random.random() < 0.5:
                moved.insert(end, Action(stage, ActionKind.RECOMPUTE, i))
            if random.random() < 0.7:
                out = random.randint(begin + 1, end)
                moved.insert(out, Action(stage, ActionKind.OFFLOAD, i))
                moved.insert(random.randint(out + 1, end + 1), Action(stage, ActionKind.RELOAD, i))
        for stage in {action.stage for action in order}:
            if random.random() < 0.5 and not program.versions:
                _gather(moved, stage, random)
        orders.append(moved)
    neighbours = {pair for order in orders for pair in pairwise(order)}
    return replace(program, orders=tuple(map(tuple, orders)), pairs=program.pairs & neighbours)


def _gather(order: list[Action], stage: int, random: Random) -> None:
    """Gather the stage's parameters before its first action and release them after its last, with a release
    and another gather somewhere between."""
    places = [at for at, action in enumerate(order) if action.stage == stage]
    order.insert(places[-1] + 1, Action(stage, ActionKind.RESHARD))
    between = random.choice(places[1:]) if len(places) > 1 else None
    if between is not None:
        order[between:between] = [Action(stage, ActionKind.RESHARD), Action(stage, ActionKind.UNSHARD)]
    order.insert(random.randint(0, places[0]), Action(stage, ActionKind.UNSHARD))
