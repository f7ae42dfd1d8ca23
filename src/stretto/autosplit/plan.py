"""The best split of each operator of a network, and of the same network by simpler rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import combinations, product
from types import MappingProxyType

from stretto.autosplit.costs import CollectiveCall, Machine, RankShare, SplitCosts
from stretto.autosplit.network import NATURAL, Choice, Operator, OperatorGraph, StyleName
from stretto.autosplit.solver import Cost, OptionGraph, solve
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
        seconds: time of all of them.
    """

    source: str
    target: str
    before: str
    after: str
    exchanges: tuple[CollectiveCall, ...]
    sent: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PlannedOperator:
    """One operator of a plan.

    Attributes:
        share: one rank's part of it.
        seconds: time of a step: computation, its own collectives, and the sum of its gradients.
        sent: bytes that one rank sends in a step for them.
    """

    operator: Operator
    choice: Choice
    share: RankShare
    seconds: float
    sent: float


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """The fastest splits of a network's operators.

    Attributes:
        machine: the devices that it is planned for.
        limit: bytes of a rank that it may need at most.
        lines: the operators in the order of the forward.
        conversions: the changes of splits between them.
        cost: seconds of a step and bytes of a rank.
        rules: the cost of the same network by other rules, or None if a rule allows no combination.
        notes: assumptions.
    """

    machine: Machine
    limit: float
    lines: tuple[PlannedOperator, ...]
    conversions: tuple[Conversion, ...]
    cost: Cost
    rules: Mapping[str, Cost | None]
    notes: tuple[str, ...]

    @property
    def styles(self) -> dict[str, Choice]:
        """The choice of each operator whose module has parameters."""
        return {line.operator.name: line.choice for line in self.lines if line.choice.style is not None}

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by purpose."""
        inside = sum(self.machine.seconds(line.share.inside) for line in self.lines)
        compute = sum(line.share.compute for line in self.lines)
        return {
            "compute": compute,
            "gradients": sum(line.seconds for line in self.lines) - compute - inside,
            "inside operators": inside,
            "between operators": sum(conversion.seconds for conversion in self.conversions),
        }

    @property
    def sent(self) -> float:
        """Bytes that one rank sends in a step."""
        return sum(line.sent for line in self.lines) + sum(change.sent for change in self.conversions)


def _tensor_style(operator: Operator, style: StyleName) -> bool:
    return style in (("column", "row") if {"column", "row"} & {*operator.styles} else ("replicate",))


# the styles that a module may have under the rules that plans are compared with
RULES: Mapping[str, Callable[[Operator, StyleName], bool]] = {
    "data parallel": lambda operator, style: style == "batch",
    "tensor parallel": _tensor_style,
    # Krizhevsky 2014: convolutions by batch, linear layers by features
    "one weird trick": lambda operator, style: (
        _tensor_style(operator, style) if len(operator.shape) == 2 else style == "batch"
    ),
    "replicated": lambda operator, style: style == "replicate",
}


def plan_splits(
    network: OperatorGraph,
    machine: Machine,
    memory: float | None = None,
    fix: Mapping[str, StyleName] = MappingProxyType({}),
) -> SplitPlan:
    """Return the fastest splits that fit, over all combinations.

    Args:
        memory: bytes that a rank may need; default: the device's, without the usual needs of a process
            besides tensors.
        fix: styles by name of the module, in which `*` stands for any text.

    Raises:
        StrettoError: nothing fits, there is an operator that no split suits, or a style is fixed that its
            module cannot have.
    """
    limit = max(0.0, machine.cluster.device.memory - RESERVE[1]) if memory is None else memory
    choices = network.choices(machine.ranks)
    for operator, splits in zip(network.operators, choices, strict=True):
        if not splits:
            raise StrettoError(
                f"{operator.name} ({operator.kind}) cannot be split over {machine.ranks} ranks, "
                f"and cannot be replicated: its output has the shape {list(operator.shape)}",
                hint="a batch that divides over the ranks, or other inputs and outputs of the plan",
            )
    costs = SplitCosts(network, machine)
    graph = _option_graph(costs, choices)
    fixed = replace(graph, nodes=_with_fixed_styles(graph, network, choices, fix))
    best = solve(fixed, limit)
    if best is None:
        raise _nothing_fits(fixed, limit)
    rules = dict[str, Cost | None]()
    for name, allows in RULES.items():  # whether it fits or not
        nodes = [
            {
                i: cost
                for i, cost in node.items()
                if (style := splits[i].style) is None or allows(operator, style)
            }
            for node, operator, splits in zip(graph.nodes, network.operators, choices, strict=True)
        ]
        by_rule = solve(replace(graph, nodes=nodes))
        rules[name] = None if by_rule is None else by_rule.cost
    chosen = [splits[option] for splits, option in zip(choices, best.options, strict=True)]
    lines, conversions = _described(costs, chosen)
    return SplitPlan(
        machine=machine,
        limit=limit,
        lines=tuple(lines),
        conversions=tuple(conversions),
        cost=best.cost,
        rules=rules,
        notes=network.notes,
    )


def _with_fixed_styles(
    graph: OptionGraph,
    network: OperatorGraph,
    choices: Sequence[Sequence[Choice]],
    fix: Mapping[str, StyleName],
) -> list[Mapping[int, Cost]]:
    """Return the choices of each node that agree with the fixed styles."""
    nodes = [*graph.nodes]
    modules = [operator.module for operator in network.operators if operator.styles]
    for pattern, style in fix.items():
        if style not in NATURAL:
            raise StrettoError(f"fix: {style!r} is no style", hint=" or ".join(map(repr, NATURAL)))
        if not any(fnmatchcase(name, pattern) for name in modules):
            similar = nearest(pattern, modules)
            raise StrettoError(
                f"fix: {pattern!r} matches no module with parameters",
                hint=f"did you mean {similar!r}?" if similar else None,
            )
        for index, operator in enumerate(network.operators):
            if not operator.styles or not fnmatchcase(operator.module, pattern):
                continue
            nodes[index] = {i: cost for i, cost in nodes[index].items() if choices[index][i].style == style}
            if not nodes[index]:
                able = dict.fromkeys(str(choice.style) for choice in choices[index])
                raise StrettoError(
                    f"fix: {operator.module!r} ({operator.kind}) cannot have the style {style!r}",
                    hint=f"it can have {', '.join(able)}",
                )
    return nodes


def _option_graph(costs: SplitCosts, choices: Sequence[Sequence[Choice]]) -> OptionGraph:
    """Return the choices as a graph with costs."""
    operators = costs.network.operators
    index = {operator.name: i for i, operator in enumerate(operators)}
    nodes = [
        {i: costs.node(operator, choice) for i, choice in enumerate(splits)}
        for operator, splits in zip(operators, choices, strict=True)
    ]
    edges = dict[tuple[int, int], dict[tuple[int, int], Cost]]()
    for target, operator in enumerate(operators):
        for name in dict.fromkeys(operator.inputs):
            source = index[name]
            edges[source, target] = {
                (i, j): cost
                for (i, before), (j, after) in product(enumerate(choices[source]), enumerate(choices[target]))
                if (cost := costs.edge(operators[source], before, operator, after)) is not None
            }
    for name, other, key in _tied(costs.network):
        left, right = sorted((index[name], index[other]))
        alike = {
            (i, j)
            for (i, choice), (j, tied) in product(enumerate(choices[left]), enumerate(choices[right]))
            if key(choice) == key(tied)
        }
        edge = edges.get((left, right), dict.fromkeys(alike, Cost(0.0, 0.0)))
        edges[left, right] = {pair: cost for pair, cost in edge.items() if pair in alike}
    return OptionGraph(nodes, edges)


def _tied(network: OperatorGraph) -> Iterator[tuple[str, str, Callable[[Choice], object]]]:
    """Yield pairs of operators, and a key in which their choices must agree: everything, of modules that
    share parameters; the output's split, of the inputs of a module that is called several times.
    """
    by_name = {operator.name: operator for operator in network.operators}
    for tie in network.ties:
        for operator, other in combinations((by_name[name] for name in tie), 2):
            yield operator.name, other.name, lambda choice: (choice.style, choice.takes, choice.output)
            if operator.module and operator.module == other.module:
                for source, other_source in zip(operator.inputs, other.inputs, strict=False):
                    if source != other_source:
                        yield source, other_source, lambda choice: choice.output


def _nothing_fits(graph: OptionGraph, limit: float) -> StrettoError:
    sizes = OptionGraph(
        [{i: Cost(cost.bytes, 0.0) for i, cost in node.items()} for node in graph.nodes],
        {
            pair: {key: Cost(cost.bytes, 0.0) for key, cost in edge.items()}
            for pair, edge in graph.edges.items()
        },
    )
    smallest = solve(sizes)
    if smallest is None:
        return StrettoError(
            "no combination of splits suits all operators: something that is split cannot be converted where "
            "it is read",
            hint="let modules be between functions that need the whole batch, such as nn.Flatten for view",
        )
    gib = smallest.cost.seconds / 2**30
    return StrettoError(
        f"no split fits: a rank needs at least {gib:.2f} GiB, and has {limit / 2**30:.2f} GiB for tensors",
        hint="more devices, devices with more memory, or a smaller batch",
    )


def _described(
    costs: SplitCosts, choices: Sequence[Choice]
) -> tuple[list[PlannedOperator], list[Conversion]]:
    """Return the operators of a combination, and the conversions between them."""
    machine, operators = costs.machine, costs.network.operators
    lines, conversions = list[PlannedOperator](), list[Conversion]()
    chosen = {operator.name: choice for operator, choice in zip(operators, choices, strict=True)}
    for operator, choice in zip(operators, choices, strict=True):
        share = costs.share(operator, choice)
        summed = CollectiveCall("all-reduce", share.gradients).sent(machine.ranks)
        sent = sum(call.sent(machine.ranks) for call in share.inside) + summed
        seconds = costs.node(operator, choice).seconds
        lines.append(
            PlannedOperator(operator=operator, choice=choice, share=share, seconds=seconds, sent=sent)
        )
        for name in dict.fromkeys(operator.inputs):
            before = chosen[name].output
            calls = costs.calls_between(costs.by_name[name], chosen[name], operator, choice) or ()
            if calls or before != choice.takes:
                conversions.append(
                    Conversion(
                        source=name,
                        target=operator.name,
                        before=before,
                        after=choice.takes,
                        exchanges=calls,
                        sent=sum(call.sent(machine.ranks) for call in calls),
                        seconds=machine.seconds(calls),
                    )
                )
    return lines, conversions
