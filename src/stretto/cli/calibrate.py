"""`stretto calibrate`: measure this machine for predict, plan and train."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app
from stretto.cli.report import CommandReport, number, text
from stretto.errors import StrettoError
from stretto.job.devices import METAVAR, check_device

app = command_app()


@app.command(epilog="Example: stretto calibrate --ranks 4")
def calibrate(
    out: Annotated[
        Path | None,
        typer.Option(help="The profile to write; default: this machine's file in your configuration folder."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Local ranks; default: one per accelerator, or 4 on a CPU.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            metavar=METAVAR,
            help="Kind of device; auto: the accelerator that torch sees, else the CPU.",
        ),
    ] = "auto",
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Fewer shapes and sizes, wider intervals: seconds instead of a minute."),
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(min=1, help="Begin no measurement after that time; what is missing widens intervals."),
    ] = 180.0,
    as_json: Json = False,
) -> None:
    """Measure this machine for the predictions of plan, predict and train.

    Measures matrix products, memory-bound operations, attention, collectives and messages among local ranks,
    and host overhead. Takes about a minute, three at most. The machine should be otherwise idle: if it is
    busy, or the time does not suffice, a warning is printed, and predictions have wider intervals.

    From then on training predicts its steps with this profile; `stretto plan` and `stretto predict` use it
    with --cluster here, or --cluster FILE.
    """
    from stretto.planner.machines.catalogue import history_path, profile_path, with_earlier_peaks
    from stretto.planner.machines.describe import save_cluster
    from stretto.run.calibrate.profile import calibrate as measure
    from stretto.run.watch.machine import busy_text

    check_device(device, "--device")
    path = out or profile_path()
    _check_writable(path, default=out is None)
    if (busy := busy_text()) is not None:
        print(f"warning: {busy}; intervals of predictions will be wider", file=sys.stderr)
    begun = time.monotonic()
    cluster = with_earlier_peaks(measure(ranks, quick, quiet=as_json, device=device, seconds=seconds), path)
    save_cluster(cluster, path)
    if history_path(path).is_file():
        history_path(path).unlink()  # corrections of an earlier profile do not apply to this one
    took = time.monotonic() - begun

    measured, link = cluster.device, cluster.inner
    launch_us, layer_us, action_us = (
        1e6 * value if isinstance(value := measured.kernels.get(name), float) else 0.0
        for name in ("launch", "layer", "action")
    )
    collectives: dict[str, list[list[float]]] = {
        kind: rows if isinstance(rows, list) else [] for kind, rows in cluster.tables.items()
    }
    profile: dict[str, Any] = {  # the main results; the file has every row
        "name": cluster.name,
        "device": measured.name,
        "tflops": dict(measured.sustained),
        "bandwidth_gbs": measured.bandwidth / 1e9,
        "computing": cluster.computing,
        "link": {"bandwidth_gbs": link.bandwidth / 1e9, "latency_us": link.latency * 1e6},
        "launch_us": launch_us,
        "layer_us": layer_us,
        "action_us": action_us,
        "collectives": collectives,
        "spread": dict(cluster.spread),
        "notes": cluster.notes,
    }
    report = CommandReport({"profile": profile, "path": str(path), "seconds": took})
    report.line(f"{measured.name} ({measured.notes})")
    speeds = ", ".join(f"{dtype} {1e3 * tflops:.0f} GFLOP/s" for dtype, tflops in measured.sustained.items())
    report.line(f"{speeds}; copies at {measured.bandwidth / 1e9:.1f} GB/s")
    if layer_us:
        report.line(
            f"host overhead: a block {layer_us:.0f} us, an action {action_us:.0f} us; ranks share "
            f"{cluster.computing} cores"
        )
    columns = [text("collective"), number("ranks", ".0f"), number("bytes", ".0f"), number("time, ms", ".2f")]
    rows = [
        (kind, row[0], row[2], 1e3 * row[3])
        for kind, measurements in collectives.items()
        for row in measurements
        if row[2] in (min(r[2] for r in measurements), max(r[2] for r in measurements))
    ]
    if rows:
        report.table(columns, rows)
    if cluster.spread:
        widths = ", ".join(f"{source} {width:.0%}" for source, width in cluster.spread.items())
        report.line(f"intervals of predictions are widened by how the measurements varied: {widths}")
    report.line(cluster.notes)
    report.line(f"profile: {path}  ({took:.0f} s; use it with --cluster here)")
    report.print(as_json)


def _check_writable(path: Path, *, default: bool) -> None:
    """Raise StrettoError, before measuring, if the profile cannot be written.

    Args:
        default: the path is not the user's, and its folder may be made.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise StrettoError(f"--out {path}: a profile is a YAML file", hint=f"--out {path}.yaml")
    try:
        if default:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StrettoError(f"cannot make {path.parent}: {error.strerror}", hint="give --out FILE") from None
    if not path.parent.is_dir():
        raise StrettoError(f"--out {path}: there is no folder {path.parent}", hint="make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise StrettoError(f"{path} cannot be written to", hint="give --out FILE in a writable folder")
