"""The best split of each operator of a network, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import combinations, product
from types import MappingProxyType

from stretto.autosplit.costs import Exchange, Exchanges, Machine, Prices, Share
from stretto.autosplit.network import NATURAL, Choice, Network, Operator, StyleName
from stretto.autosplit.solver import Cost, Problem, solve
from stretto.errors import StrettoError, nearest
from stretto.planner.memory.fits import RESERVE


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A tensor whose split changes between two operators, or whose gradient is summed there.

    Attributes:
        source, target: names of the operators.
        before, after: its splits.
        exchanges: collectives of forward and backward.
        sent: bytes that one rank sends in a step.
        seconds: of all of them.
    """

    source: str
    target: str
    before: str
    after: str
    exchanges: Exchanges
    sent: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Line:
    """One operator of a plan.

    Attributes:
        share: what one rank has of it.
        seconds: of a step: computation, its own collectives, and the sum of its gradients.
        sent: bytes that one rank sends in a step for them.
    """

    operator: Operator
    choice: Choice
    share: Share
    seconds: float
    sent: float


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """The fastest splits of a network's operators.

    Attributes:
        machine: what it was planned for.
        limit: bytes of a rank that it may need at most.
        lines: by operator, in the order of the forward.
        conversions: where splits change.
        cost: of the whole: seconds of a step, bytes of a rank.
        beside: the same network by other rules: time and memory; None: it cannot be split like that.
        notes: what was assumed.
    """

    machine: Machine
    limit: float
    lines: tuple[Line, ...]
    conversions: tuple[Conversion, ...]
    cost: Cost
    beside: Mapping[str, Cost | None]
    notes: tuple[str, ...]

    @property
    def styles(self) -> dict[str, Choice]:
        """The choice of each operator whose module has parameters."""
        return {line.operator.name: line.choice for line in self.lines if line.choice.style is not None}

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by what they are for."""
        inside = sum(self.machine.seconds(line.share.inside) for line in self.lines)
        compute = sum(line.share.compute for line in self.lines)
        return {
            "compute": compute,
            "gradients": sum(line.seconds for line in self.lines) - compute - inside,
            "inside operators": inside,
            "between operators": sum(one.seconds for one in self.conversions),
        }

    @property
    def sent(self) -> float:
        """Bytes that one rank sends in a step."""
        return sum(line.sent for line in self.lines) + sum(one.sent for one in self.conversions)


def plan_splits(
    network: Network,
    machine: Machine,
    memory: float | None = None,
    fix: Mapping[str, StyleName] = MappingProxyType({}),
) -> SplitPlan:
    """The fastest splits that fit, over all combinations.

    Args:
        memory: bytes that a rank may need; None: the device's, without what a process usually needs beside
            tensors.
        fix: styles by name of the module, in which `*` stands for any text.

    Raises:
        StrettoError: nothing fits, there is an operator that no split suits, or a style is fixed that its
            module cannot have.
    """
    limit = max(0.0, machine.cluster.device.memory - RESERVE[1]) if memory is None else memory
    choices = network.choices(machine.ranks)
    for operator, some in zip(network.operators, choices, strict=True):
        if not some:
            raise StrettoError(
                f"{operator.name} ({operator.kind}) cannot be split over {machine.ranks} ranks, "
                f"and cannot be replicated: its output has the shape {list(operator.shape)}",
                hint="a batch that divides over the ranks, or other inputs and outputs of the plan",
            )
    prices = Prices(network, machine)
    problem = _problem(network, prices, choices)
    fixed = replace(problem, nodes=_fixed(problem, network, choices, fix))
    best = solve(fixed, limit)
    if best is None:
        raise _nothing(fixed, limit)
    beside = {name: _restricted(problem, network, choices, rule) for name, rule in RULES.items()}
    chosen = [some[at] for some, at in zip(choices, best.options, strict=True)]
    lines, conversions = _described(prices, chosen)
    return SplitPlan(
        machine=machine,
        limit=limit,
        lines=tuple(lines),
        conversions=tuple(conversions),
        cost=best.cost,
        beside=beside,
        notes=network.notes,
    )


def _fixed(
    problem: Problem, network: Network, choices: Sequence[Sequence[Choice]], fix: Mapping[str, StyleName]
) -> list[Mapping[int, Cost]]:
    """The choices of each node that agree with the fixed styles."""
    nodes = [*problem.nodes]
    modules = [one.module for one in network.operators if one.styles]
    for pattern, style in fix.items():
        if style not in NATURAL:
            raise StrettoError(f"fix: {style!r} is no style", hint=" or ".join(map(repr, NATURAL)))
        if not any(fnmatchcase(name, pattern) for name in modules):
            near = nearest(pattern, modules)
            raise StrettoError(
                f"fix: {pattern!r} matches no module with parameters",
                hint=f"did you mean {near!r}?" if near else None,
            )
        for at, operator in enumerate(network.operators):
            if not operator.styles or not fnmatchcase(operator.module, pattern):
                continue
            nodes[at] = {i: cost for i, cost in nodes[at].items() if choices[at][i].style == style}
            if not nodes[at]:
                able = dict.fromkeys(str(choice.style) for choice in choices[at])
                raise StrettoError(
                    f"fix: {operator.module!r} ({operator.kind}) cannot have the style {style!r}",
                    hint=f"it can have {', '.join(able)}",
                )
    return nodes


def _batch(_: Operator, style: StyleName) -> bool:
    return style == "batch"


def _tensor(operator: Operator, style: StyleName) -> bool:
    return style in (("column", "row") if {"column", "row"} & {*operator.styles} else ("replicate",))


def _weird_trick(operator: Operator, style: StyleName) -> bool:
    return _tensor(operator, style) if len(operator.shape) == 2 else style == "batch"


def _replicate(_: Operator, style: StyleName) -> bool:
    return style == "replicate"


# which styles a module may have under the rules that plans are compared with
RULES: Mapping[str, Callable[[Operator, StyleName], bool]] = {
    "data parallel": _batch,
    "tensor parallel": _tensor,
    "one weird trick": _weird_trick,  # Krizhevsky 2014: convolutions by batch, linear layers by features
    "replicated": _replicate,
}


def _problem(network: Network, prices: Prices, choices: Sequence[Sequence[Choice]]) -> Problem:
    """The choices as a graph with costs."""
    place = {one.name: at for at, one in enumerate(network.operators)}
    nodes = [
        {at: prices.node(operator, choice) for at, choice in enumerate(some)}
        for operator, some in zip(network.operators, choices, strict=True)
    ]
    edges = dict[tuple[int, int], dict[tuple[int, int], Cost]]()
    for target, operator in enumerate(network.operators):
        for name in dict.fromkeys(operator.inputs):
            source = place[name]
            edges[source, target] = {
                (i, j): cost
                for (i, before), (j, after) in product(enumerate(choices[source]), enumerate(choices[target]))
                if (cost := prices.edge(network.operators[source], before, operator, after)) is not None
            }
    for one, other, same in _alike(network):
        first, second = sorted((place[one], place[other]))
        alike = {
            (i, j)
            for (i, here), (j, there) in product(enumerate(choices[first]), enumerate(choices[second]))
            if same(here) == same(there)
        }
        known = edges.get((first, second), dict.fromkeys(alike, Cost(0.0, 0.0)))
        edges[first, second] = {pair: cost for pair, cost in known.items() if pair in alike}
    return Problem(nodes, edges)


def _alike(network: Network) -> Iterator[tuple[str, str, Callable[[Choice], object]]]:
    """Pairs of operators, and what of their choices must be the same: everything, of modules that share
    parameters; the output's split, of what one module is called with several times.
    """
    by_name = {one.name: one for one in network.operators}
    for tie in network.ties:
        for one, other in combinations((by_name[name] for name in tie), 2):
            yield one.name, other.name, lambda choice: (choice.style, choice.takes, choice.output)
            if one.module and one.module == other.module:
                for read, instead in zip(one.inputs, other.inputs, strict=False):
                    if read != instead:
                        yield read, instead, lambda choice: choice.output


def _restricted(
    problem: Problem,
    network: Network,
    choices: Sequence[Sequence[Choice]],
    rule: Callable[[Operator, StyleName], bool],
) -> Cost | None:
    """The fastest combination of a rule's choices, whether it fits or not."""
    nodes = [
        {at: cost for at, cost in node.items() if (style := some[at].style) is None or rule(operator, style)}
        for node, operator, some in zip(problem.nodes, network.operators, choices, strict=True)
    ]
    best = solve(replace(problem, nodes=nodes))
    return None if best is None else best.cost


def _nothing(problem: Problem, limit: float) -> StrettoError:
    turned = Problem(
        [{at: Cost(cost.bytes, 0.0) for at, cost in node.items()} for node in problem.nodes],
        {
            pair: {key: Cost(cost.bytes, 0.0) for key, cost in table.items()}
            for pair, table in problem.edges.items()
        },
    )
    least = solve(turned)
    if least is None:
        return StrettoError(
            "no combination of splits suits all operators: something that is split cannot be converted where "
            "it is read",
            hint="let modules be between functions that need the whole batch, such as nn.Flatten for view",
        )
    gib = least.cost.seconds / 2**30
    return StrettoError(
        f"no split fits: a rank needs at least {gib:.2f} GiB, and has {limit / 2**30:.2f} GiB for tensors",
        hint="more devices, devices with more memory, or a smaller batch",
    )


def _described(prices: Prices, choices: Sequence[Choice]) -> tuple[list[Line], list[Conversion]]:
    """The operators of a combination, and the conversions between them."""
    machine, operators = prices.machine, prices.network.operators
    lines, conversions = list[Line](), list[Conversion]()
    chosen = {one.name: choice for one, choice in zip(operators, choices, strict=True)}
    for operator, choice in zip(operators, choices, strict=True):
        share = prices.share(operator, choice)
        summed = Exchange("all-reduce", share.gradients).sent(machine.ranks)
        sent = sum(one.sent(machine.ranks) for one in share.inside) + summed
        seconds = prices.node(operator, choice).seconds
        lines.append(Line(operator=operator, choice=choice, share=share, seconds=seconds, sent=sent))
        for name in dict.fromkeys(operator.inputs):
            before = chosen[name].output
            exchanges = prices.moved(prices.by_name[name], chosen[name], operator, choice) or ()
            if exchanges or before != choice.takes:
                one = Conversion(
                    source=name,
                    target=operator.name,
                    before=before,
                    after=choice.takes,
                    exchanges=exchanges,
                    sent=sum(exchange.sent(machine.ranks) for exchange in exchanges),
                    seconds=machine.seconds(exchanges),
                )
                conversions.append(one)
    return lines, conversions
