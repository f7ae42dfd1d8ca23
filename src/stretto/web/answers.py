"""The questions of the front end and their answers, as JSON: one protocol for a worker and for a server.

A question is an object whose `ask` names one of the functions below or of the studio. The function's answer
is an object, or an iterator of objects, each of which replaces the one before, or None if there is nothing
new: a blank line, by which a server learns that a request was aborted. No torch and no files here. Modules
are imported by their first question: a page waits only for those of the view that it shows.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from stretto.errors import StrettoError

Question = Mapping[str, Any]
Answer = Mapping[str, Any]
Questions = Mapping[str, Callable[[Question], Answer | Iterator[Answer | None]]]

_FUNCTIONS = {
    "schedules": ("schedules", "list_schedules"),
    "timeline": ("schedules", "replay"),
    "edit": ("edits", "edit"),
    "program memory": ("edits", "memory"),
    "program file": ("schedule_files", "program_file"),
    "names": ("question_job", "list_names"),
    "layout": ("layouts", "show_layout"),
    "traffic": ("layouts", "count_traffic"),
    "cuts": ("cuts", "cut_tensors"),
    "memory": ("memory", "count_memory"),
    "table_names": ("tables", "list_table_names"),
    "tables": ("tables", "place"),
    "plan_choices": ("plans", "list_choices"),
    "plan": ("plans", "plan"),
    "plan_config": ("plans", "plan_config"),
}
MODULES = [*dict.fromkeys(f"stretto.web.{module}" for module, _ in _FUNCTIONS.values())]


def _answer(module: str, function: str, question: Question) -> Answer | Iterator[Answer]:
    return getattr(import_module(f"stretto.web.{module}"), function)(question)


ALONE: Questions = {name: partial(_answer, *place) for name, place in _FUNCTIONS.items()}
QUESTIONS_ALONE = [*ALONE]


def reply_lines(text: str, questions: Questions = ALONE) -> Generator[str]:
    """Yield the replies to a question, each a line of JSON: parts, at last an answer or an error."""
    try:
        question = json.loads(text)
        name = question.get("ask", "") if isinstance(question, dict) else ""
        if name not in questions:
            raise StrettoError(f"there is no question {name!r}", hint=f"ask one of {', '.join(questions)}")
        answer = questions[name](question)
        if isinstance(answer, Mapping):
            yield _line("answer", answer)
            return
        for part in answer:
            yield "" if part is None else _line("part", part)
        yield _line("answer", None)  # the last part
    except StrettoError as error:
        yield _line("error", {"message": error.message, "hint": error.hint or ""})
    except Exception as error:  # such as of a question without a field: the page must not wait in silence
        traceback.print_exc()
        hint = "the browser's console, or the studio's terminal, shows where"
        yield _line("error", {"message": f"{type(error).__name__}: {error}", "hint": hint})


def _line(kind: str, value: Any) -> str:
    return json.dumps({kind: value}, separators=(",", ":"), allow_nan=False)
