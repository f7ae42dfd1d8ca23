"""The table of speeds: Stretto's step, plain torch's and other contestants', on the same model and tokens.

MFU = model FLOPs of a step / (its seconds x the device's dense bf16 peak). Model FLOPs of a token are three
times those of a forward pass: two for each weight of a matrix product that the token meets, of experts those
that it is sent to, and the scores of attention and their product with the values counted in full, without
recomputation (Narayanan et al. 2021, equation 3; `stretto.job.flops.model_flops_per_token`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gpu.jobs import GRAPHS, MODELS, Model, Samples, fastest, known_tricks, legal, trainer
from gpu.plain import PlainStep
from gpu.setting import Setting
from stretto.engine.device import model_name
from stretto.job.flops import model_flops_per_step
from stretto.job.job import Job
from stretto.planner.machines.catalogue import peak_tflops

Step = Callable[[], object]
WARM_UP, STEPS, REPEATS = 8, 50, 3
PLAIN, STRETTO = "plain torch, compiled", "Stretto"


def timed(
    step: Step, setting: Setting, steps: int = STEPS, repeats: int = REPEATS, warm_up: int = WARM_UP
) -> dict[str, Any]:
    """Seconds of a step, of each repeat: the mean over its steps, waited for at the end alone."""
    warm_up, steps, repeats = (1, 1, 2) if setting.tiny or setting.simulated else (warm_up, steps, repeats)
    started = time.perf_counter()
    for _ in range(warm_up):
        step()
    setting.synchronize()
    warmed, seconds = time.perf_counter() - started, list[float]()
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(steps):
            step()
        setting.synchronize()
        seconds.append((time.perf_counter() - started) / steps)
    allocated, reserved = setting.peak_bytes()
    return {
        "seconds": seconds,
        "steps": steps,
        "warm_up_s": warmed,
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
    }


def peak(setting: Setting) -> float | None:
    """Dense bf16 FLOP/s of the device by its vendor; None of a CPU."""
    tflops = peak_tflops(model_name(setting.device), "bf16") if setting.on_gpu else None
    return None if tflops is None else tflops * 1e12


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What one contestant reports, or why it could not run: the others go on."""
    try:
        return run()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def on_device(job: Job, setting: Setting) -> list[tuple[Tensor, Tensor]]:
    """The microbatches of `Samples` in the device's memory."""
    samples = Samples(job)
    count = samples.batches * (job.microbatches or 1)
    size = job.micro_batch
    batches = [samples.batch(range(i * size, (i + 1) * size)) for i in range(count)]
    return [(one.inputs.to(setting.device), one.targets.to(setting.device)) for one in batches]


@contextmanager
def plain_step(
    job: Job,
    setting: Setting,
    *,
    half: bool,
    compiled: bool = True,
    convert: Callable[[nn.Module], Any] | None = None,
) -> Generator[PlainStep]:
    """Plain torch's step, and nothing left of it afterwards."""
    torch._dynamo.reset()
    setting.forget_peak()
    yield PlainStep(
        job,
        on_device(job, setting),
        setting.device,
        half=half,
        compiler=setting.compiler if compiled else None,
        convert=convert,
    )
    torch._dynamo.reset()
    setting.forget_peak()


def run_stretto(model: Model, setting: Setting, *overrides: str, **how: int) -> dict[str, Any]:
    """Stretto's step with these overrides."""
    torch._dynamo.reset()
    setting.forget_peak()
    job = legal(model.config(setting, *overrides))
    with trainer(job, setting, quick=True) as made:
        return {**timed(made.step, setting, **how), "loss": made.losses[-1], "overrides": overrides}


def run_plain(
    model: Model, setting: Setting, *, compiled: bool = True, fp8: bool = False, **how: int
) -> dict[str, Any]:
    """Plain torch's step; with `fp8`, torchao's 8-bit products in the blocks.

    Raises:
        ImportError: there is no torchao.
    """
    job = legal(model.config(setting))
    with plain_step(
        job, setting, half=model.plain_half, compiled=compiled, convert=torchao_fp8 if fp8 else None
    ) as made:
        return {**timed(made.step, setting, **how), "loss": float(made.losses[-1])}


def torchao_fp8(model: nn.Module) -> None:
    """Let the linear layers of the blocks multiply in 8 bits, with a scale for each row."""
    from torchao.float8 import (  # pyright: ignore[reportMissingImports]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name("rowwise"),
        module_filter_fn=lambda module, name: "blocks." in name and "router" not in name,
    )


def race(
    model: Model, setting: Setting, contestants: dict[str, Callable[[], dict[str, Any]]]
) -> dict[str, Any]:
    """All contestants one after the other, and what their seconds mean."""
    job = legal(model.config(setting))
    flops = model_flops_per_step(job.shape, job.sequence, job.global_batch)
    rows = dict[str, dict[str, Any]]()
    result = {
        "model": model.name,
        "goal_mfu": model.goal,
        "sequence": job.sequence,
        "micro_batch": job.micro_batch,
        "microbatches": job.microbatches,
        "tokens": job.global_batch * job.sequence,
        "flops": flops,
        "peak_flops": peak(setting),
        "plain_half": model.plain_half,
        "rows": rows,
    }
    for name, run in contestants.items():
        row = attempt(run)
        rows[name] = {**row, **derived(row, job, flops, peak(setting))}
        setting.keep(result)
    return result


def derived(row: dict[str, Any], job: Job, flops: float, peak_flops: float | None) -> dict[str, Any]:
    """Tokens a second and MFU of a row that has seconds."""
    if "seconds" not in row:
        return {}
    middle = median(row["seconds"])
    return {
        "median_s": middle,
        "tokens_per_s": job.global_batch * job.sequence / middle,
        "mfu": None if peak_flops is None else flops / middle / peak_flops,
    }


def model_race(name: str, setting: Setting) -> dict[str, Any]:
    """One model: Stretto with all that should make it faster, plain torch compiled, then Stretto with less of
    that, in fewer steps.
    """
    model = MODELS[name]
    fast = tuple(w for w in fastest(setting, model.section) if model.graphs or not w.startswith(GRAPHS))
    contestants: dict[str, Callable[[], dict[str, Any]]] = {
        " ".join((STRETTO, *fast)): lambda: run_stretto(model, setting, *fast),
        PLAIN: lambda: run_plain(model, setting),
    }
    for count in range(len(fast)):
        less = fast[:count]
        contestants[" ".join((STRETTO, *less))] = lambda less=less: run_stretto(
            model, setting, *less, steps=10
        )
    return race(model, setting, contestants)


def fp8_race(setting: Setting) -> dict[str, Any]:
    """The 8B with 8-bit products, against its bf16 step and torchao's."""
    model, fast = MODELS["llama3-8b"], fastest(setting)[:1]
    return race(
        model,
        setting,
        {
            "bf16": lambda: run_stretto(model, setting, *fast, steps=20),
            "fp8=row": lambda: run_stretto(model, setting, *fast, "precision.fp8=row", steps=20),
            "fp8=tensor": lambda: run_stretto(model, setting, *fast, "precision.fp8=tensor", steps=20),
            "torchao, rowwise, compiled": lambda: run_plain(model, setting, fp8=True, steps=20),
        },
    )


def tricks(setting: Setting) -> dict[str, Any]:
    """The 1B with each trick and without it, everything else as configured."""
    model = MODELS["llama-1b"]
    contestants: dict[str, Callable[[], dict[str, Any]]] = {
        "plain torch, eager": lambda: run_plain(model, setting, compiled=False, steps=20),
    }
    for trick in known_tricks():
        for value in (trick.without, trick.value):
            override = f"{trick.field}={value}"
            contestants.setdefault(override, lambda o=override: run_stretto(model, setting, o, steps=20))
    done = race(model, setting, contestants)
    pairs = [(f"{t.field}={t.without}", f"{t.field}={t.value}") for t in known_tricks()]
    return {**done, "pairs": pairs}
