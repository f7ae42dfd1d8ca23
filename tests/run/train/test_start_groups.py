"""Groups of a rank that fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from stretto.run.train.start import aborted_on_error

DEVICE = torch.device("cuda", 0)


def test_groups_of_a_failed_rank_are_aborted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else destroying them would wait for messages that never come."""
    calls = list[str]()

    def refuse() -> None:
        raise RuntimeError("this library does not support abort")

    library = SimpleNamespace(
        _group_start=lambda: calls.append("start"), _group_end=lambda: calls.append("end")
    )
    world = SimpleNamespace(_get_backend=lambda _: library, abort=lambda: calls.append("abort"))
    every = (world, SimpleNamespace(abort=refuse), SimpleNamespace(abort=world.abort))
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: world)
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_names=every))
    with aborted_on_error(DEVICE):
        pass
    assert calls == []
    with pytest.raises(ValueError, match="a broken layer"), aborted_on_error(DEVICE):
        raise ValueError("a broken layer")
    assert calls == ["start", "abort", "abort", "end"]
