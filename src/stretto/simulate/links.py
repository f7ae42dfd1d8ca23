"""Messages on links: when each is there, and what it queued behind."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from stretto.schedule.action import Action
from stretto.simulate.prices import Route


@dataclass
class Message:
    """A message that waits for its two sides; `name` is the receive that takes it."""

    name: Action
    route: Route
    turn: tuple[int, int] = (0, 0)  # sending rank, place in its order: who is first of those at one moment
    sent: bool = False
    posted: bool = False


class Links:
    """All links of a replay; `arrive` is told every message's time when it gets its turn."""

    def __init__(self, contention: bool, arrive: Callable[[Action, float], None]) -> None:
        self.contention, self.arrive = contention, arrive
        self.asking: list[Message] = []
        self.queued: dict[Action, Action] = {}  # message to the one whose end it waited for
        self._free: dict[Hashable, float] = {}
        self._last: dict[Hashable, Action] = {}

    def ask(self, message: Message, now: float) -> None:
        """Both sides of the message are ready."""
        if self.contention:
            self.asking.append(message)
        else:
            self.arrive(message.name, now + message.route.delay)

    def serve(self, now: float) -> None:
        """Give turns to all that have asked; called once nothing else can happen at `now`."""
        asking, self.asking = sorted(self.asking, key=lambda message: message.turn), []
        for name, route in ((message.name, message.route) for message in asking):
            start = now
            free = self._free.get(route.link, 0.0)
            if free > now:
                start = free
                self.queued[name] = self._last[route.link]
            self._free[route.link] = start + route.occupied
            self._last[route.link] = name
            self.arrive(name, start + route.delay)
