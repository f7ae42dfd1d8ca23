"""What a parameter is to the optimiser, by its plain name and shape: what decays, what is a stack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from stretto.parallel.fragment import Fragment


def stack_depth(name: str, shape: Sequence[int]) -> int:
    """How many leading dimensions count tensors of their own, as those of stacked experts: the rest of a
    weight is a matrix or a vector, the rest of a bias a vector.
    """
    return max(0, len(shape) - (1 if name.endswith("bias") else 2))


def depth_of(fragment: Fragment) -> int:
    """`stack_depth` of the plain tensor."""
    return stack_depth(fragment.name, fragment.placed.shape)


def members_of(fragment: Fragment) -> tuple[int, ...]:
    """The stacked dimensions of the plain tensor; () where it is one tensor."""
    return fragment.placed.shape[: depth_of(fragment)]


def member_shape(fragment: Fragment) -> tuple[int, ...]:
    """What one member of the stack is."""
    return fragment.placed.shape[depth_of(fragment) :]


def member_size(fragment: Fragment) -> int:
    """Elements of one member, padding left out."""
    return prod(member_shape(fragment))


def decays(name: str, shape: Sequence[int], exempt: Sequence[str] = ()) -> bool:
    """Whether weight decay is for it: not for vectors, so for no norm, not for biases, which experts stack,
    and not for what a pattern of `exempt` names.
    """
    vector = len(shape) - stack_depth(name, shape) < 2 or name.endswith("bias")
    return not vector and not any(fnmatchcase(name, pattern) for pattern in exempt)


def is_block_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon is for it: a matrix of a block, or a stack of them; routers choose and are left out."""
    matrix = len(shape) - stack_depth(name, shape) == 2
    return matrix and name.startswith("blocks.") and "router" not in name.split(".")


def decay_groups(
    fragments: Iterable[Fragment], weight_decay: float, exempt: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The optimiser's groups of parameters: those that decay and those that do not; no empty one, but for a
    rank without parameters.
    """
    fragments = list(fragments)
    decayed = [decays(f.name, f.placed.shape, exempt) for f in fragments]
    groups: list[dict[str, Any]] = [
        {"params": [f.parameter for f, yes in zip(fragments, decayed, strict=True) if yes is which]}
        | {"weight_decay": weight_decay if which else 0.0}
        for which in (True, False)
    ]
    return [group for group in groups if group["params"]] or groups[1:]
