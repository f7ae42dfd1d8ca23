"""The checked-in page on scaling is what its script writes of today's predictions."""

from __future__ import annotations

import importlib.util
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_scaling", DOCS / "_generators" / "make_scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its data classes look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_page_and_its_picture_are_up_to_date(scaling: ModuleType) -> None:
    drawn = scaling.drawn_jobs()
    written = (DOCS / "evidence" / "scaling.md").read_text(encoding="utf-8")
    assert written == scaling.text(drawn), "run python docs/_generators/make_scaling.py"
    assert (DOCS / "pictures" / "scaling.svg").read_text(encoding="utf-8") == scaling.picture(drawn)


def test_the_page_has_every_published_run_of_its_jobs(scaling: ModuleType) -> None:
    """Each is a ring, of weak or of strong scaling."""
    jobs = scaling.published_jobs()
    utilisations = {f"{100 * scaling._published(run):.1f}%" for job in jobs for run in job.runs}
    written = (DOCS / "evidence" / "scaling.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in written.splitlines()]
    assert len(utilisations) > 10
    assert utilisations == {row[4].strip() for row in rows if len(row) > 4} - {"", "published", "---"}


def test_the_picture_has_five_jobs_with_weak_and_strong_scaling() -> None:
    root = ET.parse(DOCS / "pictures" / "scaling.svg").getroot()
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 10
