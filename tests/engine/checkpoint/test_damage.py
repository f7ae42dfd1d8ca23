"""Damage of every kind is found, told and passed over; nothing that is stored is ever run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import random
import shutil
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hand_layouts import Hand, blank_state, differing, true_state
from stretto.engine.checkpoint import files
from stretto.engine.checkpoint.files import FileEntry, dump_json
from stretto.engine.checkpoint.folder import Retention, clean
from stretto.engine.checkpoint.index import INDEX
from stretto.engine.checkpoint.load import latest, load, verify
from stretto.engine.checkpoint.manifest import (
    MANIFEST,
    load_manifest,
    problems,
    read_manifest,
    write_manifest,
)
from stretto.engine.checkpoint.save import save
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.errors import StrettoError

SHARD = "shard-00000.safetensors"
FILES = (SHARD, INDEX, MANIFEST)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 and 2, whole, of different content."""
    for step in (1, 2):
        state = {n: (t + step if n == "model.scale" else t, p) for n, (t, p) in true_state(Hand(), 0).items()}
        save(tmp_path, step, state, {"step": step, "name": "run"})
    return tmp_path


def newest(run: Path) -> tuple[str | None, list[str]]:
    reported: list[str] = []
    path = latest(run, reported.append)
    return path.name if path else None, reported


def falls_back(run: Path, about: str) -> None:
    """Step 2 is refused by all ways in, step 1 is found, and the message names what is wrong."""
    name, reported = newest(run)
    assert name == "step-00000001"
    assert len(reported) == 1
    assert reported[0].startswith("checkpoint step-00000002 is damaged: ")
    assert reported[0].endswith("; falling back to step-00000001")
    assert about in reported[0]
    state = blank_state(Hand(), 0)
    with pytest.raises(StrettoError, match="damaged"):
        load(run / "step-00000002", state)
    assert all(bool((t == 77).all()) for t, _ in state.values())


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_anywhere_is_found(run: Path, name: str) -> None:
    file = run / "step-00000002" / name
    data = file.read_bytes()
    places = range(len(data)) if len(data) < 500 else random.Random(name).sample(range(len(data)), 120)
    for place in [0, len(data) - 1, *places]:
        broken = bytearray(data)
        broken[place] ^= 1 << place % 8
        file.write_bytes(broken)
        assert problems(run / "step-00000002"), place
    falls_back(run, name)
    file.write_bytes(data)
    assert newest(run) == ("step-00000002", [])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [0, 1, -1])
def test_a_truncated_file_is_damage(run: Path, name: str, size: int) -> None:
    file = run / "step-00000002" / name
    os.truncate(file, size if size >= 0 else file.stat().st_size - 1)
    falls_back(run, name)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_damage(run: Path, name: str) -> None:
    (run / "step-00000002" / name).unlink()
    falls_back(run, f"{name} is missing")


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_step_is_damage(run: Path, name: str) -> None:
    shutil.copyfile(run / "step-00000001" / name, run / "step-00000002" / name)
    if name == INDEX:  # the same in both: nothing is wrong
        assert newest(run) == ("step-00000002", [])
    else:
        falls_back(run, "")


def test_a_manifest_of_another_step_than_the_folder_is_damage(run: Path) -> None:
    shutil.rmtree(run / "step-00000002")
    shutil.copytree(run / "step-00000001", run / "step-00000002")
    falls_back(run, "its manifest is of step 1")


def test_a_link_in_place_of_a_file_is_damage(run: Path) -> None:
    file = run / "step-00000002" / SHARD
    file.rename(run / "elsewhere")
    file.symlink_to(run / "elsewhere")
    falls_back(run, "not a plain file")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "socket", "folder"])
def test_what_is_no_file_is_damage_and_is_not_waited_for(run: Path, name: str, kind: str) -> None:
    file = run / "step-00000002" / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        here = Path.cwd()
        os.chdir(file.parent)  # a socket's path is limited to some hundred characters
        with socket.socket(socket.AF_UNIX) as bound_socket:
            bound_socket.bind(name)
        os.chdir(here)
    falls_back(run, f"{name} is not a plain file")
    save(run, 3, true_state(Hand(), 0), {}, keep=Retention(last=1))
    assert [path.name for path in run.iterdir()] == ["step-00000003"]


def test_a_pipe_that_takes_a_file_s_place_while_it_is_opened_is_damage(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run / "step-00000002" / MANIFEST

    def swapped(folder: Path, name: str) -> Path:
        path = plain_file(folder, name)
        if path == file:
            path.unlink()
            os.mkfifo(path)
        return path

    plain_file = files.plain_file
    monkeypatch.setattr(files, "plain_file", swapped)
    assert problems(run / "step-00000002") == [f"{MANIFEST} is not a plain file"]


def test_pipes_in_place_of_folders_are_no_checkpoints(run: Path) -> None:
    for name in (
        "step-00000003",
        "step-00000004.partial",
        "step-00000005.deleting",
        "step-00000006.replaced",
    ):
        os.mkfifo(run / name)
    assert newest(run) == ("step-00000002", [])
    clean(run)
    left = {path.name for path in run.iterdir()}
    assert left == {"step-00000001", "step-00000002", "step-00000003"}
    save(run, 3, true_state(Hand(), 0), {})
    assert newest(run) == ("step-00000003", [])


def test_without_a_whole_checkpoint_none_is_returned(run: Path) -> None:
    for step in (1, 2):
        (run / f"step-{step:08d}" / SHARD).write_bytes(b"")
    name, reported = newest(run)
    assert name is None
    assert reported[-1].endswith("no older one exists")


def test_a_missing_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") == (None, [])
    with pytest.raises(StrettoError, match="no checkpoint at"):
        load(tmp_path, {})
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(StrettoError, match=r"manifest\.json is missing"):
        read_manifest(tmp_path / "step-00000001")


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the index and give the manifest the right checksum of it, as an attacker would."""
    body = json.loads((path / INDEX).read_bytes())
    replace(path, INDEX, dump_json(change(body) or body))


def replace(path: Path, name: str, data: bytes) -> None:
    manifest = load_manifest(path)
    (path / name).write_bytes(data)
    manifest.files[name] = FileEntry(len(data), zlib.crc32(data))
    (path / MANIFEST).unlink()
    write_manifest(path, manifest)


def set_field(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        at: Any = body
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = to

    return change


EMBED = ("tensors", "model.embed")
FORGED = {
    "not an object": lambda body: [body],
    "another format": set_field("format", to="x"),
    "a later version": set_field("version", to=2),
    "an unknown field": set_field("more", to=1),
    "a file outside": set_field("files", to=["../step-00000001/" + SHARD]),
    "an absolute file": set_field("files", to=["/etc/passwd"]),
    "a hidden file": set_field("files", to=[".metadata"]),
    "an unlisted file": set_field("files", to=["other.safetensors"]),
    "a file that is a number": set_field("files", to=[1]),
    "an unknown dtype": set_field(*EMBED, "dtype", to="load"),
    "a dtype that is a list": set_field(*EMBED, "dtype", to=["float32"]),
    "a negative size": set_field(*EMBED, "shape", to=[-13, -6]),
    "a huge size": set_field(*EMBED, "shape", to=[2**62, 2**62]),
    "a size that is true": set_field(*EMBED, "shape", to=[True, 6]),
    "a size with a fraction": set_field(*EMBED, "shape", to=[13.0, 6]),
    "too many dimensions": set_field(*EMBED, "shape", to=[1] * 1000),
    "no pieces": set_field(*EMBED, "pieces", to=[]),
    "a hole": set_field(*EMBED, "pieces", to=[[0, [0, 0], [12, 6]]]),
    "an overlap": set_field(*EMBED, "pieces", to=[[0, [0, 0], [8, 6]], [0, [3, 0], [5, 6]]]),
    "a piece outside": set_field(*EMBED, "pieces", to=[[0, [1, 0], [13, 6]]]),
    "a piece in no file": set_field(*EMBED, "pieces", to=[[9, [0, 0], [13, 6]]]),
    "a piece in file -1": set_field(*EMBED, "pieces", to=[[-1, [0, 0], [13, 6]]]),
    "a flat piece": set_field(*EMBED, "pieces", to=[[0, [0], [78]]]),
    "a short piece": set_field(*EMBED, "pieces", to=[[0, [0, 0]]]),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_index_is_refused(run: Path, case: str) -> None:
    forge(run / "step-00000002", FORGED[case])
    falls_back(run, INDEX)


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b'{"a":NaN}', b'{"a":1,"a":2}', b"\xff\xfe", b"", b"1" * 5000]
)
@pytest.mark.parametrize("name", [INDEX, MANIFEST])
def test_invalid_json_is_damage(run: Path, name: str, data: bytes) -> None:
    if name == INDEX:
        replace(run / "step-00000002", name, data)
    else:
        (run / "step-00000002" / name).write_bytes(data)
    falls_back(run, name)


def test_a_json_file_that_is_too_large_is_not_read(run: Path) -> None:
    os.truncate(run / "step-00000002" / MANIFEST, 1 << 40)
    falls_back(run, "the limit is")


@pytest.mark.parametrize(
    ("change", "about"),
    [
        ({"world": 10**9}, "world is 1000000000, at most"),
        ({"world": 0}, "world is 0"),
        ({"tensors": -1}, "it counts -1 tensors"),
        ({"tensors": 1}, "it counts 1 tensors"),
        ({"dtypes": {}}, "tensors of {}, not"),
        ({"dtypes": {"float32": 10**400}}, "it counts"),
        ({"dtypes": {"x" * 10**6: 1}}, "tensor dtypes to bytes"),
        ({"dtypes": {"float32": "4"}}, "tensor dtypes to bytes"),
        ({"step": 10**400}, "step is out of range"),
        ({"step": -1}, "step is out of range"),
        ({"saved": "x" * 10**6}, "saved has 1000000 characters"),
        ({"torch": "x" * 10**6}, "torch has 1000000 characters"),
    ],
)
def test_a_forged_manifest_with_the_right_checksum_is_damage(
    run: Path, change: dict[str, Any], about: str
) -> None:
    path = run / "step-00000002"
    manifest = dataclasses.replace(load_manifest(path), **change)
    (path / MANIFEST).unlink()
    write_manifest(path, manifest)
    falls_back(run, about)


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"NaN", b"Infinity", b"1" * 5000])
def test_numbers_that_no_manifest_has_are_damage(run: Path, number: bytes) -> None:
    file = run / "step-00000002" / MANIFEST
    file.write_bytes(file.read_bytes().replace(b'"name":"run"', b'"name":' + number))
    falls_back(run, "not valid JSON")


def test_a_manifest_that_names_files_outside_is_refused(run: Path) -> None:
    path = run / "step-00000002"
    manifest = load_manifest(path)
    manifest.files["../step-00000001/" + SHARD] = manifest.files[SHARD]
    (path / MANIFEST).unlink()
    write_manifest(path, manifest)
    falls_back(run, "not allowed")


def test_a_shard_file_that_contradicts_the_index_is_damage(run: Path) -> None:
    """Checksums right, header valid, a tensor of another dtype in it: refused when read."""
    path = run / "step-00000002"
    data = (path / SHARD).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].replace(b'"F32","shape":[13,6]', b'"I32","shape":[13,6]')
    replace(path, SHARD, data[:8] + header + data[8 + size :])
    assert verify(path) == []
    with pytest.raises(RuntimeError, match=r"model\.embed is not float32"):
        load(path, blank_state(Hand(), 0))


class Payload:
    """Serialised, it makes a file when it is read as Python objects."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", [*FILES, ".metadata"])
def test_pickled_objects_are_never_run(run: Path, tmp_path: Path, name: str) -> None:
    mark = tmp_path / "ran"
    evil = pickle.dumps(Payload(mark))
    path = run / "step-00000002"
    if name in (SHARD, INDEX):
        replace(path, name, evil)
    else:
        (path / name).write_bytes(evil)
    for attempt in (
        lambda: verify(path),
        lambda: latest(run, str),
        lambda: load(path, blank_state(Hand(), 0)),
    ):
        with contextlib.suppress(StrettoError, RuntimeError):
            attempt()
    assert not mark.exists()
    pickle.loads(evil)
    assert mark.exists(), "the payload itself must work, or this test shows nothing"


def test_no_pickled_object_is_written(run: Path) -> None:
    for file in (run / "step-00000002").iterdir():
        data = file.read_bytes()
        assert not data.startswith((b"\x80", b"PK")), file.name
        assert b"torch._utils" not in data


def test_checkpoint_files_are_readable_by_their_owner_only(run: Path) -> None:
    path = run / "step-00000002"
    assert path.stat().st_mode & 0o077 == 0
    assert all(file.stat().st_mode & 0o077 == 0 for file in path.iterdir())


class TestAnotherModel:
    """The tensors asked for are not the ones that are there."""

    def refused(self, run: Path, change: Callable[[dict[str, Any]], object]) -> StrettoError:
        state = blank_state(Hand(), 0)
        change(state)
        with pytest.raises(StrettoError, match="another model") as caught:
            load(run / "step-00000002", state)
        assert all(bool((t == 77).all()) for t, _ in state.values())
        return caught.value

    def test_shape(self, run: Path) -> None:
        new = (torch.full((13, 8), 77.0), ShardPlacement.unsharded("model.embed", (13, 8)))
        error = self.refused(run, lambda s: s.update({"model.embed": new}))
        assert "model.embed has shape [13, 6], in the model [13, 8]" in error.message

    def test_missing(self, run: Path) -> None:
        error = self.refused(run, lambda s: s.update({"model.embedd": s.pop("model.embed")}))
        assert "it has no tensor model.embedd of shape [13, 6]" in error.message
        assert "nearest name in it is model.embed," in str(error.hint)

    def test_extra(self, run: Path) -> None:
        error = self.refused(run, lambda s: (s.pop("model.scale"), s.pop("optim.scale")))
        assert "it has model.scale and 1 more tensors" in error.message

    def test_dtype(self, run: Path) -> None:
        ids = (torch.full((5,), 77.0), ShardPlacement.unsharded("model.table.ids", (5,)))
        error = self.refused(run, lambda s: s.update({"model.table.ids": ids}))
        assert "dtype int64" in error.message


def test_an_undamaged_checkpoint_loads(run: Path) -> None:
    state = blank_state(Hand(), 0)
    assert load(run / "step-00000001", state).meta == {"step": 1, "name": "run"}
    assert differing(state, Hand(), 0) == ["model.scale"]
