"""The commands of `stretto compare`, which are processes, in the process of the test: that has imported
PyTorch, and so has the server that its ranks are forked from.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.cli import main


def command_here(arguments: Sequence[str], log: Path) -> tuple[int, Any]:
    """In place of `stretto.run.compare.runs._stretto`."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(errors):
        code = main.run([*arguments, "--json"])
    log.write_text(errors.getvalue(), encoding="utf-8")
    return code, json.loads(out.getvalue()) if code == 0 else None
