"""What it costs to keep optimiser states in host memory, and a model whose states exceed the device's."""

from __future__ import annotations

from typing import Any

import torch

from gpu.jobs import LLAMA, LLAMA_3B, config, legal, trainer
from gpu.setting import Setting
from gpu.speed import attempt, timed
from stretto.engine.device import total_memory
from stretto.job.parameters import count_parameters
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import rank_memory

# Llama-3 8B with eleven more blocks: 10.4 billion parameters. The host keeps 12 bytes of each: master, two
# means of 16 bits, and a copy of the gradient.
LARGE = {"preset": "llama3-8b", "vocab": 128256, "layers": 43}
LARGE_WORDS = ("optim.states=bfloat16", "recompute.mode=full")
THREADS = "train.threads=16"


def cost(setting: Setting) -> dict[str, Any]:
    """The 3B, whose states fit, with states on the device and on the host."""
    rows = dict[str, dict[str, Any]]()
    for name, words in {
        "on the device": (),
        "on the host": ("dp.offload=cpu", THREADS),
        "on the host, updates beside the backward": ("dp.offload=cpu", "optim.clip=null", THREADS),
    }.items():
        section, sequence = (LLAMA, 32) if setting.tiny else (LLAMA_3B, 4096)
        for microbatches in (1, 8):
            key = f"{name}, {microbatches} microbatches"
            job = (section, sequence, 2, microbatches)
            rows[key] = attempt(lambda job=job, words=words: run(*job, setting, *words))
            setting.keep({"rows": rows})
    return {"rows": rows}


def beyond(setting: Setting) -> dict[str, Any]:
    """A model whose states do not fit, trained; and what a step of it would need on the device alone."""
    section, sequence = (LLAMA, 32) if setting.tiny else (LARGE, 4096)
    made = run(section, sequence, 1, 8, setting, "dp.offload=cpu", *LARGE_WORDS, THREADS)
    alone = legal(config(section, sequence, 1, 8, setting, *LARGE_WORDS))
    needed = rank_memory(memory_of(alone))[0].total
    return {
        **made,
        "needed_bytes": needed,
        "device_bytes": total_memory(setting.device) if setting.on_gpu else None,
    }


def run(
    section: dict[str, Any], sequence: int, micro: int, microbatches: int, setting: Setting, *words: str
) -> dict[str, Any]:
    """A few steps."""
    if not setting.tiny:
        torch.set_num_threads(16)
    setting.forget_peak()
    job = legal(config(section, sequence, micro, microbatches, setting, *words))
    with trainer(job, setting, quick=True) as made:
        done = timed(made.step, setting, steps=3, repeats=3, warm_up=2)
        losses = made.losses
    return {
        **done,
        "parameters": count_parameters(job.shape).total,
        "tokens": job.global_batch * job.sequence,
        "losses": losses,
    }
