"""Weight stashing: versions of one stage's weights, for schedules that update with microbatches in flight
(Narayanan et al. 2019, "PipeDream", section 3.3).

Each forward runs on leaf parameters of its version, which its graph keeps. Before an update, weights whose
old version is still needed move to new memory. The gradients of all versions accumulate in the parameters'
`.grad`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


class WeightVersions:
    """The versions of one stage's weights during a step.

    Args:
        module: the stage.
        step: applies the gradients to the module's parameters, in place, and clears them.
        needed: for each version, whether something computes with it after it has been replaced.
        renew: moves the parameters to new memory with the same values.
    """

    def __init__(
        self,
        module: nn.Module,
        step: Callable[[], None],
        needed: list[bool],
        renew: Callable[[], None],
    ) -> None:
        self._step = step
        self._needed = needed
        self._renew = renew
        self._masters = [p for p in module.parameters() if p.requires_grad]
        at = {id(p): i for i, p in enumerate(self._masters)}
        self._places = [
            (part, name, at[id(p)])
            for part in module.modules()
            for name, p in part.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in at
        ]
        self._held = dict[int, list[nn.Parameter]]()
        self._bound: int | None = None  # None: the parameters themselves are bound
        self.newest = 0
        self.most = 0  # versions held at once, since the last start

    def start(self) -> None:
        """Begin a step with one version, number 0."""
        self.newest = 0
        self.most = 1
        self._held = {0: self._leaves()}

    def use(self, version: int) -> None:
        """Bind a version's leaves to the module."""
        if version != self._bound:
            self._bind(self._held[version])
            self._bound = version

    def drop(self, version: int) -> None:
        """Free a version after its last use, unless it is the newest."""
        if version != self.newest:
            del self._held[version]

    def update(self) -> None:
        """Update the weights: the next version."""
        if self._needed[self.newest]:
            self._renew()  # the version before keeps the old memory
        else:
            del self._held[self.newest]
        self._step()
        self.newest += 1
        self._held[self.newest] = self._leaves()
        self.most = max(self.most, len(self._held))

    def end(self) -> None:
        """Bind the parameters themselves again, at the newest version."""
        self._bind(self._masters)
        self._bound = None
        self._held.clear()

    def _leaves(self) -> list[nn.Parameter]:
        made = list[nn.Parameter]()
        for parameter in self._masters:
            # a new leaf has its own version counter, so autograd does not see the update of another version
            leaf = nn.Parameter(parameter.data)
            if parameter.grad is not None and parameter.grad.dtype != leaf.dtype:
                leaf.grad_dtype = parameter.grad.dtype  # pyright: ignore[reportAttributeAccessIssue]
            leaf.grad = parameter.grad
            made.append(leaf)
        return made

    def _bind(self, parameters: list[nn.Parameter]) -> None:
        for part, name, at in self._places:
            part._parameters[name] = parameters[at]


def needed_later(uses: list[tuple[int, int]], updates: list[int]) -> list[bool]:
    """For each version, whether it is used after the update that replaces it.

    Args:
        uses: (place in the rank's order, version) of every forward and backward of the stage.
        updates: places of the stage's updates, in order; update n makes version n + 1.
    """
    return [any(v == version and at > place for at, v in uses) for version, place in enumerate(updates)] + [
        False
    ]
