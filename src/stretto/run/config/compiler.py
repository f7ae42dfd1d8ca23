"""What `train.compile` needs of this machine: torch generates source code, which is compiled here."""

from __future__ import annotations

import os
import shlex
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from stretto.errors import Problem
from stretto.run.config.schema import TrainConfig
from stretto.spec.devices import AUTO, HOST, TRITON

FIELD, OFF = "train.compile", "train.compile=off"


def compiler(config: TrainConfig) -> Iterator[Problem]:
    """Blocks that are to be compiled for the config's device, and cannot be."""
    if config.train.compile != "off":
        yield from compiler_problems(config.train.compile, config.train.device)


def compiler_problems(value: str, device: str) -> Iterator[Problem]:
    """What the device's code generator lacks, if anything.

    Args:
        value: of `train.compile`.
        device: its kind; with `auto` it is enough that some kind has all.
    """
    missing = {HOST: _for_host(), TRITON: _for_triton()}  # a plug-in brings its own
    missing[AUTO] = missing[HOST] if all(missing.values()) else None
    if (lacking := missing.get(device)) is not None:
        yield Problem(FIELD, value, *lacking)


def _for_host() -> tuple[str, str] | None:
    """The rule that is broken on CPUs, and what mends it."""
    name = os.environ.get("CXX", "g++")
    if which(shlex.split(name)[0] if name.strip() else "g++") is None:
        return (
            f"torch compiles for CPUs with a C++ compiler, and {name} is not on this machine",
            f"apt-get install g++, CXX=clang++ for another one, or {OFF}",
        )
    return _headers()


def _for_triton() -> tuple[str, str] | None:
    if find_spec("triton") is None:
        return "torch compiles for GPUs with Triton, which is not installed", f"pip install triton, or {OFF}"
    if os.environ.get("CC") is None and not any(map(which, ("gcc", "clang"))):
        return (
            "Triton needs a C compiler, and there is neither gcc nor clang",
            f"apt-get install gcc, or {OFF}",
        )
    return _headers()


def _headers() -> tuple[str, str] | None:
    """What is compiled is loaded as a module of Python."""
    folder = Path(sysconfig.get_path("include"))
    if (folder / "Python.h").is_file():
        return None
    rule = f"compiled code is built with Python's headers, and {folder} has no Python.h"
    return rule, f"apt-get install python3-dev, or {OFF}"
