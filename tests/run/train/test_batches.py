"""Batches on their way to the device: page-locked where it is a GPU, and copied without a wait."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.run.data.dataset import Batch
from stretto.run.train import batches
from stretto.run.train.batches import Batches, read_ahead

SEQUENCE = 3


class Numbered:
    """Samples that are full of their own indices."""

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = torch.tensor([*indices])[:, None].expand(-1, SEQUENCE).clone()
        return Batch(inputs=rows, targets=rows + 1, begins=torch.zeros_like(rows))


def replica_on(device: str) -> Any:
    """As much of a replica as its batches need: alone, two microbatches of two samples."""
    mesh = SimpleNamespace(
        device=torch.device(device), index=lambda _: 0, size=lambda _: 1, group=lambda _: None
    )
    job = SimpleNamespace(global_batch=4, micro_batch=2, sequence=SEQUENCE, dp=SimpleNamespace(mode="ddp"))
    return SimpleNamespace(
        mesh=mesh,
        job=job,
        pipeline=SimpleNamespace(program=SimpleNamespace(microbatches=2)),
        share=lambda inputs, targets: (inputs, targets),
        samples=[],
        documents=[],
        decoders=[],
        place=lambda _: slice(0, 2),
    )


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Where pinned tensors lie, and the thread that made each; without a GPU no memory can be pinned."""
    made, kept = dict[int, str](), list[Tensor]()

    def pin_memory(tensor: Tensor) -> Tensor:
        kept.append(tensor.clone())  # kept, so that no other tensor gets its address
        made[kept[-1].data_ptr()] = threading.current_thread().name
        return kept[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    return made


def tensors(batch: Batch) -> list[Tensor]:
    assert batch.begins is not None
    return [batch.inputs, batch.targets, batch.begins]


def test_what_is_read_ahead_for_a_gpu_is_pinned_by_the_thread(pinned: dict[int, str]) -> None:
    ahead = read_ahead(Numbered(), replica_on("cuda"))
    for first in (0, 4, 8):
        batch = ahead.batch(range(first, first + 4))
        assert [t[:, 0].tolist() for t in tensors(batch)[:2]] == [
            [*range(first, first + 4)],
            [*range(first + 1, first + 5)],
        ]
        makers = {pinned[t.data_ptr()] for t in tensors(batch)}
        assert all(maker.startswith("read-ahead") == (first > 0) for maker in makers)
    ahead.close()


def test_nothing_is_pinned_for_a_cpu(pinned: dict[int, str]) -> None:
    ahead = read_ahead(Numbered(), replica_on("cpu"))
    for first in (0, 4):
        ahead.batch(range(first, first + 4))
    ahead.close()
    assert not pinned


def test_no_copy_of_a_batch_to_the_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy is by the function that does not; `tests/accelerator` looks at what it asks of a device."""
    calls = list[str]()

    def recorded(tensor: Tensor, device: torch.device) -> Tensor:
        calls.append(str(device))
        return tensor

    monkeypatch.setattr(batches, "moved", recorded)
    monkeypatch.setattr(Tensor, "to", None)
    (inputs, targets), counts = Batches(replica_on("cpu")).take(Numbered(), 4, keyed=True)
    assert [x[:, 0].tolist() for x in (*inputs, *targets)] == [[4, 5], [6, 7], [5, 6], [7, 8]]
    assert counts.tolist() == [2 * SEQUENCE] * 2
    assert calls == ["cpu"] * 4
