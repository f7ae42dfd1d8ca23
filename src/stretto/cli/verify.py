"""`stretto verify`: prove layouts equal to one process."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.face import Json, command_app, report, say_no
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from stretto.config.schema import TrainConfig
    from stretto.verify.cases import Case
    from stretto.verify.prove import Verdict

app = command_app()


@app.command(epilog="Example: stretto verify configs/quickstart.yaml --layouts all --ranks 4")
def verify(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A YAML file, as `stretto train` takes it.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Fields to override.")
    ] = None,
    layouts: Annotated[
        str | None,
        typer.Option(
            metavar="all|FILE",
            help="Every legal layout for the number of ranks, or a YAML list; default: the config's own.",
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks for --layouts all; default: those of the config's layout."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each layout.")] = 2,
    as_json: Json = False,
) -> None:
    """Train each layout and one process from the same seed in float64, and compare.

    Reports the largest relative difference of the loss, of every gradient, of the gradient norm and of the
    updated weights, names the worst parameter and the likeliest cause. Exit code 1 when one is above 1e-9.
    """
    from stretto.config import load
    from stretto.config.check import check
    from stretto.verify.job import verify as prove_all

    found = load(config, overrides or [])
    check(found)
    cases = _cases(found, layouts, ranks)
    with _told():
        verdicts = prove_all(found, cases, steps, quiet=as_json)
    from stretto.verify.diagnose import TOLERANCE

    facts = {
        "equal": all(v.equal for v in verdicts),
        "dtype": "float64",
        "tolerance": TOLERANCE,
        "steps": steps,
        "layouts": [_plain({**asdict(v), "equal": v.equal}) for v in verdicts],
    }
    report(facts, as_json, lambda to: _show(to, verdicts, steps))
    if not facts["equal"]:
        raise say_no()


@contextmanager
def _told() -> Generator[None]:
    """A failed rank and a signal, in words."""
    from stretto.cli.failed import print_failure
    from stretto.launch.local import RankFailed, RanksStopped

    try:
        yield
    except RankFailed as error:
        print_failure(error.failure)
        raise say_no() from None
    except RanksStopped as stopped:
        raise typer.Exit(128 + stopped.signal) from None


def _cases(config: TrainConfig, layouts: str | None, ranks: int | None) -> list[Case]:
    from stretto.verify.cases import cases_from_file, every_case, own_case

    if layouts != "all" and ranks is not None:
        raise StrettoError(
            f"--ranks {ranks} goes with --layouts all", hint="give --layouts all, or leave --ranks out"
        )
    if layouts is None:
        return [own_case(config)]
    if layouts != "all":
        return cases_from_file(Path(layouts), config)
    world = ranks or config.layout.to_layout().world
    cases = every_case(config, world)
    if not cases:
        raise StrettoError(
            f"no layout of {world} ranks is legal for this config",
            hint="change --ranks, batch.global_size or batch.micro_size",
        )
    return cases


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a difference without measure is null."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in facts.items()}


def _show(to: Console, verdicts: Sequence[Verdict], steps: int) -> None:
    from rich.table import Table

    table = Table(title=f"largest relative difference from one process, float64, {steps} steps")
    for name in ("layout", "loss", "gradients", "norm", "weights", "worst gradient", "equal"):
        table.add_column(name, overflow="fold")
    for v in verdicts:
        errors = (v.loss_error, v.grad_error, v.norm_error, v.weight_error)
        numbers = [f"{error:.1e}" for error in errors]
        table.add_row(v.layout, *numbers, v.worst_gradient, "yes" if v.equal else "[bold red]NO")
    to.print(table)
    for v in verdicts:
        if v.diagnosis:
            to.print(f"{v.layout}: {v.diagnosis}", soft_wrap=True, markup=False)
    wrong = sum(not v.equal for v in verdicts)
    layouts = f"{len(verdicts)} layouts" if len(verdicts) > 1 else "1 layout"
    to.print(f"{layouts}, " + (f"{wrong} DIFFER" if wrong else "all equal to one process"))
