"""Claim: help, `layout` and `schedule` start in under 0.4 s, since they import no torch.

python benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from harness import where

COMMANDS = (
    ["--help"],
    ["layout", "--world", "16", "--tp", "2", "--pp", "4"],
    ["schedule", "1f1b", "--ranks", "4", "--microbatches", "8"],
)


def seconds(command: list[str]) -> float:
    stretto = Path(sys.executable).parent / "stretto"
    started = time.perf_counter()
    subprocess.run([stretto, *command], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print("| command | s, median | s, worst |\n|---|---|---|")
    taken = [[seconds(command) for command in COMMANDS] for _ in range(rounds + 1)][1:]
    for at, command in enumerate(COMMANDS):
        column = [row[at] for row in taken]
        print(f"| stretto {' '.join(command)} | {median(column):.2f} | {max(column):.2f} |")
    print(f"\n{where()}")


if __name__ == "__main__":
    main()
