"""`stretto learn`: exercises that are graded on the reader's own file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from random import randrange
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app, failures_reported, say_no, write_file
from stretto.cli.report import CommandReport, text

if TYPE_CHECKING:
    from stretto.learn.catalogue import Exercise, Language
    from stretto.learn.checks import Check

app = command_app()


@app.command(
    epilog="Example: stretto learn ddp, and when learn/ddp.py is written: stretto learn ddp learn/ddp.py"
)
def learn(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="An exercise; default: list all.")
    ] = None,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE.py]", help="Your solution, which is graded.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Draw the cases of an earlier grading again; default: new ones.")
    ] = None,
    lang: Annotated[
        Literal["en", "zh"] | None, typer.Option(help="Of tasks; default: zh if LANG begins so, else en.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Learn by writing the parts of parallel training, graded by proof.

    Without a name, lists the exercises and which of them you have solved. With a name, prints the task and
    writes a template into the folder learn/, unless it exists. With a file, grades it: the file runs on real
    ranks, is compared with one process in float64, and its messages, bytes and memory are counted. Cases are
    drawn anew each time.

    Exit code 1: the exercise is not solved.
    """
    from stretto.learn.catalogue import find_exercise

    if seed is not None and file is None:
        raise typer.BadParameter("--seed is for grading", param_hint="--seed")
    environment = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    language = lang or ("zh" if environment.startswith("zh") else "en")
    if name is None:
        _list(language, as_json)
    elif file is None:
        _begin(find_exercise(name), language, as_json)
    else:
        _grade(find_exercise(name), file, randrange(1_000_000) if seed is None else seed, as_json)


def _list(language: Language, as_json: bool) -> None:
    from stretto.learn.catalogue import EXERCISES, states

    progress = states()
    tasks = {exercise.name: exercise.task(language) for exercise in EXERCISES}
    report = CommandReport(
        {
            "exercises": [
                {"name": name, "lesson": task.lesson, "title": task.title, "state": progress[name]}
                for name, task in tasks.items()
            ]
        }
    )
    rows = [[name, task.lesson, task.title, progress[name]] for name, task in tasks.items()]
    report.table([text("name"), text("lesson"), text("exercise"), text("state")], rows)
    solved = sum(state == "solved" for state in progress.values())
    report.line(f"{solved} of {len(EXERCISES)} solved; the task of one: stretto learn {EXERCISES[0].name}")
    report.print(as_json)


def _begin(exercise: Exercise, language: Language, as_json: bool) -> None:
    """Print the task, and write the template."""
    from stretto.learn.catalogue import FOLDER, states

    task, path = exercise.task(language), exercise.template_file
    exists = path.exists()
    if not exists:
        FOLDER.mkdir(exist_ok=True)
        write_file(path, exercise.module.TEMPLATE)
    report = CommandReport(
        {
            "name": exercise.name,
            "lesson": task.lesson,
            "title": task.title,
            "state": states()[exercise.name],
            "task": task.text,
            "file": str(path),
            "written": not exists,
        }
    )
    report.line(f"{task.lesson}: {task.title}\n\n{task.text}\n")
    report.line(f"{path} {'exists and was left as it is' if exists else 'is the template: complete it'}")
    report.line(f"grade it: stretto learn {exercise.name} {path}")
    report.print(as_json)


def _grade(exercise: Exercise, file: Path, seed: int, as_json: bool) -> None:
    from stretto.learn.catalogue import record
    from stretto.learn.grade import grade

    def show(check: Check) -> None:
        if not as_json:
            print(f"  ok  {check.subject}", flush=True)

    if not as_json:
        print(f"{exercise.name}: {file}, seed {seed}", file=sys.stderr)
    with failures_reported():
        result = grade(exercise, file, seed, on_check=show)
    record(exercise.name, result.solved)
    report = CommandReport(
        {
            "name": exercise.name,
            "file": str(file),
            "seed": seed,
            "solved": result.solved,
            "checks": [{"check": check.subject, "problem": check.problem} for check in result.checks],
            "seconds": result.seconds,
        }
    )
    for check in result.checks:
        if check.problem is not None:
            report.line(f"  NO  {check.subject}\n      {check.problem}")
    again = f"the same cases again: stretto learn {exercise.name} {file} --seed {seed}"
    report.line(f"{'solved' if result.solved else 'not solved'} in {result.seconds:.0f} s; {again}")
    report.print(as_json)
    if not result.solved:
        raise say_no()
