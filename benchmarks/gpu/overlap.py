"""A profile of one step: when kernels and copies ran, what overlapped, how long the device was idle."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile

from gpu.jobs import MODELS, fastest, legal, trainer
from gpu.setting import Setting
from gpu.speed import attempt

Interval = tuple[float, float]  # start and end
COPIES = ("gpu_memcpy", "gpu_memset")
LONGEST_KERNELS = 20
JOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama-1b": ("llama-1b", ()),
    "llama-1b, states on the host": ("llama-1b", ("dp.offload=cpu",)),
    "llama-1b, states on the host, updates beside the backward": (
        "llama-1b",
        ("dp.offload=cpu", "optim.clip=null"),
    ),
    "gpt2-124m": ("gpt2-124m", ()),
}


def profiles(setting: Setting) -> dict[str, Any]:
    """One row for each job."""
    rows = dict[str, dict[str, Any]]()
    jobs = {**JOBS, **({"llama-1b, fastest": ("llama-1b", fastest(setting))} if fastest(setting) else {})}
    for name, (model, words) in jobs.items():
        rows[name] = attempt(lambda model=model, words=words: one_profile(model, words, setting))
        setting.keep({"rows": rows})
    return {"rows": rows}


def one_profile(model: str, words: Sequence[str], setting: Setting) -> dict[str, Any]:
    """The third step of a job."""
    job = legal(MODELS[model].config(setting, *words))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_gpu else [])]
    path = setting.folder / f"{setting.step}.trace.json"
    with trainer(job, setting, quick=True) as made:
        for _ in range(3):
            made.step()
        setting.synchronize()
        with profile(activities=activities) as recorded:
            made.step()
            setting.synchronize()
        recorded.export_chrome_trace(str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    path.unlink()
    return facts(events)


def facts(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """From a trace's events: seconds of the step on the device, idle, in copies, and in copies that ran
    beside kernels; and where most of the kernels' time went.
    """
    kernels, copies, by_name = list[Interval](), list[Interval](), defaultdict[str, float](float)
    for event in events:
        kind = event.get("cat")
        if kind != "kernel" and kind not in COPIES:
            continue
        start, seconds = 1e-6 * float(event["ts"]), 1e-6 * float(event["dur"])
        (kernels if kind == "kernel" else copies).append((start, start + seconds))
        if kind == "kernel":
            by_name[str(event["name"])[:100]] += seconds
    busy = merged([*kernels, *copies])
    whole = busy[-1][1] - busy[0][0] if busy else 0.0
    in_kernels, in_copies = merged(kernels), merged(copies)
    return {
        "seconds": whole,
        "kernels": len(kernels),
        "idle": whole - length(busy),
        "copying": length(in_copies),
        "copying_beside_kernels": length(in_kernels)
        + length(in_copies)
        - length(merged([*kernels, *copies])),
        "longest": dict(sorted(by_name.items(), key=lambda one: -one[1])[:LONGEST_KERNELS]),
    }


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union, in order."""
    result = list[Interval]()
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((start, end))
    return result


def length(intervals: Iterable[Interval]) -> float:
    """Of all together."""
    return sum(end - start for start, end in intervals)
