"""A measured profile of the device, and step times of ten shapes beside what it predicts for them."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from gpu.jobs import GPT, LLAMA, MOE, config, legal, trainer
from gpu.setting import Setting
from gpu.speed import attempt, timed
from stretto.engine.device import model_name
from stretto.planner.estimate import estimate
from stretto.planner.machines.catalogue import find_cluster, known_by_driver, read_cluster
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.describe import save_cluster
from stretto.run.calibrate.profile import calibrate

# model, sequence, samples of a microbatch, microbatches
SHAPES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "gpt, 12 of 768": ({"family": "gpt", "layers": 12, "hidden": 768, "heads": 12}, 1024, 16, 2),
    "gpt, 24 of 1024": ({"family": "gpt", "layers": 24, "hidden": 1024, "heads": 16}, 1024, 8, 2),
    "gpt, 24 of 2048": ({"family": "gpt", "layers": 24, "hidden": 2048, "heads": 16}, 2048, 4, 1),
    "gpt, short": ({"family": "gpt", "layers": 12, "hidden": 1024, "heads": 16}, 256, 8, 4),
    "llama, 12 of 1024": ({"family": "llama", "layers": 12, "hidden": 1024, "heads": 16}, 2048, 8, 1),
    "llama, 16 of 2048": ({"family": "llama", "layers": 16, "hidden": 2048, "heads": 16}, 2048, 4, 2),
    "llama, 16 of 2048, long": ({"family": "llama", "layers": 16, "hidden": 2048, "heads": 16}, 16384, 1, 1),
    "llama, 20 of 3072": ({"family": "llama", "layers": 20, "hidden": 3072, "heads": 24}, 4096, 1, 2),
    "llama, 8 of 4096": (
        {"family": "llama", "layers": 8, "hidden": 4096, "heads": 32, "kv_heads": 8},
        4096,
        2,
        1,
    ),
    "experts, 8 of 1024": (
        {"family": "llama", "layers": 8, "hidden": 1024, "heads": 16, "moe": {"experts": 8, "top_k": 2}},
        2048,
        4,
        1,
    ),
}
TINY = {"gpt": GPT, "llama": LLAMA, "experts": MOE}


def profile_path(setting: Setting) -> Path:
    """The measured profile."""
    return setting.folder / "profile.yaml"


def calibration(setting: Setting) -> dict[str, Any]:
    """`stretto calibrate` on the device; leaves the profile beside the results."""
    cluster = calibrate(ranks=1, quick=setting.tiny, quiet=True, device=setting.device.type)
    save_cluster(cluster, profile_path(setting))
    device = cluster.device
    return {
        "device": device.name,
        "tflops": dict(device.sustained),
        "bandwidth": device.bandwidth,
        "launch_us": 1e6 * float(device.kernels.get("launch") or 0.0),  # pyright: ignore[reportArgumentType]
        "profile": profile_path(setting).read_text(encoding="utf-8"),
    }


def clusters(setting: Setting) -> dict[str, Cluster]:
    """What predictions are made with: the catalogue's entry, and the profile where there is one."""
    known = known_by_driver(model_name(setting.device)) if setting.on_gpu else None
    profiles = {"catalogue": find_cluster("h200" if known is None else known.name).sized(1)}
    if profile_path(setting).is_file():
        profiles["profile"] = read_cluster(profile_path(setting)).sized(1)
    return profiles


def shapes(setting: Setting) -> dict[str, Any]:
    """Ten shapes; the goal is 5% with the profile."""
    rows = dict[str, dict[str, Any]]()
    for name in SHAPES:
        rows[name] = attempt(lambda name=name: one_shape(name, setting))
        setting.keep({"rows": rows})
    return {"rows": rows, "goal": 0.05}


def one_shape(name: str, setting: Setting) -> dict[str, Any]:
    """Measured and predicted seconds of one."""
    section, sequence, micro, microbatches = SHAPES[name]
    if setting.tiny:
        section, sequence = TINY[name.partition(",")[0]], 32
    job = legal(config({"vocab": 50304, **section}, sequence, micro, microbatches, setting))
    predicted = {
        kind: estimate(job, cluster, memory=False).seconds for kind, cluster in clusters(setting).items()
    }
    with trainer(job, setting, quick=True) as made:
        measured = median(timed(made.step, setting, steps=10)["seconds"])
    errors = {kind: seconds / measured - 1 for kind, seconds in predicted.items()}
    return {"measured": measured, "predicted": predicted, "errors": errors}
