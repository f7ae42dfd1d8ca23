"""`stretto schedule`: replay, draw and compare pipeline schedules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import Json
from stretto.cli.output import coloured, command_app, report, write_bytes, write_text
from stretto.cli.schedule_export import exported_for
from stretto.errors import StrettoError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.program import Action, Program
    from stretto.program.replay import Costs, Timeline


def facts(timeline: Timeline) -> dict[str, Any]:
    """One replayed program as the command's JSON."""
    program, bubble = timeline.program, timeline.bubble
    return {
        "name": program.name,
        "ranks": program.ranks,
        "stages": program.stages,
        "copies": program.copies,
        "microbatches": program.microbatches,
        "steps": program.steps,
        "parameters": dict(program.parameters),
        "placement": list(program.placement),
        "makespan": timeline.makespan,
        "ideal": timeline.ideal,
        "bubble": bubble._asdict(),
        "peak_activations": list(timeline.peak_activations),
        "weight_versions": list(timeline.weight_versions),
        "transfers": timeline.transfers,
        "orders": [[str(a) for a in order if program.lowered or _ordered(a)] for order in program.orders],
    }


def compared(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Several replayed programs as JSON: the comparison's figures, and each in full."""
    from stretto.view.panel import figures

    return {
        "compared": [figures(timeline) for timeline in timelines],
        "schedules": [facts(timeline) for timeline in timelines],
    }


def _ordered(action: Action) -> bool:
    """Whether an action is part of a schedule before lowering."""
    kind = action.kind
    return kind == "U" or (kind.has_microbatch and not kind.is_transfer)


app = command_app()

_PLAIN_WIDTH = 240  # columns in a file or pipe: enough for labels


@app.command(
    epilog="Example: stretto schedule interleaved --ranks 4 --microbatches 8 --chunks 2 --html page.html, "
    "or: stretto schedule mine.py:lifo --ranks 4 --microbatches 8, "
    "or: stretto schedule --compare gpipe,1f1b,zb-v --ranks 4 --microbatches 8 --svg picture.svg, "
    "or: stretto schedule zb-v --ranks 4 --microbatches 8 --for torchtitan --layers 32 --write mine.csv"
)
def schedule(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME|FILE.csv|FILE.json|FILE.py:FUNCTION]",
            help="A schedule's name, from --list; a file with a program; or a function of (ranks, "
            "microbatches) that returns one, whose file is run.",
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Pipeline ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Microbatches of a step.")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="Stages per rank.")] = None,
    group: Annotated[
        int | None,
        typer.Option(min=1, help="Microbatches that pass through a chunk in a row, or between two updates."),
    ] = None,
    waves: Annotated[int | None, typer.Option(min=1, help="Waves over the ranks.")] = None,
    vertical_sync: Annotated[
        bool, typer.Option("--vertical-sync", help="Every microbatch uses one weight version on all ranks.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between filling and draining an asynchronous pipeline."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Limit of activations held, in microbatches: one number, or one per rank as in 4,3,2,1."
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Any other option that --list shows.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="Schedules to compare, as in gpipe,interleaved:chunks=4,mine.csv,mine.py:lifo."),
    ] = None,
    times: Annotated[
        str, typer.Option(help="Times of a rank's share of a microbatch, and of a transfer.")
    ] = "F=1,I=1,W=1,hop=0",
    time_unit: Annotated[str, typer.Option(help="The unit of --times in --trace: s, ms or us.")] = "ms",
    lowered: Annotated[
        bool, typer.Option("--lowered", help="Add communications, and list every rank's actions.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option(help="Replay the program in this CSV or JSON file instead.")
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv|FILE.json",
            help="Write the program here, in torch's CSV format or complete as JSON; schedule.file in a "
            "config trains it.",
        ),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="torch|torchtitan",
            help="Refuse to --write what that framework cannot run, and say how it loads the file.",
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="With --for torchtitan: layers of the model, cut evenly into stages."),
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            help="With --for torchtitan: layers of each stage, as in 7,7,7,5; embedding and head are layers."
        ),
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the picture here as SVG.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the picture here as PNG.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write an interactive page here.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace here, for Perfetto.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List all schedules.")] = False,
    as_json: Json = False,
) -> None:
    """Replay pipeline schedules and show their timelines, bubbles and memory."""

    if list_all:
        _list(as_json)
        return
    named = {
        "chunks": chunks,
        "group": group,
        "waves": waves,
        "vertical_sync": vertical_sync or None,
        "steps": steps,
    }
    if name is not None and file is None and _is_file(name):
        name, file = None, Path(name)
    request = Request(
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

    programs = [lower(each) if lowered and not each.lowered else each for each in programs_of(request)]
    timelines = [simulate(each, request.costs) for each in programs]
    pictures = {"svg": svg, "png": png, "html": html}
    texts = {"write": write, "trace": trace}
    exported = exported_for(framework, programs, write, layers, stages)
    written = write_all(timelines, pictures, texts, compare is not None, time_unit)
    if exported is not None:
        written += exported.write_modules()
    if compare is not None:
        report(compared(timelines) if as_json else {}, as_json, lambda to: _compare(to, timelines, written))
        return

    def show(to: Console) -> None:
        _show(to, timelines[0], written)
        if exported is not None:
            to.print(exported.text(), soft_wrap=True, markup=False, highlight=False)
        elif write is not None and programs[0].trains and not programs[0].lowered:
            _say_training(to, write, programs[0])

    more = {} if exported is None else {"for": exported.facts()}
    report({**facts(timelines[0]), **more} if as_json else {}, as_json, show)


def _list(as_json: bool) -> None:
    from stretto.program import names, options

    known = names()

    def text(to: Console) -> None:
        wide = max(map(len, known))
        for name, about in known.items():
            accepted = ", ".join(
                f"{key}={value}".lower() if value is not None else key for key, value in options(name).items()
            )
            line = f"{name:<{wide}}  {about}" + (f" (options: {accepted})" if accepted else "")
            to.print(line, soft_wrap=True, markup=False)

    entries: list[dict[str, Any]] = [
        {"name": name, "about": about, "options": options(name)} for name, about in known.items()
    ]
    report({"schedules": entries}, as_json, text)


def _show(to: Console, timeline: Timeline, written: list[Path]) -> None:
    from stretto.view.panel import headline
    from stretto.view.terminal import timeline_text

    bubble, steps = timeline.bubble, timeline.program.steps
    a_step = f" ({bubble.barrier / steps:g} a step)" if steps > 1 else ""
    to.print(f"{timeline.program.name}: {headline(timeline)}\n", soft_wrap=True, markup=False)
    to.print(timeline_text(timeline, width=_width(to), colour=coloured(to)), soft_wrap=True)
    to.print(
        f"\nbubble until all meet {bubble.barrier:g}{a_step}: {bubble.rate:.1%} of the makespan, "
        f"{bubble.over_ideal:.1%} of the ideal {timeline.ideal:g}, as papers count that give it as (p-1)/m\n"
        f"idle within a rank's own span: {bubble.span:g} at most\n"
        f"activations held at most: {_some(timeline.peak_activations)} microbatches by rank\n"
        f"transfers: {timeline.transfers}",
        soft_wrap=True,
    )
    if timeline.program.lowered:  # at hop=0 the picture has no room for what takes no time
        for rank, order in enumerate(timeline.program.orders):
            to.print(f"rank {rank}: {' '.join(map(str, order))}", soft_wrap=True, markup=False)
    _wrote(to, written)


def _say_training(to: Console, path: Path, program: Program) -> None:
    """Print what the config that trains the written program must have."""
    if program.steps > 1:
        to.print(
            f"{path} is a window of {program.steps} steps; a config names the schedule "
            f"(schedule.name={program.name}), and training decides when to drain",
            soft_wrap=True,
            markup=False,
        )
        return
    count = program.microbatches
    to.print(
        f"stretto train CONFIG schedule.file={path} layout.pp={program.ranks}"
        f"  # with {count} microbatches: batch.global_size = {count} x batch.micro_size x layout.dp",
        soft_wrap=True,
        markup=False,
    )


def _compare(to: Console, timelines: list[Timeline], written: list[Path]) -> None:
    from stretto.view.panel import aligned, figures_table
    from stretto.view.terminal import compare_text

    to.print(compare_text(timelines, width=_width(to), colour=coloured(to)), soft_wrap=True)
    to.print("\n" + aligned(figures_table(timelines)), soft_wrap=True, markup=False)
    _wrote(to, written)


def _width(to: Console) -> int:
    return to.width if to.is_terminal else _PLAIN_WIDTH


def _wrote(to: Console, written: list[Path]) -> None:
    for path in written:
        to.print(f"wrote {path}", soft_wrap=True, markup=False)


def _some(values: list[float], most: int = 24) -> str:
    return ", ".join(f"{value:g}" for value in values[:most]) + (", ..." if len(values) > most else "")


_COSTS = ("F", "I", "W", "hop")
_COMPARED = re.compile(r"(?<!\.py):")  # between a schedule and its options
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The programs that the command line asks for, and the costs to replay them with."""

    name: str | None
    ranks: int | None
    microbatches: int | None
    options: Mapping[str, Any]
    costs: Costs
    file: Path | None = None
    compare: str | None = None


def parse_times(text: str) -> Costs:
    """Costs from text such as "F=1,I=1,W=1,hop=0"; what is left out keeps its default.

    Raises:
        StrettoError: an unknown name, or a value that is not a time.
    """
    from stretto.program.replay import Costs

    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        if key == "B":
            half = f"{float(value) / 2:g}" if value.replace(".", "", 1).isdigit() else "1"
            raise StrettoError(
                "--times has B, and a backward has two parts: I, for the input, and W, for the weights",
                hint=f"halves are I={half},W={half}",
            )
        if key not in _COSTS:
            near = nearest(key, _COSTS)
            hint = f"did you mean {near!r}? " * bool(near) + "write times as in F=1,I=1,W=1,hop=0"
            raise StrettoError(f"--times has {key!r}", hint=hint)
        if key in values:
            raise StrettoError(f"--times gives {key} twice", hint="give every time once")
        try:
            values[key] = float(value)
        except ValueError:
            raise StrettoError(
                f"--times has {part!r}, which is not a number", hint=f"write {key}=1"
            ) from None
    return Costs(**values)


def options_from(named: Mapping[str, Any], memory: str | None, pairs: Sequence[str]) -> dict[str, Any]:
    """The schedule's options that were set, by their own command-line option or as NAME=VALUE.

    Raises:
        StrettoError: a pair without `=`, an option given twice, a memory limit that is not a number.
    """
    options = {key: value for key, value in named.items() if value is not None}
    if memory is not None:
        options["memory"] = _limits(memory)
    for pair in pairs:
        key, value = _pair(pair, "--option")
        if key in options:
            raise StrettoError(f"option {key} is given twice", hint="give every option once")
        options[key] = _limits(str(value)) if key == "memory" else value
    return options


def programs_of(request: Request) -> list[Program]:
    """The program that is named or in the file, or all programs to compare.

    Raises:
        StrettoError: no program named, or several where one is needed; an error in the schedule or the file.
    """
    if request.compare is not None:
        return _compared(request)
    if request.file is not None:
        if request.options:
            option = next(iter(request.options))
            raise StrettoError(
                f"{request.file} is a whole program, {option} is an option of a schedule",
                hint=f"leave {option} out",
            )
        return [_from_file(request.file, request.name, request.ranks)]
    return [_program(request, request.name, dict(request.options))]


def _is_file(name: str) -> bool:
    """Whether a schedule is named by the file that holds its program."""
    return name.lower().endswith((".csv", ".json"))


def _program(request: Request, name: str | None, options: dict[str, Any]) -> Program:
    from stretto.program import check, lower
    from stretto.program import options as accepted
    from stretto.program import schedule as generate

    if name is None:
        raise StrettoError("no schedule named", hint="name one of stretto schedule --list")
    name = _registered(name)
    if request.ranks is None or request.microbatches is None:
        sizes = (("--ranks", request.ranks), ("--microbatches", request.microbatches))
        missing = " and ".join(option for option, value in sizes if value is None)
        raise StrettoError(f"schedule {name} needs {missing}", hint=f"{name} --ranks 4 --microbatches 8")
    if "costs" in accepted(name):
        options.setdefault("costs", request.costs)
    program = generate(name, request.ranks, request.microbatches, **options)
    if ".py:" in name:
        check(program if program.lowered else lower(program))
    return program


def _registered(name: str) -> str:
    """A schedule's name; that of a function in the user's file, FILE.py:FUNCTION, is registered first."""
    from stretto.program import names, register

    if ".py:" in name and name not in names():
        from stretto.cli.prove import checked_function
        from stretto.errors import load_module

        path, function = checked_function(name, "mine.py:lifo", ("ranks", "microbatches"))
        register(name, f"{function} of {path}")(getattr(load_module(path), function))
    return name


def _compared(request: Request) -> list[Program]:
    """The programs of --compare; other options apply to those schedules that take them."""
    from stretto.program import options as accepted

    if request.name is not None or request.file is not None:
        also = request.name or str(request.file)
        raise StrettoError(
            f"--compare is given, and {also} beside it", hint=f"write --compare {also},{request.compare}"
        )
    entries = [entry.strip() for entry in (request.compare or "").split(",") if entry.strip()]
    if not entries:
        raise StrettoError("--compare names no schedule", hint="write --compare gpipe,1f1b,zb-v")
    pieces = {entry: _COMPARED.split(entry) for entry in entries}
    known = {
        entry: {} if _is_file(name) else accepted(_registered(name)) for entry, (name, *_) in pieces.items()
    }
    for option, value in request.options.items():
        if not any(option in each for each in known.values()):
            raise StrettoError(
                f"{option} is {value}, but none of the schedules to compare takes it",
                hint=f"leave {option} out",
            )
    programs: list[Program] = []
    for entry in entries:
        name, *pairs = pieces[entry]
        if _is_file(name):
            if pairs:
                raise StrettoError(f"--compare {entry}: a program in a file takes no options")
            programs.append(_from_file(Path(name), None, request.ranks))
            continue
        options = {key: value for key, value in request.options.items() if key in known[entry]}
        options.update(_pair(pair, f"--compare {name}") for pair in pairs)
        program = _program(request, name, options)
        programs.append(replace(program, name=entry) if pairs else program)
    return programs


def _pair(text: str, where: str) -> tuple[str, Any]:
    """The option's name as a Python parameter, and its value."""
    key, mark, value = text.partition("=")
    if not mark or not key.strip() or not value.strip():
        raise StrettoError(f"{where} has {text!r}, must be NAME=VALUE", hint="write it as in waves=2")
    return key.strip().replace("-", "_"), _value(value.strip())


def _value(text: str) -> Any:
    """The text as a bool, an int or a float where it is one."""
    if text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _limits(text: str) -> float | list[float]:
    """A memory limit: one number, or one per rank."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise StrettoError(
            f"memory is {text!r}, must be a number, or one for each rank", hint="write --memory 4 or 4,3,2,1"
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


def _from_file(file: Path, name: str | None, ranks: int | None) -> Program:
    """The program in a file."""
    from stretto.program.text import read_program

    program = read_program(file, name)
    if ranks is not None and ranks != program.ranks:
        raise StrettoError(
            f"{file} has {program.ranks} ranks, --ranks is {ranks}",
            hint="leave --ranks out: the file says how many there are",
        )
    return program


_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def write_all(
    timelines: Sequence[Timeline],
    pictures: Mapping[str, Path | None],
    texts: Mapping[str, Path | None],
    several: bool,
    time_unit: str,
) -> list[Path]:
    """Write every output that has a path; return the paths.

    Raises:
        StrettoError: a file cannot be written, or its format holds one program and there are several.
    """
    if several and (kind := next((kind for kind, path in texts.items() if path is not None), None)):
        raise StrettoError(
            f"--{kind} writes one program, --compare has {len(timelines)}",
            hint="name one schedule, or write --svg, --png or --html",
        )
    if time_unit not in _SECONDS:
        near = nearest(time_unit, _SECONDS) or "ms"
        raise StrettoError(
            f"--time-unit is {time_unit!r}, must be one of {', '.join(_SECONDS)}", hint=f"nearest is {near}"
        )
    written: list[Path] = []
    for kind, path in {**texts, **pictures}.items():
        if path is None:
            continue
        if kind == "png":
            from stretto.view.svg import png_of

            write_bytes(path, png_of(_svg(timelines, several)))
        elif kind in pictures:
            write_text(path, _svg(timelines, several) if kind == "svg" else _html(timelines, several))
        elif kind == "trace":
            write_text(path, _trace(timelines[0], _SECONDS[time_unit]))
        else:
            write_text(path, _program_text(path, timelines[0].program))
        written.append(path)
    return written


def _svg(timelines: Sequence[Timeline], several: bool) -> str:
    from stretto.view.panel_svg import compare_svg, timeline_svg

    return compare_svg(timelines) if several else timeline_svg(timelines[0])


def _html(timelines: Sequence[Timeline], several: bool) -> str:
    from stretto.view.html import compare_html, timeline_html

    return compare_html(timelines) if several else timeline_html(timelines[0])


def _trace(timeline: Timeline, second: float) -> str:
    from stretto.view.trace import trace_of, write_trace

    return write_trace(trace_of(timeline, second))


def _program_text(path: Path, program: Program) -> str:
    """The program in the format that the file's name ends with.

    Raises:
        StrettoError: another ending, or CSV, which holds orders only, would be read back as another program.
    """
    from stretto.program.text import from_csv, to_csv, to_json
    from stretto.program.transforms.one_order import one_order

    if path.suffix.lower() == ".json":
        return to_json(program)
    if path.suffix.lower() != ".csv":
        raise StrettoError(
            f"--write {path}: the name ends in neither .csv nor .json",
            hint=f"--write {path.with_suffix('.csv')} for torch's format, .json for all of the program",
        )
    if program.lowered:  # torch has one communicator for a pair of ranks, so its transfers need one order
        return to_csv(one_order(program))
    text = to_csv(program)
    try:
        again = from_csv(text, name=program.name)
    except StrettoError:
        again = None
    if again is None or replace(again, parameters=program.parameters) != program:
        raise StrettoError(
            f"--write {path}: CSV holds orders only, and {program.name} has several copies of the model, or "
            "weight versions that orders do not tell",
            hint=f"--write {path.with_suffix('.json')}",
        )
    return text
