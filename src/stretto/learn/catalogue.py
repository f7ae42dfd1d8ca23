"""The exercises of `stretto learn` in the order of the lessons, and what a reader has done of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

from stretto.errors import StrettoError, nearest, read_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from random import Random

    from stretto.learn.checks import Check

FOLDER = Path("learn")  # of templates and progress, in the working directory
TASKS = Path(__file__).with_name("tasks")
Language = Literal["en", "zh"]
State = Literal["not begun", "attempted", "solved"]


class ExerciseModule(Protocol):
    """The module of an exercise.

    Attributes:
        TEMPLATE: the file that the reader completes; its functions are those that are graded.
        RANKS: processes that run the checks.
    """

    TEMPLATE: str
    RANKS: int

    @staticmethod
    def checks(reader: Mapping[str, Any], random: Random) -> Iterator[Check]:
        """Yield the outcome of each check, in one order on all ranks; grading ends at the first problem.

        Args:
            reader: what the reader's file defines, by the names of the template.
            random: the same on all ranks; draws the cases.
        """
        ...


class TaskText(NamedTuple):
    """The text of an exercise in one language: the lesson that it belongs to, its title, and what to do."""

    lesson: str
    title: str
    text: str


@dataclass(frozen=True)
class Exercise:
    """An exercise by its name."""

    name: str

    def task(self, language: Language = "en") -> TaskText:
        """Read its task."""
        heading, _, text = read_text(TASKS / language / f"{self.name}.md").partition("\n\n")
        lesson, _, title = heading.removeprefix("# ").partition(": ")
        return TaskText(lesson, title, text.rstrip())

    @property
    def module_name(self) -> str:
        """The name of its module."""
        return f"stretto.learn.exercises.{self.name}"

    @property
    def module(self) -> ExerciseModule:
        """Its module, which imports torch."""
        return cast(ExerciseModule, import_module(self.module_name))

    @property
    def template_file(self) -> Path:
        """Where its template is written."""
        return FOLDER / f"{self.name}.py"


_NAMES = "ddp zero1 tensor sequence pipeline schedule recompute plan ring cut tables bugs"
EXERCISES = tuple(map(Exercise, _NAMES.split()))


def find_exercise(name: str) -> Exercise:
    """Return an exercise by its name.

    Raises:
        StrettoError: there is none of this name.
    """
    exercises = {exercise.name: exercise for exercise in EXERCISES}
    if name not in exercises:
        similar = nearest(name, exercises)
        raise StrettoError(
            f"there is no exercise {name!r}",
            hint=f"did you mean {similar!r}?" if similar else f"exercises are {', '.join(exercises)}",
        )
    return exercises[name]


def states() -> dict[str, State]:
    """Return the state of every exercise, as the progress file of the working directory has it.

    Raises:
        StrettoError: the file is not a progress file.
    """
    path = FOLDER / "progress.json"
    try:
        stored = json.loads(read_text(path)) if path.exists() else {}
        return {each.name: _STATES[stored.get(each.name, "not begun")] for each in EXERCISES}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise StrettoError(
            f"{path} is no progress of exercises: {error!r}", hint="delete it; files of yours stay"
        ) from None


_STATES: dict[str, State] = {"not begun": "not begun", "attempted": "attempted", "solved": "solved"}


def record(name: str, solved: bool) -> None:
    """Store that an exercise was graded; one that was solved stays so."""
    progress = states()
    progress[name] = "solved" if solved or progress[name] == "solved" else "attempted"
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps({each: state for each, state in progress.items() if state != "not begun"}, indent=1)
    (FOLDER / "progress.json").write_text(text + "\n", encoding="utf-8")
