"""A checkpoint of ours to one that torchtitan resumes from, tensor by tensor, written by torch's own
torch.distributed.checkpoint.

Everything torchtitan loads is there but the place in its data, which is another's: it starts with
`checkpoint.exclude_from_loading` naming `dataloader`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from stretto.engine.checkpoint.dcp.groups import MOMENTS
from stretto.engine.checkpoint.dcp.importing import Progress
from stretto.engine.checkpoint.dcp.titan import (
    HEADS,
    VERSIONS,
    Part,
    Rule,
    correction,
    is_trained,
    rules,
    trained,
)
from stretto.engine.checkpoint.files import check_room, remove
from stretto.engine.checkpoint.manifest import read_manifest
from stretto.engine.checkpoint.read import MODEL, StoredTensors, shape_of
from stretto.engine.checkpoint.shards import Streamed
from stretto.engine.checkpoint.storage import run_collective
from stretto.engine.optim.base import decays
from stretto.engine.optim.rate import Rate
from stretto.errors import StrettoError
from stretto.spec.optimiser import Optimiser, RateSchedule
from stretto.spec.shape import ModelShape

_OPTIM = "optim."


@dataclass(frozen=True, kw_only=True)
class DcpExport:
    """What an export wrote.

    Attributes:
        step: of training, which the optimiser's states go with; None: the model alone.
        notes: what was left out, a sentence each.
    """

    files: list[Path]
    step: int | None
    notes: list[str]


def export_dcp(
    path: str | Path, out: str | Path, version: str = VERSIONS[0], progress: Progress | None = None
) -> DcpExport:
    """Write a checkpoint for torchtitan: the model, and where the optimiser is AdamW its states, settings and
    the step. One of the tensors at a time is in memory.

    Args:
        version: of torchtitan, one of VERSIONS: names and the optimiser's states differ.
        progress: called with the bytes written so far, and with all that there are.

    Raises:
        StrettoError: a damaged checkpoint, a model that torchtitan does not have, a folder with files, or no
            room.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StrettoError(f"{out} is not empty", hint="export to a new folder")
    manifest = read_manifest(path)
    shape = shape_of(path, manifest.meta)
    mapping = list(rules(shape))
    notes = list[str]()
    with StoredTensors(path, "") as stored:
        known = {MODEL + rule.ours for rule in mapping}
        if extra := sorted(name for name in stored.saved if name.startswith(MODEL) and name not in known):
            raise StrettoError(
                f"{extra[0]}, one of {len(extra)} tensors that {path} has beside its model, has no "
                "counterpart in torchtitan",
                hint="export for transformers or PEFT instead, without --format dcp",
            )
        source = _Source(stored, progress)
        state = _weights(source, mapping, shape, version)
        step = None
        if optimiser := _optimiser(manifest.meta, stored, mapping, notes):
            step = manifest.step
            updates = int(manifest.meta.get("updates") or step)
            state["optimizer"] = _states(source, mapping, version, updates)
            state["optimizer"] |= _groups(mapping, version, optimiser, updates, _steps(manifest.meta))
            state["lr_scheduler"] = _schedule(optimiser.lr, updates, version)
            state["train_state"] = {"step": step, "ntokens_seen": int(manifest.meta.get("tokens") or 0)}
        check_room(out, source.total, f"the checkpoint {path}")
        existed = out.exists()
        try:
            _write(state, out)
        except BaseException:
            for child in list(out.iterdir()) if out.is_dir() else ():
                remove(child)
            if out.is_dir() and not existed:
                out.rmdir()
            raise
    names = sorted(child.name for child in out.iterdir())
    return DcpExport(files=[out / name for name in names], step=step, notes=notes)


def _write(state: dict[str, Any], out: Path) -> None:
    writer = _StreamingWriter(out)
    run_collective(lambda: dcp_save(state, storage_writer=writer, planner=_StreamingPlanner(), no_dist=True))


class _StreamingWriter(FileSystemWriter):
    """torch's writer, which itself keeps every tensor until its file is complete (torch 2.13)."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this process: objects first, as torch does, then the tensors one by one."""
        name = f"{plan.storage_data.prefix}0.distcp"
        results = list[WriteResult]()
        with (Path(self.path) / name).open("wb") as stream:
            for item in sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO):
                offset = stream.tell()
                data = planner.resolve_data(item)
                if isinstance(data, Tensor):
                    alone = data.untyped_storage().nbytes() == data.nbytes
                    torch.save(data if alone else data.clone(), stream)
                else:
                    stream.write(data.getbuffer())
                length = stream.tell() - offset
                place = _StorageInfo(name, offset, length)
                results.append(WriteResult(item.index, length, place))
            stream.flush()
            os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class _StreamingPlanner(DefaultSavePlanner):
    """torch's planner, which fetches a streamed tensor only when it is written."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return (
            value.__get_tensor_shard__(index) if isinstance(value, Streamed) else super().lookup_object(index)
        )


class _Source:
    """Their tensors out of ours. They are fetched in the order of ours, so that each of ours is read once."""

    def __init__(self, stored: StoredTensors, progress: Progress | None) -> None:
        self.stored = stored
        self._progress = progress
        self.total = self._done = 0
        self._last: tuple[str, Tensor | None] = ("", None)

    def part(self, name: str, part: Part) -> Streamed:
        """One of theirs, made of ours of that name."""
        dtype: torch.dtype = getattr(torch, self.stored.saved[name].dtype)
        self.total += prod(part.shape) * dtype.itemsize
        return Streamed(
            part.shape, dtype, {(0,) * len(part.shape): (part.shape, lambda: self._get(name, part, dtype))}
        )

    def _get(self, name: str, part: Part, dtype: torch.dtype) -> Tensor:
        if self._last[0] != name:
            self._last = ("", None)  # free the one before first
            self._last = (name, self.stored.read(name))
        ours = self._last[1]
        assert ours is not None
        if part.in_order:
            theirs = part.views[0][0](ours).contiguous()
        else:
            theirs = torch.empty(part.shape, dtype=dtype)
            for mine, other in part.views:
                other(theirs).copy_(mine(ours))
        self._done += theirs.nbytes
        if self._progress is not None:
            self._progress(self._done, self.total)
        return theirs


def _weights(source: _Source, mapping: Sequence[Rule], shape: ModelShape, version: str) -> dict[str, Any]:
    """The model's state: parameters, a tied head under both names, and the router's corrections."""
    state: dict[str, Any] = {}
    for rule in mapping:
        for part in rule.parts:
            state[part.name(version)] = source.part(MODEL + rule.ours, part)
            if shape.tied and rule.ours == "embed.tok.weight":
                state[HEADS[VERSIONS.index(version)]] = source.part(MODEL + rule.ours, part)
    for i in range(shape.layers):
        moe = shape.block(i).moe
        if moe is not None and (name := correction(i, version)) not in state:
            state[name] = torch.zeros(moe.experts)
    return state


def _states(source: _Source, mapping: Sequence[Rule], version: str, updates: int) -> dict[str, Any]:
    """AdamW's states by the name of each parameter."""
    state: dict[str, Any] = {}
    for rule in mapping:
        for part in trained(rule, version):
            name = part.name(version)
            state[f"state.{name}.step"] = torch.tensor(float(updates))
        for moment in MOMENTS if is_trained(rule.ours) else ():
            for part in trained(rule, version):
                name = part.name(version)
                state[f"state.{name}.{moment}"] = source.part(f"{_OPTIM}{moment}.{rule.ours}", part)
    return state


def _groups(
    mapping: Sequence[Rule], version: str, optimiser: Optimiser, updates: int, steps: int | None
) -> dict[str, Any]:
    """AdamW's settings, once for every parameter, with the learning rate of the next update."""
    rate = optimiser.lr if steps is None else Rate.of(optimiser, steps)(updates)
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
        decay = optimiser.weight_decay if decays(rule.ours, rule.shape, optimiser.no_decay) else 0.0
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


def _optimiser(
    meta: Mapping[str, Any], stored: StoredTensors, mapping: Sequence[Rule], notes: list[str]
) -> Optimiser | None:
    """The optimiser as the run's config has it, if it is AdamW and its states are all there."""
    config = meta.get("config")
    section: Mapping[str, Any] = config.get("optim", {}) if isinstance(config, Mapping) else {}
    name = section.get("name", "adamw")
    wanted = [
        f"{_OPTIM}{moment}.{rule.ours}" for rule in mapping for moment in MOMENTS if is_trained(rule.ours)
    ]
    if not any(each.startswith(_OPTIM) for each in stored.saved):
        notes.append("the checkpoint has no states of an optimiser: the model alone was written")
    elif name != "adamw":
        notes.append(f"the states of {name} are left out: torchtitan's optimiser is AdamW")
    elif any(each not in stored.saved for each in wanted):
        notes.append("the optimiser's states are left out: parameters that were not trained have none")
    else:
        known = {field.name for field in fields(Optimiser)}
        values = {key: value for key, value in section.items() if key in known}
        rate = RateSchedule(**values.pop("rate", {}))
        values["betas"] = tuple(values.get("betas", Optimiser.betas))
        values["no_decay"] = tuple(values.get("no_decay", ()))
        return Optimiser(**values, rate=rate)
    return None


def _steps(meta: Mapping[str, Any]) -> int | None:
    """Updates of the whole run, on which the learning rate depends; None where the config is not there."""
    config: Any = meta.get("config")
    train: Any = config.get("train") if isinstance(config, Mapping) else None
    steps: Any = train.get("steps") if isinstance(train, Mapping) else None
    return steps if isinstance(steps, int) else None
