"""Options that several commands share, and options gathered in one object."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo

from stretto.errors import StrettoError, nearest

if TYPE_CHECKING:
    from stretto.planner.assumptions import SoftwareAssumptions

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
ConfigFile = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file, as `stretto train` takes it.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Fields of CONFIG to override.")
]
TrainedRun = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder (its newest checkpoint), or a checkpoint.")
]
CheckpointStep = Annotated[
    int | None, typer.Option(metavar="STEP", min=0, help="The run's checkpoint of this step.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port on which local ranks meet; 0: any.")]
ModelName = Annotated[
    str | None, typer.Option(metavar="NAME", help="A model of `stretto catalogue`, or its config.json.")
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:N]",
        help="A cluster or device of `stretto catalogue` and how many devices, as in h100:64; a YAML file; "
        "or here: this machine, as `stretto calibrate` measured it.",
    ),
]
Software = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Kernels, launches and overlap of serial, unfused, eager, fused, today, compiled, engine or "
        "tuned software; default: today, or what the framework has.",
    ),
]
PipelineRanks = Annotated[int | None, typer.Option(min=1, help="Pipeline ranks.")]
Microbatches = Annotated[int | None, typer.Option(min=1, help="Microbatches of a step.")]
Chunks = Annotated[int | None, typer.Option(min=1, help="Stages per rank, for schedules that have several.")]
ScheduleOptions = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE", help="Another option of the schedule, as `stretto schedule --list` shows."
    ),
]
Picture = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the picture here as SVG.")]
Page = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with pictures here.")]

T = TypeVar("T")


def check_choice(option: str, value: str, allowed: Iterable[str]) -> None:
    """Raise StrettoError for a value that is not allowed; its hint names a similar one that is."""
    allowed = list(allowed)
    if value not in allowed:
        similar = nearest(value, allowed)
        raise StrettoError(
            f"{option} is {value!r}, must be one of {', '.join(allowed)}",
            hint=f"did you mean {similar!r}?" if similar else None,
        )


def as_typed(text: str, flags: Mapping[str, str]) -> str:
    """Return the text of an error with options as they were typed, in place of arguments in Python."""
    name = rf"(?:train\.(?=device\b))?({'|'.join(flags) or '$.'})"
    return re.sub(
        rf"(?<![\w.:-]){name}(?:=(?=[\w'])|(?= out\b))|^{name}(?= (?:is|has)\b)",
        lambda match: (flag := flags[match[1] or match[2]]) + "= "[flag[0] == "-"] * match[0].endswith("="),
        text,
    )


def software_named(name: str) -> SoftwareAssumptions:
    """Return the profile that `--software` names.

    Raises:
        StrettoError: there is none; the hint has the nearest.
    """
    from stretto.planner.assumptions import software_profile, software_profiles

    check_choice("--software", name, software_profiles())
    return software_profile(name)


def grouped(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Let a command take its options as one object, and name them in its errors as they were typed.

    Args:
        options: a dataclass whose fields are declared as the parameters of a Typer command are.
    """

    def decorate(command: Callable[[T], None]) -> Callable[..., None]:
        hints = get_type_hints(options, include_extras=True)
        flags = dict[str, str]()
        for name, hint in hints.items():
            if isinstance(kind := getattr(hint, "__metadata__", [None])[0], OptionInfo):
                first = kind.default  # typer takes a first flag for a default
                flags[name] = first if isinstance(first, str) else f"--{name.replace('_', '-')}"

        def parse(**values: Any) -> None:
            defaults = {field.name: field.default for field in fields(options)}  # pyright: ignore[reportArgumentType]
            typed = {name: flag for name, flag in flags.items() if values[name] != defaults[name]}
            for name, flag in typed.items():
                if isinstance(value := values[name], float) and not isfinite(value):
                    wrong = f"{flag} is {value}, must be a finite number"
                    raise StrettoError(wrong, hint=f"give a number, or leave {flag} out")
            try:
                command(options(**values))
            except StrettoError as error:
                error.message = as_typed(error.message, typed)
                error.hint = error.hint and as_typed(error.hint, typed)
                raise

        parse.__name__, parse.__doc__ = command.__name__, command.__doc__
        parse.__annotations__ = hints
        parse.__signature__ = Signature(  # pyright: ignore[reportFunctionMemberAccess]
            [
                Parameter(
                    field.name,
                    Parameter.KEYWORD_ONLY,
                    default=Parameter.empty if field.default is MISSING else field.default,
                    annotation=hints[field.name],
                )
                for field in fields(options)  # pyright: ignore[reportArgumentType]
            ]
        )
        return parse

    return decorate
