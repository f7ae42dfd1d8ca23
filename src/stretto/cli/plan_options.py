"""Options of `stretto plan`, for language models and recommenders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.interop import FRAMEWORKS, Emit, Output
from stretto.cli.options import ClusterName, Json, ModelName, Overrides, Page, Software


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `stretto plan`."""

    context: typer.Context
    config: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG]", help="Take model, batch and sequence from this YAML file."),
    ] = None
    overrides: Overrides = None
    model: ModelName = None
    cluster: ClusterName = None
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per step.")] = None
    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens per sample; default: the model's.")] = (
        None
    )
    target_sequence: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a decoder's sample beside an encoder; default: as many."),
    ] = None
    max_gpus: Annotated[
        int | None, typer.Option(min=1, help="Use at most this many devices; its divisors are tried too.")
    ] = None
    fix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Fix a choice, as in tp=8, pp=4,8 or schedule=mine.py:lifo; repeatable.",
        ),
    ] = None
    objective: Annotated[str, typer.Option(help="time or tokens_per_dollar.")] = "time"
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32; default: bf16, fp16 on devices without it.")
    ] = None
    software: Software = None
    target: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="FRAMEWORK",
            help=f"Search only layouts that it has, at their costs there: {FRAMEWORKS}. Implied by --emit.",
        ),
    ] = None
    asynchronous: Annotated[
        bool,
        typer.Option(
            "--asynchronous",
            help="Also try asynchronous schedules, which update within the step and train differently; "
            "without a CONFIG they drain every 100 steps.",
        ),
    ] = False
    wide: Annotated[
        bool,
        typer.Option(
            "--wide", help="Try offload, and ZeRO 2 and 3 in pipelines, even if layouts fit without them."
        ),
    ] = False
    seconds: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Limit of the search's work, in seconds of an idle core: 0.5, 1, 2, 4, 8, ..., others are "
            "rounded down. A busy machine finds the same layouts, later; a larger limit none that are worse.",
        ),
    ] = 8.0
    top: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 10
    room: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="GIB",
            help="Device memory that the fastest safe layout, shown beside the fastest, leaves free beyond "
            "the interval of its prediction.",
        ),
    ] = 0.0
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if",
            help="Then search with twice and half the network between nodes, larger cards, one more node, "
            "other batches, fp8 and other software, and say which resource binds.",
        ),
    ] = False
    write: Annotated[Path | None, typer.Option(help="Write the best layout's config here.")] = None
    html: Page = None
    emit: Emit = None
    row: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="With --emit: the N-th layout; default: the first."),
    ] = None
    output: Output = None
    placement: Annotated[
        Path | None,
        typer.Option(
            help="For a recommender: evaluate the placements in this YAML file instead of searching."
        ),
    ] = None
    as_json: Json = False
