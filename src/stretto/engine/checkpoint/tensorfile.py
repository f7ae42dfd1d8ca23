"""Writing a safetensors file tensor by tensor, so that host memory holds one tensor of a device at a time.

The format (github.com/huggingface/safetensors): length of the header as 8 bytes, the header as JSON, the
bytes of all tensors. Reading is the safetensors library's, which checks the header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from stretto.engine.checkpoint.files import PRIVATE, CheckedWriter, FileEntry, dump_json
from stretto.engine.checkpoint.index import DTYPES


@dataclass(frozen=True)
class Entry:
    """One tensor to write: `get` gives it when its turn comes, on any device and with any strides; or its
    rows, some at a time.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    get: Callable[[], Tensor | Iterable[Tensor]]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype][1]


def write_tensors(
    path: Path, entries: Sequence[Entry], notes: Mapping[str, str] | None = None, mode: int = PRIVATE
) -> FileEntry:
    """Write a new durable safetensors file, with `notes` in its header; keys must differ."""
    # widest first, so that every tensor starts at a multiple of its own element size
    ordered = sorted(entries, key=lambda e: -DTYPES[e.dtype][1])
    header: dict[str, Mapping[str, object]] = {"__metadata__": notes} if notes else {}
    start = 0
    for entry in ordered:
        assert entry.key not in header, f"{entry.key} is there twice"
        place = {"dtype": DTYPES[entry.dtype][0], "shape": list(entry.shape)}
        header[entry.key] = {**place, "data_offsets": [start, start + entry.bytes]}
        start += entry.bytes
    text = dump_json(header)
    text += b" " * (-len(text) % 8)
    with CheckedWriter(path, mode) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in ordered:
            data = entry.get()
            for part in (data,) if isinstance(data, Tensor) else data:
                file.write(as_bytes(part))
        return file.close()


def as_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements in order, as bytes."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
