"""Answers about memory: of every pipeline rank by kind, beside a device's limit and the papers' formulas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from stretto.job.job import Job
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.published_activations import (
    Reason,
    closed_form,
    closed_form_parts,
    deviations,
)
from stretto.planner.counts.rank_parameters import elements_of
from stretto.planner.memory.alternatives import parameters_of, published_kinds
from stretto.planner.memory.fits import add_host, fit, fit_record
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.layer import LayerTensor, layer_saved
from stretto.planner.memory.ranks import MemoryJob, RankMemory, rank_record
from stretto.planner.memory.short_step import short_step_memory
from stretto.planner.runs import RunRecord
from stretto.web.question_job import Question, model_of, read_job

# beginnings of parameters' names within a layer, and the group that each counts with
_GROUPS = {
    "attn.": "attention",
    "cross.": "attention",
    "mlp.experts.": "experts",
    "mlp.": "MLP",
    "norm": "norms",
    "tok.": "embedding",
    "pos.": "embedding",
    "out.": "output projection",
}


def count_memory(question: Question) -> dict[str, Any]:
    """The memory of every pipeline rank of a job (`web.question_job.read_job`), as `stretto memory` counts
    it, and its fit, as `stretto predict` prints it.
    """
    reading = model_of(question)
    model = {"kind": reading.kind, "unknown": list(reading.unknown)[:20], "notes": list(reading.notes)}
    return {**memory_record(read_job(question)), "model": model}


def memory_record(run: RunRecord) -> dict[str, Any]:
    """The memory of a run, as `count_memory` answers it."""
    job, device = run.job, run.cluster.device
    ranks = short_step_memory(job)
    memory_job = memory_of(job)
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].total)
    return {
        "layout": str(job.layout),
        "gpus": job.layout.world,
        "microbatches": job.microbatches,
        "sequence": job.sequence,
        "device": {"name": device.name, "memory": device.memory},
        **fit_record(add_host(fit(ranks, device, run.assumptions.reserve), job.layout, run.cluster)),
        "ranks": [_rank(run, memory_job, rank) for rank in ranks],
        "fullest": fullest,
        "activations": _activations(memory_job),
        "states": _states(job, memory_job, ranks[fullest]),
        "defaults": dict(run.defaults),
    }


def _rank(run: RunRecord, memory_job: MemoryJob, rank: RankMemory) -> dict[str, Any]:
    """A rank's kinds, with the device's memory that they take if it is the fullest, and its parameters."""
    used = fit([rank], run.cluster.device, run.assumptions.reserve)
    layers = memory_job.layers_of(rank.rank)
    elements = Counter[str]()
    for name, count in elements_of(memory_job.shape, layers, memory_job.shares).items():
        elements[_group(name)] += count
    return {
        **rank_record(rank),
        "fragmentation": used.reserved.mid - used.allocated.mid,
        "context": used.device.mid - used.reserved.mid,
        "device": asdict(used.device),
        "verdict": used.verdict,
        "parameters": dict(elements.most_common()),
        "layers": len(layers),
    }


def _group(name: str) -> str:
    """The group of a parameter by its name in the plain model, as "blocks.3.attn.qkv.weight"."""
    inside = ".".join(part for part in name.split(".")[1:] if not part.isdecimal())
    return next((group for start, group in _GROUPS.items() if inside.startswith(start)), "norms")


# ------------------------------------------------------------------ the papers' formulas


def _activations(memory_job: MemoryJob) -> dict[str, Any]:
    """What a block keeps for its backward, by part, beside the closed form of Korthikanti et al. 2022."""
    shape = memory_job.shape
    recompute = max(memory_job.modes, key=memory_job.modes.count, default=memory_job.compute.recompute)
    compute: ComputeConfig = replace(memory_job.compute, recompute=recompute)
    block = shape.block(shape.layers - 1)
    saved = layer_saved("block", block, compute)
    form, reasons = closed_form(block, compute), [*deviations(block, compute)]
    if compute.attention != "explicit" and not block.dropout and not compute.repeats("core_attn"):
        reasons.append(("fused attention: 4 bytes a query and head in place of the scores' 5as^2b", {}))
    return {
        "recompute": recompute,
        "tensors": [{"name": t.name, "bytes": t.bytes, "formula": t.formula} for t in saved],
        "paper": {"bytes": form.bytes, "formula": form.formula, "source": form.source},
        "parts": _parts(saved, closed_form_parts(block, compute)),
        "reasons": reasons,
    }


def _parts(saved: Sequence[LayerTensor], paper: Mapping[str, float]) -> list[dict[str, Any]]:
    counted = Counter[str]()
    for tensor in saved:
        counted["input" if "input" in paper else _part(tensor.name)] += tensor.bytes
    return [
        {"part": part, "paper": paper.get(part, 0), "counted": counted[part]} for part in {**paper, **counted}
    ]


def _part(name: str) -> str:
    """The term of the paper that a tensor belongs to."""
    if name.startswith("norm"):
        return "norms"
    if name.startswith(("attn.", "cross.")):
        inputs = name.endswith((" q", " k, v", " output"))
        return "scores" if ".core " in name and not inputs else "attention"
    return "mlp"


def _states(job: Job, memory_job: MemoryJob, rank: RankMemory) -> dict[str, Any]:
    """Weights, gradients and states of the fullest rank, beside 2 + 2 + 12 bytes a parameter (ZeRO)."""
    parameters = parameters_of(memory_job, rank.rank)
    paper = published_kinds(job.dp.mode, parameters, memory_job.state_config.copies)
    counted = {
        "weights": rank.weights,
        "gradients": rank.gradients,
        "states": rank.masters + rank.optimizer,
    }
    return {
        "mode": job.dp.mode,
        "parameters": parameters,
        "copies": memory_job.state_config.copies,
        "kinds": [{"kind": kind, "paper": paper.get(kind, 0), "counted": counted[kind]} for kind in counted],
        "reasons": [*_state_reasons(job, memory_job, rank)],
    }


def _state_reasons(job: Job, memory_job: MemoryJob, rank: RankMemory) -> Iterator[Reason]:
    """Yield why the count differs from ZeRO's 2 + 2 + 12 bytes a parameter."""
    if not job.precision.half:
        yield "weights of 32 bits need no master: 4 + 4 + 8 bytes a parameter", {}
    elif job.precision.gradients == "float32":
        yield "gradients are accumulated in float32: 4 bytes a parameter, not 2", {}
    if job.optimiser.name != "adamw" or job.optimiser.states != "float32":
        values: dict[str, int | str] = {"name": job.optimiser.name, "type": job.optimiser.states}
        yield "K = 12 is AdamW's in float32; the optimiser is {name} in {type}", values
    if rank.host or rank.disk:
        yield "states are offloaded: the device has what is being updated", {}
    if memory_job.shape.moe is not None and job.layout.ep > 1:
        yield "experts have fewer copies than dense layers, over which their states are sharded", {}
    if job.dp.mode in ("zero2", "zero3") and rank.open + rank.gathered:
        yield "gradients and weights that are whole for a while count with the buffers", {}
    yield "norms and routers stay in float32; shards are padded to equal sizes", {}
