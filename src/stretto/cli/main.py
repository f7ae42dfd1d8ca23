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
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from errno import EMFILE
from importlib import import_module
from importlib.util import find_spec
from inspect import cleandoc
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command

from stretto.cli import interop
from stretto.cli.output import command_app, print_error
from stretto.errors import PackageMissing, StrettoError, nearest
from stretto.versions import DeprecatedName, __version__, replace_deprecated

COMMANDS = (
    "init",
    "train",
    "verify",
    "prove",
    "learn",
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
    "page",
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
    "studio",
)

# short and other names of formats
_SYNONYMS = {"hf": "huggingface", "safetensors": "huggingface", "mcore": "megatron", "torchtitan": "dcp"}

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
        for each in (command, *getattr(command, "commands", {}).values()):
            each.help = _unwrapped(each.help)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each command's name and the first paragraph of its help; its options are not built for that."""
        apps = {name: app_of(name) for name in self.list_commands(ctx) if interop.is_installed(name)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(each)) for name, each in apps.items()])


def _summary(command: typer.Typer) -> str:
    """The first paragraph of a command's help, or of a group of commands."""
    if isinstance(command.info.help, str):
        text = command.info.help
    else:
        described = command.registered_callback or command.registered_commands[0]
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
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        with _deprecations_printed():
            arguments = replace_deprecated(arguments)
            result = get_command(app).main(arguments, prog_name="stretto", standalone_mode=False)
        sys.stdout.flush()
    except StrettoError as error:
        print_error(error.message, error.hint, error.others)
        return BAD_INPUT
    except ModuleNotFoundError as error:
        missing = PackageMissing.of(error, _command_path(arguments))
        if missing is None:
            raise
        print_error(missing.message, missing.hint)
        return BAD_INPUT
    except UsageError as error:
        print_error(*_usage(error, arguments))
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
        message = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        print_error(message, "raise the limit, as in: ulimit -n 4096" if error.errno == EMFILE else None)
        return BAD_INPUT
    return result if isinstance(result, int) else DONE


@contextmanager
def _deprecations_printed() -> Generator[None]:
    """Print the use of a deprecated name as a line, without the place in the source."""
    show = warnings.showwarning

    def show_line(message: Warning | str, category: type[Warning], *place: Any, **to: Any) -> None:
        if issubclass(category, DeprecatedName):
            print(f"warning: {message}", file=sys.stderr)
        else:
            show(message, category, *place, **to)

    with warnings.catch_warnings():
        warnings.simplefilter("always", DeprecatedName)
        warnings.showwarning = show_line
        yield


def main() -> None:
    """Entry point of the `stretto` script."""
    sys.exit(run())


def _command_path(arguments: Sequence[str]) -> str:
    return " ".join(["stretto", *(word for word in arguments[:1] if word in COMMANDS)])


def _usage(error: Any, arguments: Sequence[str]) -> tuple[str, str]:
    """Message and hint of a command line that does not parse."""
    context = getattr(error, "ctx", None)
    # an option that lacks its value is reported before there is a context
    hint = f"see {getattr(context, 'command_path', _command_path(arguments))} --help"
    wrong = getattr(error, "option_name", None)
    if context is not None and isinstance(wrong, str):
        takes_fields = any(parameter.name == "overrides" for parameter in context.command.params)
        if takes_fields and (field := _as_override(wrong, arguments)):
            return cast(str, error.message), f"fields are set without dashes: {field}"
        options = [name for parameter in context.command.params for name in parameter.opts]
        similar = nearest(wrong, [*options, "--help"])
        hint = f"did you mean {similar!r}? {hint}" if similar and similar != wrong else hint
        return cast(str, error.message), hint
    message, names = cast(str, error.format_message()), list[str]()
    # what is not one of the choices of an option
    if match := re.fullmatch(r"Invalid value for .*: '(.*)' is not one of (.*)\.", message, re.DOTALL):
        wrong, names = _SYNONYMS.get(match[1].lower(), match[1]), re.findall(r"'([^']*)'", match[2])
    if message == "Missing argument 'CONFIG'.":
        path = getattr(context, "command_path", _command_path(arguments))
        hint = f"as in `{path} quickstart`; `stretto init` lists the examples; {hint}"
    if message.startswith("No such command") and context is not None:
        wrong, names = message.split("'")[1], context.command.list_commands(context)
        message = f"No such command {wrong!r}."
    similar = nearest(wrong or "", names)
    return message, f"did you mean {similar!r}? {hint}" if similar else hint


def _as_override(option: str, arguments: Sequence[str]) -> str | None:
    """An option that is named like a field of a config, such as --layout.tp 2, as an override of it."""
    if not re.fullmatch(r"--?\w+(\.\w+)+", option):
        return None
    names = [argument.partition("=")[0] for argument in arguments]
    index = names.index(option) if option in names else len(names)
    argument, following = [*arguments[index : index + 2], "", ""][:2]
    value = argument.partition("=")[2] or following
    return f"{option.lstrip('-')}={value}"


if __name__ == "__main__":
    main()
