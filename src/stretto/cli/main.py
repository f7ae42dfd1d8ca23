"""The `stretto` command line: each name in `COMMANDS` is a module of that name in this folder, or in the
package that `interop.COMMANDS` names.

Such a module has an `app`, made by `output.command_app`, and imports what its work needs inside its
functions: `--help` imports the modules of all commands. Commands raise StrettoError for
bad input and `output.say_no()` for a negative answer; exit codes are defined here only.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from errno import EMFILE
from importlib import import_module
from importlib.util import find_spec
from inspect import cleandoc
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command

from stretto import __version__
from stretto.cli import interop
from stretto.cli.output import command_app, print_error
from stretto.errors import StrettoError, TorchMissing, nearest

COMMANDS = (
    "train",
    "verify",
    "prove",
    "compare",
    "evaluate",
    "score",
    "generate",
    "layout",
    "schedule",
    "memory",
    "dryrun",
    "plan",
    "predict",
    "partition",
    "split",
    "data",
    "checkpoint",
    "launch",
    "config",
    "migrate",
    "catalogue",
    "diagnose",
    "calibrate",
)

# recent versions of typer vendor click, so its class is reached through one that typer exports
UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])

DONE = 0
NO = 1
BAD_INPUT = 2
INTERRUPTED = 130
CLOSED_PIPE = 141


def app_commands() -> list[str]:
    """The names in `COMMANDS` that have a module."""
    return [name for name in COMMANDS if name in interop.COMMANDS or find_spec(f"stretto.cli.{name}")]


def app_of(name: str) -> typer.Typer:
    """The app of a command's module."""
    if name in interop.COMMANDS:
        return interop.load(interop.COMMANDS[name]).app
    return import_module(f"stretto.cli.{name}").app


class _Commands(TyperGroup):
    """Commands, imported on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        return app_commands()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = get_command(app_of(cmd_name))
        command.name = cmd_name
        for one in (command, *getattr(command, "commands", {}).values()):
            one.help = _unwrapped(one.help)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each command's name and the first paragraph of its help; its options are not built for that."""
        apps = {name: app_of(name) for name in self.list_commands(ctx) if interop.is_installed(name)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(one)) for name, one in apps.items()])


def _summary(of: typer.Typer) -> str:
    """What the command does, or the group of commands."""
    if isinstance(of.info.help, str):
        text = of.info.help
    else:
        described = of.registered_callback or of.registered_commands[0]
        text = described.callback.__doc__ if described.callback else None
    return (_unwrapped(text) or "").partition("\n\n")[0]


def _unwrapped(text: str | None) -> str | None:
    """Each paragraph of a docstring on one line: `--help` keeps line breaks, and wraps by itself."""
    return text and re.sub(r"(?<!\n)\n(?!\n)", " ", cleandoc(text))


app = command_app(
    name="stretto",
    cls=_Commands,
    epilog="Example: stretto schedule 1f1b --ranks 4 --microbatches 8",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"stretto {__version__}")
        raise typer.Exit


@app.callback()
def _stretto(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan, draw, prove and run hybrid-parallel training of large models."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        result = get_command(app).main(words, prog_name="stretto", standalone_mode=False)
        sys.stdout.flush()
    except StrettoError as error:
        print_error(error.message, error.hint, error.others)
        return BAD_INPUT
    except ModuleNotFoundError as error:
        if not TorchMissing.is_cause(error):
            raise
        missing = TorchMissing(" ".join(["stretto", *(word for word in words[:1] if word in COMMANDS)]))
        print_error(missing.message, missing.hint)
        return BAD_INPUT
    except UsageError as error:
        print_error(*_usage(error, words))
        return BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        # typer turns a closed pipe into SystemExit
        if not isinstance(error.__context__ or error, BrokenPipeError):
            raise
        # the interpreter flushes stdout at exit, which would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except OSError as error:
        if error.strerror is None:
            raise
        what = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        print_error(what, "raise the limit, as in: ulimit -n 4096" if error.errno == EMFILE else None)
        return BAD_INPUT
    return result if isinstance(result, int) else DONE


def main() -> None:
    """Entry point of the `stretto` script."""
    sys.exit(run())


def _usage(error: Any, words: list[str]) -> tuple[str, str]:
    """Message and hint of a command line that does not parse."""
    context = getattr(error, "ctx", None)
    # an option that lacks its value is reported before there is a context
    path = getattr(context, "command_path", " ".join(["stretto", *(w for w in words[:1] if w in COMMANDS)]))
    hint = f"see {path} --help"
    wrong = getattr(error, "option_name", None)
    if context is not None and isinstance(wrong, str):
        if _takes_fields(context) and (field := _as_override(wrong, words)):
            return cast(str, error.message), f"fields are set without dashes: {field}"
        options = [name for parameter in context.command.params for name in parameter.opts]
        near = nearest(wrong, [*options, "--help"])
        hint = f"did you mean {near!r}? {hint}" if near and near != wrong else hint
        return cast(str, error.message), hint
    message = cast(str, error.format_message())
    if message.startswith("No such command") and context is not None:
        wrong = str(message).split("'")[1]
        near = nearest(wrong, context.command.list_commands(context))
        message = f"No such command {wrong!r}."
        hint = f"did you mean {near!r}? {hint}" if near else hint
    return message, hint


def _takes_fields(context: Any) -> bool:
    """Whether the command takes overrides of a config's fields."""
    return any(parameter.name == "overrides" for parameter in context.command.params)


def _as_override(option: str, words: list[str]) -> str | None:
    """An option that is named like a field of a config, such as --layout.tp 2, as an override of it."""
    if not re.fullmatch(r"--?\w+(\.\w+)+", option):
        return None
    at = next((at for at, word in enumerate(words) if word.partition("=")[0] == option), len(words))
    word, following = [*words[at : at + 2], "", ""][:2]
    value = word.partition("=")[2] or following
    return f"{option.lstrip('-')}={value}"


if __name__ == "__main__":
    main()
