"""A checkpoint of ours to one that torchtitan resumes from, tensor by tensor, written by torch's own
torch.distributed.checkpoint.

Everything torchtitan loads is there but the place in its data, which is another's: it starts with
`checkpoint.exclude_from_loading` naming `dataloader`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from stretto.engine.checkpoint.index import MODEL, OPTIM
from stretto.engine.checkpoint.read import StoredTensors
from stretto.engine.checkpoint.shards import Streamed
from stretto.engine.optim.base import decays
from stretto.engine.optim.rate import LearningRate
from stretto.job.optimiser import Optimiser
from stretto.job.shape import ModelShape
from stretto_interop.checkpoints.dcp.streaming import (
    ExportedCheckpoint,
    open_export,
    saved_optimiser,
    steps_of,
    write_whole,
)
from stretto_interop.checkpoints.dcp.titan import (
    HEADS,
    MOMENTS,
    VERSIONS,
    TitanRule,
    TitanTensor,
    correction,
    is_trained,
    rules,
    trained,
)
from stretto_interop.checkpoints.dcp.written import Progress


def export_dcp(
    path: str | Path, out: str | Path, version: str = VERSIONS[0], progress: Progress | None = None
) -> ExportedCheckpoint:
    """Write a checkpoint for torchtitan: the model, and where the optimiser is AdamW its states, settings and
    the step. One of the tensors at a time is in memory.

    Args:
        version: of torchtitan, one of VERSIONS: names and the optimiser's states differ.
        progress: called with the bytes written so far, and with all that there are.

    Raises:
        StrettoError: a damaged checkpoint, a model that torchtitan does not have, a folder with files, or no
            room.
    """
    out, notes = Path(out), list[str]()
    with open_export(path, out, rules, framework="torchtitan", form="dcp") as opened:
        manifest, mapping = opened.manifest, opened.mapping
        stored = opened.stored
        source = _Source(stored, progress)
        state = _weights(source, mapping, opened.shape, version)
        step, states = None, [rule.parameter for rule in mapping if is_trained(rule.parameter)]
        if optimiser := saved_optimiser(manifest.meta, stored, states, notes):
            step = manifest.step
            updates = int(manifest.meta.get("updates") or step)
            state["optimizer"] = _states(source, mapping, version, updates)
            state["optimizer"] |= _groups(mapping, version, optimiser, updates, steps_of(manifest.meta))
            state["lr_scheduler"] = _schedule(optimiser.lr, updates, version)
            state["train_state"] = {"step": step, "ntokens_seen": int(manifest.meta.get("tokens") or 0)}
        files = write_whole(state, out, source.total, path)
    return ExportedCheckpoint(files=files, step=step, notes=notes)


class _Source:
    """Their tensors out of ours. They are fetched in the order of ours, so that each of ours is read once."""

    def __init__(self, stored: StoredTensors, progress: Progress | None) -> None:
        self.stored = stored
        self._progress = progress
        self.total = self._done = 0
        self._last: tuple[str, Tensor | None] = ("", None)

    def part(self, name: str, part: TitanTensor) -> Streamed:
        """One of theirs, made of ours of that name."""
        dtype: torch.dtype = getattr(torch, self.stored.saved[name].dtype)
        self.total += prod(part.shape) * dtype.itemsize
        return Streamed(
            part.shape, dtype, {(0,) * len(part.shape): (part.shape, lambda: self._get(name, part, dtype))}
        )

    def _get(self, name: str, part: TitanTensor, dtype: torch.dtype) -> Tensor:
        if self._last[0] != name:
            self._last = ("", None)  # free the one before first
            self._last = (name, self.stored.read(name))
        stored = self._last[1]
        assert stored is not None
        if part.in_order:
            exported = part.views[0][0](stored).contiguous()
        else:
            exported = torch.empty(part.shape, dtype=dtype)
            for view, other in part.views:
                other(exported).copy_(view(stored))
        self._done += exported.nbytes
        if self._progress is not None:
            self._progress(self._done, self.total)
        return exported


def _weights(
    source: _Source, mapping: Sequence[TitanRule], shape: ModelShape, version: str
) -> dict[str, Any]:
    """The model's state: parameters, a tied head under both names, and the router's corrections."""
    state: dict[str, Any] = {}
    for rule in mapping:
        for part in rule.parts:
            state[part.name(version)] = source.part(MODEL + rule.parameter, part)
            if shape.tied and rule.parameter == "embed.tok.weight":
                state[HEADS[VERSIONS.index(version)]] = source.part(MODEL + rule.parameter, part)
    for i in range(shape.layers):
        moe = shape.block(i).moe
        if moe is not None and (name := correction(i, version)) not in state:
            state[name] = torch.zeros(moe.experts)
    return state


def _states(source: _Source, mapping: Sequence[TitanRule], version: str, updates: int) -> dict[str, Any]:
    """AdamW's states by the name of each parameter."""
    state: dict[str, Any] = {}
    for rule in mapping:
        for part in trained(rule, version):
            name = part.name(version)
            state[f"state.{name}.step"] = torch.tensor(float(updates))
        for moment in MOMENTS if is_trained(rule.parameter) else ():
            for part in trained(rule, version):
                name = part.name(version)
                state[f"state.{name}.{moment}"] = source.part(f"{OPTIM}{moment}.{rule.parameter}", part)
    return state


def _groups(
    mapping: Sequence[TitanRule], version: str, optimiser: Optimiser, updates: int, steps: int | None
) -> dict[str, Any]:
    """AdamW's settings, once for every parameter, with the learning rate of the next update."""
    rate = optimiser.lr if steps is None else LearningRate.of(optimiser, steps)(updates)
    adamw = torch.optim.AdamW(
        [torch.zeros(1)],
        lr=optimiser.lr,
        betas=optimiser.betas,
        eps=optimiser.eps,
        fused=True,  # torchtitan's default
        foreach=False,
    )
    group = {name: value for name, value in adamw.param_groups[0].items() if name != "params"}
    group |= {"lr": rate, "initial_lr": optimiser.lr}
    state: dict[str, Any] = {}
    for rule in mapping:
        decay = optimiser.weight_decay if decays(rule.parameter, rule.shape, optimiser.no_decay) else 0.0
        for part in trained(rule, version):
            prefix = f"param_groups.{part.name(version)}"
            state |= {f"{prefix}.{key}": value for key, value in {**group, "weight_decay": decay}.items()}
    return state


def _schedule(rate: float, updates: int, version: str) -> dict[str, Any]:
    """The state of torchtitan's learning-rate schedule: how often it was called."""
    if version == VERSIONS[0]:
        return {"last_epoch": updates}
    adamw = torch.optim.AdamW([torch.zeros(1)], lr=rate)
    ratio = cast("Callable[[int], float]", partial(float))  # of which torch keeps the attributes, none
    state = torch.optim.lr_scheduler.LambdaLR(adamw, ratio).state_dict()
    return {**state, "last_epoch": updates, "_step_count": updates + 1}
