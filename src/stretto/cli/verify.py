"""`stretto verify`: prove layouts equal to one process."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.output import Json, command_app, report, say_no
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

    from stretto.run.config.schema import TrainConfig
    from stretto.run.verify.cases import Case
    from stretto.run.verify.diagnose import Verdict
    from stretto.run.verify.every import Impossible

_ALL = ("all", "product")
_STEPS = 2

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
            metavar="all|product|FILE",
            help="Every legal layout (of a recommender: placement) for the number of ranks, with schedules "
            "in turn (all) or each with every one (product), or a YAML list; default: the config's own.",
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks for --layouts all or product; default: those of the config's layout."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Training steps of each layout; default: 2, and 3 of a recommender."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train each layout and one process from the same seed in float64, and compare.

    Reports the largest relative difference of the loss, of every gradient, of the gradient norm and of the
    updated weights, names the worst parameter and the likeliest cause. Exit code 1 when one is above 1e-9.

    Asynchronous schedules are compared with a replay of their delayed updates, without optim.clip: losses and
    weights to 1e-12, or 1e-9 with adamw.

    --layouts all takes every tp x cp x dp x pp, every ep and expert_tp where the model has experts, with and
    without sequence parallelism, both kinds of context parallelism, every recomputation; every dp.mode, with
    states on the device, in host memory and in files; and every schedule, with its own and with other
    options, on every tp x cp x dp x pp and with each of these features and modes. product takes every
    schedule with every combination, which are thousands. Both make the model narrow, with all its heads and
    experts, on small batches of short samples. Schedules whose programs are the same are run once. What is
    impossible is told with its reason.

    Of a recommender, layouts are placements of its tables. The config's own is trained on its own samples;
    all takes every split of all tables, mixes, and every place, each with every optimiser of tables and of
    dense layers, with one-hot and ragged ids, sums, means, products and hash tables, with and without
    clipping and overlap, on small tables. FILE is a list such as [{placement: row, place: cpu}].
    """
    from stretto.recommender.config.load import load_config
    from stretto.run.config.check import check
    from stretto.run.config.schema import TrainConfig
    from stretto.run.verify.job import verify as prove_all

    found = load_config(config, overrides or [])
    if not isinstance(found, TrainConfig):
        from stretto.cli.verify_recommender import verify_recommender

        verify_recommender(
            config=found, layouts=layouts, ranks=ranks, steps=steps, as_json=as_json, told=_told()
        )
        return
    steps = steps or _STEPS
    check(found)
    started = time.perf_counter()
    found, cases, impossible = _cases(found, layouts, ranks)
    with _told():
        verdicts = prove_all(found, cases, steps, quiet=as_json)
    from stretto.run.verify.diagnose import TOLERANCE

    facts = {
        "equal": all(v.equal for v in verdicts),
        "dtype": "float64",
        "tolerance": TOLERANCE,
        "steps": steps,
        "seconds": time.perf_counter() - started,
        "impossible": [asdict(one) for one in impossible],
        "layouts": [_plain({**asdict(v), "equal": v.equal}) for v in verdicts],
    }
    report(facts, as_json, lambda to: _show(to, verdicts, facts, impossible))
    if not facts["equal"]:
        raise say_no()


@contextmanager
def _told() -> Generator[None]:
    """A failed rank and a signal, in words."""
    from stretto.cli.output import print_failure
    from stretto.run.launch.local import RankFailed, RanksStopped

    try:
        yield
    except RankFailed as error:
        print_failure(error.failure)
        raise say_no() from None
    except RanksStopped as stopped:
        raise typer.Exit(128 + stopped.signal) from None


def _cases(
    config: TrainConfig, layouts: str | None, ranks: int | None
) -> tuple[TrainConfig, list[Case], list[Impossible]]:
    """What is proved, on which config, and what cannot be."""
    from stretto.run.launch.local import check_ranks
    from stretto.run.verify.cases import cases_from_file, own_case, smaller
    from stretto.run.verify.every import Every

    if layouts not in _ALL and ranks is not None:
        raise StrettoError(
            f"--ranks {ranks} goes with --layouts all", hint="give --layouts all, or leave --ranks out"
        )
    if layouts is None:
        return config, [own_case(config)], []
    if layouts not in _ALL:
        return config, cases_from_file(Path(layouts), config), []
    world = ranks or config.layout.to_layout().world
    small = smaller(config, world)
    check_ranks(world)
    every = Every(small, world, whole=layouts == "product")
    return small, every.cases, every.impossible


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a difference without measure is null."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in facts.items()}


def _show(
    to: Console, verdicts: Sequence[Verdict], facts: Mapping[str, Any], impossible: Sequence[Impossible]
) -> None:
    to.print(_table(verdicts, facts["steps"]))
    for v in verdicts:
        if v.diagnosis:
            to.print(f"{v.layout}: {v.diagnosis}", soft_wrap=True, markup=False)
    wrong = sum(not v.equal for v in verdicts)
    if impossible:
        to.print("impossible:")
    for one in impossible:
        to.print(f"  {one}", soft_wrap=True, markup=False)
    layouts = f"{len(verdicts)} layouts" if len(verdicts) > 1 else "1 layout"
    if same := sum(v.same_as is not None for v in verdicts):
        layouts += f" ({same} with the program of another)"
    took = f" in {facts['seconds']:.0f} s" if len(verdicts) > 1 else ""
    to.print(f"{layouts}{took}, " + (f"{wrong} DIFFER" if wrong else "all equal to one process"))


def _table(verdicts: Sequence[Verdict], steps: int) -> Table:
    from rich.table import Table

    table = Table(title=f"largest relative difference from one process, float64, {steps} steps")
    for name in ("layout", "loss", "gradients", "norm", "weights", "worst gradient", "equal"):
        table.add_column(name, overflow="fold")
    for v in verdicts:
        errors = (v.loss_error, v.grad_error, v.norm_error)
        numbers = ["-" if error is None else f"{error:.1e}" for error in errors]
        late = "" if v.updates is None else f" after {v.updates} delayed updates"
        equal = "yes" if v.equal else "[bold red]NO"
        table.add_row(v.layout, *numbers, f"{v.weight_error:.1e}{late}", v.worst_gradient or "-", equal)
    return table
