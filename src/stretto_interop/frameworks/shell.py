"""The words of a shell script's commands, without running it.

Understood is what scripts that start training are made of: assignments, arrays, quotes, continued lines,
`$NAME`, `${NAME}`, `${NAME:-default}`, `"${NAME[@]}"`, `$((arithmetic))` on whole numbers, `&&`, `||` and
`if` with simple tests, functions, documents (`<<EOF`) and texts (`bash -c`) that hold commands. Nothing is
executed: what a command would print stays unknown, and so does what is assigned where nothing tells whether
it is, as in a loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stretto.errors import StrettoError
from stretto_interop.frameworks.shell_expansion import Expansion, Value
from stretto_interop.frameworks.shell_options import written_out
from stretto_interop.frameworks.shell_values import MARK, decided, unknown
from stretto_interop.frameworks.shell_words import ASSIGNED, HINT, Document, Statement, statements

_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_LOOPS = ("for", "while", "until", "case", "select")
# builtins that give variables values which nothing here tells
_FILLING = ("let", "read", "mapfile", "readarray", "unset", "printf", "getopts")
_SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh", "sbatch")
_LAUNCH = re.compile(r"pretrain\w*\.py|\btorchrun\b|\btorch\.distributed\b")
_LONGEST = 1 << 20  # characters of a script


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


_CLOSING = ("then", "else", "fi", "elif", "do", "done", "esac", "{", "}")


def commands(
    text: str,
    source: str,
    known: Mapping[str, Value] | None = None,
    launches: Callable[[Command], bool] = lambda _: False,
    notes: list[str] | None = None,
) -> Iterator[Command]:
    """All commands of a script, in order, but those in branches that are not taken.

    Args:
        known: variables that the script is started with, its positional parameters ("1", "@") among them.
        launches: whether a command is what the script is read for: statements behind it that are not
            understood are passed over, unless they launch something themselves.
        notes: takes what is passed over, in sentences.

    Raises:
        StrettoError: quotes or brackets that do not end, or arguments that are put together where nothing
            tells whether they are: in a loop, or after a test that cannot be decided; or a script that is too
            long, or makes too much of itself.
    """
    if len(text) > _LONGEST:
        raise StrettoError(f"{source} has {len(text):,} characters: {_LONGEST:,} are read", hint=HINT)
    if MARK in text:
        line = text.count("\n", 0, text.index(MARK)) + 1
        raise StrettoError(f"{source}:{line}: a NUL byte", hint="give a script of bash, which is text")
    run = _Run(source=source, variables={**batch_variables(text), "0": source, "BASH_SOURCE": [source]})
    run.notes = run.notes if notes is None else notes
    run.variables |= parameters(()) if known is None else known
    words = run.variables.get("@", [])
    text = written_out(text, source, words if isinstance(words, list) else [words])
    left, launched = statements(text, source), False
    while True:
        statement = None
        try:
            if (statement := next(left, None)) is None:
                break
            for command in run.step(statement):
                launched = launched or launches(command)
                yield command
        except StrettoError as error:
            if not launched or (statement is not None and _LAUNCH.search(str(statement.words))):
                raise
            run.note(f"{error.message}: it stands behind the launch, and is passed over")
    if run.defining is not None:
        raise StrettoError(f"{source}: the function {run.defining} does not end", hint=HINT)


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


@dataclass
class _Branch:
    """A branch of `if`, a loop, or a group in braces.

    Attributes:
        taken: now; None: nothing tells.
        any: whether one of the branches so far was taken.
        why: nothing tells, as an error.
        tested: the test is over.
    """

    taken: bool | None
    any: bool
    why: StrettoError | None = None
    tested: bool = False


@dataclass(kw_only=True)
class _Run(Expansion):
    """Which branches of `if` are taken, and which functions there are."""

    branches: list[_Branch] = field(default_factory=list[_Branch])
    last: bool | None = True  # the outcome of the statement before
    functions: dict[str, list[Statement]] = field(default_factory=dict[str, list[Statement]])
    defining: str | None = None  # the function whose statements come
    braces: int = 0  # of it that are open
    returned: bool = False  # from the function that is run
    local: set[str] = field(default_factory=set[str])  # its variables
    notes: list[str] = field(default_factory=list[str])

    def note(self, text: str) -> None:
        """Add a sentence, once."""
        if text not in self.notes:
            self.notes.append(text)

    def step(self, statement: Statement) -> Iterator[Command]:
        """The commands of one statement."""
        words, line = statement.words, statement.line
        self.spend(1 + sum(map(len, words)), line)
        if self.defining is not None:
            self._define(self.defining, statement)
            return
        if self.returned:
            return
        while words and isinstance(words[0], str) and words[0] in _CLOSING:
            if words[0] == "{":
                self.branches.append(self._group(statement))
                statement, words = replace(statement, join=""), words[1:]
            else:
                words = self._branch(words, line)
        if not words:
            return
        first = words[0]
        if first == "function" or "()" in words[1:2]:
            self._begin(words, statement)
        elif first == "if" or first in _LOOPS:
            self._open(words, line)
        elif statement.join and first in ("[", "[[") and self._further():
            self._joined(words, statement)
        elif any(branch.taken is False for branch in self.branches):
            return
        elif (why := self._undecided(statement)) is not None:
            self._perhaps(words, why)
        elif not statement.join or (self.last if statement.join == "&&" else not self.last):
            yield from self._run(words, statement)

    def _begin(self, words: tuple[str | list[str], ...], statement: Statement) -> None:
        """Begin a function."""
        name, *body = [word for word in words if word not in ("function", "()")]
        if not isinstance(name, str) or (body and body[0] != "{"):
            what = f"{self.source}:{statement.line}: a function without {{ ... }} is not read"
            raise StrettoError(what, hint=HINT)
        if (why := next((branch.why for branch in self.branches if branch.taken is None), None)) is not None:
            raise why
        self.defining, self.braces = name, 0
        if all(branch.taken for branch in self.branches):
            self.functions[name] = []
        if body:
            self._define(name, replace(statement, words=tuple(body)))

    def _define(self, name: str, statement: Statement) -> None:
        """Take a statement into a function, up to the brace that ends it."""
        words = statement.words
        if self.braces == 0 and words[0] != "{":
            what = f"{self.source}:{statement.line}: a function without {{ ... }} is not read"
            raise StrettoError(what, hint=HINT)
        first = self.braces == 0
        self.braces += words.count("{") - words.count("}")
        words = words[1:] if first else words
        if self.braces <= 0:
            self.defining = None
            words = words[: words.index("}")] if "}" in words else words
        if words and all(branch.taken for branch in self.branches):
            self.functions[name].append(replace(statement, words=words))

    def _call(self, words: Sequence[str], line: int) -> Iterator[Command]:
        """The commands of a function, with parameters and local variables of its own."""
        before, outer = dict(self.variables), (self.local, self.branches)
        self.spend(len(before), line)
        self.local, self.branches = set(), []
        self._position(words[1:])
        yield from self._nested(self.functions[words[0]], line)
        again = [name for name in self.variables if name.isdecimal()] + [*"@*#", *self.local]
        self.variables = {name: value for name, value in self.variables.items() if name not in again}
        self.variables |= {name: before[name] for name in before if name in again or name.isdecimal()}
        (self.local, self.branches), self.returned = outer, False

    def _nested(self, inside: Iterable[Statement], line: int) -> Iterator[Command]:
        with self.deeper(line):
            for statement in inside:
                yield from self.step(statement)

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
            self.variables[words[1]] = unknown(words[1])
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

    def _group(self, statement: Statement) -> _Branch:
        """A group in braces, which may stand behind && or ||."""
        if not all(branch.taken for branch in self.branches):
            return replace(
                next(branch for branch in self.branches if not branch.taken), any=True, tested=True
            )
        why = self._undecided(statement)
        taken = None if why else not statement.join or self.last is (statement.join == "&&")
        return _Branch(taken, True, why, tested=True)

    def _further(self) -> bool:
        """Whether the test of an `if` is not over."""
        return bool(self.branches) and self.branches[-1].why is None and not self.branches[-1].tested

    def _joined(self, words: tuple[str | list[str], ...], statement: Statement) -> None:
        """A further test of the `if` before, behind && or ||."""
        branch = self.branches[-1]
        if branch.taken is (statement.join == "&&"):
            branch.any = False
            self._decide(branch, words, statement.line)

    def _perhaps(self, words: tuple[str | list[str], ...], why: StrettoError) -> None:
        """What may be carried out or not: a variable is unknown from there, and arguments are an error."""
        if words and words[0] == "echo":
            return
        if words and isinstance(words[0], str) and (words[0] in _FILLING or words[0] in self.functions):
            self._fill(words, why)
            return
        for word in words:
            if isinstance(word, list):
                raise why
            match = ASSIGNED.match(word)
            if match is not None:
                if "--" in word or isinstance(self.variables.get(match[1]), list):
                    raise why
                self.variables[match[1]] = unknown(match[1])
            elif _LAUNCH.search(word):
                raise why

    def _fill(self, words: Sequence[str | list[str]], why: StrettoError) -> None:
        """Forget what a builtin, or a function that may be run or not, gives values to."""
        if words[0] in self.functions:
            with self.deeper(0):
                for statement in self.functions[str(words[0])]:
                    self.spend(1 + len(statement.words), statement.line)
                    self._perhaps(statement.words, why)
        elif words[0] != "printf" or words[1:2] == ("-v",):
            for word in words[1:]:
                match = re.match(r"[\"']?([A-Za-z_]\w*)", str(word))
                if match is not None:
                    self.variables[match[1]] = unknown(match[1])

    def _branch(self, words: tuple[str | list[str], ...], line: int) -> tuple[str | list[str], ...]:
        word, rest = words[0], words[1:]
        if word in ("then", "do"):
            if self.branches:
                self.branches[-1].tested = True
            return rest
        if not self.branches:
            raise StrettoError(f"{self.source}:{line}: {word} without if", hint=HINT)
        last = self.branches[-1]
        if word in ("fi", "done", "esac", "}"):
            self.branches.pop()
        elif last.why is not None:
            return () if word == "elif" else rest
        elif word == "else":
            last.taken, last.any = not last.any, True
        else:
            last.taken = last.tested = False
            if not last.any and all(branch.taken for branch in self.branches[:-1]):
                self._decide(last, rest, line)
            return ()
        return rest

    def _command(
        self, words: tuple[str | list[str], ...], line: int, document: Document | None
    ) -> Iterator[Command]:
        """Assignments change variables; any other command is handed on."""
        rest = list(words)
        local = rest[0] == "local"
        while rest and (isinstance(rest[0], list) or rest[0] in _DECLARING or ASSIGNED.match(rest[0])):
            word = rest.pop(0)
            if isinstance(word, list):
                self._assign_array(word, line, local)
            elif word not in _DECLARING:
                self._assign(word, line, local)
        plain = _unredirected([word for word in rest if isinstance(word, str)])
        if not plain:
            return
        expanded = self.expanded(plain, line)
        if not expanded:
            return
        if self._built_in(expanded, line):
            return
        if expanded[0] in self.functions:
            yield from self._call(expanded, line)
            return
        inside = self._inside(expanded, document, line)
        if inside is None:
            to = None if document is None or expanded != ["cat"] else self._written_to(rest, line)
            text = None if document is None else self._text(document, line)
            yield Command(tuple(expanded), line, to, text)
            return
        outer = () if document is not None and expanded[0] == "cat" else tuple(expanded)
        for command in self._nested(statements(inside, self.source), line):
            yield Command((*outer, *command.words), line)

    def _built_in(self, words: Sequence[str], line: int) -> bool:
        """Whether it is a builtin; does what that does to variables, or notes that nothing tells."""
        first, at = words[0], f"{self.source}:{line}"
        if first == "shift":
            count = int(words[1]) if words[1:] and words[1].isdecimal() else 1
            left = self.variables.get("@", [])
            self._position((left if isinstance(left, list) else [left])[count:])
        elif first == "set" and words[1:] and ("--" in words or not words[1].startswith(("-", "+"))):
            self._position(words[words.index("--") + 1 :] if "--" in words else words[1:])
        elif first == "return":
            self.returned = self.depth > 0
        elif first == "exit":
            self.note(f"{at}: the script ends there as it is started, and is read on: {' '.join(words)}")
        elif first in ("source", "."):
            self.note(f"{at}: {' '.join(words[1:2])} is not read: what it sets is not known")
        elif first in _FILLING:
            self._fill(words, StrettoError(f"{at}: {first} is not read", hint=HINT))
        elif (match := re.match(r"([A-Za-z_]\w*)\[[^]]*\]\+?=", first)) is not None:  # an element of an array
            self.variables[match[1]] = unknown(match[1])
        else:
            return False
        return True

    def _position(self, words: Sequence[str]) -> None:
        """Make these the positional parameters."""
        for name in [name for name in self.variables if name.isdecimal() and name != "0"]:
            del self.variables[name]
        self.variables |= parameters(words)

    def _text(self, document: Document, line: int) -> str:
        """The lines of a document, with the variables that it puts in."""
        if document.plain:
            return document.text
        value, _ = self.double(document.text, 0, line, "")
        return " ".join(value) if isinstance(value, list) else value

    def _written_to(self, words: Sequence[str | list[str]], line: int) -> str | None:
        """The file that the output of a command goes to."""
        plain = [word for word in words if isinstance(word, str)]
        for at, word in enumerate(plain):
            if word.startswith(">") and not word.startswith(">&"):
                name = word.lstrip(">") or "".join(plain[at + 1 : at + 2])
                return "".join(self.fields(name, line, split=False)) or None
        return None

    def _inside(self, words: list[str], document: Document | None, line: int) -> str | None:
        """The commands that a command is given as a text (`bash -c TEXT`) or as a document."""
        if document is not None:
            text = self._text(document, line)
            holds = _LAUNCH.search(text) is not None
            return text if holds or any(word in _SHELLS for word in words) else None
        if words[0] == "eval":
            inside = " ".join(words[1:])
            del words[:]
            return inside
        shell = next((at for at, word in enumerate(words) if word in _SHELLS), None)
        if shell is None or "-c" not in words[shell:-1]:
            return None
        inside = words[words.index("-c", shell) + 1]
        del words[shell:]
        return inside

    def _assign(self, word: str, line: int, local: bool) -> None:
        match = ASSIGNED.match(word)
        assert match
        self.local |= {match[1]} if local else set()
        value = "".join(self.fields(word[match.end() :], line, split=False))
        before = self.variables.get(match[1], "")
        if match[2]:
            value = (" ".join(before) if isinstance(before, list) else before) + value
            self.spend(len(value), line)
        self.variables[match[1]] = value

    def _assign_array(self, words: list[str], line: int, local: bool) -> None:
        match = ASSIGNED.match(words[0])
        assert match
        self.local |= {match[1]} if local else set()
        before = self.variables.get(match[1], []) if match[2] else []
        start = before if isinstance(before, list) else [before]
        self.spend(len(start), line)
        self.variables[match[1]] = [*start, *self.expanded(words[1:], line)]

    def _test(self, words: tuple[str | list[str], ...], line: int) -> bool:
        """The outcome of `[ ... ]` or `[[ ... ]]`."""
        plain = [word for word in words if isinstance(word, str)]
        if plain and plain[0] in ("[", "[[") and plain[-1] in ("]", "]]"):
            inside = [" ".join(self.fields(word, line, split=False)) for word in plain[1:-1]]
            if (outcome := decided(inside, self.variables)) is not None:
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
