from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.run.data.commit import PartialFolder


def put(target: Path, text: str, keep: bool = False) -> None:
    with PartialFolder(target) as partial:
        (partial.path / "file").write_text(text)
        partial.commit(lambda _: keep)


def test_a_folder_appears_whole_and_alone(tmp_path: Path):
    target = tmp_path / "deep" / "t"
    with PartialFolder(target) as partial:
        (partial.path / "file").write_text("1")
        assert not target.exists()
        partial.commit(lambda _: False)
    assert (target / "file").read_text() == "1"
    assert os.listdir(target.parent) == ["t"]


def test_one_that_is_there_is_kept_or_replaced(tmp_path: Path):
    put(tmp_path / "t", "1")
    put(tmp_path / "t", "2", keep=True)
    assert (tmp_path / "t" / "file").read_text() == "1"
    put(tmp_path / "t", "3")
    assert (tmp_path / "t" / "file").read_text() == "3"
    assert os.listdir(tmp_path) == ["t"]


def test_a_failure_leaves_existing_files(tmp_path: Path):
    put(tmp_path / "t", "1")
    with pytest.raises(IsADirectoryError), PartialFolder(tmp_path / "t") as partial:
        partial.path.write_text("2")
    assert (tmp_path / "t" / "file").read_text() == "1"
    assert os.listdir(tmp_path) == ["t"]


def test_leavings_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path):
    for name in (".t.dead.partial", ".t.alive.partial", ".other.dead.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    old = time.time() - 2 * 24 * 3600
    for path in (".t.dead.partial", ".t.dead.partial/file", ".t.alive.partial", ".other.dead.partial"):
        os.utime(tmp_path / path, (old, old))
    put(tmp_path / "t", "1")
    assert set(os.listdir(tmp_path)) == {"t", ".t.alive.partial", ".other.dead.partial"}


def test_a_place_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(StrettoError, match="cannot be written"):
        put(tmp_path / "file" / "t", "1")
