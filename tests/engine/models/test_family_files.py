"""Files of every family go through a checkpoint and come back with the same names, sizes, types and bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_models import CASES, their_config, their_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from stretto.engine.checkpoint.huggingface.exporting import export_huggingface
from stretto.engine.checkpoint.huggingface.importing import import_huggingface
from stretto.job.huggingface import differences, shape_from_huggingface


def require_built(name: str) -> None:
    if unsupported_parts := shape_from_huggingface(their_config(name).to_dict()).unsupported_parts:
        pytest.skip(f"not built yet: {', '.join(unsupported_parts)}")


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", CASES)
def test_files_of_every_family_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    require_built(name)
    their_model(their_config(name), torch.bfloat16).save_pretrained(tmp_path / "in", max_shard_size="60KB")
    path = next((tmp_path / "in").glob("*.safetensors"))
    weights = {key: tensor.clone() for key, tensor in load_file(path).items()}
    first = next(iter(weights))
    save_file(
        {**weights, first: weights[first].float()}, path, {"format": "pt"}
    )  # published files mix types too
    checkpoint = import_huggingface(tmp_path / "in", tmp_path / "run")
    export_huggingface(checkpoint, tmp_path / "out", 50_000)
    before, after = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].shape == tensor.shape, key
        # a type of its own survives where it is not stacked with others of another type
        assert torch.equal(after[key].float(), tensor.float()), key
        assert after[key].dtype == tensor.dtype or after[key].dtype == torch.float32, key
    assert sum(after[key].dtype != tensor.dtype for key, tensor in before.items()) < len(before) // 2
    shapes = [
        shape_from_huggingface(json.loads((tmp_path / folder / "config.json").read_text()))
        for folder in ("in", "out")
    ]
    assert not differences(*shapes)
