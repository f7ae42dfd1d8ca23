"""The table of modes, schedules and offload in the documentation agrees with the rules."""

from __future__ import annotations

from pathlib import Path

from stretto.program import names
from stretto.user_file import load_module

DOCS = Path(__file__).parents[2] / "docs"
PAGE, modes = DOCS / "reference" / "data-parallel.md", load_module(DOCS / "_generators" / "mode_table.py")


def test_the_table_is_as_the_rules_have_it():
    fix = "run: python docs/_generators/mode_table.py docs/reference/data-parallel.md"
    assert f"{modes.START}\n\n{modes.matrix()}\n\n{modes.END}" in PAGE.read_text(encoding="utf-8"), fix


def test_every_cell_is_supported_or_has_a_reason():
    table = modes.matrix()
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| `")]
    listed = [name.strip(" `") for row in rows for name in row[0].split(",")]
    assert set(listed) <= set(names())
    assert len(listed) == len(set(listed)) > 15
    for row in rows:
        for cell in row[1:]:
            works, _, why = cell.strip().partition("[")
            assert works or why, row
            if why:
                assert f"\n{why.partition(']')[0]}. " in table
