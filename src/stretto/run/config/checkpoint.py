"""The section `checkpoint` of a config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stretto.run.config.section import Section


class CheckpointConfig(Section):
    """Checkpoints on disk, to resume from."""

    every: int | None = Field(
        default=None, gt=0, description="Steps from one checkpoint to the next; null: at the end only."
    )
    async_save: bool = Field(
        default=False,
        description="Copy what is saved to host memory, and write it while training goes on. What lies in "
        "files already is written at once; the last checkpoint of a run is waited for.",
    )
    if_busy: Literal["wait", "skip"] = Field(
        default="wait",
        description="What a checkpoint does while the one before it is still being written: wait for it, or "
        "leave itself out.",
    )
    keep: int | None = Field(default=2, gt=0, description="Number of newest checkpoints to keep; null: all.")
    keep_every: int | None = Field(
        default=None, gt=0, description="Keep the checkpoints of steps that are multiples of this as well."
    )
    keep_best: int | None = Field(
        default=None,
        gt=0,
        description="Number of checkpoints to keep as well that have the least held-out loss (`eval.every`) "
        "at their step; of recommenders, the least logloss.",
    )
    resume: str = Field(
        default="never",
        min_length=1,
        description="`never`, `auto` (from the run's newest complete checkpoint, if any), or a folder.",
    )


class WeightsConfig(CheckpointConfig):
    """Checkpoints on disk, to resume from."""

    may_differ: list[str] = Field(
        default_factory=list[str],
        examples=["[rope_theta, rope]"],
        description="Fields of `model` that may differ from the checkpoint's, as where the context is "
        "extended; without, training refuses weights of a model that computes something else.",
    )
