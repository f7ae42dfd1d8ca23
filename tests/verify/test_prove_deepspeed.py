"""DeepSpeed's engine, where it is installed: ZeRO's stages, in float32, as they keep their masters."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plain_models import batch, loss, plain, samples
from ranks import on_ranks
from stretto.prove import Report, prove

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def by_engine(stage: int) -> Report:
    import deepspeed  # pyright: ignore

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }

    def build(model: nn.Module) -> nn.Module:
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return deepspeed.initialize(model=model, optimizer=adamw, config=settings)[0]

    def step(engine: Any, _: Any, batch: Any) -> Tensor:
        mean = loss(engine, batch)
        engine.backward(mean)
        engine.step()
        return mean

    return prove(plain, build, batch(), step, loss=loss, share=samples, dtype=torch.float32)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_of_zero(stage: int) -> None:
    report, _ = on_ranks(2, by_engine, stage)
    assert report.equal, str(report)
    for name in ("loss", "gradients", "weights"):
        assert report[name].error is not None
        assert report[name].error < report[name].bound < 1e-4
    assert report["states"].error is None
