"""The cheapest combination of options, one for each node of a graph, under a limit of memory. Exact.

Nodes have costs, and edges have costs that depend on the options at both ends. Nodes are eliminated one by
one: of a node with two neighbours remains an edge between them, and parallel edges add up. These are the node
and edge elimination of OptCNN (Jia et al. 2018, "Exploring hidden dimensions in parallelizing convolutional
neural networks"), which end in a single node for a network of chains and branches. A node with
more neighbours leaves a table over all of them (bucket elimination, Dechter 1999), so any graph can be
solved; where such a table would be too large, the search branches on the options of a node instead.

Memory adds up like time. If the fastest combination does not fit, every table keeps all combinations that no
other one beats in both. A Lagrangian bound (Handler & Zang 1980) keeps these few: it says how fast a whole
network with a partial combination can be at best, and what cannot beat a known combination is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple

WIDEST = 100_000  # rows of a table, beyond which the search branches
ROUNDING = 1e-12  # relative error of sums


class Cost(NamedTuple):
    """What an option costs: time, and memory of a rank."""

    seconds: float
    bytes: float


@dataclass(frozen=True)
class Problem:
    """Nodes with options, to each of which one is assigned.

    Attributes:
        nodes: by node, the cost of each option that is possible.
        edges: by pair of different nodes, the cost of each pair of options that is possible.
    """

    nodes: Sequence[Mapping[int, Cost]]
    edges: Mapping[tuple[int, int], Mapping[tuple[int, int], Cost]]

    def cost(self, options: Sequence[int]) -> Cost | None:
        """Of one combination; None if it is impossible."""
        parts = [node.get(option) for node, option in zip(self.nodes, options, strict=True)]
        parts += [table.get((options[one], options[other])) for (one, other), table in self.edges.items()]
        if None in parts:
            return None
        some = [part for part in parts if part is not None]
        return Cost(sum(part.seconds for part in some), sum(part.bytes for part in some))


class Solution(NamedTuple):
    """The option of each node, and the cost of all."""

    options: tuple[int, ...]
    cost: Cost


def solve(problem: Problem, limit: float = inf, widest: int = WIDEST) -> Solution | None:
    """The fastest combination of at most `limit` bytes; None if there is none.

    Args:
        widest: rows of a table, beyond which the search branches.
    """
    best: Solution | None = None
    order = count()
    waiting = [(_least(problem), next(order), problem)]
    while waiting:
        bound, _, part = heappop(waiting)
        fastest = inf if best is None else best.cost.seconds
        if bound >= fastest:
            break
        try:
            solution = _fastest(_Tables(part, widest), limit, fastest)
        except _TooWide as wide:
            for option, cost in part.nodes[wide.node].items():
                nodes = [*part.nodes]
                nodes[wide.node] = {option: cost}
                fixed = replace(part, nodes=nodes)
                heappush(waiting, (_least(fixed), next(order), fixed))
            continue
        best = solution or best
    return best


def _least(problem: Problem) -> float:
    """A lower bound of the time: of each node and edge the least, of the options that are left."""
    total = 0.0
    for node in problem.nodes:
        total += min((cost.seconds for cost in node.values()), default=inf)
    for (one, other), table in problem.edges.items():
        left = (
            cost.seconds
            for (here, there), cost in table.items()
            if here in problem.nodes[one] and there in problem.nodes[other]
        )
        total += min(left, default=inf)
    return total


class _TooWide(Exception):
    """A table has too many rows; `node` is the one with the most neighbours and a choice."""

    def __init__(self, node: int) -> None:
        self.node = node


class _Row(NamedTuple):
    """Options of an eliminated node and its neighbours.

    Attributes:
        option: of the node.
        key: the options of the neighbours.
        cost: of the node, and of its edges to the neighbours.
        keys: of each child's neighbours, which are among the node and its neighbours.
    """

    option: int
    key: tuple[int, ...]
    cost: Cost
    keys: tuple[tuple[int, ...], ...]


class _Table(NamedTuple):
    """What is known when a node is eliminated.

    Attributes:
        children: the tables of nodes eliminated before whose first neighbour is this node.
    """

    node: int
    children: tuple[int, ...]
    rows: tuple[_Row, ...]


class _Item(NamedTuple):
    """A combination for eliminated nodes: one node's option, or two combinations together (node -1)."""

    seconds: float
    bytes: float
    node: int
    option: int
    parts: tuple[_Item, ...]


_Values = list[dict[tuple[int, ...], float]]


class _Tables:
    """The tables of a problem in the order of elimination: children come before their parents."""

    def __init__(self, problem: Problem, widest: int) -> None:
        nodes, beside = _without_fixed(problem)
        self.possible = all(nodes)
        if not self.possible:
            return
        order = _order(beside)
        place = {node: at for at, (node, _) in enumerate(order)}
        below = [list[int]() for _ in order]
        self.tables = list[_Table]()
        self.roots = list[int]()
        keys = list[set[tuple[int, ...]]]()
        for at, (node, neighbours) in enumerate(order):
            group = (node, *neighbours)
            edges = [beside[node].get(other) for other in neighbours]
            messages = [
                (tuple(group.index(member) for member in order[child][1]), keys[child]) for child in below[at]
            ]
            rows = _rows([nodes[member] for member in group], edges, messages, widest)
            if rows is None:
                raise _TooWide(max(group, key=lambda one: len(beside[one])))
            self.tables.append(_Table(node, tuple(below[at]), tuple(rows)))
            keys.append({row.key for row in rows})
            parent = min((place[other] for other in neighbours), default=None)
            (self.roots if parent is None else below[parent]).append(at)
        self.possible = all(table.rows for table in self.tables)

    def best(self, weights: Cost) -> Solution:
        """The combination of the least weighted cost."""
        values = self.least(weights)
        options, total = [0] * len(self.tables), Cost(0.0, 0.0)
        waiting: list[tuple[int, tuple[int, ...]]] = [(root, ()) for root in self.roots]
        while waiting:
            at, key = waiting.pop()
            row = min(
                (row for row in self.tables[at].rows if row.key == key),
                key=lambda row: self._below(at, row, values, weights),
            )
            options[self.tables[at].node] = row.option
            total = _sum((total, row.cost))
            waiting += zip(self.tables[at].children, row.keys, strict=True)
        return Solution(tuple(options), total)

    def least(self, weights: Cost) -> _Values:
        """The least weighted cost of a table and those below it, by the options of its neighbours."""
        values: _Values = []
        for at, table in enumerate(self.tables):
            value = dict[tuple[int, ...], float]()
            for row in table.rows:
                value[row.key] = min(value.get(row.key, inf), self._below(at, row, values, weights))
            values.append(value)
        return values

    def rest(self, values: _Values, weights: Cost) -> _Values:
        """The least weighted cost of all that is not below a table, by the options of its neighbours."""
        outside: _Values = [{} for _ in self.tables]
        total = sum(values[root][()] for root in self.roots)
        for root in self.roots:
            outside[root][()] = total - values[root][()]
        for at in reversed(range(len(self.tables))):
            for row in self.tables[at].rows:
                if row.key not in outside[at]:
                    continue
                whole = outside[at][row.key] + self._below(at, row, values, weights)
                for child, key in zip(self.tables[at].children, row.keys, strict=True):
                    without = whole - values[child][key]
                    outside[child][key] = min(outside[child].get(key, inf), without)
        return outside

    def _below(self, at: int, row: _Row, values: _Values, weights: Cost) -> float:
        total = row.cost.seconds * weights.seconds + row.cost.bytes * weights.bytes
        for child, key in zip(self.tables[at].children, row.keys, strict=True):
            total += values[child][key]
        return total

    def fitting(self, limit: float, price: float, below: float) -> Solution | None:
        """The fastest combination of at most `limit` bytes, if one takes no longer than `below`.

        Args:
            price: seconds a byte; any is right, and a good one leaves little to compare.
        """
        paid, sizes = Cost(1.0, price), Cost(0.0, 1.0)
        slowest = (below + price * limit) * (1 + ROUNDING)
        rest_paid = self.rest(self.least(paid), paid)
        rest_bytes = self.rest(self.least(sizes), sizes)
        fronts = list[dict[tuple[int, ...], list[_Item]]]()
        for at, table in enumerate(self.tables):
            items = dict[tuple[int, ...], list[_Item]]()
            for row in table.rows:
                if row.key not in rest_paid[at] or any(
                    key not in fronts[child] for child, key in zip(table.children, row.keys, strict=True)
                ):
                    continue
                some = [_Item(*row.cost, table.node, row.option, ())]
                for child, key in zip(table.children, row.keys, strict=True):
                    some = _front(_joined(one, other) for one in some for other in fronts[child][key])
                items.setdefault(row.key, []).extend(
                    item
                    for item in some
                    if item.seconds + price * item.bytes + rest_paid[at][row.key] <= slowest
                    and item.bytes + rest_bytes[at][row.key] <= limit * (1 + ROUNDING)
                )
            fronts.append({key: _front(some) for key, some in items.items() if some})
        whole = [_Item(0.0, 0.0, -1, -1, ())]
        for root in self.roots:
            whole = _front(_joined(one, other) for one in whole for other in fronts[root].get((), []))
        fitting = [item for item in whole if item.bytes <= limit]
        if not fitting:
            return None
        fastest = min(fitting, key=lambda item: item.seconds)
        options, waiting = [0] * len(self.tables), [fastest]
        while waiting:
            item = waiting.pop()
            if item.node >= 0:
                options[item.node] = item.option
            waiting += item.parts
        return Solution(tuple(options), Cost(fastest.seconds, fastest.bytes))


def _joined(one: _Item, other: _Item) -> _Item:
    return _Item(one.seconds + other.seconds, one.bytes + other.bytes, -1, -1, (one, other))


def _front(items: Iterable[_Item]) -> list[_Item]:
    """Those that no other one beats in time and memory."""
    front = list[_Item]()
    for item in sorted(items, key=lambda item: (item.bytes, item.seconds)):
        if not front or item.seconds < front[-1].seconds:
            front.append(item)
    return front


_Edge = Mapping[tuple[int, int], Cost]


def _without_fixed(problem: Problem) -> tuple[list[dict[int, Cost]], list[dict[int, _Edge]]]:
    """The options of each node, and its edges to others by (option here, option there), without the edges of
    nodes that have no choice: what these cost is part of the options at the other end.
    """
    nodes = [dict(options) for options in problem.nodes]
    beside: list[dict[int, _Edge]] = [{} for _ in nodes]
    for (one, other), table in problem.edges.items():
        beside[one][other] = table
        beside[other][one] = {(there, here): cost for (here, there), cost in table.items()}
    waiting = [node for node, options in enumerate(nodes) if len(options) == 1]
    while waiting:
        node = waiting.pop()
        for fixed in nodes[node]:
            for other, table in beside[node].items():
                choices = len(nodes[other])
                nodes[other] = {
                    option: _sum((cost, table[fixed, option]))
                    for option, cost in nodes[other].items()
                    if (fixed, option) in table
                }
                beside[other].pop(node, None)
                if len(nodes[other]) == 1 < choices:
                    waiting.append(other)
        beside[node] = {}
    return nodes, beside


def _order(beside: Sequence[Mapping[int, object]]) -> list[tuple[int, tuple[int, ...]]]:
    """Nodes, and the neighbours that each has when it is its turn; fewest neighbours first."""
    joined = [set(others) for others in beside]
    order = list[tuple[int, tuple[int, ...]]]()
    waiting = [(len(others), node) for node, others in enumerate(joined)]
    heapify(waiting)
    done = set[int]()
    while waiting:
        degree, node = heappop(waiting)
        if node in done or degree != len(joined[node]):
            continue
        done.add(node)
        order.append((node, tuple(sorted(joined[node]))))
        for other in joined[node]:
            joined[other] = (joined[other] | joined[node]) - {other, node}
            heappush(waiting, (len(joined[other]), other))
    return order


def _rows(
    options: Sequence[Mapping[int, Cost]],
    edges: Sequence[_Edge | None],
    messages: Sequence[tuple[tuple[int, ...], set[tuple[int, ...]]]],
    widest: int,
) -> list[_Row] | None:
    """The possible options of a node and of its neighbours behind it; None: more than `widest`.

    Only what is possible is enumerated, so that nodes that must be alike make small tables however many they
    are: each relation is joined with the rows so far by the places that both have.

    Args:
        edges: to each neighbour; None: there is none.
        messages: of each child, the places of its neighbours among these nodes and their possible options.
    """
    relations = [((0, at), set(edge)) for at, edge in enumerate(edges, 1) if edge is not None]
    places = [0]
    rows: list[tuple[int, ...]] = [(option,) for option in options[0]]
    for scope, possible in sorted((*relations, *messages), key=lambda relation: len(relation[1])):
        shared = [(at, places.index(place)) for at, place in enumerate(scope) if place in places]
        new = [at for at, place in enumerate(scope) if place not in places]
        matching = dict[tuple[int, ...], list[tuple[int, ...]]]()
        for key in possible:
            matching.setdefault(tuple(key[at] for at, _ in shared), []).append(tuple(key[at] for at in new))
        joined = list[tuple[int, ...]]()
        for row in rows:
            for more in matching.get(tuple(row[at] for _, at in shared), ()):
                joined.append((*row, *more))
            if len(joined) > widest:
                return None
        rows = joined
        places += [scope[at] for at in new]
    inverse = [places.index(place) for place in range(len(options))]
    return [
        _row([row[at] for at in inverse], options, edges, messages)
        for row in rows
        if all(row[at] in some for at, some in zip(inverse, options, strict=True))
    ]


def _row(
    chosen: Sequence[int],
    options: Sequence[Mapping[int, Cost]],
    edges: Sequence[_Edge | None],
    messages: Sequence[tuple[tuple[int, ...], set[tuple[int, ...]]]],
) -> _Row:
    costs = [options[0][chosen[0]]]
    costs += [
        edge[chosen[0], other] for edge, other in zip(edges, chosen[1:], strict=True) if edge is not None
    ]
    keys = tuple(tuple(chosen[place] for place in scope) for scope, _ in messages)
    return _Row(chosen[0], tuple(chosen[1:]), _sum(costs), keys)


def _sum(costs: Iterable[Cost]) -> Cost:
    seconds = total = 0.0
    for cost in costs:
        seconds += cost.seconds
        total += cost.bytes
    return Cost(seconds, total)


def _fastest(tables: _Tables, limit: float, below: float) -> Solution | None:
    """The fastest combination within the limit, if one is faster than `below`."""
    if not tables.possible:
        return None
    fast = tables.best(Cost(1.0, 0.0))
    if fast.cost.seconds >= below:
        return None
    if fast.cost.bytes <= limit:
        return fast
    small = tables.best(Cost(0.0, 1.0))
    if small.cost.bytes > limit:
        return None
    known, price = _priced(tables, fast, small, limit)
    best = tables.fitting(limit, price, min(below, known.cost.seconds)) or known
    return best if best.cost.seconds < below else None


def _priced(tables: _Tables, fast: Solution, small: Solution, limit: float) -> tuple[Solution, float]:
    """The seconds a byte for which the fastest combination, with memory paid for, says most about those that
    fit; and the fastest that was met on the way and fits.
    """
    while True:
        price = (small.cost.seconds - fast.cost.seconds) / (fast.cost.bytes - small.cost.bytes)
        middle = tables.best(Cost(1.0, price))
        line = small.cost.seconds + price * small.cost.bytes
        if middle.cost.seconds + price * middle.cost.bytes >= line - ROUNDING * line:
            return small, price
        if middle.cost.bytes <= limit:
            small = middle
        else:
            fast = middle
