"""From a row of a table to a job, its cluster, the software's assumptions, and what was measured.

Empty cells take the defaults of `planner.table.columns`. A default that makes a choice is reported; one that
says that something is absent is not. Contradictory cells are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, cast

from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.layout.shards import Mode
from stretto.planner.assumptions import Assumptions, software_profile
from stretto.planner.estimate import precision_of
from stretto.planner.machines.catalogue import clusters, find_cluster
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.device import Device
from stretto.planner.table.columns import Cells
from stretto.spec.data_parallel import (
    MODES,
    DataParallel,
    Dtype,
    GradientType,
    Offload,
    Precision,
    ReduceChoice,
)
from stretto.spec.experts import ExpertShape
from stretto.spec.flops import hardware_flops_per_token, model_flops_per_token
from stretto.spec.framework import Framework, Operator
from stretto.spec.job import Job, Recompute, RecomputeMode
from stretto.spec.parameters import count_parameters
from stretto.spec.presets import find_shape
from stretto.spec.rules import problems
from stretto.spec.shape import Family, ModelShape

MemoryKind = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a row says about its run.

    Attributes:
        seconds: of a step; None: no column gives them.
        by: the column they come from, and which FLOPs it counts.
        memory: bytes of the fullest device; None: not recorded.
        kind: what the memory counts.
        out_of_memory: the run failed for lack of memory.
    """

    seconds: float | None
    by: str
    memory: float | None
    kind: MemoryKind
    out_of_memory: bool


def measured_of(cells: Cells, job: Job, cluster: Cluster) -> Measured:
    """Seconds of a step from iter_time_s, else from tokens a second, else from TFLOP/s, MFU or
    HFU; and memory.
    """
    failed, memory = cells.flag("oom"), cells.number("peak_mem_gib")
    kind = cells.word("memory_count") or "allocated"
    if memory is not None:
        cells.value_or("memory_count", kind)
    seconds, by = (None, "") if failed else _seconds(cells, job, cluster)
    return Measured(
        seconds=seconds,
        by=by,
        memory=memory and memory * 2**30,
        kind=cast(MemoryKind, kind),
        out_of_memory=failed,
    )


def _seconds(cells: Cells, job: Job, cluster: Cluster) -> tuple[float | None, str]:
    seconds = cells.number("iter_time_s")
    if seconds is not None:
        return seconds, "iter_time_s"
    devices, tokens = job.layout.world, job.global_batch * job.sequence
    rate = cells.number("tokens_per_s_per_gpu")
    if rate is not None:
        return tokens / (rate * devices), "tokens_per_s_per_gpu"
    mode = job.recompute.mode
    flops = {
        "model": tokens * model_flops_per_token(job.shape, job.sequence),
        "hardware": tokens
        * hardware_flops_per_token(
            job.shape, job.sequence, "none" if mode == "auto" else mode, operators=job.framework.operators
        ),
    }
    tflops, mfu, hfu = (cells.number(name) for name in ("tflops_per_gpu", "mfu_pct", "hfu_pct"))
    if tflops is not None:
        count = cells.value_or("flops_count", "model", "hardware, where recomputation is counted")
        return flops[count] / (tflops * 1e12 * devices), f"tflops_per_gpu ({count} FLOPs)"
    peak = cluster.device.peak(precision_of(job)) * devices
    if mfu is not None:
        return flops["model"] / (mfu / 100 * peak), "mfu_pct"
    if hfu is not None:
        return flops["hardware"] / (hfu / 100 * peak), "hfu_pct"
    return None, ""


SEQUENCE = 2048  # tokens of a sample of a model that is not published
_VOCABULARY = 50257  # GPT-2's
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")


def shape_of(cells: Cells, shape: ModelShape | None = None) -> tuple[ModelShape, int]:
    """The model of a row, and the tokens of a sample; a published model fills in what the row leaves empty.

    Args:
        shape: in place of the row's model.

    Raises:
        StrettoError: neither a published model nor layers, hidden and heads; or sizes that do not fit
            together.
    """
    sizes: dict[str, Any] = {name: cells.whole(name) for name in _SIZES if cells.whole(name) is not None}
    base = shape or _published(cells.word("model"), whole={"layers", "hidden", "heads"} <= sizes.keys())
    sequence = cells.value_or(
        "seq", SEQUENCE if base is None else base.sequence, "" if base is None else "the model's"
    )
    if base is None:
        sizes["vocab"] = cells.value_or("vocab", _VOCABULARY, "GPT-2's")
        family: Family = "llama" if cells.value_or("family", "gpt") == "llama" else "gpt"
        made = ModelShape(family=family, sequence=sequence, moe=_experts(cells, None), **sizes)
    else:
        made = _changed(cells, base, sizes, sequence)
    for name in ("kv_heads", "ffn") if base is None else ("vocab",) if shape is None else ():
        cells.value_or(name, getattr(made, name), "the family's" if base is None else "the model's")
    dropout = cells.number("dropout")
    return (made if dropout is None else replace(made, dropout=dropout)), sequence


@lru_cache(maxsize=256)
def _published(name: str | None, whole: bool) -> ModelShape | None:
    """The published model of that name; None where the name is a label beside sizes."""
    if name is None:
        if whole:
            return None
        raise StrettoError("the row has no model", hint="fill in model, or layers, hidden and heads")
    try:
        return find_shape(name)
    except StrettoError as error:
        if whole:
            return None
        raise StrettoError(
            f"{error.message}, and the row has no layers, hidden and heads", hint=error.hint
        ) from None


def _changed(cells: Cells, base: ModelShape, sizes: dict[str, Any], sequence: int) -> ModelShape:
    """A published model with the row's sizes; sizes that scale with the width follow the row's width."""
    family = cells.word("family")
    if family not in (None, base.family):
        raise StrettoError(f"family is {family}, but the model is a {base.family}", hint="leave family empty")
    hidden, heads = sizes.get("hidden", base.hidden), sizes.get("heads", base.heads)
    if (hidden, heads) != (base.hidden, base.heads):
        sizes.setdefault("kv_heads", heads if base.kv_heads == base.heads else base.kv_heads)
        sizes.setdefault("ffn", base.ffn * hidden // base.hidden)
        sizes.setdefault("head_dim", max(2, hidden // heads))
    if base.family == "gpt" or sequence > base.sequence:
        sizes["sequence"] = sequence
    return replace(base, **sizes, moe=_experts(cells, base.moe))


def _experts(cells: Cells, base: ExpertShape | None) -> ExpertShape | None:
    columns = {"experts": "experts", "top_k": "top_k", "expert_ffn": "ffn"}
    fields: dict[str, Any] = {
        field: cells.whole(name) for name, field in columns.items() if cells.whole(name) is not None
    }
    if base is None and fields and "experts" not in fields:
        raise StrettoError("the row's model has no experts", hint="fill in experts, or leave top_k empty")
    return replace(base, **fields) if base else ExpertShape(**fields) if fields else None


_MEGATRON = 128  # a rank's share of the vocabulary is a multiple of it, unless parameters are sharded
_BUCKET = 10**9  # bytes of DeepSpeed's buffer for reductions: 5e8 elements of 16 bits
_TOKENS = 16384  # up to which, without a pipeline, the batch of a replica is one microbatch
_LONGEST = 1_000_000  # forwards in a step of one replica, at most
_MODES: tuple[Mode, ...] = ("ddp", "zero1", "zero2", "zero3")
_SHARDS = (("zero1", "shard_states"), ("zero2", "shard_gradients"), ("zero3", "shard_parameters"))


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
    cells: Mapping[str, str], cluster: Cluster | None = None, shape: ModelShape | None = None
) -> Row:
    """The meaning of a row.

    Args:
        cells: by the columns' names or aliases.
        cluster: in place of the row's.
        shape: in place of the row's model.

    Raises:
        StrettoError: why it cannot be predicted.
    """
    row = Cells(cells)
    model, sequence = shape_of(row, shape)
    layout = _layout(row, model)
    machine = _cluster(row, layout.world, cluster)
    schedule, options = _schedule(row)
    global_batch, micro_batch = _batch(row, layout, sequence, int(options.get("chunks", 1)))
    precision = _precision(row, machine.device)
    recompute = _recompute(row)
    dp = _sharing(row, model, layout, machine, precision)
    framework = _framework(row, dp, precision)
    if (
        framework.wide_shards and layout.pp > 1
    ):  # FSDP sums whole gradients over the microbatches of a pipeline
        dp = replace(dp, reduce="step")
    attention = row.value_or("attention", "unfused" if _before_bf16(machine.device) else "fused")
    job = Job(
        shape=model,
        layout=layout,
        global_batch=global_batch,
        micro_batch=micro_batch,
        sequence=sequence,
        schedule=schedule,
        options=options,
        expert_tp=layout.expert_tp,
        sequence_parallel=layout.tp > 1 and row.value_or("sp", True),
        context="ulysses" if row.word("context") == "ulysses" else "ring",
        recompute=recompute,
        dp=dp,
        precision=precision,
        attention="flash" if attention == "fused" else "explicit",
        fused_loss=row.flag("fused_loss"),
        framework=framework,
        vocab_multiple=1 if dp.mode == "zero3" else _MEGATRON,
    )
    _check(job)
    return Row(
        cells=cells,
        job=job,
        cluster=machine,
        assumptions=_assumptions(row, attention),
        measured=measured_of(row, job, machine),
        defaults=dict(row.defaults),
    )


def _layout(row: Cells, shape: ModelShape) -> Layout:
    """The parallel degrees; dp is what the others leave of the devices.

    Raises:
        StrettoError: their product is not the number of devices.
    """
    tp, cp, ep, pp = (row.whole(axis) or 1 for axis in ("tp", "cp", "ep", "pp"))
    dp, gpus = row.whole("dp"), row.whole("gpus")
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


def _cluster(row: Cells, gpus: int, cluster: Cluster | None) -> Cluster:
    """The row's cluster, or the one in its place, with the row's nodes and network."""
    name = row.word("gpu")
    if cluster is None and name is None:
        raise StrettoError("the row has no GPU", hint="fill in gpu, as in A100-80GB-SXM")
    known = cluster or find_cluster(name or "")
    node = row.whole("node_size")
    network = row.word("network")
    speed = row.number("network_gbs")
    if node not in (None, known.node):
        outer = replace(known.outer, bandwidth=known.outer.bandwidth * known.node / node)
        known = replace(known, node=node, outer=outer)
    if network not in (None, known.outer.kind):
        link = next(other.outer for other in clusters() if other.outer.kind == network)
        known = replace(known, outer=replace(link, bandwidth=known.outer.bandwidth))
    if speed is not None:
        known = replace(known, outer=replace(known.outer, bandwidth=speed * 1e9))
    return known.sized(gpus)


def _schedule(row: Cells) -> tuple[str, dict[str, Any]]:
    """The schedule and its options; `chunks` of 1 is no option."""
    options = {name: row.whole(name) for name in ("chunks", "group", "waves")}
    if options["chunks"] == 1:
        del options["chunks"]
    usual = "interleaved" if options.get("chunks") else "1f1b"
    schedule = (
        row.value_or("schedule", usual) if (row.whole("pp") or 1) > 1 else row.word("schedule") or usual
    )
    return schedule, {name: value for name, value in options.items() if value is not None}


def _batch(row: Cells, layout: Layout, sequence: int, chunks: int) -> tuple[int, int]:
    """Samples of a step and of a microbatch, each derived from the others where it is empty.

    Raises:
        StrettoError: the three contradict each other.
    """
    whole, micro, count = (row.whole(name) for name in ("global_batch", "micro_batch", "microbatches"))
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


def _precision(row: Cells, device: Device) -> Precision:
    """Types of weights and gradients; devices before bfloat16 have float16 only."""
    word = row.value_or("precision", "fp16" if _before_bf16(device) else "bf16", "of the device")
    summed = "fp32" if word == "fp32" else row.value_or("gradients", "fp32")
    gradients: GradientType = "same" if summed == "same" else "float32"
    types: dict[str, Dtype] = {"fp32": "float32", "fp16": "float16"}
    dtype = types.get(word, "bfloat16")
    return Precision(dtype=dtype, gradients=gradients, fp8="tensor" if word == "fp8" else "none")


def _before_bf16(device: Device) -> bool:
    """Whether the device is older than Ampere: neither bfloat16 nor FlashAttention."""
    return "fp16" in device.tflops and "bf16" not in device.tflops


def _recompute(row: Cells) -> Recompute:
    """What the backward repeats; operators imply selective recomputation, inputs in host memory full."""
    operators, on_host = row.word("recompute_operators"), row.word("offload_inputs") == "cpu"
    mode = cast(
        RecomputeMode, row.value_or("recompute", "selective" if operators else "full" if on_host else "none")
    )
    for name, there, needed in (
        ("recompute_operators", bool(operators), "selective"),
        ("offload_inputs", on_host, "full"),
    ):
        if there and mode != needed:
            raise StrettoError(
                f"{name} is {row.word(name)}, but recompute is {mode}",
                hint=f"recompute={needed}, or leave {name} empty",
            )
    return Recompute(mode, shard_inputs=row.flag("shard_inputs"))


def _framework(row: Cells, dp: DataParallel, precision: Precision) -> Framework:
    """Whose ways the run follows; if that is empty, Megatron's, or FSDP's where parameters are sharded."""
    sharded = dp.mode == "zero3"
    name = row.value_or("framework", "fsdp") if sharded else row.word("framework") or "megatron"
    operators = (row.word("recompute_operators") or "core_attn").split("+")
    return Framework(
        operators=tuple(cast(Operator, word) for word in operators),
        inputs_on_host=row.word("offload_inputs") == "cpu",
        fused_softmax=True,
        fused_activation=name == "megatron" or row.word("software") in ("compiled", "tuned"),
        wide_shards=name == "fsdp" and sharded,
        buckets=_BUCKET if name == "deepspeed" and dp.mode != "ddp" else 0,
        dtensor_loss=name == "fsdp",
        lasting_gradients=name == "deepspeed" and precision.gradients == "float32" and not sharded,
    )


def _sharing(
    row: Cells, shape: ModelShape, layout: Layout, cluster: Cluster, precision: Precision
) -> DataParallel:
    """How states are sharded; if that is empty, at least as much as makes them fit."""
    zero = row.word("zero")
    if zero is None:
        least = _MODES.index(least_sharing(shape, layout, cluster, precision))
        zero = "0"
        if layout.cp * layout.dp > 1:
            zero = row.value_or("zero", str(max(1, least)), "what fits" if least > 1 else "")
    mode = _MODES[int(zero)]
    size = row.whole("shard")
    shards = {} if size is None else {f: size for m, f in _SHARDS if MODES.index(m) <= MODES.index(mode)}
    places: dict[str, Offload] = {
        name: "cpu" for name in ("offload", "offload_parameters") if row.word(name) == "cpu"
    }
    # frameworks keep gradients whole until the last microbatch of a pipeline
    reduce: ReduceChoice = "step" if mode == "zero2" and layout.pp > 1 else "auto"
    return DataParallel(mode=mode, reduce=reduce, **shards, **places)  # pyright: ignore[reportArgumentType]


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


def _assumptions(row: Cells, attention: str) -> Assumptions:
    """How the run was executed: the software, and what overlapped."""
    profile = row.value_or("software", "unfused" if attention == "unfused" else "today")
    return Assumptions(
        overlap=row.get("overlap", bool) is not False,
        blocking=row.flag("blocking"),
        software=software_profile(profile),
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
