"""The server that ranks are forked from imports all that they need: each rank would take half a second."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys

import pytest

JOBS = {
    "stretto.run.train.language_job": "stretto.run.train.launch",
    "stretto.recommender.train.job": "stretto.recommender.train.job",
}


@pytest.mark.parametrize(("job", "preload"), JOBS.items())
def test_ranks_import_nothing_that_the_server_has_not(job: str, preload: str) -> None:
    tree = ast.parse(inspect.getsource(importlib.import_module(job)))
    on_ranks = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith(("train_", "open_", "_write_"))
    ]
    assert len(on_ranks) >= 2
    needed = {job} | {
        node.module
        for function in on_ranks
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    code = (
        "import sys, importlib\n"
        f"from {preload} import PRELOAD\n"
        "for module in PRELOAD: importlib.import_module(module)\n"
        f"print(*sorted({needed} - set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
