"""A simulated GPU under torch's CUDA build: libraries of C in place of CUDA's, loaded before torch.

`driver.c` says what it does. torch's own allocator, streams and launches run on it; kernels compute nothing.
Without torch, which must be imported later.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from stretto.errors import StrettoError

DEVICE_BYTES = int(79.11 * 2**30)  # as the driver of an H100 80 GB reports it
CONTEXT_BYTES = 520 * 2**20  # of the driver's context and torch's kernels, estimated
_FOLDER = Path(__file__).parent
_LIBRARIES = {"nvml.c": "libnvidia-ml.so.1", "driver.c": "libcuda.so.1"}

_COUNTED = ("kernels", "graphs", "products", "copies_to_host", "waits", "messages")


class DeviceCounts(ctypes.Structure):
    """What the device was asked to do so far; `since` gives the difference of two."""

    kernels: int
    graphs: int
    products: int
    copies_to_host: int
    waits: int
    messages: int
    _fields_ = tuple((name, ctypes.c_uint64) for name in _COUNTED)

    def since(self, before: DeviceCounts) -> dict[str, int]:
        """Return the counts after `before`, by name."""
        return {name: getattr(self, name) - getattr(before, name) for name in _COUNTED}


class SimulatedGpu:
    """The libraries in this process: those that its environment names (`preloaded`), or loaded now.

    Args:
        device_bytes: memory of the device; None leaves it as it is, an H100's unless set before.
        behind: events complete only when the host waits, as on a device that lags behind the host.

    Raises:
        StrettoError: torch is imported already, is no CUDA build, or the libraries cannot be compiled here.
    """

    def __init__(self, device_bytes: int | None = None, *, behind: bool = False) -> None:
        self._driver = ctypes.CDLL(None)
        if not hasattr(self._driver, "simulated_configure"):
            if "torch" in sys.modules:
                raise StrettoError(
                    "the simulated GPU must be loaded before torch", hint="start it in a process of its own"
                )
            with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
                for library in _compiled(Path(folder)):
                    self._driver = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._driver.simulated_configure(
            ctypes.c_size_t(device_bytes or 0), ctypes.c_size_t(CONTEXT_BYTES), int(behind)
        )

    def counts(self) -> DeviceCounts:
        """Return what the device was asked to do so far."""
        counts = DeviceCounts()
        self._driver.simulated_counts(ctypes.byref(counts))
        return counts

    def pageable(self) -> tuple[int, int]:
        """Return the copies to the device from memory that is not page-locked so far, and the other way."""
        copies = (ctypes.c_uint64 * 2)()
        self._driver.simulated_pageable(copies)
        return copies[0], copies[1]

    def kernels(self) -> dict[str, int]:
        """Return the launches of each kernel so far, by its mangled name."""
        with tempfile.NamedTemporaryFile("r", encoding="utf-8") as file:
            self._driver.simulated_write_kernels(file.name.encode())
            rows = (line.split(maxsplit=1) for line in file)
            return {name.strip(): int(launches) for launches, name in rows}


def preloaded(folder: Path, gpus: int = 1, device_bytes: int = DEVICE_BYTES) -> dict[str, str]:
    """Return the variables of the environment of processes that are to see simulated GPUs, of which each
    process uses one.

    Args:
        folder: where the libraries are compiled to, and stay while such processes start.
        gpus: their number.
        device_bytes: memory of each.

    Raises:
        StrettoError: as `SimulatedGpu`.
    """
    libraries = _compiled(folder.resolve())
    return {
        "LD_PRELOAD": " ".join(map(str, libraries)),
        "SIMULATED_GPUS": str(gpus),
        "SIMULATED_GPU_BYTES": str(device_bytes),
        "TRITON_LIBCUDA_PATH": str(folder.resolve()),
    }


def _compiled(folder: Path) -> list[Path]:
    libraries = [folder / name for name in _LIBRARIES.values()]
    for source, library in zip(_LIBRARIES, libraries, strict=True):
        _compile(_FOLDER / source, library)
    return libraries


def _compile(source: Path, library: Path) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise StrettoError("the simulated GPU needs a C compiler", hint="install gcc, or set CC")
    includes = [f"-I{path}" for path in (_FOLDER, _headers())]
    strict = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    command = [compiler, "-O1", "-shared", "-fPIC", *strict, *includes, f"-Wl,-soname,{library.name}"]
    ran = subprocess.run(
        [*command, "-o", str(library), str(source), "-ldl", "-lpthread"], capture_output=True, text=True
    )
    if ran.returncode:
        raise StrettoError(f"{compiler} cannot compile the simulated GPU: {ran.stderr[-1000:].strip()}")


def _headers() -> Path:
    """Return the folder of the headers of the runtime that torch uses."""
    torch = find_spec("torch")
    if torch is None or not Path(torch.origin or "").parent.joinpath("lib", "libtorch_cuda.so").exists():
        raise StrettoError(
            "the simulated GPU needs torch's CUDA build, and this environment has none",
            hint="in an environment of its own: pip install 'torch===2.13.0'",
        )
    nvidia = find_spec("nvidia")
    packages = [] if nvidia is None else map(Path, nvidia.submodule_search_locations or ())
    for folder in (path for package in packages for path in sorted(package.glob("cu*/include"))):
        if folder.joinpath("cuda_runtime_api.h").exists():
            return folder
    raise StrettoError(
        "the headers of the CUDA runtime, which pip installs with torch, are not there",
        hint="pip install nvidia-cuda-runtime",
    )
