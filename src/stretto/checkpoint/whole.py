"""A checkpoint's model as full tensors in one process, whatever layout wrote it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from stretto.checkpoint.load import Loaded, load, tensor_index
from stretto.cost.record import shape_from_record
from stretto.cost.shape import ModelShape
from stretto.errors import StrettoError
from stretto.parallel.placed import Placed

MODEL = "model."  # first part of the names of parameters in a checkpoint


def read_whole(path: str | Path, prefix: str = MODEL) -> tuple[dict[str, Tensor], Loaded]:
    """All tensors whose names begin with `prefix`, without it, on the CPU in their stored dtype.

    Raises:
        StrettoError: no checkpoint there, a damaged one, or nothing of that name in it.
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
    """The sizes of the model, from the checkpoint's `meta["model"]`: the fields of a ModelShape.

    Raises:
        StrettoError: it says nothing of the kind.
    """
    sizes = loaded.meta.get("model")
    try:
        return shape_from_record(sizes) if isinstance(sizes, dict) else _no_shape(path)
    except TypeError:
        return _no_shape(path)


def _no_shape(path: str | Path) -> ModelShape:
    raise StrettoError(
        f"checkpoint {path} does not say the sizes of its model",
        hint="models of your own have no counterpart at Hugging Face; read the tensors with `read_whole`",
    )
