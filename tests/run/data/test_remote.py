"""Sources at URLs: the same tokens, through a bounded cache, and one error for what goes wrong."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from test_block_cache import on_disk
from test_data_indexed import make

from stretto.errors import StrettoError
from stretto.run.config.data import DataConfig
from stretto.run.config.load import parse
from stretto.run.config.schema import TrainConfig
from stretto.run.data import corpus, remote
from stretto.run.data.block_cache import BlockCache
from stretto.run.data.build import build
from stretto.run.data.dataset import WindowSamples, samples_of
from stretto.run.data.megatron import DatasetVocabulary, MegatronDataset, MegatronWriter
from stretto.run.data.open import open_source, open_tokens
from stretto.run.data.remote import RemoteArray, RemoteFile, RemotePath
from stretto.run.data.token_folder import TokenFolder
from stretto.run.data.token_source import JoinedSource, RemoteElements
from stretto.run.data.tokenizer import Tokenizer
from texts import read_samples

MEMORY: Any = fsspec.filesystem("memory")
DOCUMENTS = [[(i * j) % 997 + 1 for j in range(1, i % 30 + 2)] for i in range(300)]


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    monkeypatch.setattr(remote, "_PAUSES", (0.0, 0.0))
    yield
    MEMORY.store.clear()


def put(local: Path, url: str) -> str:
    """Copy a file or a folder to memory."""
    for path in sorted(local.rglob("*")) if local.is_dir() else [local]:
        if path.is_file():
            at = f"{url}/{path.relative_to(local)}" if local.is_dir() else url
            MEMORY.pipe_file(at, path.read_bytes())
    return url


@pytest.fixture
def cache(tmp_path: Path) -> BlockCache:
    return BlockCache(tmp_path / "blocks", 1 << 20)


def same(a: Any, b: Any) -> bool:
    return (
        np.array_equal(a.tokens[:], b.tokens[:])
        and np.array_equal(a.offsets[:], b.offsets[:])
        and (a.vocab, a.endoftext, a.fingerprint) == (b.vocab, b.endoftext, b.fingerprint)
        and a.identity() == b.identity()
    )


def test_arrays_are_read_by_slices_and_indices(cache: BlockCache) -> None:
    values = np.random.default_rng(0).integers(1 << 60, size=500)
    MEMORY.pipe_file("/a", b"xyz" + values.astype("<i8").tobytes() + b"end")
    array = RemoteArray(RemoteFile(RemotePath("memory://a", cache), block=128), "<i8", 3, 500)
    assert len(array) == 500
    assert isinstance(array, RemoteElements)
    for part in (slice(0, 0), slice(0, 1), slice(13, 400), slice(490, 600), slice(None), slice(-3, None)):
        assert array[part].tolist() == values[part].tolist(), "elements lie across blocks too"
    draw = np.random.default_rng(1)
    for indices in (
        draw.integers(-500, 500, size=(7, 11)),
        draw.integers(500, size=9)[:, None] % 400 + np.arange(50),
        np.zeros((0, 3), dtype=np.int64),
        np.array(5),
    ):
        assert np.array_equal(array[indices], values[indices])
    assert (array[-1], array[7]) == (values[-1], values[7])
    with pytest.raises(IndexError):
        array[np.array([500])]


def test_a_token_folder_at_a_url_is_the_folder(tmp_path: Path, cache: BlockCache) -> None:
    local = make(tmp_path / "t", DOCUMENTS)
    there = open_tokens(put(tmp_path / "t", "memory://b/t") + "/", cache=cache)
    assert same(there, local)
    assert there.tokenizer().to_bytes() == local.tokenizer().to_bytes()
    assert there.companions() == local.companions()
    there.verify()
    again = pickle.loads(pickle.dumps(there))
    assert same(again, local)
    assert len(pickle.dumps(there)) < 2000, "no content is sent to other processes"


@pytest.mark.parametrize("name", ["d", "d.bin", "d.idx"])
def test_a_megatron_dataset_at_a_url_is_the_dataset(tmp_path: Path, cache: BlockCache, name: str) -> None:
    tokenizer = Tokenizer.train(["some text to train on"], 300)
    with MegatronWriter(tmp_path / "m" / "d", tokenizer) as writer:
        for document in DOCUMENTS:
            writer.add([token % 250 for token in document], ends=True)
        writer.commit()
    put(tmp_path / "m", "memory://b/m")
    local = MegatronDataset(tmp_path / "m" / "d", DatasetVocabulary.of(tmp_path / "m" / "d", None))
    there = open_tokens(f"memory://b/m/{name}", cache=cache)
    assert same(there, local)
    assert there.tokenizer().to_bytes() == tokenizer.to_bytes()
    there.verify()
    assert same(pickle.loads(pickle.dumps(there)), local)
    MEMORY.rm("/b/m/d.bin")
    with pytest.raises(StrettoError, match=r"memory://b/m/d.bin: missing"):
        open_tokens(f"memory://b/m/{name}", cache=cache)


def test_samples_are_those_of_the_folder(tmp_path: Path, cache: BlockCache) -> None:
    local = make(tmp_path / "t", DOCUMENTS)
    put(tmp_path / "t", "memory://b/t")
    there = open_tokens("memory://b/t", cache=cache)
    joined = JoinedSource([local, there]), JoinedSource([local, local])
    for packing in ("stream", "documents", "none"):
        for remote_folder, local_folder in ((there, local), joined):
            data = DataConfig(source="x", sequence=8, packing=packing, shuffle="window", shuffle_window=4096)
            a, b = (samples_of(folder, data, "train", 3) for folder in (remote_folder, local_folder))
            assert a.block
            assert isinstance(a.block, int)
            first, second = (samples.batch(range(40, 90)) for samples in (a, b))
            assert first.inputs.tolist() == second.inputs.tolist()
            assert first.targets.tolist() == second.targets.tolist()


def train_config(*overrides: str) -> TrainConfig:
    text = "model: {family: gpt, layers: 1, hidden: 16, heads: 1}\ndata: {sequence: 8}"
    return parse(text, "x.yaml", overrides)


def test_the_order_is_by_windows_at_urls_and_global_elsewhere(tmp_path: Path, cache: BlockCache) -> None:
    local = make(tmp_path / "t", DOCUMENTS)
    put(tmp_path / "t", "memory://b/t")
    there = open_tokens("memory://b/t", cache=cache)
    window = "data.shuffle_window=1024"
    for source, overrides, shuffled in (
        (there, [], True),
        (there, ["data.shuffle=global"], False),
        (local, [], False),
        (local, ["data.shuffle=window"], True),
        (JoinedSource([local, there]), [], True),
        (JoinedSource([local, local]), [], False),
    ):
        samples = read_samples(source, train_config(window, *overrides))
        assert isinstance(samples, WindowSamples)
        assert bool(samples.block) == shuffled


def opened(name: str, block: int, cache: BlockCache, content: bytes) -> RemoteFile:
    MEMORY.pipe_file(name, content)
    return RemoteFile(RemotePath(f"memory:/{name}", cache), block=block)


class Fetches:
    """Counts what is fetched of each file, and may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None] | None = None) -> None:
        self.ranges = list[tuple[str, int]]()
        inner = type(MEMORY).cat_file

        def cat_file(files: Any, path: str, start: int | None = None, end: int | None = None) -> bytes:
            self.ranges.append((path, start or 0))
            if act is not None:
                act(len(self.ranges))
            return inner(files, path, start=start, end=end)

        monkeypatch.setattr(type(MEMORY), "cat_file", cat_file)


def test_a_fetch_is_tried_again(cache: BlockCache, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened("/f", 10, cache, bytes(range(100)))

    def act(count: int) -> None:
        if count <= 2:
            raise TimeoutError("planted")

    fetches = Fetches(monkeypatch, act)
    assert file.read(5, 8) == bytes(range(5, 8))
    assert len(fetches.ranges) == 3


def test_what_cannot_be_fetched_is_one_error(cache: BlockCache, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened("/f", 10, cache, bytes(range(100)))

    def act(_: int) -> None:
        raise ConnectionError("planted\nand more")

    fetches = Fetches(monkeypatch, act)
    with pytest.raises(StrettoError) as error:
        file.read(35, 38)
    assert str(error.value).startswith(
        "memory://f: cannot be read (block 3, bytes 30 to 40): ConnectionError: planted"
    )
    assert "and more" not in str(error.value)
    assert len(fetches.ranges) == 3
    assert not list(cache.folder.glob("*/*"))


def test_no_answer_is_one_error(cache: BlockCache, monkeypatch: pytest.MonkeyPatch) -> None:
    file, never = opened("/f", 10, cache, bytes(100)), threading.Event()
    Fetches(monkeypatch, lambda _: never.wait(30) and None)
    monkeypatch.setattr(remote, "_LONGEST", 0.2)
    with pytest.raises(StrettoError, match=r"block 0.*no answer in 0\.2 s"):
        file.read(0, 5)
    never.set()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("Forbidden"), "no permission"),
        (type("NoCredentialsError", (Exception,), {})("Unable to locate credentials"), "no permission"),
        (FileNotFoundError("x"), "no such file"),
    ],
)
def test_what_no_further_try_mends_is_not_tried_again(
    cache: BlockCache, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    file = opened("/f", 10, cache, bytes(100))

    def act(_: int) -> None:
        raise error

    fetches = Fetches(monkeypatch, act)
    with pytest.raises(StrettoError, match=rf"memory://f: .*{message}"):
        file.read(0, 5)
    assert len(fetches.ranges) == 1


def test_several_blocks_are_fetched_at_a_time(cache: BlockCache, monkeypatch: pytest.MonkeyPatch) -> None:
    file, together = opened("/f", 10, cache, bytes(range(100))), threading.Barrier(4)
    Fetches(monkeypatch, lambda _: together.wait(20) and None)
    assert file.read(0, 40) == bytes(range(40))


def test_bytes_that_are_not_those_of_the_checksum(tmp_path: Path, cache: BlockCache) -> None:
    make(tmp_path / "t", DOCUMENTS)
    put(tmp_path / "t", "memory://b/t")
    content = bytearray(MEMORY.cat_file("/b/t/tokens.bin"))
    content[640] ^= 1
    MEMORY.pipe_file("/b/t/tokens.bin", bytes(content))
    there = open_tokens("memory://b/t", cache=cache)
    assert there.tokens[:300].tolist() == TokenFolder(tmp_path / "t").tokens[:300].tolist()
    with pytest.raises(StrettoError, match=r"tokens.bin: .*block 10, bytes 640 to 704\): OSError: corrupt"):
        there.tokens[300:340]


def test_a_damaged_block_in_the_cache_is_fetched_again(tmp_path: Path, cache: BlockCache) -> None:
    local = make(tmp_path / "t", DOCUMENTS)
    put(tmp_path / "t", "memory://b/t")
    assert same(open_tokens("memory://b/t", cache=cache), local)
    for path in cache.folder.glob("*/1"):
        path.write_bytes(b"damage" + path.read_bytes()[6:])
    fresh = BlockCache(cache.folder, cache.limit)  # of another process
    assert same(open_tokens("memory://b/t", cache=fresh), local)


def test_a_source_that_changes_is_one_error(tmp_path: Path, cache: BlockCache) -> None:
    make(tmp_path / "t", DOCUMENTS)
    put(tmp_path / "t", "memory://b/t")
    there = open_tokens("memory://b/t", cache=cache)
    sent = pickle.dumps(there)
    make(tmp_path / "u", [document[::-1] for document in DOCUMENTS])
    put(tmp_path / "u", "memory://b/t")
    with pytest.raises(StrettoError, match=r"memory://b/t/tokens.bin: has changed since it was opened"):
        there.tokens[300:400]
    assert same(open_tokens("memory://b/t", cache=cache), TokenFolder(tmp_path / "u")), "no stale block"
    with pytest.raises(StrettoError, match=r"memory://b/t/index.json: has changed since it was opened"):
        pickle.loads(sent)  # although the cache has the new blocks


def test_each_block_is_fetched_once_an_epoch_by_a_small_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = np.random.default_rng(0).integers(1, 999, size=(200, 199)).tolist()
    make(tmp_path / "t", documents, chunk=128)  # 80 kB
    put(tmp_path / "t", "memory://b/t")
    window = ("data.shuffle_window=4096", f"data.cache={tmp_path}")  # 64 runs of 64 tokens, a block each
    there = open_source(train_config("data.source=memory://b/t", *window).data)
    needed = read_samples(there, train_config(*window)).cache_bytes
    assert needed == 2 * 64 * 2 * 128, "a run and the first token of the next"
    limit = needed * 16 // 15 * 132 // 128 * 6 // 5
    config = train_config("data.source=memory://b/t", f"data.cache_gib={limit / 2**30!r}", *window)
    samples = read_samples(open_source(config.data), config)
    assert isinstance(samples, WindowSamples)
    fetches, most = Fetches(monkeypatch), 0
    for first in range(0, len(samples) - 8, 8):
        samples.batch(range(first, first + 8))
        if first % 400 == 0:
            most = max(most, on_disk(tmp_path / "blocks"))
    assert most <= limit + 24 * 132, "files change while they are counted: at most one a thread"
    tokens = [start for path, start in fetches.ranges if path.endswith("tokens.bin")]
    assert len({*tokens}) > 0.9 * 80_000 / 128
    assert len(tokens) < 2.3 * len({*tokens}), "a run has the end of one block and the start of another"


def test_blocks_come_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = np.random.default_rng(0).integers(1, 999, size=(300, 199)).tolist()
    make(tmp_path / "t", documents, chunk=1024)
    put(tmp_path / "t", "memory://b/t")
    config = train_config(
        "data.source=memory://b/t", "data.shuffle_window=16384", f"data.cache={tmp_path / 'cache'}"
    )
    samples = read_samples(open_source(config.data), config)
    assert isinstance(samples, WindowSamples)
    span = samples.block * 64
    (array,) = samples.source.cached
    assert isinstance(array, RemoteArray)

    def settled(index: int) -> None:
        samples.batch([index])
        deadline = time.monotonic() + 20
        while array.file._prefetching and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not array.file._prefetching

    def read(index: int) -> None:
        """Read a sample without fetching ahead."""
        (start,) = samples.starts([index]).tolist()
        array[start : start + 9]

    settled(0)
    with monkeypatch.context() as patched:
        fetches = Fetches(patched)
        for first in range(span // 4):
            read(first)
        assert not fetches.ranges, "the window that is read was fetched at its first sample"
    settled(span // 2)
    with monkeypatch.context() as patched:
        fetches = Fetches(patched)
        for first in range(span // 2, 2 * span):
            read(first)
        assert not fetches.ranges, "by the middle of a window the next has been fetched"


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["data.cache_gib=1e-5"], "the windows that are read", "a data.shuffle_window smaller than"),
        (["data.cache_gib=1e-5", "data.shuffle=global"], "any sample may come next", "data.shuffle=window"),
    ],
)
def test_a_cache_that_is_too_small_is_one_error(
    tmp_path: Path, overrides: list[str], message: str, hint: str
) -> None:
    documents = np.random.default_rng(0).integers(1, 999, size=(300, 199)).tolist()
    make(tmp_path / "t", documents, chunk=1024)
    put(tmp_path / "t", "memory://b/t")
    config = train_config(
        "data.source=memory://b/t", "data.shuffle_window=4096", f"data.cache={tmp_path}", *overrides
    )
    with pytest.raises(StrettoError, match=r"data.cache_gib is 1e-05") as error:
        read_samples(open_source(config.data), config)
    assert message in str(error.value)
    assert hint in str(error.value.hint)
    enough = str(error.value.hint).partition(",")[0]
    config = train_config("data.source=memory://b/t", "data.shuffle_window=4096", *overrides, enough)
    source = open_tokens("memory://b/t", cache=BlockCache(tmp_path / "blocks", 1 << 20))
    read_samples(source, config)


@pytest.mark.parametrize(
    ("url", "message", "hint"),
    [
        ("memory://nothing", "neither a token folder", "text is named by its files"),
        ("s3://b/x", "takes the package s3fs", "stretto\\[s3\\]"),
        ("gs://b/x", "takes the package gcsfs", "stretto\\[gcs\\]"),
        ("s4://b/x", "no such protocol: s4", "did you mean s3"),
    ],
)
def test_urls_that_name_nothing(url: str, message: str, hint: str, cache: BlockCache) -> None:
    with pytest.raises(StrettoError, match=message) as error:
        open_tokens(url, cache=cache)
    assert re.search(hint, str(error.value.hint))


def test_text_is_read_from_urls(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    (texts / "more").mkdir(parents=True)
    rows = [json.dumps({"text": f"line {i * i} of text\n" * 3}) for i in range(40)]
    (texts / "a.jsonl").write_text("\n".join(rows))
    (texts / "more" / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(rows[:9]).encode()))
    (texts / "c.txt").write_text("plain words\n" * 50)
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    pq.write_table(pyarrow.table({"text": ["a row", "another row"]}), texts / "d.parquet")
    put(texts, "memory://b/texts")
    local = build(texts, tmp_path / "local", vocab=300)
    there = build("memory://b/texts", tmp_path / "there", vocab=300, cache=tmp_path)
    assert local.documents == 52
    assert same(there, local)
    part = build(texts / "*.jsonl", tmp_path / "part", vocab=300)
    assert same(build("memory://b/texts/*.jsonl", tmp_path / "part-there", vocab=300), part)
    tokens = build("memory://b/texts/c.txt", tmp_path / "one", vocab=300)
    assert tokens.index.source == ["memory://b/texts/c.txt"]
    with pytest.raises(StrettoError, match=r"memory://b/texts/\*.md: no such file"):
        build("memory://b/texts/*.md", tmp_path / "none")


def test_text_that_was_written_again_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Though its storage gives the time as text; one that gives none is warned of."""
    path = RemotePath("memory://versions/a.txt", BlockCache(tmp_path, 1 << 20))
    versions = list[str]()
    for moment in ({"updated": "2026-11-01T00:00:00Z"}, {"updated": "2026-11-02T00:00:00Z"}, {}):
        info = remote.file_info({"size": 3, "type": "file", **moment})
        monkeypatch.setattr(RemotePath, "stat", lambda _, info=info: info)
        versions.append(corpus._file(path, "a.txt").version)
    assert len(set(versions)) == 3
    assert capsys.readouterr().err.count("does not say when it changed") == 1
