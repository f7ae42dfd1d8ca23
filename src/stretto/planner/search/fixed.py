"""Choices that the user has fixed, as in `tp=8` or `schedule=1f1b,zb-v`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.errors import StrettoError, nearest
from stretto.job.data_parallel import MODES
from stretto.program import names
from stretto.program.schedules.traits import is_searched, trains
from stretto.program.schedules.user_schedule import is_file

_NUMBERS = (
    "tp",
    "cp",
    "ep",
    "expert_tp",
    "pp",
    "dp",
    "micro_batch",
    "chunks",
    "group",
    "waves",
    "blocks",
    "shard_states",
    "shard_gradients",
    "shard_parameters",
)
_OPTIONS: dict[str, tuple[str, ...]] = {
    "schedule": (),  # all registered schedules that train, looked up when the choice is read
    "context": ("ring", "ulysses"),
    "recompute": ("none", "selective", "full", "auto"),
    "mode": MODES,
    "offload": ("none", "cpu"),
    "offload_parameters": ("none", "cpu"),
}
_ALIASES = {"zero": "mode", "dp.mode": "mode", "micro": "micro_batch", "sp": "sequence_parallel"}

NAMES = (*_NUMBERS, *_OPTIONS, "sequence_parallel", "memory_gib")


def fixed(choices: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """The values that each fixed choice may take.

    Raises:
        StrettoError: an unknown choice, or a value that it does not take.
    """
    values: dict[str, tuple[Any, ...]] = {}
    for choice in choices:
        name, equals, texts = choice.partition("=")
        name = _ALIASES.get(name.strip().lower(), name.strip().lower())
        if not equals or not texts:
            raise StrettoError(f"--fix {choice!r} is no choice", hint="as in --fix tp=8, or --fix pp=4,8")
        if name not in NAMES:
            suggestion = nearest(name, NAMES)
            hint = f"did you mean {suggestion!r}? " * bool(suggestion) + f"choices are {', '.join(NAMES)}"
            raise StrettoError(f"--fix {choice!r}: there is no choice {name!r}", hint=hint)
        values[name] = tuple(_value(name, value.strip(), choice) for value in texts.split(","))
    if "memory_gib" in values and values.get("recompute") != ("auto",):
        raise StrettoError("--fix memory_gib is for recompute=auto", hint="add --fix recompute=auto")
    return values


def _value(name: str, value: str, text: str) -> Any:
    if name in _NUMBERS:
        if value.isdecimal() and int(value) > 0:
            return int(value)
        raise StrettoError(f"--fix {text!r}: {name} is {value!r}, not a number of at least 1")
    if name == "sequence_parallel":
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise StrettoError(f"--fix {text!r}: {name} is {value!r}", hint="true or false")
    if name == "memory_gib":
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if number > 0:
            return number
        raise StrettoError(f"--fix {text!r}: {value!r} is no number above 0")
    value = f"zero{value}" if name == "mode" and value in ("1", "2", "3") else value
    if name == "schedule" and is_file(value):
        if is_searched(value) or not trains(value):
            instead = "is generated for the costs of stages" if is_searched(value) else "does not train"
            raise StrettoError(f"--fix {text!r}: {value} {instead}", hint="stretto predict prices one layout")
        return value
    options = _OPTIONS[name] if name != "schedule" else tuple(filter(trains, names()))
    if value not in options:
        suggestion = nearest(value, options)
        hint = f"did you mean {suggestion!r}?" if suggestion else f"one of {', '.join(options)}"
        raise StrettoError(f"--fix {text!r}: {name} is no {value!r}", hint=hint)
    return value
