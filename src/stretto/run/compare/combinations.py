"""Combinations of settings from arguments such as `layout.tp=1,2 dp.mode=ddp,zero3`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from stretto.errors import StrettoError

_DEPTH = {"[": 1, "{": 1, "]": -1, "}": -1}
_QUOTES = "\"'"
_SETTING = re.compile(r"[a-z_]+(\.[a-z_0-9]+)+=")


@dataclass(frozen=True)
class Combination:
    """One value for each field of the command line, as overrides of a config take them."""

    settings: tuple[tuple[str, str], ...]

    @property
    def overrides(self) -> list[str]:
        """Such as ["layout.tp=2", "dp.mode=zero3"]."""
        return [f"{field}={value}" for field, value in self.settings]


def combinations(arguments: Sequence[str]) -> list[Combination]:
    """Return the Cartesian product of the fields' values, the last field varying fastest; without
    arguments, a single combination without settings.

    Raises:
        StrettoError: an argument that is not FIELD=VALUE[,VALUE...], or a field that is given twice.
    """
    choices = dict[str, list[str]]()
    for argument in arguments:
        field, equals, text = argument.partition("=")
        field = field.strip()
        if not equals or not field:
            raise StrettoError(
                f"{argument!r} is not of the form section.field=value,value", hint="such as layout.tp=1,2"
            )
        chosen = values(text)
        if another := next((value for value in chosen if _SETTING.match(value)), None):
            raise StrettoError(
                f"{argument!r} has {another!r} as a value of {field}",
                hint="fields are separated by spaces: every combination of their values is run",
            )
        if field in choices:
            raise StrettoError(
                f"{field} is given twice", hint=f"write {field}={','.join([*choices[field], *chosen])}"
            )
        choices[field] = chosen
        if len(choices[field]) > 1 and "" in choices[field]:
            raise StrettoError(f"{argument!r} has an empty value", hint="such as layout.tp=1,2")
    fields = list(choices)
    return [Combination(tuple(zip(fields, chosen, strict=True))) for chosen in product(*choices.values())]


def values(text: str) -> list[str]:
    """Split at commas; a comma within brackets or quotes belongs to its value."""
    parts, quote = [""], ""
    depth = 0
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        else:
            depth += _DEPTH.get(character, 0)
        if character == "," and depth <= 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def short_names(combined: Sequence[Combination]) -> list[str]:
    """Name each combination by its values of the fields that vary, without their sections if that is unique,
    as in "tp=2 mode=zero3".
    """
    varied = [
        field
        for index, (field, value) in enumerate(combined[0].settings)
        if any(each.settings[index][1] != value for each in combined)
    ]
    leaves = Counter(field.rpartition(".")[2] for field in varied)
    short = {field: field.rpartition(".")[2] for field in varied}
    short |= {field: field for field in varied if leaves[short[field]] > 1}
    return [
        " ".join(f"{short[field]}={value}" for field, value in each.settings if field in short)
        or "as configured"
        for each in combined
    ]


def matching(wanted: str, combined: Sequence[Combination], names: Sequence[str]) -> int:
    """Return the index of the only combination that has all the wanted settings, as in "tp=2 mode=zero3".

    Raises:
        StrettoError: none has them, or several have.
    """
    settings = set(wanted.split())
    matches = [
        index
        for index, each in enumerate(combined)
        if names[index] == wanted
        or settings
        <= {f"{name}={value}" for field, value in each.settings for name in (field, field.rpartition(".")[2])}
    ]
    if len(matches) != 1:
        shown = ", ".join(names[index] for index in (matches or range(len(names)))[:8])
        raise StrettoError(
            f"--baseline {wanted!r} is {'none' if not matches else 'more than one'} of the combinations",
            hint=f"one of: {shown}",
        )
    return matches[0]


def file_name(name: str, fingerprint: str) -> str:
    """Make a file's or a run's name of a combination's; `fingerprint` distinguishes different jobs."""
    plain = re.sub(r"[^A-Za-z0-9_.=+-]", "-", name.replace(" ", "+"))[:80].lstrip(".+=-") or "one"
    return f"{plain}.{fingerprint[:8]}"
