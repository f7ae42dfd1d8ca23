"""Docstrings of this package as napoleon reads them: prose, and arguments or fields as `name: text`."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_FIELD = re.compile(r"[a-z_]\w*(, [a-z_]\w*)*: ")


def rewrite(app: Sphinx, kind: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Escape asterisks, which are products and not emphasis; begin a section at a paragraph of fields."""
    rewritten, in_fields = list[str](), False
    for before, line in zip(["", *lines], lines, strict=False):
        if not before.strip() and _FIELD.match(line):
            rewritten += ["Attributes:" if kind in ("class", "exception") else "Args:"]
            in_fields = True
        elif not line.strip():
            in_fields = False
        escaped = re.sub(r"(`[^`]*`)|\*", lambda match: match[1] or r"\*", line)
        rewritten.append(f"    {escaped}" if in_fields else escaped)
    lines[:] = rewritten
    if kind in ("attribute", "property") and lines:  # whose first line napoleon takes for `type: text`
        lines[0] = lines[0].replace(": ", ":\u00a0", 1)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", rewrite, priority=400)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
