"""Hostile input to every parser: it is read, or refused with one error; no traceback, no hang, no gigabytes.

By hand, 10,000 inputs for each parser: pytest -m slow -s tests/torture -k much_hostile
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PATIENCE_S = 60.0  # of a loaded machine, for one input
LONGEST_S = 5.0  # of the processor, for one input
PARSERS = (
    *("config", "recommender config", "overrides", "program as json", "program as csv", "model config"),
    *("cluster", "profile", "token index", "megatron index", "tokenizer", "manifest", "checkpoint index"),
    *("safetensors", "prediction table", "click log"),
)


def results(folder: Path, first: int, count: int, *parsers: str) -> tuple[Counter[str], list[str]]:
    """How many inputs came to what, and those that must not have."""
    words = [sys.executable, str(HERE / "try_inputs.py"), str(folder), str(first), str(count), *parsers]
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    counts, wrong, tried = Counter[str](), list[str](), "valid input"
    log = folder / "stderr"
    with log.open("w") as stderr, selectors.DefaultSelector() as selector:
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=stderr, bufsize=0)
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(PATIENCE_S) and (line := process.stdout.readline()):
            row = json.loads(line)
            if "parser" in row:
                tried = f"{row['parser']} {row['seed']}"
            else:
                counts[row["came"]] += 1
                if row["came"] not in ("accepted", "refused"):
                    wrong.append(f"{tried}: {row['came']}")
                elif row["seconds"] > LONGEST_S:
                    wrong.append(f"{tried}: {row['seconds']:.1f} s")
        if counts.total() < count * len(parsers):
            process.kill()
            wrong.append(f"{tried}: hung or died, {log.read_text()[-2000:]}")
        process.communicate()
    return counts, wrong


def test_hostile_input_is_read_or_refused(tmp_path: Path) -> None:
    counts, wrong = results(tmp_path, 0, 8, *PARSERS)
    assert wrong == []
    assert counts["accepted"] > 8
    assert counts["refused"] > 4 * len(PARSERS)


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS)
def test_much_hostile_input_is_read_or_refused(tmp_path: Path, parser: str) -> None:
    counts, wrong = results(tmp_path, 0, 10_000, parser)
    print(parser, dict(counts))
    assert wrong == []
