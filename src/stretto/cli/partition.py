"""`stretto partition`: uneven layers cut into the stages of a schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli.face import Json, command_app, read_text, report, write_text
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.cli.partition_source import Source
    from stretto.schedule import Program

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
        Path | None, typer.Option(help="Layers already measured, as --save-profile writes them.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model by name, predicted on --cluster.")] = None,
    cluster: Annotated[str | None, typer.Option(help="With --model: a cluster, a device, or a file.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Pipeline ranks.")] = None,
    schedule: Annotated[str, typer.Option(help="One of stretto schedule --list.")] = "1f1b",
    microbatches: Annotated[int | None, typer.Option(help="Microbatches of a step.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Stages a rank, where the schedule takes it.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Another option of the schedule.")
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option(help="What a rank may hold: states and activations; leave room beside.")
    ] = None,
    states: Annotated[
        float | None,
        typer.Option(help="Bytes kept for each byte of weights; 4 for Adam in one precision.", min=0.0),
    ] = None,
    hop_us: Annotated[
        float | None, typer.Option(help="Microseconds of a message between ranks.", min=0.0)
    ] = None,
    bandwidth_gb: Annotated[float | None, typer.Option(help="Its bandwidth, 1e9 bytes/s.", min=1e-6)] = None,
    micro_batch: Annotated[int, typer.Option(help="With --model: samples of a microbatch.", min=1)] = 1,
    sequence: Annotated[int | None, typer.Option(help="With --model: tokens of a sample.", min=1)] = None,
    tp: Annotated[int, typer.Option(help="With --model: tensor-parallel ranks.", min=1)] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the answer as JSON.")] = None,
    save_profile: Annotated[Path | None, typer.Option(help="Write the layers as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Cut a model of uneven layers into pipeline stages so that a step takes least time.

    The schedule's own program is replayed with the layers' times, and memory limits are kept by what it has
    in flight. Beside the result stand cuts that do not know the schedule. In Python the same is
    `stretto.plan.cutting.partition.partition`, and its `stages` are what `Pipeline(cut=...)` takes.
    """
    from stretto.cli.partition_show import facts, show
    from stretto.plan.cutting.partition import partition as cut_best
    from stretto.plan.cutting.profile import profile_json

    program = _program(schedule, ranks, microbatches, chunks, option or [])
    found = _source(source, profile, model, cluster, program, schedule, (tp, micro_batch, sequence))
    if save_profile is not None:
        write_text(save_profile, json.dumps(profile_json(found.profile), indent=1) + "\n")
    answer = cut_best(
        found.profile,
        program,
        memory=None if memory_gib is None else memory_gib * 2**30,
        states=found.states if states is None else states,
        hop=found.hop if hop_us is None else hop_us / 1e6,
        bandwidth=found.bandwidth if bandwidth_gb is None else bandwidth_gb * 1e9,
        others=found.others,
    )
    told = facts(answer)
    if out is not None:
        write_text(out, json.dumps(told, indent=1) + "\n")
    report(told, as_json, lambda to: show(to, answer))


def _program(
    name: str, ranks: int | None, microbatches: int | None, chunks: int | None, pairs: list[str]
) -> Program:
    from stretto.cli.schedule_options import options_from
    from stretto.schedule import schedule

    if ranks is None or microbatches is None:
        missing = " and ".join(
            option
            for option, value in (("--ranks", ranks), ("--microbatches", microbatches))
            if value is None
        )
        raise StrettoError(f"{missing} not given", hint="as in --ranks 4 --microbatches 8")
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
    from stretto.cli.partition_source import Source, measured, predicted
    from stretto.plan.cutting.profile import read_profile

    given = [each for each in (source, profile, model) if each is not None]
    if len(given) != 1:
        raise StrettoError(
            "nothing to cut" if not given else f"both {given[0]} and {given[1]} are to be cut",
            hint="give one of FILE.py:FUNCTION, --profile FILE.json, --model NAME with --cluster",
        )
    if profile is not None:
        return Source(read_profile(read_text(profile), str(profile)))
    if source is not None:
        return Source(measured(source))
    if cluster is None:
        raise StrettoError("--model needs a cluster", hint="add --cluster dgx-a100-80gb, or another")
    assert model is not None
    return predicted(model, cluster, program, schedule, *how)
