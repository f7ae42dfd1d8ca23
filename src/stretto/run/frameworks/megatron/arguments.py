"""Megatron-LM's command line: what each argument takes, and what those say that no rule maps.

The arguments are those of Megatron-LM core_v0.16.1 (2026-03-16), of whose parser
`frameworks/data/megatron_lm.csv` lists names, types and choices.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from stretto.errors import StrettoError, nearest
from stretto.run.frameworks.shell import unknown_in

VERSION = "core_v0.16.1"


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument by its name without dashes.

    Attributes:
        values: how many it takes: "flag", "" (one), a number, "+" or "*".
        kind: of each value: "int", "float" or "str".
        choices: the values that it takes; empty: any.
        group: of those that no rule reads, what they are about.
    """

    name: str
    values: str
    kind: str
    choices: tuple[str, ...]
    group: str

    def read(self, words: Sequence[str], where: str) -> Any:
        """The value of the words behind it.

        Raises:
            StrettoError: too few or too many, or a value that it does not take.
        """
        if self.values == "flag":
            if words:
                raise StrettoError(f"{where}: --{self.name} takes no value, not {words[0]!r}")
            return True
        if not words and self.values != "*":
            raise StrettoError(f"{where}: --{self.name} lacks its value")
        if self.values == "" and len(words) > 1:
            raise StrettoError(f"{where}: --{self.name} takes one value, not {' '.join(words)!r}")
        if self.values.isdecimal() and len(words) != int(self.values):
            raise StrettoError(f"{where}: --{self.name} takes {self.values} values, not {len(words)}")
        values = [self._one(word, where) for word in words]
        return values[0] if self.values == "" else values

    def _one(self, word: str, where: str) -> int | float | str:
        if (missing := unknown_in(word)) is not None:
            raise StrettoError(
                f"{where}: --{self.name} is {missing}, whose value nothing here tells",
                hint=f"write its value into the script: {missing}=...",
            )
        if self.choices and word not in self.choices:
            near = nearest(word, self.choices)
            hint = f"did you mean {near}? " * bool(near) + f"allowed: {', '.join(self.choices)}"
            raise StrettoError(f"{where}: --{self.name} is {word}", hint=hint)
        try:
            return {"int": int, "float": float}.get(self.kind, str)(word)
        except ValueError:
            kind = "a whole number" if self.kind == "int" else "a number"
            raise StrettoError(f"{where}: --{self.name} is {word!r}, not {kind}") from None


@cache
def arguments() -> Mapping[str, Argument]:
    """Every argument of Megatron-LM by each of its names."""
    text = files("stretto.run.frameworks").joinpath("data/megatron_lm.csv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    made = dict[str, Argument]()
    for row in csv.DictReader(lines):
        one = Argument(
            name=row["option"],
            values=row["values"],
            kind=row["type"],
            choices=tuple(row["choices"].split()),
            group=row["class"],
        )
        made |= dict.fromkeys([one.name, *row["aliases"].split()], one)
    return made


def read_arguments(words: Sequence[str], source: str, priced: Mapping[str, object]) -> dict[str, Any]:
    """The arguments of a command line by their names; of those given twice the last, as argparse takes it.

    Args:
        priced: names whose values matter; the others may have unknown values.

    Raises:
        StrettoError: a word that is no argument, or a value that it does not take.
    """
    known, settings = arguments(), dict[str, Any]()
    for name, values in _groups(words, source):
        one = known.get(name)
        if one is None:
            near = nearest(name, known)
            hint = f"did you mean --{near}?" if near else "it is no argument of Megatron-LM"
            raise StrettoError(f"{source}: Megatron-LM {VERSION} has no --{name}", hint=hint)
        unknown = any(unknown_in(value) is not None for value in values)
        settings[one.name] = values if unknown and one.name not in priced else one.read(values, source)
    return settings


def _groups(words: Sequence[str], source: str) -> Iterator[tuple[str, list[str]]]:
    """Each argument with the values behind it."""
    name, values = "", list[str]()
    for word in words:
        negative = word[1:2].isdigit() or word[1:2] == "."
        if word.startswith("-") and not negative and word != "-":
            if name:
                yield name, values
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("_", "-") if name.replace("_", "-") in arguments() else name
            values = [value] if equals else []
        elif name:
            values.append(word)
        elif unknown_in(word) is None:
            hint = "arguments begin with --"
            raise StrettoError(f"{source}: {word!r} is no argument of Megatron-LM", hint=hint)
    if name:
        yield name, values


# what arguments of a class change, if no price
_UNPRICED = {
    "data": "what is read, not how long a step takes",
    "checkpoints": "checkpoints",
    "logging": "logging, profiling and evaluation",
    "learning": "what is learnt, not what a step costs",
    "numerics": "numerics with hardly a cost",
    "detail": "details of kernels and communication, priced as is usual",
    "faults": "fault handling",
}
# why arguments of a class are refused
_UNREAD = {
    "no-costs": "it has no costs here",
    "other": "it is for other programs than training with pretrain_gpt.py",
    "removed": "Megatron-LM does not take it any more",
}


def unpriced() -> dict[str, str]:
    """Arguments that change no price, and what they change."""
    return {one.name: _UNPRICED[one.group] for one in arguments().values() if one.group in _UNPRICED}


def unread() -> dict[str, str]:
    """Arguments that change a price in ways that nothing here knows, and why."""
    return {one.name: _UNREAD[one.group] for one in arguments().values() if one.group in _UNREAD}
