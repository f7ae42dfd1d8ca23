"""Hostile files to every reader: none runs code, reads a file of someone else's, or writes elsewhere.

By hand, all of them: pytest -m slow -s tests/torture/test_payloads.py
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import counts
import payloads
import pytest

HERE = Path(__file__).parent


def results(folder: Path, every: int) -> list[dict[str, Any]]:
    """What came of every so many payloads, in a process of their own."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "try_payloads.py"), str(folder), str(every)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"payload"')]


def wrong(rows: list[dict[str, Any]]) -> list[str]:
    """Payloads that did something, or raised what is no error of input."""
    control = f"checkpoint: {payloads.CONTROL}"
    text = ("click log: ", "metrics: ")  # lines that are none of theirs are left out
    bad = [
        row
        for row in rows
        if row["seen"]
        or row["came"] not in ("refused", "accepted")
        or (row["came"] == "accepted") != (row["payload"] == control or row["payload"].startswith(text))
    ]
    return [f"{row['payload']}: {row['came']} {row['seen']}" for row in bad]


def test_some_hostile_files_do_nothing(tmp_path: Path) -> None:
    rows = results(tmp_path, every=16)
    assert len(rows) > 20
    assert wrong(rows) == []


def test_the_payloads_do_run_where_they_are_unpickled(tmp_path: Path) -> None:
    """Else a test of them could not fail."""
    for name, data in payloads.pickles(tmp_path / "canary").items():
        if name in ("protocol 0", "exec", "eval", "system", "open"):
            pickle.loads(data)
            assert (tmp_path / "canary").exists(), name
            (tmp_path / "canary").unlink()


@pytest.mark.slow
def test_all_hostile_files_do_nothing(tmp_path: Path) -> None:
    rows = results(tmp_path, every=1)
    bad = wrong(rows)
    print(
        "\n".join(bad),
        {verdict: sum(r["came"] == verdict for r in rows) for verdict in ("refused", "accepted")},
    )
    counts.record(
        "hostile files to every reader: nothing run, read outside or written elsewhere",
        tried=len(rows),
        passed=len(rows) - len(bad),
        command="pytest -m slow -s tests/torture/test_payloads.py",
        note="pickles, archives, names elsewhere, links, YAML tags, templates, headers of 2^63",
    )
    assert bad == []
