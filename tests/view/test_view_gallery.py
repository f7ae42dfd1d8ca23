"""The checked-in gallery is what its script writes of the schedules there are."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

from stretto.program import names
from stretto.program.replay import Timeline

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def gallery() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_gallery", DOCS / "_generators" / "make_gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def shown(gallery: ModuleType) -> list[Timeline]:
    return gallery.timelines()


def test_the_page_is_up_to_date(gallery: ModuleType, shown: list[Timeline]) -> None:
    written = (DOCS / "reference" / "gallery.md").read_text(encoding="utf-8").splitlines()
    assert written == gallery.page(shown).splitlines(), "run python docs/_generators/make_gallery.py"


def test_the_pictures_are_up_to_date_and_small(gallery: ModuleType, shown: list[Timeline]) -> None:
    folder = DOCS / "pictures" / "gallery"
    assert {path.stem for path in folder.glob("*.svg")} == set(names())
    for name, fresh in gallery.pictures(shown).items():
        written = (folder / name).read_text(encoding="utf-8")
        assert len(written.encode()) < 60_000
        assert written == fresh, f"{name}: run python docs/_generators/make_gallery.py"
        ET.fromstring(written)


def test_every_schedule_has_a_text_in_the_gallery(gallery: ModuleType) -> None:
    entries = gallery.texts()
    assert set(entries) == set(names())
    for name, entry in entries.items():
        assert entry["source"], name
        assert entry["text"].count(".") >= 2, name
