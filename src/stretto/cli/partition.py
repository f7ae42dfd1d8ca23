"""`stretto partition`: cut uneven layers into the stages of a schedule."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import (
    Chunks,
    ClusterName,
    Json,
    Microbatches,
    ModelName,
    PipelineRanks,
    ScheduleOptions,
    grouped,
)
from stretto.cli.output import command_app, say_no, train_command, write_file
from stretto.cli.report import Cell, CommandReport, number, text
from stretto.errors import StrettoError, read_text
from stretto.user_file import find_function

if TYPE_CHECKING:
    from stretto.job.job import Job
    from stretto.planner.cutting.partition import Partition
    from stretto.planner.cutting.profile import ModelProfile
    from stretto.program import Program


app = command_app()

MIB, GIB = 2**20, 2**30
_CUTS = {
    "layers": "equal numbers of layers",
    "parameters": "equal numbers of parameters",
    "work": "equal work, ignoring the schedule",
    "training": "training's default: equal FLOPs",
}


@dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """Options of `stretto partition`."""

    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE.py:FUNCTION]",
            help="A function of your file that returns (layers, sample) or (layers, sample, loss, target): "
            "modules in order, one microbatch. They are measured here.",
        ),
    ] = None
    profile: Annotated[
        Path | None, typer.Option(help="Read measured layers from this file, as --save-profile writes it.")
    ] = None
    model: ModelName = None
    cluster: ClusterName = None
    ranks: PipelineRanks = None
    schedule: Annotated[str, typer.Option(help="One of stretto schedule --list, or FILE.py:FUNCTION.")] = (
        "1f1b"
    )
    microbatches: Microbatches = None
    chunks: Chunks = None
    option: ScheduleOptions = None
    memory_gib: Annotated[
        float | None,
        typer.Option(
            help="Memory limit of a rank for states and activations; leave room for the rest. Default with "
            "--cluster: what tensors may take of the device; else none."
        ),
    ] = None
    states: Annotated[
        float | None,
        typer.Option(
            help="Bytes of weights, gradients and states per byte of weights; 4 for Adam in one precision.",
            min=0.0,
        ),
    ] = None
    hop_us: Annotated[
        float | None, typer.Option(help="Latency of a message between ranks, in microseconds.", min=0.0)
    ] = None
    bandwidth_gb: Annotated[
        float | None, typer.Option(help="Bandwidth of a message between ranks, in 1e9 bytes/s.", min=1e-6)
    ] = None
    micro_batch: Annotated[int, typer.Option(help="With --model: samples per microbatch.", min=1)] = 1
    sequence: Annotated[int | None, typer.Option(help="With --model: tokens per sample.", min=1)] = None
    tp: Annotated[int, typer.Option(help="With --model: tensor-parallel ranks.", min=1)] = 1
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON here.")] = None
    write: Annotated[
        Path | None,
        typer.Option(
            help="With --model: write a config for stretto train here, with the cut as layout.stages."
        ),
    ] = None
    save_profile: Annotated[Path | None, typer.Option(help="Write the measured layers as JSON here.")] = None
    as_json: Json = False


@app.command(epilog="Example: stretto partition examples/uneven_layers.py:model --ranks 2 --microbatches 8")
@grouped(PartitionOptions)
def partition(options: PartitionOptions) -> None:
    """Cut a model of uneven layers into pipeline stages so that a step takes the least time.

    Replays the schedule's program with the layers' times; memory limits count its activations in flight.
    Cuts that ignore the schedule are shown for comparison. In Python, `stretto.partition` does the same, and
    `Pipeline(cut=...)` takes its `stages`.

    Exit code 1: the best cut does not fit the memory; nothing is written to --write.
    """
    from stretto.cli.schedule import generate_program, options_from
    from stretto.planner.cutting.partition import partition as cut_best
    from stretto.planner.cutting.profile import profile_json
    from stretto.run.config.written import required_fields, written

    if options.write is not None and options.model is None:
        raise StrettoError(
            f"--write {options.write}: a config names its model, which only --model gives",
            hint="give --model, or pass the cut to stretto.Pipeline(cut=...)",
        )
    settings = options_from({"chunks": options.chunks}, None, options.option or [])
    program = generate_program(options.schedule, options.ranks, options.microbatches, settings)
    if not program.trains:
        raise StrettoError(
            f"schedule {options.schedule} does not train", hint="take one with backwards, such as 1f1b"
        )
    layers = _layers(options, program)
    if options.save_profile is not None:
        write_file(options.save_profile, json.dumps(profile_json(layers.profile), indent=1) + "\n")
    memory = layers.memory if options.memory_gib is None else options.memory_gib * 2**30
    result = cut_best(
        layers.profile,
        program,
        memory=memory,
        must_fit=False,
        states=layers.states if options.states is None else options.states,
        hop=layers.hop if options.hop_us is None else options.hop_us / 1e6,
        bandwidth=layers.bandwidth if options.bandwidth_gb is None else options.bandwidth_gb * 1e9,
        others=layers.others,
    )
    if memory is None:
        limit = "no memory limit: --memory-gib sets one"
    else:
        limit = f"at most {memory / MIB:.1f} MiB a rank"
        limit += "" if options.memory_gib is not None else f": {layers.limit}; --memory-gib sets another"
    room = min(inf if memory is None else memory, layers.device_memory)
    fits = max(result.memory) <= room
    record = {**_record(result), "memory_limit_bytes": memory, "fits": fits}
    report = CommandReport(record)
    _add_partition(report, result, limit, room, with_options=layers.job is not None)
    if options.write is not None and fits:
        assert layers.job is not None, "--write goes with --model"
        job = replace(layers.job, stage_layers=tuple(len(stage) for stage in result.stages))
        about = f"{result.profile.about}\nstages cut for a step of {result.seconds:.4g} s, predicted"
        train = train_command(options.write, required_fields(None))
        report.write(options.write, written(job, about=about), note=f": {train}")
    if options.out is not None:
        write_file(options.out, json.dumps(record, indent=1) + "\n")
    report.print(options.as_json)
    if not fits:
        raise say_no()


# ------------------------------------------------------------------ layers


@dataclass(frozen=True, kw_only=True)
class LayersToCut:
    """Layers with the settings that their source implies.

    Attributes:
        memory: bytes of tensors that fit a rank's device.
        limit: what sets that limit, for messages.
        device_memory: all bytes of the device, which no limit of the user's raises.
        others: further cuts to compare with.
        job: the job of a known model.
    """

    profile: ModelProfile
    states: float = 4.0
    hop: float = 0.0
    bandwidth: float = inf
    memory: float | None = None
    limit: str = ""
    device_memory: float = inf
    others: Mapping[str, Sequence[range]] = field(default_factory=dict[str, Sequence[range]])
    job: Job | None = None


def _layers(options: PartitionOptions, program: Program) -> LayersToCut:
    """The layers of a user's file, of a profile or of a known model."""
    from stretto.planner.cutting.profile import read_profile

    sources = [
        str(source) for source in (options.source, options.profile, options.model) if source is not None
    ]
    if len(sources) != 1:
        raise StrettoError(
            "no layers to cut" if not sources else f"both {sources[0]} and {sources[1]} name layers to cut",
            hint="give one of FILE.py:FUNCTION, --profile FILE.json, --model NAME with --cluster",
        )
    if options.profile is not None:
        return LayersToCut(profile=read_profile(read_text(options.profile), str(options.profile)))
    if options.source is not None:
        return LayersToCut(profile=_measured_profile(options.source))
    return _model_layers(options, program)


def _measured_profile(target: str) -> ModelProfile:
    """The layers that a function of a user's file returns, measured on this machine.

    Raises:
        StrettoError: no such file or function, or it does not return layers and a sample.
    """
    returned = find_function(target, "stretto partition model.py:build")()
    parts: tuple[Any, ...] = returned if isinstance(returned, tuple) else (returned,)
    if len(parts) not in (2, 4):
        raise StrettoError(
            f"{target} returns {len(parts)} thing{'s' * (len(parts) > 1)}",
            hint="return (layers, sample) or (layers, sample, loss, target)",
        )
    from stretto.run.calibrate.modules import profile_layers

    return profile_layers(list(parts[0]), parts[1], *parts[2:])


def _model_layers(options: PartitionOptions, program: Program) -> LayersToCut:
    """A known model's layers on a known device.

    Raises:
        StrettoError: no such model or cluster, or a job that is not legal.
    """
    from stretto.job.data_parallel import Precision
    from stretto.job.job import VOCAB_MULTIPLE, Job
    from stretto.job.presets import find_shape
    from stretto.layout.layout import Layout
    from stretto.planner.assumptions import Assumptions
    from stretto.planner.cutting.profile import predicted_profile
    from stretto.planner.machines.catalogue import find_cluster
    from stretto.planner.memory.fits import tensor_bytes
    from stretto.planner.time.step import hop_link

    if options.cluster is None:
        raise StrettoError("--model needs a cluster", hint="add --cluster dgx-a100-80gb, or another")
    assert options.model is not None
    shape, tp = find_shape(options.model), options.tp
    job = Job(
        shape=shape,
        layout=Layout(tp=tp, pp=program.ranks),
        global_batch=options.micro_batch * program.microbatches,
        micro_batch=options.micro_batch,
        sequence=options.sequence or shape.pretraining_sequence,
        schedule=options.schedule,
        options=dict(program.parameters),
        sequence_parallel=tp > 1,
        precision=Precision(dtype="bfloat16"),
        loss_chunk=None,
        vocab_multiple=VOCAB_MULTIPLE,
    )
    machine = find_cluster(options.cluster, tp * program.ranks)
    profile, states = predicted_profile(job, machine, Assumptions(), program)
    link = hop_link(job, machine)
    return LayersToCut(
        profile=profile,
        states=states,
        hop=link.latency,
        bandwidth=link.bandwidth,
        memory=None if machine.device.memory == inf else tensor_bytes(machine.device),
        limit=f"of the {machine.device.memory / MIB:.0f} MiB of {machine.device.name}, without what the "
        "allocator and libraries take",
        device_memory=machine.device.memory,
        others={"training": list(job.stages(program.depth))},  # equal FLOPs, as training cuts by default
        job=job,
    )


# ------------------------------------------------------------------ the report


def _record(result: Partition) -> dict[str, Any]:
    """The result as JSON; `cut` has each stage's first layer and the one after its last."""
    program = result.program
    layers = result.profile.layers
    work = result.timeline.work
    return {
        "about": result.profile.about,
        "schedule": program.name,
        "ranks": program.ranks,
        "microbatches": program.microbatches,
        "cut": [[stage.start, stage.stop] for stage in result.stages],
        "step_s": result.seconds,
        "bound_s": result.bound,
        "proved": result.proved,
        "bubble": result.timeline.bubble.rate,
        "idle": result.timeline.idle,
        "stages": [
            {
                "stage": index,
                "ranks": _ranks_of(result, index),
                "layers": [layers[i].name for i in stage],
                "forward_s": sum(layers[i].forward for i in stage),
                "backward_s": sum(layers[i].backward for i in stage),
                "parameter_bytes": sum(layers[i].parameters for i in stage),
                "activation_bytes": sum(layers[i].activations for i in stage),
                "output_bytes": layers[stage.stop - 1].output,
            }
            for index, stage in enumerate(result.stages)
        ],
        "memory_bytes": list(result.memory),
        "busy_s": list(work),
        "beside": {name: None if s == inf else s for name, s in result.start_seconds.items()},
    }


def _ranks_of(result: Partition, stage: int) -> list[int]:
    """The ranks that hold a stage; two if there are two copies of the model."""
    program = result.program
    return [program.placement[s] for s in range(stage, program.stages, program.depth)]


def _add_partition(
    report: CommandReport, result: Partition, limit: str, room: float, *, with_options: bool
) -> None:
    """Add stages, ranks, the step, other cuts, and the ranks that do not fit.

    Args:
        limit: the memory limit in words.
        room: bytes that a rank may hold.
        with_options: options set the microbatches and the samples of a known model.
    """
    from stretto.planner.cutting.profile import names

    layers, timeline = result.profile.layers, result.timeline
    if result.profile.about:
        report.line(result.profile.about)
    rows = list[tuple[Cell, ...]]()
    for index, stage in enumerate(result.stages):
        stage_layers = [layers[i] for i in stage]
        rows.append(
            (
                str(index),
                " ".join(map(str, _ranks_of(result, index))),
                f"{len(stage_layers)}: {names(stage_layers)}",
                1e3 * sum(layer.forward for layer in stage_layers),
                1e3 * sum(layer.backward for layer in stage_layers),
                sum(layer.parameters for layer in stage_layers) / MIB,
            )
        )
    columns = [text("stage"), number("rank"), number("layers")]
    columns += [number("forward ms", ".3f"), number("backward ms", ".3f"), number("weights MiB", ".1f")]
    report.table(columns, rows)
    report.table(
        [text("rank"), number("busy ms", ".3f"), number("memory MiB", ".1f")],
        [
            (str(rank), 1e3 * busy, bytes_ / MIB)
            for rank, (busy, bytes_) in enumerate(zip(timeline.work, result.memory, strict=True))
        ],
    )
    report.line(f"memory of states and activations, {limit}")
    proof = "no cut is better" if result.proved else f"no cut is below {1e3 * result.bound:.3f} ms"
    report.line(
        f"step {1e3 * result.seconds:.3f} ms predicted, bubble {timeline.bubble.rate:.1%} on the "
        f"busiest rank, {timeline.idle:.1%} on average; {proof}"
    )
    report.table(
        [text("other cuts"), number("step ms", ".3f"), number("this one is")],
        [
            (_CUTS.get(name, name), None, "does not fit")
            if seconds == inf
            else (_CUTS.get(name, name), 1e3 * seconds, f"{1 - result.seconds / seconds:.1%} shorter")
            for name, seconds in result.start_seconds.items()
        ],
    )
    stages = range(len(result.stages))
    over = [
        f"rank {rank} (stage {', '.join(str(s) for s in stages if rank in _ranks_of(result, s))}) needs "
        f"{size / GIB:.2f} GiB"
        for rank, size in enumerate(result.memory)
        if size > room
    ]
    if over:
        change = (
            "a smaller --micro-batch or --sequence, more --ranks or --tp" if with_options else "more --ranks"
        )
        report.line(
            f"does not fit the {room / GIB:.2f} GiB of a rank: {', '.join(over)}\n"
            f"to make it fit: {change}, or a --schedule that keeps fewer microbatches"
        )
