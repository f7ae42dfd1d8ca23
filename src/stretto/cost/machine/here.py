"""The cluster of this machine: as `stretto calibrate` measured it, else as the catalogue knows its driver."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, cast

from stretto.cost.machine.catalogue import find_cluster, known_by_driver, read_cluster
from stretto.cost.machine.cluster import Cluster
from stretto.errors import StrettoError

FEWEST, RECENT = 3, 20  # runs that a correction needs, and those that it looks back on
_FARTHEST = 3.0  # a correction beyond it, or below its inverse, tells of a wrong profile
_DRIVER = Path("/proc/driver/nvidia/gpus")


def machine_name() -> str:
    """This machine's, as a file may be called."""
    kept = [c if c.isalnum() or c in "-_." else "-" for c in platform.node()]
    return "".join(kept).strip(".-") or "here"


def profile_path() -> Path:
    """Where this machine's profile is unless somebody says otherwise: `stretto/profiles` in the user's folder
    of configurations (XDG_CONFIG_HOME, else ~/.config).
    """
    root = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(root).expanduser() / "stretto" / "profiles" / f"{machine_name()}.yaml"


def history_path(profile: Path) -> Path:
    """Where predictions and measurements of runs are kept beside a profile, as JSON lines."""
    return profile.with_suffix(".runs.jsonl")


def cluster_here(devices: int | None = None, device: str = "auto") -> Cluster:
    """This machine with so many devices.

    Args:
        device: "cpu" or "cuda" to take a profile of that alone; "auto": whichever there is.

    Raises:
        StrettoError: the profile is broken; or it has fewer devices.
    """
    driver = None if device == "cpu" else driver_name()
    path, found = profile_path(), None
    if path.is_file():
        measured = read_cluster(path)
        if device == "auto" or is_cpu(measured) == (device == "cpu"):
            found = with_history(measured, path)
    if found is None:
        known = known_by_driver(driver) if driver else None
        found = find_cluster("cpu" if driver is None else known.name if known else driver)
    return found if devices is None else found.sized(devices)


def is_cpu(cluster: Cluster) -> bool:
    """Whether ranks share the cores of a CPU."""
    return cluster.computing is not None


def is_measured(cluster: Cluster) -> bool:
    """Whether it comes from a profile."""
    return bool(cluster.device.kernels)


def driver_name() -> str | None:
    """What NVIDIA's driver calls the first GPU of this machine; None where there is none, or no such driver.

    From the driver's own files: no library has to be loaded.
    """
    try:
        for facts in sorted(_DRIVER.glob("*/information")):
            for line in facts.read_text(encoding="utf-8", errors="replace").splitlines():
                key, _, value = line.partition(":")
                if key == "Model":
                    return value.strip()
    except OSError:
        return None
    return None


def with_history(cluster: Cluster, profile: Path) -> Cluster:
    """The cluster with the correction that earlier runs on it teach: the median of measured over predicted
    seconds, where there are a few.
    """
    ratios = [row["ratio"] for row in history(profile, cluster.name)[-RECENT:]]
    if len(ratios) < FEWEST:
        return cluster
    found = min(_FARTHEST, max(1 / _FARTHEST, median(ratios)))
    return replace(cluster, correction=cluster.correction * found)


def history(profile: Path, cluster: str) -> list[dict[str, Any]]:
    """Earlier runs on a cluster with this profile, the oldest first; lines that make no sense are left out.

    A row has `ratio`, measured over predicted seconds without the correction that was applied.
    """
    try:
        lines = history_path(profile).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    found = list[dict[str, Any]]()
    for line in lines:
        row = _row(line)
        if row is not None and row.get("cluster") == cluster:
            found.append(row)
    return found


def add_history(profile: Path, row: Mapping[str, Any]) -> None:
    """Append a run.

    Raises:
        StrettoError: the file cannot be written.
    """
    path = history_path(profile)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(row)) + "\n")
    except OSError as error:
        raise StrettoError(f"cannot write {path}: {error.strerror}") from None


def _row(line: str) -> dict[str, Any] | None:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(row, dict):
        return None
    found = cast("dict[str, Any]", row)
    ratio = found.get("ratio")
    good = isinstance(ratio, int | float) and not isinstance(ratio, bool) and 0 < ratio < float("inf")
    return found if good else None
