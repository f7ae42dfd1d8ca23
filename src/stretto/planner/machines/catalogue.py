"""The catalogue of known devices and clusters, and the cluster of this machine: as `stretto calibrate`
measured it, else as the catalogue knows its driver's name.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, cast

from stretto.errors import StrettoError, nearest
from stretto.job.devices import AUTO, HOST
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.describe import cluster_of, device_of
from stretto.planner.machines.device import Device, Precision
from stretto.planner.machines.names import ParsedName, head, normalised, parse_name
from stretto.planner.machines.reading import read_fields
from stretto.versions import PROFILE

DATA = Path(__file__).parent / "data"
SOURCES = (
    "the vendors' figures, as listed with their pages in stas00/ml-engineering (accelerator and network "
    "tables) and cli99/llm-analysis; sustained: the former's measured products; memory: what drivers report"
)


@dataclass(frozen=True)
class CatalogueEntry:
    """A device of the catalogue, with the parts of a name that denote it.

    Attributes:
        chip: the chip in the words of a name.
        gbs: memory sizes as names say them.
        forms: other words of its names.
    """

    device: Device
    chip: str
    gbs: tuple[int, ...]
    forms: tuple[str, ...]


def find_device(name: str) -> Device:
    """The device of that name or alias, in any case, punctuation and order: "a100_80gb", "H100-80GB-HBM3",
    "NVIDIA H100 80GB HBM3", "8xH100". Where a name does not say which card of a chip it is, the first one of
    the catalogue.

    Raises:
        StrettoError: no such device; names the nearest.
    """
    device = _device(name)
    if device is None:
        raise _unknown("device", name, _device_names())
    return device


def find_cluster(name: str | Path, devices: int | None = None) -> Cluster:
    """A cluster by its name in the catalogue ("dgx-a100-80gb", also with a size, "dgx-a100-80gb:1024"), by a
    device's name (that device in its usual node), or from a YAML file; "here" is this machine, as `stretto
    calibrate` has measured it.

    Args:
        devices: number of devices to use, or None for the number in the name, else all.

    Raises:
        StrettoError: no such cluster, an invalid file, or more devices than it has.
    """
    text, size = _sized(str(name), devices)
    if text == "here":
        return cluster_here(size)
    if text.endswith((".yaml", ".yml")):
        return _with(read_cluster(Path(text)), size)
    cluster = _cluster(text)
    if cluster is None:
        names = (*_device_names(), *(cluster.name for cluster in clusters()))
        raise _unknown("cluster", text, names, " or a YAML file that describes yours")
    return _with(cluster, size)


def known_by_driver(name: str) -> Device | None:
    """The device behind a driver's name, as "NVIDIA H100 80GB HBM3". None if that is not certain: a slice
    of a card and a slower card of the same chip have its name too.
    """
    for entry in entries():
        pattern = entry.device.pattern
        if pattern and _matches(name, pattern) and not _matches(name, entry.device.unless):
            return entry.device
    return None


def peak_tflops(driver_name: str, precision: Precision) -> float | None:
    """Dense peak of one device for matrix products at that precision, TFLOP/s, or None if unknown."""
    device = known_by_driver(driver_name)
    return None if device is None else device.tflops.get(precision)


@cache
def entries() -> tuple[CatalogueEntry, ...]:
    """The catalogue's devices, in its order."""
    listed = list[CatalogueEntry]()
    for name, fields in read_fields(DATA / "devices.yaml").items():
        chip, forms = fields.text("chip"), fields.texts("forms")
        gbs = tuple(int(gb) for gb in fields.texts("gb"))
        listed.append(CatalogueEntry(device_of(fields, name, find_device), chip, gbs, forms))
    return tuple(listed)


@cache
def clusters() -> tuple[Cluster, ...]:
    """The catalogue's clusters, in its order; the first one of a device is its usual cluster."""
    fields = read_fields(DATA / "clusters.yaml")
    return tuple(cluster_of(inner, name, find_device, find_cluster) for name, inner in fields.items())


@cache
def cluster_aliases() -> dict[str, str]:
    """The cluster's name by each of its aliases, normalised."""
    aliases: dict[str, str] = {}
    for name, inner in read_fields(DATA / "clusters.yaml").items():
        aliases |= {normalised(alias): name for alias in inner.texts("aliases")}
    return aliases


def read_cluster(path: Path) -> Cluster:
    """A user's cluster: its device by name or described, its node, links, prices and measurements.

    Raises:
        StrettoError: the file is missing or breaks a rule; with the line.
    """
    fields = read_fields(path)
    if "version" in fields:
        PROFILE.check(fields.plain("version"), str(path))
    return cluster_of(fields, path.stem, find_device, find_cluster)


def _device(name: str) -> Device | None:
    wanted = normalised(name)
    for entry in entries():
        if wanted in {normalised(alias) for alias in (entry.device.name, *entry.device.aliases)}:
            return entry.device
    entry = _entry_of(parse_name(name)) or _entry_of(parse_name(head(name)))
    return entry.device if entry else None


def _entry_of(parsed: ParsedName) -> CatalogueEntry | None:
    """The first entry that fits all parts of a name."""
    return next((e for e in entries() if parsed.fits(e.chip, e.gbs, e.forms)), None)


def _cluster(name: str) -> Cluster | None:
    """A cluster by its name, or its device's, or a device with a system in brackets; sized if the name
    says how many.
    """
    named = _cluster_named(name)
    if named:
        return named
    parsed, device = parse_name(name), _device(name)
    if device is None:
        return None
    cluster = next(cluster for cluster in clusters() if cluster.device is device)
    if parsed.aside and (system := _cluster_named(parsed.aside)):
        chips = {e.chip for e in entries() if e.device in (device, system.device)}
        if len(chips) == 1:  # the system with that device, if the name says more than the chip
            cluster = system if parsed.gb is None else replace(system, device=device)
    return cluster if parsed.count is None else cluster.sized(parsed.count)


def _cluster_named(name: str) -> Cluster | None:
    wanted = normalised(name)
    wanted = normalised(cluster_aliases().get(wanted, wanted))
    return next((cluster for cluster in clusters() if normalised(cluster.name) == wanted), None)


def _sized(name: str, devices: int | None) -> tuple[str, int | None]:
    """The name without its size, and the size: `devices`, if that is not None."""
    text, colon, size = name.rpartition(":")
    if not colon or not text:
        return name, _positive(devices, name)
    if not size.isdecimal():
        raise StrettoError(
            f"cluster {name!r}: {size!r} is no number of devices", hint=f"as in {text}:64, or {text} alone"
        )
    return text, _positive(int(size) if devices is None else devices, name)


def _positive(devices: int | None, name: str) -> int | None:
    if devices is not None and devices < 1:
        raise StrettoError(f"cluster {name!r} with {devices} devices", hint="1 or more")
    return devices


def _with(cluster: Cluster, devices: int | None) -> Cluster:
    return cluster if devices is None else cluster.sized(devices)


def _device_names() -> tuple[str, ...]:
    return tuple(entry.device.name for entry in entries())


def _unknown(kind: str, name: str, names: Iterable[str], more: str = "") -> StrettoError:
    """An error that names the nearest name by spelling, or devices of the same chip."""
    parsed, names = parse_name(name), tuple(names)
    chips = [entry.device.name for entry in entries() if parsed.mentions(entry.chip)]
    suggestion = ", ".join(chips) if chips else nearest(name.lower(), names)
    hint = (
        f"did you mean {suggestion}{more}?"
        if suggestion
        else "`stretto catalogue` lists those that are known"
    )
    return StrettoError(f"{kind} {name!r} is not known", hint=hint)


def _matches(text: str, pattern: str) -> bool:
    return re.search(pattern, text, re.IGNORECASE) is not None


FEWEST, RECENT = 3, 20  # runs that a correction needs, and the latest runs that it takes into account
_FARTHEST = 3.0  # a correction beyond it, or below its inverse, would hide a wrong profile
_DRIVER = Path("/proc/driver/nvidia/gpus")


def machine_name() -> str:
    """This machine's name, as a file may be called."""
    characters = [c if c.isalnum() or c in "-_." else "-" for c in platform.node()]
    return "".join(characters).strip(".-") or "here"


def profile_path() -> Path:
    """The default path of this machine's profile: `stretto/profiles` in the user's configuration folder
    (XDG_CONFIG_HOME, else ~/.config).
    """
    root = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(root).expanduser() / "stretto" / "profiles" / f"{machine_name()}.yaml"


def probe_path() -> Path:
    """The path of the short measurement of this machine that a training begins with if there is no profile
    (`run.calibrate.probe`): of this version of torch.
    """
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return profile_path().with_suffix(f".torch-{torch}.probe.yaml")


def local_profile() -> Path:
    """The file that describes this machine: its profile, else its probe; it need not exist."""
    path = profile_path()
    return path if path.is_file() else probe_path()


def with_earlier_peaks(cluster: Cluster, profile: Path) -> Cluster:
    """The CPU with the highest peak of this and the earlier profile, if there is one of this machine: load
    can only lower what is measured, so that utilisations before and after are of the same peak.
    """
    try:
        earlier = read_cluster(profile) if is_cpu(cluster) and profile.is_file() else None
    except StrettoError:  # it is about to be replaced
        earlier = None
    if earlier is None or earlier.device.name != cluster.device.name:
        return cluster
    before, now = earlier.device.tflops, cluster.device.tflops
    peaks = {precision: max(peak, before.get(precision, 0.0)) for precision, peak in now.items()}
    return replace(cluster, device=replace(cluster.device, tflops=peaks))


def history_path(profile: Path) -> Path:
    """File next to a profile with predictions and measurements of earlier runs, as JSON lines."""
    return profile.with_suffix(".runs.jsonl")


def cluster_here(devices: int | None = None, device: str = "auto", *, probed: bool = False) -> Cluster:
    """This machine, with this number of devices.

    Args:
        probed: if there is no profile, the probe of a first training is one. Not for what a run depends on:
            its layout and the placement of its tables are the same before and after.
        device: device of the ranks, as `train.device` names it: a profile of the CPU is for "cpu" alone,
            any other for accelerators; "auto": whichever exists.

    Raises:
        StrettoError: the profile is broken, or has fewer devices; or it is of another kind, and nothing says
            what the accelerator is.
    """
    driver = None if device == HOST else driver_name()
    path, cluster = local_profile() if probed else profile_path(), None
    if path.is_file():
        measured = read_cluster(path)
        if device == AUTO or is_cpu(measured) == (device == HOST):
            cluster = with_history(measured, path)
    if cluster is None:
        if driver is None and device not in (AUTO, HOST):
            raise StrettoError(
                f"nothing is known of this machine's device of kind {device}",
                hint="`stretto calibrate` measures it, or name a cluster of `stretto catalogue`",
            )
        identified = known_by_driver(driver) if driver else None
        cluster = find_cluster("cpu" if driver is None else identified.name if identified else driver)
    return cluster if devices is None else cluster.sized(devices)


def is_cpu(cluster: Cluster) -> bool:
    """True if ranks share the cores of a CPU."""
    return cluster.computing is not None


def is_measured(cluster: Cluster) -> bool:
    """True if it comes from a profile."""
    return bool(cluster.device.kernels)


def driver_name() -> str | None:
    """The name of this machine's first GPU in NVIDIA's driver, or None without a GPU or driver.

    Read from the driver's files, so that no library has to be loaded.
    """
    try:
        for information in sorted(_DRIVER.glob("*/information")):
            for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
                key, _, value = line.partition(":")
                if key == "Model":
                    return value.strip()
    except OSError:
        return None
    return None


def with_history(cluster: Cluster, profile: Path) -> Cluster:
    """The cluster with the correction from earlier runs on it: the median of measured over predicted seconds,
    if there are enough of them.
    """
    ratios = [row["ratio"] for row in history(profile, cluster.name)[-RECENT:]]
    if len(ratios) < FEWEST:
        return cluster
    correction = min(_FARTHEST, max(1 / _FARTHEST, median(ratios)))
    return replace(cluster, correction=cluster.correction * correction)


def history(profile: Path, cluster: str) -> list[dict[str, Any]]:
    """Earlier runs on a cluster with this profile, the oldest first; invalid lines are skipped.

    A row has `ratio`, measured over predicted seconds without the correction that was applied.

    Raises:
        StrettoError: the file exists and cannot be read.
    """
    path = history_path(profile)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StrettoError(
            f"cannot read {path}, by which predictions are corrected: {error.strerror}",
            hint="make it readable, or remove it to predict without the correction",
        ) from None
    runs = list[dict[str, Any]]()
    for line in lines:
        row = _run(line)
        if row is not None and row.get("cluster") == cluster:
            runs.append(row)
    return runs


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


def _run(line: str) -> dict[str, Any] | None:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(row, dict):
        return None
    fields = cast("dict[str, Any]", row)
    ratio = fields.get("ratio")
    good = isinstance(ratio, int | float) and not isinstance(ratio, bool) and 0 < ratio < float("inf")
    return fields if good else None
