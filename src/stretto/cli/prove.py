"""`stretto prove`: prove anybody's parallel model equal to its plain one."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app, failures_reported, say_no
from stretto.cli.report import CommandReport
from stretto.errors import StrettoError, nearest, read_text

if TYPE_CHECKING:
    from stretto.prove import Report

_EXAMPLE = "stretto prove examples/prove_fsdp.py:check --ranks 4"

app = command_app()


@app.command(epilog=f"Example: {_EXAMPLE}")
def prove(
    target: Annotated[
        str, typer.Argument(metavar="FILE.py:FUNCTION", help="A function that returns a proof's report.")
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks to start on this machine.")] = 2,
    as_json: Json = False,
) -> None:
    """Train a parallel model of yours beside its plain model, and compare.

    Starts the ranks and calls FUNCTION on each, without arguments and with the process group ready (gloo, or
    the accelerators' where this machine has one for each rank). FUNCTION returns the report of
    stretto.prove.prove(plain, parallel, batch, step, ...), which takes any module: DDP, fully_shard,
    parallelize_module, a pipeline of torch.distributed.pipelining, Megatron-core or DeepSpeed.

    Reports the largest relative difference of the loss, gradients, gradient norm, updated weights, optimizer
    states and buffers, and for a difference the worst parameter, the first module whose output differs and
    the likeliest cause. Exit code 1 when a difference is above its bound: 1e-9 in float64.
    """
    from stretto.run.launch.local import check_ranks, prepare, run_ranks

    path, function = checked_function(target, _EXAMPLE)
    check_ranks(ranks)
    prepare(("stretto.verify.user_model.file",))
    with failures_reported():
        from stretto.verify.user_model.file import run_file

        result: Report = run_ranks(ranks, run_file, path, function)[0]
    record: dict[str, Any] = {**asdict(result), "equal": result.equal}
    for quantity in record["quantities"]:  # JSON has no infinity
        error = quantity["error"]
        quantity["error"] = error if error is None or isfinite(error) else None
    report = CommandReport(record)
    report.line(str(result))
    report.print(as_json)
    if not result.equal:
        raise say_no()


def checked_function(target: str, example: str, arguments: Sequence[str] = ()) -> tuple[Path, str]:
    """The file and the function of a command's argument, checked without running the file.

    Args:
        arguments: names of the positional arguments that the function is called with.

    Raises:
        StrettoError: there is no such file, it is not Python, or nothing of that name can be called in it
            with these arguments.
    """
    name, colon, function = target.rpartition(":")
    if not colon or not function.isidentifier():
        raise StrettoError(
            f"{target!r} names no file and function", hint=f"write FILE.py:FUNCTION, as in {example}"
        )
    path = Path(name)
    text = read_text(path)
    try:
        tree = ast.parse(text, str(path))
    except SyntaxError as error:
        raise StrettoError(f"{path}, line {error.lineno}: {error.msg}", hint="a Python file") from None
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    top = {name for node in tree.body for name in _defined(node)}
    if function not in top:
        similar = nearest(function, functions)
        raise StrettoError(
            f"{path} defines no {function}",
            hint=f"did you mean {similar!r}?"
            if similar
            else "it must be defined at the top level of the file",
        )
    if function in functions:
        accepted = functions[function].args
        maximum = len(accepted.posonlyargs) + len(accepted.args)
        minimum = maximum - len(accepted.defaults)
        if not minimum <= len(arguments) <= maximum or None in accepted.kw_defaults:
            raise StrettoError(
                f"{path}:{function} takes other arguments than ({', '.join(arguments)})",
                hint="give the others defaults, or write a function that calls it",
            )
    return path.resolve(), function


def _defined(node: ast.stmt) -> list[str]:
    """Names that a statement at the top level of a file defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    inner = (
        name
        for child in ast.iter_child_nodes(node)
        if isinstance(child, ast.stmt)
        for name in _defined(child)
    )
    return [*(name.id for name in stored), *inner]
