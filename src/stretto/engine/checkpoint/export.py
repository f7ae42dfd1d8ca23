"""Checkpoints to and from Hugging Face's folders of config.json and safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stretto.engine.checkpoint.files import MAX_JSON, safe_name, size_text
from stretto.engine.checkpoint.folder import checkpoints
from stretto.engine.checkpoint.load import Loaded, load, tensor_index
from stretto.engine.checkpoint.save import save
from stretto.engine.checkpoint.storage import Entry, dtype_name, write_tensors
from stretto.engine.models.huggingface import (
    config_to_huggingface,
    from_huggingface,
    shape_from_huggingface,
    to_huggingface,
)
from stretto.engine.parallel.fragment import Placed
from stretto.errors import StrettoError
from stretto.spec.shape import ModelShape, shape_from_record, shape_to_record

MODEL = "model."  # first part of the names of parameters in a checkpoint


def read_whole(path: str | Path, prefix: str = MODEL) -> tuple[dict[str, Tensor], Loaded]:
    """All tensors whose names begin with `prefix`, by their names without it, on the CPU in their stored
    dtype.

    Raises:
        StrettoError: no checkpoint there, a damaged one, or one without such tensors.
    """
    index = tensor_index(path)
    whole = {
        name: torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
        for name, saved in index.items()
        if name.startswith(prefix)
    }
    if not whole:
        raise StrettoError(f"checkpoint {path} holds no tensors named {prefix}...")
    places = {name: (tensor, Placed.whole(name, tuple(tensor.shape))) for name, tensor in whole.items()}
    loaded = load(path, places, ignore=[name for name in index if name not in whole])
    return {name.removeprefix(prefix): tensor for name, tensor in whole.items()}, loaded


def shape_of(path: str | Path, loaded: Loaded) -> ModelShape:
    """The model's shape, from the checkpoint's `meta["model"]`.

    Raises:
        StrettoError: it has none.
    """
    sizes = loaded.meta.get("model")
    try:
        return shape_from_record(sizes) if isinstance(sizes, dict) else _no_shape(path)
    except TypeError:
        return _no_shape(path)


def _no_shape(path: str | Path) -> ModelShape:
    raise StrettoError(
        f"checkpoint {path} has no sizes of its model",
        hint="only this library's models can be exported; read other tensors with `read_whole`",
    )


CONFIG = "config.json"
WEIGHTS = "model.safetensors"
MAP = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # a larger model is written as several files, as by transformers
PUBLIC = 0o666  # file mode before the umask: exports are meant to be shared


def export_huggingface(path: str | Path, out: str | Path, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write the model of a checkpoint so that `transformers` loads it with `from_pretrained(out)`. The whole
    model is held in memory. Neither optimiser nor tokeniser is written.

    Returns:
        The files written.

    Raises:
        StrettoError: a damaged checkpoint, a model without a counterpart there, or a folder with an export.
    """
    out = Path(out)
    if taken := [name for name in (CONFIG, WEIGHTS, MAP) if (out / name).exists()]:
        raise StrettoError(f"{out} already holds {taken[0]}", hint="export to a new folder")
    weights, loaded = read_whole(path)
    shape = shape_of(path, loaded)
    theirs = to_huggingface(weights, shape)
    config = config_to_huggingface(shape) | {"dtype": dtype_name(next(iter(theirs.values())).dtype)}
    out.mkdir(parents=True, exist_ok=True)
    parts = list(_parts(theirs, shard_bytes))
    names = [
        WEIGHTS if len(parts) == 1 else f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        for i in range(1, len(parts) + 1)
    ]
    for name, part in zip(names, parts, strict=True):
        entries = [Entry(key, dtype_name(t.dtype), tuple(t.shape), lambda t=t: t) for key, t in part.items()]
        write_tensors(out / name, entries, {"format": "pt"}, PUBLIC)
    if len(parts) > 1:
        weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        total = sum(t.nbytes for t in theirs.values())
        _write_json(out / MAP, {"metadata": {"total_size": total}, "weight_map": weight_map})
        names.append(MAP)
    _write_json(out / CONFIG, config)
    return [out / name for name in [*names, CONFIG]]


def import_huggingface(source: str | Path, run: str | Path) -> Path:
    """Make `run`/checkpoints/step-00000000 from a folder with config.json and safetensors files. It holds
    only the model, in the files' dtype; its `meta` has `model` and `imported`.

    Raises:
        StrettoError: not such a folder, a model that cannot be built here, or a run that has checkpoints.
    """
    source, folder = Path(source), Path(run) / "checkpoints"
    if checkpoints(folder):
        raise StrettoError(f"{folder} already holds checkpoints", hint="import into a new run folder")
    shape = shape_from_huggingface(_read_json(source, CONFIG))
    weights = from_huggingface(_read_weights(source), shape)
    tensors = {
        MODEL + name: (tensor, Placed.whole(MODEL + name, tuple(tensor.shape)))
        for name, tensor in weights.items()
    }
    meta = {"model": shape_to_record(shape), "imported": source.resolve().name}
    return save(folder, 0, tensors, meta)


def _parts(tensors: dict[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def _read_weights(source: Path) -> dict[str, Tensor]:
    names = [WEIGHTS]
    if not (source / WEIGHTS).is_file() and (source / MAP).is_file():
        weight_map = _read_json(source, MAP).get("weight_map")
        if not isinstance(weight_map, dict):
            raise StrettoError(f"{source / MAP} has no weight_map")
        names = sorted({str(name) for name in cast("dict[str, Any]", weight_map).values()})
    weights: dict[str, Tensor] = {}
    for name in names:
        if not safe_name(name):
            raise StrettoError(f"{source / MAP} names the file {name!r}", hint="a plain name in this folder")
        weights |= _read_tensors(source / name)
    return weights


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise StrettoError(
            f"{path} is not there",
            hint="only safetensors files are read: formats that hold Python objects run code when loaded",
        )
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise StrettoError(f"{path} is damaged: {error}", hint="fetch it again") from None


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        raise StrettoError(
            f"{path} is not there", hint="name a folder with config.json and safetensors files"
        )
    if (size := path.stat().st_size) > MAX_JSON:
        raise StrettoError(f"{path} has {size_text(size)}, too much for a {name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise StrettoError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise StrettoError(f"{path} is not an object")
    return cast("dict[str, Any]", value)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
