"""Checks of shell scripts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


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
