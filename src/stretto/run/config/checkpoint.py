"""The section `checkpoint` of a config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from stretto.spec.field import Field


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints on disk, to resume from."""

    every: Annotated[
        int | None, Field("Steps from one checkpoint to the next; null: at the end only.", gt=0)
    ] = None
    async_save: Annotated[
        bool,
        Field(
            "Copy what is saved to host memory, and write it while training goes on. What lies in files "
            "already is written at once; the last checkpoint of a run is waited for."
        ),
    ] = False
    if_busy: Annotated[
        Literal["wait", "skip"],
        Field(
            "What a checkpoint does while the one before it is still being written: wait for it, or leave "
            "itself out."
        ),
    ] = "wait"
    keep: Annotated[int | None, Field("Number of newest checkpoints to keep; null: all.", gt=0)] = 2
    keep_every: Annotated[
        int | None, Field("Keep the checkpoints of steps that are multiples of this as well.", gt=0)
    ] = None
    keep_best: Annotated[
        int | None,
        Field(
            "Number of checkpoints to keep as well that have the least held-out loss (`eval.every`) at their "
            "step; of recommenders, the least logloss.",
            gt=0,
        ),
    ] = None
    resume: Annotated[
        str,
        Field(
            "`never`, `auto` (from the run's newest complete checkpoint, if any), or a folder.", filled=True
        ),
    ] = "never"


@dataclass(frozen=True, kw_only=True)
class WeightsConfig(CheckpointConfig):
    """Checkpoints on disk, to resume from."""

    may_differ: Annotated[
        list[str],
        Field(
            "Fields of `model` that may differ from the checkpoint's, as where the context is extended; "
            "without, training refuses weights of a model that computes something else.",
            examples=("[rope_theta, rope]",),
        ),
    ] = field(default_factory=list[str])
