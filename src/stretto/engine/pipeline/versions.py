"""Weight versions of one stage, for schedules that update weights while microbatches are in flight.

A forward runs on leaves of its own version, and its graph keeps them; an update leaves the memory of a
version that is still needed alone and goes on in new memory (Narayanan et al. 2019, "PipeDream", section 3.3:
weight stashing). All versions gather gradients in one place, that of the parameters.
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
        self._bound: int | None = None  # None: the parameters themselves
        self.newest = 0
        self.most = 0  # versions held at once, since the last start

    def start(self) -> None:
        """Begin a step with one version, number 0."""
        self.newest = 0
        self.most = 1
        self._held = {0: self._leaves()}

    def use(self, version: int) -> None:
        """Let the module compute with a version."""
        if version != self._bound:
            self._bind(self._held[version])
            self._bound = version

    def drop(self, version: int) -> None:
        """Nothing needs this version any more, unless it is the newest."""
        if version != self.newest:
            del self._held[version]

    def update(self) -> None:
        """Make the next version."""
        if self._needed[self.newest]:
            self._renew()  # the version before stays where it is
        else:
            del self._held[self.newest]
        self._step()
        self.newest += 1
        self._held[self.newest] = self._leaves()
        self.most = max(self.most, len(self._held))

    def end(self) -> None:
        """Put the parameters themselves back, at the newest version."""
        self._bind(self._masters)
        self._bound = None
        self._held.clear()

    def _leaves(self) -> list[nn.Parameter]:
        made = list[nn.Parameter]()
        for parameter in self._masters:
            leaf = nn.Parameter(parameter.data)  # with a count of changes of its own
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
