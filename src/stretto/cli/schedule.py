"""`stretto schedule`: schedules, replayed, drawn and compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.face import Json, command_app, report
from stretto.cli.schedule_options import parse_times as parse_times

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.program import Action
    from stretto.program.replay import Timeline


def facts(timeline: Timeline) -> dict[str, Any]:
    """Of one replayed program."""
    program, bubble = timeline.program, timeline.bubble
    return {
        "name": program.name,
        "ranks": program.ranks,
        "stages": program.stages,
        "copies": program.copies,
        "microbatches": program.microbatches,
        "parameters": dict(program.parameters),
        "placement": list(program.placement),
        "makespan": timeline.makespan,
        "ideal": timeline.ideal,
        "bubble": {"barrier": bubble.barrier, "span": bubble.span, "rate": bubble.rate},
        "peak_activations": list(timeline.peak_activations),
        "weight_versions": list(timeline.weight_versions),
        "transfers": timeline.transfers,
        "orders": [[str(a) for a in order if program.lowered or _ordered(a)] for order in program.orders],
    }


def compared(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Of several: the table's figures, and all facts of each."""
    from stretto.view.figures import figures

    return {
        "compared": [figures(timeline) for timeline in timelines],
        "schedules": [facts(timeline) for timeline in timelines],
    }


def _ordered(action: Action) -> bool:
    """Whether an action stands in a schedule's own order."""
    kind = action.kind
    return kind == "U" or (kind.has_microbatch and not kind.is_transfer)


app = command_app()

_PLAIN_WIDTH = 240  # a file or a pipe has no width: room for labels


@app.command(
    epilog="Example: stretto schedule interleaved --ranks 4 --microbatches 8 --chunks 2 --html page.html, "
    "or: stretto schedule --compare gpipe,1f1b,zb-v --ranks 4 --microbatches 8 --svg picture.svg"
)
def schedule(
    name: Annotated[str | None, typer.Argument(help="A schedule's name, from --list.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Pipeline ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Microbatches of a step.")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="Stages a rank.")] = None,
    group: Annotated[
        int | None,
        typer.Option(min=1, help="Microbatches that go through a chunk in a row, or between updates."),
    ] = None,
    waves: Annotated[int | None, typer.Option(min=1, help="Waves over the ranks.")] = None,
    vertical_sync: Annotated[
        bool, typer.Option("--vertical-sync", help="One weight version for a microbatch on all ranks.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(help="Most activations held, in microbatches: one number, or one a rank as in 4,3,2,1."),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Any other option that --list shows.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="Schedules to lay side by side, as in gpipe,interleaved:chunks=4,zb-v."),
    ] = None,
    times: Annotated[
        str, typer.Option(help="Times of a rank's share of a microbatch, and of a transfer.")
    ] = "F=1,I=1,W=1,hop=0",
    time_unit: Annotated[str, typer.Option(help="What a time of 1 is in --trace: s, ms or us.")] = "ms",
    lowered: Annotated[bool, typer.Option("--lowered", help="Add communications.")] = False,
    file: Annotated[
        Path | None, typer.Option(help="Replay the program in this CSV or JSON file instead.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the program here, as torch reads it.")] = None,
    json_program: Annotated[Path | None, typer.Option(help="Write the program here, all of it.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the picture here.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the picture here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to zoom and hover here.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace here, for Perfetto.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Show the schedules there are.")] = False,
    as_json: Json = False,
) -> None:
    """Replay pipeline schedules and show their timelines, bubbles and memory."""
    from stretto.cli.schedule_files import write_all
    from stretto.cli.schedule_options import Wanted, options_from, programs_of

    if list_all:
        _list(as_json)
        return
    named = {"chunks": chunks, "group": group, "waves": waves, "vertical_sync": vertical_sync or None}
    wanted = Wanted(
        name=name,
        ranks=ranks,
        microbatches=microbatches,
        options=options_from(named, memory, option or []),
        costs=parse_times(times),
        file=file,
        compare=compare,
    )
    from stretto.program import lower
    from stretto.program.replay import simulate

    programs = [lower(each) if lowered and not each.lowered else each for each in programs_of(wanted)]
    timelines = [simulate(each, wanted.costs) for each in programs]
    pictures = {"svg": svg, "png": png, "html": html}
    texts = {"csv": csv, "json-program": json_program, "trace": trace}
    written = write_all(timelines, pictures, texts, compare is not None, time_unit)
    if compare is not None:
        from stretto.cli.schedule import compared

        report(compared(timelines) if as_json else {}, as_json, lambda to: _compare(to, timelines, written))
        return

    report(facts(timelines[0]) if as_json else {}, as_json, lambda to: _show(to, timelines[0], written))


def _list(as_json: bool) -> None:
    from stretto.program import names, options

    known = names()

    def text(to: Console) -> None:
        wide = max(map(len, known))
        for name, about in known.items():
            taken = ", ".join(
                f"{key}={value}".lower() if value is not None else key for key, value in options(name).items()
            )
            line = f"{name:<{wide}}  {about}" + (f" (options: {taken})" if taken else "")
            to.print(line, soft_wrap=True, markup=False)

    entries: list[dict[str, Any]] = [
        {"name": name, "about": about, "options": options(name)} for name, about in known.items()
    ]
    report({"schedules": entries}, as_json, text)


def _show(to: Console, timeline: Timeline, written: list[Path]) -> None:
    from stretto.view.blocks import headline
    from stretto.view.terminal import timeline_text

    bubble = timeline.bubble
    to.print(f"{timeline.program.name}: {headline(timeline)}\n", soft_wrap=True, markup=False)
    to.print(timeline_text(timeline, width=_width(to), colour=to.is_terminal), soft_wrap=True)
    to.print(
        f"\nideal {timeline.ideal:g}, bubble until all meet {bubble.barrier:g}, "
        f"within a rank's own span {bubble.span:g} at most\n"
        f"activations held at most: {_some(timeline.peak_activations)} microbatches by rank\n"
        f"transfers: {timeline.transfers}",
        soft_wrap=True,
    )
    _wrote(to, written)


def _compare(to: Console, timelines: list[Timeline], written: list[Path]) -> None:
    from stretto.view.figures import aligned, figures_table
    from stretto.view.terminal import compare_text

    to.print(compare_text(timelines, width=_width(to), colour=to.is_terminal), soft_wrap=True)
    to.print("\n" + aligned(figures_table(timelines)), soft_wrap=True, markup=False)
    _wrote(to, written)


def _width(to: Console) -> int:
    return to.width if to.is_terminal else _PLAIN_WIDTH


def _wrote(to: Console, written: list[Path]) -> None:
    for path in written:
        to.print(f"wrote {path}", soft_wrap=True, markup=False)


def _some(values: list[float], most: int = 24) -> str:
    return ", ".join(f"{value:g}" for value in values[:most]) + (", ..." if len(values) > most else "")
