"""Weight stashing: versions of one stage's weights, for schedules that update with microbatches in flight
(Narayanan et al. 2019, "PipeDream", section 3.3).

Each forward runs on leaf parameters of its version, which its graph references. Before an update, weights
whose old version is still needed move to new memory. The gradients of all versions accumulate in the
parameters' `.grad`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from stretto.engine.pipeline.rank_buffers import microbatch_of
from stretto.program.action import Action, ActionKind

NEVER = sys.maxsize  # a microbatch beyond all windows
_USES = frozenset(
    {ActionKind.F, ActionKind.RECOMPUTE, ActionKind.B, ActionKind.I}
)  # W does not read the weights


class WeightVersions:
    """The versions of one stage's weights, numbered from 0 at the start of a window of steps.

    Args:
        module: the stage.
        step: applies the gradients to the module's parameters in place, and clears them.
        recreate_storage: moves the parameters to new memory with the same values.

    Attributes:
        newest: index of the newest version.
        max_held: peak number of versions since the last start.
        left: the first microbatch outside the window, numbered as in the bound program.
    """

    def __init__(
        self, module: nn.Module, step: Callable[[], None], recreate_storage: Callable[[], None]
    ) -> None:
        self._step = step
        self._recreate_storage = recreate_storage
        self._masters = [p for p in module.parameters() if p.requires_grad]
        at = {id(p): i for i, p in enumerate(self._masters)}
        self._places = [
            (part, name, at[id(p)])
            for part in module.modules()
            for name, p in part.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in at
        ]
        self._leaves_of = dict[int, list[nn.Parameter]]()
        self._bound: int | None = None  # None if the parameters themselves are bound
        self.newest = 0
        self.max_held = 0
        self.left = NEVER

    def start(self) -> None:
        """Begin a window with one version, 0."""
        self.newest = 0
        self.max_held = 1
        self._leaves_of = {0: self._leaves()}

    def use(self, age: int) -> None:
        """Bind the leaves of a version to the module.

        Args:
            age: number of updates since the version; 0 is the newest.
        """
        version = self.newest - age
        if version != self._bound:
            self._bind(self._leaves_of[version])
            self._bound = version

    def drop(self, age: int, following: int) -> None:
        """After a backward: free its version, unless it is the newest or another microbatch will use it.

        Args:
            age: number of updates since the version.
            following: next microbatch that uses it.
        """
        if age and following >= self.left:
            del self._leaves_of[self.newest - age]

    def update(self, following: int) -> None:
        """Create the next version by an update.

        Args:
            following: next microbatch that computes with the replaced version.
        """
        if following < self.left:
            self._recreate_storage()  # the replaced version keeps the old memory
        else:
            del self._leaves_of[self.newest]
        self._step()
        self.newest += 1
        self._leaves_of[self.newest] = self._leaves()
        self.max_held = max(self.max_held, len(self._leaves_of))

    def end(self) -> None:
        """Bind the parameters themselves again, at the newest version."""
        self._bind(self._masters)
        self._bound = None
        self._leaves_of.clear()

    def _leaves(self) -> list[nn.Parameter]:
        leaves = list[nn.Parameter]()
        for parameter in self._masters:
            # a new leaf has its own version counter, so autograd does not see the update of another version
            leaf = nn.Parameter(parameter.data)
            if parameter.grad is not None and parameter.grad.dtype != leaf.dtype:
                leaf.grad_dtype = parameter.grad.dtype  # pyright: ignore[reportAttributeAccessIssue]
            leaf.grad = parameter.grad
            leaves.append(leaf)
        return leaves

    def _bind(self, parameters: list[nn.Parameter]) -> None:
        for part, name, at in self._places:
            part._parameters[name] = parameters[at]


@dataclass(frozen=True, kw_only=True)
class VersionAges:
    """Versions of a stage's weights that its actions use.

    Attributes:
        of: for each forward and backward, the number of updates between its version and the newest one then.
        following: for each of them, the next microbatch that uses its version; for each update, the first one
            that still uses the replaced version; NEVER if none does.
    """

    of: Mapping[Action, int]
    following: Mapping[Action, int]


def ages(order: Sequence[Action], versions: Sequence[int]) -> VersionAges:
    """Return the ages of the versions that a stage uses.

    Args:
        order: actions of the stage, in the order of its rank.
        versions: version that each microbatch uses (`Program.versions`).
    """
    of, following = dict[Action, int](), dict[Action, int]()
    newest = 0
    for action in order:
        if action.kind is ActionKind.UPDATE:
            newest += 1
        elif action.kind in _USES:
            of[action] = newest - versions[microbatch_of(action)]
    users = dict[int, int]()  # next microbatch that uses each version, after this point of the order
    for action in reversed(order):
        if action.kind is ActionKind.UPDATE:
            newest -= 1
            # several updates without a microbatch share one key: the earliest use decides
            following[action] = min(users.get(newest, NEVER), following.get(action, NEVER))
        elif action in of:
            version = versions[microbatch_of(action)]
            following[action] = users.get(version, NEVER)
            users[version] = min(microbatch_of(action), users.get(version, NEVER))
    return VersionAges(of=of, following=following)
