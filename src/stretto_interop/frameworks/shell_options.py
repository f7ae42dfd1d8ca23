"""Loops of a script over its own options, written out for the words that it is started with.

What scripts do at their head: `while [[ $# -gt 0 ]]; do case $1 in --tp) TP=$2; shift 2 ;; esac; done`, or
the same with `getopts`. Each turn becomes the commands of its clause; any other loop stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from stretto.errors import StrettoError

_LOOP = re.compile(
    r"^[ \t]*while[ \t]+(?:getopts[ \t]+(?P<letters>\S+)[ \t]+(?P<name>\w+)|"
    r"\[\[?[ \t]+(?:\"?\$\{?#\}?\"?[ \t]+(?:-gt|-ne|!=|>)[ \t]+0|(?:-n[ \t]+)?\"?\$\{?1\}?\"?)[ \t]+\]\]?|"
    r"\(\([ \t]*\$#[ \t]*(?:>[ \t]*0[ \t]*)?\)\))[ \t]*(?:;|\n)\s*do\b",
    re.MULTILINE,
)
_PARTS = tuple(re.compile(part) for part in (r"\bcase\s+\S+\s+in\b", r"\besac\b", r"\bdone\b"))
_SHIFT = re.compile(r"\bshift\b[ \t]*(\d*)")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)


def written_out(text: str, source: str, words: Sequence[str]) -> str:
    """The script without loops over its options; lines keep their numbers.

    Args:
        words: behind the script's name.

    Raises:
        StrettoError: a word that the script refuses.
    """

    made = list[str]()
    at, line = 0, 1
    while (match := _LOOP.search(text, at)) is not None and (parts := _parts(text, match.end())) is not None:
        line += text.count("\n", at, match.start())
        before, inside, after = (text[start:end] for start, end in parts)
        end = parts[-1][1] + len("done")
        clauses = list(_clauses(_COMMENT.sub("", inside)))
        where = f"{source}:{line}"
        if ";" in before:
            turns = None
        elif match["letters"]:
            turns = _by_letters(match["letters"].strip("'\""), match["name"], words, clauses, where)
        else:
            turns = _by_words(before, after, words, clauses, where)
        whole = text[match.start() : end]
        made += [text[at : match.start()], whole if turns is None else turns + "\n" * whole.count("\n")]
        line, at = line + whole.count("\n"), end
    return "".join([*made, text[at:]])


def _parts(text: str, at: int) -> list[tuple[int, int]] | None:
    """Where a loop's commands before, inside and behind its `case` stand; None: it has none."""
    made = list[tuple[int, int]]()
    for part in _PARTS:
        match = part.search(text, at)
        if match is None:
            return None
        made.append((at, match.start()))
        at = match.end()
    return made


def _clauses(text: str) -> Iterator[tuple[list[str], str]]:
    """The patterns and the commands of each clause of a `case`."""
    for clause in text.split(";;"):
        patterns, bracket, body = clause.partition(")")
        if bracket:
            yield patterns.strip().removeprefix("(").split("|"), body


_Clauses = Sequence[tuple[Sequence[str], str]]


def _by_words(before: str, after: str, words: Sequence[str], clauses: _Clauses, line: str) -> str | None:
    made, left = list[str](), len(words)
    while left > 0:
        turn = [before, _clause(clauses, words[len(words) - left], line), after]
        shifted = sum(int(count or 1) for part in turn for count in _SHIFT.findall(part))
        if not shifted:
            return None  # it ends in ways that nothing here follows
        made += turn
        left -= shifted
    return _joined(made)


def _by_letters(letters: str, name: str, words: Sequence[str], clauses: _Clauses, line: str) -> str | None:
    made, rest = list[str](), list(words)
    while rest and rest[0].startswith("-") and len(rest[0]) > 1:
        letter, value = rest[0][1], rest.pop(0)[2:]
        if f"{letter}:" in letters:
            value = value or (rest.pop(0) if rest else "")
            quoted = value.replace("'", "'\\''")
            made.append(f"OPTARG='{quoted}'")
        elif value:
            rest.insert(0, f"-{value}")
        made += [f"{name}={letter}", _clause(clauses, letter, line)]
    return _joined(made)


def _clause(clauses: _Clauses, word: str, line: str) -> str:
    """The commands of the first clause for a word."""
    for patterns, body in clauses:
        if any(fnmatchcase(word, pattern.strip().strip("'\"")) for pattern in patterns):
            if re.search(r"\bexit\b|\busage\b", body):
                raise StrettoError(f"{line}: the script ends at {word!r}", hint="give it words that it takes")
            return body
    return ""


def _joined(parts: Sequence[str]) -> str:
    """Commands in one line."""
    commands = [one.strip(" \t;") for part in parts for one in part.splitlines()]
    return "; ".join(one for one in commands if one)
