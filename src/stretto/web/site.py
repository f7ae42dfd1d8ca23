"""The page as a folder for any static host: the front end, Pyodide, and Stretto's parts without torch."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator
from importlib.resources import as_file, files
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml

from stretto.errors import StrettoError
from stretto.view.page import FRONT, worker_page
from stretto.web.answers import ALONE, QUESTIONS_ALONE
from stretto.web.plans import INTEROP

# what is needed of a Pyodide distribution
PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
# beside the top modules
ROOMS = ("layout", "program", "job", "planner", "view", "run/config", "recommender/planner", "web")


def write_site(folder: Path, pyodide: Path) -> None:
    """Write the page into a folder, with Python in it.

    Args:
        pyodide: folder of a Pyodide distribution: the npm package, or a release.

    Raises:
        StrettoError: a file of Pyodide is absent.
    """
    if absent := [name for name in PYODIDE if not (pyodide / name).is_file()]:
        raise StrettoError(
            f"{pyodide} has no {', '.join(absent)}",
            hint="unpack the npm package pyodide (`npm pack pyodide`) and name its folder package/",
        )
    (folder / "pyodide").mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text(worker_page(_first()), encoding="utf-8")
    with as_file(FRONT) as front:
        for path in [front / "worker.js", *(front / "vendor").glob("LICENSE-*")]:
            shutil.copyfile(path, folder / path.name)
    for name in PYODIDE:
        shutil.copyfile(pyodide / name, folder / "pyodide" / name)
    (folder / "stretto.zip").write_bytes(_archive())


def _first() -> dict[str, Any]:
    """What the page shows before Python has started: the schedule that it opens with."""
    programs = [{"name": "1f1b", "ranks": 4, "microbatches": 8}]  # as `schedules.js` asks
    questions = {"ask": "schedules"}, {"ask": "timeline", "programs": programs, "costs": {}}
    answers = {
        json.dumps(question, separators=(",", ":")): ALONE[str(question["ask"])](question)
        for question in questions
    }
    return {"questions": QUESTIONS_ALONE, "answers": answers}


def _archive() -> bytes:
    """The modules that answer questions, and PyYAML without its C extension, as a zip file."""
    content = BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, name in _sources():
            # a fixed date: the same sources make the same file
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


def _sources() -> Iterator[tuple[Path, str]]:
    """Each file with its name in the archive."""
    with as_file(files("stretto")) as package:
        interop = package.parent / INTEROP  # its configs, if it is installed
        folders = [*(package / room for room in ROOMS), interop / "frameworks"]
        modules = [*package.glob("*.py"), package / "run" / "__init__.py", *interop.glob("*.py")]
        modules += (package / "recommender").glob("*.py")
        for path in sorted([*modules, *(path for folder in folders for path in folder.rglob("*"))]):
            if path.suffix in (".py", ".yaml", ".csv") and path.is_file():
                yield path, str(path.relative_to(package.parent))
    for path in sorted(Path(yaml.__file__).parent.glob("*.py")):
        yield path, f"yaml/{path.name}"
