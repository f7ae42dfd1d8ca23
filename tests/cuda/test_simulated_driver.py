"""The simulated GPU: torch's CUDA build sees an H100, its allocator runs, and kernels do nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import CommandLine

if torch.version.cuda is None:
    missing = "this torch is no CUDA build"
else:
    missing = "" if shutil.which("cc") or shutil.which("gcc") else "no C compiler"
simulated = pytest.mark.skipif(bool(missing), reason=missing)

BEFORE = """
import os, sys
from stretto.run.dryrun.simulated_gpu import SimulatedGpu
gib, mib = 2**30, 2**20
gpu = SimulatedGpu(int(sys.argv[1]), behind=sys.argv[2] == "behind")
import torch
"""
# without Python's shutdown, in which autograd's device thread may still want the interpreter's lock
AFTER = """
sys.stdout.flush()
os._exit(0)
"""


def run_code(code: str, gib: int = 80, timing: str = "", **environment: str) -> None:
    """Run code in a process of its own, after torch, on a device of so many GiB."""
    command = [sys.executable, "-c", BEFORE + code + AFTER, str(gib * 2**30), timing]
    ran = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]


@simulated
def test_a_module_trains_and_the_allocator_counts_its_memory() -> None:
    """Two layers of 64 MiB, their gradients, and an input: what torch's allocator must hold is known."""
    run_code(
        """
assert torch.cuda.is_available() and "H100" in torch.cuda.get_device_name()
device = torch.device("cuda")
layers = [torch.nn.Linear(4096, 4096, bias=False, device=device) for _ in range(2)]
x = torch.ones(1024, 4096, device=device)  # 16 MiB, as each activation
assert torch.cuda.memory_allocated() == 144 * mib, torch.cuda.memory_allocated()
loss = torch.nn.Sequential(*layers)(x).sum()
loss.backward()
assert loss.item() == 1
grads = [layer.weight.grad.shape for layer in layers]
assert grads == [(4096, 4096)] * 2
del loss
workspace = torch.cuda.memory_allocated() - (144 + 128) * mib
assert workspace in (32 * mib, 33 * mib + mib // 8), workspace  # of cuBLAS
assert torch.cuda.max_memory_reserved() >= torch.cuda.max_memory_allocated() >= 304 * mib
counts = gpu.counts()
assert counts.products == 5 and counts.copies_to_host == 1 and counts.waits, counts
kernels = gpu.kernels()
assert sum(kernels.values()) == counts.kernels and any("reduce_kernel" in name for name in kernels)
"""
    )


@simulated
@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_a_full_device_refuses_and_the_allocator_reports_it(settings: str) -> None:
    """Of 8 GiB the context takes a part and tensors six; what they free can be allocated again."""
    run_code(
        """
held = [torch.empty(gib, dtype=torch.uint8, device="cuda") for _ in range(6)]
try:
    torch.empty(2 * gib, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    assert "total capacity of 8.00 GiB" in str(error), error
else:
    raise AssertionError("more than the device has")
held.clear()
torch.empty(6 * gib, dtype=torch.uint8, device="cuda")
assert torch.cuda.mem_get_info()[0] <= 1.5 * gib
torch.cuda.empty_cache()
assert torch.cuda.mem_get_info() == (8 * gib - 520 * mib, 8 * gib)
""",
        gib=8,
        PYTORCH_CUDA_ALLOC_CONF=settings,
    )


@simulated
@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_a_graph_is_captured_and_forbidden_calls_end_the_capture(settings: str) -> None:
    run_code(
        """
weight, x = (torch.ones(64, 64, device="cuda") for _ in range(2))
x @ weight
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = (x + weight).relu()
before = gpu.counts()
graph.replay()
assert {name: n for name, n in gpu.counts().since(before).items() if n} == {"graphs": 1}

def refuses(work):
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x + weight
            work()
    except (RuntimeError, torch.AcceleratorError) as error:
        return f"{error.__context__} {error}"
    raise AssertionError(work)
assert "not permitted when stream is capturing" in refuses(lambda: y.sum().item())
side = torch.cuda.Stream()
def fork(join):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x * 2
    if join:
        torch.cuda.current_stream().wait_stream(side)
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    fork(True)
from threading import Thread
def pin():  # a thread that reads samples ahead
    thread = Thread(target=lambda: torch.empty(64, 1024).pin_memory())
    thread.start()
    thread.join()
with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
    x + weight
    pin()
assert "unjoined" in refuses(lambda: fork(False))
x + weight  # the device is usable after a failed capture
""",
        PYTORCH_CUDA_ALLOC_CONF=settings,
    )


@simulated
@pytest.mark.parametrize("recorded", [True, False])
def test_memory_of_another_stream_is_reused_too_early_unless_recorded(recorded: bool) -> None:
    """On a device that lags behind, memory recorded for another stream is free only after the host waits."""
    run_code(
        f"""
side = torch.cuda.Stream()
x = torch.empty(2**25, device="cuda")
address = x.data_ptr()
with torch.cuda.stream(side):
    x * 2
    if {recorded}:
        x.record_stream(side)
del x
early = torch.empty(2**25, device="cuda").data_ptr() == address
assert early != {recorded}, early
torch.cuda.synchronize()
assert torch.empty(2**25, device="cuda").data_ptr() == address or {recorded}
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0
""",
        timing="behind",
    )


@simulated
def test_an_embedding_adds_its_gradient_without_a_dense_one() -> None:
    run_code(
        """
from stretto.engine.parallel.tensor.vocabulary import VocabParallelEmbedding
weight = torch.nn.Parameter(torch.empty(2**17, 1024, device="cuda"))
weight.grad = torch.empty_like(weight)
layer = VocabParallelEmbedding(weight, 0, None)
ids, dy = torch.zeros(1024, dtype=torch.long, device="cuda"), torch.empty(1024, 1024, device="cuda")
before = torch.cuda.memory_allocated()
layer.add_weight_gradient(ids, dy)
assert torch.cuda.max_memory_allocated() - before < 16 * mib
"""
    )


CONFIG = """
model: {family: llama, layers: 4, hidden: 512, heads: 8, kv_heads: 4, ffn: 1024, vocab: 8192}
data: {source: tokens/, sequence: 512}
layout: {dp: 4, pp: 2}
dp: {mode: zero1}
batch: {micro_size: 2, global_size: 32}
recompute: {mode: full}
optim: {lr: 1e-4}
train: {steps: 10, dtype: bfloat16, device: cuda}
"""


def dryrun(folder: Path, *overrides: str, code: int = 0) -> Any:
    """The object that the command prints, in a process of its own."""
    (folder / "job.yaml").write_text(CONFIG)
    command = [
        sys.executable,
        "-m",
        "stretto.cli.main",
        "dryrun",
        "job.yaml",
        "--allocator",
        "--json",
        *overrides,
    ]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert ran.returncode == code, ran.stdout[-2000:] + ran.stderr[-4000:]
    return json.loads(ran.stdout)


@simulated
@pytest.mark.parametrize(
    ("overrides", "rank"),
    [
        ("", 5),
        ("optim.name=muon layout.dp=1 dp.mode=ddp batch.global_size=8", 1),
        # gradients of a block that are packed while the last product's other tensors are alive
        (
            "dp.mode=zero3 layout.pp=1 layout.dp=32 batch.global_size=64 batch.micro_size=1 model.vocab=512 "
            "model.hidden=2048 model.ffn=8192 model.heads=16",
            0,
        ),
    ],
)
def test_a_rank_of_a_layout_runs_as_predicted(tmp_path: Path, overrides: str, rank: int) -> None:
    """Tensors as the memory model predicts, and what it leaves out: the workspace of cuBLAS."""
    ran = dryrun(tmp_path, *overrides.split(), "--rank", str(rank))
    assert ran["out_of_memory"] is None
    workspace = ran["allocated_bytes"] - ran["predicted_bytes"]
    assert 31 * 2**20 < workspace < 36 * 2**20, workspace
    assert ran["allocated_bytes"] <= ran["reserved_bytes"] < 1.5 * ran["allocated_bytes"]
    work = ran["work"]
    assert work["kernels"] > work["products"] > 0 < work["messages"]
    assert work["copies_to_host"] == 1  # the norm; the loss is read by a training run alone


@simulated
def test_a_rank_that_does_not_fit_says_where(tmp_path: Path) -> None:
    ran = dryrun(tmp_path, "data.sequence=16384", "--device-gib", "1", code=1)
    assert "CUDA out of memory" in ran["out_of_memory"]
    assert "pipeline rank 0 at " in ran["out_of_memory"]
    assert ran["reserved_bytes"] <= 2**30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--allocator"], "loaded before torch"),
        (["--allocator", "--quick"], "exclude each other"),
        (["--device-gib", "40"], "--device-gib needs --allocator"),
    ],
)
def test_wrong_options_of_the_allocator(
    stretto: CommandLine, tmp_path: Path, options: list[str], message: str
) -> None:
    (tmp_path / "job.yaml").write_text(CONFIG)
    assert re.search(message, stretto.error("dryrun", tmp_path / "job.yaml", *options))
