"""Read a folder of config.json and safetensors files: first the list of tensors, then single tensors."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stretto.engine.checkpoint.files import MAX_JSON, safe_name, size_text
from stretto.engine.checkpoint.index import DTYPES
from stretto.errors import StrettoError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
MAP = "model.safetensors.index.json"
_TYPES: dict[str, torch.dtype] = {short: getattr(torch, name) for name, (short, _) in DTYPES.items()}


@dataclass(frozen=True)
class PublishedTensor:
    """The description of a tensor in a file's header."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class PublishedWeights:
    """The tensors of all safetensors files of a folder.

    The constructor reads the headers, with names, dtypes and shapes; `read` maps a tensor.

    Raises:
        StrettoError: a file is missing or damaged, or the index does not match the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, PublishedTensor] = {}
        self._files: dict[str, Any] = {}
        self._open = ExitStack()
        placed = _weight_map(folder)
        try:
            for name in sorted(set(placed.values())) or [WEIGHTS]:
                self._add(name)
            for name, file in placed.items():
                if self.tensors.get(name) is None or self.tensors[name].file != file:
                    raise StrettoError(
                        f"{folder / MAP} lists {name} in {file}, which does not contain it",
                        hint="fetch the folder again",
                    )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PublishedWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files; tensors that were read stay valid."""
        self._files.clear()
        self._open.close()

    def read(self, name: str) -> Tensor:
        """Return a tensor as a view of the mapped file, which must not be modified."""
        file = self.tensors[name].file
        try:
            return cast(Tensor, self._files[file].get_tensor(name))
        except SafetensorError as error:
            raise _damaged(self.folder / file, error) from None

    def _add(self, name: str) -> None:
        path = self.folder / name
        if not path.is_file():
            raise StrettoError(
                f"{path} does not exist",
                hint="only safetensors files are read: formats with Python objects run code when loaded",
            )
        try:
            file: Any = self._open.enter_context(safe_open(path, framework="pt"))
            self._files[name] = file
            for key in file.keys():  # noqa: SIM118
                view = file.get_slice(key)
                if key in self.tensors:
                    raise StrettoError(f"{key} is in {self.tensors[key].file} and in {name}")
                kind = view.get_dtype()
                if kind not in _TYPES:
                    raise StrettoError(f"{path}: {key} has type {kind}, which torch does not have")
                self.tensors[key] = PublishedTensor(name, _TYPES[kind], tuple(view.get_shape()))
        except SafetensorError as error:
            raise _damaged(path, error) from None
        except OSError as error:
            raise StrettoError(f"{path} cannot be read: {error.strerror or error}") from None


def check_links(folder: Path) -> None:
    """Check that no link in the folder of a published model, or in a subfolder, leads out of it.

    Only Hugging Face's cache may: its `snapshots` link to files of the sibling folder `blobs`.

    Raises:
        StrettoError: a link leads out of the folder.
    """
    inside = folder.resolve()
    blobs = inside.parent.parent / "blobs" if inside.parent.name == "snapshots" else inside
    for path in (path for pattern in ("*", "*/*") for path in sorted(folder.glob(pattern))):
        if not path.is_symlink():
            continue
        try:
            target = path.resolve()
        except (OSError, RuntimeError):  # links in a circle
            target = Path("/")
        if not target.is_relative_to(inside) and target.parent != blobs:
            raise StrettoError(
                f"{path} is a link to {path.readlink()}, out of the folder",
                hint=f"put the file itself there, as `hf download MODEL --local-dir {folder.name}` does",
            )


def _damaged(path: Path, error: Exception) -> StrettoError:
    return StrettoError(f"{path} is damaged: {error}", hint="fetch it again")


def _weight_map(folder: Path) -> dict[str, str]:
    """Return the file of each tensor from the folder's index; empty if all are in one file."""
    if (folder / WEIGHTS).is_file() or not (folder / MAP).is_file():
        return {}
    placed = read_json(folder, MAP).get("weight_map")
    if not isinstance(placed, dict):
        raise StrettoError(f"{folder / MAP} has no weight_map")
    for file in cast("dict[str, Any]", placed).values():
        if not isinstance(file, str) or not safe_name(file):
            raise StrettoError(f"{folder / MAP} names the file {file!r}", hint="a plain name in this folder")
    return cast("dict[str, str]", placed)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object of a file in the folder.

    Raises:
        StrettoError: the file does not exist, is too large, or is not a JSON object.
    """
    path = folder / name
    if not path.is_file():
        hint = "name a folder with config.json and safetensors files"
        if not folder.exists() and len(folder.parts) == 2 and not folder.is_absolute():
            hint = f"to fetch a published model first: hf download {folder} --local-dir {folder.name}"
        raise StrettoError(f"{path} does not exist", hint=hint)
    if (size := path.stat().st_size) > MAX_JSON:
        raise StrettoError(f"{path} has {size_text(size)}, too large for a {name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise StrettoError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise StrettoError(f"{path} is not an object")
    return cast("dict[str, Any]", value)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object in the format of Hugging Face's libraries."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
