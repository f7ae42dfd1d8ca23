"""Links of a page that leave docs/: README and its like are pages of the site, other files are named only.

CONTRIBUTING.md and others at the root are shown by a page of reference/ that consists of the line
`Source: [NAME.md](../../NAME.md)`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#|mailto:)([^)#\s]*)(#[^)\s]+)?\)")
_SOURCE = re.compile(r"Source: \[[^\]]+\]\(\.\./\.\./([A-Z]+\.md)\)\s*")
ROOT_PAGES = {
    "CONTRIBUTING.md": "reference/contributing.md",
    "SECURITY.md": "reference/security.md",
    "CHANGELOG.md": "reference/changelog.md",
    "README.md": "index.md",
}


def rewrite(app: Sphinx, docname: str, content: list[str]) -> None:
    """Replace the page of a root file by its text, and links out of docs/ by what the site has."""
    docs = Path(app.srcdir)
    page = docs / f"{docname}.md"
    if not page.is_file():
        return
    base = page.parent  # of the links
    if shown := _SOURCE.fullmatch(content[0].strip()):
        base = docs.parent
        content[0] = (base / shown[1]).read_text(encoding="utf-8")

    def link(match: re.Match[str]) -> str:
        picture, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target:
            return match[0]
        path = Path(os.path.normpath(base / target))
        if not path.exists():
            return match[0]
        inside = path.relative_to(docs.parent)
        if str(inside) in ROOT_PAGES:
            path = docs / ROOT_PAGES[str(inside)]
        elif not path.is_relative_to(docs) or path.suffix not in (".md", ".svg", ".png"):
            return text if text.startswith("`") else f"{text} (`{inside}`)"
        return f"{picture}[{text}]({os.path.relpath(path, page.parent)}{anchor})"

    parts = re.split(r"(^```.*?^```$)", content[0], flags=re.MULTILINE | re.DOTALL)
    content[0] = "".join(part if at % 2 else _LINK.sub(link, part) for at, part in enumerate(parts))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
