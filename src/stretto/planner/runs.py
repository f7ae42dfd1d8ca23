"""Runs in the rows of a table or as words: the job that a row describes. Cells that contradict each other are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from stretto.errors import Problem, StrettoError, nearest
from stretto.job.data_parallel import MODES, DataParallelSettings, Dtype, Precision
from stretto.job.experts import ExpertShape
from stretto.job.families import Family
from stretto.job.flops import hardware_flops_per_token, model_flops_per_token
from stretto.job.framework import CORE, OPERATORS, Framework, Operator, framework_behaviour
from stretto.job.job import VOCAB_MULTIPLE, Job, Recompute, RecomputeMode
from stretto.job.lora import EVERY_LINEAR, LoraShape
from stretto.job.optimiser import Optimiser
from stretto.job.parameters import count_parameters
from stretto.job.presets import find_shape
from stretto.job.rules import problems
from stretto.job.shape import ModelShape
from stretto.layout.layout import ORDER, Layout
from stretto.layout.shards import Mode
from stretto.planner.assumptions import Assumptions, SoftwareAssumptions, software_profile
from stretto.planner.columns import Cells, allowed_values, read_cells
from stretto.planner.estimate import precision_of, usual_dtype
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.networks import LATENCIES, parse_network

MemoryKind = Literal["allocated", "reserved", "device"]
FlopsKind = Literal["model", "hardware"]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measurements in a row.

    Attributes:
        seconds: seconds of a step, or None if no column gives them.
        by: the column they come from, and which FLOPs it counts.
        memory: bytes of the fullest device, or None if not recorded.
        kind: the memory that was recorded.
        out_of_memory: the run failed for lack of memory.
    """

    seconds: float | None
    by: str
    memory: float | None
    kind: MemoryKind
    out_of_memory: bool


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run that can be predicted.

    Attributes:
        defaults: the defaults of empty cells: name to value, with the reason.
    """

    job: Job
    cluster: Cluster
    assumptions: Assumptions
    measured: Measurement
    defaults: Mapping[str, str]

    @property
    def group(self) -> tuple[object, ...]:
        """The key that alternative layouts of one training program share."""
        job = self.job
        sizes = (job.global_batch, job.sequence, job.layout.world, job.precision)
        return (job.shape, self.cluster.name, self.assumptions.software, *sizes)

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


def read_run(
    row: Mapping[str, str], cluster: Cluster | None = None, shape: ModelShape | None = None
) -> RunRecord:
    """Return the run that a row describes.

    Args:
        row: cells by the columns' names or aliases.
        cluster: cluster in place of the row's.
        shape: model in place of the row's.

    Raises:
        StrettoError: the reason why it cannot be predicted.
    """
    return run_of(read_cells(row), cluster, shape)


_MICROBATCH = 16384  # tokens up to which, without a pipeline, the batch of a replica is one microbatch
_LONGEST = 1_000_000  # forwards in a step of one replica, at most
_MEGATRON = 128  # of each rank's share of the vocabulary, unless parameters are sharded
_KERNELS = {"flash-1": "fused", "flash-2": "today", "flash-3": "tuned", "cudnn": "tuned"}  # profiles' speeds


def run_of(cells: Cells, cluster: Cluster | None = None, shape: ModelShape | None = None) -> RunRecord:
    """Return the run that the values of a row describe; `read_run` says the rest."""
    model, sequence = model_of(cells, shape)
    machine = cluster_of(cells, cluster)
    layout = layout_of(cells, model, machine)
    machine = machine.sized(layout.world)
    schedule, options = _schedule(cells, layout.pp)
    stages = layout.pp * int(options.get("chunks", 1))
    global_batch, micro_batch = _batch(cells, layout, sequence, stages)
    half = "fp16" if usual_dtype(machine.device) == "float16" else "bf16"
    word = cells.get_or("precision", half, "of the device")
    types: dict[str, Dtype] = {"fp32": "float32", "fp16": "float16"}
    accumulated = "fp32" if word == "fp32" else cells.get_or("gradients", "fp32")
    precision = Precision(
        dtype=types.get(word, "bfloat16"),
        gradients="same" if accumulated == "same" else "float32",
        fp8="tensor" if word in ("fp8", "fp4") else "none",
    )
    rule: Any = cells.get("optimizer", str) or "adamw"
    recompute, base = _recomputation(cells, model.layers, stages)
    dp = _sharing(cells, layout, least_sharing(model, layout, machine, precision))
    name = cells.get_or("framework", "stretto")
    if (name, cells.get("software", str)) == ("nemo", "tuned"):
        cells.values["fused_loss"] = cells.get_or("fused_loss", True, "of NeMo's recipes")
    software, attention = _software(cells, old=half == "fp16", stretto=name == "stretto")
    if name == "deepspeed":  # whose pipelines overlap nothing of a layer
        pipelined = dp.mode != "zero3"
        software = replace(software, ahead=not pipelined, serial=pipelined or software.serial, spread=0.25)
    job = Job(
        shape=model,
        layout=layout,
        global_batch=global_batch,
        micro_batch=micro_batch,
        sequence=sequence,
        schedule=schedule,
        options=options,
        expert_tp=layout.expert_tp,
        sequence_parallel=layout.tp > 1 and cells.get_or("sp", True),
        context="ulysses" if cells.get("context", str) == "ulysses" else "ring",
        recompute=recompute,
        dp=dp,
        optimiser=Optimiser(
            clip=None,
            name=rule,
            states=cells.get("optimizer_states", str) or "float32",  # pyright: ignore[reportArgumentType]
            momentum=0.9 if rule == "sgd" else 0.0,  # without which it has no states
        ),
        precision=precision,
        attention="auto" if attention == "fused" else "explicit",
        loss_chunk=None,
        fused_loss=bool(cells.get("fused_loss", bool)),
        framework=base,
        vocab_multiple=VOCAB_MULTIPLE,
    )
    if name != "stretto":
        # frameworks keep gradients whole until the last microbatch of a pipeline
        keeps_gradients = layout.pp > 1 and (dp.mode == "zero2" or (dp.mode == "zero3" and name == "fsdp"))
        if keeps_gradients and dp.mode == "zero2":
            cells.report("zero", "2", "whole gradients are kept beside shards: more memory than zero 1")
        fused = cells.get("software", str) in ("compiled", "tuned")
        job = replace(
            job,
            dp=replace(dp, reduce="step" if keeps_gradients else "auto"),
            loss_chunk=0,
            framework=framework_behaviour(name, dp=dp, precision=precision, compiled=fused, recompute=base),
            vocab_multiple=1 if dp.mode == "zero3" else _MEGATRON,
        )
    forwards = (job.microbatches or 1) * stages
    if forwards > _LONGEST:  # before its program is built
        raise StrettoError(
            f"{forwards:,} forwards in a step of {job.microbatches:,} microbatches",
            hint=f"at most {_LONGEST:,}: check global_batch and micro_batch",
        )
    if broken := problems(job):
        raise broken[0]
    assumptions = Assumptions(
        overlap=cells.get("overlap", bool) is not False,
        blocking=bool(cells.get("blocking", bool)),
        products="fp4" if word == "fp4" else None,
        software=software,
    )
    return RunRecord(
        job=job,
        cluster=machine,
        assumptions=assumptions,
        measured=_measured(cells, job, machine),
        defaults=dict(cells.defaults),
    )


def model_of(cells: Cells, shape: ModelShape | None) -> tuple[ModelShape, int]:
    """Return the model of a row and the tokens of a sample; a published model fills in what is empty.

    Raises:
        StrettoError: neither a published model nor layers, hidden and heads; or sizes that do not fit
            together.
    """
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
    sizes: dict[str, Any] = {name: cells.values[name] for name in names if name in cells.values}
    complete = {"layers", "hidden", "heads"} <= sizes.keys()
    name, base = cells.get("model", str), shape
    if base is None and name is not None:
        try:
            base = find_shape(name)
        except StrettoError:
            if not complete:
                raise
    if base is None and not complete:
        raise StrettoError("the row has no model", hint="fill in model, or layers, hidden and heads")
    dropout = cells.get("dropout", float)
    if base is None:
        sequence = _sequence_of(cells) or cells.get_or("seq", 2048)
        sizes["vocab"] = cells.get_or("vocab", 50257, "GPT-2's")
        family = cast(Family, cells.get_or("family", "gpt"))
        experts = experts_of(cells, None)
        model = ModelShape(family=family, sequence=sequence, moe=experts, **sizes)
        for name in ("kv_heads", "ffn"):
            cells.get_or(name, getattr(model, name), "the family's")
    else:
        family = cells.get("family", str)
        if family not in (None, base.family, "llama" if base.rotary else "gpt"):
            raise StrettoError(
                f"family is {family}, but the model is a {base.family}", hint="leave family empty"
            )
        sequence = _sequence_of(cells) or cells.get_or("seq", base.pretraining_sequence, "the model's")
        if not base.rotary or sequence > base.sequence:
            sizes["sequence"] = sequence
        model = replace(base, **sizes, moe=experts_of(cells, base.moe))
        if shape is None:
            cells.get_or("vocab", model.vocab, "the model's")
    if (rank := cells.get("lora_rank", int)) is not None:
        targets = tuple(map(str.strip, cells.get_or("lora_targets", EVERY_LINEAR).split("+")))
        try:
            model = replace(model, lora=LoraShape(rank=rank, alpha=rank, targets=targets))
        except Problem as problem:
            raise StrettoError(f"lora_{problem}", hint=problem.fix) from None
    elif "lora_targets" in cells.values:
        raise StrettoError(
            "lora_targets without a rank", hint="fill in lora_rank, or leave lora_targets empty"
        )
    return (model if dropout is None else replace(model, dropout=dropout)), sequence


def experts_of(cells: Cells, base: ExpertShape | None) -> ExpertShape | None:
    """Return the experts of a row, over those of a published model.

    Raises:
        StrettoError: their number is missing.
    """
    names = ("experts", "top_k", "expert_ffn", "shared_ffn", "dense_layers")
    stated = {name: cells.values[name] for name in names if name in cells.values}
    fields: dict[str, Any] = {name.replace("expert_ffn", "ffn"): value for name, value in stated.items()}
    if base is None and fields and "experts" not in fields:
        raise StrettoError("the row's model has no experts", hint="fill in experts, or leave top_k empty")
    return replace(base, **fields) if base else ExpertShape(**fields) if fields else None


def cluster_of(cells: Cells, cluster: Cluster | None) -> Cluster:
    """Return the row's cluster, or the one in its place, with the row's nodes and network.

    Raises:
        StrettoError: no device, or an unknown one; or a network without kind and speed.
    """
    name = cells.get("gpu", str)
    if cluster is None:
        if name is None:
            raise StrettoError("the row has no GPU", hint="fill in gpu, as in A100-80GB-SXM")
        cluster = find_cluster(name)
    node = cells.get("node_size", int)
    if node not in (None, cluster.node):
        outer = replace(cluster.outer, bandwidth=cluster.outer.bandwidth * cluster.node / node)
        cluster = replace(cluster, node=node, outer=outer)
    text, speed = cells.get("network", str), cells.get("network_gbs", float)
    if text is not None and (network := parse_network(text)) is not None:
        outer = network.link(cluster)
        cluster = replace(cluster, outer=outer)
        if text not in LATENCIES:
            rate = f"{outer.kind}, {outer.bandwidth / 1e9:g} GB/s a device"
            cells.report("network", rate, f"read from {text!r}, {cluster.node} devices a node")
    return cluster if speed is None else replace(cluster, outer=replace(cluster.outer, bandwidth=speed * 1e9))


def layout_of(cells: Cells, shape: ModelShape, machine: Cluster) -> Layout:
    """Return the parallel degrees; of tp, pp and dp, those that are empty follow from the number of devices.
    If both tp and pp are empty and dp is not, tp is as large as the node and the heads allow (Narayanan et
    al. 2021, section 3).

    Raises:
        StrettoError: their product is not the number of devices.
    """
    tp, cp, ep, dp, pp = (cells.get(axis, int) for axis in ("tp", "cp", "ep", "dp", "pp"))
    cp, ep = cp or 1, ep or 1
    gpus = cells.get("gpus", int) or machine.devices
    both, over = divmod(gpus or 0, (dp or 1) * cp)
    if dp is not None and both and not over and not (tp and pp):
        if tp is None and pp is None:
            sizes = range(1, min(machine.node, both) + 1)
            tp = max(n for n in sizes if both % n == shape.heads % n == shape.kv_heads % n == 0)
        tp = tp or (both // pp if pp and both % pp == 0 else 1)
        pp = pp or (both // tp if both % tp == 0 else 1)
        for axis, degree in (("tp", tp), ("pp", pp)):
            if degree > 1:
                cells.get_or(axis, degree, "what gpus and the other degrees leave")
    tp, pp = tp or 1, pp or 1
    if gpus is None:
        gpus = cells.get_or("gpus", tp * cp * pp * (dp or 1), "tp x cp x dp x pp")
    copies, over = divmod(gpus, tp * cp * pp)
    degrees = f"tp={tp} x cp={cp} x pp={pp}"
    if over or not copies:
        closest = max(1, round(gpus / (tp * cp * pp))) * tp * cp * pp
        raise StrettoError(f"{degrees} does not divide {gpus} GPUs", hint=f"nearest: gpus={closest}")
    if dp not in (None, copies):
        raise StrettoError(f"{degrees} x dp={dp} is not {gpus} GPUs", hint=f"nearest: dp={copies}")
    if copies > 1:
        cells.get_or("dp", copies, "what the others leave")
    expert_tp = cells.get("expert_tp", int)
    if shape.moe is not None and ep > 1 and tp > 1 and expert_tp is None:
        expert_tp = cells.get_or("expert_tp", 1, "experts whole, as in Megatron-Core")
    order = cells.get("order", str) or ORDER
    return Layout(tp=tp, cp=cp, ep=ep, dp=copies, pp=pp, expert_tp=expert_tp, order=order)


def _schedule(cells: Cells, pp: int) -> tuple[str, dict[str, Any]]:
    """Return the schedule and its options; `chunks` of 1 is none."""
    options = {
        name: value
        for name in ("chunks", "group", "waves")
        if (value := cells.get(name, int)) is not None and (name, value) != ("chunks", 1)
    }
    default = "interleaved" if "chunks" in options else "1f1b"
    if pp > 1:
        return cells.get_or("schedule", default), options
    return cells.get("schedule", str) or default, options


_SPEEDS = ("tokens_per_s_per_gpu", "tokens_per_s", "samples_per_s")
# Largest relative difference between figures of one run that were rounded, or averaged over other steps.
_ROUNDING = 0.06


def _tokens_of_step(cells: Cells, devices: int | None) -> tuple[float, str] | None:
    """Return the tokens of a step as speed times time, and the two columns; None if one is not given."""
    seconds, rate = cells.get("step_time_s", float), cells.get("tokens_per_s", float)
    each = cells.get("tokens_per_s_per_gpu", float)
    if seconds is None:
        return None
    if rate is not None:
        return rate * seconds, "tokens_per_s x step_time_s"
    if each is None or devices is None:
        return None
    return each * devices * seconds, "tokens_per_s_per_gpu x gpus x step_time_s"


def _nearest_multiple(cells: Cells, name: str, figure: float, unit: int, reason: str) -> int:
    """Fill an empty cell with the multiple of `unit` nearest to the figure that follows from other columns.

    Raises:
        StrettoError: none is as near as rounding.
    """
    value = max(1, round(figure / unit)) * unit
    if abs(value / figure - 1) > _ROUNDING:
        raise StrettoError(
            f"{name} is empty and {reason} is {figure:.4g}, no multiple of {unit}", hint=f"fill in {name}"
        )
    cells.values[name] = value
    cells.report(name, value, reason)
    return value


def _sequence_of(cells: Cells) -> int | None:
    """Return the row's seq; if it is empty, from its speed, time and batch if it has all three."""
    counts = (cells.get(name, int) for name in ("global_batch", "micro_batch", "microbatches", "dp"))
    total, micro, count, dp = counts
    samples, seconds = cells.get("samples_per_s", float), cells.get("step_time_s", float)
    batch: float | None = total or (micro * count * dp if micro and count and dp else None)
    batch = batch or (samples * seconds if samples and seconds else None)
    step = _tokens_of_step(cells, cells.get("gpus", int))
    if cells.get("seq", int) is None and batch and step:
        length = step[0] / batch
        unit = 128 if length >= 128 else 1
        return _nearest_multiple(cells, "seq", length, unit, f"{step[1]} / global_batch")
    return cells.get("seq", int)


def _batch(cells: Cells, layout: Layout, sequence: int, stages: int) -> tuple[int, int]:
    """Return the samples of a step and of a microbatch, each derived from the others if it is empty, or from
    the measured speed and time.

    Raises:
        StrettoError: the three contradict each other, or a step was timed whose samples are not known.
    """
    total, micro, count = (cells.get(name, int) for name in ("global_batch", "micro_batch", "microbatches"))
    seconds, samples = cells.get("step_time_s", float), cells.get("samples_per_s", float)
    if total is None and seconds is not None and not (micro and count):
        unit = layout.dp * (micro or 1) * (count or 1)
        if samples is not None:
            total = _nearest_multiple(
                cells, "global_batch", samples * seconds, unit, "samples_per_s x step_time_s"
            )
        elif (step := _tokens_of_step(cells, layout.world)) is not None:
            total = _nearest_multiple(cells, "global_batch", step[0] / sequence, unit, f"{step[1]} / seq")
        elif not count:
            raise StrettoError(
                "step_time_s is given, but neither global_batch nor the speed in tokens or samples is",
                hint="fill in global_batch, or micro_batch and microbatches",
            )
    if total is None:
        microbatches = count or cells.get_or("microbatches", stages, "one a stage")
        total = cells.get_or("global_batch", (micro or 1) * layout.dp * microbatches, "of all microbatches")
    if micro is None:
        replica = max(1, total // (layout.dp * (count or 1)))
        single = layout.pp == 1 and replica * sequence <= _MICROBATCH
        micro = cells.get_or("micro_batch", replica if count or single else 1)
    if count is not None and micro * layout.dp * count != total:
        raise StrettoError(
            f"global_batch is {total}, but {count} microbatches of {micro} on dp={layout.dp} are "
            f"{micro * layout.dp * count}",
            hint="leave one of global_batch, micro_batch and microbatches empty",
        )
    return total, micro


def least_sharing(shape: ModelShape, layout: Layout, cluster: Cluster, precision: Precision) -> Mode:
    """Return the least sharding of states that leaves three tenths of a device's memory to all else."""
    parameters = count_parameters(shape).total / (layout.tp * layout.pp * layout.ep)
    copies = layout.cp * layout.dp
    gradient = 2 if precision.gradients == "same" else 4
    room = 0.7 * cluster.device.memory / parameters
    if shape.lora is not None:  # adapters have few gradients and states
        return "ddp" if room >= 2 else "zero3"
    if room >= 14 + gradient:
        return "ddp"
    if room >= 2 + gradient + 12 / copies:
        return "zero1"
    return "zero2" if room >= 2 + (gradient + 12) / copies else "zero3"


def _sharing(cells: Cells, layout: Layout, needed: Mode) -> DataParallelSettings:
    """Return how states are sharded: by default optimizer states, or as much more as makes them fit."""
    modes: tuple[Mode, ...] = ("ddp", "zero1", "zero2", "zero3")
    zero = cells.get("zero", str) or "0"
    if layout.cp * layout.dp > 1:
        more = modes.index(needed) > 1
        zero = cells.get_or("zero", str(modes.index(needed)) if more else "1", "what fits" if more else "")
    mode = modes[int(zero)]
    size, offload = cells.get("shard", int), cells.get("offload", str)
    fields = (("zero1", "shard_states"), ("zero2", "shard_gradients"), ("zero3", "shard_parameters"))
    shards = {field: size for start, field in fields if size and MODES.index(start) <= MODES.index(mode)}
    places = {"offload": "nvme", "path": "/local"} if offload == "nvme" else dict[str, str]()
    if offload in ("optimizer", "both"):
        places["offload"] = "cpu"
    if offload in ("parameters", "both"):
        places["offload_parameters"] = "cpu"
    return DataParallelSettings(mode=mode, **shards, **places)  # pyright: ignore[reportArgumentType]


def _recomputation(cells: Cells, layers: int, stages: int) -> tuple[Recompute, Framework]:
    """Return what is recomputed, and the framework that repeats these operators.

    Raises:
        StrettoError: an unknown operator, or cells that contradict each other.
    """
    blocks, on_host = cells.get("recompute_layers", int), cells.get("offload_inputs", str) == "cpu"
    text = cells.get("recompute_operators", str) or ""
    operators = [operator for operator in re.split(r"[+,\s]+", text) if operator]
    for operator in operators:
        if operator not in OPERATORS:
            similar = nearest(operator, OPERATORS)
            raise StrettoError(
                f"recompute_operators has {operator!r}, allowed: {allowed_values('recompute_operators')}",
                hint=f"did you mean {similar!r}?" if similar else None,
            )
    mode = cast("RecomputeMode | None", cells.get("recompute", str))
    if mode is None:
        mode = "selective" if operators else "full" if blocks or on_host else "none"
        cells.report("recompute", mode)
    for name, stated, needed in (
        ("recompute_operators", bool(operators), "selective"),
        ("offload_inputs", on_host, "full"),
        ("recompute_layers", blocks is not None, "full"),
    ):
        if stated and mode != needed:
            raise StrettoError(
                f"{name} is {cells.values[name]}, but recompute is {mode}",
                hint=f"recompute={needed}, or leave {name} empty",
            )
    if blocks is not None and blocks >= -(-layers // stages):
        blocks = None
    shard_inputs = bool(cells.get("shard_inputs", bool)) and blocks is None
    repeated = cast("tuple[Operator, ...]", tuple(dict.fromkeys(operators))) or CORE
    framework = Framework(operators=repeated, inputs_on_host=on_host)
    return Recompute(mode, blocks=blocks, shard_inputs=shard_inputs), framework


def _software(cells: Cells, *, old: bool, stretto: bool) -> tuple[SoftwareAssumptions, str]:
    """Return the profile of the software with the stated kernel's speed, and "fused" or "unfused" attention.

    Args:
        old: the device is older than Ampere: neither bfloat16 nor FlashAttention.
    """
    kernel = cells.get("attention", str)
    name = cells.get_or("software", "today" if stretto or not (old or kernel == "unfused") else "unfused")
    early = not stretto and (old or name in ("serial", "unfused", "eager"))
    attention = kernel or cells.get_or("attention", "unfused" if early else "fused")
    profile = software_profile(name)
    if kernel in _KERNELS:
        speeds = software_profile(_KERNELS[kernel])
        profile = replace(profile, attention=speeds.attention, hopper=speeds.hopper)
    return profile, "unfused" if attention == "unfused" else "fused"


def _measured(cells: Cells, job: Job, cluster: Cluster) -> Measurement:
    """Return the seconds of a step from its time, else from tokens or samples a second, else from TFLOP/s,
    MFU or HFU; and the memory.
    """
    memory, failed = cells.get("peak_mem_gib", float), bool(cells.get("oom", bool))
    times = [] if failed else [*_step_times(cells, job, cluster)]
    seconds, by = times[0] if times else (None, "")
    exact = [(each, name) for each, name in times if name in ("step_time_s", *_SPEEDS)]
    for other, name in exact[1:]:
        ratio, first = other / exact[0][0], exact[0][1]
        if abs(ratio - 1) > _ROUNDING:
            stated = cast(float, cells.values[first])
            implied = stated * ratio if first == "step_time_s" else stated / ratio
            raise StrettoError(
                f"{first} is {stated:g}, but {name}={cells.values[name]:g} with {job.global_batch} x "
                f"{job.sequence} tokens a step makes it {implied:.4g}",
                hint="correct global_batch, seq or one of the two, or leave one of the two empty",
            )
    kind = cells.get("memory_count", str) or "allocated"
    if memory is not None:
        cells.get_or("memory_count", kind)
    return Measurement(
        seconds=seconds,
        by=by,
        memory=memory and memory * 2**30,
        kind=cast(MemoryKind, kind),
        out_of_memory=failed,
    )


def _step_times(cells: Cells, job: Job, cluster: Cluster) -> Iterator[tuple[float, str]]:
    """Yield the seconds of a step by each measured column, and the column."""
    tokens = job.global_batch * job.sequence
    if (value := cells.get("step_time_s", float)) is not None:
        yield value, "step_time_s"
    for name, amount in (
        ("tokens_per_s_per_gpu", tokens / job.layout.world),
        ("tokens_per_s", tokens),
        ("samples_per_s", job.global_batch),
    ):
        if (value := cells.get(name, float)) is not None:
            yield amount / value, name
    flops = {count: tokens * per_token for count, per_token in flops_per_token(job).items()}
    rates = (("tflops_per_gpu", 1e12), ("mfu_pct", peak_flops(cells, job, cluster) / 100))
    for name, scale in (*rates, ("hfu_pct", rates[1][1])):
        if (value := cells.get(name, float)) is None:
            continue
        count, by = ("hardware" if name == "hfu_pct" else "model"), name
        if name == "tflops_per_gpu":
            count = cells.get_or("flops_counted", "model", "hardware if recomputation counts")
            by = f"{name} ({count} FLOPs)"
        yield flops[cast(FlopsKind, count)] / (value * scale * job.layout.world), by


def peak_flops(cells: Cells, job: Job, cluster: Cluster) -> float:
    """Return the peak FLOP/s of a device in the precision of the row."""
    return cluster.device.peak("fp4" if cells.get("precision", str) == "fp4" else precision_of(job))


def flops_per_token(job: Job) -> dict[FlopsKind, float]:
    """Return the FLOPs per token, of the model and as the devices compute them."""
    mode, blocks = job.recompute.mode, job.recompute.blocks
    model = model_flops_per_token(job.shape, job.sequence)
    hardware = hardware_flops_per_token(
        job.shape, job.sequence, "none" if mode == "auto" else mode, operators=job.framework.operators
    )
    if blocks is not None:
        stages = job.layout.pp * int(job.options.get("chunks") or 1)
        hardware = model + (hardware - model) * min(1.0, blocks * stages / job.shape.layers)
    return {"model": model, "hardware": hardware}
