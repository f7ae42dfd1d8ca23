"""Checks of what `stretto launch` prints: shell scripts, and documents by their published schemas."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

DATA = Path(__file__).parent / "data"


def check_shell(text: str, path: Path) -> None:
    """Write a script that bash must parse, and in which shellcheck, if installed, finds no warning."""
    path.write_text(text)
    subprocess.run(["bash", "-n", str(path)], check=True)
    linter = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if linter is not None:
        checked = subprocess.run(
            [linter, "--shell=bash", "--severity=warning", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert checked.returncode == 0, checked.stdout


def check_schema(document: dict[str, Any], name: str) -> None:
    """Hold a document to a published schema, `tests/data/NAME.schema.yaml`: no field may be unknown to it."""
    schema = yaml.safe_load((DATA / f"{name}.schema.yaml").read_text(encoding="utf-8"))
    problems = [
        f"{problem.json_path}: {problem.message}"
        for problem in jsonschema.Draft202012Validator(_closed(schema)).iter_errors(document)
    ]
    assert not problems, problems


def _closed(schema: Any) -> Any:
    """Return the schema with unknown fields refused: Kubernetes drops them without a word."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "x-kubernetes-preserve-unknown-fields" not in schema:
        closed.setdefault("additionalProperties", False)
    return closed
