"""Claim: help, `layout` and `schedule` answer in under 0.3 s, since they import little.

python benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from harness import where

STRETTO = str(Path(sys.executable).parent / "stretto")
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "stretto --help": [STRETTO, "--help"],
    "stretto layout --world 16 --tp 2 --pp 4": [STRETTO, "layout", "--world", "16", "--tp", "2", "--pp", "4"],
    "stretto schedule 1f1b --ranks 4 --microbatches 8": [
        *(STRETTO, "schedule", "1f1b", "--ranks", "4", "--microbatches", "8"),
    ],
}
# modules are compiled in the first round, which is not counted
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def seconds(command: list[str]) -> tuple[float, float]:
    """Elapsed, and of the processor: the first on a quiet machine."""
    started, before = time.perf_counter(), os.times()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=ENVIRONMENT)
    elapsed, after = time.perf_counter() - started, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return elapsed, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print("| command | s, median | s, worst | CPU s, median |\n|---|---|---|---|")
    taken = [{name: seconds(command) for name, command in COMMANDS.items()} for _ in range(rounds + 1)]
    for name in COMMANDS:
        elapsed, cpu = zip(*(row[name] for row in taken[1:]), strict=True)
        print(f"| `{name}` | {median(elapsed):.2f} | {max(elapsed):.2f} | {median(cpu):.2f} |")
    print(f"\n{where()}")


if __name__ == "__main__":
    main()
