"""The server that ranks are forked from imports all that they need: each rank would take half a second."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterable
from pathlib import Path

import pytest

import stretto
from test_house import imports

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


def imported_with(names: Iterable[str]) -> set[str]:
    """The modules of the package that come with some, by what each file imports at once: to
    import them takes seconds.
    """
    modules, waiting = set[str](), [*names]
    while waiting:
        name = waiting.pop()
        folder = Path(stretto.__file__).parents[1].joinpath(*name.split("."))
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if name not in modules and file.is_file():
            modules.add(name)
            waiting += (name.rpartition(".")[0], *imports(ast.parse(file.read_text(encoding="utf-8")), False))
    return modules


@pytest.mark.parametrize("job", JOBS)
def test_ranks_import_nothing_that_the_server_has_not(job: str) -> None:
    # the parts of torch take seconds, and none is needed by name
    needed = {name for name in modules_of_ranks(job) if name.startswith("stretto.")}
    assert needed <= imported_with(importlib.import_module(JOBS[job]).PRELOAD)
