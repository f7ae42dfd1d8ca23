"""Combinations of settings from words such as `layout.tp=1,2 dp.mode=ddp,zero3`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from stretto.errors import StrettoError

_DEPTH = {"[": 1, "{": 1, "]": -1, "}": -1}
_QUOTES = "\"'"


@dataclass(frozen=True)
class Combination:
    """One value for each field of the command line, as overrides of a config take them."""

    settings: tuple[tuple[str, str], ...]

    @property
    def words(self) -> list[str]:
        """Such as ["layout.tp=2", "dp.mode=zero3"]."""
        return [f"{field}={value}" for field, value in self.settings]


def combinations(words: Sequence[str]) -> list[Combination]:
    """The Cartesian product of the fields' values, the last field varying fastest; a single combination
    without settings for no words.

    Raises:
        StrettoError: a word that is not FIELD=VALUE[,VALUE...], or a field that is given twice.
    """
    choices = dict[str, list[str]]()
    for word in words:
        field, equals, text = word.partition("=")
        field = field.strip()
        if not equals or not field:
            raise StrettoError(
                f"{word!r} is not of the form section.field=value,value", hint="such as layout.tp=1,2"
            )
        if field in choices:
            raise StrettoError(
                f"{field} is given twice", hint=f"write {field}={','.join(choices[field])},{text}"
            )
        choices[field] = values(text)
        if len(choices[field]) > 1 and "" in choices[field]:
            raise StrettoError(f"{word!r} has an empty value", hint="such as layout.tp=1,2")
    fields = list(choices)
    return [Combination(tuple(zip(fields, chosen, strict=True))) for chosen in product(*choices.values())]


def values(text: str) -> list[str]:
    """The values between commas; a comma within brackets or quotes belongs to its value."""
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
    """A name for each combination: its values of the fields that vary, without sections where the rest of
    the name is unique, as in "tp=2 mode=zero3".
    """
    first = combined[0]
    varied = [
        field
        for at, (field, value) in enumerate(first.settings)
        if any(one.settings[at][1] != value for one in combined)
    ]
    last = Counter(field.rpartition(".")[2] for field in varied)
    short = {field: field.rpartition(".")[2] for field in varied}
    short |= {field: field for field in varied if last[short[field]] > 1}
    return [
        " ".join(f"{short[field]}={value}" for field, value in one.settings if field in short)
        or "as configured"
        for one in combined
    ]


def matching(wanted: str, combined: Sequence[Combination], names: Sequence[str]) -> int:
    """The index of the one combination that has all the wanted settings, as in "tp=2 mode=zero3".

    Raises:
        StrettoError: none has them, or several have.
    """
    words = wanted.split()
    matches = [
        at
        for at, one in enumerate(combined)
        if all(_has(one, *word.partition("=")[::2]) for word in words) or names[at] == wanted
    ]
    if len(matches) != 1:
        shown = ", ".join(names[at] for at in (matches or range(len(names)))[:8])
        raise StrettoError(
            f"--baseline {wanted!r} is {'none' if not matches else 'more than one'} of the combinations",
            hint=f"one of: {shown}",
        )
    return matches[0]


def _has(one: Combination, field: str, value: str) -> bool:
    return any(
        value == theirs and field in (known, known.rpartition(".")[2]) for known, theirs in one.settings
    )


def file_name(name: str, fingerprint: str) -> str:
    """The combination's name as that of a file or a run; `fingerprint` keeps different jobs apart."""
    plain = re.sub(r"[^A-Za-z0-9_.=+-]", "-", name.replace(" ", "+"))[:80].lstrip(".+=-") or "one"
    return f"{plain}.{fingerprint[:8]}"
