"""Who holds what, and when, in Megatron-LM's arguments: layout, pipeline, data parallelism, recomputation."""

from __future__ import annotations

import re
from math import prod

from stretto.errors import StrettoError
from stretto.program import PLAIN
from stretto.program.text.megatron import megatron_layout
from stretto_interop.frameworks.fields import EXPERTS, JOB, MODEL, RATE, RUN, JobValues
from stretto_interop.frameworks.mapping import (
    Rule,
    Settings,
    Values,
    flag,
    ignored,
    refused,
    renamed,
    require,
    restricted,
    rule,
)

_INTERLEAVED = "interleaved"
_SCHEDULES = (PLAIN, _INTERLEAVED)


def processes(settings: Settings) -> tuple[int, int]:
    """Return the number of processes, and of the data-parallel ranks that tp, cp and pp leave.

    Raises:
        StrettoError: their number is unknown, or does not divide.
    """
    world = settings.get("world-size")
    tp, cp, pp = (settings.get(name, 1) for name in _DEGREES)
    if world is None:
        raise StrettoError(
            "nothing tells how many processes there are: no --nproc-per-node and --nnodes of torchrun",
            hint="say how many: predict takes --cluster h100:64, migrate --devices 64",
        )
    dp, remainder = divmod(world, tp * cp * pp)
    if remainder or not dp:
        closest = max(1, round(world / (tp * cp * pp))) * tp * cp * pp
        raise StrettoError(
            f"{world} processes do not divide by tp={tp} x cp={cp} x pp={pp}", hint=f"nearest: {closest}"
        )
    return world, dp


_DEGREES = ("tensor-model-parallel-size", "context-parallel-size", "pipeline-model-parallel-size")


def _write_experts(values: JobValues) -> Settings:
    if values[EXPERTS] is None:
        return {}
    tp, expert_tp = values[JOB.layout.tp], values[JOB.expert_tp]
    return {
        "expert-model-parallel-size": values[JOB.layout.ep],
        "expert-tensor-parallel-size": tp if expert_tp is None else expert_tp,
    }


def _read_experts(settings: Settings) -> Values:
    tp = settings.get("tensor-model-parallel-size", 1)
    expert_tp = settings.get("expert-tensor-parallel-size", tp)
    return {
        JOB.layout.ep: settings.get("expert-model-parallel-size", 1),
        JOB.expert_tp: None if expert_tp == tp else expert_tp,
    }


_ORDERS = {"tp-cp-ep-dp-pp": {}, "tp-cp-ep-pp-dp": {"use-tp-pp-dp-mapping": True}}


def _write_order(values: JobValues) -> Settings:
    require(values, JOB.layout.order, _ORDERS, f"Megatron-LM numbers ranks as {' or '.join(_ORDERS)}")
    return _ORDERS[values[JOB.layout.order]]


def _read_sequence_parallel(settings: Settings) -> Values:
    split = settings.get("tensor-model-parallel-size", 1) > 1  # else Megatron-LM switches it off
    return {JOB.sequence_parallel: split and "sequence-parallel" in settings}


def _read_context(settings: Settings) -> Values:
    kinds = settings.get("cp-comm-type", ["p2p"])
    if settings.get("context-parallel-size", 1) == 1 or kinds == ["p2p"]:
        return {JOB.context: "ring"}
    if kinds == ["a2a"]:
        return {JOB.context: "ulysses"}
    raise StrettoError(f"--cp-comm-type is {' '.join(kinds)}, which is not priced", hint="what is: p2p, a2a")


# ------------------------------------------------------------------ pipeline


def _write_pipeline(values: JobValues) -> Settings:
    """The schedule follows from the stages of a rank: one is 1F1B, several are interleaved."""
    instead = "Megatron-LM makes its schedule itself and takes none from a file"
    require(values, RUN.schedule.file, (None,), instead)
    name, pp = values[JOB.schedule], values[JOB.layout.pp]
    require(values, JOB.schedule, _SCHEDULES, "Megatron-LM has 1F1B and interleaved 1F1B")
    chunks = (values[RUN.schedule.chunks] or 2) if name == _INTERLEAVED else values[RUN.schedule.chunks] or 1
    if pp == 1 and chunks > 1:
        instead = "Megatron-LM has several stages on a rank only in a pipeline of two ranks or more"
        raise refused(RUN.schedule.chunks, chunks, instead, (1,))
    group = values[RUN.schedule.group]
    if group is not None and group < pp:
        instead = f"Megatron-LM's groups have at least as many microbatches as the pipeline ranks, {pp}"
        raise refused(RUN.schedule.group, group, instead, (pp,))
    grouped = {} if group is None else {"microbatch-group-size-per-virtual-pipeline-stage": group}
    return {**_write_stages(values, pp, chunks), **grouped}


def _write_stages(values: JobValues, pp: int, chunks: int) -> Settings:
    """Write the cut, as a layout in letters unless it is Megatron's own."""
    depth = pp * chunks
    if depth == 1:
        return {}
    layers = values[MODEL.layers]
    stages = values.job.stages(depth)
    blocks = [len(range(max(1, stage.start), min(layers + 1, stage.stop))) for stage in stages]
    even = layers % depth == 0 and blocks == [layers // depth] * depth
    if even:
        return {"num-virtual-stages-per-pipeline-rank": chunks} if chunks > 1 else {}
    return {"pipeline-model-parallel-layout": megatron_layout(stages, layers)}


def _read_pipeline(settings: Settings) -> Values:
    pp = settings.get("pipeline-model-parallel-size", 1)
    layers = settings["num-layers"]
    text = settings.get("pipeline-model-parallel-layout")
    if text is not None:
        counts = _counts(text, layers)
    elif pp == 1:
        return {JOB.schedule: PLAIN}
    else:
        counts = _even(settings, layers, pp)
    chunks, remainder = divmod(len(counts), pp)
    if remainder:
        raise StrettoError(
            f"--pipeline-model-parallel-layout has {len(counts)} stages, no multiple of {pp} pipeline ranks",
            hint=f"nearest: {max(1, chunks) * pp} stages",
        )
    group = settings.get("microbatch-group-size-per-virtual-pipeline-stage")
    return {
        JOB.stage_layers: tuple(counts),
        JOB.schedule: PLAIN if chunks == 1 else _INTERLEAVED,
        **({RUN.schedule.chunks: chunks, RUN.schedule.group: group} if chunks > 1 else {}),
    }


def _counts(text: str, layers: int) -> list[int]:
    """Return the layers of each stage of a layout such as "Et|(tt|)*2tL", embedding and head included."""
    letters = text.replace(",", "")
    letters = re.sub(r"\(([^)]+)\)\*(\d+)", lambda match: match[1] * int(match[2]), letters)
    letters = re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), letters)
    wrong = next((letter for letter in letters if letter not in "EtL|"), None)
    if wrong is not None:
        order_of = (
            "multi-token prediction has no costs here" if wrong == "m" else "allowed: E, t, L, |, (...)*n"
        )
        raise StrettoError(f"--pipeline-model-parallel-layout {text!r} has {wrong!r}: {order_of}")
    if letters.count("t") != layers:
        raise StrettoError(
            f"--pipeline-model-parallel-layout {text!r} has {letters.count('t')} transformer layers",
            hint=f"--num-layers is {layers}",
        )
    return [len(stage) for stage in letters.split("|")]


def _even(settings: Settings, layers: int, pp: int) -> list[int]:
    """Return the layers of each stage without a given layout, as `TransformerConfig` cuts them."""
    embedding = "account-for-embedding-in-pipeline-split" in settings
    head = "account-for-loss-in-pipeline-split" in settings
    total, chunks = layers + embedding + head, settings.get("num-virtual-stages-per-pipeline-rank", 1)
    if (virtual := settings.get("num-layers-per-virtual-pipeline-stage")) is not None:
        if total % (pp * virtual):
            raise StrettoError(
                f"--num-layers-per-virtual-pipeline-stage is {virtual}: {pp} x {virtual} must divide {total} "
                "layers",
                hint="--num-virtual-stages-per-pipeline-rank, or --pipeline-model-parallel-layout",
            )
        chunks = total // pp // virtual
    first, last = (settings.get(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if first is None and last is None:
        each, remainder = divmod(total, pp * chunks)
        if remainder:
            raise StrettoError(
                f"{layers} layers{' with embedding' * embedding}{' with head' * head} do not divide into "
                f"{pp * chunks} stages",
                hint="--pipeline-model-parallel-layout gives each its own",
            )
        blocks = [each] * (pp * chunks)
        blocks[0] -= embedding
        blocks[-1] -= head
    else:
        blocks = _uneven(layers, pp, chunks, first=first, last=last)
    blocks[0] += 1
    blocks[-1] += 1
    return blocks


def _uneven(layers: int, pp: int, chunks: int, *, first: int | None, last: int | None) -> list[int]:
    """Return the blocks of each stage if the first and the last rank have their own number."""
    ends = (first is not None) + (last is not None)
    between, remainder = divmod(layers - (first or 0) - (last or 0), max(1, pp - ends))
    ranks = [between] * pp
    if first is not None:
        ranks[0] = first
    if last is not None:
        ranks[-1] = last
    if remainder or any(blocks % chunks for blocks in ranks):
        raise StrettoError(
            f"{layers} layers, {first or 'even'} on the first and {last or 'even'} on the last rank, do not "
            f"divide over {pp} ranks of {chunks} stages",
            hint="--pipeline-model-parallel-layout gives each its own",
        )
    return [ranks[rank] // chunks for _ in range(chunks) for rank in range(pp)]


# ------------------------------------------------------------------ data parallelism

_STRATEGIES = {"zero1": "optim", "zero2": "optim_grads", "zero3": "optim_grads_params"}


def _write_sharing(values: JobValues) -> Settings:
    mode, copies = values[JOB.dp.mode], values[JOB.layout.dp] * values[JOB.layout.cp]
    if mode == "server":
        instead = "Megatron-LM has no rank that updates for all; it shards states, gradients, parameters"
        raise refused(JOB.dp.mode, mode, instead, ("zero1",))
    overlap = {"overlap-grad-reduce": True} if copies > 1 and values[JOB.optimiser.name] != "muon" else {}
    if mode == "ddp":
        return overlap
    gathered = {**overlap, "overlap-param-gather": True} if overlap else {}
    if mode == "zero1":
        return {"use-distributed-optimizer": True, **gathered}
    return {
        "use-megatron-fsdp": True,
        "data-parallel-sharding-strategy": _STRATEGIES[mode],
        "use-distributed-optimizer": True,
        "ckpt-format": "fsdp_dtensor",
        **gathered,
    }


def sharing(settings: Settings) -> str:
    """Return the mode of data parallelism."""
    if "use-torch-fsdp2" in settings:
        return "zero3"
    if "use-megatron-fsdp" in settings:
        strategy = settings.get("data-parallel-sharding-strategy", _STRATEGIES["zero3"])
        return next((mode for mode, strategy_of in _STRATEGIES.items() if strategy_of == strategy), "ddp")
    return "zero1" if "use-distributed-optimizer" in settings else "ddp"


def _write_shards(values: JobValues) -> Settings:
    """Sizes of shards: Megatron-LM repeats the sharding in several instances."""
    job = values.job
    sizes = job.dp.sizes(job.copies)
    sharded = zip(_STRATEGIES, _SHARDS, (sizes.states, sizes.gradients, sizes.parameters), strict=True)
    for mode, name, size in sharded:
        if size != sizes.states:
            instead = "Megatron-LM shards all that it shards over the same ranks"
            raise refused(f"dp.{name}", size, instead, (sizes.states,))
        if mode == job.dp.mode:
            break
    if sizes.unsharded or sizes.states == job.copies:
        return {}
    return {"num-distributed-optimizer-instances": job.copies // sizes.states}


_SHARDS = ("shard_states", "shard_gradients", "shard_parameters")


def _read_shards(settings: Settings) -> Values:
    instances = settings.get("num-distributed-optimizer-instances", 1)
    mode = sharing(settings)
    if instances == 1 or mode == "ddp":
        return {}
    copies = processes(settings)[1] * settings.get("context-parallel-size", 1)
    sharded = _SHARDS[: list(_STRATEGIES).index(mode) + 1]
    return {f"dp.{name}": copies // instances for name in sharded}


def _write_reduce(values: JobValues) -> Settings:
    each = values[JOB.dp.mode] in ("zero2", "zero3")
    allowed = ("auto", "microbatch") if each else ("auto", "step")
    instead = (
        "Megatron-LM's FSDP reduces gradients with each microbatch"
        if each
        else "Megatron-LM reduces gradients once, with the last microbatch"
    )
    require(values, JOB.dp.reduce, allowed, instead)
    return {}


def _write_offload(values: JobValues) -> Settings:
    offload = values[JOB.dp.offload]
    if offload == "none":
        return {}
    if offload == "nvme" or values[JOB.dp.mode] != "zero1":
        instead = "Megatron-LM keeps states in host memory, with its distributed optimizer (dp.mode=zero1)"
        raise refused(JOB.dp.offload, offload, instead, ("cpu",) if offload == "nvme" else ("none",))
    return {"optimizer-cpu-offload": True, "use-precision-aware-optimizer": True}


def _read_offload(settings: Settings) -> Values:
    share = settings.get("optimizer-offload-fraction", 1.0)
    if "optimizer-cpu-offload" in settings and share != 1.0:
        raise StrettoError(
            f"--optimizer-offload-fraction is {share}: states that lie in two places are not priced",
            hint="what is: all of them, 1.0",
        )
    return {JOB.dp.offload: "cpu" if "optimizer-cpu-offload" in settings else "none"}


# ------------------------------------------------------------------ recomputation


def _write_recompute(values: JobValues) -> Settings:
    mode, blocks = values[JOB.recompute.mode], values[JOB.recompute.blocks]
    if mode == "auto":
        instead = "Megatron-LM recomputes what it is told to, and goes by no budget of memory"
        raise refused(JOB.recompute.mode, mode, instead, ("full",))
    if mode == "none":
        return {}
    if mode == "selective":
        return {"recompute-granularity": "selective", "recompute-modules": ["core_attn"]}
    method = ("uniform", 1) if blocks is None else ("block", blocks)
    return {"recompute-granularity": "full", "recompute-method": method[0], "recompute-num-layers": method[1]}


def _read_recompute(settings: Settings) -> Values:
    granularity = settings.get("recompute-granularity")
    if granularity is None:
        selective = settings.keys() & {"recompute-activations", "moe-layer-recompute"}
        return {JOB.recompute.mode: "selective" if selective else "none"}
    if granularity == "selective":
        return {JOB.recompute.mode: "selective"}
    blocks = settings.get("recompute-num-layers", 1) if settings.get("recompute-method") == "block" else None
    return {JOB.recompute.mode: "full", JOB.recompute.blocks: blocks}


def _read_batch(settings: Settings) -> Values:
    micro = settings.get("micro-batch-size", 1)
    global_batch = settings.get("global-batch-size")
    return {
        JOB.micro_batch: micro,
        JOB.global_batch: micro * processes(settings)[1] if global_batch is None else global_batch,
    }


_NO_OPTION = "Megatron-LM's schedules have no such option"

RANKS: tuple[Rule, ...] = (
    rule(
        JOB.layout.dp,
        "world-size",
        lambda values: {
            "world-size": prod(
                values[degree] for degree in (JOB.layout.tp, JOB.layout.cp, JOB.layout.dp, JOB.layout.pp)
            )
        },
        lambda settings: {JOB.layout.dp: processes(settings)[1]},
    ),
    renamed("tensor-model-parallel-size", JOB.layout.tp, default=1),
    rule(
        JOB.sequence_parallel,
        "sequence-parallel",
        lambda values: {"sequence-parallel": True} if values[JOB.sequence_parallel] else {},
        _read_sequence_parallel,
    ),
    renamed("context-parallel-size", JOB.layout.cp, default=1),
    rule(
        JOB.context,
        "cp-comm-type",
        lambda values: (
            {}
            if values[JOB.layout.cp] == 1 and values[JOB.context] == "ring"
            else {"cp-comm-type": ["p2p" if values[JOB.context] == "ring" else "a2a"]}
        ),
        _read_context,
    ),
    rule(
        (JOB.layout.ep, JOB.expert_tp),
        "expert-model-parallel-size expert-tensor-parallel-size",
        _write_experts,
        _read_experts,
    ),
    renamed("pipeline-model-parallel-size", JOB.layout.pp, default=1),
    rule(
        JOB.layout.order,
        "use-tp-pp-dp-mapping",
        _write_order,
        lambda settings: {JOB.layout.order: tuple(_ORDERS)["use-tp-pp-dp-mapping" in settings]},
    ),
    rule(
        (JOB.schedule, RUN.schedule.chunks, RUN.schedule.group, RUN.schedule.file, JOB.stage_layers),
        "num-virtual-stages-per-pipeline-rank num-layers-per-virtual-pipeline-stage "
        "microbatch-group-size-per-virtual-pipeline-stage pipeline-model-parallel-layout "
        "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers "
        "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split",
        _write_pipeline,
        _read_pipeline,
    ),
    restricted(RATE.rescheduling_steps, (None,), "Megatron-LM's pipelines drain after each step"),
    *(
        restricted(f"schedule.{name}", (None,), _NO_OPTION)
        for name in ("waves", "vertical_sync", "memory", "placement", "split", "objective", "effort")
    ),
    rule(
        JOB.dp.mode,
        "use-distributed-optimizer use-megatron-fsdp use-torch-fsdp2 "
        "data-parallel-sharding-strategy overlap-grad-reduce overlap-param-gather ckpt-format",
        _write_sharing,
        lambda settings: {JOB.dp.mode: sharing(settings)},
    ),
    rule(
        (*(f"dp.{name}" for name in _SHARDS),),
        "num-distributed-optimizer-instances",
        _write_shards,
        _read_shards,
    ),
    rule(JOB.dp.reduce, write=_write_reduce),
    restricted(JOB.dp.gather, ("auto", "layer"), "Megatron-LM's FSDP gathers layer by layer"),
    rule(JOB.dp.offload, "optimizer-cpu-offload optimizer-offload-fraction", _write_offload, _read_offload),
    restricted(JOB.dp.offload_parameters, ("none",), "Megatron-LM keeps parameters on the device"),
    ignored("nothing is kept in files", JOB.dp.path),
    rule(
        (JOB.recompute.mode, JOB.recompute.blocks),
        "recompute-granularity recompute-method recompute-num-layers recompute-modules "
        "recompute-activations moe-layer-recompute",
        _write_recompute,
        _read_recompute,
    ),
    restricted(JOB.recompute.memory_gib, (None,), "Megatron-LM goes by no budget of memory"),
    flag("distribute-saved-activations", JOB.recompute.shard_inputs),
    rule(
        (JOB.global_batch, JOB.micro_batch),
        "global-batch-size micro-batch-size",
        lambda values: {
            "micro-batch-size": values[JOB.micro_batch],
            "global-batch-size": values[JOB.global_batch],
        },
        _read_batch,
    ),
)
