"""What commands take from the package `stretto_interop`, loaded when it is used.

No other module of `stretto` imports that package.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.output import write_file
from stretto.errors import StrettoError

PACKAGE = "stretto_interop"
COMMANDS = {"migrate": f"{PACKAGE}.commands.migrate"}  # whole commands, by name
NAMES = ("megatron", "nemo", "torchtitan", "deepspeed")  # of the registry, which help should not import
TABLES = "torchrec"  # for recommenders
FRAMEWORKS = f"{', '.join(NAMES)}; {TABLES} for a recommender"


class _Loaded:
    """A module that is imported when one of its names is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(load(self._name), name)


def is_installed(command: str) -> bool:
    """True if the command is not of the package, or the package is installed."""
    return command not in COMMANDS or find_spec(PACKAGE) is not None


def load(name: str) -> Any:
    """Import a module of the package.

    Raises:
        StrettoError: the package is not installed.
    """
    if find_spec(PACKAGE) is None:
        raise StrettoError(
            f"configs and checkpoints of other frameworks take the package {PACKAGE}",
            hint="pip install 'stretto[interop]'",
        )
    return import_module(name)


if TYPE_CHECKING:
    from stretto_interop.commands import checkpoint as checkpoint
    from stretto_interop.commands import emit as emit
    from stretto_interop.frameworks import planned as planned
    from stretto_interop.frameworks.mapping import ExternalFramework
else:
    checkpoint = _Loaded(f"{PACKAGE}.commands.checkpoint")
    emit = _Loaded(f"{PACKAGE}.commands.emit")
    planned = _Loaded(f"{PACKAGE}.frameworks.planned")


Emit = Annotated[
    str | None,
    typer.Option(metavar="FRAMEWORK", help=f"Print the job as another framework takes it: {FRAMEWORKS}."),
]
Output = Annotated[
    Path | None, typer.Option(metavar="FILE", help="With --emit: write it here instead of printing it.")
]


def framework_named(name: str | None, others: dict[str, object]) -> ExternalFramework | None:
    """The framework of `--emit`, if it is given and not one for recommenders.

    Args:
        others: options that are of use with `--emit` only, by name.

    Raises:
        StrettoError: no framework has that name, or one of the other options is given without it.
    """
    if name is None:
        wrong = next((option for option, value in others.items() if value is not None), None)
        if wrong is not None:
            raise StrettoError(f"--{wrong} is for --emit", hint=f"add --emit {NAMES[0]}, or another")
        return None
    return None if name == TABLES else emit.framework(name)


def check_trains_language(name: str | None) -> None:
    """Raise StrettoError if `--emit` names what trains only recommenders."""
    if name == TABLES:
        raise StrettoError(
            f"{TABLES} is for recommenders, and this is a language model", hint=f"one of {', '.join(NAMES)}"
        )


def check_trains_recommenders(name: str | None) -> None:
    """Raise StrettoError if `--emit` names what trains only language models."""
    if name not in (None, TABLES):
        raise StrettoError(f"{name} trains no recommenders", hint=f"--emit {TABLES}")


def print_emitted(text: str, output: Path | None) -> None:
    """Print what was emitted, or write it to a file."""
    if output is None:
        print(text, end="")
    else:
        write_file(output, text)
