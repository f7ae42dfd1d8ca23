"""The server that ranks are forked from imports all that they need: each rank would take half a second."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys

# where each job says what its server imports
JOBS = {
    "stretto.run.train.language_job": "stretto.run.train.launch",
    "stretto.recommender.train.job": "stretto.recommender.train.job",
}


def modules_of_ranks(job: str) -> set[str]:
    """The modules that a job's functions import on the ranks, and its own."""
    on_ranks = [
        node
        for node in ast.parse(inspect.getsource(importlib.import_module(job))).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith(("train_", "open_", "_write_"))
    ]
    assert len(on_ranks) >= 2
    imported = (node for function in on_ranks for node in ast.walk(function))
    return {job} | {node.module for node in imported if isinstance(node, ast.ImportFrom) and node.module}


def test_ranks_import_nothing_that_the_server_has_not() -> None:
    """Each job in a process of its own, forked from one that has torch, which all jobs import."""
    needed = {module: sorted(modules_of_ranks(job)) for job, module in JOBS.items()}
    code = f"""
import importlib, os, sys, torch.distributed
for module, needed in {needed}.items():
    if os.fork():
        os.wait()
        continue
    for name in importlib.import_module(module).PRELOAD:
        if not name.startswith("torch"):  # its parts take seconds, and none is needed by name
            importlib.import_module(name)
    print(module, *(set(needed) - set(sys.modules)), flush=True)
    os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [*JOBS.values()]
