"""Known devices and clusters by name, and a user's own from YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from stretto.cost.machine.cluster import Cluster
from stretto.cost.machine.describe import cluster_of, device_of
from stretto.cost.machine.device import Device, Precision
from stretto.cost.machine.reading import Fields, read_fields
from stretto.cost.machine.spoken import Spoken, listen, squeezed
from stretto.errors import StrettoError, nearest

DATA = Path(__file__).parent / "data"
SOURCES = (
    "the vendors' figures, as listed with their pages in stas00/ml-engineering (accelerator and network "
    "tables) and cli99/llm-analysis; sustained: the former's measured products; memory: what drivers report"
)


@dataclass(frozen=True)
class Entry:
    """A device of the catalogue, and what a name says that means it."""

    device: Device
    chip: str
    gbs: tuple[int, ...]
    forms: tuple[str, ...]


def find_device(name: str) -> Device:
    """The device of that name or alias, whatever the case, the punctuation and the order: "a100_80gb",
    "H100-80GB-HBM3", "NVIDIA H100 80GB HBM3", "8xH100". Where a name leaves open which card of a chip it
    is, the first one of the catalogue.

    Raises:
        StrettoError: no such device; names the nearest.
    """
    found = _device(name)
    if found is None:
        raise _unknown("device", name, _device_names())
    return found


def find_cluster(name: str | Path, devices: int | None = None) -> Cluster:
    """A cluster by its name in the catalogue ("dgx-a100-80gb", also with a size, "dgx-a100-80gb:1024"), by a
    device's name (that device in its usual node), or from a YAML file; "here" is this machine, as `stretto
    calibrate` has measured it; with so many devices.

    Raises:
        StrettoError: no such cluster, a file that is none, or more devices than it has.
    """
    text, size = _sized(str(name), devices)
    if text == "here":
        from stretto.cost.machine.here import cluster_here  # which asks this file

        return cluster_here(size)
    if text.endswith((".yaml", ".yml")):
        return _with(read_cluster(Path(text)), size)
    found = _cluster(text)
    if found is None:
        known = (*_device_names(), *(cluster.name for cluster in clusters()))
        raise _unknown("cluster", text, known, " or a YAML file that describes yours")
    return _with(found, size)


def known_by_driver(name: str) -> Device | None:
    """The device behind a driver's name, as "NVIDIA H100 80GB HBM3"; None if not surely known: a slice of a
    card and a slower card of the same chip have its name too.
    """
    for entry in entries():
        pattern = entry.device.pattern
        if pattern and _has(name, pattern) and not _has(name, entry.device.unless):
            return entry.device
    return None


def peak_tflops(driver_name: str, precision: Precision) -> float | None:
    """Dense peak in TFLOP/s of one device for matrix products at that precision; None if not known."""
    found = known_by_driver(driver_name)
    return None if found is None else found.tflops.get(precision)


@cache
def entries() -> tuple[Entry, ...]:
    """The catalogue's devices, in its order."""
    return tuple(_entry(name, fields) for name, fields in read_fields(DATA / "devices.yaml").items())


@cache
def clusters() -> tuple[Cluster, ...]:
    """The catalogue's clusters, in its order; the first of a device is its usual one."""
    fields = read_fields(DATA / "clusters.yaml")
    return tuple(cluster_of(inner, name, find_device, find_cluster) for name, inner in fields.items())


@cache
def cluster_aliases() -> dict[str, str]:
    """Every other name of a cluster, squeezed, and the cluster's."""
    found: dict[str, str] = {}
    for name, inner in read_fields(DATA / "clusters.yaml").items():
        found |= {squeezed(alias): name for alias in inner.texts("aliases")}
    return found


def read_cluster(path: Path) -> Cluster:
    """A user's own cluster: its device by name or described, its node, links, prices and what was measured.

    Raises:
        StrettoError: the file is not there or breaks a rule; with the line.
    """
    return cluster_of(read_fields(path), path.stem, find_device, find_cluster)


def _entry(name: str, fields: Fields) -> Entry:
    chip, gbs = fields.text("chip"), tuple(int(gb) for gb in fields.texts("gb"))
    forms = fields.texts("forms")
    return Entry(device_of(fields, name, find_device), chip, gbs, forms)


def _device(name: str) -> Device | None:
    wanted = squeezed(name)
    for entry in entries():
        if wanted in {squeezed(said) for said in (entry.device.name, *entry.device.aliases)}:
            return entry.device
    found = _meant(listen(name))
    return found.device if found else None


def _meant(spoken: Spoken) -> Entry | None:
    """The first entry that all of a name fits."""
    return next((e for e in entries() if spoken.says(e.chip, e.gbs, e.forms)), None)


def _cluster(name: str) -> Cluster | None:
    """By the cluster's own name, or its device's, or a device on a system in brackets; sized where the name
    says how many.
    """
    own = _cluster_named(name)
    if own:
        return own
    spoken, device = listen(name), _device(name)
    if device is None:
        return None
    usual = next(cluster for cluster in clusters() if cluster.device is device)
    if spoken.aside and (system := _cluster_named(spoken.aside)):
        same = {e.chip for e in entries() if e.device in (device, system.device)}
        usual = _on(system, device, spoken) if len(same) == 1 else usual
    return usual if spoken.count is None else usual.sized(spoken.count)


def _on(system: Cluster, device: Device, spoken: Spoken) -> Cluster:
    """The system with that device, if the name says more of it than its chip."""
    return system if spoken.gb is None else replace(system, device=device)


def _cluster_named(name: str) -> Cluster | None:
    wanted = squeezed(name)
    wanted = squeezed(cluster_aliases().get(wanted, wanted))
    return next((cluster for cluster in clusters() if squeezed(cluster.name) == wanted), None)


def _sized(name: str, devices: int | None) -> tuple[str, int | None]:
    """The name without its size, and the size: `devices`, where given."""
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


def _unknown(kind: str, name: str, known: Iterable[str], more: str = "") -> StrettoError:
    """An error with the nearest name: by spelling, or of the same chip."""
    words, known = listen(name), tuple(known)
    chips = [entry.device.name for entry in entries() if words.names(entry.chip)]
    near = ", ".join(chips) if chips else nearest(name.lower(), known)
    hint = f"did you mean {near}{more}?" if near else "`stretto catalogue` lists those that are known"
    return StrettoError(f"{kind} {name!r} is not known", hint=hint)


def _has(text: str, pattern: str) -> bool:
    return re.search(pattern, text, re.IGNORECASE) is not None
