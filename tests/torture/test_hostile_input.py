"""Hostile input to every parser: it is read, or refused with one error; no traceback, no hang, no gigabytes.

By hand, 10,000 inputs for each parser: pytest -m slow -s tests/torture/test_hostile_input.py
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import counts
import pytest

HERE = Path(__file__).parent
PATIENCE_S = 60.0  # of a loaded machine, for one input
LONGEST_S = 5.0  # of the processor, for one input
PARSERS = (
    *("config", "recommender config", "overrides", "program as json", "program as csv", "model config"),
    *("cluster", "profile", "token index", "megatron index", "tokenizer", "chat template", "manifest"),
    *("run metadata", "checkpoint index", "safetensors", "prediction table", "click log", "rows of text"),
    "packed rows",
    *("megatron script", "deepspeed json", "torchtitan toml", "torchtitan module"),
)


@dataclass
class Outcomes:
    """What inputs came to.

    Attributes:
        came: how many came to what.
        wrong: those that must not have.
        seconds: of the processor, the longest for one input.
        mib: by which the process grew at most.
    """

    verdicts: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    seconds: float = 0.0
    mib: float = 0.0

    def add(self, tried: str, row: dict[str, Any]) -> None:
        self.verdicts[row["came"]] += 1
        self.seconds, self.mib = max(self.seconds, row["seconds"]), max(self.mib, row["mib"])
        if row["came"] not in ("accepted", "refused"):
            self.wrong.append(f"{tried}: {row['came']}")
        elif row["seconds"] > LONGEST_S:
            self.wrong.append(f"{tried}: {row['seconds']:.1f} s")


def outcomes(folder: Path, first: int, count: int, *parsers: str) -> Outcomes:
    """Give so many inputs to each of the parsers, in a process of their own."""
    command = [sys.executable, str(HERE / "try_inputs.py"), str(folder), str(first), str(count), *parsers]
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    all_of_them, tried = Outcomes(), "valid input"
    log = folder / "stderr"
    with log.open("w") as stderr, selectors.DefaultSelector() as selector:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, bufsize=0)
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(PATIENCE_S) and (line := process.stdout.readline()):
            row = json.loads(line)
            if "parser" in row:
                tried = f"{row['parser']} {row['seed']}"
            else:
                all_of_them.add(tried, row)
        if all_of_them.verdicts.total() < count * len(parsers):
            process.kill()
            all_of_them.wrong.append(f"{tried}: hung or died, {log.read_text()[-2000:]}")
        process.communicate()
    return all_of_them


def test_hostile_input_is_read_or_refused(tmp_path: Path) -> None:
    short = outcomes(tmp_path, 0, 8, *PARSERS)
    assert short.wrong == []
    assert short.verdicts["accepted"] > 8
    assert short.verdicts["refused"] > 4 * len(PARSERS)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("parser", PARSERS)
def test_much_hostile_input_is_read_or_refused(tmp_path: Path, parser: str) -> None:
    tried = int(os.environ.get("STRETTO_INPUTS", "10_000"))
    long = outcomes(tmp_path, 0, tried, parser)
    print(parser, long, flush=True)
    slow = sum(fault.endswith(" s") for fault in long.wrong)
    passed = long.verdicts["accepted"] + long.verdicts["refused"] - slow
    counts.record(
        f"hostile input: {parser}",
        tried=tried,
        passed=passed,
        command=f"pytest -m slow -s tests/torture/test_hostile_input.py -k 'much and {parser}'",
        note=f"{long.verdicts['refused']:,} refused with one error; at most {long.seconds:.2f} s of the "
        f"processor and {long.mib:.0f} MiB above what valid input takes",
    )
    assert long.wrong == []
