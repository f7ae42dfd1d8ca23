"""Damaged and hostile checkpoints of torch.distributed.checkpoint: one clear error, and nothing is run."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import titan_models as titan
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from stretto.engine.checkpoint.read import read_whole
from stretto.errors import StrettoError
from stretto.job.shape import ModelShape
from stretto_interop.checkpoints.dcp.reader import (
    METADATA,
    Archives,
    DcpIndex,
    Extent,
    find_folder,
    read_dcp_index,
)
from stretto_interop.checkpoints.dcp.titan import DcpImport

SHAPE = ModelShape(family="llama", layers=1, hidden=8, heads=2, ffn=8, vocab=11, sequence=6)
DATA = "__0_0.distcp"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = titan.Titan(SHAPE)
    optimiser = titan.adamw(model, lr=1e-2)
    titan.train(model, optimiser, titan.batches(SHAPE, 1))
    return titan.write(tmp_path_factory.mktemp("dcp") / "step-1", model, optimiser, step=1)


def copied(source: Path, to: Path, change: Callable[[Any], None] | None = None) -> Path:
    """A copy, with a changed index."""
    to.mkdir(exist_ok=True)
    for file in source.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    if change is not None:
        index = pickle.loads((source / METADATA).read_bytes())
        change(index)
        (to / METADATA).write_bytes(pickle.dumps(index))
    return to


def read(folder: Path, run: Path) -> dict[str, torch.Tensor]:
    with DcpImport(folder, SHAPE) as opened:
        return read_whole(opened.write(run), "")[0]


class Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_nothing_in_the_index_is_run(source: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def plant(index: Any) -> None:
        index.planner_data = Payload(mark)

    with pytest.raises(StrettoError, match=r"it names '\w+.mkdir', which could run code"):
        read_dcp_index(copied(source, tmp_path / "evil", plant))
    assert not mark.exists()
    pickle.loads((tmp_path / "evil" / METADATA).read_bytes())
    assert mark.exists(), "the payload is none"


@pytest.mark.parametrize("name", ["train_state.step", "tok_embeddings.weight"])
def test_nothing_in_the_data_is_run(source: Path, tmp_path: Path, name: str) -> None:
    mark = tmp_path / "mark"
    archive = io.BytesIO()
    torch.save(Payload(mark), archive)

    def plant(index: Any) -> None:
        for key, info in index.storage_data.items():
            if key.fqn == name:
                info.offset, info.length = (source / DATA).stat().st_size, len(archive.getvalue())

    folder = copied(source, tmp_path / "evil", None)
    (folder / DATA).write_bytes((folder / DATA).read_bytes() + archive.getvalue())
    index = pickle.loads((source / METADATA).read_bytes())
    plant(index)
    (folder / METADATA).write_bytes(pickle.dumps(index))
    with pytest.raises(StrettoError, match="which could run code"):
        read(folder, tmp_path / "run")
    assert not mark.exists()


def no_data(index: Any) -> None:
    index.storage_data = {k: v for k, v in index.storage_data.items() if k.fqn != "norm.weight"}


def beyond(index: Any) -> None:
    next(v for k, v in index.storage_data.items() if k.fqn == "norm.weight").length = 2**40


def elsewhere(index: Any) -> None:
    for info in index.storage_data.values():
        info.relative_path = "../step-1/__0_0.distcp"


def coded(index: Any) -> None:
    for info in index.storage_data.values():
        info.transform_descriptors = ["zstd"]


def gap(index: Any) -> None:
    index.state_dict_metadata["norm.weight"].chunks[0].sizes = torch.Size([3])


def overlap(index: Any) -> None:
    entry = index.state_dict_metadata["norm.weight"]
    entry.chunks = [type(entry.chunks[0])(torch.Size([at]), torch.Size([4])) for at in (0, 2)]
    info = next(v for k, v in index.storage_data.items() if k.fqn == "norm.weight")
    index.storage_data[MetadataIndex("norm.weight", [2])] = info


def huge(index: Any) -> None:
    entry = index.state_dict_metadata["norm.weight"]
    entry.size = entry.chunks[0].sizes = torch.Size([2**47])


def complex_type(index: Any) -> None:
    index.state_dict_metadata["norm.weight"].properties.dtype = torch.complex64


def another_type(index: Any) -> None:
    index.state_dict_metadata["norm.weight"].properties.dtype = torch.int32


def swapped(index: Any) -> None:
    of = {k.fqn: v for k, v in index.storage_data.items()}
    head, norm = of["lm_head.weight"], of["norm.weight"]
    norm.offset, norm.length = head.offset, head.length


DAMAGE: dict[Any, str] = {
    no_data: "does not say where the part of 'norm.weight' at",
    beyond: "'norm.weight' should be bytes",
    elsewhere: "file name '../step-1/__0_0.distcp' is not allowed",
    coded: "encoded by an extension",
    gap: "tensor 'norm.weight': pieces have 3 elements of 8",
    overlap: "tensor 'norm.weight': pieces .* overlap",
    huge: r"norm.weight has shape \[140737488355328\]",
    complex_type: "complex64",
    another_type: r"norm.weight, at byte \d+: it is torch.float32 of shape \[8\], torch.int32 of \[8\]",
    swapped: r"norm.weight, at byte \d+: it is torch.float32 of shape \[11, 8\]",
}


@pytest.mark.parametrize("change", DAMAGE, ids=lambda change: change.__name__)
def test_what_does_not_fit_is_named(source: Path, tmp_path: Path, change: Callable[[Any], None]) -> None:
    folder = copied(source, tmp_path / "changed", change)
    with pytest.raises(StrettoError, match=DAMAGE[change]):
        read(folder, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints" / "step-00000001").exists()


def test_a_link_is_not_followed(source: Path, tmp_path: Path) -> None:
    folder = copied(source, tmp_path / "linked")
    (folder / DATA).unlink()
    (folder / DATA).symlink_to(source / DATA)
    with pytest.raises(StrettoError, match="not a plain file"):
        read_dcp_index(folder)


def test_a_changed_weight_is_noticed(source: Path, tmp_path: Path) -> None:
    folder = copied(source, tmp_path / "changed")
    index = pickle.loads((folder / METADATA).read_bytes())
    info = next(v for k, v in index.storage_data.items() if k.fqn == "norm.weight")
    data = bytearray((folder / DATA).read_bytes())
    archive = bytes(data[info.offset : info.offset + info.length])
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        at = archive.index(opened.read("archive/data/0"))
    data[info.offset + at] ^= 1
    (folder / DATA).write_bytes(data)
    with pytest.raises(StrettoError, match=r"norm.weight, at byte \d+: Bad CRC-32"):
        read(folder, tmp_path / "run")


@pytest.mark.parametrize("name", [METADATA, DATA])
@given(
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=3)
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bits_are_refused_or_harmless(
    source: Path, tmp_path: Path, name: str, flips: list[tuple[float, int]]
) -> None:
    """Whatever is flipped, a checkpoint is read as it was written, or refused by our error."""
    folder = copied(source, tmp_path / "flipped")
    data = bytearray((source / name).read_bytes())
    for at, bits in flips:
        data[int(at * len(data))] ^= bits
    (folder / name).write_bytes(data)
    try:
        with DcpImport(folder, SHAPE) as opened:
            opened.tensors[0].read()
    except StrettoError:
        pass


@given(data=st.binary(max_size=400))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_as_an_archive(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.distcp").write_bytes(data)
    index = DcpIndex(tmp_path, {}, {"x": Extent("x.distcp", 0, len(data))})
    with Archives(index) as archives, pytest.raises(StrettoError, match="is damaged: x, at byte 0"):
        archives.read_object("x")


def archive_of(folder: Path, entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Archives:
    with zipfile.ZipFile(folder / "x.distcp", "w", compression) as opened:
        for name, value in entries.items():
            opened.writestr(name, value)
    size = (folder / "x.distcp").stat().st_size
    return Archives(DcpIndex(folder, {}, {"x": Extent("x.distcp", 0, size)}))


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"a/data.pkl": b"N.", "b/data.pkl": b"N."}, "no archive of torch.save"),
        ({"a/other": b"N."}, "no archive of torch.save"),
        ({"a/data.pkl": b"N.", "a/byteorder": b"big"}, "big-endian"),
        ({"a/data.pkl": b"N" * (1 << 20) + b"0" * (1 << 20)}, r"its data.pkl has 2.0 MiB, at most 1.0 MiB"),
    ],
)
def test_archives_that_torch_does_not_write(tmp_path: Path, entries: dict[str, bytes], why: str) -> None:
    with archive_of(tmp_path, entries) as archives, pytest.raises(StrettoError, match=why):
        archives.read_object("x")


def test_a_compressed_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    bomb = {"a/data.pkl": b"\x00" * (1 << 28)}
    with archive_of(tmp_path, bomb, zipfile.ZIP_DEFLATED) as archives:
        tracemalloc.start()
        with pytest.raises(StrettoError, match="compressed, which torch"):
            archives.read_object("x")
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
        tracemalloc.stop()


def test_numbers_that_are_none(source: Path, tmp_path: Path) -> None:
    values = {"text": "3", "half": 2.5, "less": -1, "list": [1], "nan": float("nan"), "two": torch.ones(2)}
    values |= {"three": 3, "four": torch.tensor(4)}
    dcp.save({"x": values}, checkpoint_id=tmp_path, no_dist=True)
    with Archives(read_dcp_index(tmp_path)) as archives:
        assert [archives.count(f"x.{name}", 0) for name in ("three", "four", "none")] == [3, 4, 0]
        for name in ("text", "half", "less", "list", "nan", "two"):
            with pytest.raises(StrettoError, match=rf"x\.{name} in "):
                archives.count(f"x.{name}", 0)


def test_strided_and_narrow_tensors(tmp_path: Path) -> None:
    """torch keeps the strides of what it saves, so a transposed tensor is stored column by column."""
    stream = torch.Generator().manual_seed(0)
    values = {
        "turned": torch.rand(3, 5, generator=stream).t(),
        "narrow": torch.rand(4, 6, generator=stream)[1:3, 2:5],
        "half": torch.rand(7, generator=stream).bfloat16(),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(2.5),
    }
    dcp.save(values, checkpoint_id=tmp_path, no_dist=True)
    index = read_dcp_index(tmp_path)
    with Archives(index) as archives:
        for name, value in values.items():
            into = torch.full(tuple(value.shape), float("nan"), dtype=value.dtype)
            archives.read_tensor(name, into)
            assert torch.equal(into, value), name


def test_folders_of_steps(source: Path, tmp_path: Path) -> None:
    for step in (9, 10, 11):
        copied(source, tmp_path / f"step-{step}")
    (tmp_path / "step-11" / METADATA).unlink()
    assert find_folder(tmp_path) == tmp_path / "step-10"
    assert find_folder(tmp_path / "step-9") == tmp_path / "step-9"
    with pytest.raises(StrettoError, match=r"it has no \.metadata"):
        find_folder(tmp_path / "step-11")
    (tmp_path / "step-11" / "model.safetensors").write_bytes(struct.pack("<Q", 0))
    with pytest.raises(StrettoError, match=r"it has no \.metadata") as caught:
        find_folder(tmp_path / "step-11")
    assert "without --format dcp" in str(caught.value.hint)
