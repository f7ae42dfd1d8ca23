"""An executor that moves real messages through real queues: the checker's judge, sharing no code with it.

Ranks and the network take their steps in random order. A rank that is asked for what it cannot do, and a rank
or a message that never gets to its end, are both failures.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from networks import NETWORKS, Network, WrongError

from stretto.program import Action, ActionKind, Program

_PLAIN = ["F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD"]  # all that a forward-only program has
_ONCE = ["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "RECOMPUTE", "OFFLOAD", "RELOAD"]
_WORKING = ["F", "B", "I", "W", "RECOMPUTE"]  # with a stage's parameters


class Machine:
    """All ranks of a program. `run` says whether they get to their ends with the step's work done."""

    def __init__(self, program: Program, seed: int, transport: str, blocks: bool = False) -> None:
        self.program = program
        self.random = Random(seed)
        self.partner = dict(program.pairs) if blocks else {}
        self.orders = [self.closed_up(order) for order in program.orders]
        self.pc = [0] * program.ranks
        self.have: list[set[str]] = [set() for _ in range(program.ranks)]  # values on each rank
        self.posted: list[set[str]] = [set() for _ in range(program.ranks)]
        self.network: Network = NETWORKS[transport](self.have)
        self.count = Counter[str]()
        self.depth = len(program.placement) // program.copies
        actions = [action for order in program.orders for action in order]
        self.gathered = {a.stage: False for a in actions if a.kind.value in ("UNSHARD", "RESHARD")}
        self.host: dict[tuple[int, int], bool] = {}  # offloaded microbatches: still there?
        self.repeating: dict[int, tuple[int, int]] = {}  # by rank, what RECOMPUTE made for the next backward
        self.updates = Counter[int]()  # updates of each stage
        self.newest = Counter[int]()  # version of each stage's last forward
        self.unapplied: dict[int, list[int]] = {s: [] for s in range(program.stages)}
        self.reduced_now: dict[int, int] = {}  # by rank, the stage whose REDUCE_GRAD was the last action
        self.reduced: dict[int, list[int]] = {s: [] for s in range(program.stages)}  # gradients in each
        self.gradients = Counter[int]()
        self.arrived: dict[int, set[int]] = {k: set() for k in range(len(program.tied))}
        self.set_members: set[tuple[int, int]] = set()
        self.most_versions = Counter[int](dict.fromkeys(range(program.stages), 1))

    def closed_up(self, order: tuple[Action, ...]) -> list[Action]:
        """Reorder pairs to blocks: the second directly after the first, receives before, other actions
        after.
        """
        row = list(order)
        for first, second in self.partner.items():
            if first in row and second in row:
                a, b = row.index(first), row.index(second)
                inner = row[a + 1 : b]
                early = [action for action in inner if action.kind.value.startswith("RECV")]
                late = [action for action in inner if action not in early]
                row[a : b + 1] = [*early, first, second, *late]
        return row

    def run(self) -> bool:
        try:
            while True:
                going = [r for r in range(self.program.ranks) if self.pc[r] < len(self.orders[r])]
                steps = [lambda r=r: self.step(r) for r in going] + [self.network.work]
                self.random.shuffle(steps)
                if not any(step() for step in steps):
                    break
        except WrongError:
            return False
        return not going and self.network.clean() and self.worked()

    # --- one action

    def step(self, rank: int) -> bool:
        """Do the rank's next action, if it can go ahead now."""
        row, at = self.orders[rank], self.pc[rank]
        if at == len(row):
            return False
        action = row[at]
        s, kind, i = action.stage, action.kind.value, action.microbatch
        if not 0 <= s < self.program.stages or self.program.placement[s] != rank:
            raise WrongError
        if not self.program.trains and kind not in _PLAIN:
            raise WrongError
        if kind in _ONCE and (
            i is None or not 0 <= i < self.program.microbatches or self.count[str(action)] > 0
        ):
            raise WrongError
        if kind not in _ONCE and i is not None and kind != "U":
            raise WrongError
        if not self.network.may_go(rank, self.message(action), self.heads()):
            return False
        if not self.do(rank, action):
            return False
        self.pc[rank] += 1
        self.count[str(action)] += 1
        self.note_versions()
        if kind != "REDUCE_GRAD":
            if self.program.versions and self.program.lowered and kind != "U" and rank in self.reduced_now:
                raise WrongError  # gradients were reduced, and not applied at once
            self.reduced_now.pop(rank, None)
        return True

    def heads(self) -> list[tuple[int, int, str, str, bool] | None]:
        """The message of each rank's next action."""
        messages = []
        for row, at in zip(self.orders, self.pc, strict=True):
            messages.append(self.message(row[at]) if at < len(row) else None)
        return messages

    def message(self, action: Action) -> tuple[int, int, str, str, bool] | None:
        """Return of a transfer: source and destination rank, direction, value, whether it is the sending
        side.
        """
        s, kind, i = action.stage, action.kind.value, action.microbatch
        if not kind.startswith(("SEND", "RECV")):
            return None
        sending, forward = kind.startswith("SEND"), kind.endswith("F")
        other = s + (1 if sending == forward else -1)
        here = self.program.placement[s]
        outside = not 0 <= other < self.program.stages or other // self.depth != s // self.depth
        if not self.program.lowered or outside or self.program.placement[other] == here:
            raise WrongError
        there = self.program.placement[other]
        value = f"{'y' if forward else 'g'}{s if sending else other}.{i}"
        ends = (here, there) if sending else (there, here)
        return (*ends, "F" if forward else "B", value, sending)

    def do(self, rank: int, action: Action) -> bool:
        s, kind, i = action.stage, action.kind.value, action.microbatch
        if kind in _WORKING and not self.gathered.get(s, True):
            raise WrongError
        match kind:
            case "REDUCE_GRAD":
                return self.reduce(rank, s)
            case "REDUCE_TIED":
                return self.reduce_tied(rank, s)
            case "U":
                return self.update(rank, s, i)
            case "UNSHARD" | "RESHARD":
                return self.gather(s, kind == "UNSHARD")
        assert i is not None
        if kind in ("RECOMPUTE", "OFFLOAD", "RELOAD"):
            return self.keep(rank, s, kind, i)
        if kind in ("F", "B", "I", "W"):
            second = self.partner.get(action)
            if not self.ready(rank, action) or (second is not None and not self.ready(rank, second)):
                return False
            return self.compute(rank, s, kind, i)
        message = self.message(action)
        assert message is not None
        if message[4] and message[3] not in self.have[rank]:
            raise WrongError
        if not message[4]:
            self.posted[rank].add(message[3])
        self.network.post(rank, message, self.joined(rank))
        return True

    def joined(self, rank: int) -> bool:
        """True if the rank's next action is also a transfer."""
        after = self.pc[rank] + 1
        row = self.orders[rank]
        return after < len(row) and row[after].kind.value.startswith(("SEND", "RECV"))

    # --- computing

    def ready(self, rank: int, action: Action) -> bool:
        """True if the input of a compute action is on its rank."""
        s, kind, i = action.stage, action.kind.value, action.microbatch
        if kind == "W":
            return True
        source = s - 1 if kind == "F" else s + 1
        if not 0 <= source < self.program.stages or source // self.depth != s // self.depth:
            return True
        needed = f"{'y' if kind == 'F' else 'g'}{source}.{i}"
        there = self.program.placement[source]
        if there == rank:
            if needed not in self.have[rank]:
                raise WrongError  # no other action makes it
        elif self.program.lowered:
            if needed not in self.posted[rank]:
                raise WrongError  # no buffer to wait for
        elif self.partner:
            return needed in self.have[there] and self.block_over(there, needed)
        return needed in self.have[rank if self.program.lowered else there]

    def block_over(self, rank: int, value: str) -> bool:
        """False if a value's producer is the first of a block whose second action has not run."""
        at = self.pc[rank]
        row = self.orders[rank]
        if at == 0 or at == len(row) or self.partner.get(row[at - 1]) != row[at]:
            return True
        return value != f"y{row[at - 1].stage}.{row[at - 1].microbatch}"

    def compute(self, rank: int, s: int, kind: str, i: int) -> bool:
        self.check_repeated(rank, s, kind, i)
        if kind == "F":
            self.have[rank].add(f"y{s}.{i}")
            if self.program.versions:
                version = self.program.versions[s][i]
                if not self.newest[s] <= version <= self.updates[s]:
                    raise WrongError
                self.newest[s] = version
            return True
        done = {k: self.count[f"{s}{k}{i}"] for k in "FBIW"}
        if kind == "W":
            if not done["I"]:
                raise WrongError
        else:
            if not done["F"] or done["B"] or done["I"] or self.host.get((s, i)):
                raise WrongError
            self.have[rank].add(f"g{s}.{i}")
        if kind != "I":
            self.gradients[s] += 1
            self.unapplied[s].append(i)
        return True

    def check_repeated(self, rank: int, s: int, kind: str, i: int) -> None:
        """A repeated forward is for the very next backward."""
        if rank not in self.repeating:
            return
        mine = self.repeating[rank]
        if kind in ("B", "I") and (s, i) == mine:
            del self.repeating[rank]
            return
        backward = [Action(mine[0], k, mine[1]) for k in (ActionKind.B, ActionKind.I)]
        if not any((Action(s, ActionKind(kind), i), b) in self.program.pairs for b in backward):
            raise WrongError

    def keep(self, rank: int, s: int, kind: str, i: int) -> bool:
        used = any(self.count[f"{s}{k}{i}"] for k in ("RECOMPUTE", "B", "I"))
        if used or not self.count[f"{s}F{i}"]:
            raise WrongError
        if kind == "RECOMPUTE":
            if rank in self.repeating or self.host.get((s, i)):
                raise WrongError
            self.repeating[rank] = s, i
        elif kind == "OFFLOAD":
            if (s, i) in self.host:
                raise WrongError
            self.host[s, i] = True
        elif not self.host.get((s, i)):
            raise WrongError
        else:
            self.host[s, i] = False
        return True

    def gather(self, s: int, there: bool) -> bool:
        if self.gathered[s] == there or self.program.versions:
            raise WrongError
        self.gathered[s] = there
        return True

    # --- gradients

    def update(self, rank: int, s: int, i: int | None) -> bool:
        last = self.unapplied[s]
        if not self.program.versions or not last or i not in (None, last[-1]):
            raise WrongError
        if self.program.lowered and self.reduced_now.pop(rank, None) != s:
            raise WrongError
        last.clear()
        self.updates[s] += 1
        return True

    def note_versions(self) -> None:
        """Count the versions of each stage that are still needed, the newest included."""
        for s, versions in enumerate(self.program.versions):
            needed = {self.updates[s]}
            for i, version in enumerate(versions):
                over = self.count[f"{s}B{i}"] + self.count[f"{s}W{i}"]
                if not over and version <= self.updates[s]:
                    needed.add(version)
            self.most_versions[s] = max(self.most_versions[s], len(needed))

    def reduce(self, rank: int, s: int) -> bool:
        if self.program.lowered:
            if self.program.versions and rank in self.reduced_now:
                raise WrongError
            self.reduced[s].append(self.gradients[s])
            self.reduced_now[rank] = s
        return True

    def reduce_tied(self, rank: int, s: int) -> bool:
        """The stage's next set: a rank joins it with the last of its stages there, then waits."""
        program = self.program
        if not program.lowered:
            return True
        sets = [k for k, tie in enumerate(program.tied) if s in tie]
        nth = self.count[f"{s}REDUCE_TIED"]
        has_gradient = any(
            a.stage == s and a.kind.value in ("B", "W") for order in program.orders for a in order
        )
        if program.versions or nth >= len(sets) or (has_gradient and not self.reduced[s]):
            raise WrongError
        k = sets[nth]
        mine = [stage for stage in program.tied[k] if program.placement[stage] == rank]
        self.set_members.add((k, s))
        if all((k, stage) in self.set_members for stage in mine):
            self.arrived[k].add(rank)
            return self.arrived[k] == {program.placement[stage] for stage in program.tied[k]}
        return True

    # --- the end

    def worked(self) -> bool:
        program = self.program
        if any(self.gathered.values()) or self.repeating:
            return False
        if program.versions and any(self.unapplied.values()):
            return False
        for i in range(program.microbatches):
            copies = [self.through(copy, i) for copy in range(program.copies)]
            if sorted(copies) != ["none"] * (program.copies - 1) + ["whole"]:
                return False
        if not program.lowered or not program.trains:
            return True
        return self.summed()

    def through(self, copy: int, i: int) -> str:
        """Return whether the copy's stages have done the "whole", a "part" or "none" of microbatch i's
        work.
        """
        parts = set()
        for s in range(copy * self.depth, (copy + 1) * self.depth):
            f, b, split, w = (self.count[f"{s}{kind}{i}"] for kind in "FBIW")
            if not self.program.trains:
                parts.add({1: "whole", 0: "none"}[f])
            elif (f, b, split, w) == (0, 0, 0, 0):
                parts.add("none")
            else:
                parts.add("whole" if (f, b, split, w) in ((1, 1, 0, 0), (1, 0, 1, 1)) else "part")
        return parts.pop() if len(parts) == 1 else "part"

    def summed(self) -> bool:
        """Every gradient is reduced once, whole, and tied ones over all their ranks."""
        program = self.program
        if program.versions:
            return program.copies == 1 and not program.tied and not self.reduced_now
        for s in range(program.stages):
            gradients = self.gradients[s]
            if self.reduced[s] != ([gradients] if gradients else []):
                return False
        for s in range(self.depth):
            copies = {s + c * self.depth for c in range(program.copies)}
            if len(copies) > 1 and copies not in [set(tie) for tie in program.tied]:
                return False
        ranks_of = [{program.placement[s] for s in tie} for tie in program.tied]
        return all(self.arrived[k] == ranks for k, ranks in enumerate(ranks_of))


def pairs_stand(program: Program) -> bool:
    """True if only transfers and offloads are between the two actions of every pair."""
    members = [action for pair in program.pairs for action in pair]
    if len(set(members)) < len(members):
        return False
    for first, second in program.pairs:
        if first.kind.value != "F" or second.kind.value not in ("B", "I"):
            return False
        rows = [order for order in program.orders if first in order and second in order]
        if len(rows) != 1 or first[::2] == second[::2]:
            return False
        between = rows[0][rows[0].index(first) + 1 : rows[0].index(second)]
        if rows[0].index(second) < rows[0].index(first):
            return False
        if not all(a.kind.value.startswith(("SEND", "RECV", "OFFLOAD")) for a in between):
            return False
    return True


def completes(program: Program, seed: int = 0, transport: str = "rendezvous") -> bool:
    """True if the program completes, as written and with each pair as one block."""
    if not pairs_stand(program) or not Machine(program, seed, transport).run():
        return False
    return not program.pairs or Machine(program, seed, transport, blocks=True).run()
