"""Kinds of devices and communication libraries under torch's names for them, without importing torch.

Plug-ins add kinds under their own names, so the table is not complete: a config may name any kind, and
`stretto.engine.device` checks whether torch has it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stretto.errors import StrettoError

AUTO, HOST = "auto", "cpu"


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device.

    Attributes:
        about: the vendor or description.
        synonyms: other names that users write.
        plugin: the module that registers the kind with torch, or None if torch has it built in.
    """

    about: str
    synonyms: tuple[str, ...] = ()
    plugin: str | None = None


KINDS = {
    HOST: DeviceKind("the host's cores", ("host",)),
    "cuda": DeviceKind("NVIDIA, and AMD with ROCm", ("gpu", "nvidia", "amd", "rocm", "hip")),
    "npu": DeviceKind("Huawei Ascend", ("ascend", "huawei"), "torch_npu"),
    "xpu": DeviceKind("Intel GPUs", ("intel", "arc")),
    "hpu": DeviceKind("Intel Gaudi", ("gaudi", "habana"), "habana_frameworks.torch.core"),
    "mps": DeviceKind("Apple", ("apple", "metal")),
    "mlu": DeviceKind("Cambricon", ("cambricon",), "torch_mlu"),
    "musa": DeviceKind("Moore Threads", ("moorethreads",), "torch_musa"),
}
TRITON = "cuda"  # the kind for which torch compiles by Triton
BACKENDS = ("nccl", "gloo", "hccl", "xccl", "mpi", "ucc")
METAVAR = "|".join((AUTO, *KINDS, "..."))  # in the help of commands


def check_device(name: str, field: str = "") -> str:
    """Return the name if it is `auto` or a possible name of a kind of device.

    Args:
        field: the name of the config's field, with which the error begins.

    Raises:
        StrettoError: it is not; the hint names the kind that is meant, if it is known.
    """
    plain = name.strip().lower()
    kind, _, index = plain.partition(":")
    meant = next((name for name, device in KINDS.items() if kind in (name, *device.synonyms)), None)
    if re.fullmatch(r"[a-z][a-z0-9_]*", name) and (meant is None or meant == name):
        return name
    hint = f"did you mean {meant}?" if meant else None
    if meant and index:
        hint = f"write {meant}: the number of each rank's device is its LOCAL_RANK"
    raise StrettoError(
        f"{field} is {name!r}, must be auto or a kind of device: {', '.join(KINDS)} or a plug-in's".lstrip(),
        hint=hint,
    )


def check_backend(name: str) -> str:
    """Return the name if it is `auto` or a possible name of a communication library.

    Raises:
        StrettoError: it is not.
    """
    if re.fullmatch(r"[a-z][a-z0-9_]*", name):
        return name
    plain = name.strip().lower()
    meant = next((library for library in (AUTO, *BACKENDS) if library in plain), None)
    raise StrettoError(
        f"is {name!r}, must be auto or one communication library: {', '.join(BACKENDS)} or a plug-in's",
        hint=f"did you mean {meant}?" if meant else None,
    )
