"""The project's own tests, by folder, with the torch of this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu.setting import Setting

ROOT = Path(__file__).parents[2]
# those whose code asks what kind of device or which kernels there are; with ranks they talk over gloo
FOLDERS = (
    *("tests/engine/test_kernels.py", "tests/engine/parallel", "tests/engine/optim", "tests/engine/offload"),
    *("tests/engine/pipeline", "tests/recommender/tables"),
)
LIMIT = 480.0  # seconds of all together


def folders(setting: Setting) -> dict[str, Any]:
    """How many passed in each folder, and the end of what pytest printed where any failed."""
    rows = dict[str, Any]()
    chosen = ("tests/layout/test_cut.py",) if setting.tiny else FOLDERS
    for folder in chosen:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "--no-header",
            "-p",
            "no:cacheprovider",
            folder,
        ]
        if not setting.tiny:
            command += ["-n", "8", "--dist", "loadgroup"]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT / len(chosen)
            )
            text = done.stdout + done.stderr
            row = {"returned": done.returncode, "summary": (text.strip().splitlines() or [""])[-1]}
            rows[folder] = row if done.returncode == 0 else {**row, "output": text[-4000:]}
        except subprocess.TimeoutExpired:
            rows[folder] = {"returned": None, "summary": f"not done in {LIMIT / len(chosen):.0f} s"}
        setting.keep({"rows": rows})
    return {"rows": rows}
