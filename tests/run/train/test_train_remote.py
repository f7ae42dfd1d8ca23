"""Runs on tokens at a URL equal runs on the same tokens on the disk, in any layout and after a kill."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from stretto.errors import StrettoError
from stretto.run.config import TrainConfig
from stretto.run.config.check import check
from stretto.run.data.token_folder import TokenWriter
from stretto.run.data.tokenizer import Tokenizer
from stretto.run.launch.local import RankFailed
from texts import open_tokens
from tiny_job import LLAMA, job, write_text
from train_runs import at_step, keep_notes, losses, same, send_self, tensors, train

WINDOW = ("data.shuffle_window=1024", "train.steps=10", "optim.clip=null")
SMALL = "data.cache_gib=1e-4"  # 107 kB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    for name, count in (("tokens", 40_000), ("more", 8_000)):
        text = write_text(folder / f"{name}.txt", count, seed=len(name)).read_text()
        tokenizer = Tokenizer.train([(folder / "tokens.txt").read_text()], 300)
        with TokenWriter(folder / name, tokenizer, chunk=128) as writer:
            for line in text.splitlines():
                writer.add(tokenizer.encode(line), ends=True)
            writer.commit()
    return folder


def at_url(folder: Path, name: str, *overrides: str) -> TrainConfig:
    return job(
        folder, f"data.source=file://{folder}/tokens", *WINDOW, f"run.name={name}", *overrides, model=LLAMA
    )


def on_disk(folder: Path, name: str, *overrides: str) -> TrainConfig:
    return at_url(folder, name, f"data.source={folder}/tokens", "data.shuffle=window", *overrides)


def test_the_losses_are_those_of_the_folder_whatever_the_cache_holds(folder: Path) -> None:
    layout = ("layout.dp=2", "eval.every=5")
    local = on_disk(folder, "local", *layout)
    there = at_url(folder, "there", *layout, SMALL, f"data.cache={folder}/small")
    train(local)
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            sizes = []
            for path in (folder / "small").glob("blocks/*/*"):
                try:
                    sizes.append(path.stat().st_size)
                except FileNotFoundError:
                    continue
            most[0] = max(most[0], sum(sizes))

    watcher = threading.Thread(target=watch)
    watcher.start()
    train(there)
    done.set()
    watcher.join()
    assert losses(local) == losses(there)
    assert same(tensors(local, 10), tensors(there, 10))
    source = open_tokens(there)
    assert source.size * 2 > 107_374 * 3 / 2, "the source is larger than the cache"
    assert 30_000 < most[0] <= 107_374 + 2 * 24 * 132, "files change while they are counted: one a thread"


def test_a_killed_run_goes_on_in_another_layout(folder: Path) -> None:
    exact = ("train.dtype=float64", "checkpoint.every=4")
    reference = at_url(folder, "whole", "layout.dp=2", *exact)
    train(reference)
    with pytest.raises(RankFailed, match="SIGKILL"):
        train(at_url(folder, "parts", "layout.dp=2", *exact), at_step(7, 1, send_self, signal.SIGKILL))
    notes = folder / "notes"
    again = at_url(folder, "parts", "layout.pp=2", *exact, "checkpoint.resume=auto")
    assert train(again, keep_notes(str(notes)))["step"] == 10
    assert "at step 4" in notes.read_text()
    assert "warning" not in notes.read_text()
    for name, weight in tensors(reference, 10).items():
        torch.testing.assert_close(tensors(again, 10)[name], weight, rtol=1e-9, atol=1e-12)


def test_another_order_is_told_on_resuming(folder: Path) -> None:
    train(at_url(folder, "order", "train.steps=2"))
    for overrides in (("data.shuffle=global",), ("data.shuffle_window=2048",)):
        notes = folder / overrides[0]
        steps = f"train.steps={3 + len(list((folder / 'runs' / 'order' / 'checkpoints').iterdir()))}"
        resumed = at_url(folder, "order", *overrides, steps, "checkpoint.resume=auto")
        train(resumed, keep_notes(str(notes)))
        told = "warning: data.shuffle or data.shuffle_window, the order of the samples, differ from the"
        assert told in notes.read_text()
    notes = folder / "local-order"
    local = on_disk(folder, "order", "data.shuffle_window=2048", "train.steps=9", "checkpoint.resume=auto")
    train(local, keep_notes(str(notes)))
    assert "warning" not in notes.read_text(), "the same tokens in the same order, wherever they lie"


@pytest.mark.parametrize("packing", [pytest.param("stream", marks=pytest.mark.slow), "documents"])
def test_mixtures_and_packed_documents(folder: Path, packing: str) -> None:
    mixed = f"data.source={{file://{folder}/tokens: 0.7, %s: 0.3}}"
    there = at_url(folder, f"mix-{packing}", mixed % f"file://{folder}/more", f"data.packing={packing}")
    half = at_url(
        folder,
        f"half-{packing}",
        (mixed % f"{folder}/more").replace("file://", ""),
        "data.shuffle=window",
        f"data.packing={packing}",
    )
    train(there)
    train(half)
    assert list(losses(there).values()) == list(losses(half).values())


def test_what_goes_wrong_in_the_middle_ends_the_run_with_one_error(folder: Path) -> None:
    url = folder / "changed"
    if not url.exists():
        import shutil

        shutil.copytree(folder / "tokens", url)
    config = at_url(folder, "changed", f"data.source=file://{url}", "layout.dp=2", "data.cache_gib=1")
    started = time.monotonic()
    with pytest.raises(StrettoError, match=r"changed/tokens.bin: has changed since it was opened"):
        train(config, at_step(2, 0, _rewrite, url / "tokens.bin", folder / "cache"))
    assert time.monotonic() - started < 60


def _rewrite(_: object, path: Path, cache: Path) -> None:
    import shutil

    path.write_bytes(bytes(reversed(path.read_bytes())))
    shutil.rmtree(cache / "blocks", ignore_errors=True)


def test_a_config_with_a_url_is_checked_without_reaching_it(folder: Path) -> None:
    check(at_url(folder, "there", "data.source=memory://nobody/knows"))
    check(at_url(folder, "there", "data.source=[memory://a/b, memory://a/c]"))
    with pytest.raises(
        StrettoError, match=r"data.source is s3://bucket/tokens: reading s3:// takes"
    ) as error:
        check(at_url(folder, "there", "data.source=s3://bucket/tokens"))
    assert "pip install 'stretto[s3]'" in str(error.value.hint)
    with pytest.raises(
        StrettoError, match=r"lists memory://a/b, which is tokens already, and memory://a/c\.txt"
    ):
        check(at_url(folder, "there", "data.source=[memory://a/b, memory://a/c.txt]"))
