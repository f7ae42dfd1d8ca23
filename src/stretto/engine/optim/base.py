"""The base class of optimisers of fragments, and what follows from a parameter's plain name and shape:
whether it decays, whether it is a stack of experts, whether Muon updates it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from stretto.engine.parallel.fragment import Fragment
from stretto.spec.parameters import in_linear_of_block

Group = dict[str, Any]
Moving = tuple[Group, Fragment, Tensor, dict[str, Tensor]]  # gradient and states


class FragmentOptimizer(torch.optim.Optimizer):
    """A torch optimiser of fragments; a step is collective over their holders.

    A fragment takes part in a step if its `parameter.grad` is set, which must be so on all of its holders or
    on none: a holder without elements of it sets an empty gradient.

    A state has the fragment's shape and place, except for `step` and the states named in `replicated`, which
    describe the plain tensor and are the same on all holders.
    """

    replicated: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, groups: list[Group], fragments: Iterable[Fragment], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self.fragments = {fragment.parameter: fragment for fragment in fragments}

    def new_state(self, fragment: Fragment) -> dict[str, Tensor]:
        """Zero states, for the first update or for a checkpoint to be read into."""
        raise NotImplementedError

    def begin(self) -> list[Moving]:
        """For each fragment with a gradient: its group, the fragment, the gradient in the parameter's type,
        and its states, with `step` (where there is one) increased to count this update.
        """
        moving = list[Moving]()
        for group in self.param_groups:
            for parameter in group["params"]:
                fragment = self.fragments.get(parameter)
                if parameter.grad is None or fragment is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.new_state(fragment))
                if "step" in state:
                    state["step"] += 1
                moving.append((group, fragment, parameter.grad.to(parameter.dtype), state))
        return moving


def count(device: torch.device | str = "cpu") -> Tensor:
    """A new count of updates, 0, on the device that reads it."""
    return torch.zeros((), dtype=torch.float32, device=device)


def stack_depth(name: str, shape: Sequence[int]) -> int:
    """How many leading dimensions number separate tensors, such as stacked experts: what remains of a weight
    is a matrix or a vector, of a bias a vector.
    """
    return max(0, len(shape) - (1 if name.endswith("bias") else 2))


def depth_of(fragment: Fragment) -> int:
    """`stack_depth` of the plain tensor."""
    return stack_depth(fragment.name, fragment.placed.shape)


def members_of(fragment: Fragment) -> tuple[int, ...]:
    """The stacked dimensions of the plain tensor; () where it is one tensor."""
    return fragment.placed.shape[: depth_of(fragment)]


def member_shape(fragment: Fragment) -> tuple[int, ...]:
    """The shape of one member of the stack."""
    return fragment.placed.shape[depth_of(fragment) :]


def member_size(fragment: Fragment) -> int:
    """Elements of one member, padding left out."""
    return prod(member_shape(fragment))


def decays(name: str, shape: Sequence[int], exempt: Sequence[str] = ()) -> bool:
    """Whether weight decay applies: not to vectors (norms), biases (stacked or not), or names that match a
    pattern of `exempt`.
    """
    vector = len(shape) - stack_depth(name, shape) < 2 or name.endswith("bias")
    return not vector and not any(fnmatchcase(name, pattern) for pattern in exempt)


def is_block_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon updates a parameter: a matrix or stack of matrices that a block multiplies with, but not a
    router.
    """
    return len(shape) - stack_depth(name, shape) == 2 and in_linear_of_block(name)


def decay_groups(
    fragments: Iterable[Fragment], weight_decay: float, exempt: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The optimiser's parameter groups: one with weight decay and one without. Empty groups are left out,
    except on a rank without parameters, since torch's optimisers need one.
    """
    fragments = list(fragments)
    decayed = [decays(f.name, f.placed.shape, exempt) for f in fragments]
    groups: list[dict[str, Any]] = [
        {"params": [f.parameter for f, yes in zip(fragments, decayed, strict=True) if yes is which]}
        | {"weight_decay": weight_decay if which else 0.0}
        for which in (True, False)
    ]
    return [group for group in groups if group["params"]] or groups[1:]
