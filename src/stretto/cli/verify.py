"""`stretto verify`: prove layouts equal to one process."""

from __future__ import annotations

import time
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app, failures_reported, say_no
from stretto.cli.report import CommandReport
from stretto.errors import StrettoError, counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from stretto.verify.evidence import Verdict
    from stretto.verify.run import Findings, Proof

_SHARED = ("the plain model's layers", "initial values", "samples", "learning rates")  # with the reference
_UNSEEN = (
    "the plain model itself",
    "the learning-rate curve",
    "the order of the data",
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
    precision: Annotated[
        bool | None,
        typer.Option(
            "--precision/--no-precision",
            help="Compare two steps in the job's own types too; default: yes, but for --layouts all or "
            "product.",
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

    A second pass makes two steps in the types that the job trains in. What it may be off from float64 is 32
    times what one process in these types is.

    Where a value of the job hides a field (a window as long as a sample, a soft cap that hardly bends,
    adapters with a scale of 1), another one is proved, and the report says so. Set fields, sizes apart, of
    which no other value changes a result are listed as not proved; how ranks share the work changes none.

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

    With a 16-bit tables.wire the second pass of a recommender makes one step.
    """
    from stretto.recommender.config.load import load_config
    from stretto.run.config.schema import TrainConfig
    from stretto.verify.language.proof import proof_of as language_proof
    from stretto.verify.recommender.proof import proof_of as recommender_proof
    from stretto.verify.run import run_proof

    config = load_config(path, overrides or [])
    if layouts not in ("all", "product") and ranks is not None:
        raise StrettoError(
            f"--ranks {ranks} goes with --layouts all", hint="give --layouts all, or leave --ranks out"
        )
    started = time.perf_counter()
    with failures_reported():
        options: dict[str, Any] = {"ranks": ranks, "steps": steps, "precision": precision, "quiet": as_json}
        if isinstance(config, TrainConfig):
            proof = language_proof(config, layouts, **options)
        else:
            proof = recommender_proof(config, layouts, **options)
        findings = run_proof(proof, progress="stderr" if as_json else "stdout")
    equal = all(v.equal for v in (*findings.verdicts, *findings.rounded))
    _report(proof, findings, equal=equal, seconds=time.perf_counter() - started).print(as_json)
    if not equal:
        raise say_no()


def _report(proof: Proof, findings: Findings, *, equal: bool, seconds: float) -> CommandReport:
    """The verdicts on all layouts, what was compared, and what the proof does not see."""
    from stretto.verify.compare import TOLERANCE

    verdicts = findings.verdicts
    others = "" if findings.rounded else "in other types than float64 or "  # the second pass sees these
    unseen = [*_UNSEEN, f"arithmetic {others}on other devices than CPUs"]
    names = {"gradients": "gradients", "their norm": "norm", "states of tables": "states", "logits": "logits"}
    compared = [label for label, n in names.items() if any(v[n].error is not None for v in verdicts)]
    record: dict[str, Any] = {
        "equal": equal,
        "dtype": "float64",
        "tolerance": TOLERANCE,
        "steps": proof.steps,
        "seconds": seconds,
        "compared": ["losses", *compared, f"weights after updates by {proof.updated_by}"],
        "shared": _SHARED,
        "unseen": unseen,
        "changed": list(proof.notes),
        "unproved": findings.unproved,
        "own_types": [
            {
                "layout": v.layout,
                "dtype": v.dtype,
                "quantities": [asdict(quantity) for quantity in v.quantities],
                "diagnosis": v.diagnosis,
                "equal": v.equal,
            }
            for v in findings.rounded
        ],
        "impossible": [asdict(case) for case in proof.impossible],
        "layouts": [_record(v) for v in verdicts],
    }
    report = CommandReport(record)
    report.draw(lambda _: _table(proof.noun, verdicts, proof.steps))
    report.lines(f"{v.layout}: {v.diagnosis}" for v in verdicts if v.diagnosis)
    report.lines(["impossible:", *(f"  {case}" for case in proof.impossible)] if proof.impossible else [])
    count = counted(len(verdicts), proof.noun)
    if repeated := sum(v.same_as is not None for v in verdicts):
        count += f" ({repeated} with the program of another)"
    took = f" in {record['seconds']:.0f} s" if len(verdicts) > 1 else ""
    wrong = sum(not v.equal for v in verdicts)
    report.line(f"{count}{took}, " + (f"{wrong} DIFFER" if wrong else "all equal to one process"))
    report.line(f"compared with an independent reference: {', '.join(record['compared'])}")
    report.line(f"shared with the reference: {', '.join(_SHARED)}")
    report.line(f"not seen here: {', '.join(unseen)}")
    report.lines([f"changed for the proof: {', '.join(proof.notes)}"] if proof.notes else [])
    if findings.unproved:
        report.line(
            "not proved, since no other value changes a result of the first steps in one process: "
            + ", ".join(findings.unproved)
        )
    few = len(findings.rounded) <= 8
    report.lines(_in_own_types(v) for v in findings.rounded if few or not v.equal)
    if not few:
        right = sum(v.equal for v in findings.rounded)
        dtype = findings.rounded[0].dtype
        report.line(f"in {dtype} {right} of {len(findings.rounded)} layouts are equal to one process")
    report.lines(f"compared in float64 alone: {reason}" for reason in proof.float64_only)
    return report


def _in_own_types(verdict: Verdict) -> str:
    """A layout in the types that its job trains in, beside one process."""
    errors = [f"{q.name} {q.error:.1e} of {q.bound:.1e}" for q in verdict.quantities if q.error is not None]
    result = "equal to one process" if verdict.equal else f"DIFFERS: {verdict.diagnosis}"
    return f"{verdict.layout} in {verdict.dtype} ({', '.join(errors)}): {result}"


def _record(v: Verdict) -> dict[str, Any]:
    """A verdict for JSON, which has no infinity: a difference that is not finite becomes null."""
    record: dict[str, Any] = {
        "layout": v.layout,
        "loss_error": v["loss"].error,
        "grad_error": v["gradients"].error,
        "worst_gradient": v["gradients"].worst,
        "norm_error": v["norm"].error,
        "weight_error": v["weights"].error,
        "worst_weight": v["weights"].worst or "-",
        "diagnosis": v.diagnosis,
        "seconds": v.seconds,
        "updates": v.updates,
        "tolerance": v["loss"].bound,
        "same_as": v.same_as,
    }
    if v.placement:
        record |= {"state_error": v["states"].error, "worst_state": v["states"].worst}
        record |= {"predict_error": v["logits"].error, "placement": v.placement}
    record["equal"] = v.equal
    return {k: None if isinstance(x, float) and not isfinite(x) else x for k, x in record.items()}


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
    cells = {name: _error(v[name].error) for name in ("loss", "gradients", "norm")}
    weights, worst = _error(v["weights"].error), v["weights"].worst or "-"
    if v.placement:
        logits = {name: _error(v[name].error) for name in ("states", "logits")}
        return {**cells, "rows": weights, **logits, "worst": worst}
    late = "" if v.updates is None else f" after {v.updates} delayed updates"
    return {**cells, "weights": weights + late, "worst gradient": v["gradients"].worst or "-"}


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"
