"""The words of a shell script's commands, without running it.

Understood is what scripts that start training are made of: assignments, arrays, quotes, continued lines,
`$NAME`, `${NAME}`, `${NAME:-default}`, `"${NAME[@]}"`, `$((arithmetic))` on whole numbers, and `if` with
simple tests. Nothing is executed: what a command would print stays unknown.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from stretto.errors import StrettoError

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_LOOPS = ("for", "while", "until", "case", "function", "select")
_HINT = 'have the script print its arguments, and give those: echo "${ARGS[@]}"'
Value = str | list[str]


@dataclass(frozen=True)
class Command:
    """The words of a command, expanded, and the line it begins on."""

    words: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class _Statement:
    """Words as they stand, with their quotes; an array's are a list of words in one."""

    words: tuple[str | list[str], ...]
    line: int


class Unknown(StrettoError):
    """A word whose value only running the script would tell."""


def unknown_in(word: str) -> str | None:
    """What is unknown in an expanded word: the name of a variable, or a command."""
    start = word.find(_MARK)
    return None if start < 0 else word[start + 1 : word.index(_MARK, start + 1)]


_MARK = "\x00"  # around what is unknown, inside of words


def commands(text: str, source: str) -> Iterator[Command]:
    """All commands of a script, in order, but those in branches that are not taken.

    Raises:
        StrettoError: quotes or brackets that do not end, loops, or a test that cannot be decided.
    """
    run = _Run(source, {**_batch_variables(text), "0": source, "BASH_SOURCE": [source]})
    for statement in _statements(text, source):
        yield from run.step(statement)


def _batch_variables(text: str) -> dict[str, Value]:
    """What SLURM would set, as far as the script's #SBATCH lines tell."""
    known: dict[str, Value] = {}
    names = {
        "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
        "gpus-per-node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
    }
    for name, value in re.findall(r"^#SBATCH\s+--?([\w-]+)[=\s]\s*(?:\w+:)?(\d+)\s*$", text, re.MULTILINE):
        for variable in names.get(name, ()):
            known[variable] = value
    return known


# ------------------------------------------------------------------ words


@dataclass(kw_only=True)
class _Reader:
    """Splits a script into statements of words, which keep their quotes."""

    text: str
    source: str
    at: int = 0
    line: int = 1
    words: list[str | list[str]] = field(default_factory=list[str | list[str]])
    begun: int = 1

    def statements(self) -> Iterator[_Statement]:
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == "\n" or letter in ";&|" or self._continued():
                if not self._continued():
                    yield from self._end()
                self._skip(2 if self._continued() else 1)
            elif letter.isspace():
                self._skip(1)
            elif letter == "#":
                self._comment()
            else:
                self._take()
        yield from self._end()

    def _end(self) -> Iterator[_Statement]:
        if self.words:
            yield _Statement(tuple(self.words), self.begun)
        self.words = []

    def _take(self) -> None:
        if not self.words:
            self.begun = self.line
        word = self._word()
        if word.endswith("=") and self.text[self.at : self.at + 1] == "(" and _ASSIGNED.fullmatch(word):
            self.words.append([word, *self._array()])
        elif word:
            self.words.append(word)
        else:  # a bracket of a group or a function
            self._skip(1)

    def _array(self) -> list[str]:
        self._skip(1)
        items = list[str]()
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self._continued():
                self._skip(2)
            elif self.text[self.at].isspace():
                self._skip(1)
            elif self.text[self.at] == "#":
                self._comment()
            else:
                items.append(self._word())
                if not items[-1]:
                    raise self._error("an array of something else than words")
        self._skip(1)
        return items

    def _word(self) -> str:
        """Up to the next blank or separator outside of quotes and brackets."""
        start = self.at
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter.isspace() or letter in ";&|()" or self._continued():
                break
            if letter == "\\":
                self._skip(2)
            elif letter in "'\"":
                self._quoted(letter)
            elif letter == "`":
                self._quoted("`")
            elif self.text.startswith(("$(", "${"), self.at):
                self._bracketed()
            else:
                self._skip(1)
        return self.text[start : self.at]

    def _quoted(self, quote: str) -> None:
        self._skip(1)
        while self.text[self.at : self.at + 1] != quote:
            if self.at >= len(self.text):
                raise self._error(f"a quote {quote} that does not end")
            if (
                quote == '"'
                and self.text[self.at] == "$"
                and self.text[self.at + 1 : self.at + 2] in ("(", "{")
            ):
                self._bracketed()
            else:
                self._skip(2 if self.text[self.at] == "\\" and quote != "'" else 1)
        self._skip(1)

    def _bracketed(self) -> None:
        """`$(...)` and `${...}`, whatever is inside."""
        self._skip(1)
        opening = self.text[self.at]
        closing, depth = {"(": ")", "{": "}"}[opening], 0
        while True:
            if self.at >= len(self.text):
                raise self._error(f"a bracket {opening} that does not end")
            letter = self.text[self.at]
            depth += (letter == opening) - (letter == closing)
            self._skip(1)
            if depth == 0:
                return

    def _comment(self) -> None:
        while self.at < len(self.text) and self.text[self.at] != "\n":
            self._skip(1)

    def _continued(self) -> bool:
        return self.text.startswith("\\\n", self.at)

    def _skip(self, letters: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + letters)
        self.at += letters

    def _error(self, what: str) -> StrettoError:
        return StrettoError(f"{self.source}:{self.line}: {what}", hint=_HINT)


def _statements(text: str, source: str) -> Iterator[_Statement]:
    return _Reader(text=text.replace("\r\n", "\n"), source=source).statements()


# ------------------------------------------------------------------ values


class _Fields:
    """The words that one word of a script becomes."""

    def __init__(self) -> None:
        self.words = list[str]()

    def add(self, text: str) -> None:
        """Lengthen the last word."""
        self.words[-1:] = [(self.words[-1] if self.words else "") + text]

    def add_each(self, texts: list[str]) -> None:
        """Lengthen the last word by the first text; the others are words of their own."""
        if texts:
            self.add(texts[0])
            self.words += texts[1:]


@dataclass
class _Run:
    """Variables so far, and which branches of `if` are taken."""

    source: str
    variables: dict[str, Value]
    branches: list[list[bool]] = field(default_factory=list[list[bool]])  # taken now, and any so far

    def step(self, statement: _Statement) -> Iterator[Command]:
        words = statement.words
        while (
            words and isinstance(words[0], str) and words[0] in ("then", "else", "fi", "elif", "do", "done")
        ):
            words = self._branch(words, statement.line)
        if not words or not all(now for now, _ in self.branches):
            if words and words[0] == "if":  # inside a branch that is not taken
                self.branches.append([False, True])
            return
        first = words[0]
        if first == "if":
            taken = self._test(words[1:], statement.line)
            self.branches.append([taken, taken])
        elif isinstance(first, str) and first in _LOOPS:
            raise StrettoError(f"{self.source}:{statement.line}: {first} is not read", hint=_HINT)
        else:
            yield from self._command(words, statement.line)

    def _branch(self, words: tuple[str | list[str], ...], line: int) -> tuple[str | list[str], ...]:
        word, rest = words[0], words[1:]
        if word == "then":
            return rest
        if not self.branches:
            raise StrettoError(f"{self.source}:{line}: {word} without if", hint=_HINT)
        last = self.branches[-1]
        if word == "fi":
            self.branches.pop()
        elif word == "else":
            self.branches[-1] = [not last[1], True]
        else:
            taken = not last[1] and all(now for now, _ in self.branches[:-1]) and self._test(rest, line)
            self.branches[-1] = [taken, last[1] or taken]
            return ()
        return rest

    def _command(self, words: tuple[str | list[str], ...], line: int) -> Iterator[Command]:
        """Assignments change variables; any other command is handed on."""
        rest = list(words)
        while rest and (isinstance(rest[0], list) or rest[0] in _DECLARING or _ASSIGNED.match(rest[0])):
            word = rest.pop(0)
            if isinstance(word, list):
                self._assign_array(word, line)
            elif word not in _DECLARING:
                self._assign(word, line)
        plain = [word for word in rest if isinstance(word, str)]
        if plain:
            yield Command(tuple(self._expanded(plain, line)), line)

    def _assign(self, word: str, line: int) -> None:
        match = _ASSIGNED.match(word)
        assert match
        value = "".join(self._fields(word[match.end() :], line, split=False))
        before = self.variables.get(match[1], "")
        if match[2]:
            value = (" ".join(before) if isinstance(before, list) else before) + value
        self.variables[match[1]] = value

    def _assign_array(self, words: list[str], line: int) -> None:
        match = _ASSIGNED.match(words[0])
        assert match
        before = self.variables.get(match[1], []) if match[2] else []
        start = before if isinstance(before, list) else [before]
        self.variables[match[1]] = [*start, *self._expanded(words[1:], line)]

    def _expanded(self, words: list[str], line: int) -> list[str]:
        return [field for word in words for field in self._fields(word, line)]

    def _fields(self, word: str, line: int, split: bool = True) -> list[str]:
        """The words that one becomes: quotes removed, variables put in, unquoted values split at blanks."""
        made, at = _Fields(), 0
        while at < len(word):
            letter = word[at]
            if letter == "'":
                end = word.index("'", at + 1)
                made.add(word[at + 1 : end])
                at = end + 1
            elif letter == '"':
                text, at = self._double(word, at + 1, line)
                if isinstance(text, list):  # "${ARRAY[@]}": one word for each item
                    made.add_each(text)
                else:
                    made.add(text)
            elif letter == "\\":
                made.add(word[at + 1 : at + 2].strip("\n"))
                at += 2
            elif letter in "$`":
                value, at = self._value(word, at, line)
                text = " ".join(value) if isinstance(value, list) else value
                made.add_each(text.split() if split else [text])
            else:
                made.add(letter)
                at += 1
        return made.words

    def _double(self, word: str, at: int, line: int) -> tuple[Value, int]:
        """The inside of double quotes, from behind the first one, and the place behind the last."""
        text = ""
        while word[at] != '"':
            if word[at] == "\\":
                following = word[at + 1]
                text += "" if following == "\n" else following if following in '"\\$`' else f"\\{following}"
                at += 2
            elif word[at] in "$`":
                value, at = self._value(word, at, line)
                if isinstance(value, list):
                    if not text and word[at] == '"':
                        return value, at + 1
                    value = " ".join(value)
                text += value
            else:
                text += word[at]
                at += 1
        return text, at + 1

    def _value(self, word: str, at: int, line: int) -> tuple[Value, int]:
        """What begins with $ or `, and the place behind it."""
        if word[at] == "`":
            end = word.index("`", at + 1)
            return _unknown(word[at : end + 1]), end + 1
        if word.startswith("$((", at) and "))" in word[at:]:
            end = word.index("))", at)
            return self._arithmetic(word[at + 3 : end], line), end + 2
        if word.startswith(("${", "$("), at):
            end = _closing(word, at + 1)
            inside = word[at + 2 : end]
            if word[at + 1] == "(":
                return _unknown(f"$({inside})"), end + 1
            return self._parameter(inside, line), end + 1
        match = _NAME.match(word, at + 1)
        if match:
            return self.variables.get(match[0], _unknown(match[0])), match.end()
        if word[at + 1 : at + 2] and word[at + 1] in "0123456789@*#?$!-":
            return self.variables.get(word[at + 1], _unknown(f"${word[at + 1]}")), at + 2
        return "$", at + 1

    def _parameter(self, inside: str, line: int) -> Value:
        """`${...}`: a variable, an array, or a default."""
        match = re.fullmatch(r"([A-Za-z_]\w*|\d+)(\[(?:[@*]|\d+)\])?(?:(:?[-=?+])(.*))?", inside, re.DOTALL)
        if match is None:
            return _unknown(f"${{{inside}}}")
        value = self.variables.get(match[1])
        place = (match[2] or "").strip("[]")
        if place.isdecimal() and isinstance(value, list):
            value = value[int(place)] if int(place) < len(value) else None
        operation = match[3] or ""
        if operation.endswith(("-", "=")) and (value is None or (operation[0] == ":" and not value)):
            return " ".join(self._fields(match[4], line, split=False))
        if operation.endswith("+"):
            return " ".join(self._fields(match[4], line, split=False)) if value else ""
        if value is None:
            return [] if place in ("@", "*") else _unknown(match[1])
        return value

    def _arithmetic(self, text: str, line: int) -> str:
        """The value of `$((...))`."""
        names = _NAME.findall(text)
        for name in names:
            value = self.variables.get(name)
            if not isinstance(value, str) or not re.fullmatch(r"-?\d+", value.strip()):
                return _unknown(name)
        plain = _NAME.sub(lambda name: str(self.variables[name[0]]), text.replace("$", "").strip("{} "))
        plain = plain.replace("{", "").replace("}", "")
        try:
            return str(_calculated(ast.parse(plain.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            raise StrettoError(f"{self.source}:{line}: $(({text})) is not read", hint=_HINT) from None

    def _test(self, words: tuple[str | list[str], ...], line: int) -> bool:
        """The outcome of `[ ... ]` or `[[ ... ]]`."""
        plain = [word for word in words if isinstance(word, str)]
        if plain and plain[0] in ("[", "[[") and plain[-1] in ("]", "]]"):
            inside = [" ".join(self._fields(word, line, split=False)) for word in plain[1:-1]]
            if (outcome := _decided(inside)) is not None:
                return outcome
        said = " ".join(plain)
        raise StrettoError(f"{self.source}:{line}: nothing tells whether `if {said}` holds", hint=_HINT)


def _unknown(what: str) -> str:
    return f"{_MARK}{what}{_MARK}"


def _closing(word: str, at: int) -> int:
    """The place of the bracket that closes the one at `at`."""
    opening = word[at]
    closing, depth = {"(": ")", "{": "}"}[opening], 0
    for place in range(at, len(word)):
        depth += (word[place] == opening) - (word[place] == closing)
        if depth == 0:
            return place
    return len(word) - 1


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


def _calculated(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_calculated(inner)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_calculated(left), _calculated(right))
        case _:
            raise ValueError(node)


def _decided(words: list[str]) -> bool | None:
    """The outcome of a test of few words; None: not known."""
    if words[:1] == ["!"]:
        inner = _decided(words[1:])
        return None if inner is None else not inner
    empty = [not word or unknown_in(word) is not None for word in words]  # unset is empty to a test
    match words:
        case ["-n", _]:
            return not empty[1]
        case ["-z", _]:
            return empty[1]
        case [left, "=" | "==", right]:
            return None if unknown_in(left + right) else left == right
        case [left, "!=", right]:
            return None if unknown_in(left + right) else left != right
        case [left, sign, right] if sign in _COMPARED:
            numbers = [word for word in (left, right) if re.fullmatch(r"-?\d+", word)]
            return _COMPARED[sign](int(left), int(right)) if len(numbers) == 2 else None
        case _:
            return None
