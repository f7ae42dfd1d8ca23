"""`stretto split`: how each layer of your network is best split over ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from stretto.cli.options import Json, check_choice, grouped
from stretto.cli.output import check_writable, command_app, failures_reported
from stretto.cli.report import CommandReport
from stretto.errors import StrettoError
from stretto.user_file import UserFunction, find_function

if TYPE_CHECKING:
    from stretto.autosplit.network import StyleName
    from stretto.planner.machines.device import Precision

_EXAMPLE = "stretto split examples/split_layers.py:alexnet --cluster a100:4"

app = command_app()


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """Options of `stretto split`."""

    target: Annotated[
        str,
        typer.Argument(metavar="FILE.py:FUNCTION", help="A function that returns a model and its input."),
    ]
    cluster: Annotated[
        str,
        typer.Option(
            help="A cluster or device of the catalogue and how many devices, as in a100:4; a YAML file; or "
            "here: this machine, as `stretto calibrate` measured it."
        ),
    ]
    memory: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="GIB",
            help="Device memory for tensors; default: the device's, without what else a process needs.",
        ),
    ] = None
    precision: Annotated[
        str | None, typer.Option(help="Of products: bf16, fp16, tf32, fp32; default: the parameters'.")
    ] = None
    states: Annotated[
        int,
        typer.Option(min=0, help="Bytes of a parameter's optimizer states: Adam 8, momentum 4, plain SGD 0."),
    ] = 8
    fix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=STYLE",
            help="Fix the style of a module: replicate, batch, column or row. * stands for any text in NAME; "
            "repeatable.",
        ),
    ] = None
    leaf: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Take this module as one operator; repeatable."),
    ] = None
    svg: Annotated[Path | None, typer.Option(help="Draw the network with its splits here.")] = None
    as_json: Json = False


@app.command(epilog=f"Example: {_EXAMPLE}")
@grouped(SplitOptions)
def split(options: SplitOptions) -> None:
    """Choose how each layer of your network is split over ranks.

    FUNCTION returns (model, input), where the input has the samples of all ranks along dimension 0; both may
    be on the meta device, as under `with torch.device("meta")`. The model is traced with torch.fx. For each
    layer the plan says whether it is replicated, or split by the batch, by its output features or by its
    input features, and where activations are converted in between: the fastest of all combinations that fit
    into memory, under the same times of products and collectives as `stretto plan`.

    In Python, stretto.plan_module(model, input, cluster=...).plan is what stretto.parallelize takes.
    """
    function = find_function(options.target, _EXAMPLE)
    check_writable(options.svg)
    fixed = _fixed_styles(options.fix or [])
    if options.precision is not None:
        check_choice("--precision", options.precision, ("bf16", "fp16", "tf32", "fp32"))
    with failures_reported():
        from stretto.autosplit.plan_module import plan_module

        model, example = _model_and_input(function)
        plan = plan_module(
            model,
            example,
            cluster=options.cluster,
            memory_gib=options.memory,
            precision=cast("Precision | None", options.precision),
            states=options.states,
            fix=fixed,
            leaves=options.leaf or (),
        )
    splits = plan.splits
    report = CommandReport(
        {
            "cluster": splits.machine.cluster.name,
            "device": splits.machine.cluster.device.name,
            "ranks": splits.machine.ranks,
            "precision": splits.machine.precision,
            "step_s": splits.cost.seconds,
            "parts_s": splits.parts,
            "memory_bytes": splits.cost.bytes,
            "limit_bytes": splits.limit,
            "sent_bytes": splits.sent,
            "operators": [
                {
                    "name": line.operator.name,
                    "kind": line.operator.kind,
                    "module": line.operator.module,
                    "inputs": list(line.operator.inputs),
                    "shape": list(line.operator.shape),
                    **line.choice._asdict(),
                    "seconds": line.seconds,
                    "sent_bytes": line.sent,
                    "memory_bytes": line.share.memory,
                }
                for line in splits.lines
            ],
            "conversions": [
                {**asdict(conversion), "exchanges": [each._asdict() for each in conversion.exchanges]}
                for conversion in splits.conversions
            ],
            "beside": {
                name: None if cost is None else {"step_s": cost.seconds, "memory_bytes": cost.bytes}
                for name, cost in splits.rules.items()
            },
            "notes": list(splits.notes),
        }
    )
    report.line(plan.table())
    if options.svg is not None:
        report.write(options.svg, plan.svg())
    report.print(options.as_json)


def _fixed_styles(fix: list[str]) -> dict[str, StyleName]:
    fixed = dict[str, "StyleName"]()
    for text in fix:
        name, equals, style = text.rpartition("=")
        if not equals:
            raise StrettoError(f"--fix {text}", hint="NAME=STYLE, as in --fix 'features.*=batch'")
        check_choice(f"--fix {name}", style, ("replicate", "batch", "column", "row"))
        fixed[name] = cast("StyleName", style)
    return fixed


def _model_and_input(function: UserFunction) -> tuple[Any, Any]:
    """Call the user's function.

    Raises:
        StrettoError: it returns something else.
    """
    from torch import nn

    returned = function()
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module):
        return returned
    raise StrettoError(
        f"{function} returned {type(returned).__name__}, must return a model and its input",
        hint="return model, torch.empty(256, 3, 224, 224)",
    )
