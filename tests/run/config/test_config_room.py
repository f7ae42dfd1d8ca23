"""Folders for states that are offloaded to files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from stretto.run.config import check as room
from stretto.run.config.check import find_problems
from stretto.run.config.load import parse

MODEL = "model: {family: gpt, layers: 4, hidden: 64, heads: 4}\ndata: {vocab: 512}\n"
AWAY = ["dp.mode=zero1", "dp.offload=nvme", "layout.dp=2", "layout.pp=2"]


def problems(path: Path, *overrides: str) -> list[str]:
    config = parse(MODEL, overrides=[*(overrides or AWAY), f"dp.path={path}"])
    return [f"{p.message}; {p.fix}" for p in find_problems(config)]


def test_a_folder_that_can_be_made_is_fine(tmp_path: Path) -> None:
    assert problems(tmp_path / "new" / "scratch") == []
    (tmp_path / "file").touch()
    (problem,) = problems(tmp_path / "file")
    assert "file is a file; name another folder" in problem
    assert problems(tmp_path / "file", "dp.mode=zero1") == []  # nothing goes there


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.os, "access", lambda path, mode: path != tmp_path)
    (problem,) = problems(tmp_path)
    assert "cannot be written to" in problem


def test_too_little_disk_space_is_an_error_before_processes_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elements = 4 * (12 * 64 * 64 + 13 * 64) + (2 * 512 + 128 + 2) * 64  # the tied embedding on two stages
    needed = 12 * elements  # of both replicas, masters and two means
    for free, fits in ((needed // 2, False), (needed - 20000, False), (needed + 20000, True)):
        monkeypatch.setattr(room.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        refusals = problems(tmp_path)
        assert bool(refusals) is not fits
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    (refusal,) = problems(tmp_path)
    assert "keep 0.00306 GiB" in refusal
    assert "and 0 GiB are free; a folder on another disk, or dp.offload=cpu" in refusal
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed // 2 + 20000))
    assert problems(tmp_path) == []
