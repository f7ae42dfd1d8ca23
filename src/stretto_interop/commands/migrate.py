"""`stretto migrate`: the script that starts a run of Megatron-LM as a config."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app, say_no, write_file
from stretto.cli.report import CommandReport
from stretto.errors import StrettoError, read_text
from stretto_interop.frameworks.bash import batch_variables

if TYPE_CHECKING:
    from stretto_interop.frameworks.migrate import Migration

app = command_app()
_INDENT = 12  # columns of a label


@app.command(
    context_settings={"ignore_unknown_options": True},
    epilog="Example: stretto migrate pretrain_gpt.sh runs/gpt logs vocab.json merges.txt my_text_document "
    "--out gpt.yaml",
)
def migrate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT|ARGS [...]",
            help="A script that starts pretrain_gpt.py, or - for standard input, and the arguments that it "
            "is run with; or the arguments themselves. Besides, NAME=value sets a variable of its "
            "environment, and a.b=value a field of the config.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the config here instead of printing it.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Processes, in place of what the script says.")
    ] = None,
    program: Annotated[
        str | None,
        typer.Option(
            help="gpt: the script's program, whose name is not known, trains as pretrain_gpt.py does."
        ),
    ] = None,
    run: Annotated[
        bool,
        typer.Option(
            "--run",
            help="Run the script, with a torchrun, srun and python that only record their arguments; for "
            "scripts with tests, loops, functions and the like.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn a script of Megatron-LM into a config, and report what became of each of its arguments.

    The script is read, not run, unless --run is given. Arguments are mapped to fields, needless here, or
    named with the reason why they have no counterpart; the exit code is 1 if there are any of the last kind.
    """
    from stretto.run.config.load import run_name
    from stretto_interop.frameworks.mapping import Start
    from stretto_interop.frameworks.migrate import Migration
    from stretto_interop.frameworks.migrate import migrate as migrated
    from stretto_interop.frameworks.registry import framework

    if program not in (None, "gpt"):
        raise StrettoError(f"--program is {program!r}", hint="gpt is read; leave it out for pretrain_gpt.py")
    request = _request(arguments)
    if run:
        if request.source in ("the command line", "standard input"):
            raise StrettoError(f"--run needs a script, not {request.source}", hint="give the script's file")
        request.text = run_script(request.path, request.arguments, request.variables)
    target = framework("megatron")
    start = Start(
        devices=devices, wins=True, arguments=request.arguments, variables=request.variables, program=program
    )
    name = run_name(request.path if out is None else out)
    migration, text = Migration(), request.text
    try:
        migrated(target, text, request.source, start, request.overrides, name=name, migration=migration)
    except StrettoError:
        if migration.lost:
            _report(migration, request, None).print(as_json, None if as_json else sys.stderr)
        raise
    if out is not None:
        write_file(out, migration.text)
    elif not as_json:
        print(migration.text, end="")
    _report(migration, request, out).print(as_json, None if as_json or out is not None else sys.stderr)
    if migration.lost:
        raise say_no()


@dataclass(kw_only=True)
class _Request:
    """A command line: the text to read, its source, and the other arguments."""

    text: str
    source: str
    path: Path
    arguments: list[str] = field(default_factory=list[str])
    variables: dict[str, str] = field(  # of the shell, the same for a config on this machine
        default_factory=lambda: {n: os.environ[n] for n in ("HOME", "USER", "PWD") if n in os.environ}
    )
    overrides: list[str] = field(default_factory=list[str])


_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_0-9]+)+=")


def _request(arguments: Sequence[str]) -> _Request:
    """Sort the command line's arguments."""
    overrides = [word for word in arguments if _OVERRIDE.match(word)]
    others = [word for word in arguments if not _OVERRIDE.match(word)]
    if not others:
        raise StrettoError("no script given", hint="stretto migrate pretrain_gpt.sh, or its arguments")
    first = others[0]
    if first.startswith("--"):
        text = first if len(others) == 1 else shlex.join(others)
        return _Request(text=text, source="the command line", path=Path("train"), overrides=overrides)
    read_in = first == "-"
    text = sys.stdin.read() if read_in else read_text(Path(first))
    source = "standard input" if read_in else first
    if not text.strip():
        raise StrettoError(f"{source} is empty", hint="give the script that starts pretrain_gpt.py")
    request = _Request(
        text=text, source=source, path=Path("train" if read_in else first), overrides=overrides
    )
    for word in others[1:]:
        variable, equals, value = word.partition("=")
        if equals and re.fullmatch(r"[A-Za-z_]\w*", variable):
            request.variables[variable] = value
        else:
            request.arguments.append(word)
    return request


def _record(migration: Migration) -> dict[str, Any]:
    """Return what was read, as the command's JSON."""
    import yaml

    return {
        "config": yaml.safe_load(migration.text),
        "mapped": [
            {
                "arguments": dict(item.settings),
                "fields": {k: list(v) if isinstance(v, tuple) else v for k, v in item.fields.items()},
            }
            for item in migration.mapped
        ],
        "needless": migration.needless,
        "differs": migration.differs,
        "not_mapped": migration.lost,
        "required": list(migration.required),
        "notes": migration.notes,
        "missing_here": migration.missing,
    }


def _report(migration: Migration, request: _Request, out: Path | None) -> CommandReport:
    """Report what became of the arguments."""
    from stretto_interop.frameworks.mapping import shown

    report = CommandReport(lambda: _record(migration))
    count = sum(name != "world-size" for item in migration.mapped for name in item.settings)
    others = sum(len(names) for names in migration.needless.values())
    report.line(
        f"{request.source}: {count} arguments mapped, {others} needless here, "
        f"{len(migration.lost)} not mapped"
    )
    for item in migration.mapped:
        argv = list[str]()
        for name, value in item.settings.items():
            if name != "world-size":
                values: list[Any] = [] if value is True else value if isinstance(value, list) else [value]
                argv += [f"--{name}", *map(str, values)]
        present = {name: value for name, value in item.fields.items() if value is not None} or item.fields
        if argv:
            fields = ", ".join(f"{name}={shown(value)}" for name, value in present.items())
            report.value("mapped", f"{' '.join(argv)} -> {fields}", _INDENT)
    for reason, names in migration.needless.items():
        report.value("needless", f"{' '.join(f'--{name}' for name in names)}: {reason}", _INDENT)
    for name, reason in migration.differs.items():
        report.value("differs", f"--{name}: {reason}", _INDENT)
    for name, reason in migration.lost.items():
        report.value("not mapped", f"{name if name.startswith('$') else f'--{name}'}: {reason}", _INDENT)
    for note in migration.notes:
        report.value("note", note, _INDENT)
    for lack in migration.missing:
        report.value("here", lack, _INDENT)
    if out is not None:
        report.line(f"\nwritten to {out}; next:\n  stretto config {out}")
    return report


# ------------------------------------------------------------------ --run

LAUNCHERS = ("torchrun", "srun", "sbatch", "mpirun", "mpiexec", "deepspeed", "python", "python3")
_SECONDS = 60
# python is really run if its arguments name no program: scripts ask it for versions and numbers
_STUB = """#!{python}
import json, os, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
program = any(word.endswith(".py") or word.startswith("torch.distributed") for word in words)
if name.startswith("python") and not program:
    os.execv({python!r}, [{python!r}, *words])
if name in ("srun", "sbatch") and "-c" not in words and not sys.stdin.isatty():
    text = sys.stdin.read()
    words += ["bash", "-c", text] if text.strip() else []
with open({record!r}, "a") as file:
    print(json.dumps([name, *words]), file=file)
"""


def run_script(script: Path, arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """Run a script in this folder with stubs for `LAUNCHERS`, and return the commands that they received.

    Everything else in the script is executed, programs that it names by path included.

    Args:
        arguments: the script's.
        variables: added to the environment, as are those of its #SBATCH lines.

    Raises:
        StrettoError: the script takes longer than a minute, or launches nothing.
    """
    text = script.read_text(encoding="utf-8", errors="surrogateescape")
    with TemporaryDirectory() as folder:
        record = Path(folder, "record")
        for name in LAUNCHERS:
            stub = Path(folder, name)
            stub.write_text(_STUB.format(python=sys.executable, record=str(record)), encoding="utf-8")
            stub.chmod(0o755)
        path = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
        environment = {**batch_variables(text), **os.environ, **variables, "PATH": path}
        try:
            done = subprocess.run(
                ["bash", str(script), *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise StrettoError(f"{script} did not end within {_SECONDS} s", hint="give its command") from None
        sys.stderr.write(done.stdout)
        if not record.exists():
            raise StrettoError(
                f"{script} launched nothing and ended with {done.returncode}",
                hint=f"it has to start {', '.join(LAUNCHERS[:-1])} or {LAUNCHERS[-1]} by name",
            )
        launches = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    batch = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    return "\n".join([*batch, *(shlex.join(launch) for launch in launches)]) + "\n"
