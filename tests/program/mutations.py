"""Programs of every sort, and mutations of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

from stretto.errors import StrettoError
from stretto.program import Action, ActionKind, Program, ScheduleError, check, lower, names, schedule
from stretto.program.text import parse_action
from stretto.program.transforms.activations import offload, recompute
from stretto.program.transforms.sharding import gather


def program(
    placement: tuple[int, ...], microbatches: int, *orders: str, lowered: bool = False, **fields: object
) -> Program:
    """A program written out, a rank a line."""
    rows = tuple(tuple(map(parse_action, order.split())) for order in orders)
    return replace(
        Program(name="test", placement=placement, microbatches=microbatches, orders=rows, lowered=lowered),
        **fields,
    )  # type: ignore[arg-type]


def pair(text: str) -> tuple[Action, Action]:
    first, second = map(parse_action, text.split())
    return first, second


def split(program: Program) -> Program:
    """Every B as I, with its W two actions later."""
    orders: list[tuple[Action, ...]] = []
    for order in program.orders:
        out: list[Action] = []
        late: list[Action] = []
        for action in order:
            if action.kind is ActionKind.B:
                out.append(action._replace(kind=ActionKind.I))
                late.append(action._replace(kind=ActionKind.W))
            else:
                out.append(action)
            if len(late) > 2:
                out.append(late.pop(0))
        orders.append((*out, *late))
    return replace(program, orders=tuple(orders))


def pipedream(ranks: int, microbatches: int) -> Program:
    """Narayanan et al. 2019, "PipeDream", section 3: an update after every backward."""
    orders: list[tuple[Action, ...]] = []
    versions: list[tuple[int, ...]] = []
    for r in range(ranks):
        start = min(ranks - r, microbatches)
        order, row = [Action(r, ActionKind.F, i) for i in range(start)], [0] * start
        for b in range(microbatches):
            order += [Action(r, ActionKind.B, b), Action(r, ActionKind.UPDATE, b)]
            if len(row) < microbatches:
                order.append(Action(r, ActionKind.F, len(row)))
                row.append(b + 1)
        orders.append(tuple(order))
        versions.append(tuple(row))
    return Program(
        name="pipedream",
        placement=tuple(range(ranks)),
        microbatches=microbatches,
        orders=tuple(orders),
        versions=tuple(versions),
    )


def two_ways(microbatches: int = 2) -> Program:
    """Two ranks, two copies: even microbatches go down, odd ones up, with an overlapped pair on each rank."""
    down, up = range(0, microbatches, 2), range(1, microbatches, 2)
    orders: list[tuple[Action, ...]] = []
    for r in range(2):
        # stage s of copy 0 is s on rank s, of copy 1 is 2 + s on rank 1 - s
        lines = [(r, down), (3 - r, up)]
        first = [
            Action(s, kind, i) for s, line in lines[:: 1 - 2 * r] for kind in (ActionKind.F,) for i in line
        ]
        back = [Action(s, ActionKind.B, i) for s, line in lines[:: 2 * r - 1] for i in line]
        orders.append((*first, *back))
    return Program(
        name="two-ways", placement=(0, 1, 1, 0), microbatches=microbatches, orders=tuple(orders), copies=2
    )


def by_hand() -> list[Program]:
    """Small programs of sorts that few schedules have."""
    overlapped = program(
        (0, 1), 3, "0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2", pairs=frozenset({pair("0F2 0B0")})
    )
    crossed = program(
        (0, 1),
        3,
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F1 1B0 1F2 1B1 1B2",
        pairs=frozenset({pair("0F2 0B0"), pair("1F1 1B0"), pair("1F2 1B1")}),
    )
    late = program(
        (0, 1),
        4,
        "0F0 0F1 0B0 0B1 0U1 0F2 0F3 0B2 0B3 0U3",
        "1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U",
        versions=((0, 0, 1, 1), (0, 0, 0, 0)),
    )
    gathered = program(
        (0, 1),
        2,
        "0UNSHARD 0F0 0F1 0RESHARD 0UNSHARD 0B0 0B1 0RESHARD",
        "1F0 1B0 1F1 1B1",
    )
    recomputing = program(
        (0, 1),
        2,
        "0F0 0F1 0OFFLOAD1 0RECOMPUTE0 0B0 0RELOAD1 0B1",
        "1F0 1RECOMPUTE0 1I0 1F1 1OFFLOAD1 1W0 1RELOAD1 1I1 1W1",
    )
    return [
        overlapped,
        crossed,
        late,
        gathered,
        recomputing,
        pipedream(2, 3),
        pipedream(3, 4),
        two_ways(),
        two_ways(3),
    ]


def registered() -> list[Program]:
    """A small program of every schedule that there is, with fitting numbers of ranks and microbatches."""
    programs: list[Program] = []
    for name in names():
        if name == "auto":  # searched: takes long, and is made of the same stuff
            continue
        for ranks, microbatches in ((2, 3), (2, 4)):
            try:
                programs.append(schedule(name, ranks, microbatches))
            except StrettoError:
                continue
            break
    return programs


def transformed(plain: list[Program]) -> list[Program]:
    """With repeated forwards, offloading and gathering, where they can be."""
    programs: list[Program] = []
    for program in plain:
        if program.trains and not any(
            a.kind is ActionKind.RECOMPUTE for order in program.orders for a in order
        ):
            programs.append(offload(recompute(program, range(0, program.stages, 2)), ahead=0))
            if not program.versions:
                programs.append(gather(recompute(program), limit=2))
    return programs


TIED = {2: ((0, 1),), 3: ((0, 2), (1, 2)), 4: ((0, 3), (1, 2, 3)), 8: ((0, 7),)}


def seeds() -> tuple[list[Program], list[Program]]:
    """Programs before and after lowering."""
    plain = [
        schedule("naive", 3, 2),
        schedule("1f1b", 3, 3),
        schedule("1f1b", 1, 2),
        split(schedule("1f1b", 2, 3)),
        schedule("interleaved", 2, 3, chunks=2),
        program((0, 1, 1, 0), 1, "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"),
        *registered(),
        *by_hand(),
    ]
    plain += transformed([plain[1], plain[3], plain[4], by_hand()[1]])
    lowered: list[Program] = []
    for at, example in enumerate(plain):
        tied = () if example.versions else TIED.get(example.depth, ())
        lowered += [lower(example, tied, lookahead=(1, 0, 4)[at % 3]), lower(example, lookahead=0)]
    return plain, lowered


def mutate(program: Program, random: Random) -> Program:
    """One swap, drop, duplicate, move or shuffle, of actions or of what else the program says."""
    fields = [fact for fact in _FIELDS if getattr(program, fact)]
    if fields and random.random() < 0.25:
        return _mutate_facts(program, random.choice(fields), random)
    orders = [list(order) for order in program.orders]
    row = random.choice([order for order in orders if len(order) > 1])
    at = random.randrange(len(row))
    match random.choice([0, 1, 1, 1, 2, 3, 4, 4, 5, 6, 7]):
        case 0:
            to = random.randrange(len(row))
            row[at], row[to] = row[to], row[at]
        case 1:
            to = min(at + 1, len(row) - 1)
            row[at], row[to] = row[to], row[at]
        case 2:
            del row[at]
        case 3:
            random.choice([row, random.choice(orders)]).insert(random.randrange(len(row)), row[at])
        case 4:
            to = max(0, at + random.randrange(-3, 4))
            row.insert(to, row.pop(at))
        case 5:
            part = row[at : at + 4]
            random.shuffle(part)
            row[at : at + 4] = part
        case 6:
            mine = program.stages_of(program.placement[row[at].stage])
            row[at] = row[at]._replace(stage=random.choice(mine))
        case _:
            stage, kind, i = row[at]
            if kind is ActionKind.B:
                row[at : at + 1] = [Action(stage, ActionKind.I, i), Action(stage, ActionKind.W, i)]
            else:
                row[at] = Action(stage, kind, None if i is None else random.randrange(program.microbatches))
    return replace(program, orders=tuple(map(tuple, orders)))


_FIELDS = ("pairs", "versions", "tied")


def _mutate_facts(program: Program, fact: str, random: Random) -> Program:
    """Another pair, another version, a set of tied stages less."""
    if fact == "tied":
        at = random.randrange(len(program.tied))
        return replace(program, tied=program.tied[:at] + program.tied[at + 1 :])
    if fact == "pairs":
        order = [a for a in random.choice(program.orders) if a.kind.is_compute]
        neighbours = list(pairwise(order))
        likely = [
            (a, b) for a, b in neighbours if a.kind is ActionKind.F and b.kind in (ActionKind.B, ActionKind.I)
        ]
        if random.random() < 0.2:
            likely = [(a, b) for a in order for b in order]
        return replace(program, pairs=program.pairs ^ {random.choice(likely or neighbours)})
    versions = [list(row) for row in program.versions]
    row = random.choice(versions)
    at = random.randrange(len(row))
    row[at] = max(0, row[at] + random.choice([-1, 1]))
    return replace(program, versions=tuple(map(tuple, versions)))


def accepts(program: Program, transport: str = "rendezvous") -> bool:
    try:
        check(program, transport)
    except ScheduleError:
        return False
    return True
