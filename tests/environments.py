"""Environments that hold what a page's install commands install, and nothing else."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

import stretto
from pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def installs(text: str) -> list[str]:
    """What the `pip install` commands of a text install, in order; `.` for this project."""
    inline = re.findall(r"`pip\s+install\s+([^`]+)`", text)
    lines = re.findall(r"^pip install (.+)$", text, flags=re.MULTILINE)
    tokens = [word for line in (*inline, *lines) for word in shlex.split(line)]
    return [re.sub(r"^stretto(?=\[|$)", ".", word) for word in tokens if not word.startswith("-")]


def required(extras: Iterable[str]) -> Iterator[Requirement]:
    """What this project needs with some extras."""
    yield from map(Requirement, PROJECT["dependencies"])
    for extra in extras:
        for each in map(Requirement, PROJECT["optional-dependencies"][extra]):
            yield from required(each.extras) if each.name == "stretto" else (each,)


def distributions(requirements: Iterable[str]) -> dict[str, Distribution]:
    """The installed distributions that requirements need, themselves included, by name."""
    needed = dict[str, Distribution]()
    waiting = list[Requirement]()
    for requirement in requirements:
        own = re.fullmatch(r"\.(?:\[(.*)\])?", requirement)
        waiting += (
            required((own[1] or "").split(",") if own[1] else ()) if own else [Requirement(requirement)]
        )
    while waiting:
        need = waiting.pop()
        present = need.name.lower() in needed
        if present and not need.extras:
            continue
        found = needed[need.name.lower()] = distribution(need.name)
        for each in map(Requirement, found.requires or ()):
            wanted = ("", *need.extras)
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in wanted):
                waiting.append(each)
    return needed


@dataclass(frozen=True)
class Environment:
    """A virtual environment in a folder."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def type(self, argv: list[str], where: Path, code: int = 0, timeout: float = 300) -> str:
        """What a command prints that is typed in the environment, and has to end with `code`."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.defpath}"
        keep = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        keep |= {"PATH": path, "VIRTUAL_ENV": str(self.folder), "PYTHONNOUSERSITE": "1"}
        keep |= {"XDG_CACHE_HOME": str(where / "cache"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            argv, cwd=where, env=keep, capture_output=True, text=True, timeout=timeout, check=False
        )
        shown = f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
        assert done.returncode == code, f"{shlex.join(argv)} ended with {done.returncode}:\n{shown}"
        return done.stdout


def linked(folder: Path, requirements: Iterable[str]) -> Environment:
    """An environment in which the requirements' files are links to those that are installed here: made in a
    moment, without a registry. All else that is installed here is not there.
    """
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    environment = Environment(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    scripts = dict(PROJECT["scripts"])
    for found in distributions(requirements).values():
        files = found.files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))).resolve())
        scripts |= {each.name: each.value for each in found.entry_points if each.group == "console_scripts"}
    (site / "stretto.pth").write_text(f"{Path(stretto.__file__).parents[1]}\n", encoding="utf-8")
    for name, value in scripts.items():
        module, _, function = value.partition(":")
        script = folder / "bin" / name
        lines = [f"#!{environment.python}", "import sys", f"from {module} import {function}"]
        lines += ["if __name__ == '__main__':", f"    sys.exit({function}())", ""]
        script.write_text("\n".join(lines), encoding="utf-8")
        script.chmod(0o755)
    return environment


def installed(folder: Path, requirements: Iterable[str], project: Path) -> Environment:
    """An environment in which pip has installed the requirements, `.` being the project's folder."""
    venv.EnvBuilder(symlinks=True, with_pip=True).create(folder)
    own = [
        re.findall(r"[a-z0-9]+", requirement) for requirement in requirements if requirement.startswith(".")
    ]
    arguments = ["-e", f".[{','.join(extra for extras in own for extra in extras)}]"]
    arguments += [requirement for requirement in requirements if not requirement.startswith(".")]
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *arguments], cwd=project, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-3000:]
    return Environment(folder)


if __name__ == "__main__":  # an environment to type in: python tests/environments.py FOLDER '.[fast]'
    print(linked(Path(sys.argv[1]).absolute(), sys.argv[2:]).python)
