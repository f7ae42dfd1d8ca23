"""The cost on a cluster of each split of an operator, and of each conversion between splits.

As in OptCNN (Jia et al. 2018) a step takes the sum of three kinds of time: of each operator's
computation, of the tensors that are moved between operators, and of the gradients that are summed over the
ranks with the same parameters. Communication is assumed not to overlap with computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stretto.autosplit.network import OUTPUT, Choice, Operator, OperatorGraph, Product, Split
from stretto.autosplit.solver import Cost
from stretto.planner.machines.cluster import Cluster, Collective, NodeGroup
from stretto.planner.machines.device import Precision
from stretto.planner.time.collectives import collective_seconds
from stretto.planner.time.operators import matmul_seconds, pass_seconds


class CollectiveCall(NamedTuple):
    """One collective over all ranks.

    Attributes:
        bytes: size of the whole tensor; of an all-to-all, of the part that one rank has before it.
    """

    kind: Collective
    bytes: float

    def sent(self, ranks: int) -> float:
        """Return the bytes that leave one rank, by the best algorithm (Patarasuk & Yuan 2009)."""
        part = self.bytes * (ranks - 1) / ranks
        return 2 * part if self.kind == "all-reduce" else part


def conversion_calls(
    before: Split, after: Split, size: float, ranks: int, *, gradient: bool, partial: bool
) -> tuple[CollectiveCall, ...]:
    """Return the collectives of a tensor of `size` bytes that changes its split, forward and backward.

    Args:
        gradient: the tensor needs a gradient.
        partial: each rank has only a term of the gradient of the whole tensor, as has the input of a layer
            that is split by output features; the backward sums them.
    """
    if before == after:
        return (CollectiveCall("all-reduce", size),) if partial and gradient else ()
    if after == "whole":
        gather = CollectiveCall("all-gather", size)
        return (gather, CollectiveCall("reduce-scatter", size)) if partial and gradient else (gather,)
    if before == "whole":
        return (CollectiveCall("all-gather", size),) if gradient else ()
    exchange = CollectiveCall("all-to-all", size / ranks)
    return (exchange, exchange) if gradient else (exchange,)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that a network runs on, and its numbers.

    Attributes:
        cluster: as many devices as there are ranks.
        precision: precision of matrix products.
        parameter: bytes of a parameter, and of its gradient.
        states: bytes of a parameter's optimiser states.
    """

    cluster: Cluster
    ranks: int
    precision: Precision
    parameter: int = 4
    states: int = 8

    def seconds(self, calls: Sequence[CollectiveCall]) -> float:
        """Return the time of collectives, one after the other."""
        group = NodeGroup(self.ranks, min(self.ranks, self.cluster.node))
        return sum(collective_seconds(self.cluster, call.kind, call.bytes, group) for call in calls)


class RankShare(NamedTuple):
    """One rank's part of an operator.

    Attributes:
        compute: seconds of products and passes, forward and backward, and of the update.
        inside: its own collectives: sums of partial outputs, statistics, and the conversion of its output.
        gradients: bytes of gradients that are summed over all ranks.
        parameters: trained parameters.
        memory: bytes of parameters, gradients, states and tensors saved for the backward.
    """

    compute: float
    inside: tuple[CollectiveCall, ...]
    gradients: float
    parameters: int
    memory: float


class SplitCosts:
    """Costs of the choices of a network on a machine."""

    def __init__(self, network: OperatorGraph, machine: Machine) -> None:
        self.network, self.machine = network, machine
        self.by_name: Mapping[str, Operator] = {operator.name: operator for operator in network.operators}
        counts = (operator.weight + operator.bias for operator in network.operators if not operator.shared)
        trained = sum(counts) * machine.parameter
        # gradients of all layers are summed in large buckets, of which a layer pays its share
        summed = machine.seconds([CollectiveCall("all-reduce", trained)])
        self._per_byte = summed / trained if trained else 0.0

    def share(self, operator: Operator, choice: Choice) -> RankShare:
        """Return one rank's part of an operator."""
        machine, style = self.machine, choice.style
        ranks = machine.ranks
        split = ranks if choice.takes != "whole" or choice.leaves != "whole" else 1
        if operator.shared:
            trained = frozen = 0
        elif style == "column":
            trained, frozen = (operator.weight + operator.bias) // ranks, operator.frozen // ranks
        elif style == "row":
            trained, frozen = operator.weight // ranks + operator.bias, operator.frozen // ranks
        else:
            trained, frozen = operator.weight + operator.bias, operator.frozen
        device, compute = machine.cluster.device, self._product_seconds(operator, choice)
        passes = 0.0
        if operator.moved:  # the backward reads the gradient and the saved input, and writes a gradient
            passes = (1 + operator.gradient) * pass_seconds(device, "add", operator.moved / split)
        compute += passes
        if trained:
            touched = trained * (3 * machine.parameter + 2 * machine.states)
            # an update is one pass over the parameters of all layers, so that no layer pays for its launch
            compute += pass_seconds(device, "adam", touched) - pass_seconds(device, "adam", 0.0)
        inside = list[CollectiveCall]()
        if style == "row":
            inside.append(CollectiveCall("all-reduce", operator.size))
        if style == "batch" and operator.statistics:
            # every rank's mean, variance and number of elements, in 32 bits or more; two sums in the backward
            element = max(4, operator.element)
            gathered = ranks * (2 * operator.statistics + 1) * element
            inside.append(CollectiveCall("all-gather", gathered))
            inside.append(CollectiveCall("all-reduce", 2 * operator.statistics * element))
        inside += conversion_calls(
            choice.leaves, choice.output, operator.size, ranks, gradient=operator.gradient, partial=False
        )
        memory = trained * (2 * machine.parameter + machine.states) + frozen * machine.parameter
        saved = operator.saved / (1 if choice.leaves == "whole" else ranks)
        if choice.output == "whole" != choice.leaves:
            saved += operator.size
        gradients = trained * machine.parameter if style == "batch" else 0
        return RankShare(compute, tuple(inside), gradients, trained, memory + saved)

    def node(self, operator: Operator, choice: Choice) -> Cost:
        """Return the time and memory of an operator."""
        share = self.share(operator, choice)
        seconds = share.compute + self.machine.seconds(share.inside) + share.gradients * self._per_byte
        return Cost(seconds, share.memory)

    def calls_between(
        self, source: Operator, before: Choice, target: Operator, after: Choice
    ) -> tuple[CollectiveCall, ...] | None:
        """Return the collectives between two operators, or None if nothing there can convert."""
        partial = after.style == "column"
        if before.output == after.takes and not partial:
            return ()
        if before.output != after.takes and not target.converts:
            return None
        return conversion_calls(
            before.output,
            after.takes,
            source.size,
            self.machine.ranks,
            gradient=source.gradient,
            partial=partial,
        )

    def edge(self, source: Operator, before: Choice, target: Operator, after: Choice) -> Cost | None:
        """Return the time and memory between two operators, or None if their splits do not fit together."""
        calls = self.calls_between(source, before, target, after)
        if calls is None:
            return None
        saved = 0.0
        if before.output != after.takes and target.kind != OUTPUT:
            if after.takes == "whole":
                saved = source.size
            elif before.output != "whole":
                saved = source.size / self.machine.ranks
        return Cost(self.machine.seconds(calls), saved)

    def _product_seconds(self, operator: Operator, choice: Choice) -> float:
        product = operator.product
        if product is None:
            return 0.0
        ranks = self.machine.ranks
        if choice.style == "batch":
            product = replace(product, rows=product.rows // ranks)
        elif choice.style == "column":
            product = replace(product, columns=product.columns // ranks)
        elif choice.style == "row":
            product = replace(product, inner=product.inner // ranks)
        seconds = self._matmul(product)
        if operator.weight:  # the gradient of the weight
            seconds += self._matmul(replace(product, rows=product.inner, inner=product.rows))
        if any(self.by_name[name].gradient for name in operator.inputs):
            seconds += self._matmul(replace(product, inner=product.columns, columns=product.inner))
        return seconds

    def _matmul(self, product: Product) -> float:
        return matmul_seconds(
            device=self.machine.cluster.device,
            m=product.rows,
            n=product.columns,
            k=product.inner,
            precision=self.machine.precision,
            batch=product.groups,
        )
