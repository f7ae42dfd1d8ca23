"""`stretto partition`: cut uneven layers into the stages of a schedule."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app, report, write_text
from stretto.errors import StrettoError, nearest, read_text

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.planner.cutting.partition import Partition
    from stretto.planner.cutting.profile import ModelProfile
    from stretto.program import Program
    from stretto.spec.job import Job


MIB = 2**20


def facts(result: Partition) -> dict[str, Any]:
    """The result as the command's JSON; `cut` has each stage's first layer and the one after its last."""
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
                "stage": at,
                "ranks": _holders(result, at),
                "layers": [layers[i].name for i in stage],
                "forward_s": sum(layers[i].forward for i in stage),
                "backward_s": sum(layers[i].backward for i in stage),
                "parameter_bytes": sum(layers[i].parameters for i in stage),
                "activation_bytes": sum(layers[i].activations for i in stage),
                "output_bytes": layers[stage.stop - 1].output,
            }
            for at, stage in enumerate(result.stages)
        ],
        "memory_bytes": list(result.memory),
        "busy_s": list(work),
        "beside": {name: None if s == inf else s for name, s in result.start_seconds.items()},
    }


def _holders(result: Partition, stage: int) -> list[int]:
    """The ranks that hold a stage; two where there are two copies of the model."""
    program = result.program
    return [program.placement[s] for s in range(stage, program.stages, program.depth)]


_CUTS = {
    "layers": "equal numbers of layers",
    "parameters": "equal numbers of parameters",
    "work": "equal work, ignoring the schedule",
    "training": "training's default: equal FLOPs",
}


def show(to: Console, result: Partition, limit: str, written: Path | None = None) -> None:
    """Print the result, and how to train the config that was written."""
    from stretto.cli.output import side_table, train_command
    from stretto.planner.cutting.profile import names
    from stretto.run.config.written import required_fields

    layers = result.profile.layers
    if result.profile.about:
        to.print(result.profile.about, soft_wrap=True)
    table = side_table("stage", "rank", "layers", "forward ms", "backward ms", "weights MiB")
    for at, stage in enumerate(result.stages):
        stage_layers = [layers[i] for i in stage]
        table.add_row(
            str(at),
            " ".join(map(str, _holders(result, at))),
            f"{len(stage_layers)}: {names(stage_layers)}",
            f"{1e3 * sum(layer.forward for layer in stage_layers):.3f}",
            f"{1e3 * sum(layer.backward for layer in stage_layers):.3f}",
            f"{sum(layer.parameters for layer in stage_layers) / MIB:.1f}",
        )
    to.print(table, soft_wrap=True)
    ranks = side_table("rank", "busy ms", "memory MiB")
    for rank, (busy, held) in enumerate(zip(result.timeline.work, result.memory, strict=True)):
        ranks.add_row(str(rank), f"{1e3 * busy:.3f}", f"{held / MIB:.1f}")
    to.print(ranks, soft_wrap=True)
    to.print(f"memory of states and activations, {limit}", soft_wrap=True)
    proof = "no cut is better" if result.proved else f"no cut is below {1e3 * result.bound:.3f} ms"
    timeline = result.timeline
    to.print(
        f"step {1e3 * result.seconds:.3f} ms predicted, bubble {100 * timeline.bubble.rate:.1f}% on the "
        f"busiest rank, {100 * timeline.idle:.1f}% on average; {proof}",
        soft_wrap=True,
    )
    start_seconds = side_table("other cuts", "step ms", "this one is")
    for name, seconds in result.start_seconds.items():
        more = "does not fit" if seconds == inf else f"{100 * (1 - result.seconds / seconds):.1f}% shorter"
        start_seconds.add_row(_CUTS.get(name, name), "" if seconds == inf else f"{1e3 * seconds:.3f}", more)
    to.print(start_seconds, soft_wrap=True)
    if written is not None:
        to.print(f"wrote {written}: {train_command(written, required_fields(None))}", soft_wrap=True)


app = command_app()


@app.command(epilog="Example: stretto partition examples/uneven_layers.py:model --ranks 2 --microbatches 8")
def partition(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE.py:FUNCTION]",
            help="A function of your file that returns (layers, sample) or (layers, sample, loss, target): "
            "modules in order, one microbatch. They are measured here.",
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Read measured layers from this file, as --save-profile writes it.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model by name, predicted on --cluster.")] = None,
    cluster: Annotated[str | None, typer.Option(help="With --model: a cluster, a device, or a file.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Pipeline ranks.")] = None,
    schedule: Annotated[str, typer.Option(help="One of stretto schedule --list.")] = "1f1b",
    microbatches: Annotated[int | None, typer.Option(help="Microbatches per step.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Stages per rank, for schedules that take it.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Another option of the schedule.")
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            help="Memory limit of a rank for states and activations; leave room for the rest. Default with "
            "--cluster: what tensors may take of the device; else none."
        ),
    ] = None,
    states: Annotated[
        float | None,
        typer.Option(
            help="Bytes of weights, gradients and states per byte of weights; 4 for Adam in one precision.",
            min=0.0,
        ),
    ] = None,
    hop_us: Annotated[
        float | None, typer.Option(help="Latency of a message between ranks, in microseconds.", min=0.0)
    ] = None,
    bandwidth_gb: Annotated[
        float | None, typer.Option(help="Bandwidth of a message between ranks, in 1e9 bytes/s.", min=1e-6)
    ] = None,
    micro_batch: Annotated[int, typer.Option(help="With --model: samples per microbatch.", min=1)] = 1,
    sequence: Annotated[int | None, typer.Option(help="With --model: tokens per sample.", min=1)] = None,
    tp: Annotated[int, typer.Option(help="With --model: tensor-parallel ranks.", min=1)] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON here.")] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            help="With --model: write a config for stretto train here, with the cut as layout.stages."
        ),
    ] = None,
    save_profile: Annotated[Path | None, typer.Option(help="Write the measured layers as JSON here.")] = None,
    as_json: Json = False,
) -> None:
    """Cut a model of uneven layers into pipeline stages so that a step takes the least time.

    Replays the schedule's program with the layers' times; memory limits count its activations in flight.
    Cuts that ignore the schedule are shown for comparison. In Python, `stretto.partition` does the same, and
    `Pipeline(cut=...)` takes its `stages`.
    """
    from stretto.planner.cutting.partition import partition as cut_best
    from stretto.planner.cutting.profile import profile_json

    if write is not None and model is None:
        raise StrettoError(
            f"--write {write}: a config names its model, which only --model gives",
            hint="give --model, or pass the cut to stretto.Pipeline(cut=...)",
        )
    program = _program(schedule, ranks, microbatches, chunks, option or [])
    layers_of = _source(
        source=source,
        profile=profile,
        model=model,
        cluster=cluster,
        program=program,
        schedule=schedule,
        how=(tp, micro_batch, sequence),
    )
    if save_profile is not None:
        write_text(save_profile, json.dumps(profile_json(layers_of.profile), indent=1) + "\n")
    memory = layers_of.memory if memory_gib is None else memory_gib * 2**30
    answer = cut_best(
        layers_of.profile,
        program,
        memory=memory,
        states=layers_of.states if states is None else states,
        hop=layers_of.hop if hop_us is None else hop_us / 1e6,
        bandwidth=layers_of.bandwidth if bandwidth_gb is None else bandwidth_gb * 1e9,
        others=layers_of.others,
    )
    if write is not None:
        assert layers_of.job is not None, "--write goes with --model"
        _write_config(write, layers_of.job, answer)
    record = {**facts(answer), "memory_limit_bytes": memory}
    if out is not None:
        write_text(out, json.dumps(record, indent=1) + "\n")
    if memory is None:
        limit = "no memory limit: --memory-gib sets one"
    else:
        limit = f"at most {memory / MIB:.1f} MiB a rank"
        limit += "" if memory_gib is not None else f": {layers_of.limit}; --memory-gib sets another"
    report(record, as_json, lambda to: show(to, answer, limit, write))


def _write_config(path: Path, job: Job, cut: Partition) -> None:
    """Write a config that trains the job with this cut."""
    from stretto.run.config.written import written

    counts = tuple(len(stage) for stage in cut.stages)
    about = f"{cut.profile.about}\nstages cut for a step of {cut.seconds:.4g} s, predicted"
    write_text(path, written(replace(job, stage_layers=counts), about=about))


def _program(
    name: str, ranks: int | None, microbatches: int | None, chunks: int | None, pairs: list[str]
) -> Program:
    from stretto.cli.schedule import options_from
    from stretto.program import schedule

    if ranks is None or microbatches is None:
        missing = " and ".join(
            option
            for option, value in (("--ranks", ranks), ("--microbatches", microbatches))
            if value is None
        )
        raise StrettoError(f"{missing} missing", hint="as in --ranks 4 --microbatches 8")
    program = schedule(name, ranks, microbatches, **options_from({"chunks": chunks}, None, pairs))
    if not program.trains:
        raise StrettoError(f"schedule {name} does not train", hint="take one with backwards, such as 1f1b")
    return program


def _source(
    source: str | None,
    profile: Path | None,
    model: str | None,
    cluster: str | None,
    program: Program,
    schedule: str,
    how: tuple[int, int, int | None],
) -> Source:
    from stretto.planner.cutting.profile import read_profile

    sources = [each for each in (source, profile, model) if each is not None]
    if len(sources) != 1:
        raise StrettoError(
            "no layers to cut" if not sources else f"both {sources[0]} and {sources[1]} name layers to cut",
            hint="give one of FILE.py:FUNCTION, --profile FILE.json, --model NAME with --cluster",
        )
    if profile is not None:
        return Source(profile=read_profile(read_text(profile), str(profile)))
    if source is not None:
        return Source(profile=measured(source))
    if cluster is None:
        raise StrettoError("--model needs a cluster", hint="add --cluster dgx-a100-80gb, or another")
    assert model is not None
    return predicted(model, cluster, program, schedule, *how)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Layers with the settings that their source implies.

    Attributes:
        memory: bytes of tensors that fit a rank's device.
        limit: what sets that number, for messages.
        others: further cuts to compare with.
        job: of a known model.
    """

    profile: ModelProfile
    states: float = 4.0
    hop: float = 0.0
    bandwidth: float = inf
    memory: float | None = None
    limit: str = ""
    others: Mapping[str, Sequence[range]] = field(default_factory=dict[str, Sequence[range]])
    job: Job | None = None


def measured(place: str) -> ModelProfile:
    """The layers that a function of a user's file returns, measured here.

    Raises:
        StrettoError: no such file or function, or it does not return layers and a sample.
    """
    made = _function(place)()
    parts: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
    if len(parts) not in (2, 4):
        raise StrettoError(
            f"{place} returns {len(parts)} thing{'s' * (len(parts) > 1)}",
            hint="return (layers, sample) or (layers, sample, loss, target)",
        )
    from stretto.run.calibrate.modules import profile_layers

    return profile_layers(list(parts[0]), parts[1], *parts[2:])


def _function(place: str) -> Callable[[], Any]:
    """The function of a user's file, which is imported as Python would."""
    path, colon, name = place.rpartition(":")
    file = Path(path)
    if not colon or not name.isidentifier():
        raise StrettoError(f"{place!r} does not name a function", hint="write it as model.py:build")
    if not file.is_file():
        raise StrettoError(f"there is no file {path}", hint="check the file's name")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise StrettoError(f"{path} is not a Python file", hint="write it as model.py:build")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)  # dataclasses look up their module there
    sys.path.insert(0, str(file.resolve().parent))  # as `python FILE` does, for imports of neighbouring files
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise StrettoError(
            f"{path} cannot be imported: {type(error).__name__}: {error}", hint=f"does python {path} run?"
        ) from error
    finally:
        sys.path.pop(0)
    function = getattr(module, name, None)
    if not callable(function):
        near = nearest(name, [key for key, value in vars(module).items() if callable(value)])
        raise StrettoError(
            f"{path} has no function {name!r}", hint=f"did you mean {near!r}?" if near else "check its name"
        )
    return function


def predicted(
    model: str,
    cluster: str,
    program: Program,
    schedule: str,
    tp: int,
    micro_batch: int,
    sequence: int | None,
) -> Source:
    """A known model's layers on a known device.

    Raises:
        StrettoError: no such model or cluster, or a job that is not legal.
    """
    from stretto.layout.layout import Layout
    from stretto.planner.assumptions import Assumptions
    from stretto.planner.cutting.layer_times import predicted_profile
    from stretto.planner.machines.catalogue import find_cluster
    from stretto.planner.memory.fits import tensor_bytes
    from stretto.planner.time.step import hop_link
    from stretto.spec.data_parallel import Precision
    from stretto.spec.job import VOCAB_MULTIPLE, Job
    from stretto.spec.presets import find_shape

    shape = find_shape(model)
    job = Job(
        shape=shape,
        layout=Layout(tp=tp, pp=program.ranks),
        global_batch=micro_batch * program.microbatches,
        micro_batch=micro_batch,
        sequence=sequence or shape.pretraining_sequence,
        schedule=schedule,
        options=dict(program.parameters),
        sequence_parallel=tp > 1,
        precision=Precision(dtype="bfloat16"),
        loss_chunk=None,
        vocab_multiple=VOCAB_MULTIPLE,
    )
    machine = find_cluster(cluster, tp * program.ranks)
    profile, states = predicted_profile(job, machine, Assumptions(), program)
    link = hop_link(job, machine)
    # equal FLOPs, as training cuts by default
    training = list(job.stages(program.depth))
    return Source(
        profile=profile,
        states=states,
        hop=link.latency,
        bandwidth=link.bandwidth,
        memory=None if machine.device.memory == inf else tensor_bytes(machine.device),
        limit=f"of the {machine.device.memory / MIB:.0f} MiB of {machine.device.name}, without what the "
        "allocator and libraries take",
        others={"training": training},
        job=job,
    )
