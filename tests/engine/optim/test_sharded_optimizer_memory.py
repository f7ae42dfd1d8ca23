"""A model whose optimiser states do not fit into memory trains with them in files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LIMITED = """
import ctypes, os, re, resource, sys, threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from stretto.job.optimiser import Optimiser
from stretto.engine.offload.tensor_files import at_hand
from stretto.engine.optim.build import build_optimizer
from stretto.engine.optim.sharded_optimizer import ShardedOptimizer
from stretto.engine.parallel.fragment import ParameterFragment
from stretto.engine.parallel.fragment import ShardPlacement

torch.set_num_threads(1)
threading.stack_size(2**20)  # which the limit counts
UNITS, SIZE, MIB = 16, 2**18, 2**20
config = Optimiser(name="adamw", weight_decay=0.0)
gradient = torch.linspace(-1, 1, SIZE)


def fragments() -> Iterator[ParameterFragment]:
    for unit in range(UNITS):
        name = str(unit)
        parameter = nn.Parameter(torch.full((SIZE,), float(unit)))
        placed = ShardPlacement.unsharded(name, (SIZE,))
        yield ParameterFragment(name=name, parameter=parameter, placed=placed, unit=unit)


def train(where: str) -> tuple[ShardedOptimizer, list[ParameterFragment]]:
    every = []
    sharded = ShardedOptimizer(
        (every.append(f) or f for f in fragments()),
        lambda some: build_optimizer(some, config), offload=where, path=sys.argv[1],
    )
    for fragment in every:
        fragment.gradient = gradient
    for _ in range(2):
        sharded.step(0.01)
    return sharded, every


def peak() -> int:
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024


p = nn.Parameter(torch.full((SIZE,), 7.0))  # one unit alone
one = build_optimizer([("7", p)], config)
p.grad = gradient
for group in one.param_groups:
    group["lr"] = 0.01
for _ in range(2):
    one.step()

room = 24 * MIB  # states and masters are 16 * 3 MiB, states alone 16 * 2
if child := os.fork():
    os.waitpid(child, 0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = peak()
    sharded, every = train("nvme")
    assert torch.equal(at_hand(every[7].parameter.detach()), p.detach())
    sharded.close()
    assert peak() - before < room, (peak(), before)
    print("peak: less")
    sys.exit()

ctypes.CDLL(None).mallopt(-3, MIB // 4)  # M_MMAP_THRESHOLD: the limit also counts freed memory that is kept
used = int(re.search(r"VmData:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))
train("nvme")[0].close()
print("files: done", flush=True)
try:
    train("none")
except RuntimeError as error:
    assert "allocate memory" in str(error), error
    print("memory: not enough", flush=True)
os._exit(0)
"""


def test_states_larger_than_memory_train_from_files(tmp_path: Path):
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n") == ["files: done", "memory: not enough", "peak: less", ""], done.stderr
