"""Keeps an exponential moving average of the weights, and writes it beside each checkpoint as one more.

`stretto evaluate RUN/ema/step-00000100` and `stretto generate` take it as any checkpoint, in any layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stretto.engine.checkpoint.folder import is_checkpoint
from stretto.engine.checkpoint.index import MODEL, OPTIM
from stretto.engine.checkpoint.load import load
from stretto.engine.checkpoint.save import save
from stretto.engine.checkpoint.shards import Tensors
from stretto.run.config.section import plain_section
from stretto.run.train.hooks import HookedRun
from stretto.run.train.language_task import LanguageRun
from stretto.run.train.rank_model import tensors_of


class WeightsEMA:
    """Each rank averages what its optimiser updates: whole parameters, or shards of them."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.averages: Tensors = {}

    def on_start(self, run: HookedRun) -> None:
        weights = self.weights(run)
        self.averages = {name: (tensor.clone(), place) for name, (tensor, place) in weights.items()}
        if is_checkpoint(saved := self.path(run)):  # of the session before
            load(saved, self.averages, ignore=[OPTIM])

    def on_step_end(self, run: HookedRun, record: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, (weight, _) in self.weights(run).items():
                self.averages[name][0].lerp_(weight, 1 - self.decay)

    def on_checkpoint(self, run: HookedRun, path: Path) -> None:
        assert isinstance(run.task, LanguageRun)
        meta = {**run.task.checkpoint(run.progress).meta, "config": plain_section(run.config)}
        save(run.folder / "ema", run.progress.step, self.averages, meta)

    def weights(self, run: HookedRun) -> Tensors:
        assert isinstance(run.task, LanguageRun)
        return {name: each for name, each in tensors_of(run.task.model).items() if name.startswith(MODEL)}

    def path(self, run: HookedRun) -> Path:
        return run.folder / "ema" / f"step-{run.step:08d}"
