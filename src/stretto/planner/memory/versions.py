"""Which weights of a rank's stages are held beside the newest, where they change within the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stretto.program.action import Action, Kind
from stretto.program.program import Program


class HeldVersions:
    """The versions of one rank, followed as its order goes on."""

    def __init__(self, program: Program, order: Sequence[Action]) -> None:
        self._newest, self._copied = Counter[int](), set[tuple[int, int]]()
        self._last = dict[Action, tuple[int, int]]()
        if not program.versions:
            return
        last = dict[tuple[int, int], Action]()
        for action in order:
            if action.kind is Kind.B and action.microbatch is not None:
                last[action.stage, program.versions[action.stage][action.microbatch]] = action
        self._last = {action: key for key, action in last.items()}
        place = {action: at for at, action in enumerate(order)}
        self._at = {key: place[action] for key, action in last.items()}
        self._updates = {
            stage: [at for at, a in enumerate(order) if a.kind is Kind.UPDATE and a.stage == stage]
            for stage in {a.stage for a in order}
        }

    def update(self, stage: int) -> bool:
        """Whether the update leaves the weights before it where they are."""
        version = self._newest[stage]
        self._newest[stage] += 1
        if self._at.get((stage, version), -1) > self._updates[stage][version]:
            self._copied.add((stage, version))
            return True
        return False

    def done(self, action: Action) -> bool:
        """Whether a copy of weights goes with this backward."""
        key = self._last.get(action)
        if key is None or key not in self._copied:
            return False
        self._copied.remove(key)
        return True
