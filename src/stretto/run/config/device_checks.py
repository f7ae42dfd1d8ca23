"""What `train.compile` and `train.graphs` need of the machine and of the rest of a config.

With `train.compile` torch generates source code, which is compiled here.
"""

from __future__ import annotations

import os
import shlex
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from stretto.errors import Problem
from stretto.job.devices import AUTO, HOST, TRITON
from stretto.run.config.schema import RunTimeConfig


def compiler_problems(value: str, device: str) -> Iterator[Problem]:
    """Check that the device's code generator has what it needs.

    Args:
        value: `train.compile`.
        device: `train.device`; with `auto` it is enough that one kind of device has all.
    """
    missing = {HOST: _for_host(), TRITON: _for_triton()}  # a plug-in brings its own
    missing[AUTO] = missing[HOST] if all(missing.values()) else None
    if (lacking := missing.get(device)) is not None:
        yield Problem("train.compile", value, *lacking)


def _for_host() -> tuple[str, str] | None:
    """The rule that is broken on CPUs, and what mends it."""
    name = os.environ.get("CXX", "g++")
    if which(shlex.split(name)[0] if name.strip() else "g++") is None:
        return (
            f"torch compiles for CPUs with a C++ compiler, and {name} is not on this machine",
            "apt-get install g++, CXX=clang++ for another one, or train.compile=off",
        )
    return _headers()


def _for_triton() -> tuple[str, str] | None:
    if find_spec("triton") is None:
        return (
            "torch compiles for GPUs with Triton, which is not installed",
            "pip install triton, or train.compile=off",
        )
    if os.environ.get("CC") is None and not any(map(which, ("gcc", "clang"))):
        return (
            "Triton needs a C compiler, and there is neither gcc nor clang",
            "apt-get install gcc, or train.compile=off",
        )
    return _headers()


def _headers() -> tuple[str, str] | None:
    """What is compiled is loaded as a module of Python."""
    folder = Path(sysconfig.get_path("include"))
    if (folder / "Python.h").is_file():
        return None
    rule = f"compiled code is built with Python's headers, and {folder} has no Python.h"
    return rule, "apt-get install python3-dev, or train.compile=off"


def graph_problems(train: RunTimeConfig, tp: int, packing: str | None, trace: int) -> Iterator[Problem]:
    """Check that samples, libraries, devices and traces go with graphs.

    Args:
        tp: tensor-parallel ranks.
        packing: `data.packing`.
        trace: `metrics.trace`.
    """
    obstacles = list[tuple[str, str]]()
    if train.device == HOST:
        obstacles.append((no_graphs(HOST), "train.device=auto on a machine with an accelerator"))
    if train.backend == "gloo" and tp > 1:
        rule = f"layout.tp={tp} communicates within the graph, and with gloo the host does that"
        obstacles.append((rule, "train.backend=auto"))
    if packing == "documents":
        rule = "data.packing=documents attends by where documents begin, which differs between microbatches"
        obstacles.append((rule, "data.packing=stream"))
    if trace:
        rule = f"metrics.trace={trace} times forward and backward apart"
        obstacles.append((rule, "metrics.trace=0"))
    for rule, fix in obstacles:
        yield Problem("train.graphs", train.graphs, rule, f"train.graphs=off, or {fix}")


def no_graphs(kind: str) -> str:
    """The rule that is broken where devices have no graphs."""
    return f"this torch has no graphs for device {kind}"
