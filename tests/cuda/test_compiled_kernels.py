"""What the framework compiles for GPUs, compiled for them on a machine without: `compiled_kernels.py` in a
process for each GPU, since torch knows one kind in a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto

pytestmark = [
    pytest.mark.skipif(
        torch.version.cuda is None,
        reason="this torch was built without CUDA, so it has neither Triton nor ptxas",
    ),
    pytest.mark.timeout(1600),
]
SCRIPT = Path(__file__).parent / "compiled_kernels.py"
SOURCE = Path(stretto.__file__).parents[1]  # with a planted fault, if there is one
A_FEW = "^(Llama 3, bf16|Gemma 2, bf16|Mixtral, routed experts|Mistral, window|gpt-oss, sinks and window)$"


def compiled(chip: str, only: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The report of `compiled_kernels.py`."""
    command = [sys.executable, str(SCRIPT), chip, "--only", only]
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1500, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100"])
def test_blocks_and_attention_compile_for_gpus(chip: str, tmp_path: Path) -> None:
    """All kernels fit; none of a block spills registers, and FlexAttention's only a few."""
    report = compiled(chip, A_FEW, tmp_path)
    assert len(report) == 5
    for name, result in report.items():
        assert "error" not in result, (name, result)
        assert result["kernels"], name
        for kernel in result["kernels"]:
            assert kernel["configs"], f"{name}: {kernel['name']} needs more shared memory than there is"
            spilled = min(stack for _, _, _, stack, _ in kernel["configs"])
            allowed = 768 if "flex_attention" in kernel["name"] else 0
            assert spilled <= allowed, f"{name}: all configurations of {kernel['name']} spill registers"
    for name in ("Llama 3, bf16", "Gemma 2, bf16"):
        assert 0 < report[name]["fused"] < report[name]["plain"] / 2, name
    graphs = {"normed": 1, "rotate_heads": 1, "add_and_norm": 1, "activate": 1}
    assert report["Llama 3, bf16"]["graphs"] == graphs, "one graph for all blocks"
    assert report["Mixtral, routed experts"]["graphs"] == {"activate": 1}, "one graph for all numbers of rows"


def test_kernels_that_need_more_shared_memory_than_there_is_are_refused(tmp_path: Path) -> None:
    """Else that all fit would mean nothing; the framework's trial then leaves FlexAttention out."""
    result = compiled("sm_89", "^Gemma 2, soft cap$", tmp_path)["Gemma 2, soft cap"]
    assert "OutOfResources: out of resource: shared memory" in result["error"]
    refused = result["kernels"][-1]["refused"]
    assert [stages for _, stages, *_ in refused] == [2, 1], "torch tries it without pipelining too"


_SPILLING = """
import json, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from compiled_kernels import resources

@triton.jit
def products(x, y, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(x + at), tl.load(x + at + n)
    for i in range(100):
        a = a * b + tl.load(y + at + i * n)
        b = b * a + i
    tl.store(y + at, a + b)

types = {"x": "*fp32", "y": "*fp32", "n": "i32", "SIZE": "constexpr"}
found = []
for options in ({}, {"maxnreg": 64}):
    kernel = triton.compile(
        ASTSource(products, types, {"SIZE": 8192}),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, **options},
    )
    found.append(resources(kernel.asm["cubin"]))
print(json.dumps(found))
"""


def test_spilled_registers_are_seen(tmp_path: Path) -> None:
    """Else that there are none would mean nothing."""
    path = tmp_path / "spilling.py"
    path.write_text(_SPILLING, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (many, none), (few, spilled) = json.loads(done.stdout)
    assert many > 64 >= few
    assert none == 0 < spilled
