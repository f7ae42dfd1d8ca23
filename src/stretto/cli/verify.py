"""`stretto verify`: prove layouts equal to one process."""

from __future__ import annotations

import time
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app, failures_reported, report, say_no
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

    from stretto.recommender.config.schema import RecommenderConfig
    from stretto.run.config.schema import TrainConfig
    from stretto.verify.diagnose import Verdict
    from stretto.verify.language.every import Impossible

_ALL = ("all", "product")
_STEPS = {False: 3, True: 2}  # of a few layouts, and of each of all
_SHARED = ("the plain model's layers", "initial values", "samples", "learning rates")  # with the reference
_UNSEEN = (
    "the plain model itself",
    "the learning-rate curve",
    "the order of the data",
    "arithmetic in other types than float64 or on other devices than CPUs",
)

app = command_app()


@app.command(epilog="Example: stretto verify configs/quickstart.yaml --layouts all --ranks 4")
def verify(
    path: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, as `stretto train` takes it.")],
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
        typer.Option(
            min=1,
            help="Training steps with nothing read between them, before one whose gradients are read; "
            "default: 3, and 2 with --layouts all or product. Of a recommender: all steps; default: 3.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train each layout and one process from the same seed in float64, and compare.

    Reports the largest relative difference of the loss, of the gradients, of the gradient norm and of the
    updated weights, and for a layout that differs the worst parameter and the likeliest cause. Exit code 1
    when a difference is above 1e-9.

    A language model's steps are training's own, and nothing is read between them: whole weights are compared
    after the last. What messages and reads of offloaded tensors bring is kept back until it is waited for,
    which shows each missing wait; the config's own layout and those of a FILE also make their steps without
    that, and must come to the same bits. One more step is read, with the loss scale of float16.

    Asynchronous schedules are compared with a replay of their delayed updates, without optim.clip: losses and
    weights to 1e-12, or 1e-9 with adamw.

    --layouts all proves every tp x cp x dp x pp, and every ep and expert_tp of a model with experts, with and
    without sequence parallelism, with both kinds of context parallelism and every recomputation; every
    dp.mode, with states on the device, in host memory and in files; and every schedule, with default and
    other options, on every tp x cp x dp x pp and with each of these features and modes. product combines
    every schedule with every feature: thousands of cases. Both use a narrow model with all heads and experts
    of yours, small batches and short samples. Schedules whose programs are equal are run once. Combinations
    that are impossible are listed with the reason.

    For a recommender, layouts are placements of its tables. The config's placement is trained on the config's
    samples; all proves every split of all tables, mixes, and every place, each with every optimizer of tables
    and dense layers, with one-hot and ragged ids, sums, means, products and hash tables, with and without
    clipping and overlap, on small tables. FILE is a list such as [{placement: row, place: cpu}].
    """
    from stretto.recommender.config.load import load_config
    from stretto.run.config.schema import TrainConfig
    from stretto.verify.diagnose import TOLERANCE

    config = load_config(path, overrides or [])
    if layouts not in _ALL and ranks is not None:
        raise StrettoError(
            f"--ranks {ranks} goes with --layouts all", hint="give --layouts all, or leave --ranks out"
        )
    started = time.perf_counter()
    with failures_reported():
        if isinstance(config, TrainConfig):
            count, verdicts, impossible = _prove_layouts(config, layouts, ranks, steps, as_json)
        else:
            count, verdicts, impossible = _prove_placements(config, layouts, ranks, steps, as_json)
    facts: dict[str, Any] = {
        "equal": all(v.equal for v in verdicts),
        "dtype": "float64",
        "tolerance": TOLERANCE,
        "steps": count,
        "seconds": time.perf_counter() - started,
        "compared": _compared(verdicts, config),
        "shared": _SHARED,
        "unseen": _UNSEEN,
        "impossible": [asdict(one) for one in impossible],
        "layouts": [_plain({**asdict(v), "equal": v.equal}) for v in verdicts],
    }
    noun = "layout" if isinstance(config, TrainConfig) else "placement"
    report(facts, as_json, lambda to: _show(to, noun, verdicts, facts, impossible))
    if not facts["equal"]:
        raise say_no()


_Proof = tuple[int, "Sequence[Verdict]", "Sequence[Impossible]"]  # steps, verdicts, what cannot be proved


def _prove_layouts(
    config: TrainConfig, layouts: str | None, ranks: int | None, steps: int | None, quiet: bool
) -> _Proof:
    """Prove layouts of a language model."""
    from stretto.job.devices import HOST
    from stretto.run.config.check import check
    from stretto.run.launch.local import check_ranks
    from stretto.run.train.language_job import check_attention
    from stretto.verify.language.cases import cases_from_file, configured_job, smaller
    from stretto.verify.language.every import Every
    from stretto.verify.language.job import verify as prove

    check(config)
    check_attention(config.train.attention, HOST)
    impossible: Sequence[Impossible] = ()
    if layouts is None:
        cases = [configured_job(config)]
    elif layouts not in _ALL:
        cases = cases_from_file(Path(layouts), config)
    else:
        world = ranks or config.layout.to_layout().world
        config = smaller(config, world)
        check_ranks(world)
        every = Every(configured_job(config), world, whole=layouts == "product")
        cases, impossible = every.cases, every.impossible
    many = layouts in _ALL
    steps = steps or _STEPS[many]
    return steps, prove(config, cases, steps, twice=not many, quiet=quiet), impossible


def _prove_placements(
    config: RecommenderConfig, layouts: str | None, ranks: int | None, steps: int | None, quiet: bool
) -> _Proof:
    """Prove placements of a recommender's tables."""
    from stretto.recommender.config.check import check
    from stretto.run.launch.local import check_ranks
    from stretto.verify.recommender.job import STEPS, VerifyJob, verify

    check(config)
    if layouts in _ALL:
        world = ranks or config.layout.ranks
        check_ranks(world)
        proposal = VerifyJob.all_cases(config, world, whole=layouts == "product")
    else:
        proposal = VerifyJob.configured(config, None if layouts is None else Path(layouts), quiet)
    steps = steps or STEPS
    return steps, verify(proposal, steps, quiet=quiet), proposal.impossible


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a difference that is not finite becomes null."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in facts.items()}


def _show(
    to: Console,
    noun: str,
    verdicts: Sequence[Verdict],
    facts: Mapping[str, Any],
    impossible: Sequence[Impossible],
) -> None:
    to.print(_table(noun, verdicts, facts["steps"]))
    for v in verdicts:
        if v.diagnosis:
            to.print(f"{v.layout}: {v.diagnosis}", soft_wrap=True, markup=False)
    if impossible:
        to.print("impossible:")
    for one in impossible:
        to.print(f"  {one}", soft_wrap=True, markup=False)
    count = f"{len(verdicts)} {noun}{'s' * (len(verdicts) > 1)}"
    if same := sum(v.same_as is not None for v in verdicts):
        count += f" ({same} with the program of another)"
    took = f" in {facts['seconds']:.0f} s" if len(verdicts) > 1 else ""
    wrong = sum(not v.equal for v in verdicts)
    to.print(f"{count}{took}, " + (f"{wrong} DIFFER" if wrong else "all equal to one process"))
    to.print(f"compared with an independent reference: {', '.join(facts['compared'])}", soft_wrap=True)
    to.print(f"shared with the reference: {', '.join(_SHARED)}", soft_wrap=True)
    to.print(f"not seen here: {', '.join(_UNSEEN)}", soft_wrap=True)


def _compared(verdicts: Sequence[Verdict], config: TrainConfig | RecommenderConfig) -> list[str]:
    """The quantities of the verdicts, and what the reference updates by in place of the job's optimisers."""
    from stretto.run.config.schema import TrainConfig
    from stretto.verify.optimizer import RULES

    errors = {"gradients": "grad_error", "their norm": "norm_error", "states of tables": "state_error"}
    compared = [n for n, e in errors.items() if any(getattr(v, e, None) is not None for v in verdicts)]
    if isinstance(config, TrainConfig):
        return ["losses", *compared, f"weights after updates by {RULES[config.optim.name]}"]
    rules = "formulas for rows and by torch.optim (LAMB: its formula) for dense weights"
    return ["losses", *compared, "logits", f"weights after updates by {rules}"]


def _table(noun: str, verdicts: Sequence[Verdict], steps: int) -> Table:
    from rich.table import Table

    table = Table(title=f"largest relative difference from one process, float64, {steps} steps")
    for name in (noun, *_cells(verdicts[0]), "equal"):
        table.add_column(name, overflow="fold")
    for v in verdicts:
        table.add_row(v.layout, *_cells(v).values(), "yes" if v.equal else "[bold red]NO")
    return table


def _cells(v: Verdict) -> dict[str, str]:
    """Cells of the verdict's row between its name and whether all is equal, by column."""
    from stretto.verify.recommender.diagnose import TableVerdict

    cells = {"loss": _error(v.loss_error), "gradients": _error(v.grad_error), "norm": _error(v.norm_error)}
    if isinstance(v, TableVerdict):
        logits = {"states": _error(v.state_error), "logits": _error(v.predict_error)}
        return {**cells, "rows": _error(v.weight_error), **logits, "worst": v.worst_weight}
    late = "" if v.updates is None else f" after {v.updates} delayed updates"
    return {**cells, "weights": _error(v.weight_error) + late, "worst gradient": v.worst_gradient or "-"}


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"
