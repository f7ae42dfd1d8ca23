"""The words of a shell script's commands, without running it.

Understood is what scripts that start training are made of: assignments, arrays, quotes, continued lines,
`$NAME`, `${NAME}`, `${NAME:-default}`, `"${NAME[@]}"`, `$((arithmetic))` on whole numbers, `&&`, `||` and
`if` with simple tests, documents (`<<EOF`) and texts (`bash -c`) that hold commands. Nothing is executed:
what a command would print stays unknown, and so does what is assigned where nothing tells whether it is, as
in a loop.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from stretto.errors import StrettoError
from stretto.run.frameworks.shell_options import written_out
from stretto.run.frameworks.shell_words import ASSIGNED, HINT, Document, Statement, statements

_NAME = re.compile(r"[A-Za-z_]\w*")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_LOOPS = ("for", "while", "until", "case", "select")
_SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh", "sbatch")
Value = str | list[str]


@dataclass(frozen=True)
class Command:
    """The words of a command, expanded, and the line it begins on.

    Attributes:
        to: the file that `cat` writes a document to, as in `cat <<EOF > FILE`.
        document: its text, expanded.
    """

    words: tuple[str, ...]
    line: int
    to: str | None = None
    document: str | None = None


def unknown_in(word: str) -> str | None:
    """What is unknown in an expanded word: the name of a variable, or a command."""
    start = word.find(_MARK)
    return None if start < 0 else word[start + 1 : word.index(_MARK, start + 1)]


_CLOSING = ("then", "else", "fi", "elif", "do", "done", "esac")
_MARK = "\x00"  # around what is unknown, inside of words


def commands(text: str, source: str, known: Mapping[str, Value] | None = None) -> Iterator[Command]:
    """All commands of a script, in order, but those in branches that are not taken.

    Args:
        known: variables that the script is started with, its positional parameters ("1", "@") among them.

    Raises:
        StrettoError: quotes or brackets that do not end, or arguments that are put together where nothing
            tells whether they are: in a loop, or after a test that cannot be decided.
    """
    run = _Run(source, {**batch_variables(text), "0": source, "BASH_SOURCE": [source]})
    run.variables |= parameters(()) if known is None else known
    words = run.variables.get("@", [])
    text = written_out(text, source, words if isinstance(words, list) else [words])
    for statement in statements(text, source):
        yield from run.step(statement)


def parameters(words: Sequence[str]) -> dict[str, Value]:
    """The positional parameters of a script that is started with these words."""
    each: dict[str, Value] = {str(at): word for at, word in enumerate(words, 1)}
    return {**each, "@": list(words), "*": " ".join(words), "#": str(len(words))}


def batch_variables(text: str) -> dict[str, Value]:
    """What SLURM would set, as far as the script's #SBATCH lines tell."""
    known: dict[str, Value] = {}
    names = {
        "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
        "ntasks": ("SLURM_NTASKS",),
        "n": ("SLURM_NTASKS",),
        "gpus-per-node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
    }
    for name, value in re.findall(r"^#SBATCH\s+--?([\w-]+)[=\s]\s*(?:\w+:)?(\d+)\s*$", text, re.MULTILINE):
        for variable in names.get(name, ()):
            known[variable] = value
    return known


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
class _Branch:
    """A branch of `if`, or a loop.

    Attributes:
        taken: now; None: nothing tells.
        any: whether one of the branches so far was taken.
        why: nothing tells, as an error.
    """

    taken: bool | None
    any: bool
    why: StrettoError | None = None


@dataclass
class _Run:
    """Variables so far, and which branches of `if` are taken."""

    source: str
    variables: dict[str, Value]
    branches: list[_Branch] = field(default_factory=list[_Branch])
    last: bool | None = True  # the outcome of the statement before

    def step(self, statement: Statement) -> Iterator[Command]:
        """The commands of one statement."""
        words, line = statement.words, statement.line
        while words and isinstance(words[0], str) and words[0] in _CLOSING:
            words = self._branch(words, line)
        if not words:
            return
        first = words[0]
        if first == "if" or first in _LOOPS:
            self._open(words, line)
        elif statement.join and self.branches and self.branches[-1].why is None and first in ("[", "[["):
            self._joined(words, statement)
        elif any(branch.taken is False for branch in self.branches):
            return
        elif (why := self._undecided(statement)) is not None:
            self._perhaps(words, why)
        elif not statement.join or (self.last if statement.join == "&&" else not self.last):
            yield from self._run(words, statement)

    def _run(self, words: tuple[str | list[str], ...], statement: Statement) -> Iterator[Command]:
        """A statement that is carried out: a test has an outcome, anything else succeeds."""
        if words[0] in ("[", "[["):
            try:
                self.last = self._test(words, statement.line)
            except StrettoError:
                self.last = None
            return
        self.last = True
        yield from self._command(words, statement.line, statement.document)

    def _undecided(self, statement: Statement) -> StrettoError | None:
        """Why nothing tells whether the statement is carried out; None: it is known."""
        if statement.join and self.last is None:
            return self._untold(statement.line, "what stands before && or ||")
        return next((branch.why for branch in self.branches if branch.taken is None), None)

    def _open(self, words: tuple[str | list[str], ...], line: int) -> None:
        """Begin a branch or a loop."""
        if not all(branch.taken for branch in self.branches):
            outer = next(branch for branch in self.branches if not branch.taken)
            self.branches.append(replace(outer, any=True))
        elif words[0] != "if":
            self.branches.append(self._loop(words, line))
        else:
            self.branches.append(_Branch(False, False))
            self._decide(self.branches[-1], words[1:], line)
        if (why := self.branches[-1].why) is not None and words[0] in _LOOPS:
            self._perhaps(words[1:], why)

    def _loop(self, words: tuple[str | list[str], ...], line: int) -> _Branch:
        """A loop, of which nothing tells how often it runs, unless that is never."""
        branch = _Branch(None, True)
        if words[0] == "while":
            self._decide(branch, words[1:], line)
        elif words[0] in ("for", "select") and isinstance(words[1], str):
            self.variables[words[1]] = _unknown(words[1])
        if branch.taken is not False:
            why = StrettoError(f"{self.source}:{line}: {words[0]} is not read", hint=HINT)
            branch = _Branch(None, True, why)
        return branch

    def _decide(self, branch: _Branch, test: tuple[str | list[str], ...], line: int) -> None:
        try:
            branch.taken = self._test(test, line)
        except StrettoError as error:
            branch.taken, branch.why = None, error
        branch.any = branch.any or branch.taken is not False

    def _joined(self, words: tuple[str | list[str], ...], statement: Statement) -> None:
        """A further test of the `if` before, behind && or ||."""
        branch = self.branches[-1]
        if branch.taken is (statement.join == "&&"):
            branch.any = False
            self._decide(branch, words, statement.line)

    def _perhaps(self, words: tuple[str | list[str], ...], why: StrettoError) -> None:
        """What may be carried out or not: a variable is unknown from there, and arguments are an error."""
        if words and words[0] in ("echo", "printf"):
            return
        for word in words:
            if isinstance(word, list):
                raise why
            match = ASSIGNED.match(word)
            if match is not None:
                if "--" in word or isinstance(self.variables.get(match[1]), list):
                    raise why
                self.variables[match[1]] = _unknown(match[1])
            elif re.search(r"pretrain\w*\.py", word):
                raise why

    def _branch(self, words: tuple[str | list[str], ...], line: int) -> tuple[str | list[str], ...]:
        word, rest = words[0], words[1:]
        if word in ("then", "do"):
            return rest
        if not self.branches:
            raise StrettoError(f"{self.source}:{line}: {word} without if", hint=HINT)
        last = self.branches[-1]
        if word in ("fi", "done", "esac"):
            self.branches.pop()
        elif last.why is not None:
            return () if word == "elif" else rest
        elif word == "else":
            last.taken, last.any = not last.any, True
        else:
            last.taken = False
            if not last.any and all(branch.taken for branch in self.branches[:-1]):
                self._decide(last, rest, line)
            return ()
        return rest

    def _command(
        self, words: tuple[str | list[str], ...], line: int, document: Document | None
    ) -> Iterator[Command]:
        """Assignments change variables; any other command is handed on."""
        rest = list(words)
        while rest and (isinstance(rest[0], list) or rest[0] in _DECLARING or ASSIGNED.match(rest[0])):
            word = rest.pop(0)
            if isinstance(word, list):
                self._assign_array(word, line)
            elif word not in _DECLARING:
                self._assign(word, line)
        plain = _unredirected([word for word in rest if isinstance(word, str)])
        if not plain:
            return
        expanded = self._expanded(plain, line)
        if expanded and expanded[0] == "shift":
            self._shift(expanded[1:])
            return
        inside = self._inside(expanded, document, line)
        if inside is None:
            to = None if document is None or expanded != ["cat"] else self._written_to(rest, line)
            text = None if document is None else self._text(document, line)
            yield Command(tuple(expanded), line, to, text)
            return
        outer = () if document is not None and expanded[0] == "cat" else tuple(expanded)
        for statement in statements(inside, self.source):
            for command in self.step(statement):
                yield Command((*outer, *command.words), line)

    def _shift(self, words: Sequence[str]) -> None:
        """Leave out the first words that the script was started with."""
        count = int(words[0]) if words and words[0].isdecimal() else 1
        left = self.variables.get("@", [])
        kept = (left if isinstance(left, list) else [left])[count:]
        for name in [name for name in self.variables if name.isdecimal() and name != "0"]:
            del self.variables[name]
        self.variables |= parameters(kept)

    def _text(self, document: Document, line: int) -> str:
        """The lines of a document, with the variables that it puts in."""
        if document.plain:
            return document.text
        value, _ = self._double(document.text.replace('"', '\\"') + '"', 0, line)
        return " ".join(value) if isinstance(value, list) else value

    def _written_to(self, words: Sequence[str | list[str]], line: int) -> str | None:
        """The file that the output of a command goes to."""
        plain = [word for word in words if isinstance(word, str)]
        for at, word in enumerate(plain):
            if word.startswith(">") and not word.startswith(">&"):
                name = word.lstrip(">") or "".join(plain[at + 1 : at + 2])
                return "".join(self._fields(name, line, split=False)) or None
        return None

    def _inside(self, words: list[str], document: Document | None, line: int) -> str | None:
        """The commands that a command is given as a text (`bash -c TEXT`) or as a document."""
        if document is not None:
            text = self._text(document, line)
            holds = re.search(r"\bpretrain\w*\.py\b|\btorchrun\b", text) is not None
            return text if holds or any(word in _SHELLS for word in words) else None
        shell = next((at for at, word in enumerate(words) if word in _SHELLS), None)
        if shell is None or "-c" not in words[shell:-1]:
            return None
        inside = words[words.index("-c", shell) + 1]
        del words[shell:]
        return inside

    def _assign(self, word: str, line: int) -> None:
        match = ASSIGNED.match(word)
        assert match
        value = "".join(self._fields(word[match.end() :], line, split=False))
        before = self.variables.get(match[1], "")
        if match[2]:
            value = (" ".join(before) if isinstance(before, list) else before) + value
        self.variables[match[1]] = value

    def _assign_array(self, words: list[str], line: int) -> None:
        match = ASSIGNED.match(words[0])
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
        cut = re.fullmatch(r"([A-Za-z_]\w*|\d+)(##?|%%?)(.+)", inside, re.DOTALL)
        if cut is not None and isinstance(whole := self.variables.get(cut[1]), str):
            return _cut(whole, cut[2], "".join(self._fields(cut[3], line, split=False)))
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
            raise StrettoError(f"{self.source}:{line}: $(({text})) is not read", hint=HINT) from None

    def _test(self, words: tuple[str | list[str], ...], line: int) -> bool:
        """The outcome of `[ ... ]` or `[[ ... ]]`."""
        plain = [word for word in words if isinstance(word, str)]
        if plain and plain[0] in ("[", "[[") and plain[-1] in ("]", "]]"):
            inside = [" ".join(self._fields(word, line, split=False)) for word in plain[1:-1]]
            if (outcome := _decided(inside)) is not None:
                return outcome
        raise self._untold(line, f"`if {' '.join(plain)}`")

    def _untold(self, line: int, what: str) -> StrettoError:
        return StrettoError(f"{self.source}:{line}: nothing tells whether {what} holds", hint=HINT)


def _unredirected(words: list[str]) -> list[str]:
    """The words of a command without those that say where its output goes, and its input comes from."""
    kept, skip = list[str](), False
    for word in words:
        match = re.match(r"(\d*|&)(>>?|<<?-?)(&\d)?", word)
        if match is None or skip:
            kept += [] if skip else [word]
            skip = False
        else:
            skip = match.end() == len(word) and not match[3]
    return kept


def _cut(text: str, where: str, pattern: str) -> str:
    """`${NAME#PATTERN}` and its kind: a text without what matches at its begin or end, short or long."""
    sizes = range(len(text) + 1) if len(where) == 1 else range(len(text), -1, -1)
    for size in sizes:
        part, kept = (
            (text[:size], text[size:]) if where[0] == "#" else (text[-size:], text[: len(text) - size])
        )
        if fnmatchcase(part if size else "", pattern):
            return kept
    return text


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
    for sign in ("||", "&&"):
        if sign in words:
            at = words.index(sign)
            left, right = _decided(words[:at]), _decided(words[at + 1 :])
            if sign == "&&" and False in (left, right):
                return False
            if sign == "||" and True in (left, right):
                return True
            return None if None in (left, right) else sign == "&&"
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
