"""What one rank's optimiser updates of a parameter: all that is local, or its shard of that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.parallel.placed import Placed


@dataclass(eq=False)
class Fragment:
    """A part of a parameter of the plain model.

    Attributes:
        name: of the parameter in the plain model.
        parameter: the values that the optimiser updates, in its own precision: the module's parameter itself
            where it is whole here and trained as it is; otherwise flat, elements of a shard.
        gradient: of the same elements, reduced, in the same shape; None until a backward has made it. May
            be of another type than `parameter`, whose `grad` is set for the update alone.
        placed: where they lie. Over `holders` each element of the plain tensor is owned once.
        holders: the ranks that hold one copy of the tensor together; None where it is whole here. They have
            the same parameters in the same order, some perhaps without elements: of these a fragment is
            there too.
        elsewhere: the tensor's first copy is that of another pipeline stage: the norm counts and checkpoints
            write that one.
        unit: fragments with one number are reduced, updated and moved together.
    """

    name: str
    parameter: nn.Parameter
    placed: Placed
    gradient: Tensor | None = None
    holders: ProcessGroup | None = None
    elsewhere: bool = False
    unit: int = 0

    @property
    def counted(self) -> Placed:
        """`placed`, with what the norm counts and checkpoints write as owned."""
        return self.placed.elsewhere() if self.elsewhere else self.placed


def whole_fragments(named: Iterable[tuple[str, nn.Parameter]]) -> list[Fragment]:
    """Parameters of one process."""
    return [Fragment(name, p, Placed.whole(name, tuple(p.shape)), p.grad) for name, p in named]
