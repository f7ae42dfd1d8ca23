"""Five models of message transport for the brute-force executor."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

Message = tuple[int, int, str, str, bool]  # source, destination, direction, value, is the sending side


class WrongError(Exception):
    """The program asks a rank for what it cannot do, or a buffer gets another message than its own."""


class Network:
    """A transport for the ranks' sends and receives; `have` are the values on each rank."""

    def __init__(self, have: list[set[str]]) -> None:
        self.have = have

    def may_go(self, rank: int, message: Message | None, heads: Sequence[Message | None]) -> bool:
        """True if the network lets the rank continue after its next action."""
        return True

    def post(self, rank: int, message: Message, joined: bool) -> None:
        """Take a send or a receive; `joined`: the rank's next action is one, too."""
        raise NotImplementedError

    def work(self) -> bool:
        """Carry something; whether there was anything to do."""
        return False

    def clean(self) -> bool:
        """No message is left on its way, no receive left open."""
        raise NotImplementedError


class Rendezvous(Network):
    """Sends wait in a line until their receive has been posted; the message goes from buffer to buffer."""

    def __init__(self, have: list[set[str]]) -> None:
        super().__init__(have)
        self.sends: dict[tuple[int, int, str], deque[str]] = defaultdict(deque)
        self.receives: dict[tuple[int, int, str], deque[str]] = defaultdict(deque)

    def post(self, rank: int, message: Message, joined: bool) -> None:
        source, to, direction, value, sending = message
        (self.sends if sending else self.receives)[source, to, direction].append(value)

    def work(self) -> bool:
        for channel, line in self.sends.items():
            if line and self.receives[channel]:
                value = line.popleft()
                if value != self.receives[channel].popleft():
                    raise WrongError
                self.have[channel[1]].add(value)
                return True
        return False

    def clean(self) -> bool:
        return not any(self.sends.values()) and not any(self.receives.values())


class Buffered(Network):
    """Sends are copied out of their rank at once; a receive, once posted, takes the next from the mailbox."""

    def __init__(self, have: list[set[str]]) -> None:
        super().__init__(have)
        self.mail: dict[int, list[tuple[tuple[int, int, str], str]]] = defaultdict(list)
        self.open: dict[int, list[tuple[tuple[int, int, str], str]]] = defaultdict(list)

    def post(self, rank: int, message: Message, joined: bool) -> None:
        source, to, direction, value, sending = message
        (self.mail if sending else self.open)[to].append(((source, to, direction), value))

    def work(self) -> bool:
        for to, letters in self.mail.items():
            for channel in {channel for channel, _ in letters}:
                first = next(letter for letter in letters if letter[0] == channel)
                slot = next((slot for slot in self.open[to] if slot[0] == channel), None)
                if slot is not None:
                    if slot != first:
                        raise WrongError
                    letters.remove(first)
                    self.open[to].remove(slot)
                    self.have[to].add(first[1])
                    return True
        return False

    def clean(self) -> bool:
        return not any(self.mail.values()) and not any(self.open.values())


class Blocking(Network):
    """Two ranks shake hands: neither goes past its transfer before the other has come to it."""

    def __init__(self, have: list[set[str]]) -> None:
        super().__init__(have)
        self.shaken: set[tuple[str, bool]] = set()  # sides of a handshake that are still to go on

    def may_go(self, rank: int, message: Message | None, heads: Sequence[Message | None]) -> bool:
        if message is None:
            return True
        source, to, direction, value, sending = message
        if (value, sending) in self.shaken:
            self.shaken.remove((value, sending))
            return True
        other = heads[to if sending else source]
        if other is None or other[:3] != (source, to, direction) or other[4] == sending:
            return False
        if (other[3], other[4]) in self.shaken:  # it has met this rank's transfer before already
            return False
        if other[3] != value:
            raise WrongError
        self.shaken.add((value, not sending))
        return True

    def post(self, rank: int, message: Message, joined: bool) -> None:
        _, to, _, value, _ = message
        self.have[to].add(value)

    def clean(self) -> bool:
        return not self.shaken


class Paired(Network):
    """One communicator for each pair of ranks: both sides work off one line of sends and receives."""

    def __init__(self, have: list[set[str]]) -> None:
        super().__init__(have)
        self.lines: dict[tuple[int, int], deque[Message]] = defaultdict(deque)

    def post(self, rank: int, message: Message, joined: bool) -> None:
        source, to, _, _, sending = message
        self.lines[(source, to) if sending else (to, source)].append(message)

    def work(self) -> bool:
        for (here, there), line in list(self.lines.items()):
            other = self.lines[there, here]
            if line and other and line[0][4] and not other[0][4]:
                mine, peer = line.popleft(), other.popleft()
                if mine[3] != peer[3]:
                    raise WrongError
                self.have[there].add(mine[3])
                return True
        return False

    def clean(self) -> bool:
        return not any(self.lines.values())


class Batched(Network):
    """One communicator for all: a rank has one group of transfers under way, and the next after it."""

    def __init__(self, have: list[set[str]]) -> None:
        super().__init__(have)
        self.collecting: dict[int, list[Message]] = defaultdict(list)
        self.groups: dict[int, deque[list[Message]]] = defaultdict(deque)
        self.matched: dict[int, list[Message]] = defaultdict(list)  # of the group under way

    def post(self, rank: int, message: Message, joined: bool) -> None:
        self.collecting[rank].append(message)
        if not joined:
            self.groups[rank].append(self.collecting.pop(rank))

    def under_way(self, rank: int, there: int, sending: bool) -> Message | None:
        """The next transfer with another rank in the rank's group under way."""
        for message in self.groups[rank][0] if self.groups[rank] else ():
            fits = message[4] == sending and (message[1] if sending else message[0]) == there
            if fits and message not in self.matched[rank]:
                return message
        return None

    def work(self) -> bool:
        ranks = list(self.groups)
        for source in ranks:
            for to in ranks:
                mine, peer = self.under_way(source, to, True), self.under_way(to, source, False)
                if mine and peer:
                    if mine[3] != peer[3]:
                        raise WrongError
                    self.matched[source].append(mine)
                    self.matched[to].append(peer)
                    return True
        for rank in ranks:
            if self.groups[rank] and len(self.matched[rank]) == len(self.groups[rank][0]):
                for message in self.groups[rank].popleft():
                    if not message[4]:
                        self.have[rank].add(message[3])
                self.matched[rank].clear()
                return True
        return False

    def clean(self) -> bool:
        return not any(self.groups.values()) and not any(self.collecting.values())


NETWORKS: dict[str, type[Network]] = {
    "rendezvous": Rendezvous,
    "buffered": Buffered,
    "blocking": Blocking,
    "paired": Paired,
    "batched": Batched,
}
