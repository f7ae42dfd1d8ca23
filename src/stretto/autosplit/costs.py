"""What each split of an operator, and each conversion between splits, costs on a cluster.

As in OptCNN (Jia et al. 2018) a step takes the sum of three kinds of time: of each operator's
computation, of the tensors that are moved between operators, and of the gradients that are summed over the
ranks with the same parameters. Communication is not taken to overlap with computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stretto.autosplit.network import OUTPUT, Choice, Network, Operator, Product, Split
from stretto.autosplit.solver import Cost
from stretto.planner.machines.cluster import Cluster, Collective, Group
from stretto.planner.machines.device import Precision
from stretto.planner.time.collectives import collective_seconds
from stretto.planner.time.operators import matmul_seconds, pass_seconds


class Exchange(NamedTuple):
    """One collective over all ranks.

    Attributes:
        bytes: of the whole tensor; of an all-to-all, what one rank has before it.
    """

    kind: Collective
    bytes: float

    def sent(self, ranks: int) -> float:
        """Bytes that leave one rank, with the algorithm that needs the fewest (Patarasuk & Yuan 2009)."""
        part = self.bytes * (ranks - 1) / ranks
        return 2 * part if self.kind == "all-reduce" else part


Exchanges = tuple[Exchange, ...]


def conversion(
    before: Split, after: Split, size: float, ranks: int, *, gradient: bool, partial: bool
) -> Exchanges:
    """The collectives of a tensor of `size` bytes that changes its split, forward and backward.

    Args:
        gradient: the tensor needs a gradient.
        partial: each rank has only a term of the gradient of the whole tensor, as has the input of a layer
            that is split by output features; the backward sums them.
    """
    if before == after:
        return (Exchange("all-reduce", size),) if partial and gradient else ()
    if after == "whole":
        gather = Exchange("all-gather", size)
        return (gather, Exchange("reduce-scatter", size)) if partial and gradient else (gather,)
    if before == "whole":
        return (Exchange("all-gather", size),) if gradient else ()
    there = Exchange("all-to-all", size / ranks)
    return (there, there) if gradient else (there,)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a network runs on.

    Attributes:
        cluster: of as many devices as there are ranks.
        precision: of matrix products.
        parameter: bytes of a parameter, and of its gradient.
        states: bytes of a parameter's optimiser states.
    """

    cluster: Cluster
    ranks: int
    precision: Precision
    parameter: int = 4
    states: int = 8

    def seconds(self, exchanges: Sequence[Exchange]) -> float:
        """Of collectives, one after the other."""
        group = Group(self.ranks, min(self.ranks, self.cluster.node))
        return sum(collective_seconds(self.cluster, one.kind, one.bytes, group) for one in exchanges)


class Share(NamedTuple):
    """What a rank has of an operator.

    Attributes:
        compute: seconds of products and passes, forward and backward, and of the update.
        inside: collectives of its own: sums of partial outputs, statistics, and the conversion of its output.
        gradients: bytes of gradients that are summed over all ranks.
        parameters: trained parameters.
        memory: bytes of parameters, gradients, states and what is kept for the backward.
    """

    compute: float
    inside: Exchanges
    gradients: float
    parameters: int
    memory: float


class Prices:
    """Costs of the choices of a network on a machine."""

    def __init__(self, network: Network, machine: Machine) -> None:
        self.network, self.machine = network, machine
        self.by_name: Mapping[str, Operator] = {one.name: one for one in network.operators}
        held = (one.weight + one.bias for one in network.operators if not one.shared)
        trained = sum(held) * machine.parameter
        # gradients of all layers are summed in large buckets, of which a layer pays its share
        whole = machine.seconds([Exchange("all-reduce", trained)])
        self._per_byte = whole / trained if trained else 0.0

    def share(self, operator: Operator, choice: Choice) -> Share:
        """What one rank has of an operator."""
        ranks = self.machine.ranks
        trained, frozen = _held(operator, choice, ranks)
        split = ranks if choice.takes != "whole" or choice.leaves != "whole" else 1
        compute = self._product(operator, choice) + self._passes(operator, split)
        compute += self._update(trained)
        inside = list[Exchange]()
        if choice.style == "row":
            inside.append(Exchange("all-reduce", operator.size))
        if choice.style == "batch" and operator.statistics:
            inside += _statistics(operator, ranks)
        inside += conversion(
            choice.leaves, choice.output, operator.size, ranks, gradient=operator.gradient, partial=False
        )
        summed = trained * self.machine.parameter if choice.style == "batch" else 0
        states = trained * (2 * self.machine.parameter + self.machine.states)
        states += frozen * self.machine.parameter
        kept = operator.saved / (1 if choice.leaves == "whole" else ranks)
        if choice.output == "whole" != choice.leaves:
            kept += operator.size
        return Share(compute, tuple(inside), summed, trained, states + kept)

    def node(self, operator: Operator, choice: Choice) -> Cost:
        """Time and memory of an operator."""
        share = self.share(operator, choice)
        seconds = share.compute + self.machine.seconds(share.inside) + share.gradients * self._per_byte
        return Cost(seconds, share.memory)

    def gradient_seconds(self, share: Share) -> float:
        """Of the sum of an operator's gradients over the ranks."""
        return share.gradients * self._per_byte

    def moved(self, source: Operator, before: Choice, target: Operator, after: Choice) -> Exchanges | None:
        """The collectives between two operators; None: nothing there can convert."""
        partial = after.style == "column"
        if before.output == after.takes and not partial:
            return ()
        if before.output != after.takes and not target.converts:
            return None
        return conversion(
            before.output,
            after.takes,
            source.size,
            self.machine.ranks,
            gradient=source.gradient,
            partial=partial,
        )

    def edge(self, source: Operator, before: Choice, target: Operator, after: Choice) -> Cost | None:
        """Time and memory of what lies between two operators; None: they do not fit together."""
        exchanges = self.moved(source, before, target, after)
        if exchanges is None:
            return None
        kept = 0.0
        if before.output != after.takes and target.kind != OUTPUT:
            if after.takes == "whole":
                kept = source.size
            elif before.output != "whole":
                kept = source.size / self.machine.ranks
        return Cost(self.machine.seconds(exchanges), kept)

    def _product(self, operator: Operator, choice: Choice) -> float:
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

    def _passes(self, operator: Operator, split: int) -> float:
        """The forward, and a backward that reads the gradient and what was kept, and writes a gradient."""
        if not operator.moved:
            return 0.0
        turns = 1 + operator.gradient
        return turns * pass_seconds(self.machine.cluster.device, "add", operator.moved / split)

    def _update(self, trained: float) -> float:
        """Of the optimiser: gradients are read, weights and states are read and written."""
        if not trained:
            return 0.0
        touched = 3 * self.machine.parameter + 2 * self.machine.states
        # an update is one pass over the parameters of all layers, so that no layer pays for its launch
        device = self.machine.cluster.device
        return pass_seconds(device, "adam", trained * touched) - pass_seconds(device, "adam", 0.0)


def _held(operator: Operator, choice: Choice, ranks: int) -> tuple[int, int]:
    """Parameters that a rank holds: trained, and not trained."""
    if operator.shared:
        return 0, 0
    if choice.style == "column":
        return (operator.weight + operator.bias) // ranks, operator.frozen // ranks
    if choice.style == "row":
        return operator.weight // ranks + operator.bias, operator.frozen // ranks
    return operator.weight + operator.bias, operator.frozen


def _statistics(operator: Operator, ranks: int) -> list[Exchange]:
    """Every rank's mean, variance and number of elements, in 32 bits or more; two sums in the backward."""
    element = max(4, operator.element)
    gathered = Exchange("all-gather", ranks * (2 * operator.statistics + 1) * element)
    return [gathered, Exchange("all-reduce", 2 * operator.statistics * element)]
