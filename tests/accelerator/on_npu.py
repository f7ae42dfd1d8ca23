"""For a process in which torch has the simulated NPU: prints as JSON what the cases named report.

python on_npu.py FOLDER CASE...
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from graphed import graphs, graphs_all
from side_by_side import copies, ranks
from torch import Tensor, nn
from waits import Waits

from recommender_job import config_of
from stretto.engine import device as devices
from stretto.engine.models.language import TransformerBlock
from stretto.engine.offload.shard_store import ShardStore
from stretto.engine.optim.sharded_optimizer import GradientCopies
from stretto.engine.parallel.recompute import RandomState, recompute
from stretto.engine.pipeline.activation_offload import ActivationCopies
from stretto.engine.pipeline.recorder import Recorder
from stretto.errors import StrettoError
from stretto.recommender.train.job import RECOMMENDER
from stretto.run.calibrate import collectives, kernels, profile
from stretto.run.config import TrainConfig
from stretto.run.launch.local import run_ranks
from stretto.run.launch.stop import StopRequest
from stretto.run.train.language_job import LANGUAGE, train_language_rank
from stretto.run.train.launch import run_job
from tiny_job import GPT, LLAMA, MOE, job
from train_runs import around_step

plugin: Any = sys.modules["stretto_fake_npu"]  # torch has loaded it
NPU = torch.device("npu", 0)


def error_of(call: Callable[[], Any]) -> str:
    """What the call raises."""
    try:
        call()
    except (StrettoError, RuntimeError) as error:
        return str(error)
    return ""


def called(call: Callable[[], Any]) -> list[str]:
    """What the call asks of the device's streams, events and devices."""
    plugin.calls.clear()
    call()
    return list(plugin.calls)


# ------------------------------------------------------------------ what is known of devices


def about(folder: Path) -> dict[str, Any]:
    """Names, libraries, memory and random state."""
    os.environ["LOCAL_RANK"] = "2"
    before = devices.peak_memory(NPU)
    buffer = torch.zeros(2**20, device=NPU)
    states = devices.random_states(NPU)
    plugin.Devices.generators[0].manual_seed(7)
    drawn = devices.random_state(NPU)
    devices.set_random_states(NPU, states)
    with devices.forked_random([NPU, torch.device("cpu")]):
        plugin.Devices.generators[0].manual_seed(8)
    return {
        "auto": devices.device_kind("auto"),
        "count": devices.device_count("npu"),
        "backends": [devices.backend_for("npu"), devices.backend_for("cpu")],
        "gloo": error_of(lambda: devices.backend_for("npu", "gloo")),
        "absent": error_of(lambda: devices.device_kind("xpu")),
        "device": [str(devices.rank_device("auto")), plugin.Devices.current_device()],
        "grown_gib": devices.peak_memory(NPU) - before,
        "name": devices.model_name(NPU),
        "memory": devices.total_memory(NPU),
        "kernels": devices.has_cuda_kernels(NPU) or devices.compute_capability(NPU) > (0, 0),
        "states": sorted(states),
        "drew": not torch.equal(drawn, states["npu"]),
        "restored": torch.equal(devices.random_state(NPU), states["npu"]),
        "mixed": error_of(lambda: buffer[:3] + torch.ones(3)),
    }


class Drawing(nn.Module):
    """Draws from the device's generator, as a layer of a user may."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=plugin.Devices.generators[0])
        return x * noise.to(x.device)


def parts(folder: Path) -> dict[str, Any]:
    """What copies, times and draws on a device."""
    reported = dict[str, Any]()

    weights = torch.arange(6.0)
    store = ShardStore(NPU, folder, slots=2)
    store.add(0, weights)

    def use() -> None:
        buffer = store.fetch(0)
        reported["store"] = [str(buffer.device), buffer.tolist()]
        buffer.mul_(2)
        store.put(0)
        reported["written"] = store.fetch(0).tolist()
        store.release(0)

    reported["store_calls"] = called(use)
    store.close()

    copies, gradient = GradientCopies(), torch.arange(4.0, device=NPU)
    reported["gradient_calls"] = called(lambda: copies.start(1, gradient, torch.float64))
    copied = copies.wait_for(1)
    assert copied is not None
    reported["gradient"] = [str(copied.device), str(copied.dtype), copied.tolist()]

    x = torch.linspace(-1, 1, 8, device=NPU, requires_grad=True)
    activations = ActivationCopies(devices.CopyStreams())
    with activations.watching(()):
        y = (x.sin() * x.cos()).sum()
    expected = torch.autograd.grad((x.sin() * x.cos()).sum(), x)[0]
    reported["offload_calls"] = called(activations.offload)
    reported["on_host"] = sorted(
        {str(saved.host.device) for saved in activations._saved if saved.host is not None}
    )
    activations.reload()
    reported["offloaded"] = torch.equal(torch.autograd.grad(y, x)[0], expected)

    recorder = Recorder(NPU)
    recorder.record("0F0", lambda: None, lambda: None)
    reported["span_calls"] = called(lambda: reported.update(spans=[span.label for span in recorder.spans]))

    layer = Drawing()
    random = RandomState()
    random.save((x,))
    first = layer(x)
    reported["drawn"] = random.drawn
    with random.restored():
        reported["drawn_again"] = torch.equal(layer(x), first)
    recompute(layer)
    layer(x).sum().backward()
    return reported


def threads(folder: Path) -> dict[str, Any]:
    """One thread copies to the host and resizes storages, another waits for the device all the time."""
    source, resized = torch.arange(64.0, device=NPU), torch.zeros(8, device=NPU)
    finished = threading.Event()

    def wait() -> None:
        while not finished.is_set():
            plugin.kernels.device_synchronize()

    waiting = threading.Thread(target=wait)
    waiting.start()
    for _ in range(3000):
        copied = torch.empty(64, pin_memory=True)
        copied.copy_(source, non_blocking=True)
        del copied  # the copy that is put off is its last owner
        for size in (0, 32):
            resized.untyped_storage().resize_(size)
    finished.set()
    waiting.join()
    return {"resized": resized.untyped_storage().nbytes()}


def small_rank(kind: str) -> profile.Measured:
    """A rank of `stretto calibrate`, with sizes for CPUs."""
    kernels._CASES, kernels._SHAPES = kernels._HOST_CASES, kernels._HOST_SHAPES
    kernels._ROWS, collectives._SIZES = kernels._HOST_ROWS, collectives._HOST_SIZES
    return profile.measure_rank(kind, True, True, end=0.0, seconds=600.0)


def calibrated(folder: Path) -> dict[str, Any]:
    """`stretto calibrate` on two ranks."""
    cluster = profile.profile(profile.merge_ranks(run_ranks(2, small_rank, "npu")), 2)
    return {
        "device": cluster.device.name,
        "notes": cluster.device.notes,
        "memory": cluster.device.memory,
        "precisions": sorted(cluster.device.sustained),
        "link": cluster.inner.kind,
        "collectives": sorted(cluster.tables),
        "computing": cluster.computing,
        "too_many": error_of(lambda: profile.calibrate(5)),
    }


# ------------------------------------------------------------------ waits of the host


def noted(waits: Waits, synchronize: Callable[..., None]) -> Callable[..., None]:
    """A synchronisation that is counted where the package asks for it."""

    def call(*arguments: Any) -> None:
        waits.note("synchronize")
        synchronize(*arguments)

    return call


def waiting_rank(config: TrainConfig) -> list[dict[str, int]]:
    """A rank of a job: of each step, where the host waits for the device."""
    steps = list[dict[str, int]]()
    waits = Waits("npu")
    for owner in (plugin.Devices, plugin.Stream, plugin.Event):
        owner.synchronize = noted(waits, owner.synchronize)

    def counted(inner: Any, self: Any, stop: Any) -> Any:
        waits.counts.clear()
        with waits:
            stopped = inner(self, stop)
        steps.append(dict(waits.counts))
        return stopped

    around_step(counted)
    train_language_rank(config, None, StopRequest(), True)
    return steps


WAITING: dict[str, tuple[str, ...]] = {
    "dense": (GPT,),
    "fp16": (LLAMA, "train.dtype=float16"),
    "tp": (LLAMA, "layout.tp=2", "layout.sequence_parallel=true"),
    "cp": (LLAMA, "layout.cp=2"),
    "pp": (GPT, "layout.pp=2"),
    "split": (LLAMA, "layout.pp=2", "schedule.name=zb-h1"),
    "zero1": (GPT, "layout.dp=2", "dp.mode=zero1", "optim.name=lamb"),
    "zero3": (LLAMA, "layout.dp=2", "dp.mode=zero3", "recompute.mode=full"),
    "adafactor": (GPT, "layout.dp=2", "dp.mode=zero2", "optim.name=adafactor"),
    "muon": (GPT, "layout.dp=2", "dp.mode=zero2", "optim.name=muon"),
    "documents": (GPT, "data.packing=documents"),
    "experts": (MOE, "layout.dp=2", "layout.ep=2"),
    "experts together": (MOE,),
    "server": (GPT, "layout.dp=2", "dp.mode=server"),
    "asynchronous": (LLAMA, "layout.pp=2", "schedule.name=pipedream", "optim.clip=null"),
}


def waits_of(folder: Path, model: str, *overrides: str) -> dict[str, int]:
    """Where hosts wait in the fourth step of a job, on the busiest rank."""
    folder.mkdir()
    config = job(folder, "train.device=npu", "optim.clip=1.0", "train.steps=5", *overrides, model=model)
    ranks = run_ranks(config.layout.to_layout().world, waiting_rank, config)
    return max((steps[3] for steps in ranks), key=lambda waits: sum(waits.values()))


def waiting(folder: Path) -> dict[str, Any]:
    """In two jobs that have most of what could wait."""
    overrides = ("layout.dp=2", "dp.mode=zero2", "train.dtype=float16", "data.packing=documents")
    return {
        "sharded in float16": waits_of(folder / "sharded", GPT, *overrides),
        "experts": waits_of(folder / "experts", MOE, "layout.dp=2", "layout.ep=2"),
    }


def waiting_all(folder: Path) -> dict[str, Any]:
    """In jobs of every kind."""
    return {name: waits_of(folder / name.replace(" ", "-"), *WAITING[name]) for name in WAITING}


# ------------------------------------------------------------------ errors


def failing_rank(config: TrainConfig) -> None:
    """Train a rank of a pipeline whose first rank fails in a forward of the second step, when it has posted
    receives.
    """

    def broken(self: Any, x: Tensor) -> Tensor:
        raise ValueError("a broken layer")

    def step(inner: Any, trainer: Any, stop: Any) -> Any:
        if trainer.progress.step == 1 and torch.distributed.get_rank() == 0:
            TransformerBlock.forward = broken
        return inner(trainer, stop)

    around_step(step)
    train_language_rank(config, None, StopRequest(), True)


def failing(folder: Path) -> dict[str, Any]:
    """The error of the job, and the seconds until it is reported."""
    config = job(folder, "train.device=npu", "layout.pp=2", model=GPT)
    began = perf_counter()
    error = error_of(lambda: run_ranks(2, failing_rank, config))
    return {"error": error, "seconds": perf_counter() - began, "timeout": config.train.timeout_s}


# ------------------------------------------------------------------ jobs


def lines(folder: Path) -> list[dict[str, Any]]:
    """The metrics of the steps of the only run in a folder."""
    (path,) = folder.glob("runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if "loss" in row and "step" in row]


def losses(folder: Path) -> list[list[float]]:
    """Loss and gradient norm of each step."""
    return [[row["loss"], row["grad_norm"]] for row in lines(folder)]


def trained(folder: Path, model: str, *overrides: str) -> dict[str, Any]:
    """The same job on devices and on the CPU."""
    result = dict[str, Any]()
    for kind in ("npu", "cpu"):
        place = folder / kind
        place.mkdir(parents=True)
        run_job(
            LANGUAGE,
            job(place, "train.dtype=float64", f"train.device={kind}", *overrides, model=model),
            quiet=True,
        )
        result[kind] = losses(place)
        result[f"{kind}_memory"] = lines(place)[-1]["memory_gib"]
    return result


def pipelines(folder: Path) -> dict[str, Any]:
    """Two pipelines with a trace, whose checkpoint the CPU goes on from."""
    overrides = ("layout.pp=2", "layout.dp=2", "dp.mode=zero2", "train.dtype=float64")
    overrides = (*overrides, "checkpoint.every=3", "metrics.trace=2")
    result = trained(folder, GPT, *overrides)
    (first,) = (folder / "npu").glob("runs/*/checkpoints/step-00000003")
    place = folder / "resumed"
    place.mkdir()
    config = job(place, *overrides, "train.device=cpu")
    config = replace(config, checkpoint=replace(config.checkpoint, resume=str(first)))
    run_job(LANGUAGE, config, quiet=True)
    return {**result, "resumed": losses(place)}


def resumed_graphs(folder: Path) -> dict[str, Any]:
    """A job with graphs, whole and in two halves, and without them; all of it a run's."""
    overrides = ("train.device=npu", "train.dtype=float64", "model.dropout=0", "checkpoint.every=3")
    result = dict[str, Any]()
    for name, value in (("plain", "off"), ("graphed", "microbatch")):
        (folder / name).mkdir()
        run_job(LANGUAGE, job(folder / name, *overrides, "eval.every=2", f"train.graphs={value}"), quiet=True)
        result[name] = losses(folder / name)
    (first,) = (folder / "graphed").glob("runs/*/checkpoints/step-00000003")
    place = folder / "resumed"
    place.mkdir()
    run_job(
        LANGUAGE, job(place, *overrides, "train.graphs=microbatch", f"checkpoint.resume={first}"), quiet=True
    )
    return {**result, "resumed": losses(place)}


def sharded(folder: Path) -> dict[str, Any]:
    """Parameters and states in files, through pinned memory."""
    overrides = ("dp.mode=zero3", "dp.offload=nvme", "dp.offload_parameters=nvme", f"dp.path={folder}")
    return trained(folder, LLAMA, "layout.dp=2", *overrides)


def tensors(folder: Path) -> dict[str, Any]:
    """Context and tensor parallelism."""
    return trained(folder, LLAMA, "layout.tp=2", "layout.cp=2", "layout.sequence_parallel=true")


def experts(folder: Path) -> dict[str, Any]:
    """Experts on two ranks; each block runs again in the backward."""
    return trained(folder, MOE, "layout.dp=2", "layout.ep=2", "recompute.mode=full", "optim.name=muon")


def short(folder: Path) -> dict[str, Any]:
    """16-bit weights, 8-bit products, optimiser states on the host, updates beside the backward."""
    overrides = ("layout.dp=2", "precision.fp8=row", "dp.mode=zero2", "dp.offload=cpu", "optim.clip=null")
    return trained(folder, LLAMA, *overrides, "train.dtype=bfloat16")


def tables(folder: Path) -> dict[str, Any]:
    """A recommender whose rows are in host memory, cached on the device."""
    result = dict[str, Any]()
    for kind in ("npu", "cpu"):
        config = config_of(folder / kind, f"train.device={kind}", "tables.place=cpu", "tables.cache=0.3")
        run_job(RECOMMENDER, config, quiet=True)
        result[kind] = losses(folder / kind)
    return result


CASES = {
    case.__name__: case
    for case in (
        *(about, parts, calibrated, pipelines, sharded, tensors, experts, short, tables, copies, ranks),
        *(threads, waiting, waiting_all, failing, graphs, graphs_all, resumed_graphs),
    )
}

if __name__ == "__main__":
    root, *names = sys.argv[1:]
    sys.stdout = sys.stderr  # what jobs print
    reports = {}
    for name in names:
        (Path(root) / name).mkdir()
        reports[name] = CASES[name](Path(root) / name)
    print(json.dumps(reports), file=sys.__stdout__)
