"""A module of one's own under every data-parallel mode equals one process that sees all samples."""

from __future__ import annotations

import copy
from inspect import signature
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
    results = model.full_state_dict()
    optimizer.close()
    mesh.close()
    return results


def every_mode(folder: Path, last: bool = False) -> None:
    ranks, wanted_norms = dist.get_world_size(), list[float]()
    wanted = plain(ranks, wanted_norms)
    away = {"offload": "nvme", "path": str(folder)}
    cases: list[tuple[str, dict[str, Any]]] = [
        *((mode, {}) for mode in ("server", "ddp", "zero1", "zero2", "zero3")),
        ("zero3", {**away, "offload_parameters": "nvme"}),
        ("zero2", {"offload": "cpu"}),
        *([("zero3", {"shard": 2})] if ranks == 4 else []),
    ]
    for mode, settings in cases[-1:] if last else cases:
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


class Tracked(nn.Module):
    """BatchNorm, an average that is saved for the backward, a constant, a flag, and a buffer that every
    forward replaces.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.leave = nn.Linear(4, 1)
        self.average = nn.Buffer(torch.ones(4))
        self.table = nn.Buffer(torch.arange(4.0), persistent=False)
        self.flag = nn.Buffer(torch.tensor(False))
        self.latest = nn.Buffer(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average = 0.9 * self.average + 0.1 * x.mean(0)
                self.flag.fill_(bool(x[0, 0] > 0))
                self.latest = x.sum().double()
        return self.leave(self.norm(self.enter(x)) * self.average + self.table)


def rows(seed: int, rank: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * seed + rank)).double()


def tracked(seed: int) -> Tracked:
    torch.manual_seed(seed)
    return Tracked().double()


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def buffers_as_in_ddp(mode: Mode) -> None:
    """Beside DistributedDataParallel, on the same samples: the same buffers before and after each forward, in
    training, over accumulated forwards, two forwards for one backward, and evaluation.
    """
    mesh = Mesh(Layout(dp=2))
    # torch 2.11 has no such argument
    synchronised = "forward_sync_buffers" in signature(nn.parallel.DistributedDataParallel).parameters
    options = {"forward_sync_buffers": True} if synchronised else {}
    ddp = nn.parallel.DistributedDataParallel(tracked(mesh.rank), **options)
    parallel = data_parallel(tracked(mesh.rank), mesh, mode)
    sgd, optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1), parallel.optimizer(torch.optim.SGD, lr=0.1)
    begun = list[dict[str, Tensor]]()
    for model in (ddp.module, parallel.module):
        model.register_forward_pre_hook(lambda m, _: begun.append(copied(m)))

    def same(at: str) -> None:
        ended = [copied(model.module) for model in (ddp, parallel)]
        for when, pair in {"at the start of": begun[-2:], "after": ended}.items():
            for name, buffer in pair[0].items():
                label = f"{mode}: {name} {when} the forward, {at}"
                torch.testing.assert_close(pair[1][name], buffer, msg=lambda m, label=label: f"{label}: {m}")

    def evaluate(at: str) -> None:
        for model in (ddp, parallel):
            model.eval()
        with torch.no_grad():
            outs = [model(rows(7, mesh.rank)) for model in (ddp, parallel)]
        torch.testing.assert_close(*outs)
        same(at)
        first, other = gather_json({name: buffer.tolist() for name, buffer in begun[-1].items()})
        assert first == other, f"{mode}: the ranks evaluate with different buffers, {at}"
        for model in (ddp, parallel):
            model.train()

    for step in range(2):
        with ddp.no_sync(), parallel.accumulate():
            for half in (0, 1):
                for model in (ddp, parallel):
                    (model(rows(3 * step + half, mesh.rank)).sum() / 3).backward()
                same(f"accumulated forward {half} of step {step}")
        for model in (ddp, parallel):
            (model(rows(3 * step + 2, mesh.rank)).sum() / 3).backward()
        same(f"step {step}")
        evaluate("between backward and update")
        sgd.step()
        optimizer.step()
        sgd.zero_grad()
        optimizer.zero_grad()
        evaluate("after the update")
    optimizer.close()
    mesh.close()


def saved_buffers() -> None:
    """Two forwards and one backward. For norms that is harmless; where the second forward would overwrite a
    buffer that the first has saved, autograd refuses the backward.
    """
    mesh = Mesh(Layout(dp=2))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model = data_parallel(copy.deepcopy(plain), mesh)

    def backward(net: nn.Module, rank: int) -> None:
        first, two = (net(rows(seed, rank)) for seed in (0, 1))
        (first.square().sum() + two.pow(3).sum()).backward()

    backward(model, mesh.rank)
    for rank in (0, 1):
        backward(plain, rank)
    for parameter, expected in zip(model.module.parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(parameter.grad, expected.grad / 2)
    net = data_parallel(tracked(0), mesh)
    first = net(rows(0, mesh.rank))
    net(rows(1, mesh.rank))
    if mesh.rank:  # the first rank's buffers are the ones that are sent
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.sum().backward()
    mesh.close()


def unlike() -> None:
    """Ranks with other buffers are told so, all of them, before anything is sent."""
    mesh = Mesh(Layout(dp=2))
    module = nn.Linear(2, 2)
    module.register_buffer("seen", torch.zeros(3 + mesh.rank))
    with pytest.raises(StrettoError, match=r"seen is \(3,\) .*rank 0 and \(4,\) .* on rank 1"):
        data_parallel(module, mesh)
    module = nn.Linear(2, 2, bias=mesh.rank == 0)
    with pytest.raises(StrettoError, match=r"bias is \(2,\) .*rank 0 and not there on rank 1"):
        data_parallel(module, mesh)
    mesh.close()


def two_ranks(folder: Path) -> None:
    every_mode(folder)
    narrow()
    wrong()
    unlike()
    saved_buffers()
    for mode in ("ddp", "zero1", "zero3"):
        buffers_as_in_ddp(mode)


def test_on_two_ranks(tmp_path: Path):
    on_ranks(2, two_ranks, tmp_path)


@pytest.mark.parametrize("last", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_on_four_ranks(tmp_path: Path, last: bool):
    on_ranks(4, every_mode, tmp_path, last)
