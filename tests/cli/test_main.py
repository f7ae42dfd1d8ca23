"""The frame of the command line: exit codes, error lines, help, and what is not imported."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import stretto
from command_line import CommandLine
from stretto.cli import main
from stretto.errors import StrettoError

ROOT = Path(__file__).parents[2]


def lines_of_error(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"stretto {stretto.__version__}\n"
    assert stretto.__version__ == importlib.metadata.version("stretto")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(arguments) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("layout", "schedule", "launch"))


def all_commands() -> dict[str, Any]:
    """Every command that does something, by its words."""
    commands = dict[str, Any]()
    for name in main.app_commands():
        command = get_command(main.app_of(name))
        inner: dict[str, Any] = getattr(command, "commands", {})
        commands |= {f"{name} {word}": subcommand for word, subcommand in inner.items()} or {name: command}
    return commands


@pytest.mark.parametrize("name", all_commands())
def test_every_command_has_a_summary_of_one_line_and_an_example(name: str) -> None:
    command = all_commands()[name]
    assert "\n" not in command.help.partition("\n\n")[0]
    assert re.match(rf"Examples?: stretto {name} ", command.epilog)


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["layuot"], "No such command 'layuot'", "did you mean 'layout'?"),
        (["layout", "--wrold", "4"], "--wrold", "did you mean '--world'?"),
        (["layout", "--world"], "--world", "stretto layout --help"),
        (["layout", "--world", "four"], "--world", "stretto layout --help"),
        (["layout", "--world", "0"], "--world", "stretto layout --help"),
        (["layout"], "--world", "stretto layout --help"),
        (["layout", "--world", "6", "--pp", "4"], "world=6", "nearest legal world is"),
        (["launch", "slrum"], "'slrum'", "did you mean 'slurm'?"),
        (["checkpoint", "export", "x", "--out", "y", "--format", "hf"], "'hf'", "mean 'huggingface'?"),
        (["checkpoint", "import", "x", "--out", "y", "--format", "megatron-lm"], "", "mean 'megatron'?"),
        (["checkpoint", "export", "x", "--out", "y", "--dtype", "bf16"], "--dtype", "mean 'bfloat16'?"),
        (["--verison"], "--verison", "did you mean '--version'?"),
        (
            ["train", "a.yaml", "--layout.tp", "2"],
            "--layout.tp",
            "fields are set without dashes: layout.tp=2",
        ),
        (["train", "a.yaml", "--layout.tp=2"], "--layout.tp", "fields are set without dashes: layout.tp=2"),
    ],
)
def test_bad_input_is_one_error_line_and_a_hint(
    arguments: list[str], error: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 2
    first, second = lines_of_error(capsys)
    assert first.startswith("error: ")
    assert error in first
    assert second.startswith("hint: ")
    assert hint in second


PIPELINE = "--ranks 4 --microbatches 8"
MISTYPED = {
    f"schedule 1f1b {PIPELINE} --memory x": ("--memory is 'x'", "--memory 4 or"),
    f"schedule 1f1b {PIPELINE} --chunks 3": ("--chunks is 3, but", "leave --chunks out"),
    f"schedule 1f1b {PIPELINE} --vertical-sync": ("--vertical-sync is True", "leave --vertical-sync out"),
    f"schedule interleaved {PIPELINE} --group 3": ("--group is 3, must be 4 to 8", "nearest is --group 4"),
    f"schedule 1f1b {PIPELINE} --from nan": ("--from is nan, must be a finite number", None),
    "schedule chimera --ranks 3 --microbatches 4": ("--ranks is 3", "--ranks 4 or --ranks 2"),
    "launch slurm quickstart --sbatch foo": ("--sbatch 'foo' is not an option", "write --foo"),
    "predict --model llama3-8b --cluster h100:8 batch=-3": ("error: batch is '-3'", None),
    "predict --model llama3-8b --cluster h100:8 tp=3": ("error: tp=3 x cp=1", None),
}


@pytest.mark.parametrize("line", MISTYPED)
def test_an_error_names_the_option_as_it_was_typed(line: str, stretto: CommandLine) -> None:
    error = stretto.error(*line.split())
    message, hint = MISTYPED[line]
    assert message in error
    assert hint is None or hint in error.splitlines()[1]


def test_errors_of_many_lines_are_put_on_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StrettoError("first\n  second", hint="third\nfourth")

    monkeypatch.setattr(stretto.Layout, "fill", refuse)
    assert main.run(["layout", "--world", "4"]) == 2
    assert lines_of_error(capsys) == ["error: first second", "hint: third fourth"]


TYPER = {"typer", "shellingham", "annotated_doc", "click", "typing_extensions"}  # and what it imports

# of each command line that must be quick: packages and rooms of Stretto that it may import
IMPORT_BUDGET = {
    "--help": (TYPER, {"cli", "errors", "job", "user_file", "versions"}),
    "layout --help": (TYPER, {"cli", "errors", "versions"}),
    "layout --world 16 --pp 4": (
        TYPER | {"rich"},
        {"cli", "display", "errors", "layout", "versions", "view"},
    ),
    "schedule 1f1b --ranks 4 --microbatches 8": (
        TYPER | {"rich"},
        {"cli", "display", "errors", "layout", "program", "user_file", "versions", "view"},
    ),
}


@pytest.mark.parametrize("line", IMPORT_BUDGET)
def test_quick_commands_keep_to_their_imports(line: str) -> None:
    """Each package more is time that the user waits for: torch takes seconds, pydantic a tenth of one."""
    code = (
        "import sys; before = set(sys.modules); from stretto.cli.main import run; code = run(sys.argv[1:]);"
        "print(code, *sorted(set(sys.modules) - before), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout
    exit_code, *modules = done.stderr.split()
    assert exit_code == "0"
    packages, rooms = IMPORT_BUDGET[line]
    imported = (
        {module.partition(".")[0] for module in modules}
        - sys.stdlib_module_names
        - {"stretto", "stretto_interop"}
    )
    assert imported - packages == set()
    assert {module.split(".")[1] for module in modules if module.startswith("stretto.")} - rooms == set()


@pytest.mark.parametrize(
    "line",
    [
        "memory configs/quickstart.yaml",
        "predict --model llama3-8b --cluster h100:8 tp=8 micro=1 batch=8 --no-memory --json",
    ],
)
def test_predictions_import_no_torch(line: str) -> None:
    code = "import sys; from stretto.cli.main import run; run(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert len(done.stdout.splitlines()) > 1, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_ctrl_c_leaves_with_130() -> None:
    code = (
        "import os, signal; from stretto.cli import main; from stretto import Layout\n"
        "Layout.fill = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT) or __import__('time').sleep(5)\n"
        "raise SystemExit(main.run(['layout', '--world', '4']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_is_no_crash() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "stretto.cli.main", "layout", "--world", "4096", "--pp", "4", "--json"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


def test_a_file_that_cannot_be_written_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["layout", "--world", "4", "--svg", str(tmp_path / "no" / "a.svg")]) == 2
    assert "cannot write" in lines_of_error(capsys)[0]


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["layout", "--world", "4", "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


def test_help_breaks_lines_at_the_width_of_the_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.partition("Arguments")[0].splitlines()]
    # at 80 columns, where the docstring has its line breaks at 110
    assert "predicts samples per second. --fix then takes split=row,data, place=device," in lines


def test_config_prints_what_is_set_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "configs" / "quickstart.yaml")
    assert main.run(["config", path, "optim.clip=null"]) == 0
    short = capsys.readouterr().out
    assert short.startswith("version: 1\nmodel:\n  family: gpt\n  layers: 4\n")
    assert short.count("null") == 1
    assert short.endswith("# all other fields have their defaults: --all prints them too\n")
    assert main.run(["config", path, "optim.clip=null", "--all"]) == 0
    everything = capsys.readouterr().out
    assert "\n  eps: " in everything
    assert "# all other fields" not in everything


def test_config_tells_which_fields_outweigh_a_preset(tmp_path: Path, stretto: CommandLine) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(Path("configs/quickstart.yaml").read_text().replace("model:", "model:\n  preset: gpt2"))
    comment = "# these fields of model outweigh the preset gpt2: family, layers, hidden, heads, dropout\n"
    assert comment in stretto("config", file)
    assert "outweigh" not in stretto("config", "configs/quickstart.yaml")
