"""Export and import low-rank adapters in `peft`'s files: adapter_config.json and
adapter_model.safetensors.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stretto.engine.checkpoint.huggingface.folder import check_links, read_json, write_json
from stretto.engine.checkpoint.read import StoredTensors, shape_of
from stretto.engine.models.peft import from_peft, to_peft
from stretto.errors import StrettoError
from stretto.job.lora import LoraShape, is_adapter
from stretto.job.shape import ModelShape

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def export_adapters(path: str | Path, out: str | Path, dtype: torch.dtype | None = None) -> list[Path]:
    """Write the adapters of a checkpoint so that `PeftModel.from_pretrained(base, out)` loads them.

    Args:
        dtype: dtype of the weights, by default that of the checkpoint.

    Returns:
        The files written.

    Raises:
        StrettoError: the checkpoint is damaged or has no adapters, `transformers` has no such base model, or
            the folder already has an export.
    """
    out = Path(out)
    if taken := [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if (out / name).exists()]:
        raise StrettoError(f"{out} already holds {taken[0]}", hint="export to a new folder")
    with StoredTensors(path) as stored:
        shape = shape_of(path, stored.meta)
        if shape.lora is None:
            raise StrettoError(f"checkpoint {path} has no adapters", hint="leave out --adapters")
        weights = {name: stored.read(name) for name in stored.saved if is_adapter(name)}
        config, tensors = to_peft(shape, weights)
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (t if dtype is None else t.to(dtype)).contiguous().clone() for name, t in tensors.items()
    }
    save_file(tensors, out / ADAPTER_WEIGHTS, {"format": "pt"})
    write_json(out / ADAPTER_CONFIG, config)
    return [out / ADAPTER_WEIGHTS, out / ADAPTER_CONFIG]


def read_adapters(folder: Path, base: ModelShape) -> tuple[LoraShape, dict[str, Tensor]]:
    """Return the adapters in a folder, and their weights by the plain model's names.

    Raises:
        StrettoError: files are missing or damaged, or the adapters belong to another model than `base`.
    """
    check_links(folder)
    config = read_json(folder, ADAPTER_CONFIG)
    try:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except Exception as error:  # errors of the library and of the system
        raise StrettoError(
            f"cannot read {folder / ADAPTER_WEIGHTS}: {error}",
            hint="peft writes it to the folder of the config",
        ) from None
    return from_peft(config, tensors, base)
