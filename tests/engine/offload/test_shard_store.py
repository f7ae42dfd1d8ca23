"""Shards of parameters away from the device: the same calls wherever they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stretto.engine.offload.shard_store import ShardStore

CPU = torch.device("cpu")
SHARDS = 8


def store_of(path: Path | None) -> tuple[ShardStore, list[Tensor]]:
    torch.manual_seed(0)
    store = ShardStore(CPU, path, rank=1, slots=3)
    want = [torch.randn(2000 + key) for key in range(SHARDS - 1)] + [torch.empty(0)]
    want[3] = want[3].bfloat16()
    for key, tensor in enumerate(want):
        store.add(key, tensor.clone())
    return store, want


@pytest.mark.parametrize("files", [False, True])
def test_shards_are_fetched_in_order_and_keep_their_changes(files: bool, tmp_path: Path):
    store, want = store_of(tmp_path if files else None)
    assert bool(os.listdir(tmp_path)) == files
    for turn in range(3):
        for key in range(SHARDS):  # a forward, with one shard ahead
            here = store.fetch(key)
            store.start_fetch((key + 1) % SHARDS)
            assert torch.equal(here, want[key])
            assert here.dtype == want[key].dtype
            store.release(key)
        for key in reversed(range(SHARDS)):  # a backward
            store.start_fetch(key)
            store.start_fetch(max(key - 1, 0))
            assert torch.equal(store.fetch(key), want[key])
            store.release(key)
        for key in range(SHARDS):  # an update: in place, or anew
            here = store.fetch(key) if turn else store.blank(key)
            want[key] = want[key] + 1 if turn else torch.full_like(want[key], key)
            here.copy_(want[key])
            store.put(key)
    assert (store.ring is not None and store.ring.moved_s > 0) == files
    store.close()
    assert not os.listdir(tmp_path)


def test_with_files_few_units_are_in_memory(tmp_path: Path):
    store, _ = store_of(tmp_path)
    assert store.ring is not None
    store.ring.drain()
    places = set[int]()
    for key in range(SHARDS - 1):
        places.add(store.fetch(key).data_ptr())
        store.release(key)
    assert len(places) == 3
    store.close()
