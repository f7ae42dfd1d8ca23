"""Commands of a bash script that starts a training, read without running anything.

Read are assignments, arrays, quotes, continued lines, `$NAME`, `${NAME:-default}`, `"${NAME[@]}"`, `$1`, and
the texts of `bash -c` and `eval`. What only running would give, such as `$(command)` and `$((1 + 1))`, is an
unknown value. No test is evaluated: an assignment or a launch that depends on one is an error, and so are
loops, functions, `case` and here-documents; `stretto migrate --run` runs the script.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stretto.errors import StrettoError

MARK = "\x00"  # around the name of an unknown value, inside of words
HINT = (
    "give the command that it comes to (put `echo` before the launch), or `stretto migrate --run`, which "
    "runs the script with a torchrun that only prints its arguments"
)
_LONGEST = 1 << 20  # characters of a script
_MOST_CHARACTERS = 4 << 20  # characters of all its values, so that none doubles itself without end
_LONGEST_QUOTE = 100  # characters of a line in an error
_DEEPEST = 40  # texts and defaults in each other
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_PLAIN = re.compile(r"[^\s();|<>&'\"\\$`]+")
_REDIRECTION = re.compile(r"(\d*|&)(<<<|<<-?|>>?|<)(&[\d-])?[ \t]*")
_LAUNCH = re.compile(r"pretrain\w*\.py|\btorchrun\b|\btorch\.distributed\b")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh")
_UNREAD = re.compile(  # at the beginning of a command
    r"(for|while|until|case|select|function|let|read|mapfile|readarray|unset|shift|getopts)(?=[\s;]|$)|\(+|"
    r"set(?=\s+--)|printf(?=\s+-v)|[A-Za-z_]\w*(?=\[[^]\n]*\]\+?=)|"
    r"(?P<function>[A-Za-z_]\w*)(?=[ \t]*\([ \t]*\))"
)
_KEYWORD = re.compile(r"(if|then|elif|else|fi|\{|\})(?=[\s;]|$)")
_TEST = re.compile(r"(\[\[?|test|!)\s")
_STARTED = re.compile(r' \[\[ "\$\{BASH_SOURCE\[0\]\}" == "\$0" \]\]')  # true unless the script is sourced

Value = str | list[str]
_Pieces = list[tuple[Value, bool]]  # parts of a word, with True if quoted


@dataclass(frozen=True)
class Command:
    """A command's expanded words, and its first line."""

    argv: tuple[str, ...]
    line: int


def commands(
    text: str,
    source: str,
    variables: Mapping[str, Value] | None = None,
    launches: Callable[[Command], bool] = lambda _: False,
    notes: list[str] | None = None,
) -> Iterator[Command]:
    """Yield the commands of a script in order, without those that depend on a test.

    Args:
        variables: the script's environment, with its positional parameters ("1", "@").
        launches: True for the command that the script is read for; what is not understood after it is
            skipped, unless it launches something.
        notes: receives a sentence for everything that is skipped.

    Raises:
        StrettoError: unbalanced quotes or brackets, a construct that is not read, or arguments that depend on
            a test; a script that is too long or expands without end.
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
        if not launched or _LAUNCH.search(script.text, script.command_start):
            raise
        script.note(f"{error.message}: it comes after the launch, and is passed over")


def parameters(arguments: Sequence[str]) -> dict[str, Value]:
    """Return the positional parameters of a script with these arguments."""
    numbered: dict[str, Value] = {str(index): word for index, word in enumerate(arguments, 1)}
    return {**numbered, "@": list(arguments), "*": " ".join(arguments), "#": str(len(arguments))}


def batch_variables(text: str) -> dict[str, str]:
    """Return the variables that SLURM sets according to the script's #SBATCH lines."""
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
    """Return the value of a variable or command that cannot be known."""
    return f"{MARK}{name.replace(MARK, '')}{MARK}"


def unknown_in(word: str) -> str | None:
    """Return the first unknown in an expanded word: the name of a variable, or a command."""
    start = word.find(MARK)
    return None if start < 0 else word[start + 1 :].partition(MARK)[0]


@dataclass(kw_only=True)
class _Script:
    """A script that is read from beginning to end, and its variables so far."""

    text: str
    source: str
    variables: dict[str, Value]
    notes: list[str]
    at: int = 0
    command_start: int = 0  # position of the command, which is on `line`
    line: int = 1
    depth: int = 0
    spent: list[int] = field(default_factory=lambda: [0])  # characters of all values

    def commands(self) -> Iterator[Command]:
        branches = list[str]()  # of each `if` and `{` that is open: the test that it depends on, or ""
        joined = ""  # the test that && or || makes the command depend on
        while self._skip_blanks():
            self.line += self.text.count("\n", self.command_start, self.at)
            self.command_start = start = self.at
            quote = self.text[start : start + _LONGEST_QUOTE].partition("\n")[0].rstrip()
            if (keyword := _KEYWORD.match(self.text, start)) is not None:
                self.at = keyword.end()
                started = _STARTED.match(self.text, self.at)
                if keyword[0] == "if":
                    self.at = self.at if started is None else started.end()
                    branches.append(quote if started is None else "")
                elif keyword[0] == "{":
                    branches.append(joined)
                elif not branches:
                    raise self.error(f"{keyword[0]} without if")
                elif keyword[0] in ("fi", "}"):
                    branches.pop()
                elif keyword[0] != "then":
                    branches[-1] = branches[-1] or quote
                joined = ""
                continue
            if (unread := _UNREAD.match(self.text, start)) is not None:
                name = "a function" if unread["function"] else unread[0]
                raise self.error(f"`{name}` is not read: {quote}")
            is_test = _TEST.match(self.text, start) is not None
            if self.text.startswith("[[", start):
                self.at = self._find(" ]]", "[[") + 3
                self._has_word()
            else:
                yield from self._command(next(filter(None, [*branches, joined]), ""))
            if self.text.startswith("||", self.at) or (is_test and self.text.startswith("&&", self.at)):
                joined = quote
            elif not self.text.startswith(("&&", "|"), self.at):
                joined = ""

    def _skip_blanks(self) -> bool:
        """Skip to the next command; False at the end."""
        while self.at < len(self.text):
            if self.text[self.at].isspace() or self.text[self.at] in ";&|)":
                self.at += 1
            elif not self._skip_comment():
                return True
        return False

    def _skip_comment(self) -> bool:
        """Skip a comment or the end of a continued line, if one begins at the position."""
        if self.text.startswith("\\\n", self.at):
            self.at += 2
        elif self.text[self.at] == "#":
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
        else:
            return False
        return True

    def _command(self, test: str) -> Iterator[Command]:
        """Read one command; assignments are carried out, the command itself is yielded.

        Args:
            test: the test that it depends on; empty if it depends on none.
        """
        argv, declaring = list[str](), False
        while self._has_word():
            redirection = _REDIRECTION.match(self.text, self.at)
            assignment = _ASSIGNMENT.match(self.text, self.at) if not argv or declaring else None
            if redirection is not None:
                if redirection[2] in ("<<", "<<-"):
                    raise self.error("a here-document is not read")
                self.at = redirection.end()
                if redirection[3] is None:
                    self._word()
            elif assignment is not None:
                if test:
                    raise self.error(f"an assignment depends on a test, and tests are not read: {test}")
                self._assign(assignment)
            else:
                start = self.at
                argv += _fields(self._word())
                if self.at == start:  # a bracket
                    raise self.error(f"`{self.text[start]}` is not read")
                declaring = argv[:1] != [] and argv[0] in _DECLARING
        if not argv or declaring:
            return
        if test:
            if argv[0] != "echo" and any(_LAUNCH.search(word) for word in argv):
                raise self.error(f"the launch depends on a test, and tests are not read: {test}")
            return
        position = f"{self.source}:{self.line}"
        shell = next((index for index, word in enumerate(argv) if word in _SHELLS), len(argv))
        if argv[0] == "exit":
            self.note(f"{position}: the script ends there as it is started, and is read on: {' '.join(argv)}")
        elif argv[0] in ("source", "."):
            self.note(f"{position}: {' '.join(argv[1:2])} is not read: what it sets is not known")
        elif argv[0] == "eval" or "-c" in argv[shell:-1]:
            outer = [] if argv[0] == "eval" else argv[:shell]
            text = " ".join(argv[1:]) if argv[0] == "eval" else argv[argv.index("-c", shell) + 1]
            for command in self._inner(text).commands():
                yield Command((*outer, *command.argv), self.line)
        else:
            yield Command(tuple(argv), self.line)

    def _has_word(self) -> bool:
        """Skip blanks inside a command; False at its end."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t":
                self.at += 1
            elif not self._skip_comment():
                return self.text[self.at] not in "\n;&|)" or self.text.startswith("&>", self.at)
        return False

    def _assign(self, match: re.Match[str]) -> None:
        """Carry out `NAME=value`, `NAME+=value` or `NAME=(...)`."""
        self.at = match.end()
        value: Value = self._array() if self.text.startswith("(", self.at) else _text(self._word())
        if match[2]:
            before = self.variables.get(match[1], "" if isinstance(value, str) else [])
            if isinstance(value, list):
                value = [*(before if isinstance(before, list) else [before]), *value]
            else:
                value = (" ".join(before) if isinstance(before, list) else before) + value
        self._spend(value)
        self.variables[match[1]] = value

    def _array(self) -> list[str]:
        self.at += 1
        items = list[str]()
        while self.at < len(self.text) and self.text[self.at] != ")":
            start = self.at
            if self.text[self.at].isspace():
                self.at += 1
            elif not self._skip_comment():
                items += _fields(self._word())
                if self.at == start:
                    raise self.error("an array of something else than words")
        self.at += 1
        return items

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def error(self, message: str) -> StrettoError:
        """Return an error at the current line of the script."""
        line = self.line + self.text.count("\n", self.command_start, self.at)
        return StrettoError(f"{self.source}:{line}: {message}", hint=HINT)

    def _spend(self, value: Value) -> None:
        self.spent[0] += 1 + len(value) if isinstance(value, str) else sum(map(len, value)) + len(value)
        if self.spent[0] > _MOST_CHARACTERS:
            raise self.error(f"the script comes to more than {_MOST_CHARACTERS:,} characters")

    def _inner(self, text: str) -> _Script:
        """Return a text inside this one as a script with the same variables."""
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
            line=self.line,
        )

    # -------------------------------------------------------------- words

    def _word(self) -> _Pieces:
        """Read and expand the word at the position."""
        pieces: _Pieces = []
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == "'":
                end = self._find("'", "a quote '", self.at + 1)
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
        """Read the inside of double quotes, after the first one."""
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
        if self.at >= len(self.text):
            self.at = start
            raise self.error(f"a quote {end} that does not end")
        self.at += 1
        arrays = [value for value, _ in pieces if isinstance(value, list)]
        return [(arrays[0], True)] if arrays and len(pieces) == 2 else pieces

    def _find(self, end: str, name: str, start: int | None = None) -> int:
        """Return the position of the end of a construct, or raise an error that names it."""
        position = self.text.find(end, self.at if start is None else start)
        if position < 0:
            raise self.error(f"{name} that does not end")
        return position

    def _value(self) -> Value:
        """Read the value that begins with $ or ` at the position."""
        start = self.at
        value: Value
        if self.text[start] == "`":
            self.at = self._find("`", "a quote `", start + 1) + 1
            value = unknown(self.text[start : self.at])
        elif self.text.startswith("$(", start):
            self.at = self._closing(start + 1) + 1
            value = unknown(self.text[start : self.at])
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
        """Return the position of the bracket that closes the one at `start`."""
        opening = self.text[start]
        closing, depth = {"(": ")", "{": "}"}[opening], 0
        for match in re.compile(rf"[{opening}{closing}]").finditer(self.text, start):
            depth += 1 if match[0] == opening else -1
            if depth == 0:
                return match.start()
        raise self.error(f"a bracket {opening} that does not end")

    def _parameter(self, inside: str) -> Value:
        """Return the value of `${...}`: a variable, an array, or a default."""
        match = re.fullmatch(r"([A-Za-z_]\w*|\d+)(?:\[([@*]|\d+)\])?(?:(:?[-=?])(.*))?", inside, re.DOTALL)
        if match is None:  # `${NAME#prefix}` and its kind
            return unknown(f"${{{inside}}}")
        name = match[1]
        item = match[2] or ""
        sign = match[3] or ""
        value = self.variables.get(name)
        if item.isdecimal() and isinstance(value, list):
            value = value[int(item)] if len(item) < 7 and int(item) < len(value) else None
        if sign.endswith(("-", "=")) and (value is None or (sign.startswith(":") and not value)):
            default = self._inner(match[4])._default()
            if sign.endswith("="):
                self.variables[name] = default
            return default
        if value is None:
            return [] if item in ("@", "*") else unknown(name if name.isidentifier() else f"${name}")
        return value

    def _default(self) -> str:
        """Read a default, with the blanks between its words."""
        parts = list[str]()
        while self.at < len(self.text):
            start = self.at
            parts.append(_text(self._word()))
            if self.at == start:
                parts.append(self.text[start])
                self.at += 1
        return "".join(parts)


def _text(pieces: _Pieces) -> str:
    """Join a word's pieces without splitting at blanks."""
    return "".join(" ".join(value) if isinstance(value, list) else value for value, _ in pieces)


def _fields(pieces: _Pieces) -> list[str]:
    """Split a word: unquoted values at blanks, quoted arrays at their items."""
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
