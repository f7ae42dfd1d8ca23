"""Steps of a rank on the simulated GPU: what torch, CUDA or NCCL refuses, and where the host waits.

The step is the trainer's own: batch, forward, backward, reductions, agreement, update. It takes torch's CUDA
build and a C compiler, and no GPU.
"""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest
import torch

if torch.version.cuda is None or not (shutil.which("cc") or shutil.which("gcc")):
    pytest.skip("it takes torch's CUDA build and a C compiler", allow_module_level=True)


import stretto
from stretto.engine.checkpoint.host_copy import HostCopy
from stretto.engine.checkpoint.storage import TensorSource, dtype_name
from stretto.engine.documents import DocumentStarts
from stretto.engine.models.build import build
from stretto.engine.models.generate import stream
from stretto.engine.optim.sharded_optimizer import GradientCopies
from stretto.job.job import Job
from stretto.layout.layout import Layout
from stretto.program.schedules.registry import names
from stretto.run.data.dataset import Batch
from stretto.run.dryrun.allocator import simulated_rank
from stretto.run.dryrun.simulated_gpu import SimulatedGpu
from stretto.run.train.batches import DevicePrefetcher
from stretto.run.train.rank_model import tensors_of

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
correct: Any = import_module("gpu.correct")
jobs: Any = import_module("gpu.jobs")
SETTING: Any = import_module("gpu.setting").Setting(torch.device("cuda", 0), True, Path())
AGREEMENT = "run/train/agreement.py"  # the step's one wait
PACKAGE = str(Path(stretto.__file__).parent) + "/"  # with a planted fault, if there is one
Waits = list[str]


@pytest.fixture(scope="module")
def on_gpu() -> Generator[Callable[..., Any]]:
    """Calls a function of this file in a process that has the simulated GPU."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=SimulatedGpu) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def job_of(section: dict[str, Any], overrides: Sequence[str]) -> Job:
    return jobs.legal(jobs.config(section, 32, 2, 4, SETTING, "train.vocab_multiple=4", *overrides))


def stepped(section: dict[str, Any], overrides: Sequence[str], rank: int | None = None) -> tuple[Waits, int]:
    """Take two steps as one rank, by default the last. Return where the host waited in the second, by file,
    and how many kernels it launched.
    """
    job = job_of(section, overrides)
    with simulated_rank(job.layout, job.layout.world - 1 if rank is None else rank) as mesh:
        trainer = jobs.Trainer(job, mesh)
        try:
            trainer.step()
            before = SimulatedGpu().counts()
            with SETTING.synchronisations() as calls:
                trainer.step()
            work = SimulatedGpu().counts().since(before)
            assert len(trainer.losses) >= 1
        finally:
            trainer.close()
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < 40 * 2**20, "more than the workspaces of cuBLAS outlives a job"
    return [call.rpartition(":")[0].removeprefix(PACKAGE) for call in calls], work["kernels"]


def refusals() -> dict[str, str]:
    """Return what torch, CUDA and NCCL say to what they refuse."""
    layout = Layout(dp=2)
    with simulated_rank(layout, 0) as mesh:
        x, group = torch.ones(4, 4, device="cuda"), mesh.group("dp")
        eight = torch.zeros(4, 4, dtype=torch.float8_e4m3fn, device="cuda")
        calls: dict[str, Callable[[], Any]] = {
            "mixed": lambda: x @ torch.ones(4, 4),
            "type": lambda: torch.linalg.lu_factor(x.bfloat16()),
            "eight bits": lambda: torch._scaled_mm(eight, eight, x[0, 0], x[0, 0]),
            "host": lambda: torch.distributed.all_reduce(torch.ones(4), group=group),
            "strides": lambda: torch.distributed.all_reduce(x.T[1:], group=group),
            "unsent": lambda: torch.distributed.all_reduce(x.to(torch.int16), group=group),
        }
        messages = dict[str, str]()
        for name, call in calls.items():
            try:
                call()
            except (RuntimeError, ValueError, TypeError) as error:
                messages[name] = str(error)
        with SETTING.synchronisations() as waits:
            x.sum().item()
        messages["read"] = waits[0]
    return messages


def test_what_is_refused(on_gpu: Callable[..., Any]) -> None:
    messages = on_gpu(refusals)
    expected = {
        "mixed": "on the same device",
        "type": "not implemented for 'BFloat16'",
        "eight bits": "divisible by 16",
        "host": "No backend type associated with device type cpu",
        "strides": "contiguous",
        "unsent": "Short",
        "read": __file__,
    }
    for name, phrase in expected.items():
        assert phrase in messages.get(name, "nothing"), (name, messages.get(name))


QUICK = {"llama", "experts", "fp8 row", "tensor and sequence", "states on the host"}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(
            case,
            dtype,
            id=f"{case.name} {dtype}",
            marks=() if case.name in QUICK and dtype == "bfloat16" else pytest.mark.slow,
        )
        for case in (*correct.CASES, *correct.EIGHT_BITS)
        for dtype in case.dtypes
    ],
)
def test_a_step_of_the_campaign(case: Any, dtype: str, on_gpu: Callable[..., Any]) -> None:
    waits, kernels = on_gpu(stepped, case.section, (f"train.dtype={dtype}", *case.words))
    assert waits == [AGREEMENT]
    assert kernels > 100


MODELS = {
    "gpt": jobs.GPT,
    "llama": jobs.LLAMA,
    "moe": jobs.MOE,
    "gemma2": correct.GEMMA,
    "deepseek": correct.LATENT,
    "gpt-oss": correct.SINKS,
    "t5": correct.T5,
}
SP = "layout.tp=2 layout.sequence_parallel=true"
TWO = "layout.pp=2 model.layers=4 model.tied=false"
TRAINING = [name for name in names() if name != "forward-only"]
MORE = [
    *(f"gpt {TWO} schedule.name={name}" for name in TRAINING),
    *(f"gpt {TWO} layout.dp=2 dp.mode=zero2 schedule.name={name}" for name in TRAINING),
    *("llama train.dtype=float16", "llama lora.rank=4", "llama lora.rank=4 layout.dp=2 dp.mode=zero3"),
    *("llama layout.dp=4 dp.mode=zero2 dp.shard_states=2", "llama layout.dp=2 dp.mode=server"),
    *("llama layout.dp=2 dp.mode=zero1 optim.name=lamb", "llama optim.name=sgd"),
    *("llama layout.dp=2 dp.mode=zero1 optim.name=adafactor", "llama layout.dp=2 optim.name=muon"),
    "llama optim.states=bfloat16 precision.gradients=same",
    *(f"llama layout.dp=2 dp.mode={mode} dp.offload=cpu" for mode in ("zero1", "zero2", "zero3")),
    "llama layout.dp=2 dp.mode=zero2 dp.offload=cpu optim.clip=null",
    "llama layout.dp=2 dp.mode=zero3 dp.offload_parameters=cpu",
    *(f"llama {SP} precision.fp8=row", f"llama {SP} precision.fp8=tensor recompute.mode=full"),
    *("llama layout.dp=2 dp.mode=zero3 precision.fp8=row", "moe precision.fp8=row"),
    *("llama layout.cp=4", f"llama {SP} layout.cp=2", f"llama {SP} train.loss_chunk=24"),
    *("llama layout.cp=2 model.attention.window=9", "llama model.attention.window=9 train.attention=sdpa"),
    *("llama guard.check_memory=1", "llama guard.check_replicas=1 layout.dp=2"),
    *("moe layout.dp=2 layout.ep=2 dp.mode=zero3", f"moe {SP}", f"moe {SP} layout.dp=2 layout.ep=2"),
    *("moe layout.tp=2 layout.dp=2 layout.ep=4 layout.expert_tp=1", "moe layout.cp=2 layout.ep=2"),
    *("moe layout.dp=2 layout.ep=2 model.moe.capacity=1.25", f"moe {TWO} schedule.name=dualpipe"),
    *(
        f"{model} {overrides}"
        for model in ("gemma2", "deepseek", "gpt-oss", "t5")
        for overrides in (SP, "layout.pp=2", "layout.dp=2 dp.mode=zero3", "recompute.mode=full")
    ),
    *(f"{model} layout.cp=2" for model in ("gemma2", "deepseek", "gpt-oss")),
    *(f"gpt model.dropout=0.1 {SP} recompute.mode=full", "t5 model.dropout=0.1"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_a_step_of_other_jobs(case: str, on_gpu: Callable[..., Any]) -> None:
    model, *overrides = case.split()
    if "pipedream" in case:
        overrides.append("optim.clip=null")
    if "dtype" not in case:
        overrides.append("train.dtype=bfloat16")
    # whether samples are packed is a value, so the rank that serves them cannot know
    for rank in (None,) if "server" in case else (0, None):
        waits, _ = on_gpu(stepped, MODELS[model], overrides, rank)
        if "server" in case or "pipedream" in case:
            # documented: whether samples are packed, weights are finite
            assert len({*waits} - {"run/train/batches.py"}) <= 2
        else:
            assert waits == [AGREEMENT]


def packed(section: dict[str, Any]) -> tuple[Waits, int]:
    """`stepped`, every sample two documents."""

    def two_documents(_: DocumentStarts, at: torch.Tensor) -> list[list[tuple[int, int, int]]]:
        half = len(at) // 2
        return [[(0, 0, half), (half, half, len(at))]] * 2

    def batch(samples: Any, indices: Sequence[int]) -> Batch:
        plain = original(samples, indices)
        return replace(plain, begins=torch.zeros_like(plain.inputs))

    original = jobs.Samples.batch
    with patch.object(DocumentStarts, "runs", two_documents), patch.object(jobs.Samples, "batch", batch):
        return stepped(section, ("data.packing=documents", "train.dtype=bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gemma2", "deepseek", "gpt-oss"])
def test_a_step_of_packed_documents(model: str, on_gpu: Callable[..., Any]) -> None:
    assert on_gpu(packed, MODELS[model])[0] == [AGREEMENT]


def pageable_copies(overrides: Sequence[str]) -> tuple[int, int]:
    """Return a step's copies to the device from memory that is not page-locked, and those from it."""
    job = job_of(jobs.LLAMA, overrides)
    with simulated_rank(job.layout, 0) as mesh:
        trainer = jobs.Trainer(job, mesh)
        trainer.step()
        before = SimulatedGpu().pageable()
        trainer.step()
        after = SimulatedGpu().pageable()
        trainer.close()
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("overrides", [(), ("dp.offload=cpu",), ("dp.offload=cpu", "optim.clip=null")])
def test_batches_and_gradients_are_copied_from_page_locked_memory(
    overrides: Sequence[str], on_gpu: Callable[..., Any]
) -> None:
    """The others are of a few numbers: what ranks agree on, and tokens and weights of the loss."""
    assert on_gpu(pageable_copies, ("train.dtype=bfloat16", *overrides)) == (3, 1)


@pytest.fixture(scope="module")
def behind() -> Generator[Callable[..., Any]]:
    """As `on_gpu`, of a device whose work is done only when the host has waited for it."""
    load = partial(SimulatedGpu, behind=True)
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=load) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def batch_addresses() -> list[int]:
    """Return where the inputs of batches lie, each dropped before the next."""
    job, device = job_of(jobs.LLAMA, ()), torch.device("cuda", 0)
    batches, size = DevicePrefetcher(jobs.Samples(job), device, job.global_batch), job.global_batch
    addresses = [batches.batch(range(n * size, (n + 1) * size)).inputs.data_ptr() for n in range(6)]
    batches.close()
    return addresses


def gradient_addresses() -> list[int]:
    """Return where gradients lie that are copied to the host, each dropped before the next."""
    copies, addresses = GradientCopies(), list[int]()
    for key in range(6):
        gradient = torch.empty(2**20, device="cuda")
        copies.start(key, gradient, torch.float32)
        addresses.append(gradient.data_ptr())
    return addresses


@pytest.mark.parametrize("addresses", [batch_addresses, gradient_addresses])
def test_memory_in_use_by_another_stream_is_not_reused(
    addresses: Callable[[], list[int]], behind: Callable[..., Any]
) -> None:
    assert len({*behind(addresses)}) == 6


def checkpoint_copy() -> tuple[Waits, int, int, int]:
    """Copy a checkpoint's tensors to the host: waits, growth of the device's memory, copies to memory that is
    not page-locked, and tensors.
    """
    job = job_of(jobs.LLAMA, ("train.dtype=bfloat16",))
    with simulated_rank(job.layout, 0) as mesh:
        trainer = jobs.Trainer(job, mesh)
        trainer.step()
        tensors = {name: tensor for name, (tensor, _) in tensors_of(trainer.replica).items()}
        sources = [
            TensorSource(name, dtype_name(x.dtype), tuple(x.shape), lambda x=x: x)
            for name, x in tensors.items()
        ]
        before, pageable = torch.cuda.memory_allocated(), SimulatedGpu().pageable()[1]
        with SETTING.synchronisations() as calls:
            HostCopy(mesh.device).copy({"rank": sources}, Event())
        grown, pageable = torch.cuda.memory_allocated() - before, SimulatedGpu().pageable()[1] - pageable
        trainer.close()
    return calls, grown, pageable, len(sources)


def test_a_checkpoint_is_copied_to_page_locked_memory_without_a_wait(on_gpu: Callable[..., Any]) -> None:
    calls, grown, pageable, tensors = on_gpu(checkpoint_copy)
    assert (calls, grown, pageable) == ([], 0, 0)
    assert tensors > 20


def tokens(section: dict[str, Any]) -> list[list[int]]:
    """Continue two prompts by four tokens each."""
    shape = job_of(section, ()).shape
    with simulated_rank(Layout(), 0) as mesh:
        with mesh.device:
            network = build(shape).eval()
        prompts = torch.ones(2, 5, dtype=torch.int64, device=mesh.device)
        return [list(token.shape) for token in stream(network, prompts, 4, temperature=0.0)]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama", "gemma2", "deepseek"])
def test_tokens_are_generated(model: str, on_gpu: Callable[..., Any]) -> None:
    assert on_gpu(tokens, MODELS[model]) == [[2]] * 4
