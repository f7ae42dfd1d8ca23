"""The base class of optimisers of fragments, and properties that follow from a parameter's plain name and
shape: weight decay, stacked experts, matrices that Muon updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from stretto.engine.parallel.fragment import ParameterFragment, TensorBox
from stretto.errors import StrettoError
from stretto.job.parameters import in_linear_of_block

Group = dict[str, Any]
CACHED = 1 << 19  # elements whose weights, gradients and states stay in a CPU's cache between two passes


@dataclass(kw_only=True, eq=False)
class TensorGroup:
    """Fragments that are updated together, with lists of tensors for torch's `_foreach_` operators. All have
    the same parameter group, dtype, device and holders.
    """

    group: Group
    fragments: list[ParameterFragment] = field(default_factory=list[ParameterFragment])
    parameters: list[Tensor] = field(default_factory=list[Tensor])
    gradients: list[Tensor] = field(default_factory=list[Tensor])
    states: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])

    def state(self, name: str) -> list[Tensor]:
        """Return one state of every fragment."""
        return [state[name] for state in self.states]

    @property
    def alone(self) -> bool:
        """True if the group is updated alone, in a CPU's cache: see `FragmentOptimizer.begin`."""
        return self.fragments[0].holders is None and self.parameters[0].device.type == "cpu"

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """`members_of` for every fragment."""
        return tuple(map(members_of, self.fragments))

    @cached_property
    def plain(self) -> bool:
        """True if every local tensor belongs to one tensor of the plain model and is counted on this rank:
        padding is zero, so sums of squares are those of the full local tensors.
        """
        return not any(self.members) and all(
            len(counted_pieces(fragment)) == len(fragment.placed.pieces) for fragment in self.fragments
        )

    def __iter__(self) -> Iterator[tuple[ParameterFragment, Tensor, dict[str, Tensor]]]:
        """Iterate over fragments with their gradients and states."""
        return zip(self.fragments, self.gradients, self.states, strict=True)


class FragmentOptimizer(torch.optim.Optimizer):
    """A torch optimiser of fragments; a step is collective over their holders.

    A fragment takes part in a step if its `parameter.grad` is set, on all of its holders or on none: a holder
    without elements of it sets an empty gradient.

    A state has the fragment's shape and placement, except `step` and the states named in `replicated`, which
    describe the plain tensor and are the same on all holders.
    """

    replicated: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, groups: list[Group], fragments: Iterable[ParameterFragment], defaults: dict[str, Any]
    ) -> None:
        super().__init__(groups, defaults)
        self.fragments = {fragment.parameter: fragment for fragment in fragments}
        self._cached_key, self._batches = list[int](), list[TensorGroup]()
        self._scratch: dict[torch.dtype, Tensor] = {}
        # between updates, copies in the parameters' type would take as much memory as the masters
        self.register_step_post_hook(lambda *_: self._drop_gradients())

    def _drop_gradients(self) -> None:
        for batch in self._batches:
            batch.gradients = []

    def new_state(self, fragment: ParameterFragment) -> dict[str, Tensor]:
        """Return zero states, for the first update or to be loaded from a checkpoint."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states like torch's optimisers.

        Raises:
            StrettoError: a tensor is missing or has another shape.
        """
        super().load_state_dict(state_dict)
        for parameter, fragment in self.fragments.items():
            state = self.state.get(parameter) or {}
            for name, wanted in self.new_state(fragment).items() if state else ():
                loaded = state.get(name)
                if loaded is None or loaded.shape != wanted.shape:
                    shape = "missing" if loaded is None else f"of shape {list(loaded.shape)}"
                    raise StrettoError(
                        f"state {name} of {fragment.name} is {shape}, not of shape {list(wanted.shape)}",
                        hint="load the states of the same parameters in the same layout",
                    )

    def begin(self) -> list[TensorGroup]:
        """Return the fragments that have a gradient, with gradients in the parameter's type and their states,
        whose `step`, if any, is increased to count this update.

        An accelerator's kernels take as many tensors as possible at once. On a CPU, a group of fragments
        without holders is closed at `CACHED` elements: later passes of an update then find their tensors in
        the cache. (Holders of a tensor have to wait for each other between two passes.)
        """
        moving = [
            (number, parameter)
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None and parameter in self.fragments
        ]
        key = [id(self.state), *(id(parameter) for _, parameter in moving)]
        if key != self._cached_key:  # otherwise the same fragments as in the last update
            self._cached_key, self._batches = key, self._batched(moving)
        for batch in self._batches:
            batch.gradients = [cast(Tensor, p.grad).to(p.dtype) for p in batch.parameters]
            for fragment, state in zip(batch.fragments, batch.states, strict=True):
                if not state:
                    state.update(self.new_state(fragment))
            if "step" in batch.states[0]:
                torch._foreach_add_(batch.state("step"), 1.0)
        return self._batches

    def _batched(self, moving: Iterable[tuple[int, nn.Parameter]]) -> list[TensorGroup]:
        """Group fragments, given by the index of their parameter group and their parameter."""
        batches, opened = list[TensorGroup](), dict[tuple[Any, ...], TensorGroup]()
        for number, parameter in moving:
            fragment = self.fragments[parameter]
            alike = (number, parameter.dtype, parameter.device, fragment.holders)
            batch = opened.get(alike)
            if batch is None:
                batch = TensorGroup(group=self.param_groups[number])
                opened[alike] = batch
                batches.append(batch)
            batch.fragments.append(fragment)
            batch.parameters.append(parameter)
            batch.states.append(self.state[parameter])
            if batch.alone and sum(p.numel() for p in batch.parameters) >= CACHED:
                del opened[alike]
        return batches

    def scratch(self, batch: TensorGroup) -> list[Tensor]:
        """Return uninitialised memory for an update of each parameter, in its shape. Batches that are updated
        in sequence share the memory, which is in the CPU's cache.
        """
        if not batch.alone:
            return [torch.empty_like(parameter) for parameter in batch.parameters]
        sizes = [parameter.numel() for parameter in batch.parameters]
        first = batch.parameters[0]
        flat = self._scratch.get(first.dtype)
        if flat is None or len(flat) < sum(sizes):
            self._scratch[first.dtype] = flat = torch.empty(sum(sizes), dtype=first.dtype)
        parts = flat[: sum(sizes)].split(sizes)
        return [part.view(p.shape) for part, p in zip(parts, batch.parameters, strict=True)]


def counted_pieces(fragment: ParameterFragment) -> tuple[TensorBox, ...]:
    """Return the boxes that this rank contributes to a sum over the holders, in which each element of the
    plain tensor counts once.
    """
    if fragment.holders is None:  # this rank has the full tensor, even if another rank owns it
        return fragment.placed.pieces
    return tuple(piece for piece in fragment.placed.pieces if piece.owned)


def rounds(batches: Iterable[TensorGroup]) -> list[list[TensorGroup]]:
    """Return the batches of each round of an update: those with holders in one round, so that a group of
    holders has one all-reduce for all of them, and each of the others in a separate round.
    """
    alone, together = list[list[TensorGroup]](), list[TensorGroup]()
    for batch in batches:
        if batch.fragments[0].holders is None:
            alone.append([batch])
        else:
            together.append(batch)
    return [*alone, together] if together else alone


def count(device: torch.device | str = "cpu") -> Tensor:
    """Return a new count of updates, 0, on the device that reads it."""
    return torch.zeros((), dtype=torch.float32, device=device)


def stack_depth(name: str, shape: Sequence[int]) -> int:
    """Return the number of leading dimensions that index separate tensors, such as stacked experts: the
    remaining dimensions of a weight are a matrix or a vector, those of a bias a vector.
    """
    return max(0, len(shape) - (1 if name.endswith("bias") else 2))


def depth_of(fragment: ParameterFragment) -> int:
    """Return `stack_depth` of the plain tensor."""
    return stack_depth(fragment.name, fragment.placed.shape)


def members_of(fragment: ParameterFragment) -> tuple[int, ...]:
    """Return the stacked dimensions of the plain tensor, or () if it is a single tensor."""
    return fragment.placed.shape[: depth_of(fragment)]


def member_shape(fragment: ParameterFragment) -> tuple[int, ...]:
    """Return the shape of one member of the stack."""
    return fragment.placed.shape[depth_of(fragment) :]


def member_size(fragment: ParameterFragment) -> int:
    """Return the number of elements of one member, without padding."""
    return prod(member_shape(fragment))


def decays(name: str, shape: Sequence[int], exempt: Sequence[str] = ()) -> bool:
    """True if weight decay applies: not to vectors (norms), biases (stacked or not), or names that match a
    pattern of `exempt`.
    """
    vector = len(shape) - stack_depth(name, shape) < 2 or name.endswith("bias")
    return not vector and not any(fnmatchcase(name, pattern) for pattern in exempt)


def is_block_matrix(name: str, shape: Sequence[int]) -> bool:
    """True if Muon updates a parameter: a matrix or stack of matrices that a block multiplies with, except
    routers.
    """
    return len(shape) - stack_depth(name, shape) == 2 and in_linear_of_block(name)


def decay_groups(
    fragments: Iterable[ParameterFragment], weight_decay: float, exempt: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the optimiser's parameter groups: one with weight decay and one without. Empty groups are left
    out, except on a rank without parameters, since torch's optimisers need one.
    """
    fragments = list(fragments)
    decayed = [decays(f.name, f.placed.shape, exempt) for f in fragments]
    groups: list[dict[str, Any]] = [
        {"params": [f.parameter for f, yes in zip(fragments, decayed, strict=True) if yes is which]}
        | {"weight_decay": weight_decay if which else 0.0}
        for which in (True, False)
    ]
    return [group for group in groups if group["params"]] or groups[1:]
