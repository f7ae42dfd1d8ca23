"""The table of modes, schedules and offload in the documentation agrees with the rules."""

from __future__ import annotations

from pathlib import Path

from stretto.program import names
from stretto.verify.language.matrix import matrix

ROOT = Path(__file__).parents[3]


def test_the_page_is_as_the_rules_have_it():
    assert (ROOT / "docs/modes.md").read_text(encoding="utf-8") == matrix()


def test_every_cell_is_supported_or_has_a_reason():
    page = matrix()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")][1:]
    assert {row[0].strip() for row in rows} <= set(names())
    assert len(rows) > 15
    for row in rows:
        for cell in row[1:]:
            works, _, why = cell.strip().partition("[")
            assert works or why, row
            if why:
                assert f"\n{why.partition(']')[0]}. " in page
