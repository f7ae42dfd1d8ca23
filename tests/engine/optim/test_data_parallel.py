"""A module of one's own under every data-parallel mode equals one process that sees all samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import on_ranks
from stretto import Layout, data_parallel
from stretto.engine.parallel.control import gather_json
from stretto.engine.parallel.mesh import Mesh
from stretto.errors import StrettoError
from stretto.layout.shards import Mode

WIDTH, STEPS, HALVES = 12, 3, 2


class Net(nn.Module):
    """Blocks between parameters that belong to none of them; one matrix is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.leave = nn.Linear(WIDTH, 7, bias=False)
        self.leave.weight = self.enter.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.enter(ids)
        for block in self.blocks:
            x = x + block(x)
        return {"scores": self.leave(self.frozen(x))}


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batch(step: int, rank: int, half: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(100 * step + 10 * rank + half))
    return ids, ids.roll(1, 1)


def loss(out: dict[str, Tensor], targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out["scores"].float().double().flatten(0, 1), targets.flatten())


def plain(ranks: int, norms: list[float]) -> dict[str, Tensor]:
    model = build()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, weight_decay=0.0)
    for step in range(STEPS):
        for rank in range(ranks):
            for half in range(HALVES):
                ids, targets = batch(step, rank, half)
                (loss(model(ids), targets) / ranks).backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def trained(mode: str, settings: dict[str, Any], norms: list[float]) -> dict[str, Tensor]:
    rank = dist.get_rank()
    mesh = Mesh(Layout(dp=dist.get_world_size()))
    model = data_parallel(build(seed=rank), mesh, mode, bucket_mib=0.001, **settings)  # type: ignore[arg-type]
    optimizer = model.optimizer("adamw", lr=0.05, betas=(0.9, 0.999), weight_decay=0.0)
    for step in range(STEPS):
        with torch.no_grad():
            model(batch(step, rank, 0)[0])  # a look in between does no harm
        with model.accumulate():
            loss(model(batch(step, rank, 0)[0]), batch(step, rank, 0)[1]).backward()
        loss(model(batch(step, rank, 1)[0]), batch(step, rank, 1)[1]).backward()
        norms.append(float(optimizer.clip(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    results = model.whole()
    optimizer.close()
    mesh.close()
    return results


def every_mode(folder: Path) -> None:
    ranks, wanted_norms = dist.get_world_size(), list[float]()
    wanted = plain(ranks, wanted_norms)
    away = {"offload": "nvme", "path": str(folder)}
    cases: list[tuple[str, dict[str, Any]]] = [
        *((mode, {}) for mode in ("server", "ddp", "zero1", "zero2", "zero3")),
        ("zero3", {**away, "offload_parameters": "nvme"}),
        ("zero2", {"offload": "cpu"}),
        *([("zero3", {"shard": 2})] if ranks == 4 else []),
    ]
    for mode, settings in cases:
        norms = list[float]()
        results = trained(mode, settings, norms)
        assert results.keys() == wanted.keys()
        torch.testing.assert_close(norms, wanted_norms, rtol=1e-10, atol=0, msg=f"{mode} {settings}: norms")
        for name, weight in wanted.items():
            torch.testing.assert_close(
                results[name], weight, rtol=1e-9, atol=1e-10, msg=f"{mode} {settings}: {name}"
            )


def narrow() -> None:
    """16-bit weights follow float32 masters, which take steps that 16 bits are too short for."""
    mesh = Mesh(Layout(dp=2))
    model = data_parallel(build().float(), mesh, "zero2", dtype=torch.bfloat16, keep=("blocks.*.0.*",))
    kinds = {name: p.dtype for name, p in model.module.named_parameters()}
    assert kinds["blocks.0.0.weight"] == torch.float32
    assert kinds["blocks.0.1.weight"] == torch.bfloat16
    optimizer = model.optimizer(torch.optim.SGD, lr=1e-4)
    before = [fragment.parameter.detach().clone() for fragment in model.fragments]
    x = model.module.blocks[0][1](torch.ones(1, WIDTH, dtype=torch.bfloat16))
    x.sum().backward()
    model.buffer.flush()
    model.buffer.wait()
    optimizer.step()
    moved = [bool((f.parameter != b).any()) for f, b in zip(model.fragments, before, strict=True)]
    assert any(moved)
    assert all(fragment.parameter.dtype == torch.float32 for fragment in model.fragments)
    mesh.close()


def wrong() -> None:
    mesh = Mesh(Layout(dp=2))
    for settings, reported in (
        ({"mode": "zero4"}, "did you mean"),
        ({"mode": "zero1", "shard": 3}, "shard=None"),
        ({"mode": "zero1", "dtype": torch.float64}, "bfloat16"),
        ({"mode": "zero1", "offload": "nvme"}, "path="),
        ({"mode": "zero1", "offload_parameters": "cpu"}, "zero3"),
    ):
        with pytest.raises(StrettoError) as caught:
            data_parallel(build(), mesh, **settings)  # type: ignore[arg-type]
        assert reported in str(caught.value.hint)
    model = data_parallel(build(), mesh, "ddp")
    with pytest.raises(StrettoError) as caught:
        model.optimizer("adamw", learning_rate=1.0)
    ids, targets = batch(0, 0, 0)
    loss(model(ids), targets).backward()
    with pytest.raises((StrettoError, RuntimeError), match="were reduced"):
        loss(model(ids), targets).backward()
    mesh.close()


def running_statistics(mode: Mode) -> None:
    """BatchNorm sees other samples on each rank, but starts every step from the first rank's statistics."""
    torch.manual_seed(0)
    mesh = Mesh(Layout(dp=2))
    norm = nn.BatchNorm1d(4)
    model = data_parallel(nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 1)), mesh, mode)
    optimizer = model.optimizer("sgd", lr=0.1)
    at_start = list[list[float]]()
    norm.register_forward_pre_hook(lambda *_: at_start.append(means(norm)))
    for step in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
        model(x).sum().backward()
        first, second = gather_json(at_start[step])
        assert first == second, f"{mode}: running means at the start of step {step}"
        first, second = gather_json(means(norm))
        assert first != second, "the ranks have seen other samples"
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    mesh.close()


def means(norm: nn.BatchNorm1d) -> list[float]:
    assert norm.running_mean is not None
    return norm.running_mean.tolist()


def two_ranks(folder: Path) -> None:
    every_mode(folder)
    narrow()
    wrong()
    for mode in ("ddp", "zero3"):
        running_statistics(mode)


def test_on_two_ranks(tmp_path: Path):
    on_ranks(2, two_ranks, tmp_path)


def test_on_four_ranks(tmp_path: Path):
    on_ranks(4, every_mode, tmp_path)
