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
    """Time and memory of a rank."""

    seconds: float
    bytes: float


@dataclass(frozen=True)
class OptionGraph:
    """Nodes with options, to each of which one is assigned.

    Attributes:
        nodes: the cost of each possible option, by node.
        edges: the cost of each possible pair of options, by pair of different nodes.
    """

    nodes: Sequence[Mapping[int, Cost]]
    edges: Mapping[tuple[int, int], Mapping[tuple[int, int], Cost]]

    def cost(self, options: Sequence[int]) -> Cost | None:
        """Return the cost of one combination, or None if it is impossible."""
        parts = [node.get(option) for node, option in zip(self.nodes, options, strict=True)]
        parts += [edge.get((options[i], options[j])) for (i, j), edge in self.edges.items()]
        possible = [part for part in parts if part is not None]
        if len(possible) < len(parts):
            return None
        return Cost(sum(part.seconds for part in possible), sum(part.bytes for part in possible))


class Assignment(NamedTuple):
    """The option of each node, and the cost of all."""

    options: tuple[int, ...]
    cost: Cost


def solve(problem: OptionGraph, limit: float = inf, widest: int = WIDEST) -> Assignment | None:
    """Return the fastest combination of at most `limit` bytes, or None without one.

    Args:
        widest: rows of a table, beyond which the search branches.
    """
    best: Assignment | None = None
    order = count()
    waiting = [(_lower_bound(problem), next(order), problem)]
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
                heappush(waiting, (_lower_bound(fixed), next(order), fixed))
            continue
        best = solution or best
    return best


def _lower_bound(problem: OptionGraph) -> float:
    """Return a lower bound of the time: the least of each node and edge, over the options that are left."""
    total = 0.0
    for node in problem.nodes:
        total += min((cost.seconds for cost in node.values()), default=inf)
    for (i, j), edge in problem.edges.items():
        left = (
            cost.seconds
            for (option, other), cost in edge.items()
            if option in problem.nodes[i] and other in problem.nodes[j]
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
        option: option of the node.
        key: options of the neighbours.
        cost: cost of the node and of its edges to the neighbours.
        keys: options of each child's neighbours, which are among the node and its neighbours.
    """

    option: int
    key: tuple[int, ...]
    cost: Cost
    keys: tuple[tuple[int, ...], ...]


class _Table(NamedTuple):
    """The combinations of a node that is eliminated, and of its neighbours.

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

    def __init__(self, problem: OptionGraph, widest: int) -> None:
        nodes, adjacent = _without_fixed(problem)
        self.possible = all(nodes)
        if not self.possible:
            return
        order = _elimination_order(adjacent)
        position = {node: i for i, (node, _) in enumerate(order)}
        children = [list[int]() for _ in order]
        self.tables = list[_Table]()
        self.roots = list[int]()
        keys = list[set[tuple[int, ...]]]()
        for i, (node, neighbours) in enumerate(order):
            group = (node, *neighbours)
            edges = [adjacent[node].get(other) for other in neighbours]
            messages = [
                (tuple(group.index(member) for member in order[child][1]), keys[child])
                for child in children[i]
            ]
            rows = _rows([nodes[member] for member in group], edges, messages, widest)
            if rows is None:
                raise _TooWide(max(group, key=lambda member: len(adjacent[member])))
            self.tables.append(_Table(node, tuple(children[i]), tuple(rows)))
            keys.append({row.key for row in rows})
            parent = min((position[other] for other in neighbours), default=None)
            (self.roots if parent is None else children[parent]).append(i)
        self.possible = all(table.rows for table in self.tables)

    def best(self, weights: Cost) -> Assignment:
        """Return the combination of the least weighted cost."""
        values = self.least_costs(weights)
        options, total = [0] * len(self.tables), Cost(0.0, 0.0)
        waiting: list[tuple[int, tuple[int, ...]]] = [(root, ()) for root in self.roots]
        while waiting:
            index, key = waiting.pop()
            table = self.tables[index]
            row = min(
                (row for row in table.rows if row.key == key),
                key=lambda row: _row_cost(table, row, values, weights),
            )
            options[table.node] = row.option
            total = _sum((total, row.cost))
            waiting += zip(table.children, row.keys, strict=True)
        return Assignment(tuple(options), total)

    def least_costs(self, weights: Cost) -> _Values:
        """Return each table's least weighted cost with those below it, by the options of its neighbours."""
        values: _Values = []
        for table in self.tables:
            value = dict[tuple[int, ...], float]()
            for row in table.rows:
                value[row.key] = min(value.get(row.key, inf), _row_cost(table, row, values, weights))
            values.append(value)
        return values

    def costs_outside(self, weights: Cost) -> _Values:
        """Return the least weighted cost of all that is not below a table, by its neighbours' options."""
        values = self.least_costs(weights)
        outside: _Values = [{} for _ in self.tables]
        total = sum(values[root][()] for root in self.roots)
        for root in self.roots:
            outside[root][()] = total - values[root][()]
        for i, table in reversed([*enumerate(self.tables)]):
            for row in table.rows:
                if row.key not in outside[i]:
                    continue
                total = outside[i][row.key] + _row_cost(table, row, values, weights)
                for child, key in zip(table.children, row.keys, strict=True):
                    without = total - values[child][key]
                    outside[child][key] = min(outside[child].get(key, inf), without)
        return outside

    def fitting(self, limit: float, price: float, below: float) -> Assignment | None:
        """Return the fastest combination of at most `limit` bytes, if one takes no longer than `below`.

        Args:
            price: seconds a byte; any is right, and a good one leaves little to compare.
        """
        slowest = (below + price * limit) * (1 + ROUNDING)
        outside_paid = self.costs_outside(Cost(1.0, price))
        outside_bytes = self.costs_outside(Cost(0.0, 1.0))
        fronts = list[dict[tuple[int, ...], list[_Item]]]()
        for i, table in enumerate(self.tables):
            items = dict[tuple[int, ...], list[_Item]]()
            for row in table.rows:
                if row.key not in outside_paid[i] or any(
                    key not in fronts[child] for child, key in zip(table.children, row.keys, strict=True)
                ):
                    continue
                front = [_Item(*row.cost, table.node, row.option, ())]
                for child, key in zip(table.children, row.keys, strict=True):
                    front = _joined_front(front, fronts[child][key])
                items.setdefault(row.key, []).extend(
                    item
                    for item in front
                    if item.seconds + price * item.bytes + outside_paid[i][row.key] <= slowest
                    and item.bytes + outside_bytes[i][row.key] <= limit * (1 + ROUNDING)
                )
            fronts.append({key: _front(combinations) for key, combinations in items.items() if combinations})
        front = [_Item(0.0, 0.0, -1, -1, ())]
        for root in self.roots:
            front = _joined_front(front, fronts[root].get((), []))
        fitting = [item for item in front if item.bytes <= limit]
        if not fitting:
            return None
        fastest = min(fitting, key=lambda item: item.seconds)
        options, waiting = [0] * len(self.tables), [fastest]
        while waiting:
            item = waiting.pop()
            if item.node >= 0:
                options[item.node] = item.option
            waiting += item.parts
        return Assignment(tuple(options), Cost(fastest.seconds, fastest.bytes))


def _row_cost(table: _Table, row: _Row, values: _Values, weights: Cost) -> float:
    """Return the weighted cost of a row and of the tables below it."""
    total = row.cost.seconds * weights.seconds + row.cost.bytes * weights.bytes
    for child, key in zip(table.children, row.keys, strict=True):
        total += values[child][key]
    return total


def _joined_front(items: Iterable[_Item], others: Sequence[_Item]) -> list[_Item]:
    """Return the combinations of two items, one of each, that no other one beats."""
    return _front(
        _Item(item.seconds + other.seconds, item.bytes + other.bytes, -1, -1, (item, other))
        for item in items
        for other in others
    )


def _front(items: Iterable[_Item]) -> list[_Item]:
    """Return the items that no other one beats in time and memory."""
    front = list[_Item]()
    for item in sorted(items, key=lambda item: (item.bytes, item.seconds)):
        if not front or item.seconds < front[-1].seconds:
            front.append(item)
    return front


_Edge = Mapping[tuple[int, int], Cost]


def _without_fixed(problem: OptionGraph) -> tuple[list[dict[int, Cost]], list[dict[int, _Edge]]]:
    """Return the options of each node, and its edges to others by (its option, the other's option), without
    the edges of nodes that have no choice: their cost is part of the options at the other end.
    """
    nodes = [dict(options) for options in problem.nodes]
    adjacent: list[dict[int, _Edge]] = [{} for _ in nodes]
    for (i, j), edge in problem.edges.items():
        adjacent[i][j] = edge
        adjacent[j][i] = {(other, option): cost for (option, other), cost in edge.items()}
    waiting = [node for node, options in enumerate(nodes) if len(options) == 1]
    while waiting:
        node = waiting.pop()
        for fixed in nodes[node]:
            for other, edge in adjacent[node].items():
                choices = len(nodes[other])
                nodes[other] = {
                    option: _sum((cost, edge[fixed, option]))
                    for option, cost in nodes[other].items()
                    if (fixed, option) in edge
                }
                adjacent[other].pop(node, None)
                if len(nodes[other]) == 1 < choices:
                    waiting.append(other)
        adjacent[node] = {}
    return nodes, adjacent


def _elimination_order(adjacent: Sequence[Mapping[int, object]]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the nodes, fewest neighbours first, and the neighbours that each has when it is eliminated."""
    joined = [set(others) for others in adjacent]
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
    """Return the possible options of a node and of its neighbours, or None if there are more than `widest`.

    Only possible options are enumerated, so that nodes that must be alike make small tables however many they
    are: each relation is joined with the rows so far by the members that both have.

    Args:
        edges: edge to each neighbour, or None without one.
        messages: by child, its neighbours as indices of these nodes, and their possible options.
    """
    relations = [((0, i), set(edge)) for i, edge in enumerate(edges, 1) if edge is not None]
    members = [0]
    combinations: list[tuple[int, ...]] = [(option,) for option in options[0]]
    for scope, possible in sorted((*relations, *messages), key=lambda relation: len(relation[1])):
        shared = [(i, members.index(member)) for i, member in enumerate(scope) if member in members]
        new = [i for i, member in enumerate(scope) if member not in members]
        matching = dict[tuple[int, ...], list[tuple[int, ...]]]()
        for key in possible:
            matching.setdefault(tuple(key[i] for i, _ in shared), []).append(tuple(key[i] for i in new))
        joined = list[tuple[int, ...]]()
        for combination in combinations:
            for more in matching.get(tuple(combination[i] for _, i in shared), ()):
                joined.append((*combination, *more))
            if len(joined) > widest:
                return None
        combinations = joined
        members += [scope[i] for i in new]
    inverse = [members.index(member) for member in range(len(options))]
    rows = list[_Row]()
    for combination in combinations:
        option, *others = chosen = [combination[i] for i in inverse]
        if any(choice not in possible for choice, possible in zip(chosen, options, strict=True)):
            continue
        costs = [options[0][option]]
        costs += [edge[option, other] for edge, other in zip(edges, others, strict=True) if edge is not None]
        keys = tuple(tuple(chosen[member] for member in scope) for scope, _ in messages)
        rows.append(_Row(option, tuple(others), _sum(costs), keys))
    return rows


def _sum(costs: Iterable[Cost]) -> Cost:
    seconds = total = 0.0
    for cost in costs:
        seconds += cost.seconds
        total += cost.bytes
    return Cost(seconds, total)


def _fastest(tables: _Tables, limit: float, below: float) -> Assignment | None:
    """Return the fastest combination within the limit, if one is faster than `below`."""
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
    # the price of memory, in seconds a byte, that bounds the combinations that fit most tightly
    while True:
        price = (small.cost.seconds - fast.cost.seconds) / (fast.cost.bytes - small.cost.bytes)
        middle = tables.best(Cost(1.0, price))
        line = small.cost.seconds + price * small.cost.bytes
        if middle.cost.seconds + price * middle.cost.bytes >= line - ROUNDING * line:
            break
        if middle.cost.bytes <= limit:
            small = middle
        else:
            fast = middle
    best = tables.fitting(limit, price, min(below, small.cost.seconds)) or small
    return best if best.cost.seconds < below else None
