"""Work of the engine on several streams of the simulated NPU, whole and with each of its waits left out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto import Layout, schedule
from stretto.engine.device import CopyStreams
from stretto.engine.offload.shard_store import ShardStore
from stretto.engine.optim.sharded_optimizer import GradientCopies
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.pipeline import Pipeline
from stretto.engine.pipeline.activation_offload import ActivationCopies
from stretto.errors import StrettoError
from stretto.job.data_parallel import DataParallelSettings, Precision
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.program.transforms.activations import offload
from stretto.recommender.stores.backing import HostRows
from stretto.recommender.stores.cached import CachedStore
from stretto.run.calibrate.host import random_step_done
from stretto.run.data.dataset import Batch
from stretto.run.launch.local import run_ranks
from stretto.run.train.assemble import assemble
from stretto.run.train.batches import DevicePrefetcher

plugin: Any = sys.modules["stretto_fake_npu"]  # torch has loaded it
NPU = torch.device("npu", 0)
SHAPE = ModelShape(family="llama", layers=6, hidden=16, heads=2, kv_heads=1, ffn=16, vocab=32, sequence=8)
Values = dict[str, Tensor]


@dataclass(kw_only=True)
class Tried:
    """What came of some work.

    waits: that it made, by name.
    races: what it did without waiting, in words.
    """

    values: Values = field(default_factory=Values)
    waits: set[str] = field(default_factory=set[str])
    races: set[str] = field(default_factory=set[str])
    deferred: int = 0


def tried(work: Callable[[], Values], dropped: frozenset[str], races: Path) -> Tried:
    """The work without some of its waits."""
    os.environ["STRETTO_FAKE_NPU_RACES"] = str(races)
    races.unlink(missing_ok=True)
    plugin.dropped.update(dropped)
    plugin.waits.clear()
    before = plugin.kernels.copies_deferred()
    try:
        values = work()
    finally:
        plugin.dropped.clear()
        plugin.kernels.device_synchronize()
    lines = set(races.read_text().splitlines()) if races.exists() else set[str]()
    deferred = plugin.kernels.copies_deferred() - before
    return Tried(values=values, waits=set(plugin.waits), races=lines, deferred=deferred)


def left_out(attempt: Callable[[frozenset[str]], Tried]) -> dict[str, Any]:
    """What is found of the work, and of it without each of its waits."""
    complete = attempt(frozenset())
    found = dict[str, Any]()
    for wait in sorted(complete.waits):
        try:
            without = attempt(frozenset({wait}))
        except (RuntimeError, StrettoError, IndexError, AssertionError) as error:
            found[wait] = [str(error)]
            continue
        wrong = [name for name, x in complete.values.items() if not torch.equal(x, without.values[name])]
        found[wait] = [*sorted(without.races), *wrong]
    values = {name: x.flatten()[:4].tolist() for name, x in complete.values.items()}
    return {"races": sorted(complete.races), "deferred": complete.deferred, "values": values, "found": found}


# ------------------------------------------------------------------ one process


def copies(folder: Path) -> dict[str, Any]:
    """What moves tensors between the device and the host."""

    def work() -> Values:
        return {**_shards(folder), **_gradients(), **_activations(), **_rows(), **_samples()}

    return left_out(lambda dropped: tried(work, dropped, folder / "races"))


def _shards(folder: Path) -> Values:
    """Tensors in host memory and in files; each is doubled on the device, and used."""
    found = Values()
    for name, path in (("host", None), ("file", folder)):
        store = ShardStore(NPU, path, slots=2)
        for key in range(3):
            store.add(key, torch.arange(4.0) + key)
        for _ in range(2):
            for key in range(3):
                buffer = store.fetch(key)
                store.start_fetch((key + 1) % 3)
                buffer.mul_(2)
                store.put(key)
        for key in range(3):
            found[f"{name} {key}"] = store.fetch(key).exp().cpu()
            store.release(key)
        store.close()
    return found


def _gradients() -> Values:
    """Gradients copied to the host, each freed by the device once it is under way."""
    copies, found = GradientCopies(), Values()
    for key in range(3):
        copies.start(key, torch.full((4,), float(key), device=NPU).exp(), torch.float32)
    for key in range(3):
        copied = copies.wait_for(key)
        assert copied is not None
        found[f"gradient {key}"] = copied.clone()
    return found


def _activations() -> Values:
    """What a forward saves, offloaded, with other work before it is back."""
    x = torch.linspace(-1, 1, 8, device=NPU, requires_grad=True)
    activations = ActivationCopies(CopyStreams())
    with activations.watching(()):
        y = (x.sin() * x.cos()).sum()
    activations.offload()
    activations.reload()
    (gradient,) = torch.autograd.grad(y, x)
    return {"activations": gradient.cpu()}


def _rows() -> Values:
    """Rows of tables, of which the device caches a part."""
    store, found = CachedStore(HostRows(8, 2, torch.float32, {}, pin=True), NPU, 0.5), Values()
    for step in range(4):
        fetched = store.fetch(torch.arange(2) + 2 * step)
        store.weight.index_add_(0, fetched.slots(), torch.full((2, 2), 1.0 + step, device=NPU))
        store.release(fetched)
    for step in range(4):
        fetched = store.fetch(torch.arange(2) + 2 * step)
        found[f"rows {step}"] = store.weight.index_select(0, fetched.slots()).cpu()
        store.release(fetched)
    store.close()
    return found


class _Numbered:
    """Samples of one token, the number of the sample."""

    def batch(self, indices: Sequence[int]) -> Batch:
        ids = torch.tensor(indices).unsqueeze(1)
        return Batch(inputs=ids.double(), targets=ids.double() + 1)


def _samples() -> Values:
    """Samples of three steps, copied while the device works on the step before."""
    ahead, found = DevicePrefetcher(_Numbered(), NPU, 2), Values()
    for step in range(3):
        batch = ahead.batch(range(2 * step, 2 * step + 2))
        found[f"samples {step}"] = batch.inputs * batch.targets
    ahead.close()
    return {name: values.cpu() for name, values in found.items()}


# ------------------------------------------------------------------ ranks


def ranks(folder: Path) -> dict[str, Any]:
    """Training of two ranks under ways of sharing states, and a pipeline that offloads activations."""
    reports = dict[str, Any]()
    for name in ("pipeline", *JOBS):
        both = run_ranks(2, _on_rank, name, folder)
        reports[name] = {"races": sorted(both[0].races | both[1].races), "deferred": both[0].deferred}
    return reports


def _on_rank(name: str, folder: Path) -> Tried:
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("hccl", timeout=timedelta(seconds=20))
    work = _pipeline if name == "pipeline" else lambda: _trained(name, folder)
    return tried(work, frozenset(), folder / f"races-{dist.get_rank()}")


_LEAN = DataParallelSettings(mode="zero3", offload="cpu", offload_parameters="cpu")
JOBS = {
    "ddp": DataParallelSettings(),
    "zero2": DataParallelSettings(mode="zero2", offload="cpu"),
    "zero3": DataParallelSettings(mode="zero3"),
    "host": _LEAN,
    "files": replace(_LEAN, offload="nvme", offload_parameters="nvme"),
}


def _trained(name: str, folder: Path) -> Values:
    """Weights after two steps of data parallelism."""
    dp = replace(JOBS[name], path=str(folder) if name == "files" else None)
    half = Precision(dtype="bfloat16") if name == "zero2" else Precision()
    job = Job(shape=SHAPE, layout=Layout(dp=2), global_batch=4, dp=dp, precision=half)
    replica = assemble(job, Mesh(job.layout, NPU, timedelta(seconds=20)), seed=0)
    for step in range(2):
        random_step_done(replica, step)
    with replica.states.full_weights() as weights:
        found = {name: value.cpu() for name, value in weights.items()}
    replica.close()
    return found


def _pipeline() -> Values:
    """Gradients of a pipeline of two stages, whose activations are on the host between their uses."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(NPU) for _ in range(2)]
    mesh = Mesh(Layout(pp=2), NPU, timedelta(seconds=20))
    program = offload(schedule("1f1b", 2, 4))
    pipe = Pipeline(layers, program, mesh, _squared)
    inputs = list(torch.linspace(-1, 1, 64).view(4, 2, 8).to(NPU).unbind())
    pipe.step(inputs, inputs, 1.0)
    mine = layers[mesh.index("pp")]
    found = {name: x.grad.cpu() for name, x in mine.named_parameters() if x.grad is not None}
    pipe.close()
    return found


def _squared(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()
