"""What the host waits for in a step, and whether any stream fails to wait for another.

Synchronisations are counted by torch (`torch.cuda.set_sync_debug_mode`), by the line that causes them. For
streams, the same steps run again with kernels that only pass time queued at random whenever work is queued on
a side stream or an event is recorded: a copy or kernel that another stream should wait for is then late, and
a missing wait changes the losses. They must be the same to the bit.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import torch

from gpu.jobs import GPT, LLAMA, LLAMA_1B, MOE, config, fastest, legal, trainer
from gpu.setting import Setting
from gpu.speed import timed
from stretto.job.job import Job

WARM_UP, STEPS = 3, 4
LONGEST = 2_000_000  # clock cycles of a delay: about a millisecond
JOBS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "as configured": (LLAMA, ()),
    "gpt": (GPT, ()),
    "experts": (MOE, ()),
    "states on the host": (LLAMA, ("dp.offload=cpu",)),
    "states on the host, updates beside the backward": (LLAMA, ("dp.offload=cpu", "optim.clip=null")),
    "recompute full": (LLAMA, ("recompute.mode=full",)),
    "fp8": (LLAMA, ("precision.fp8=row",)),
}


def jobs(setting: Setting) -> dict[str, tuple[dict[str, Any], tuple[str, ...]]]:
    """Those of `JOBS`, and with what makes a step faster."""
    return {**JOBS, **({"fastest": (LLAMA, fastest(setting))} if fastest(setting) else {})}


def host_waits(setting: Setting) -> dict[str, Any]:
    """Synchronisations of a step, by job and by line; the goal is one at most."""
    rows = list[dict[str, Any]]()
    for name, (section, words) in jobs(setting).items():
        job = legal(config(section, 32, 2, 4, setting, *words))
        with trainer(job, setting) as made:
            for _ in range(WARM_UP):
                made.step()
            setting.synchronize()
            with setting.synchronisations() as calls:
                for _ in range(STEPS):
                    made.step()
        lines = {line: count / STEPS for line, count in Counter(calls).most_common()}
        rows.append({"job": name, "each_step": len(calls) / STEPS, "lines": lines})
        setting.keep({"rows": rows})
    return {"rows": rows, "goal": 1}


def late_streams(setting: Setting) -> dict[str, Any]:
    """The losses and norms of each job twice without delays and twice with: bits can only be compared where
    the first two agree, since some kernels add up in another order each time.
    """
    rows = list[dict[str, Any]]()
    with deterministic(setting):
        for name, (section, words) in jobs(setting).items():
            big = {**section, "hidden": 512, "ffn": 1024} if setting.on_gpu and "ffn" in section else section
            job = legal(config(big, 32, 2, 4, setting, "optim.lr=1e-2", *words))
            runs = [run_late(job, setting, seed) for seed in (None, None, 1, 2)]
            plain, again, *late = [numbers for numbers, _ in runs]
            rows.append(
                {
                    "job": name,
                    "delays": sum(delays for _, delays in runs),
                    "reproducible": plain == again,
                    "same_bits": all(one == plain for one in late),
                    "farthest": max(farthest(plain, one) for one in late),
                }
            )
            setting.keep({"rows": rows})
    return {"rows": rows, "same": sum(row["same_bits"] for row in rows), "of": len(rows)}


def run_late(job: Job, setting: Setting, seed: int | None) -> tuple[list[float], int]:
    """Losses and norms of a few steps, and how many delays there were; without a seed none."""
    with trainer(job, setting) as made, delayed(setting, seed) as count:
        for _ in range(WARM_UP + STEPS):
            made.step()
        setting.synchronize()
        return [*made.losses, *made.norms], count[0]


def farthest(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(one, other, strict=True))


@contextmanager
def deterministic(setting: Setting) -> Generator[None]:
    """Let torch choose kernels that add up in one order, where it has any."""
    if not setting.on_gpu:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def delayed(setting: Setting, seed: int | None) -> Generator[list[int]]:
    """Queue kernels that pass time, at random, on the streams that are about to work or to be waited for.

    Yields:
        A list of one number: how many there were.
    """
    count, draw = [0], Random(seed)
    if seed is None or not setting.on_gpu:
        yield count
        return
    enter, record = torch.cuda.StreamContext.__enter__, torch.cuda.Event.record

    def pause() -> None:
        if draw.random() < 0.5:
            torch.cuda._sleep(draw.randrange(LONGEST))
            count[0] += 1

    def entered(self: Any) -> Any:
        result = enter(self)
        pause()
        return result

    def recorded(self: Any, stream: Any = None) -> Any:
        with torch.cuda.stream(stream or torch.cuda.current_stream()):
            pass  # pauses there
        return record(self, stream)

    torch.cuda.StreamContext.__enter__ = entered
    torch.cuda.Event.record = recorded
    try:
        yield count
    finally:
        torch.cuda.StreamContext.__enter__ = enter
        torch.cuda.Event.record = record


def host_time(setting: Setting) -> dict[str, Any]:
    """How long the host takes to queue a step of the 1B with one sample of few tokens: where that exceeds the
    device's time, the device waits.
    """
    section = LLAMA if setting.tiny else LLAMA_1B
    rows = dict[str, Any]()
    for name, words in {
        "as configured": (),
        **({"fastest": fastest(setting)} if fastest(setting) else {}),
    }.items():
        job = legal(config(section, 32, 1, 1, setting, *words))
        with trainer(job, setting, quick=True) as made:
            rows[name] = timed(made.step, setting, steps=20)
    return {"rows": rows}
