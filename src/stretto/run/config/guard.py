"""What becomes of a step whose numbers cannot be right, and of copies that differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from stretto.errors import Problem
from stretto.spec.field import Field

Action = Literal["stop", "skip", "rollback"]


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What becomes of a step whose numbers cannot be right, and of copies that differ."""

    on_nonfinite: Annotated[
        Action,
        Field(
            "Where a loss or a gradient is NaN or infinite, no rank applies the update. Then `stop` ends the "
            "run, `skip` goes on with the next step, and `rollback` goes back to the newest whole checkpoint "
            "and goes on behind the samples of the step."
        ),
    ] = "stop"
    on_spike: Annotated[
        Literal["off", "stop", "skip", "rollback"],
        Field("The same where the loss or the gradient norm jumps up."),
    ] = "off"
    spike_sigma: Annotated[
        float,
        Field(
            "What a jump is: so many standard deviations above the median of the window, both estimated so "
            "that single outliers do not move them.",
            gt=0,
        ),
    ] = 6.0
    spike_window: Annotated[
        int, Field("Steps of the window; none is judged before it is half full.", gt=3)
    ] = 128
    max_skips: Annotated[
        int, Field("Bad steps in a row that are skipped or rolled back; the next one stops.", gt=0)
    ] = 10
    check_replicas: Annotated[
        int | None,
        Field(
            "Steps from one comparison of all copies of weights and optimiser states on different ranks, by "
            "checksum, to the next, and before every checkpoint; null: none.",
            gt=0,
        ),
    ] = None
    check_memory: Annotated[
        int | None,
        Field(
            "Steps from one check that weights and optimiser states in memory keep their bits from an update "
            "to the next, by checksum, to the next check: with 1 none is left out. It also finds what only "
            "one rank holds, as shards of ZeRO; null: none.",
            gt=0,
        ),
    ] = None
    on_mismatch: Annotated[
        Literal["stop", "rollback"],
        Field(
            "Where copies differ, or memory has changed by itself: `rollback` goes back to the newest whole "
            "checkpoint from before, and trains on the same samples again."
        ),
    ] = "stop"

    @property
    def rolls_back(self) -> bool:
        """Whether any rule goes back to a checkpoint."""
        return "rollback" in (self.on_nonfinite, self.on_spike, self.on_mismatch)

    @property
    def keeps_on(self) -> bool:
        """Whether a bad step is ever passed over, or memory checked, so that every rank must know of it
        before it updates.
        """
        return self.on_nonfinite != "stop" or self.on_spike != "off" or self.check_memory is not None


def guard_problems(guard: GuardConfig, save_every: int | None, asynchronous: bool) -> Iterator[Problem]:
    """Rules that the rest of the job does not allow.

    Args:
        save_every: `checkpoint.every`.
        asynchronous: the schedule updates weights within the step.
    """
    for name in ("on_nonfinite", "on_spike", "on_mismatch"):
        action = getattr(guard, name)
        if action == "rollback" and save_every is None:
            yield Problem(
                f"guard.{name}",
                action,
                "there are no checkpoints to go back to, for checkpoint.every is null",
                "checkpoint.every=100",
            )
        if not asynchronous or name == "on_mismatch":
            continue
        if action == "rollback" or (name == "on_spike" and action == "skip"):
            fix = f"guard.{name}={'stop' if name == 'on_spike' else 'skip'}, or schedule.name=1f1b"
            yield Problem(
                f"guard.{name}",
                action,
                "this schedule updates the weights before all ranks know of the step, and has begun others",
                fix,
            )
    if asynchronous and guard.check_memory is not None:
        rule = "this schedule updates the weights within the step"
        fix = "guard.check_memory=null, or schedule.name=1f1b"
        yield Problem("guard.check_memory", guard.check_memory, rule, fix)
    if guard.on_mismatch == "rollback" and guard.check_replicas is None and guard.check_memory is None:
        rule = "nothing is compared without check_replicas or check_memory"
        yield Problem("guard.on_mismatch", "rollback", rule, "guard.check_replicas=100")
