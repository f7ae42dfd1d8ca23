"""`stretto schedule`: replay, draw and compare pipeline schedules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from stretto.cli.options import (
    Chunks,
    Json,
    Microbatches,
    Picture,
    PipelineRanks,
    ScheduleOptions,
    check_choice,
    grouped,
)
from stretto.cli.output import coloured, command_app
from stretto.cli.report import CommandReport
from stretto.errors import StrettoError, counted, nearest

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from stretto.program import Program
    from stretto.program.replay import Costs, Timeline


app = command_app()

_PLAIN_WIDTH = 240  # columns in a file or pipe: enough for labels
_COSTS = ("F", "I", "W", "hop")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_COLON = re.compile(r"(?<!\.py):")  # between a schedule and its options
_FRAMEWORKS = ("torch", "torchtitan")


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of `stretto schedule`."""

    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME|FILE.csv|FILE.json|FILE.py:FUNCTION]",
            help="A schedule's name, from --list; a file with a program; or a function of (ranks, "
            "microbatches) that returns one, whose file is run.",
        ),
    ] = None
    ranks: PipelineRanks = None
    microbatches: Microbatches = None
    chunks: Chunks = None
    group: Annotated[
        int | None,
        typer.Option(min=1, help="Microbatches that pass through a chunk in a row, or between two updates."),
    ] = None
    waves: Annotated[int | None, typer.Option(min=1, help="Waves over the ranks.")] = None
    vertical_sync: Annotated[
        bool, typer.Option("--vertical-sync", help="Every microbatch uses one weight version on all ranks.")
    ] = False
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between filling and draining an asynchronous pipeline."),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            help="Limit of activations held, in microbatches: one number, or one per rank as in 4,3,2,1."
        ),
    ] = None
    option: ScheduleOptions = None
    compare: Annotated[
        str | None,
        typer.Option(help="Schedules to compare, as in gpipe,interleaved:chunks=4,mine.csv,mine.py:lifo."),
    ] = None
    times: Annotated[
        str, typer.Option(help="Times of a rank's share of a microbatch, and of a transfer.")
    ] = "F=1,I=1,W=1,hop=0"
    time_unit: Annotated[str, typer.Option(help="The unit of --times in --trace: s, ms or us.")] = "ms"
    lowered: Annotated[
        bool, typer.Option("--lowered", help="Add communications, and list every rank's actions.")
    ] = False
    file: Annotated[
        Path | None, typer.Option(help="Replay the program in this CSV or JSON file instead.")
    ] = None
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv|FILE.json",
            help="Write the program here, in torch's CSV format or complete as JSON; schedule.file in a "
            "config trains it.",
        ),
    ] = None
    framework: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="torch|torchtitan",
            help="Refuse to --write what that framework cannot run, and say how it loads the file.",
        ),
    ] = None
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="With --for torchtitan: layers of the model, cut evenly into stages."),
    ] = None
    stages: Annotated[
        str | None,
        typer.Option(
            help="With --for torchtitan: layers of each stage, as in 7,7,7,5; embedding and head are layers."
        ),
    ] = None
    start: Annotated[
        float,
        typer.Option(
            "--from", min=0, help="Draw from this time on, in the unit of --times; in the terminal only."
        ),
    ] = 0.0
    end: Annotated[float | None, typer.Option("--to", help="Draw until this time, in the terminal only.")] = (
        None
    )
    svg: Picture = None
    png: Annotated[Path | None, typer.Option(help="Write the picture here as PNG.")] = None
    html: Annotated[Path | None, typer.Option(help="Write an interactive page here.")] = None
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace here, for Perfetto.")] = None
    list_all: Annotated[bool, typer.Option("--list", help="List all schedules.")] = False
    as_json: Json = False


@app.command(
    epilog="Example: stretto schedule interleaved --ranks 4 --microbatches 8 --chunks 2 --html page.html, "
    "or: stretto schedule mine.py:lifo --ranks 4 --microbatches 8, "
    "or: stretto schedule --compare gpipe,1f1b,zb-v --ranks 4 --microbatches 8 --svg picture.svg, "
    "or: stretto schedule zb-v --ranks 4 --microbatches 8 --for torchtitan --layers 32 --write mine.csv"
)
@grouped(ReplayOptions)
def schedule(options: ReplayOptions) -> None:
    """Replay pipeline schedules and show their timelines, bubbles and memory."""
    if options.list_all:
        _list_schedules().print(options.as_json)
        return
    from stretto.program.schedules.user_schedule import is_program_file

    if options.name is not None and options.file is None and is_program_file(options.name):
        options = replace(options, name=None, file=Path(options.name))
    from stretto.program import lower
    from stretto.program.replay import simulate

    costs = parse_times(options.times)
    named = {name: getattr(options, name) for name in ("chunks", "group", "waves", "steps")}
    named["vertical_sync"] = options.vertical_sync or None
    settings = options_from(named, options.memory, options.option or [])
    programs = _programs(options, settings, costs)
    if options.lowered:
        programs = [program if program.lowered else lower(program) for program in programs]
    timelines = [simulate(program, costs) for program in programs]
    last = max(timeline.makespan for timeline in timelines)
    end = last if options.end is None else options.end
    if (options.start or end < last) and options.start >= min(end, last):
        raise StrettoError(
            f"no part of the timeline, 0 to {last:g}, is between --from {options.start:g} and --to {end:g}",
            hint=f"give --from below --to and below {last:g}",
        )
    export = None if options.framework is None else _export(options, options.framework, programs)
    if export is None and (options.layers is not None or options.stages is not None):
        raise _cut_refused()

    compared = options.compare is not None
    if compared:
        report = _comparison(timelines, options)
    else:
        report = CommandReport(
            lambda: _record(timelines[0]) | ({} if export is None else {"for": export.record})
        )
        _add_timeline(report, timelines[0], options)
    _write_files(report, options, timelines)
    if export is not None and options.write is not None:
        if export.modules is not None:
            report.write(_modules_path(options.write), export.modules)
        report.line(export.text)
    elif options.write is not None and programs[0].trains and not programs[0].lowered:
        report.line(_training_text(options.write, programs[0]))
    report.print(options.as_json)


# ------------------------------------------------------------------ reports


def _list_schedules() -> CommandReport:
    from stretto.program import names, options

    accepted = {name: options(name) for name in names()}
    report = CommandReport(
        {
            "schedules": [
                {"name": name, "about": about, "options": accepted[name]} for name, about in names().items()
            ]
        }
    )
    width = max(map(len, accepted))
    for name, about in names().items():
        defaults = ", ".join(
            key if value is None else f"{key}={value}".lower() for key, value in accepted[name].items()
        )
        report.line(f"{name:<{width}}  {about}" + (f" (options: {defaults})" if defaults else ""))
    return report


def _record(timeline: Timeline) -> dict[str, Any]:
    program = timeline.program
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
        "bubble": timeline.bubble._asdict(),
        "peak_activations": list(timeline.peak_activations),
        "weight_versions": list(timeline.weight_versions),
        "transfers": timeline.transfers,
        # before lowering, a schedule is its computations and updates
        "orders": [
            [
                str(action)
                for action in order
                if program.lowered
                or action.kind == "U"
                or (action.kind.has_microbatch and not action.kind.is_transfer)
            ]
            for order in program.orders
        ],
    }


def _add_timeline(report: CommandReport, timeline: Timeline, options: ReplayOptions) -> None:
    from stretto.view.panel import headline

    program, bubble = timeline.program, timeline.bubble
    a_step = f" ({bubble.barrier / program.steps:g} a step)" if program.steps > 1 else ""
    peaks = ", ".join(f"{peak:g}" for peak in timeline.peak_activations[:24])
    more = ", ..." if len(timeline.peak_activations) > 24 else ""
    report.line(f"{program.name}: {headline(timeline)}\n")
    report.draw(lambda to: _picture([timeline], options, to))
    report.line(
        f"\nbubble until all meet {bubble.barrier:g}{a_step}: {bubble.rate:.1%} of the makespan, "
        f"{bubble.over_ideal:.1%} of the ideal {timeline.ideal:g}, as papers count that give it as (p-1)/m\n"
        f"idle within a rank's own span: {bubble.span:g} at most\n"
        f"activations held at most: {peaks}{more} microbatches by rank\n"
        f"transfers: {timeline.transfers}"
    )
    if program.lowered:  # at hop=0 the picture has no room for what takes no time
        for rank, order in enumerate(program.orders):
            report.line(f"rank {rank}: {' '.join(map(str, order))}")


def _comparison(timelines: Sequence[Timeline], options: ReplayOptions) -> CommandReport:
    from stretto.view.panel import aligned, figures, figures_table

    report = CommandReport(
        lambda: {
            "compared": [figures(timeline) for timeline in timelines],
            "schedules": [_record(timeline) for timeline in timelines],
        }
    )
    report.draw(lambda to: _picture(timelines, options, to))
    report.draw(lambda to: to.print("\n" + aligned(figures_table(timelines)), soft_wrap=True, markup=False))
    return report


def _picture(timelines: Sequence[Timeline], options: ReplayOptions, to: Console) -> Text:
    from stretto.view.terminal import timelines_text

    width = to.width if to.is_terminal else _PLAIN_WIDTH
    return timelines_text(timelines, width=width, colour=coloured(to), start=options.start, end=options.end)


def _training_text(path: Path, program: Program) -> str:
    """The command that trains the written program, and what its config must have."""
    if program.steps > 1:
        return (
            f"{path} is a window of {program.steps} steps; a config names the schedule "
            f"(schedule.name={program.name}), and training decides when to drain"
        )
    count = program.microbatches
    return (
        f"stretto train CONFIG schedule.file={path} layout.pp={program.ranks}"
        f"  # with {count} microbatches: batch.global_size = {count} x batch.micro_size x layout.dp"
    )


# ------------------------------------------------------------------ options


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
            similar = nearest(key, _COSTS)
            hint = f"did you mean {similar!r}? " * bool(similar) + "write times as in F=1,I=1,W=1,hop=0"
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


def _pair(text: str, option: str) -> tuple[str, Any]:
    """NAME=VALUE as the name of a Python parameter, and a bool, an int, a float or the text."""
    from stretto.program.schedules.user_schedule import option_value

    key, equals, value = text.partition("=")
    key, value = key.strip().replace("-", "_"), value.strip()
    if not equals or not key or not value:
        raise StrettoError(f"{option} has {text!r}, must be NAME=VALUE", hint="write it as in waves=2")
    return key, option_value(value)


def _limits(text: str) -> float | list[float]:
    """A memory limit: one number, or one per rank."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise StrettoError(
            f"memory is {text!r}, must be a number, or one for each rank", hint="write --memory 4 or 4,3,2,1"
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


# ------------------------------------------------------------------ programs


def _programs(options: ReplayOptions, settings: Mapping[str, Any], costs: Costs) -> list[Program]:
    """The program that is named or in the file, or all programs to compare.

    Args:
        settings: options of the schedules.

    Raises:
        StrettoError: no program named, or several where one is needed; an error in the schedule or the file.
    """
    if options.compare is not None:
        return _compared_programs(options, options.compare, settings, costs)
    if options.file is not None:
        if settings:
            option = next(iter(settings))
            raise StrettoError(
                f"{options.file} is a whole program, {option} is an option of a schedule",
                hint=f"leave {option} out",
            )
        return [_read_program(options.file, options.name, options.ranks)]
    return [generate_program(options.name, options.ranks, options.microbatches, settings, costs)]


def generate_program(
    name: str | None,
    ranks: int | None,
    microbatches: int | None,
    settings: Mapping[str, Any],
    costs: Costs | None = None,
) -> Program:
    """Generate a schedule's program.

    Args:
        settings: the schedule's options.
        costs: for schedules that depend on them, if the options have none.

    Raises:
        StrettoError: an option is missing, or the schedule cannot be generated.
    """
    from stretto.program import options as accepted
    from stretto.program import schedule as generate

    if name is None:
        raise StrettoError(
            "no schedule named", hint="name one of stretto schedule --list, or FILE.py:FUNCTION"
        )
    takes_costs = "costs" in accepted(name)  # the name is wrong before its sizes are missing
    if ranks is None or microbatches is None:
        sizes = (("--ranks", ranks), ("--microbatches", microbatches))
        missing = " and ".join(option for option, value in sizes if value is None)
        raise StrettoError(f"schedule {name} needs {missing}", hint=f"{name} --ranks 4 --microbatches 8")
    if costs is not None and takes_costs:
        settings = {"costs": costs, **settings}
    return generate(name, ranks, microbatches, **settings)


def _compared_programs(
    options: ReplayOptions, compare: str, settings: Mapping[str, Any], costs: Costs
) -> list[Program]:
    """The programs of --compare; other options apply to those schedules that take them."""
    from stretto.program import options as accepted
    from stretto.program.schedules.user_schedule import is_program_file

    if options.name is not None or options.file is not None:
        also = options.name or str(options.file)
        raise StrettoError(
            f"--compare is given, and {also} beside it", hint=f"write --compare {also},{compare}"
        )
    entries = [entry.strip() for entry in compare.split(",") if entry.strip()]
    if not entries:
        raise StrettoError("--compare names no schedule", hint="write --compare gpipe,1f1b,zb-v")
    split = [(entry, *_COLON.split(entry)) for entry in entries]
    taken = {name: {} if is_program_file(name) else accepted(name) for _, name, *_ in split}
    for option, value in settings.items():
        if not any(option in names for names in taken.values()):
            raise StrettoError(
                f"{option} is {value}, but none of the schedules to compare takes it",
                hint=f"leave {option} out",
            )
    programs: list[Program] = []
    for entry, name, *pairs in split:
        if is_program_file(name):
            if pairs:
                raise StrettoError(f"--compare {entry}: a program in a file takes no options")
            programs.append(_read_program(Path(name), None, options.ranks))
            continue
        accepted_settings = {key: value for key, value in settings.items() if key in taken[name]}
        accepted_settings.update(_pair(pair, f"--compare {name}") for pair in pairs)
        program = generate_program(name, options.ranks, options.microbatches, accepted_settings, costs)
        programs.append(replace(program, name=entry) if pairs else program)
    return programs


def _read_program(file: Path, name: str | None, ranks: int | None) -> Program:
    """The program in a file."""
    from stretto.program.text import read_program

    program = read_program(file, name)
    if ranks is not None and ranks != program.ranks:
        raise StrettoError(
            f"{file} has {program.ranks} ranks, --ranks is {ranks}",
            hint="leave --ranks out: the file says how many there are",
        )
    return program


# ------------------------------------------------------------------ files


def _write_files(report: CommandReport, options: ReplayOptions, timelines: Sequence[Timeline]) -> None:
    """Write every file that the user named.

    Raises:
        StrettoError: a file cannot be written, or its format holds one program and there are several.
    """
    timeline, several = timelines[0], options.compare is not None
    single = {"write": options.write, "trace": options.trace}
    if several and (option := next((name for name, path in single.items() if path is not None), None)):
        raise StrettoError(
            f"--{option} writes one program, --compare has {len(timelines)}",
            hint="name one schedule, or write --svg, --png or --html",
        )
    check_choice("--time-unit", options.time_unit, _SECONDS)
    if options.write is not None:
        report.write(options.write, _program_text(options.write, timeline.program))
    if options.trace is not None:
        from stretto.view.trace import trace_of, write_trace

        report.write(options.trace, write_trace(trace_of(timeline, _SECONDS[options.time_unit])))
    if options.svg is not None or options.png is not None:
        from stretto.view.panel_svg import compare_svg, timeline_svg

        picture = compare_svg(timelines) if several else timeline_svg(timeline)
        if options.svg is not None:
            report.write(options.svg, picture)
        if options.png is not None:
            from stretto.view.svg import png_of

            report.write(options.png, png_of(picture))
    if options.html is not None:
        from stretto.view.page import timeline_page
        from stretto.view.panel import figures_table, with_path

        title = (
            f"{'Schedules' if several else 'Schedule'} {', '.join(each.program.name for each in timelines)}"
        )
        panels = [with_path(each) for each in timelines]
        report.write(
            options.html, timeline_page(title, panels, below=[("Figures", figures_table(timelines))])
        )


def _program_text(path: Path, program: Program) -> str:
    """The program in the format that the file's name ends with.

    Raises:
        StrettoError: another ending, or CSV, which holds orders only, would be read back as another program.
    """
    from stretto.program.text import exact_csv, to_csv, to_json
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
    try:
        return exact_csv(program)
    except StrettoError as error:
        raise StrettoError(
            f"--write {path}: {error.message}", hint=f"--write {path.with_suffix('.json')}"
        ) from None


# ------------------------------------------------------------------ other frameworks


class Export(NamedTuple):
    """A program for another framework.

    record: the framework's settings, for the command's JSON.
    text: how the framework loads the files.
    modules: for torchtitan, the names of each stage's modules, as a JSON file next to the CSV.
    """

    record: dict[str, Any]
    text: str
    modules: str | None = None


def _export(options: ReplayOptions, framework: str, programs: Sequence[Program]) -> Export:
    """Check that a framework can run the program, and cut the model for torchtitan.

    Raises:
        StrettoError: an unknown framework, no CSV file, a program that it cannot run, or a cut that does not
            match the program's stages.
    """
    from stretto.program.text import check_torch
    from stretto.program.text.torchtitan import modules_json, modules_of_stages, schedule_class

    check_choice("--for", framework, _FRAMEWORKS)
    csv = options.write
    if csv is None or csv.suffix.lower() != ".csv" or len(programs) > 1:
        raise StrettoError(f"--for {framework} needs one program and its file", hint="--write mine.csv")
    (program,) = programs
    if program.lowered:
        raise StrettoError(
            f"--for {framework} writes compute actions, {program.name} has communication",
            hint="leave --lowered out: torch adds the communication",
        )
    check_torch(program)
    record = {"framework": framework, "csv": str(csv)}
    if framework == "torch":
        if options.layers is not None or options.stages is not None:
            raise _cut_refused()
        stages = "; ".join(
            f"rank {rank}: {', '.join(map(str, program.stages_of(rank)))}" for rank in range(program.ranks)
        )
        text = (
            f"# stages by rank: {stages}\n"
            f"schedule = _PipelineScheduleRuntime(stages, n_microbatches={program.microbatches}, "
            f"loss_fn=...)\nschedule._load_csv({str(csv)!r})"
        )
        return Export(record, text)
    settings: dict[str, Any] = {
        "pipeline_parallel_degree": program.ranks,
        "pipeline_parallel_schedule": schedule_class(program),
        "pipeline_parallel_schedule_csv": str(csv),
    }
    modules = modules_of_stages(_stage_layers(program.depth, options.layers, options.stages))
    lines = [
        f"config.parallelism.{name} = " + (f'"{value}"' if isinstance(value, str) else str(value))
        for name, value in settings.items()
    ]
    lines += [
        f'config.parallelism.module_fqns_per_model_part = json.load(open("{_modules_path(csv)}"))',
        f"# training.local_batch_size = {program.microbatches} x "
        "parallelism.pipeline_parallel_microbatch_size",
        "# before torchtitan 0.3, lm_head is called output",
    ]
    record |= {**settings, "module_fqns_per_model_part": modules}
    return Export(record, "\n".join(lines), modules_json(modules))


def _modules_path(csv: Path) -> Path:
    return csv.with_suffix(".modules.json")


def _cut_refused() -> StrettoError:
    return StrettoError("--layers and --stages cut a model of torchtitan", hint="--for torchtitan")


def _stage_layers(depth: int, layers: int | None, stages: str | None) -> list[int]:
    """How many layers each stage has, embedding and head among them."""
    from stretto.layout.cut import cut

    if (layers is None) == (stages is None):
        raise StrettoError(
            "--for torchtitan needs the layers of each stage",
            hint="--layers 32 for an even cut, or --stages 7,7,7,5 (embedding and head count as layers)",
        )
    if layers is not None:
        if layers + 2 < depth:
            raise StrettoError(
                f"--layers is {layers}: with embedding and head too few for {depth} stages",
                hint=f"nearest is --layers {depth - 2}",
            )
        return [len(stage) for stage in cut([1.0] * (layers + 2), depth)]
    try:
        counts = [int(part) for part in (stages or "").split(",")]
    except ValueError:
        raise StrettoError(f"--stages is {stages!r}, must be numbers", hint="--stages 7,7,7,5") from None
    if len(counts) != depth:
        raise StrettoError(
            f"--stages has {counted(len(counts), 'stage')}, the program {depth}", hint=f"give {depth} numbers"
        )
    return counts
