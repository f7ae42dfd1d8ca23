"""The allocator's peak of a step beside the predicted one, and what `recompute: auto` picks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gpu.jobs import MODELS, fastest, legal, trainer
from gpu.setting import Setting
from gpu.speed import attempt
from stretto.engine.parallel.mesh import Mesh
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import rank_memory
from stretto.run.config.schema import TrainConfig
from stretto.run.train.memory_measured import measure


def peaks(setting: Setting) -> dict[str, Any]:
    """One row for each job: predicted, allocated and reserved bytes."""
    rows = dict[str, dict[str, Any]]()
    for name, made in jobs(setting).items():
        rows[name] = attempt(lambda made=made: peak_of(made, setting))
        setting.keep({"rows": rows})
    return {"rows": rows, "goal": 0.05}


def jobs(setting: Setting) -> dict[str, TrainConfig]:
    """Models, options that change what is held, and budgets for `recompute: auto`."""
    one = MODELS["llama-1b"]
    words = {
        "as configured": (),
        "fastest": fastest(setting),
        "16-bit states": ("optim.states=bfloat16", "precision.gradients=same"),
        "recompute full": ("recompute.mode=full",),
        "states on the host": ("dp.offload=cpu",),
        "fp8": ("precision.fp8=row",),
        "muon": ("optim.name=muon",),
        **{f"recompute auto within {gib} GiB": auto(gib, setting) for gib in (64, 56, 50)},
    }
    variants = {f"llama-1b, {name}": one.config(setting, *these) for name, these in words.items()}
    return {
        **variants,
        "gpt2-124m": MODELS["gpt2-124m"].config(setting),
        "gpt2-1.5b": MODELS["gpt2-1.5b"].config(setting),
    }


def auto(gib: float, setting: Setting) -> tuple[str, ...]:
    """The least recomputation that fits so much memory."""
    return "recompute.mode=auto", f"recompute.memory_gib={0.003 if setting.tiny else gib}"


def peak_of(made: TrainConfig, setting: Setting) -> dict[str, Any]:
    """The peak of the third step of a job; on a CPU that of the tensors that torch's operators see."""
    job = legal(made)
    described = memory_of(job)
    predicted = rank_memory(described)[0]
    if setting.on_gpu:
        with trainer(job, setting, quick=True) as one:
            for _ in range(2):
                one.step()
            setting.forget_peak()
            one.step()
            setting.synchronize()
            measured, reserved = setting.peak_bytes()
    else:
        measured = reserved = measure(job, Mesh(job.layout, setting.device)).peak
    return {
        "predicted": predicted.total,
        "allocated": measured,
        "reserved": reserved,
        "error": predicted.total / measured - 1,
        "kinds": {
            k: getattr(predicted, k) for k in ("weights", "masters", "gradients", "optimizer", "activations")
        },
        "at": predicted.at,
        "recomputed": dict(Counter(described.modes)),
    }
