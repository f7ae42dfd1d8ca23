"""A program, the actions of every pipeline rank between two drains, and the error of an invalid program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from stretto.display import render
from stretto.errors import StrettoError
from stretto.program.action import Action, ActionKind


@dataclass(frozen=True, kw_only=True)
class Program:
    """The actions of every pipeline rank in one training step, in order.

    An asynchronous pipeline does not drain between steps. Its program is a window of `steps` steps: it fills,
    runs all their microbatches, numbered through from the first step, and drains once.

    A schedule generates compute actions only (and `U` if weights change within the step); `lower` adds
    communications and sets `lowered`.

    Stages are numbered along the model. If ranks hold several copies of the weights (bidirectional
    pipelines), stage s of copy c is `c * depth + s`; a microbatch goes through one copy.
    """

    name: str
    placement: tuple[int, ...]  # rank of each stage
    microbatches: int  # of all steps
    orders: tuple[tuple[Action, ...], ...]  # one per rank
    parameters: Mapping[str, int] = field(default_factory=dict[str, int])  # chunks, group, ...
    tied: tuple[tuple[int, ...], ...] = ()  # sets of stages that share a parameter; set by lowering
    lowered: bool = False
    trains: bool = True  # False: forwards only
    copies: int = 1  # of the weights
    # (F, B) neighbours in an order that may run as one overlapped block
    pairs: frozenset[tuple[Action, Action]] = frozenset()
    # asynchronous schedules: for each stage and microbatch, the number of updates (`U`) within the program
    # that its forward's weights, and so its backward's, include; empty: updated after the last action only
    versions: tuple[tuple[int, ...], ...] = ()
    steps: int = 1  # training steps without a drain in between, all with the same number of microbatches

    def __hash__(self) -> int:
        """Hash what is cheap to hash, so that caches can take programs as keys."""
        return hash((self.name, self.placement, self.microbatches, self.lowered))

    def __repr__(self) -> str:
        """Return a summary, since orders may have thousands of actions."""
        actions = sum(map(len, self.orders))
        stages = f", {self.stages} stages" if self.stages != self.ranks else ""
        steps = f" of {self.steps} steps" if self.steps > 1 else ""
        lowered = ", lowered" if self.lowered else ""
        sizes = f"{self.ranks} ranks{stages}, {self.microbatches} microbatches{steps}, {actions} actions"
        return f"Program({self.name!r}: {sizes}{lowered})"

    def _repr_html_(self) -> str | None:
        return render("program_html", self)

    def _repr_svg_(self) -> str | None:
        return render("program_svg", self)

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def stages(self) -> int:
        """Stages of all copies."""
        return len(self.placement)

    @cached_property
    def depth(self) -> int:
        """Stages of one copy of the model."""
        return len(self.placement) // self.copies

    @property
    def step_microbatches(self) -> int:
        """Microbatches of one training step."""
        return self.microbatches // self.steps

    def is_first(self, stage: int) -> bool:
        """True if the stage takes the model's input."""
        return stage % self.depth == 0

    def is_last(self, stage: int) -> bool:
        """True if the stage computes the loss."""
        return (stage + 1) % self.depth == 0

    @cached_property
    def sends(self) -> tuple[bool, ...]:
        """For each stage whether its output goes to another rank."""
        following = (*self.placement[1:], -1)
        return tuple(
            not self.is_last(stage) and rank != following[stage] for stage, rank in enumerate(self.placement)
        )

    @cached_property
    def positions(self) -> tuple[dict[tuple[int, ActionKind, int | None], int], ...]:
        """For each rank, the index of each action in its order; of an action that occurs again, its last."""
        return tuple({action: at for at, action in enumerate(order)} for order in self.orders)

    def updates(self, stage: int) -> int:
        """Return the number of updates of a stage: one, after the last action, in a synchronous program."""
        if not self.versions:
            return 1
        order = self.orders[self.placement[stage]]
        return sum(action.stage == stage and action.kind is ActionKind.UPDATE for action in order)

    @cached_property
    def copy_of(self) -> tuple[int, ...]:
        """The copy that each microbatch goes through, or -1 if no first stage has its F."""
        copies, F = [-1] * self.microbatches, ActionKind.F
        for stage in range(0, self.stages, self.depth):
            for action in self.orders[self.placement[stage]]:
                stage_, kind, i = action
                if stage_ == stage and kind is F and i is not None and 0 <= i < self.microbatches:
                    copies[i] = stage // self.depth
        return tuple(copies)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that `rank` holds, in model order."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]


class ScheduleError(StrettoError):
    """The program deadlocks or does not do a step's work; the message names the rank and the action.

    Attributes:
        cycle: of a deadlock, each action that waits, with the action that it waits for, in the order of the
            cycle; empty if messages wait as well.
    """

    cycle: tuple[tuple[Action, Action], ...] = ()
