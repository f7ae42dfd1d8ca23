"""The base of optimisers of fragments, and what depends on a parameter's plain name and shape: weight decay,
stacks of experts, matrices for Muon.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from stretto.engine.parallel.fragment import Fragment

Group = dict[str, Any]
Moving = tuple[Group, Fragment, Tensor, dict[str, Tensor]]  # gradient and states


class FragmentOptimizer(torch.optim.Optimizer):
    """A torch optimiser of fragments; a step is collective over their holders.

    A fragment takes part in a step where its `parameter.grad` is set, which must be so on all of its holders
    or on none: those that hold no element of it set an empty gradient.

    A state is of the fragment's shape and lies where the fragment does, but for `step` and for those whose
    names are in `replicated`: these are of the plain tensor, the same on every rank of the holders.
    """

    replicated: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, groups: list[Group], fragments: Iterable[Fragment], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self.fragments = {fragment.parameter: fragment for fragment in fragments}

    def new_state(self, fragment: Fragment) -> dict[str, Tensor]:
        """States of zeros, for the first update or for a checkpoint to be read into."""
        raise NotImplementedError

    def begin(self) -> list[Moving]:
        """For each fragment with a gradient: its group, itself, the gradient in the parameter's type, and its
        states, whose step, if it counts any, now counts this update.
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
    """A new count of updates, 0; on the CPU where it is read there."""
    return torch.zeros((), dtype=torch.float32, device=device)


def add_adam_steps(
    group: Group,
    into: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
    factor: float = 1.0,
) -> None:
    """Update the moments and add factor x m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), in one pass over
    memory: torch's fused AdamW on what it takes for weights, without decay.

    Args:
        group: has `betas` and `eps`.
        into, gradients, first, second: of one type on one device.
        steps: t of each, on that device.
    """
    if not into:
        return
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        into,
        gradients,
        first,
        second,
        [],
        steps,
        lr=-factor,
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


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
    """The shape of one member of the stack."""
    return fragment.placed.shape[depth_of(fragment) :]


def member_size(fragment: Fragment) -> int:
    """Elements of one member, padding left out."""
    return prod(member_shape(fragment))


def decays(name: str, shape: Sequence[int], exempt: Sequence[str] = ()) -> bool:
    """Whether a parameter decays: not vectors (norms), not biases (stacked or not), and not names that match
    a pattern of `exempt`.
    """
    vector = len(shape) - stack_depth(name, shape) < 2 or name.endswith("bias")
    return not vector and not any(fnmatchcase(name, pattern) for pattern in exempt)


def is_block_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon updates a parameter: a matrix of a block, or a stack of them, but not a router."""
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
