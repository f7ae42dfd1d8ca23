"""Deadlock freedom under different transports, which define how sends and receives behave.

Every rank is an agent whose steps are its actions. If transfers proceed independently, each queue of them is
an agent too. A step waits only for other agents to complete a number of steps. Such a system is confluent:
how far it gets does not depend on the speed of its agents, so one execution proves all executions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from stretto.errors import StrettoError, nearest
from stretto.program.action import Action, ActionKind
from stretto.program.messages import RankDependency, needed_by, receive_of, send_of, tied_waits
from stretto.program.pairing import as_blocks
from stretto.program.program import Program, ScheduleError

TRANSPORTS = {
    "rendezvous": "a send is done once its receive is posted; ranks wait only where they use a message",
    "buffered": "a send is done at once; ranks wait only where they use a message",
    "blocking": "a send or a receive blocks its rank until the other rank has reached its counterpart",
    "paired": "the transfers of a pair of ranks, in both directions, go one after another on each side",
    "batched": "the neighbouring transfers of a rank are one group, and its groups go one after another",
}


@dataclass
class Agent:
    """A rank or a queue of transfers: the action of each of its steps, and the waits before steps, by index.

    In a wait, `rank` is the index of an agent and `completed` a number of its steps.
    """

    name: str
    verbs: tuple[str, str]  # "waits", "reaches"
    steps: list[Action] = field(default_factory=list[Action])
    waits: dict[int, list[RankDependency]] = field(default_factory=dict[int, list[RankDependency]])


def check_transport(program: Program, transport: str = "rendezvous", blocks: bool = False) -> None:
    """Check that the program completes without deadlock under a transport.

    On every channel (source, destination, direction) messages meet receives in order, whatever the transport.

    - `rendezvous`: sends and receives do not block. A message arrives once it is sent and its receive is
      posted; the F, B or I that uses it waits. The transport of Stretto's executor.
    - `buffered`: the same, but a send completes without its receive. Since no rank ever waits for a send, the
      same programs complete under both.
    - `blocking`: a send or a receive blocks its rank until the other rank has reached the counterpart, as
      MPI_Ssend and MPI_Recv do.
    - `paired`: the transfers between two ranks, in both directions, run one at a time on each side in the
      order of that side's program; a transfer completes when both sides have reached it. NCCL with one
      communicator for each pair: `isend` and `irecv` of torch.distributed.
    - `batched`: transfers that directly follow one another are one group. A group starts when its rank has
      reached its last transfer and the rank's group before it is complete; a transfer completes when the
      groups of both sides have started. NCCL with one communicator for all ranks: torch.distributed's
      `batch_isend_irecv`.

    A reduction of tied parameters blocks a rank until all ranks of the set have reached it.

    Args:
        program: a program that is correct within each rank (`check`).
        transport: one of `TRANSPORTS`; all but the first two are for lowered programs.
        blocks: run each pair as one block, which starts when both inputs have arrived and sends its results
            when both actions are done.

    Raises:
        StrettoError: the transport does not exist, or needs a lowered program.
        ScheduleError: the program deadlocks; the message names the cycle of waits.
    """
    if transport not in TRANSPORTS:
        close = nearest(transport, TRANSPORTS)
        raise StrettoError(
            f"transport is {transport!r}, must be one of {', '.join(TRANSPORTS)}",
            hint=f"did you mean {close!r}?" if close else None,
        )
    if transport not in ("rendezvous", "buffered") and not program.lowered:
        raise StrettoError(
            f"transport is {transport!r}, but program {program.name!r} has no transfers yet",
            hint="give the lowered program",
        )
    _Execution(_agents(as_blocks(program) if blocks else program, transport, blocks)).run()


def _agents(program: Program, transport: str, blocks: bool) -> list[Agent]:
    """Return the ranks, then the queues of their transfers."""
    agents = [
        Agent(f"rank {rank}", ("waits", "reaches"), list(order)) for rank, order in enumerate(program.orders)
    ]
    position = {action: at for order in program.orders for at, action in enumerate(order)}
    done: dict[Action, RankDependency] = {}  # when the message of a receive has arrived
    if transport in ("paired", "batched"):
        done = _add_queues(agents, program, position, transport == "batched")
    partner = dict(program.pairs) if blocks else {}
    sources: dict[tuple[int, ActionKind], Action] = {}  # of a stage's and kind's input from another rank
    for stage, kind in {(stage, kind) for stage, kind, _ in position}:
        # with `blocking` the rank has not passed the receive without it
        if transport != "blocking" and (receive := needed_by(program, Action(stage, kind))):
            sources[stage, kind] = receive if done else _source(program, receive)
    for rank, order in enumerate(program.orders):
        waits = agents[rank].waits
        for at, action in enumerate(order):
            parts = (action, partner[action]) if action in partner else (action,)
            conditions = [
                _arrival(program, position, done, source, i)
                for stage, kind, i in parts
                if (source := sources.get((stage, kind)))
            ]
            if transport == "blocking" and action.kind.is_transfer:
                other = _counterpart(action)
                conditions.append(RankDependency(program.placement[other.stage], position[other], other))
            if conditions:
                waits[at] = conditions
    if program.lowered:
        for (rank, at), conditions in tied_waits(program).items():
            agents[rank].waits[at] = conditions
    return agents


def _source(program: Program, receive: Action) -> Action:
    """Return what a message waits for, without a microbatch: its send, or what computes it (B: or I)."""
    stage, kind, _ = send = send_of(receive)
    if program.lowered:
        return send
    # the forward of a block completes only with the block, which waits for both inputs
    return Action(stage, ActionKind.F if kind is ActionKind.SEND_F else ActionKind.B)


def _arrival(
    program: Program,
    position: dict[Action, int],
    done: dict[Action, RankDependency],
    source: Action,
    microbatch: int | None,
) -> RankDependency:
    """Return the condition under which a microbatch's message has arrived.

    Args:
        source: the receive, if queues carry messages and `done` has when it is done; otherwise `_source`.
    """
    stage, kind, _ = source
    backward = kind is ActionKind.B
    awaited = backward_of(position, stage, microbatch) if backward else Action(stage, kind, microbatch)
    return done[awaited] if done else RankDependency(program.placement[stage], position[awaited] + 1, awaited)


def backward_of(position: dict[Action, int], stage: int, microbatch: int | None) -> Action:
    """Return the action that computes the gradient of the stage's input: its I if it has one, else its B."""
    split = Action(stage, ActionKind.I, microbatch)
    return split if split in position else Action(stage, ActionKind.B, microbatch)


def _counterpart(transfer: Action) -> Action:
    if transfer.kind in (ActionKind.SEND_F, ActionKind.SEND_B):
        return receive_of(transfer)
    return send_of(transfer)


def _add_queues(
    agents: list[Agent], program: Program, position: dict[Action, int], batched: bool
) -> dict[Action, RankDependency]:
    """Add the agents that carry transfers; return when the message of each receive arrives.

    A queue has two steps per group: its start and its end.
    """
    groups: dict[int, list[list[Action]]] = {}  # by agent
    at: dict[Action, tuple[int, int]] = {}  # agent and group of each transfer
    for rank, order in enumerate(program.orders):
        queues: dict[int | None, int] = {}
        before: Action | None = None
        for action in order:
            if action.kind.is_transfer:
                peer = None if batched else program.placement[_counterpart(action).stage]
                if peer not in queues:
                    name = f"rank {rank}'s transfers" + ("" if peer is None else f" with rank {peer}")
                    queues[peer] = len(agents)
                    groups[len(agents)] = []
                    agents.append(Agent(name, ("wait", "reach")))
                queue = groups[queues[peer]]
                if batched and before is not None and before.kind.is_transfer:
                    queue[-1].append(action)
                else:
                    queue.append([action])
                at[action] = queues[peer], len(queue) - 1
            before = action
    for number, queue_groups in groups.items():
        agent = agents[number]
        for group in queue_groups:
            last = group[-1]
            rank = program.placement[last.stage]
            agent.waits[len(agent.steps)] = [RankDependency(rank, position[last] + 1, last)]
            others = [(at[other], other) for other in map(_counterpart, group)]
            agent.waits[len(agent.steps) + 1] = [
                RankDependency(to, 2 * nth + 1, other) for (to, nth), other in others
            ]
            agent.steps += [group[0], last]
    return {
        transfer: RankDependency(number, 2 * nth + 2, transfer)
        for transfer, (number, nth) in at.items()
        if transfer.kind in (ActionKind.RECV_F, ActionKind.RECV_B)
    }


class _Execution:
    """An execution without times: the number of completed steps of each agent."""

    def __init__(self, agents: list[Agent]) -> None:
        self.agents = agents
        self.done = [0] * len(agents)

    def run(self) -> None:
        """Advance every agent as far as possible.

        Raises:
            ScheduleError: some agents cannot complete their steps.
        """
        runnable = list(range(len(self.agents)))
        blocked: dict[int, list[int]] = defaultdict(list)
        while runnable:
            agent = runnable.pop()
            before = self.done[agent]
            wait = self._advance(agent)
            if wait is not None:
                blocked[wait.rank].append(agent)
            if self.done[agent] > before:
                runnable.extend(blocked.pop(agent, ()))
        for number, agent in enumerate(self.agents):
            if self.done[number] < len(agent.steps):
                raise self._deadlock(number)

    def _advance(self, number: int) -> RankDependency | None:
        """Advance the agent until it has to wait; return that wait, or None at the agent's end."""
        agent, done = self.agents[number], self.done
        for at in range(done[number], len(agent.steps)):
            for wait in agent.waits.get(at, ()):
                if done[wait.rank] < wait.completed:
                    done[number] = at
                    return wait
        done[number] = len(agent.steps)
        return None

    def _deadlock(self, number: int) -> ScheduleError:
        """Return the error of the cycle of waits that a stuck agent leads to."""
        lines: dict[int, str] = {}
        waits: dict[int, tuple[Action, Action]] = {}
        while number not in lines:
            agent, at = self.agents[number], self.done[number]
            wait = next(w for w in agent.waits.get(at, ()) if self.done[w.rank] < w.completed)
            other = self.agents[wait.rank]
            blocked = other.steps[self.done[wait.rank]]
            waits[number] = agent.steps[at], wait.action
            lines[number] = (
                f"{agent.name} {agent.verbs[0]} at {agent.steps[at]} for {wait.action}, "
                f"which {other.name} {other.verbs[1]} only after {blocked}"
            )
            number = wait.rank
        order = list(lines)
        circle = order[order.index(number) :]
        message = "deadlock: " + "; ".join(lines[n] for n in circle)
        error = ScheduleError(message, hint="do one of the awaited actions earlier")
        if not any(action.kind.is_transfer for n in circle for action in waits[n]):
            error.cycle = tuple(waits[n] for n in circle)
        return error
