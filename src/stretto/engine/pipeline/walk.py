"""Splits the backward of any module into input gradient (I) and weight gradient (W) by its autograd graph.

Autograd computes only the requested gradients. I requests those of the inputs, and records the incoming
gradient of every node that also has weights; W starts from those nodes and requests the weights. This works
for any module; linear layers that defer their weight gradients (engine/parallel/tensor/linear.py) are
cheaper. The graph is alive until W.

Gradients that cannot be deferred are computed in I, with the same result: weights that enter a
torch.autograd.Function (its backward always computes everything); weights used several times in a stage with
no operation in between, such as the bias of a layer that runs twice; an entire stage with a compiled part or
a reentrant checkpoint. A non-reentrant checkpoint is repeated for every layer in it: let the schedule
recompute instead. Hooks on activations run in both I and W.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# (roots, gradients, keep graph, create graph, inputs, unreachable inputs allowed, accumulate)
_run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward  # pyright: ignore

# their backward cannot run for requested inputs only, or with a retained graph
_INDIVISIBLE = frozenset({"CompiledFunctionBackward", "CheckpointFunctionBackward"})


_Arrival = tuple[GradientEdge, Tensor]  # an edge of the graph and the gradient that arrived there


@dataclass
class WeightWork:
    """The work that I defers to W.

    Attributes:
        alone: for each node whose weights no other node uses: incoming gradients, and the weights.
        shared: for each node whose weights other nodes also use: incoming gradients, and the edges towards
            the weights.
        ends: edges from which all paths lead to weights.
    """

    alone: list[tuple[list[_Arrival], list[GradientEdge]]]
    shared: list[tuple[list[_Arrival], list[GradientEdge]]]
    ends: list[_Arrival]


class GraphSplit:
    """Splits the backwards of one stage.

    Args:
        parameters: parameters of the stage. If none requires a gradient, I is the complete backward.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._learns = any(p.requires_grad for p in parameters)

    def input_gradients(
        self,
        roots: Sequence[GradientEdge | Tensor],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
    ) -> WeightWork:
        """Run I: accumulate the gradient of each input in its `.grad`.

        Args:
            roots: outputs of the stage, or the edges at which the backward enters their graph.
            gradients: gradient of each root; None means 1 for a tensor of one element, otherwise the output
                is skipped.
            inputs: leaves. Without any (a first stage) everything is deferred to W.

        Returns:
            The argument of `weight_gradients`, to be used once. It keeps the graph alive.
        """
        starts, arriving = _starts(roots, gradients)
        if not inputs:
            return WeightWork([], [], list(zip(starts, arriving, strict=True)))
        if not self._learns:
            return _undivided(starts, arriving)
        targets = list({id(x): x for x in inputs}.values())
        ends = [get_gradient_edge(x) for x in targets]
        cut = _cut(starts, [end.node for end in ends])
        if cut is None:
            return _undivided(starts, arriving)
        return _run_inputs(cut, starts, arriving, targets, ends)

    def weight_gradients(self, work: WeightWork) -> None:
        """Run W: add the deferred weight gradients into `parameter.grad`, and free the graph."""
        alone = work.alone
        shared = work.shared
        ends = work.ends
        work.alone = []
        work.shared = []
        work.ends = []
        while alone:  # from the output, freeing memory on the way
            arrivals, leaves = alone.pop()
            places, gradients = zip(*arrivals, strict=True)
            del arrivals
            _run_backward(places, gradients, False, False, tuple(leaves), True, True)
            del places, gradients, leaves
        while shared:
            arrivals, ways = shared.pop()
            places, gradients = zip(*arrivals, strict=True)
            del arrivals
            computed = _run_backward(places, gradients, False, False, tuple(ways), True, False)
            ends += [(way, dw) for way, dw in zip(ways, computed, strict=True) if dw is not None]
            del places, gradients, ways, computed
        if ends:
            _run_all(ends)


def _starts(
    roots: Sequence[GradientEdge | Tensor], gradients: Sequence[Tensor | None]
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Return the outputs that have a gradient, as edges, and their gradients."""
    starts, arriving = list[GradientEdge](), list[Tensor]()
    for root, dy in zip(roots, gradients, strict=True):
        if isinstance(root, Tensor):
            if not root.requires_grad:
                continue
            if dy is None and root.numel() == 1:
                dy = torch.ones_like(root)
            root = get_gradient_edge(root)
        if dy is not None:
            starts.append(root)
            arriving.append(dy)
    return starts, arriving


def _run_all(arrivals: list[_Arrival]) -> None:
    """Run the complete backward from these edges; empties the list, which frees memory on the way."""
    places, gradients = zip(*arrivals, strict=True)
    arrivals.clear()
    _run_backward(places, gradients, False, False, (), True, True)


def _undivided(starts: list[GradientEdge], arriving: list[Tensor]) -> WeightWork:
    if starts:
        _run_all(list(zip(starts, arriving, strict=True)))
    return WeightWork([], [], [])


def _run_inputs(
    cut: _Cut,
    starts: list[GradientEdge],
    arriving: list[Tensor],
    targets: list[Tensor],
    ends: list[GradientEdge],
) -> WeightWork:
    """Run autograd for the inputs and record the incoming gradients of the sources."""
    wanted = (*ends, *cut.early, *(place for source in cut.sources for place in source.places))
    computed: list[Tensor | None] = (
        _run_backward(tuple(starts), tuple(arriving), bool(cut.sources), False, wanted, True, False)
        if starts
        else [None] * len(wanted)
    )
    gradients = iter(computed)
    for x in targets:
        dx = next(gradients)
        if dx is not None:
            x.grad = dx if x.grad is None else x.grad + dx
    now = [(leaf, dw) for leaf in cut.early if (dw := next(gradients)) is not None]
    work = WeightWork([], [], [])
    for source in cut.sources:
        arrivals = [(place, dy) for place in source.places if (dy := next(gradients)) is not None]
        if arrivals and source.leaves is not None:
            work.alone.append((arrivals, source.leaves))
        elif arrivals:
            work.shared.append((arrivals, source.ways))
    work.ends += [(s, dy) for s, dy in zip(starts, arriving, strict=True) if s.node in cut.late]
    if now:  # through autograd, so that the weights' hooks run
        _run_all(now)
    return work


@dataclass(frozen=True)
class _Source:
    """A node on a path to an input, with branches that lead to weights only.

    Attributes:
        places: the edges at which gradients arrive.
        ways: the edges that W follows.
        leaves: the weights behind them, or None if other sources share these.
    """

    places: list[GradientEdge]
    ways: list[GradientEdge]
    leaves: list[GradientEdge] | None


@dataclass(frozen=True)
class _Cut:
    """A graph divided into the part of I and the parts of W.

    Attributes:
        sources: in the order of the forward.
        early: weights whose gradients I computes.
        late: nodes of the outputs at which W begins.
    """

    sources: list[_Source]
    early: list[GradientEdge]
    late: set[Node]


class _Graph:
    """The nodes of one backward, and those of them on a path to an input."""

    def __init__(self, starts: Iterable[GradientEdge], inputs: Iterable[Node]) -> None:
        self.roots = [start.node for start in starts]
        self.edges = edges = dict[Node, Any]()  # outgoing edges of each node: (next node or None, its slot)
        self.into = into = dict[Node, list[tuple[Node | None, int]]]()  # incoming edges
        for start in starts:
            into.setdefault(start.node, []).append((None, start.output_nr))
        waiting = list(into)
        while waiting:
            node = waiting.pop()
            edges[node] = onward = node.next_functions
            for nearer, slot in onward:
                if nearer is None:
                    continue
                if nearer in into:
                    into[nearer].append((node, slot))
                else:
                    into[nearer] = [(node, slot)]
                    waiting.append(nearer)
        self.passed = passed = {node for node in inputs if node in into}  # on a path to an input
        waiting = list(passed)
        while waiting:
            for node, _ in into[waiting.pop()]:
                if node is not None and node not in passed:
                    passed.add(node)
                    waiting.append(node)

    def branches(self) -> list[tuple[Node | None, Node]]:
        """Return (source, first node) of every path to weights only; those from an output have source
        None.
        """
        branches = dict[tuple[Node | None, Node], None]()
        for root in self.roots:
            if root not in self.passed:
                branches[None, root] = None
        for node in self.passed:
            for nearer, _ in self.edges[node]:
                if nearer is not None and nearer not in self.passed:
                    branches[node, nearer] = None
        return list(branches)

    def below(self, node: Node) -> list[Node]:
        """Return the node and all nodes behind it."""
        reached, waiting = {node: None}, [node]
        while waiting:
            for nearer, _ in self.edges[waiting.pop()]:
                if nearer is not None and nearer not in reached:
                    reached[nearer] = None
                    waiting.append(nearer)
        return list(reached)

    def places(self, node: Node) -> list[GradientEdge]:
        """Return the edges at which gradients arrive at the node."""
        return [GradientEdge(node, slot) for slot in sorted({slot for _, slot in self.into[node]})]


@dataclass
class _Group:
    """Branches that share weights with each other, and with no other branch."""

    branches: list[tuple[Node | None, Node]]
    below: list[list[Node]]  # the nodes of each branch

    @property
    def sources(self) -> set[Node | None]:
        return {source for source, _ in self.branches}

    @property
    def alone(self) -> bool:
        """True if one run of the engine reaches the weights by these branches only."""
        return len(self.branches) == 1 or len(self.sources) == 1

    @property
    def severable(self) -> bool:
        """True if no branch begins inside another: then the full gradient at its first node comes from its
        source.
        """
        if len(self.branches) == 1:
            return True
        count = Counter(node for nodes in self.below for node in nodes)
        return all(count[first] == 1 for _, first in self.branches)

    @property
    def repeatable(self) -> bool:
        """True if running the sources again computes no more than requested."""
        return not any(isinstance(source, BackwardCFunction) for source in self.sources)


def _groups(graph: _Graph) -> list[_Group]:
    """Return all branches, merged (union-find) if they share nodes."""
    branches = graph.branches()
    below = [graph.below(first) for _, first in branches]
    head = list(range(len(branches)))

    def find(at: int) -> int:
        while head[at] != at:
            at = head[at]
        return at

    owner = dict[Node, int]()
    for at, nodes in enumerate(below):
        for node in nodes:
            other = find(owner.setdefault(node, at))
            head[max(other, find(at))] = min(other, find(at))
    groups = defaultdict[int, _Group](lambda: _Group([], []))
    for at, branch in enumerate(branches):
        group = groups[find(at)]
        group.branches.append(branch)
        group.below.append(below[at])
    return list(groups.values())


def _cut(starts: list[GradientEdge], inputs: list[Node]) -> _Cut | None:
    """Divide the graph; return None if W would have no work, or if the graph must run at once."""
    graph = _Graph(starts, inputs)
    if any(type(node).__name__ in _INDIVISIBLE for node in graph.edges):
        return None
    early, late = list[_Group](), list[_Group]()
    for group in _groups(graph):
        (late if group.repeatable and (group.alone or group.severable) else early).append(group)
    shared = {source for group in late if not group.alone for source in group.sources}
    for group in list(late):  # one run serves all branches of a source: to the weights, or only to the edges
        if group.alone and not group.severable and group.sources & shared - {None}:
            late.remove(group)
            early.append(group)
    leaves = [GradientEdge(leaf, 0) for leaf in _leaves(early)]
    if not late or any(_watched(leaf.node) for leaf in leaves):
        return None
    return _Cut(
        _sources(graph, late, shared),
        leaves,
        {first for group in late for source, first in group.branches if source is None},
    )


def _watched(leaf: Any) -> bool:
    """True if the weight has hooks, which would run twice: when its gradient is computed, then
    accumulated.
    """
    return bool(leaf.variable._backward_hooks)


def _sources(graph: _Graph, late: list[_Group], shared: set[Node | None]) -> list[_Source]:
    first, leaves = defaultdict[Node, set[Node]](set), defaultdict[Node, list[Node]](list)
    for group in late:
        for source, node in group.branches:
            if source is not None:
                first[source].add(node)
        if group.alone:
            (source,) = group.sources
            if source is not None:
                leaves[source] += _leaves([group])
    sources = list[_Source]()
    for node in sorted(first, key=lambda node: node._sequence_nr()):
        ways = {(nearer, slot): None for nearer, slot in graph.edges[node] if nearer in first[node]}
        ends = None if node in shared else [GradientEdge(leaf, 0) for leaf in leaves[node]]
        sources.append(_Source(graph.places(node), [GradientEdge(*way) for way in ways], ends))
    return sources


def _leaves(groups: Iterable[_Group]) -> list[Node]:
    """Return the weights of these groups, without duplicates."""
    return list(
        {n: None for g in groups for nodes in g.below for n in nodes if type(n).__name__ == "AccumulateGrad"}
    )
