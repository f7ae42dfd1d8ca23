"""A network as the planner sees it: operators that read one another's outputs, without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

Split = Literal["whole", "batch", "features"]
"""The split of a tensor over the ranks: none, or along dimension 0, or along the last dimension."""

StyleName = Literal["replicate", "batch", "column", "row"]
"""Style of a module with parameters: `Replicate`, `BatchParallel`, `ColumnParallel` or `RowParallel`."""

# the split in which a style takes its input, and the one in which it leaves its output
NATURAL: dict[StyleName, tuple[Split, Split]] = {
    "replicate": ("whole", "whole"),
    "batch": ("batch", "batch"),
    "column": ("whole", "features"),
    "row": ("features", "whole"),
}
INPUT, OUTPUT = "input", "output"  # kinds of operators that stand for the model's inputs and outputs


@dataclass(frozen=True)
class Product:
    """The matrix product of a linear layer, or of a convolution that is written as one.

    Attributes:
        rows: samples times positions of the output.
        inner: elements of the sums: input features, or input channels times the kernel's area.
        columns: output features or channels.
        groups: independent products with these sizes.
    """

    rows: int
    inner: int
    columns: int
    groups: int = 1


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operation of a network.

    Attributes:
        name: name of the module, or of the call in the traced forward.
        kind: the module's class or the function's name.
        inputs: names of the operators whose outputs it reads, in order.
        shape: shape of its output.
        element: bytes of an element of the output.
        styles: styles that its module can have; empty if it has no parameters, and computes on its inputs as
            they are, in a split that all of its inputs and its output have.
        splits: splits that its output can have; without styles, its inputs too.
        weight: trained parameters, without `bias`.
        bias: trained parameters that a split of input features leaves on every rank.
        frozen: parameters that are not trained.
        module: name of its module; "" without one.
        repeated: its module is called several times, and converts its inputs alike each time.
        shared: its parameters are those of an operator before it, where they are counted.
        product: its matrix product, or None if it is bound by memory.
        moved: bytes that it reads and writes in its forward, besides those of the product.
        saved: bytes kept for its backward: its output, unless that shares memory with its input.
        statistics: channels whose mean and variance are taken over the batch.
        gradient: its output needs a gradient.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    element: int = 4
    styles: tuple[StyleName, ...] = ()
    splits: tuple[Split, ...] = ("whole", "batch")
    weight: int = 0
    bias: int = 0
    frozen: int = 0
    module: str = ""
    repeated: bool = False
    shared: bool = False
    product: Product | None = None
    moved: float = 0.0
    saved: float = 0.0
    statistics: int = 0
    gradient: bool = True

    @property
    def size(self) -> int:
        """Bytes of the output."""
        return prod(self.shape) * self.element

    @property
    def converts(self) -> bool:
        """True if its inputs are converted to the split that it takes."""
        return self.kind == OUTPUT or bool(self.styles)


class Choice(NamedTuple):
    """How an operator is split.

    Attributes:
        style: style of its module, or None if it computes on its inputs as they are.
        takes: split of its inputs.
        leaves: split in which it computes its output.
        output: split of its output after a conversion that belongs to the module.
    """

    style: StyleName | None
    takes: Split
    leaves: Split
    output: Split


@dataclass(frozen=True)
class OperatorGraph:
    """The operators of a network in the order of the forward.

    Attributes:
        ties: names of operators whose modules share parameters or are one module, and are split alike.
        notes: assumptions about operators of unknown kinds.
    """

    operators: tuple[Operator, ...]
    ties: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def choices(self, ranks: int) -> list[list[Choice]]:
        """Return the ways in which each operator can be split over this number of ranks.

        The output of a module is converted by the module itself only if an operator reads it that cannot
        convert its inputs, or not in a way of its own.
        """
        by_name = {operator.name: operator for operator in self.operators}
        converting = {
            name
            for operator in self.operators
            if not operator.converts or operator.repeated
            for name in operator.inputs
            if by_name[name].styles
        }
        choices = list[list[Choice]]()
        for operator in self.operators:
            shape = operator.shape
            splits: list[Split] = [
                split
                for split in operator.splits
                if split == "whole" or (shape and not shape[0 if split == "batch" else -1] % ranks)
            ]
            if not operator.styles:
                choices.append([Choice(None, split, split, split) for split in splits])
                continue
            choices.append([])
            for style in operator.styles:
                takes, leaves = NATURAL[style]
                product = operator.product
                if leaves not in splits or (style == "row" and product is not None and product.inner % ranks):
                    continue
                outputs: list[Split] = splits if operator.name in converting else [leaves]
                choices[-1] += [Choice(style, takes, leaves, output) for output in outputs]
        return choices
