"""A checkpoint of ours to a distributed checkpoint that Megatron-core loads (torch_dist), tensor by tensor.

The optimiser's states are whole, like their weights, under the names that each of Megatron's optimisers asks
for: without the distributed optimizer, and with it in the form `fully_reshardable`. Float32 weights that both
name differently are written once. What Megatron itself adds is there too: empty `_extra_state` objects of the
linear layers, and `common.pt` with arguments, the optimiser's groups and the course of the learning rate.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from stretto.engine.checkpoint.index import MODEL
from stretto.engine.checkpoint.read import StoredTensors
from stretto.engine.checkpoint.shards import Streamed
from stretto.engine.optim.rate import LearningRate
from stretto.job.optimiser import Optimiser
from stretto.job.shape import ModelShape
from stretto_interop.checkpoints.dcp.transfer import (
    MOMENTS,
    OPTIM,
    ExportedCheckpoint,
    Progress,
    open_export,
    saved_optimiser,
    steps_of,
    write_whole,
)
from stretto_interop.checkpoints.megatron.common import BACKEND, COMMON, KIND, LATEST
from stretto_interop.checkpoints.megatron.importing import MASTERS, STATE
from stretto_interop.checkpoints.megatron.names import LAYERS, MegatronRule, is_trained, rules

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_FORM = "fully_reshardable"
_STYLES = {"inverse-sqrt": "inverse-square-root", "wsd": "WSD"}
_LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention")
_OTHERS = ("self_attention.q_layernorm", "self_attention.k_layernorm", "input_layernorm", "pre_mlp_layernorm")
_MLP = ("linear_fc1", "linear_fc2")


def export_megatron(
    path: str | Path,
    out: str | Path,
    arguments: Callable[[ModelShape], Mapping[str, Any]],
    progress: Progress | None = None,
    *,
    experts_spread: bool = True,
) -> ExportedCheckpoint:
    """Write a checkpoint for Megatron: the model and, if the optimiser is AdamW, its states and step. One
    layer of a tensor at a time is in memory.

    Args:
        out: folder for Megatron's `--load`; it gets one folder `iter_...`.
        arguments: returns the attributes of Megatron's arguments for a model.
        progress: called with the bytes written so far and the total.
        experts_spread: True if Megatron will spread the experts over ranks, where they have an optimiser of
            their own.

    Raises:
        StrettoError: a damaged checkpoint, a model that Megatron does not have, a folder with files, or no
            room.
    """
    out, notes = Path(out), list[str]()
    with open_export(path, out, rules, framework="Megatron", form="megatron") as opened:
        shape, mapping = opened.shape, opened.mapping
        stored = opened.stored
        manifest, meta = opened.manifest, opened.manifest.meta
        args = dict(arguments(shape))
        trained = [rule for rule in mapping if is_trained(rule.parameter)]
        optimiser = saved_optimiser(meta, stored, [rule.parameter for rule in trained], notes)
        source = _Source(stored, shape, progress)
        half = _HALVES.get(_section(meta, "train").get("dtype", ""))  # of weights with float32 masters
        state: dict[str, Any] = source.tensors(mapping, MODEL, "", half)
        step = manifest.step if optimiser is not None else None
        common: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": step or 0}
        if optimiser is not None:
            for moment in MOMENTS:
                state |= source.tensors(trained, f"{OPTIM}{moment}.", f"{STATE}{moment}.", None)
            masters = source.tensors(trained, MODEL, "", None) if half is not None else state
            for rule in trained:
                name = source.name(rule)
                state |= {f"{STATE}{item}.{name}": masters[name] for item in MASTERS[:2]}
            updates = int(meta.get("updates") or manifest.step)
            spread = shape.moe is not None and experts_spread
            if shape.moe is not None:
                ranks = "above 1, not 1" if spread else "1, not above"
                notes.append(f"Adam's states are laid out for --expert-model-parallel-size {ranks}")
            common["optimizer"] = _optimiser_state(optimiser, updates, steps_of(meta), spread=spread)
            common["opt_param_scheduler"] = _scheduler(optimiser, updates, meta)
            if "global_size" not in _section(meta, "batch"):
                rule = "the learning rate's course counts each update as one sample"
                notes.append(f"the batch is not known, so {rule}: --override-opt-param-scheduler sets it")
            common["content_metadata"] = {"distrib_optim_sharding_type": _FORM}
        common["args"] = Namespace(**{**args, **_run(meta, step, half)})
        common.setdefault("content_metadata", {})
        common["content_metadata"] |= {"chained_optim_avoid_prefix": True, "singleton_local_shards": False}
        common["num_floating_point_operations_so_far"] = 0
        state |= {name: [None] for name in _extra_states(shape, source.stacked)}
        folder = out / f"iter_{step or 0:07d}"
        write_whole(state, folder, source.total, path)
    torch.save(common, folder / COMMON)
    kind = {"sharded_backend": BACKEND, "sharded_backend_version": 1}
    kind |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / KIND).write_text(json.dumps(kind), encoding="utf-8")
    (out / LATEST).write_text(str(step or 0), encoding="utf-8")  # last: with it the checkpoint is there
    files = [*sorted(folder.iterdir()), out / LATEST]
    return ExportedCheckpoint(files=files, step=step, notes=notes)


class _Source:
    """Makes Megatron's tensors from Stretto's: one box for each layer of a stacked tensor."""

    def __init__(self, stored: StoredTensors, shape: ModelShape, progress: Progress | None) -> None:
        self._stored, self._progress = stored, progress
        self._shape, moe = shape, shape.moe
        self.stacked = moe is None or not (moe.dense_layers or moe.every > 1)
        self.total = self._done = 0

    def name(self, rule: MegatronRule) -> str:
        """Return the name of the tensor that holds the parameter."""
        if rule.layer is None:
            return rule.names[0]
        return f"{LAYERS}{'' if self.stacked else f'{rule.layer}.'}{rule.names[0]}"

    def tensors(
        self, mapping: Sequence[MegatronRule], tensor_here: str, exported: str, dtype: torch.dtype | None
    ) -> dict[str, Any]:
        """Return the tensors of some rules by name.

        Args:
            tensor_here, exported: prefixes of Stretto's and Megatron's names.
            dtype: dtype to convert to, or None to keep the stored one.
        """
        boxes: dict[str, dict[tuple[int, ...], Any]] = {}
        record: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for rule in mapping:
            name, stored = tensor_here + rule.parameter, self._stored.saved[tensor_here + rule.parameter]
            kind: torch.dtype = getattr(torch, stored.dtype) if dtype is None else dtype
            many = self.stacked and rule.layer is not None
            sizes = (1, *rule.shape) if many else rule.shape
            offsets = ((rule.layer or 0), *(0,) * len(rule.shape)) if many else (0,) * len(rule.shape)
            complete = (self._shape.layers, *rule.shape) if many else rule.shape
            full = exported + self.name(rule)
            record[full] = (complete, kind)
            self.total += prod(sizes) * kind.itemsize

            get = partial(self._get, rule=rule, name=name, dtype=kind, sizes=sizes)
            boxes.setdefault(full, {})[offsets] = (sizes, get)
        return {name: Streamed(*record[name], boxes=each) for name, each in boxes.items()}

    def _get(self, *, rule: MegatronRule, name: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
        tensor_here = self._stored.read(name)
        exported = torch.empty(rule.shape, dtype=dtype)
        if rule.order:
            for view, other in rule.order:
                other(exported).copy_(view(tensor_here))
        else:
            exported.copy_(tensor_here)
        self._done += exported.nbytes
        if self._progress is not None:
            self._progress(self._done, self.total)
        return exported.view(sizes)


def _extra_states(shape: ModelShape, stacked: bool) -> list[str]:
    """Return the names of the empty objects that Megatron expects, with and without Transformer Engine."""
    names = ["decoder.final_layernorm._extra_state/shard_0_1"]
    for i in range(shape.layers):
        prefix, place = (LAYERS, f"{i}_{shape.layers}") if stacked else (f"{LAYERS}{i}.", "0_1")
        moe = shape.block(i).moe
        parts = [*_LINEARS, *_OTHERS]
        if moe is None:
            parts += [f"mlp.{item}" for item in _MLP]
        elif moe.shared_ffn:
            parts += [f"mlp.shared_experts.{item}" for item in _MLP]
        names += [f"{prefix}{item}._extra_state/shard_{place}" for item in parts]
        if moe is not None:
            first, count = (f"{i}.", f"{shape.layers}.") if stacked else ("", "")
            names += [
                f"{prefix}mlp.experts.experts.{item}._extra_state/shard_{first}{e}_{count}{moe.experts}"
                for e in range(moe.experts)
                for item in _MLP
            ]
    return names


def _section(meta: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of the run's config; empty if the checkpoint does not have it."""
    config: Any = meta.get("config")
    section: Any = config.get(name) if isinstance(config, Mapping) else None
    return cast("Mapping[str, Any]", section) if isinstance(section, Mapping) else {}


def _run(meta: Mapping[str, Any], step: int | None, half: torch.dtype | None) -> dict[str, Any]:
    """Return the arguments that Megatron reads from a checkpoint besides those of the model."""
    samples = int(meta.get("samples") or 0) if step is not None else 0
    batch, data = _section(meta, "batch"), _section(meta, "data")
    sizes = {"global_batch_size": batch.get("global_size"), "seq_length": data.get("sequence")}
    return {
        **{name: size for name, size in sizes.items() if size is not None},
        "iteration": step or 0,
        "consumed_train_samples": samples,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "world_size": 1,
        "data_parallel_size": 1,
        "bf16": half == torch.bfloat16,
        "fp16": half == torch.float16,
        "ckpt_format": BACKEND,
        "no_save_rng": True,
        "no_save_optim": step is None,
    }


def _optimiser_state(
    optimiser: Optimiser, updates: int, steps: int | None, *, spread: bool
) -> dict[Any, Any]:
    """Return the optimiser's settings in the places where Megatron's optimisers look; if experts are spread
    over ranks, those of both optimisers by number.
    """
    rate = optimiser.lr if steps is None else LearningRate.of(optimiser, steps)(updates)

    def group(decays: bool, experts: bool) -> dict[str, Any]:
        return {
            "wd_mult": float(decays),
            "lr_mult": 1.0,
            "is_expert_parallel": experts,
            "is_decoupled_lr": False,
            "default_config": True,
            "max_lr": optimiser.lr,
            "min_lr": optimiser.lr * optimiser.rate.min_ratio,
            "lr": rate,
            "betas": tuple(optimiser.betas),
            "eps": optimiser.eps,
            "weight_decay": optimiser.weight_decay * decays,
            "step": updates,
        }

    def complete(*groups: dict[str, Any]) -> dict[str, Any]:
        item = {"state": {"common_step": torch.tensor(float(updates))}, "param_groups": list(groups)}
        return {"optimizer": item, **item, "param_state_sharding_type": _FORM}

    dense = complete(group(True, False), group(False, False))
    return {0: dense, 1: complete(group(True, True))} if spread else dense


def _scheduler(optimiser: Optimiser, updates: int, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the learning-rate schedule, which Megatron counts in samples."""
    batch = int(_section(meta, "batch").get("global_size") or 1)
    steps = steps_of(meta) or updates + 1
    rate = optimiser.rate
    end = steps if rate.decay_steps is None else rate.decay_steps
    return {
        "max_lr": optimiser.lr,
        "lr_warmup_steps": rate.warmup_steps(steps) * batch,
        "num_steps": updates * batch,
        "lr_decay_style": _STYLES.get(rate.schedule, rate.schedule),
        "lr_decay_steps": end * batch,
        "min_lr": optimiser.lr * rate.min_ratio,
        "start_wd": optimiser.weight_decay,
        "end_wd": optimiser.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": steps * batch,
    }
