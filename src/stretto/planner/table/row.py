"""From a row of a table to a job, its cluster, the software's assumptions, and what was measured.

Cells that say nothing take the defaults of `planner.table.columns`. A default that makes a choice is
reported, and so is the reading of a cell that is no plain value; a default that says that something is absent
is not. Contradictory cells are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.layout.shards import Mode
from stretto.planner.assumptions import Assumptions
from stretto.planner.estimate import usual_dtype
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.device import Device
from stretto.planner.memory.fits import fit
from stretto.planner.memory.short_step import short_step_memory
from stretto.planner.table.cells import Cells
from stretto.planner.table.machine import device_count, row_cluster, sized_cluster
from stretto.planner.table.measured import Measured, measured_of
from stretto.planner.table.model import row_shape
from stretto.planner.table.recomputation import Recomputation, stated_recomputation
from stretto.planner.table.software import SEQUENCE_PARALLEL, Software, software_of
from stretto.spec.data_parallel import (
    MODES,
    DataParallel,
    Dtype,
    GradientType,
    Offload,
    Precision,
    ReduceChoice,
)
from stretto.spec.framework import CORE, Framework, ways_of
from stretto.spec.job import Job, Recompute
from stretto.spec.parameters import count_parameters
from stretto.spec.rules import problems
from stretto.spec.shape import ModelShape

_MEGATRON = 128  # a rank's share of the vocabulary is a multiple of it, unless parameters are sharded
_TOKENS = 16384  # up to which, without a pipeline, the batch of a replica is one microbatch
_LONGEST = 1_000_000  # forwards in a step of one replica, at most
_MODES: tuple[Mode, ...] = ("ddp", "zero1", "zero2", "zero3")
_SHARDS = (("zero1", "shard_states"), ("zero2", "shard_gradients"), ("zero3", "shard_parameters"))
_DROPOUT = 0.1  # of GPT-2, which Megatron's runs kept until 2022


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row that can be predicted.

    Attributes:
        cells: by the column names of the table.
        measured: what the row says about its run.
        defaults: defaults taken for empty cells: name to value, and why.
    """

    cells: Mapping[str, str]
    job: Job
    cluster: Cluster
    assumptions: Assumptions
    measured: Measured
    defaults: Mapping[str, str]

    @property
    def group(self) -> tuple[object, ...]:
        """The key that alternative layouts of one program share."""
        job = self.job
        whole = (job.global_batch, job.sequence, job.layout.world, job.precision)
        return (job.shape, self.cluster.name, self.assumptions.software, *whole)

    @property
    def repeat(self) -> tuple[object, ...]:
        """The key that measurements of one layout share."""
        job = self.job
        return (
            job.layout,
            job.micro_batch,
            job.schedule,
            tuple(sorted(job.options.items())),
            job.sequence_parallel,
            job.recompute,
            job.dp,
            job.context,
            (job.attention, job.fused_loss, job.framework),
            self.assumptions,
        )

    @property
    def hardware(self) -> str:
        """The device's name."""
        return self.cluster.device.name


def read_row(
    cells: Mapping[str, str],
    cluster: Cluster | None = None,
    shape: ModelShape | None = None,
    planned: bool = False,
) -> Row:
    """The meaning of a row.

    Args:
        cells: by the columns' names or aliases.
        cluster: in place of the row's.
        shape: in place of the row's model.
        planned: the run is to be made, with the software of today: nothing follows from its age, or from its
            having fitted.

    Raises:
        StrettoError: why it cannot be predicted.
    """
    row = Cells(cells)
    if row.word("training") == "frozen":
        raise StrettoError(
            "most weights are frozen (LoRA), which is not modelled",
            hint="predict takes training of all weights",
        )
    model, sequence = row_shape(row, shape)
    machine = row_cluster(row, cluster)
    layout = _layout(row, model, machine)
    machine = sized_cluster(row, machine, layout.world)
    software = software_of(row, machine.device, sequence, planned)
    early = software.early and not planned
    if early and not model.rotary and shape is None and not model.dropout:
        model = replace(model, dropout=row.value_or("dropout", _DROPOUT, "of GPT with that software"))
    schedule, options = _schedule(row, model)
    global_batch, micro_batch = _batch(row, layout, sequence, int(options.get("chunks", 1)))
    precision = _precision(row, machine.device, early)
    least = _MODES.index(least_sharing(model, layout, machine, precision))
    dp = _sharing(row, layout, machine.node, least=least, usual=0 if early else 1)
    stated = stated_recomputation(row)
    framework = _framework(row, dp=dp, precision=precision, software=software, stated=stated, planned=planned)
    if framework.wide_shards and layout.pp > 1:
        dp = replace(dp, reduce="step")  # FSDP sums whole gradients over the microbatches of a pipeline
    stages = layout.pp * int(options.get("chunks", 1))
    sp_usual = not (early and software.is_before(SEQUENCE_PARALLEL))
    job = Job(
        shape=model,
        layout=layout,
        global_batch=global_batch,
        micro_batch=micro_batch,
        sequence=sequence,
        schedule=schedule,
        options=options,
        expert_tp=layout.expert_tp,
        sequence_parallel=layout.tp > 1 and row.value_or("sp", sp_usual),
        context="ulysses" if row.word("context") == "ulysses" else "ring",
        recompute=_recompute(row, stated or Recomputation(mode="none"), model, stages),
        dp=dp,
        precision=precision,
        attention="auto" if software.attention == "fused" else "explicit",
        fused_loss=row.flag("fused_loss"),
        framework=framework,
        vocab_multiple=1 if dp.mode == "zero3" else _MEGATRON,
    )
    _check(job)
    if stated is None and row.measured and not planned:
        job = replace(job, recompute=_least_recomputation(job, machine, stages))
        blocks = "" if job.recompute.blocks is None else f" in {job.recompute.blocks} blocks of each stage"
        row.report("recompute", f"{job.recompute.mode}{blocks}", "the least that fits")
    elif stated is None:
        row.report("recompute", "none", "")
    return Row(
        cells=cells,
        job=job,
        cluster=machine,
        assumptions=_assumptions(row, software, early),
        measured=measured_of(row, job, machine, software),
        defaults=dict(row.defaults),
    )


def _layout(row: Cells, shape: ModelShape, machine: Cluster) -> Layout:
    """The parallel degrees; of tp, pp and dp, those that are empty follow from the number of devices.

    Raises:
        StrettoError: their product is not the number of devices, or nothing says how many there are.
    """
    cp, ep = row.whole("cp") or 1, row.whole("ep") or 1
    gpus = _devices(row, machine)
    if gpus is None and row.measured and not any(row.whole(axis) for axis in ("tp", "pp", "dp")):
        raise StrettoError("the row has neither gpus nor degrees", hint="fill in gpus, or tp, pp and dp")
    tp, pp = _model_parallel(row, shape, machine, gpus)
    dp = row.whole("dp")
    if gpus is None:
        gpus = row.value_or("gpus", tp * cp * pp * (dp or 1), "tp x cp x dp x pp")
    rest, over = divmod(gpus, tp * cp * pp)
    degrees = f"tp={tp} x cp={cp} x pp={pp}"
    if over or not rest:
        near = max(1, round(gpus / (tp * cp * pp))) * tp * cp * pp
        raise StrettoError(f"{degrees} does not divide {gpus} GPUs", hint=f"nearest: gpus={near}")
    if dp not in (None, rest):
        raise StrettoError(f"{degrees} x dp={dp} is not {gpus} GPUs", hint=f"nearest: dp={rest}")
    dp = row.value_or("dp", rest, "what the others leave") if rest > 1 else 1
    expert_tp = row.whole("expert_tp")
    if shape.moe is not None and ep > 1 and tp > 1 and expert_tp is None:
        expert_tp = row.value_or("expert_tp", 1, "experts whole, as in Megatron-Core")
    return Layout(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, expert_tp=expert_tp)


def _devices(row: Cells, machine: Cluster) -> int | None:
    """The number of devices; None: the row does not say it.

    Raises:
        StrettoError: it contradicts the number of nodes.
    """
    gpus, nodes = row.whole("gpus"), row.whole("nodes")
    if nodes is None:
        counted = device_count(row)
        return row.value_or("gpus", counted, "of gpu") if gpus is None and counted else gpus
    if gpus is None:
        return row.value_or("gpus", nodes * machine.node, f"{nodes} nodes of {machine.node}")
    if row.whole("node_size") and not (nodes - 1) * machine.node < gpus <= nodes * machine.node:
        raise StrettoError(
            f"{gpus} GPUs are not on {nodes} nodes of {machine.node}", hint="leave gpus or nodes empty"
        )
    return gpus


def _model_parallel(row: Cells, shape: ModelShape, machine: Cluster, gpus: int | None) -> tuple[int, int]:
    """tp and pp. Where one is empty and dp is not, it is what the others leave; where both are, tp is as
    large as the node and the heads allow (Narayanan et al. 2021, section 3).
    """
    tp, pp, dp, cp = (row.whole(axis) for axis in ("tp", "pp", "dp", "cp"))
    both, over = divmod(gpus or 0, (dp or 1) * (cp or 1))
    if dp is None or over or not both or (tp and pp):
        return tp or 1, pp or 1
    why = "what gpus and the other degrees leave"
    if tp is None and pp is None:
        size = min(machine.node, both)
        tp = max(n for n in range(1, size + 1) if both % n == shape.heads % n == shape.kv_heads % n == 0)
    if tp is None:
        tp = both // pp if pp and both % pp == 0 else 1
    if pp is None:
        pp = both // tp if both % tp == 0 else 1
    for axis, degree in (("tp", tp), ("pp", pp)):
        if degree > 1:
            row.value_or(axis, degree, why)
    return tp, pp


def _schedule(row: Cells, shape: ModelShape) -> tuple[str, dict[str, Any]]:
    """The schedule and its options; `chunks` of 1 is no option.

    Raises:
        StrettoError: chunks in two cells that contradict each other.
    """
    pp = row.whole("pp") or int(row.defaults.get("pp", "1").split()[0])
    options = {"chunks": _chunks(row, shape, pp), "group": row.whole("group"), "waves": row.whole("waves")}
    if options["chunks"] == 1:
        del options["chunks"]
    usual = "interleaved" if options.get("chunks") else "1f1b"
    schedule = row.value_or("schedule", usual) if pp > 1 else row.word("schedule") or usual
    if schedule == "1f1b" and options.get("chunks") and row.measured:
        row.report("schedule", "interleaved", f"1F1B with {options['chunks']} chunks")
        schedule = "interleaved"
    if schedule == "interleaved" and pp > 1 and not options.get("chunks") and row.measured:
        options["chunks"] = _fewest_chunks(shape.layers, pp)
        row.report("chunks", options["chunks"] or 1, "the fewest of equal size")
    return schedule, {name: value for name, value in options.items() if value is not None}


def _chunks(row: Cells, shape: ModelShape, pp: int) -> int | None:
    """Stages per rank: of their column, or from the words behind the schedule, as in "interleaved v=4"."""
    text, behind = row.text("chunks"), row.text("schedule").lower()
    match = re.match(r"(?:vpp?\s*[=:]?\s*)?(\d+)(?:\.0)?\b", text.lower())
    words = re.search(
        r"\b(?:v|vp|vpp|chunks|stages)\s*[=:]?\s*(\d+)|\b(\d+)\s*(?:chunks|virtual|model)", behind
    )
    said = int(words[1] or words[2]) if words else None
    if text.lower().startswith("max"):
        row.report("chunks", max(1, (shape.layers + 2) // pp), f"read from {text!r}: one layer each")
        return max(1, (shape.layers + 2) // pp)
    if text and match is None and text.lower() not in ("none", "no"):
        raise StrettoError(
            f"chunks is {text!r}, allowed: a whole number above 0, or max", hint="as in chunks=2"
        )
    stated = int(match[1]) or None if match else None
    if stated and said and stated != said:
        raise StrettoError(f"chunks is {stated}, but schedule is {behind!r}", hint="leave one of them empty")
    if said and not stated:
        row.report("chunks", said, f"read from {row.text('schedule')!r}")
    return stated or said


def _fewest_chunks(layers: int, pp: int) -> int | None:
    """The smallest number of chunks per rank, above one, with equal numbers of layers; None: none."""
    each = layers // pp
    return next((n for n in range(2, each + 1) if each % n == 0), None)


def _batch(row: Cells, layout: Layout, sequence: int, chunks: int) -> tuple[int, int]:
    """Samples of a step and of a microbatch, each derived from the others where it is empty.

    Raises:
        StrettoError: the three contradict each other.
    """
    whole, micro, count = (row.whole(name) for name in ("global_batch", "micro_batch", "microbatches"))
    tokens = row.number("batch_tokens")
    if whole is None and tokens is not None:
        step = layout.dp * (micro or 1)
        whole = row.value_or(
            "global_batch", max(1, round(tokens / sequence / step)) * step, "of batch_tokens"
        )
    if whole is None:
        steps = count or row.value_or("microbatches", layout.pp * chunks, "one a stage")
        whole = row.value_or("global_batch", (micro or 1) * layout.dp * steps, "of all microbatches")
    if micro is None:
        each = max(1, whole // (layout.dp * (count or 1)))
        alone = layout.pp == 1 and each * sequence <= _TOKENS
        micro = row.value_or("micro_batch", each if count or alone else 1)
    if count is not None and micro * layout.dp * count != whole:
        raise StrettoError(
            f"global_batch is {whole}, but {count} microbatches of {micro} on dp={layout.dp} are "
            f"{micro * layout.dp * count}",
            hint="leave one of global_batch, micro_batch and microbatches empty",
        )
    return whole, micro


def _precision(row: Cells, device: Device, early: bool) -> Precision:
    """Types of weights and gradients; devices before bfloat16 have float16 only."""
    half = "fp16" if usual_dtype(device) == "float16" else "bf16"
    word = row.value_or("precision", half, "of the device")
    usual = "same" if early and word == "fp16" else "fp32"
    summed = "fp32" if word == "fp32" else row.value_or("gradients", usual)
    gradients: GradientType = "same" if summed == "same" else "float32"
    types: dict[str, Dtype] = {"fp32": "float32", "fp16": "float16"}
    dtype = types.get(word, "bfloat16")
    return Precision(dtype=dtype, gradients=gradients, fp8="tensor" if word in ("fp8", "fp4") else "none")


def _sharing(row: Cells, layout: Layout, node: int, *, least: int, usual: int) -> DataParallel:
    """How states are sharded; if that is empty, as usual, and at least as much as makes them fit."""
    zero = row.word("zero")
    if zero is None:
        zero = "0"
        if layout.cp * layout.dp > 1:
            zero = row.value_or("zero", str(max(usual, least)), "what fits" if least > usual else "")
    mode = _MODES[int(zero)]
    size = row.whole("shard")
    if size is None and re.search(r"hsdp|hybrid", row.text("zero").lower()) and layout.dp > node:
        size = row.value_or("shard", node, "hybrid: within a node")
    shards = {} if size is None else {f: size for m, f in _SHARDS if MODES.index(m) <= MODES.index(mode)}
    places: dict[str, Offload] = dict.fromkeys(_offloaded(row, mode), "cpu")
    # frameworks keep gradients whole until the last microbatch of a pipeline
    reduce: ReduceChoice = "step" if mode == "zero2" and layout.pp > 1 else "auto"
    return DataParallel(mode=mode, reduce=reduce, **shards, **places)  # pyright: ignore[reportArgumentType]


def _offloaded(row: Cells, mode: Mode) -> Iterator[str]:
    """What is kept in host memory, by the fields of `DataParallel`.

    Raises:
        StrettoError: words that name nothing.
    """
    if row.word("offload_parameters") == "cpu":
        yield "offload_parameters"
    text = row.text("offload").lower()
    sharding = row.text("zero").lower()
    if not text and "offload" in sharding:
        row.report("offload", "optimizer", f"read from {row.text('zero')!r}")
        text = "optimizer"
    if re.match(r"(?:none|no|off|0|false)\b", text) or not text:
        return
    weights = re.search(r"param|weight|full|all|both|infinity", text) is not None
    states = (
        re.search(r"opt|state|zero-?off|cpu|host|yes|true|1|on\b|full|all|both|infinity|adam|nvme", text)
        is not None
    )
    if not weights and not states:
        if re.search(r"act|checkpoint|input", text):
            row.report(
                "offload", "none", f"read from {row.text('offload')!r}: activations stay on the device"
            )
            return
        raise StrettoError(f"offload is {text!r}, allowed: none, optimizer, parameters, or both")
    if states:
        yield "offload"
    if weights and mode == "zero3" and not row.word("offload_parameters"):
        yield "offload_parameters"
    if text not in ("cpu", "optimizer", "parameters", "both"):
        kept = " and ".join(["optimizer"] * states + ["parameters"] * (weights and mode == "zero3"))
        row.report("offload", kept or "none", f"read from {row.text('offload')!r}")


def least_sharing(shape: ModelShape, layout: Layout, cluster: Cluster, precision: Precision) -> Mode:
    """The least sharding of states that leaves three tenths of a device's memory to all else."""
    parameters = count_parameters(shape).total / (layout.tp * layout.pp * layout.ep)
    copies = layout.cp * layout.dp
    gradient = 2 if precision.gradients == "same" else 4
    room = 0.7 * cluster.device.memory / parameters
    if room >= 14 + gradient:
        return "ddp"
    if room >= 2 + gradient + 12 / copies:
        return "zero1"
    return "zero2" if room >= 2 + (gradient + 12) / copies else "zero3"


def _recompute(row: Cells, stated: Recomputation, shape: ModelShape, stages: int) -> Recompute:
    """The job's recomputation, and the report of what words were taken for."""
    blocks, text = stated.blocks_of(shape.layers, stages), row.text("recompute")
    if stated.mode == "full" and blocks is not None:
        row.report(
            "recompute", f"full in {blocks} blocks of each stage", f"read from {text!r}" if text else ""
        )
        return Recompute("full", blocks=blocks)
    if text and text.lower() != stated.mode:
        operators = f" ({' + '.join(stated.operators)})" if stated.mode == "selective" else ""
        host = ", inputs in host memory" if stated.to_host else ""
        row.report("recompute", f"{stated.mode}{operators}{host}", f"read from {text!r}")
    return Recompute(stated.mode, shard_inputs=row.flag("shard_inputs"))


# by words in the software or the source; Megatron-DeepSpeed, which is BigScience's, keeps states as DeepSpeed
_FRAMEWORKS = {
    "deepspeed": "deepspeed",
    "bigscience": "deepspeed",
    "fsdp": "fsdp",
    "torchtitan": "fsdp",
    "llm-foundry": "fsdp",
}


def _framework(
    row: Cells,
    *,
    dp: DataParallel,
    precision: Precision,
    software: Software,
    stated: Recomputation | None,
    planned: bool,
) -> Framework:
    """Whose ways the run follows; if that is empty, those that software or source name; else Stretto's own
    for a planned run, FSDP's where parameters are sharded, and Megatron's.
    """
    sharded = dp.mode == "zero3"
    name = row.word("framework")
    if name is None:
        text = f"{row.text('software')} {row.text('source')}".lower()
        words = next((framework for word, framework in _FRAMEWORKS.items() if word in text), None)
        if words is None and (named := re.search("megatron|nemo", row.text("software").lower())):
            words = named[0]
        name = words or ("stretto" if planned else "fsdp" if sharded else "megatron")
        if name == "deepspeed" or (sharded and name == "fsdp"):
            row.report("framework", name, "of software or source" if words else "")
    again = Framework(
        operators=stated.operators if stated is not None and stated.mode == "selective" else CORE,
        inputs_on_host=stated is not None and stated.to_host,
    )
    if name == "stretto":
        return again
    compiled = software.name in ("compiled", "tuned")
    return ways_of(name, dp=dp, precision=precision, compiled=compiled, again=again)


def _least_recomputation(job: Job, cluster: Cluster, stages: int) -> Recompute:
    """The least recomputation with which the job may fit the device, since the run fitted: none, the
    attention core, or whole blocks, as few of each stage as do. Where nothing does, memory is no evidence,
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


def _assumptions(row: Cells, software: Software, early: bool) -> Assumptions:
    """How the run was executed: the software, and what overlapped."""
    overlap, blocking = row.get("overlap", bool), row.get("blocking", bool)
    if early and overlap is None:
        overlap = row.value_or("overlap", False, "as in Megatron before 2023")
    if early and blocking is None and row.whole("pp") != 1:
        blocking = row.value_or("blocking", True, "as in Megatron before 2023")
    return Assumptions(
        overlap=overlap is not False,
        blocking=bool(blocking),
        products="fp4" if row.word("precision") == "fp4" else None,
        software=software.profile,
    )


def _check(job: Job) -> None:
    """Raise the first rule that the job breaks; first of all, whether its program has a reasonable size."""
    actions = (job.microbatches or 1) * job.layout.pp * int(job.options.get("chunks") or 1)
    if actions > _LONGEST:
        raise StrettoError(
            f"{actions:,} forwards in a step of {job.microbatches:,} microbatches",
            hint=f"at most {_LONGEST:,}: check global_batch and micro_batch",
        )
    broken = problems(job)
    if broken:
        raise broken[0]
