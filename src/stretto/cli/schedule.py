"""`stretto schedule`: one schedule, replayed and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.face import Json, command_app, read_text, report, write_text
from stretto.errors import StrettoError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.schedule import Program
    from stretto.simulate import Costs, Timeline

app = command_app()

_PLAIN_WIDTH = 240  # a file or a pipe has no width: room for labels
_COSTS = ("F", "I", "W", "hop")


@app.command(
    epilog="Example: stretto schedule interleaved --ranks 4 --microbatches 8 --chunks 2 --svg picture.svg"
)
def schedule(
    name: Annotated[str | None, typer.Argument(help="A schedule's name, from --list.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Pipeline ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Microbatches of a step.")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="Stages a rank.")] = None,
    group: Annotated[
        int | None, typer.Option(min=1, help="Microbatches that go through a chunk in a row.")
    ] = None,
    times: Annotated[
        str, typer.Option(help="Times of a rank's share of a microbatch, and of a transfer.")
    ] = "F=1,I=1,W=1,hop=0",
    lowered: Annotated[bool, typer.Option("--lowered", help="Add communications.")] = False,
    file: Annotated[Path | None, typer.Option(help="Replay the program in this CSV file instead.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the program here.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the picture here.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Show the schedules there are.")] = False,
    as_json: Json = False,
) -> None:
    """Replay a pipeline schedule and show its timeline, bubble and memory."""
    if list_all:
        _list(as_json)
        return
    from stretto.schedule import lower
    from stretto.simulate import simulate

    costs = parse_times(times)
    program = (
        _program(name, ranks, microbatches, chunks, group) if file is None else _from_file(file, name, ranks)
    )
    if lowered and not program.lowered:
        program = lower(program)
    timeline = simulate(program, costs)
    written = list[Path]()
    if csv is not None:
        from stretto.schedule.text import to_csv

        write_text(csv, to_csv(program))
        written.append(csv)
    if svg is not None:
        from stretto.view.timeline_svg import timeline_svg

        write_text(svg, timeline_svg(timeline))
        written.append(svg)
    report(facts(timeline) if as_json else {}, as_json, lambda to: _show(to, timeline, written))


def parse_times(text: str) -> Costs:
    """Costs from text such as "F=1,I=1,W=1,hop=0"; what is left out keeps its default.

    Raises:
        StrettoError: an unknown name, or a value that is no time.
    """
    from stretto.simulate import Costs

    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        if key not in _COSTS:
            near = nearest(key, _COSTS)
            hint = f"did you mean {near!r}? " * bool(near) + "write times as in F=1,I=1,W=1,hop=0"
            raise StrettoError(f"--times has {key!r}", hint=hint)
        if key in values:
            raise StrettoError(f"--times gives {key} twice", hint="give every time once")
        try:
            values[key] = float(value)
        except ValueError:
            raise StrettoError(f"--times has {part!r}, which is no number", hint=f"write {key}=1") from None
    return Costs(**values)


def _program(
    name: str | None, ranks: int | None, microbatches: int | None, chunks: int | None, group: int | None
) -> Program:
    from stretto.schedule import schedule as generate

    if name is None:
        raise StrettoError("no schedule named", hint="name one of stretto schedule --list")
    if ranks is None or microbatches is None:
        missing = " and ".join(
            option
            for option, value in (("--ranks", ranks), ("--microbatches", microbatches))
            if value is None
        )
        raise StrettoError(f"schedule {name} needs {missing}", hint=f"{name} --ranks 4 --microbatches 8")
    return generate(name, ranks, microbatches, chunks=chunks, group=group)


def _from_file(file: Path, name: str | None, ranks: int | None) -> Program:
    from stretto.schedule.text import from_csv

    text = read_text(file)
    try:
        program = from_csv(text, name=name or file.stem)
    except StrettoError as error:
        raise StrettoError(f"{file}: {error.message}", hint=error.hint) from None
    if ranks is not None and ranks != program.ranks:
        raise StrettoError(
            f"{file} has {program.ranks} ranks, --ranks is {ranks}",
            hint="leave --ranks out: the file has a row a rank",
        )
    return program


def facts(timeline: Timeline) -> dict[str, Any]:
    """What the command's JSON says of a replayed program."""
    program, bubble = timeline.program, timeline.bubble
    shown = [
        [str(action) for action in order if program.lowered or action.kind.is_compute or action.kind == "U"]
        for order in program.orders
    ]
    return {
        "name": program.name,
        "ranks": program.ranks,
        "stages": program.stages,
        "microbatches": program.microbatches,
        "placement": list(program.placement),
        "makespan": timeline.makespan,
        "ideal": timeline.ideal,
        "bubble": {"barrier": bubble.barrier, "span": bubble.span, "rate": bubble.rate},
        "peak_activations": list(timeline.peak_activations),
        # one copy: the schedules there are update all weights at the end of the step
        "weight_versions": [1] * program.stages,
        "transfers": timeline.transfers,
        "orders": shown,
    }


def _list(as_json: bool) -> None:
    from stretto.schedule import names

    known = names()

    def text(to: Console) -> None:
        wide = max(map(len, known))
        for name, about in known.items():
            to.print(f"{name:<{wide}}  {about}", soft_wrap=True, markup=False)

    report({"schedules": [{"name": name, "about": about} for name, about in known.items()]}, as_json, text)


def _show(to: Console, timeline: Timeline, written: list[Path]) -> None:
    from stretto.view.blocks import headline
    from stretto.view.terminal import timeline_text

    bubble = timeline.bubble
    to.print(f"[bold]{timeline.program.name}[/]: {headline(timeline)}\n", soft_wrap=True)
    to.print(
        timeline_text(timeline, width=to.width if to.is_terminal else _PLAIN_WIDTH, colour=to.is_terminal),
        soft_wrap=True,
    )
    to.print(
        f"\nideal {timeline.ideal:g}, bubble until all meet {bubble.barrier:g}, "
        f"within a rank's own span {bubble.span:g} at most\n"
        f"activations held at most: {_some(timeline.peak_activations)} microbatches by rank\n"
        f"transfers: {timeline.transfers}",
        soft_wrap=True,
    )
    for path in written:
        to.print(f"wrote {path}", soft_wrap=True)


def _some(values: list[float], most: int = 24) -> str:
    return ", ".join(f"{value:g}" for value in values[:most]) + (", ..." if len(values) > most else "")
