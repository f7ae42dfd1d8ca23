"""Commands of a bash script that starts a training, read without running anything.

Read are assignments, arrays, quotes, `$NAME`, `${NAME:-default}`, `"${NAME[@]}"`, `$((arithmetic))`, `if`,
`&&` and `||` with tests of variables, here-documents, and the texts of `bash -c` and `eval`. What a command
would print stays unknown, and so does a variable that is set where a test cannot be decided. Anything else
that may change the arguments (loops, functions, `case`, `read`) is an error: `stretto migrate --run` runs the
script.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from stretto.errors import StrettoError

MARK = "\x00"  # around the name of an unknown value, inside of words
HINT = (
    "give the command that it comes to (put `echo` before the launch), or `stretto migrate --run`, which "
    "runs the script with a torchrun that only prints its arguments"
)
_LONGEST = 1 << 20  # characters of a script
_MOST_CHARACTERS = 4 << 20  # characters that its values come to, so that none doubles itself without end
_LONGEST_QUOTE = 100  # characters of a line in an error
_DEEPEST = 40  # texts and defaults in each other
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_PLAIN = re.compile(r"[^\s();|<>&'\"\\$`]+")
_REDIRECTION = re.compile(r"(\d*|&)(<<<|<<-?|>>?|<)(&[\d-])?[ \t]*")
_SIGN = re.compile(r"&&|\|\||[()<>&|]")  # inside of `[[ ... ]]`
_LAUNCH = re.compile(r"pretrain\w*\.py|\btorchrun\b|\btorch\.distributed\b")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh", "sbatch")
_UNREAD = re.compile(  # at the beginning of a command
    r"(for|while|until|case|select|function|let|read|mapfile|readarray|unset|shift|getopts)(?=[\s;]|$)|\(+|"
    r"set(?=\s+--)|printf(?=\s+-v)|[A-Za-z_]\w*(?=\[[^]\n]*\]\+?=)|"
    r"(?P<function>[A-Za-z_]\w*)(?=[ \t]*\([ \t]*\))"
)
_KEYWORD = re.compile(r"(if|then|elif|else|fi|!|\{|\})(?=[\s;]|$)")

Value = str | list[str]
_Pieces = list[tuple[Value, bool]]  # parts of a word, with True if quoted
_Join = Literal["", "&&", "||"]
_JOINS: tuple[_Join, ...] = ("&&", "||", "")


@dataclass(frozen=True)
class Command:
    """The expanded words of a command, and its first line.

    Attributes:
        to: the file that `cat` writes a document to, as in `cat <<EOF > FILE`.
        document: the text of that document.
    """

    argv: tuple[str, ...]
    line: int
    to: str | None = None
    document: str | None = None


def commands(
    text: str,
    source: str,
    variables: Mapping[str, Value] | None = None,
    launches: Callable[[Command], bool] = lambda _: False,
    notes: list[str] | None = None,
) -> Iterator[Command]:
    """All commands of a script, in order, without branches that are not taken.

    Args:
        variables: those that the script is started with, its positional parameters ("1", "@") among them.
        launches: True if the script is read for this command: what is not understood after it is passed over,
            unless it launches something itself.
        notes: receives a sentence for everything that is passed over.

    Raises:
        StrettoError: unbalanced quotes or brackets, a construct that is not read, or arguments that depend on
            a test that cannot be decided; a script that is too long or expands without end.
    """
    if len(text) > _LONGEST:
        raise StrettoError(f"{source} has {len(text):,} characters: {_LONGEST:,} are read", hint=HINT)
    if MARK in text:
        line = text.count("\n", 0, text.index(MARK)) + 1
        raise StrettoError(f"{source}:{line}: a NUL byte", hint="give a script of bash, which is text")
    script = _Script(
        text=text.replace("\r\n", "\n"),
        source=source,
        variables={
            **batch_variables(text),
            "0": source,
            "BASH_SOURCE": [source],
            **(parameters(()) if variables is None else variables),
        },
        notes=[] if notes is None else notes,
    )
    launched = False
    try:
        for command in script.commands():
            launched = launched or launches(command)
            yield command
    except StrettoError as error:
        if not launched or _LAUNCH.search(script.text, script.begun):
            raise
        script.note(f"{error.message}: it comes after the launch, and is passed over")


def parameters(arguments: Sequence[str]) -> dict[str, Value]:
    """The positional parameters of a script that is started with these words."""
    numbered: dict[str, Value] = {str(index): word for index, word in enumerate(arguments, 1)}
    return {**numbered, "@": list(arguments), "*": " ".join(arguments), "#": str(len(arguments))}


def batch_variables(text: str) -> dict[str, str]:
    """The variables that SLURM sets according to the script's #SBATCH lines."""
    names = {
        "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
        "ntasks": ("SLURM_NTASKS",),
        "n": ("SLURM_NTASKS",),
        "gpus-per-node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
    }
    lines = re.findall(r"^#SBATCH\s+--?([\w-]+)[=\s]\s*(?:\w+:)?(\d+)\s*$", text, re.MULTILINE)
    return {variable: value for name, value in lines for variable in names.get(name, ())}


def unknown(name: str) -> str:
    """The value of a variable or command that cannot be known."""
    return f"{MARK}{name.replace(MARK, '')}{MARK}"


def unknown_in(word: str) -> str | None:
    """The first unknown in an expanded word: the name of a variable, or a command."""
    start = word.find(MARK)
    return None if start < 0 else word[start + 1 :].partition(MARK)[0]


# ------------------------------------------------------------------ statements


@dataclass
class _Branch:
    """An `if` or a group in braces.

    Attributes:
        taken: the part that is read now is carried out; None if undecided.
        decided: an earlier part of the `if` was taken; None if undecided.
        test: where the test of an `if` begins in the text; None after `then`.
        reason: the test that is undecided.
    """

    taken: bool | None
    decided: bool | None = False
    test: int | None = None
    reason: str = ""


@dataclass(kw_only=True)
class _Script:
    """A script that is read from begin to end, with the variables so far."""

    text: str
    source: str
    variables: dict[str, Value]
    notes: list[str]
    at: int = 0
    begun: int = 0  # the begin of the statement
    resume: int | None = None  # the end of a here-document, behind the next line break
    branches: list[_Branch] = field(default_factory=list[_Branch])
    outcome: bool | None = True  # of the last command
    depth: int = 0
    spent: list[int] = field(default_factory=lambda: [0])  # characters of all values
    line_counted: int = 1  # of the place up to which line breaks are counted
    counted: int = 0

    def commands(self) -> Iterator[Command]:
        join: _Join = ""
        while self._skip_blanks():
            self.begun = self.at
            keyword = _KEYWORD.match(self.text, self.at)
            if keyword is not None:
                self.at = keyword.end()
                self._branch(keyword[0], join)
                join = ""
                continue
            unread = _UNREAD.match(self.text, self.at)
            if unread is not None and self._taken("") is not False:
                name = "a function" if unread["function"] else unread[0]
                line = self.text[self.begun :].partition("\n")[0]
                raise self.error(f"`{name}` is not read: {line[:_LONGEST_QUOTE].rstrip()}")
            yield from self._statement(join)
            join = next(sign for sign in _JOINS if self.text.startswith(sign, self.at))
            self.at += len(join)

    def _skip_blanks(self) -> bool:
        """Move to the next command; False at the end."""
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == "\n":
                self.at, self.resume = (self.at + 1 if self.resume is None else self.resume), None
            elif letter.isspace() or letter in ";&|)":
                self.at += 1
            elif not self._skipped():
                return True
        return False

    def _skipped(self) -> bool:
        """Move over a comment or a continued line, if one begins here."""
        if self.text.startswith("\\\n", self.at):
            self.at += 2
        elif self.text[self.at] == "#":
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
        else:
            return False
        return True

    def _branch(self, keyword: str, join: _Join) -> None:
        """Begin, continue or end an `if` or a group."""
        if keyword == "if":
            self.branches.append(_Branch(True, test=self.at))
        elif keyword == "{":
            self.branches.append(_Branch(self._joined(join), reason="what stands before && or ||"))
        elif keyword == "!":
            self.outcome = None
        elif not self.branches:
            raise self.error(f"{keyword} without if")
        elif keyword in ("fi", "}"):
            self.branches.pop()
        else:
            branch = self.branches[-1]
            if keyword == "then":
                test, decided = self.outcome, branch.decided
                branch.reason = f"`if {self.text[branch.test : self.begun].strip(' ;')}`"
                branch.taken = None if None in (test, decided) else test
                if decided is True or test is False:
                    branch.taken = False
                branch.decided = test if decided is False else decided
                branch.test = None
            else:  # `elif` and `else`: of the first, the test is carried out
                branch.taken = None if branch.decided is None else not branch.decided
                branch.test = self.at if keyword == "elif" else None

    def _joined(self, join: _Join) -> bool | None:
        """True if a command behind && or || is carried out."""
        return True if not join else None if self.outcome is None else self.outcome is (join == "&&")

    def _taken(self, join: _Join) -> bool | None:
        """True if a command is carried out here; None: undecided."""
        states = [*(branch.taken for branch in self.branches), self._joined(join)]
        return False if False in states else None if None in states else True

    def _reason(self, join: _Join) -> str:
        undecided = [branch.reason for branch in self.branches if branch.taken is None]
        return [*undecided, "what stands before && or ||"][0] if undecided or join else ""

    def _statement(self, join: _Join) -> Iterator[Command]:
        """Read one command: assignments are carried out, the command itself is handed on."""
        expanded_words, raw = list[_Pieces](), list[str]()
        taken = self._taken(join)
        to: str | None = None
        document: str | None = None
        line, declaring = self.line, False
        while self._continues(testing := raw[:1] == ["[["] and raw[-1] != "]]"):
            start = self.at
            sign = _SIGN.match(self.text, start) if testing else None
            redirection = None if testing else _REDIRECTION.match(self.text, start)
            assignment = _ASSIGNMENT.match(self.text, start) if not raw or declaring else None
            if redirection is not None:
                self.at = redirection.end()
                if redirection[2] in ("<<", "<<-"):
                    document = self._document()
                elif redirection[3] is None:
                    target = _text(self._word())
                    to = target if redirection[2].startswith(">") and redirection[1] in ("", "1") else to
            elif assignment is not None:
                self._assign(assignment, taken, join)
            else:
                if sign is not None:
                    self.at = sign.end()
                    expanded_words.append([(sign[0], True)])
                else:
                    expanded_words.append(self._word())
                if self.at == start:  # a bracket
                    raise self.error(f"`{self.text[start]}` is not read")
                raw.append(self.text[start : self.at])
                declaring = raw[0] in _DECLARING
        if not expanded_words or declaring or taken is False:
            return
        in_test = bool(self.branches) and self.branches[-1].test is not None
        if raw[0] in ("[", "[["):
            inside = [_text(word) for word in expanded_words[1:-1]]
            self.outcome = decide(inside, self.variables) if taken and raw[-1] in ("]", "]]") else None
            return
        expanded = [item for word in expanded_words for item in _fields(word)]
        if taken is None:
            if expanded[:1] != ["echo"] and any(_LAUNCH.search(word) for word in expanded):
                raise self.error(f"nothing tells whether {self._reason(join)} holds", line)
            self.outcome = None if in_test else self.outcome
            return
        self.outcome = None if in_test else True
        if expanded:
            yield from self._carried_out(expanded, document, to, line)

    def _continues(self, testing: bool) -> bool:
        """Skip blanks inside of a command; False at its end.

        Args:
            testing: inside of `[[ ... ]]`, where & and | end no command.
        """
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter in " \t":
                self.at += 1
            elif not self._skipped():
                end = "\n" if testing or self.text.startswith("&>", self.at) else "\n;&|)"
                return letter not in end
        return False

    def _assign(self, match: re.Match[str], taken: bool | None, join: _Join) -> None:
        """Carry out `NAME=value`, `NAME+=value` or `NAME=(...)`; if undecided, the value becomes unknown."""
        name, adds = match[1], bool(match[2])
        start, self.at = self.at, match.end()
        array = self.text.startswith("(", self.at)
        value: Value = self._array() if array else _text(self._word())
        before = self.variables.get(name, [] if array else "")
        if taken is None:
            if array or isinstance(before, list) or "--" in self.text[start : self.at]:
                raise self.error(f"nothing tells whether {self._reason(join)} holds")
            value = unknown(name)
        elif adds and isinstance(value, list):
            value = [*(before if isinstance(before, list) else [before]), *value]
        elif adds:
            value = (" ".join(before) if isinstance(before, list) else before) + str(value)
        self._spend(value)
        if taken is not False:
            self.variables[name] = value

    def _array(self) -> list[str]:
        self.at += 1
        items = list[str]()
        while self.at < len(self.text) and self.text[self.at] != ")":
            start = self.at
            if self.text[self.at].isspace():
                self.at += 1
            elif not self._skipped():
                items += _fields(self._word())
                if self.at == start:
                    raise self.error("an array of something else than words")
        self.at += 1
        return items

    def _carried_out(
        self, argv: list[str], document: str | None, to: str | None, line: int
    ) -> Iterator[Command]:
        """Hand a command on, or those of the text that it is given."""
        if argv[0] == "exit":
            self.note(
                f"{self.source}:{line}: the script ends there as it is started, and is read on: "
                f"{' '.join(argv)}"
            )
            return
        if argv[0] in ("source", "."):
            message = f"{self.source}:{line}: {' '.join(argv[1:2])} is not read: what it sets is not known"
            self.note(message)
            return
        text, outer = None, argv
        shell = next((index for index, word in enumerate(argv) if word in _SHELLS), None)
        if document is not None and (_LAUNCH.search(document) or shell is not None):
            text, outer = document, [] if argv[0] == "cat" else argv
        elif argv[0] == "eval":
            text, outer = " ".join(argv[1:]), list[str]()
        elif shell is not None and "-c" in argv[shell:-1]:
            text, outer = argv[argv.index("-c", shell) + 1], argv[:shell]
        if text is None:
            written = document is not None and argv == ["cat"]
            yield Command(tuple(argv), line, to if written else None, document)
            return
        inner = self._inner(text, line)
        for command in inner.commands():
            yield Command((*outer, *command.argv), line)

    def note(self, text: str) -> None:
        """Add a sentence, once."""
        if text not in self.notes:
            self.notes.append(text)

    # -------------------------------------------------------------- words

    @property
    def line(self) -> int:
        if self.at < self.counted:
            return self.line_counted - self.text.count("\n", self.at, self.counted)
        self.line_counted += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        return self.line_counted

    def error(self, message: str, line: int | None = None) -> StrettoError:
        """An error at this place of the script."""
        return StrettoError(f"{self.source}:{line or self.line}: {message}", hint=HINT)

    def _spend(self, value: Value) -> None:
        self.spent[0] += 1 + len(value) if isinstance(value, str) else sum(map(len, value)) + len(value)
        if self.spent[0] > _MOST_CHARACTERS:
            raise self.error(f"the script comes to more than {_MOST_CHARACTERS:,} characters")

    def _inner(self, text: str, line: int | None = None) -> _Script:
        """A text inside of this one, with the same variables."""
        if self.depth == _DEEPEST:
            raise self.error(f"texts or defaults in each other, over {_DEEPEST} deep")
        self._spend(text)
        return _Script(
            text=text,
            source=self.source,
            variables=self.variables,
            notes=self.notes,
            depth=self.depth + 1,
            spent=self.spent,
            line_counted=line or self.line,
        )

    def _document(self) -> str:
        """The lines of a here-document, behind the current line; `at` is at its word."""
        match = re.compile(r"\S+").match(self.text, self.at)
        mark = match[0].rstrip(";|&") if match else ""
        self.at += len(mark)
        word = mark.strip("'\"\\")
        start = self.resume if self.resume is not None else self.text.find("\n", self.at) + 1
        end = re.compile(rf"^[ \t]*{re.escape(word)}[ \t]*$", re.MULTILINE).search(self.text, start)
        if not word or not start or end is None:
            raise self.error(f"a document <<{word} that does not end")
        self.resume = end.end()
        text = self.text[start : end.start()]
        return text if mark != word else _text(self._inner(text)._quoted(""))

    def _word(self) -> _Pieces:
        """The word that begins here, expanded."""
        pieces: _Pieces = []
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == "'":
                end = self._end("'")
                pieces.append((self.text[self.at + 1 : end], True))
                self.at = end + 1
            elif letter == '"':
                self.at += 1
                pieces += self._quoted('"')
            elif letter == "\\":
                pieces.append((self.text[self.at + 1 : self.at + 2].strip("\n"), True))
                self.at += 2
            elif letter in "$`":
                pieces.append((self._value(), False))
            elif (match := _PLAIN.match(self.text, self.at)) is not None:
                pieces.append((match[0], True))
                self.at = match.end()
            else:
                break
        return pieces

    def _quoted(self, end: str) -> _Pieces:
        """What is inside of double quotes, from behind the first one; without an `end`, a document."""
        pieces: _Pieces = [("", True)]
        start, plain = self.at, re.compile(rf"[^\\$`{end}]+")
        while self.at < len(self.text) and self.text[self.at] != end:
            letter = self.text[self.at]
            if letter == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                escaped = following in f"{end}\\$`"
                pieces.append(("" if following == "\n" else following if escaped else f"\\{following}", True))
                self.at += 2
            elif letter in "$`":
                pieces.append((self._value(), True))
            elif (match := plain.match(self.text, self.at)) is not None:
                pieces.append((match[0], True))
                self.at = match.end()
        if end and self.at >= len(self.text):
            self.at = start
            raise self.error(f"a quote {end} that does not end")
        self.at += 1
        arrays = [value for value, _ in pieces if isinstance(value, list)]
        return [(arrays[0], True)] if arrays and len(pieces) == 2 else pieces

    def _end(self, quote: str) -> int:
        """The place of the quote that ends what begins here."""
        end = self.text.find(quote, self.at + 1)
        if end < 0:
            raise self.error(f"a quote {quote} that does not end")
        return end

    def _value(self) -> Value:
        """The value of what begins with $ or ` here."""
        start = self.at
        if self.text[start] == "`":
            end = self._end("`")
            self.at = end + 1
            return unknown(self.text[start : end + 1])
        value: Value
        if self.text.startswith("$((", start):
            end = self._closing(start + 1)
            value = self._arithmetic(self.text[start + 3 : end - 1])
            self.at = end + 1
        elif self.text.startswith("$(", start):
            end = self._closing(start + 1)
            value, self.at = unknown(self.text[start : end + 1]), end + 1
        elif self.text.startswith("${", start):
            end = self._closing(start + 1)
            value = self._parameter(self.text[start + 2 : end])
            self.at = end + 1
        elif match := re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]").match(self.text, start + 1):
            name = match[0] if match[0].isidentifier() else f"${match[0]}"
            value, self.at = self.variables.get(match[0], unknown(name)), match.end()
        else:
            value, self.at = "$", start + 1
        self._spend(value)
        return value

    def _closing(self, start: int) -> int:
        """The place of the bracket that closes the one at `start`."""
        opening = self.text[start]
        closing, depth = {"(": ")", "{": "}"}[opening], 0
        for match in re.compile(rf"[{opening}{closing}]").finditer(self.text, start):
            depth += 1 if match[0] == opening else -1
            if depth == 0:
                return match.start()
        raise self.error(f"a bracket {opening} that does not end")

    def _parameter(self, inside: str) -> Value:
        """`${...}`: a variable, an array, or a default."""
        match = re.fullmatch(r"([A-Za-z_]\w*|\d+)(\[(?:[@*]|\d+)\])?(?:(:?[-=?+])(.*))?", inside, re.DOTALL)
        if match is None:  # `${NAME#prefix}` and its kind
            return unknown(f"${{{inside}}}")
        name, item = match[1], (match[2] or "").strip("[]")
        sign, operand = match[3] or "", match[4]
        value = self.variables.get(name)
        if item.isdecimal() and isinstance(value, list):
            value = value[int(item)] if len(item) < 7 and int(item) < len(value) else None
        lacks = value is None or (sign.startswith(":") and not value)
        if sign.endswith("+"):
            if isinstance(value, str) and unknown_in(value) is not None:
                return unknown(f"${{{inside}}}")
            return "" if lacks else _text(self._inner(operand)._quoted(""))
        if lacks and sign.endswith(("-", "=")):
            default = _text([piece for word in self._inner(operand)._default_words() for piece in word])
            if sign.endswith("="):
                self.variables[name] = default
            return default
        if value is None:
            return [] if item in ("@", "*") else unknown(name if name.isidentifier() else f"${name}")
        return value

    def _default_words(self) -> Iterator[_Pieces]:
        """The words of a default, with the blanks between them."""
        while self.at < len(self.text):
            start = self.at
            yield self._word()
            if self.at == start:
                yield [(self.text[start], True)]
                self.at += 1

    def _arithmetic(self, text: str) -> str:
        """The value of `$((...))`."""
        for name in _NAME.findall(text):
            value = self.variables.get(name)
            if not isinstance(value, str) or not re.fullmatch(r"-?\d+", value.strip()):
                return unknown(name)
        plain = _NAME.sub(lambda name: f"({self.variables[name[0]]})", re.sub(r"[${}]", "", text))
        try:
            return str(calculate(plain))
        except ValueError:
            raise self.error(f"$(({text})) is not read") from None


def _text(pieces: _Pieces) -> str:
    """A word without splitting at blanks."""
    return "".join(" ".join(value) if isinstance(value, list) else value for value, _ in pieces)


def _fields(pieces: _Pieces) -> list[str]:
    """The words that one word becomes: unquoted values are split at blanks, quoted arrays at their items."""
    split: list[list[str]] = []
    for value, quoted in pieces:
        if quoted:
            items = value if isinstance(value, list) else [value]
        else:  # an unknown stays in one word, with the blanks of its command
            text = " ".join(value) if isinstance(value, list) else value
            items = re.findall(rf"(?:{MARK}[^{MARK}]*{MARK}|\S)+", text) if MARK in text else text.split()
        if items and not split:
            split.append([])
        if items:
            split[-1].append(items[0])
            split += [[item] for item in items[1:]]
    return ["".join(parts) for parts in split]


# ------------------------------------------------------------------ arithmetic and tests


def _divide(left: int, right: int) -> int:
    """The quotient rounded towards zero, as bash does."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.Mod: lambda left, right: left - right * _divide(left, right),
}
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


def calculate(text: str) -> int:
    """The value of arithmetic on whole numbers.

    Raises:
        ValueError: it is something else, longer than 1,000 characters, or exceeds 64 bits.
    """
    if len(text) > 1000:
        raise ValueError(f"arithmetic of {len(text)} characters")

    def evaluate(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as value):
                pass
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                value = -evaluate(inner)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
                value = _OPERATORS[type(sign)](evaluate(left), evaluate(right))
            case _:
                raise ValueError(node)
        if not -(2**63) <= value < 2**63:
            raise ValueError(value)
        return value

    try:
        return evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def decide(operands: Sequence[str], variables: Mapping[str, Value]) -> bool | None:
    """The outcome of a test; None if it depends on files, patterns or unknown values.

    Args:
        variables: those that are set; an unknown one that is not set is taken to be empty.
    """
    if len(operands) > 100:
        return None
    for sign in ("||", "&&"):
        if sign in operands:
            index = list(operands).index(sign)
            sides = decide(operands[:index], variables), decide(operands[index + 1 :], variables)
            decisive = sign == "||"
            return decisive if decisive in sides else None if None in sides else not decisive
    match list(operands):
        case ["!", *inner]:
            outcome = decide(inner, variables)
            return None if outcome is None else not outcome
        case ["-n" | "-z" as sign, word]:
            parts = word.split(MARK)
            names = [name.removeprefix("$") for name in parts[1::2]]
            if any(parts[::2]):
                return sign == "-n"
            unset = all(re.fullmatch(r"\w+", name) and name not in variables for name in names)
            return sign == "-z" if unset else None
        case [left, "=" | "==" | "!=" as sign, right]:
            if unknown_in(left + right) or re.search(r"[*?[]", right):  # a pattern, unless it is quoted
                return None
            return (left == right) is (sign != "!=")
        case [left, sign, right] if sign in _COMPARISONS:
            numbers = all(re.fullmatch(r"-?\d{1,18}", word) for word in (left, right))
            return _COMPARISONS[sign](int(left), int(right)) if numbers else None
        case _:
            return None
