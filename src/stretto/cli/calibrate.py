"""`stretto calibrate`: measure this machine for predict, plan and train."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app, report
from stretto.spec.devices import METAVAR, check_device

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.planner.machines.cluster import Cluster

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
        bool, typer.Option("--quick", help="Fewer shapes and sizes: seconds instead of a minute or two.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine for the predictions of plan, predict and train.

    Measures matrix products, memory-bound operations, attention, collectives and messages among local ranks,
    and host overhead. Takes under three minutes; the machine should be otherwise idle.

    From then on training predicts its steps with this profile; `stretto plan` and `stretto predict` use it
    with --cluster here, or --cluster FILE.
    """
    import time

    from stretto.planner.machines.catalogue import history_path, profile_path
    from stretto.planner.machines.describe import save_cluster
    from stretto.run.calibrate.profile import calibrate as measure

    check_device(device, "--device")
    path = out or profile_path()
    _check_place(path, default=out is None)
    begun = time.monotonic()
    cluster = measure(ranks, quick, quiet=as_json, device=device)
    save_cluster(cluster, path)
    if history_path(path).is_file():
        history_path(path).unlink()  # corrections of an earlier profile do not apply to this one
    seconds = time.monotonic() - begun
    report(
        {"profile": _facts(cluster), "path": str(path), "seconds": seconds},
        as_json,
        lambda to: _show(to, cluster, path, seconds),
    )


def _check_place(path: Path, default: bool) -> None:
    """Raise StrettoError before measuring where the profile could not be written."""
    import os

    from stretto.errors import StrettoError

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


def _facts(cluster: Cluster) -> dict[str, Any]:
    """The main results; the file has every row."""
    device = cluster.device
    return {
        "name": cluster.name,
        "device": device.name,
        "tflops": dict(device.sustained),
        "bandwidth_gbs": device.bandwidth / 1e9,
        "computing": cluster.computing,
        "link": {"bandwidth_gbs": cluster.inner.bandwidth / 1e9, "latency_us": cluster.inner.latency * 1e6},
        "launch_us": 1e6 * _number(device.kernels.get("launch")),
        "layer_us": 1e6 * _number(device.kernels.get("layer")),
        "action_us": 1e6 * _number(device.kernels.get("action")),
        "collectives": {kind: _rows(rows) for kind, rows in cluster.tables.items()},
    }


def _number(value: object) -> float:
    return value if isinstance(value, float) else 0.0


def _rows(value: object) -> list[list[float]]:
    return value if isinstance(value, list) else []


def _show(to: Console, cluster: Cluster, path: Path, seconds: float) -> None:
    from rich.table import Table

    facts = _facts(cluster)
    speeds = ", ".join(f"{p} {1e3 * v:.0f} GFLOP/s" for p, v in facts["tflops"].items())
    to.print(f"{cluster.device.name} ({cluster.device.notes})")
    to.print(f"{speeds}; copies at {facts['bandwidth_gbs']:.1f} GB/s")
    beside = f"a block {facts['layer_us']:.0f} us, an action {facts['action_us']:.0f} us"
    if facts["layer_us"]:
        to.print(f"host overhead: {beside}; ranks share {cluster.computing} cores")
    table = Table("collective", "ranks", "bytes", "time, ms")
    for kind, rows in facts["collectives"].items():
        ends = [row for row in rows if row[2] in (min(r[2] for r in rows), max(r[2] for r in rows))]
        for ranks, _, size, duration in ends:
            table.add_row(kind, f"{ranks:.0f}", f"{size:.0f}", f"{1e3 * duration:.2f}")
    if table.row_count:
        to.print(table)
    to.print(f"profile: {path}  ({seconds:.0f} s; use it with --cluster here)")
