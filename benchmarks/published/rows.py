"""Rows of published tables as they stand: what papers leave to their words, their year and their having run.

A row is completed to plain values of the columns of `stretto predict --table`, which make the job. What a
cell was taken for, and what was assumed where it says nothing, is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from published.cells import SpelledCells, column_name
from published.machine import row_cluster, sized_cluster
from published.model import fill_model
from published.recomputation import Recomputation, stated_recomputation
from published.software import SEQUENCE_PARALLEL, Software, fill_software
from stretto.errors import StrettoError
from stretto.job.data_parallel import Precision
from stretto.job.job import Job, Recompute
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.planner import run_scores
from stretto.planner.estimate import usual_dtype
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.device import Device
from stretto.planner.memory.fits import fit
from stretto.planner.memory.short_step import short_step_memory
from stretto.planner.run_scores import PredictedRow
from stretto.planner.runs import RunRecord, layout_of, least_sharing, model_of, peak_flops, run_of

_MODES = ("ddp", "zero1", "zero2", "zero3")
_DROPOUT = 0.1  # of GPT-2, which Megatron's runs kept until 2022
_LORA_RANK = 16  # PEFT's examples
_CLOSE = 0.03  # relative difference of a rate and the same rate from a share of the peak
# by words in the software or the source; Megatron-DeepSpeed, which is BigScience's, keeps states as DeepSpeed
_FRAMEWORKS = {
    "deepspeed": "deepspeed",
    "bigscience": "deepspeed",
    "fsdp": "fsdp",
    "torchtitan": "fsdp",
    "llm-foundry": "fsdp",
}


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file with columns under any of their names."""
    return run_scores.read_table(path, column_name)


def predict_rows(
    rows: Iterable[Mapping[str, str]], memory: bool = True, shape: ModelShape | None = None
) -> Iterator[PredictedRow]:
    """Yield each row with its prediction, or with the reason why there is none."""
    return run_scores.predict_rows(rows, partial(read_row, shape=shape), memory)


def read_row(
    row: Mapping[str, str], cluster: Cluster | None = None, shape: ModelShape | None = None
) -> RunRecord:
    """Return the run that a row describes.

    Args:
        row: cells by the columns' names or aliases.
        cluster: in place of the row's.
        shape: in place of the row's model.

    Raises:
        StrettoError: the reason why it cannot be predicted.
    """
    cells = SpelledCells(row)
    if cells.get("training", str) == "frozen" and "lora_rank" not in cells.values:
        cells.fill("lora_rank", _LORA_RANK, "usual")
    milliseconds = cells.get("iter_time_ms", float)
    if milliseconds is not None:
        cells.values.setdefault("step_time_s", milliseconds * 1e-3)
    base = fill_model(cells, shape)
    model, sequence = model_of(cells, base)
    cells.values["seq"] = sequence
    if base is not None and shape is None:
        cells.get_or("vocab", model.vocab, "the model's")
    machine = row_cluster(cells, cluster)
    degrees = any(axis in cells.values for axis in ("gpus", "tp", "pp", "dp"))
    if cells.ran and not degrees:
        raise StrettoError("the row has neither gpus nor degrees", hint="fill in gpus, or tp, pp and dp")
    layout = layout_of(cells, model, replace(machine, nodes=None))
    cells.values["gpus"] = layout.world
    machine = sized_cluster(cells, machine, layout.world)
    software = fill_software(cells, machine.device, sequence)
    _fill_habits(cells, software, model, layout, machine.device, known_shape=shape is not None)
    _fill_schedule(cells, model, layout.pp)
    tokens = cells.get("batch_tokens", float)
    if tokens is not None and "global_batch" not in cells.values:
        step = layout.dp * (cells.get("micro_batch", int) or 1)
        cells.fill("global_batch", max(1, round(tokens / sequence / step)) * step, "of batch_tokens")
    _fill_sharing(cells, software, layout, machine, model)
    chunks = 1 if layout.pp == 1 and "chunks" not in cells.values else cells.get("chunks", int) or 1
    stages = layout.pp * chunks
    stated = stated_recomputation(cells)
    _fill_recomputation(cells, stated, model, stages)
    _fill_framework(cells)
    read = partial(run_of, cells, machine, model)
    run = read()
    if stated is None and cells.ran:
        least = _least_recomputation(run.job, machine, stages)
        blocks = "" if least.blocks is None else f" in {least.blocks} blocks of each stage"
        cells.fill("recompute", least.mode)
        cells.report("recompute", f"{least.mode}{blocks}", "the least that fits")
        if least.blocks is not None:
            cells.values["recompute_layers"] = least.blocks
        run = read()
    elif stated is None:
        cells.report("recompute", "none")
    if run.measured.by.startswith("tflops") and "flops_counted" not in cells.values:
        _fill_flops_counted(cells, run, software)
        run = read()
    return replace(run, defaults=dict(cells.defaults))


def _fill_habits(
    cells: SpelledCells,
    software: Software,
    model: ModelShape,
    layout: Layout,
    device: Device,
    known_shape: bool,
) -> None:
    """Fill in what Megatron of 2020 to 2022 did, if the software is as early.

    Args:
        known: the model is not the row's.
    """
    if not software.early:
        return
    if not known_shape and not model.rotary and not model.dropout and "dropout" not in cells.values:
        cells.fill("dropout", _DROPOUT, "of GPT with that software")
    half = "fp16" if usual_dtype(device) == "float16" else "bf16"
    if (cells.get("precision", str) or half) == "fp16" and "gradients" not in cells.values:
        cells.fill("gradients", "same")
    if "overlap" not in cells.values:
        cells.fill("overlap", False, "as in Megatron before 2023")
    if "blocking" not in cells.values and cells.values.get("pp") != 1:
        cells.fill("blocking", True, "as in Megatron before 2023")
    if layout.tp > 1 and "sp" not in cells.values:
        cells.fill("sp", not software.is_before(SEQUENCE_PARALLEL))


def _fill_schedule(cells: SpelledCells, shape: ModelShape, pp: int) -> None:
    """Fill in the stages per rank and the schedule: of their columns, or from the words behind the schedule,
    as in "interleaved v=4".

    Raises:
        StrettoError: chunks in two cells that contradict each other.
    """
    text, behind = cells.text("chunks"), cells.text("schedule").lower()
    match = re.match(r"(?:vpp?\s*[=:]?\s*)?(\d+)(?:\.0)?\b", text.lower())
    stated_chunks = re.search(
        r"\b(?:v|vp|vpp|chunks|stages)\s*[=:]?\s*(\d+)|\b(\d+)\s*(?:chunks|virtual|model)", behind
    )
    in_words = int(stated_chunks[1] or stated_chunks[2]) if stated_chunks else None
    cells.values.pop("chunks", None)
    if text.lower().startswith("max"):
        cells.fill("chunks", max(1, (shape.layers + 2) // pp), f"read from {text!r}: one layer each")
    elif text and match is None and text.lower() not in ("none", "no"):
        raise StrettoError(
            f"chunks is {text!r}, allowed: a whole number above 0, or max", hint="as in chunks=2"
        )
    else:
        stated = int(match[1]) or None if match else None
        if stated and in_words and stated != in_words:
            raise StrettoError(
                f"chunks is {stated}, but schedule is {behind!r}", hint="leave one of them empty"
            )
        if stated:
            cells.values["chunks"] = stated
        elif in_words:
            cells.fill("chunks", in_words, f"read from {cells.text('schedule')!r}")
    chunks = cells.get("chunks", int) or 1
    if cells.get("schedule", str) == "1f1b" and chunks > 1 and cells.ran:
        cells.fill("schedule", "interleaved", f"1F1B with {chunks} chunks")
    if cells.get("schedule", str) == "interleaved" and pp > 1 and chunks == 1 and cells.ran:
        each = shape.layers // pp
        fewest = next((n for n in range(2, each + 1) if each % n == 0), None)
        cells.report("chunks", fewest or 1, "the fewest of equal size")
        if fewest:
            cells.values["chunks"] = fewest


def _fill_sharing(
    cells: SpelledCells, software: Software, layout: Layout, machine: Cluster, model: ModelShape
) -> None:
    """Fill in how states are sharded, and what is kept in host memory.

    Raises:
        StrettoError: words of offload that name nothing.
    """
    if layout.cp * layout.dp > 1 and "zero" not in cells.values:
        gradients = "same" if cells.values.get("gradients") == "same" else "float32"
        least = _MODES.index(least_sharing(model, layout, machine, Precision(gradients=gradients)))
        default = 0 if software.early else 1
        cells.fill("zero", str(max(default, least)), "what fits" if least > default else "")
    sharding = cells.text("zero").lower()
    if "shard" not in cells.values and re.search(r"hsdp|hybrid", sharding) and layout.dp > machine.node:
        cells.fill("shard", machine.node, "hybrid: within a node")
    text = cells.text("offload").lower()
    if not text and "offload" in sharding:
        cells.report("offload", "optimizer", f"read from {cells.text('zero')!r}")
        text = "optimizer"
    weights = re.search(r"param|weight|full|all|both|infinity", text) is not None
    states = (
        re.search(r"opt|state|zero-?off|cpu|host|yes|true|1|on\b|full|all|both|infinity|adam|nvme", text)
        is not None
    )
    if re.match(r"(?:none|no|off|0|false)\b", text) or not text:
        weights = states = False
    elif not weights and not states:
        if re.search(r"act|checkpoint|input", text):
            cells.report(
                "offload", "none", f"read from {cells.text('offload')!r}: activations stay on the device"
            )
        else:
            raise StrettoError(f"offload is {text!r}, allowed: none, optimizer, parameters, or both")
    weights = weights and cells.get("zero", str) == "3"
    if (states or weights) and text not in ("cpu", "optimizer", "parameters", "both"):
        names = " and ".join(["optimizer"] * states + ["parameters"] * weights)
        cells.report("offload", names, f"read from {cells.text('offload')!r}")
    weights = weights or cells.get("offload_parameters", str) == "cpu"
    kinds = {(True, True): "both", (True, False): "optimizer", (False, True): "parameters"}
    cells.values["offload"] = kinds.get((states, weights), "none")


def _fill_recomputation(
    cells: SpelledCells, stated: Recomputation | None, shape: ModelShape, stages: int
) -> None:
    """Fill in what a row says about recomputation, and report what its words were taken for."""
    stated = stated or Recomputation(mode="none")
    for name in ("recompute_operators", "recompute_layers", "offload_inputs"):
        cells.values.pop(name, None)
    cells.values["recompute"] = stated.mode
    if stated.to_host:
        cells.values["offload_inputs"] = "cpu"
    if stated.mode == "selective":
        cells.values["recompute_operators"] = "+".join(stated.operators)
    blocks, text = stated.blocks_of(shape.layers, stages), cells.text("recompute")
    if stated.mode == "full" and blocks is not None:
        cells.values["recompute_layers"] = blocks
        reason = f"read from {text!r}" if text else ""
        cells.report("recompute", f"full in {blocks} blocks of each stage", reason)
    elif text and text.lower() != stated.mode:
        operators = f" ({' + '.join(stated.operators)})" if stated.mode == "selective" else ""
        host = ", inputs in host memory" if stated.to_host else ""
        cells.report("recompute", f"{stated.mode}{operators}{host}", f"read from {text!r}")


def _fill_framework(cells: SpelledCells) -> None:
    """Fill in whose ways the run follows: as software or source name it, else FSDP's where parameters are
    sharded, and Megatron's.
    """
    if "framework" in cells.values:
        return
    text = f"{cells.text('software')} {cells.text('source')}".lower()
    name = next((framework for word, framework in _FRAMEWORKS.items() if word in text), None)
    if name is None and (framework := re.search("megatron|nemo", cells.text("software").lower())):
        name = framework[0]
    sharded = cells.get("zero", str) == "3"
    chosen = name or ("fsdp" if sharded else "megatron")
    cells.values["framework"] = chosen
    if chosen == "deepspeed" or (sharded and chosen == "fsdp"):
        cells.report("framework", chosen, "of software or source" if name else "")


def _least_recomputation(job: Job, cluster: Cluster, stages: int) -> Recompute:
    """Return the least recomputation with which the job may fit the device, since the run fitted: none, the
    attention core, or whole blocks, as few of each stage as do. If nothing does, memory is no evidence,
    and nothing is recomputed.
    """

    def fits(recompute: Recompute) -> bool:
        memory = short_step_memory(replace(job, recompute=recompute))
        return fit(memory, cluster.device).verdict != "does not fit"

    for mode in ("none", "selective"):
        if fits(Recompute(mode)):
            return Recompute(mode)
    low, high = 0, -(-job.shape.layers // stages)  # the former does not fit; the latter is all
    if not fits(Recompute("full")):
        return Recompute("none")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(Recompute("full", blocks=middle)) else (middle, high)
    return Recompute("full", blocks=None if high * stages >= job.shape.layers else high)


def _fill_flops_counted(cells: SpelledCells, run: RunRecord, software: Software) -> None:
    """Fill in which FLOPs the row's rate counts: as its own MFU or HFU confirm, or as was usual."""
    share = (cells.get("tflops_per_gpu", float) or 0.0) * 1e12 / peak_flops(cells, run.job, run.cluster)
    for column, count in (("hfu_pct", "hardware"), ("mfu_pct", "model")):
        percent = cells.get(column, float)
        if percent is not None and abs(percent / 100 / share - 1) <= _CLOSE:
            cells.fill("flops_counted", count, f"as {column} confirms")
            return
    if run.job.recompute.mode == "full" and software.date and software.is_before(SEQUENCE_PARALLEL):
        # model FLOPs utilization came in 2022 (Chowdhery et al., appendix B); figures before counted all
        cells.fill("flops_counted", "hardware", "as was usual before mid 2022")
    else:
        cells.fill("flops_counted", "model", "hardware, where recomputation is counted")
