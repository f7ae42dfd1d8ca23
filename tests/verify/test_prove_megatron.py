"""Megatron-core's tensor-parallel layers, where it is installed: they say themselves how they are split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from installed import installed
from plain_models import Block, batch, loss, plain, unclipped
from ranks import on_ranks
from stretto.prove import Report, prove

pytestmark = pytest.mark.skipif(not installed("megatron-core"), reason="megatron-core is not installed")


def linear(kind: str, inputs: int, outputs: int) -> nn.Module:
    from megatron.core.model_parallel_config import ModelParallelConfig  # pyright: ignore
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # pyright: ignore

    settings: dict[str, Any] = {
        "config": ModelParallelConfig(
            tensor_model_parallel_size=dist.get_world_size(),
            use_cpu_initialization=True,
            params_dtype=torch.float64,
        ),
        "init_method": nn.init.normal_,
        "bias": True,
        "skip_bias_add": False,
    }
    if kind == "column":
        return ColumnParallelLinear(inputs, outputs, gather_output=False, **settings)
    return RowParallelLinear(inputs, outputs, input_is_parallel=True, **settings)


class Megatron(nn.Module):
    """A block whose linear layers are Megatron's, with values of their own, which the proof loads over."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm = block.norm
        self.up = linear("column", block.up.in_features, block.up.out_features)
        self.down = linear("row", block.down.in_features, block.down.out_features)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.up(self.norm(x))
        return x + self.down(nn.functional.gelu(y))[0]


def by_megatron() -> Report:
    from megatron.core import parallel_state  # pyright: ignore

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())

    def build(model: Any) -> nn.Module:
        model.blocks = nn.ModuleList(map(Megatron, model.blocks))
        return model

    return prove(plain, build, batch(), unclipped, loss=loss, initial="load")


def test_its_column_and_row_parallel_layers() -> None:
    report, _ = on_ranks(2, by_megatron)
    assert report.equal, str(report)
    assert report["gradients"].error is not None
