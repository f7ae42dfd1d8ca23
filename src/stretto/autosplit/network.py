"""A network as the planner sees it: operators that read one another's outputs, without PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

Split = Literal["whole", "batch", "features"]
"""Of a tensor over the ranks: every rank has all of it, a part of dimension 0, or of the last dimension."""

StyleName = Literal["replicate", "batch", "column", "row"]
"""Style of a module with parameters: `Replicate`, `BatchParallel`, `ColumnParallel` or `RowParallel`."""

# how a style takes its input and leaves its output
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

    @property
    def flops(self) -> float:
        """Of the forward."""
        return 2.0 * self.rows * self.inner * self.columns * self.groups


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operation of a network.

    Attributes:
        name: of the module, or of the call in the traced forward.
        kind: the module's class or the function's name.
        inputs: names of the operators whose outputs it reads, in order.
        shape: of its output.
        element: bytes of an element of it.
        styles: that its module can have; empty: it has no parameters, and computes on what it is handed, in a
            split that all of its inputs and its output have.
        splits: that its output can have; for one without styles, its inputs too.
        weight, bias: trained parameters; `bias` are those that a split of input features leaves whole.
        frozen: parameters that are not trained.
        module: the name of its module; "": it has none.
        repeated: its module is called several times, and converts what it is called with alike each time.
        shared: its parameters are those of an operator before it, where they are counted.
        product: None: it is bound by memory.
        moved: bytes that it reads and writes in its forward, beside those of the product.
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
        """Whether what it reads is converted to the split that it takes."""
        return self.kind == OUTPUT or bool(self.styles)


class Choice(NamedTuple):
    """How an operator is split.

    Attributes:
        style: of its module; None: it computes on what it is handed.
        takes: the split of its inputs.
        leaves: the split in which it computes its output.
        output: the split of its output after a conversion that belongs to the module.
    """

    style: StyleName | None
    takes: Split
    leaves: Split
    output: Split


@dataclass(frozen=True)
class Network:
    """Operators in the order of the forward.

    Attributes:
        ties: names of operators whose modules share parameters or are one module, and are split alike.
        notes: what was assumed of operators that are not known.
    """

    operators: tuple[Operator, ...]
    ties: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = field(default=())

    def choices(self, ranks: int) -> list[list[Choice]]:
        """How each operator can be split over so many ranks.

        The output of a module is converted by the module itself only where something reads it that cannot
        convert what it reads, or not in a way of its own.
        """
        by_name = {one.name: one for one in self.operators}
        fixed = {
            name
            for one in self.operators
            if not one.converts or one.repeated
            for name in one.inputs
            if by_name[name].styles
        }
        return [_choices(one, ranks, one.name in fixed) for one in self.operators]


def _choices(operator: Operator, ranks: int, converts: bool) -> list[Choice]:
    splits: list[Split] = [split for split in operator.splits if _divides(operator.shape, split, ranks)]
    if not operator.styles:
        return [Choice(None, split, split, split) for split in splits]
    choices = list[Choice]()
    for style in operator.styles:
        takes, leaves = NATURAL[style]
        product = operator.product
        if leaves not in splits or (style == "row" and product is not None and product.inner % ranks):
            continue
        outputs: list[Split] = splits if converts else [leaves]
        choices += [Choice(style, takes, leaves, output) for output in outputs]
    return choices


def _divides(shape: Sequence[int], split: Split, ranks: int) -> bool:
    if split == "whole":
        return True
    return bool(shape) and not shape[0 if split == "batch" else -1] % ranks
