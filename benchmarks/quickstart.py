"""Claim: on two cores the first loss of `make train` comes within 20 s of the install, all of it takes less
than 3 minutes, and the loss falls by 3 nats.

Runs it on the first two cores of this machine and prints the seconds to its first and to its last line;
with --fresh in a new virtual environment, whose installation is timed too.

    python benchmarks/quickstart.py [--rounds 3] [--fresh]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harness import where

ROOT = Path(__file__).parents[1]
CONFIG = "configs/quickstart.yaml"


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds of a run, and the losses that it printed."""

    install: float
    first_loss: float  # from the end of the installation
    to_end: float  # from the same
    train: list[float]
    held_out: list[float]


def run(fresh: bool) -> Timed:
    """Train once."""
    with tempfile.TemporaryDirectory() as folder:
        override = f"run.dir={folder}/runs"
        command = [str(Path(sys.executable).parent / "stretto"), "train", CONFIG, override]
        if fresh:
            command = ["make", "train", f"PYTHON={sys.executable}", f"VENV={folder}/venv", f"ARGS={override}"]
        started, install, first = time.perf_counter(), 0.0, 0.0
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        train, held_out = list[float](), list[float]()
        to_end = 0.0
        for line in process.stdout:
            now = time.perf_counter() - started
            print(line, end="", file=sys.stderr)
            if line.startswith("== train"):
                install = now
            if (loss := re.match(r"step \d+/\d+ \| loss ([\d.]+)", line)) is not None:
                first = first or now
                train.append(float(loss[1]))
            if (loss := re.match(r"eval \d+/\d+ \| held-out loss ([\d.]+)", line)) is not None:
                held_out.append(float(loss[1]))
            if line.startswith(
                "next:"
            ):  # the last that takes time; its end is only seen when all ranks have gone
                to_end = now
        assert process.wait() == 0, f"{' '.join(command)} failed"
        assert to_end, "its last line has changed"
        return Timed(
            install=install,
            first_loss=first - install,
            to_end=to_end - install,
            train=train,
            held_out=held_out,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--fresh", action="store_true", help="install into a new virtual environment each time"
    )
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    runs = [run(args.fresh) for _ in range(args.rounds)]
    rows = {
        "to the first loss": [timed.first_loss for timed in runs],
        "whole": [timed.to_end for timed in runs],
    }
    if args.fresh:
        rows = {"to install": [timed.install for timed in runs], **rows}
    print("| make train | s, median | s, worst |\n|---|---|---|")
    for name, column in rows.items():
        print(f"| {name} | {median(column):.1f} | {max(column):.1f} |")
    losses = [f"{each[0]:.2f} to {each[-1]:.2f}" for each in (runs[0].train, runs[0].held_out)]
    print(f"\nloss {losses[0]}, held-out {losses[1]}\n{where()}")


if __name__ == "__main__":
    main()
