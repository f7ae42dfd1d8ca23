"""Batches on their way to the device: page-locked where it is a GPU, and copied ahead without a wait.
`tests/accelerator` copies them on streams.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.run.data.dataset import Batch
from stretto.run.train import batches
from stretto.run.train.batches import Batches, DevicePrefetcher, read_ahead

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
        slots=lambda _: slice(0, 2),
    )


class Stream:
    """The only stream there is."""

    def wait_event(self, event: object) -> None:
        assert isinstance(event, Tensor), "the mark of the copies"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is done for a device that has streams and is none, and by which thread."""
    done = list[tuple[str, str]]()

    def noted(step: str, tensor: Tensor) -> Tensor:
        done.append((step, threading.current_thread().name))
        return tensor

    monkeypatch.setattr(batches, "has_streams", lambda device: device.type == "cuda")
    monkeypatch.setattr(batches, "new_stream", lambda _: Stream())
    monkeypatch.setattr(batches, "current_stream", lambda _: Stream())
    monkeypatch.setattr(batches, "on_stream", lambda _: nullcontext())
    monkeypatch.setattr(batches, "recorded_event", lambda _: torch.empty(0))
    monkeypatch.setattr(batches, "moved", lambda tensor, _: noted("copied", tensor))
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: noted("pinned", tensor))
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, _: None)
    return done


def test_what_is_read_ahead_for_a_gpu_is_pinned_and_copied_by_the_thread(
    steps: list[tuple[str, str]],
) -> None:
    ahead = read_ahead(Numbered(), replica_on("cuda"))
    assert isinstance(ahead, DevicePrefetcher)
    for first in (0, 4, 8):
        batch = ahead.batch(range(first, first + 4))
        assert batch.inputs[:, 0].tolist() == [*range(first, first + 4)]
        assert batch.targets[:, 0].tolist() == [*range(first + 1, first + 5)]
        assert batch.begins is not None
    ahead.close()
    ahead._ahead._thread.shutdown(wait=True)  # what it notes later would be another test's
    threads = {thread.startswith("read-ahead") for step, thread in steps[6:]}
    assert {step for step, _ in steps} == {"pinned", "copied"}
    assert threads == {True}, "all but the first"


def test_nothing_is_pinned_for_a_cpu(steps: list[tuple[str, str]]) -> None:
    ahead = read_ahead(Numbered(), replica_on("cpu"))
    for first in (0, 4):
        ahead.batch(range(first, first + 4))
    ahead.close()
    assert not steps


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
