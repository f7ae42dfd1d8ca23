"""An executor that moves real messages through real queues: the checker's judge, sharing no code with it."""

from __future__ import annotations

from collections import Counter, deque
from random import Random

from stretto.schedule import Action, Kind, Program


class WrongError(Exception):
    """The program asks a rank for what it cannot do."""


class Machine:
    """All ranks of a program. `run` says whether they get to their ends with the step's work done."""

    def __init__(self, program: Program, seed: int = 0) -> None:
        self.program = program
        self.random = Random(seed)
        self.pc = [0] * program.ranks
        self.have: list[set[str]] = [set() for _ in range(program.ranks)]  # values on each rank
        self.queues: dict[tuple[int, int, str], deque[str]] = {}
        self.slots: dict[tuple[int, int, str], deque[str]] = {}
        self.posted: list[set[str]] = [set() for _ in range(program.ranks)]
        self.count = Counter[str]()
        self.arrived: dict[int, set[int]] = {k: set() for k in range(len(program.tied))}
        self.reductions = Counter[int]()
        self.set_members = Counter[tuple[int, int]]()

    def run(self) -> bool:
        try:
            while True:
                ranks = [r for r in range(self.program.ranks) if self.pc[r] < len(self.program.orders[r])]
                self.random.shuffle(ranks)
                if not any(self.step(rank) for rank in ranks):
                    break
        except WrongError:
            return False
        return not ranks and self.clean() and self.worked()

    def clean(self) -> bool:
        """No message is left on its way, no receive left open."""
        return not any(self.queues.values()) and not any(self.slots.values())

    def worked(self) -> bool:
        program = self.program
        for s in range(program.stages):
            for i in range(program.microbatches):
                f, b, split, w = (self.count[f"{s}{kind}{i}"] for kind in "FBIW")
                if f != 1 or (b, split, w) not in ((1, 0, 0), (0, 1, 1)):
                    return False
            if program.lowered and self.reductions[s] != 1:
                return False
        ranks_of = [{program.placement[s] for s in tie} for tie in program.tied]
        return not program.lowered or all(self.arrived[k] == ranks for k, ranks in enumerate(ranks_of))

    def step(self, rank: int) -> bool:
        """Do the rank's next action, if it can go ahead now."""
        action = self.program.orders[rank][self.pc[rank]]
        if not 0 <= action.stage < self.program.stages or self.program.placement[action.stage] != rank:
            raise WrongError
        went = self.do(rank, action)
        if went:
            self.pc[rank] += 1
            self.count[str(action)] += 1
        return went

    def do(self, rank: int, action: Action) -> bool:
        s, kind, i = action
        if kind is Kind.REDUCE_GRAD:
            return self.reduce(s)
        if kind is Kind.REDUCE_TIED:
            return self.reduce_tied(rank, s)
        if i is None or not 0 <= i < self.program.microbatches or self.count[str(action)]:
            raise WrongError
        if kind is Kind.F:
            return self.compute(rank, s - 1, f"y{s - 1}.{i}", f"y{s}.{i}", "F", i)
        if kind in (Kind.B, Kind.I):
            if f"y{s}.{i}" not in self.have[rank] or self.count[f"{s}B{i}"] + self.count[f"{s}I{i}"]:
                raise WrongError
            return self.compute(rank, s + 1, f"g{s + 1}.{i}", f"g{s}.{i}", "B", i)
        if kind is Kind.W:
            if not self.count[f"{s}I{i}"]:
                raise WrongError
            return True
        self.transfer(rank, s, kind, i)
        return True

    def compute(self, rank: int, source: int, needed: str, made: str, direction: str, i: int) -> bool:
        program = self.program
        if 0 <= source < program.stages:
            there = program.placement[source]
            if there == rank:
                if needed not in self.have[rank]:
                    raise WrongError  # nobody else will make it
            elif program.lowered:
                if needed not in self.posted[rank]:
                    raise WrongError  # no buffer to wait for
                self.deliver(there, rank, direction)
                if needed not in self.have[rank]:
                    return False
            elif needed not in self.have[there]:
                return False
        self.have[rank].add(made)
        return True

    def transfer(self, rank: int, s: int, kind: Kind, i: int) -> None:
        program, forward = self.program, kind in (Kind.SEND_F, Kind.RECV_F)
        sending = kind in (Kind.SEND_F, Kind.SEND_B)
        other = s + (1 if forward == sending else -1)
        if not program.lowered or not 0 <= other < program.stages or program.placement[other] == rank:
            raise WrongError
        there, direction = program.placement[other], "F" if forward else "B"
        if sending:
            value = f"{'y' if forward else 'g'}{s}.{i}"
            if value not in self.have[rank]:
                raise WrongError
            self.queues.setdefault((rank, there, direction), deque()).append(value)
            self.deliver(rank, there, direction)
        else:
            value = f"{'y' if forward else 'g'}{other}.{i}"
            self.posted[rank].add(value)
            self.slots.setdefault((there, rank, direction), deque()).append(value)
            self.deliver(there, rank, direction)

    def deliver(self, source: int, to: int, direction: str) -> None:
        """Match messages and receives of a channel in their order."""
        queue = self.queues.get((source, to, direction), deque())
        slots = self.slots.get((source, to, direction), deque())
        while queue and slots:
            if (value := queue.popleft()) != slots.popleft():
                raise WrongError  # the buffer gets another message than it was made for
            self.have[to].add(value)

    def reduce(self, s: int) -> bool:
        """All gradients of the stage are there."""
        grads = sum(self.count[f"{s}{kind}{i}"] for kind in "BW" for i in range(self.program.microbatches))
        if not self.program.lowered:
            return True
        if grads != self.program.microbatches:
            raise WrongError
        self.reductions[s] += 1
        return True

    def reduce_tied(self, rank: int, s: int) -> bool:
        """The stage's next set: a rank joins it with the last of its stages there, then waits."""
        program = self.program
        if not program.lowered:
            return True
        sets = [k for k, tie in enumerate(program.tied) if s in tie]
        nth = self.count[f"{s}REDUCE_TIED"]
        if nth >= len(sets) or not self.reductions[s]:
            raise WrongError
        k = sets[nth]
        mine = [stage for stage in program.tied[k] if program.placement[stage] == rank]
        if (k, s) not in self.set_members:
            self.set_members[k, s] = 1
        if all((k, stage) in self.set_members for stage in mine):
            self.arrived[k].add(rank)
            return self.arrived[k] == {program.placement[stage] for stage in program.tied[k]}
        return True


def completes(program: Program, seed: int = 0) -> bool:
    return Machine(program, seed).run()
