"""`stretto prove`: prove anybody's parallel model equal to its plain one."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app, failures_reported, say_no
from stretto.cli.report import CommandReport
from stretto.user_file import find_function

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

    function = find_function(target, _EXAMPLE)
    check_ranks(ranks)
    prepare(("stretto.verify.user_model.file",))
    with failures_reported():
        from stretto.verify.user_model.file import run_file

        result: Report = run_ranks(ranks, run_file, function)[0]
    record: dict[str, Any] = {**asdict(result), "equal": result.equal}
    for quantity in record["quantities"]:  # JSON has no infinity
        error = quantity["error"]
        quantity["error"] = error if error is None or isfinite(error) else None
    report = CommandReport(record)
    report.line(str(result))
    report.print(as_json)
    if not result.equal:
        raise say_no()
