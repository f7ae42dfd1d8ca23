"""Words of a shell script, expanded: quotes removed, variables put in, values split at blanks."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from stretto.errors import StrettoError
from stretto_interop.frameworks.shell_values import (
    MARK,
    calculated,
    split_fields,
    unknown,
    unknown_in,
    without_match,
)
from stretto_interop.frameworks.shell_words import HINT

_NAME = re.compile(r"[A-Za-z_]\w*")
_MOST = 4 << 20  # characters that all its commands come to, so that none doubles itself without end
_DEEPEST = 40  # functions, texts of commands and defaults in each other
Value = str | list[str]


class _Fields:
    """The words that one word of a script becomes, each in pieces."""

    def __init__(self) -> None:
        self.pieces = list[list[str]]()

    def add(self, text: str) -> None:
        """Lengthen the last word."""
        if not self.pieces:
            self.pieces.append([])
        self.pieces[-1].append(text)

    def add_each(self, texts: list[str]) -> None:
        """Lengthen the last word by the first text; the others are words of their own."""
        if texts:
            self.add(texts[0])
            self.pieces += [[text] for text in texts[1:]]

    @property
    def words(self) -> list[str]:
        return ["".join(pieces) for pieces in self.pieces]


@dataclass(kw_only=True)
class Expansion:
    """Variables so far, and bounds on what they come to.

    Attributes:
        depth: of functions, texts and defaults in each other.
        left: characters until the script has come to too many.
    """

    source: str
    variables: dict[str, Value]
    depth: int = 0
    left: int = _MOST

    def spend(self, characters: int, line: int) -> None:
        """Count what the script comes to."""
        self.left -= characters
        if self.left < 0:
            what = f"{self.source}:{line}: the script comes to more than {_MOST:,} characters"
            raise StrettoError(what, hint=HINT)

    @contextmanager
    def deeper(self, line: int) -> Generator[None]:
        """Inside of a function, a text of commands or a default."""
        if self.depth == _DEEPEST:
            what = f"{self.source}:{line}: functions, texts or defaults in each other, over {_DEEPEST} deep"
            raise StrettoError(what, hint=HINT)
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def expanded(self, words: list[str], line: int) -> list[str]:
        return [field for word in words for field in self.fields(word, line)]

    def fields(self, word: str, line: int, split: bool = True) -> list[str]:
        """The words that one becomes: quotes removed, variables put in, unquoted values split at blanks."""
        made, at = _Fields(), 0
        while at < len(word):
            letter = word[at]
            if letter == "'":
                end = self._end(word, "'", at + 1, line)
                made.add(word[at + 1 : end])
                at = end + 1
            elif letter == '"':
                text, at = self.double(word, at + 1, line)
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
                made.add_each(split_fields(text) if split else [text])
            else:
                made.add(letter)
                at += 1
        return made.words

    def double(self, word: str, at: int, line: int, end: str = '"') -> tuple[Value, int]:
        """The inside of double quotes, from behind the first one, and the place behind the last; without an
        `end`, that of a document.
        """
        text = ""
        while at < len(word) and word[at] != end:
            if word[at] == "\\":
                following = word[at + 1 : at + 2]
                plain = following in f"{end}\\$`"
                text += "" if following == "\n" else following if plain else f"\\{following}"
                at += 2
            elif word[at] in "$`":
                value, at = self._value(word, at, line)
                if isinstance(value, list):
                    if not text and end and word[at : at + 1] == end:
                        return value, at + 1
                    value = " ".join(value)
                text += value
            else:
                text += word[at]
                at += 1
        if end and at >= len(word):
            raise StrettoError(f"{self.source}:{line}: a quote {end} that does not end", hint=HINT)
        return text, at + 1

    def _end(self, word: str, quote: str, at: int, line: int) -> int:
        """The place of the quote that ends what begins before `at`."""
        end = word.find(quote, at)
        if end < 0:
            raise StrettoError(f"{self.source}:{line}: a quote {quote} that does not end", hint=HINT)
        return end

    def _value(self, word: str, at: int, line: int) -> tuple[Value, int]:
        """What begins with $ or `, and the place behind it."""
        value, end = self._put_in(word, at, line)
        self.spend(len(value) if isinstance(value, str) else sum(map(len, value)) + len(value), line)
        return value, end

    def _put_in(self, word: str, at: int, line: int) -> tuple[Value, int]:
        if word[at] == "`":
            end = self._end(word, "`", at + 1, line)
            return unknown(word[at : end + 1]), end + 1
        if word.startswith(("${", "$("), at):
            end = self._closing(word, at + 1, line)
            inside = word[at + 2 : end]
            if inside.startswith("(") and inside.endswith(")") and word[at + 1] == "(":
                return self._arithmetic(inside[1:-1], line), end + 1
            if word[at + 1] == "(":
                return unknown(f"$({inside})"), end + 1
            with self.deeper(line):
                return self._parameter(inside, line), end + 1
        match = _NAME.match(word, at + 1)
        if match:
            return self.variables.get(match[0], unknown(match[0])), match.end()
        if word[at + 1 : at + 2] and word[at + 1] in "0123456789@*#?$!-":
            return self.variables.get(word[at + 1], unknown(f"${word[at + 1]}")), at + 2
        return "$", at + 1

    def _closing(self, word: str, at: int, line: int) -> int:
        """The place of the bracket that closes the one at `at`."""
        opening = word[at]
        closing, depth = {"(": ")", "{": "}"}[opening], 0
        for place in range(at, len(word)):
            depth += (word[place] == opening) - (word[place] == closing)
            if depth == 0:
                return place
        raise StrettoError(f"{self.source}:{line}: a bracket {opening} that does not end", hint=HINT)

    def _parameter(self, inside: str, line: int) -> Value:
        """`${...}`: a variable, an array, or a default."""
        cut = re.fullmatch(r"([A-Za-z_]\w*|\d+)(##?|%%?)(.+)", inside, re.DOTALL)
        if cut is not None and isinstance(text := self.variables.get(cut[1]), str):
            pattern = "".join(self.fields(cut[3], line, split=False))
            if MARK in text + pattern:
                return unknown(cut[1])
            try:
                return without_match(text, cut[2], pattern)
            except ValueError as error:
                raise StrettoError(f"{self.source}:{line}: {error} is not cut", hint=HINT) from None
        match = re.fullmatch(r"([A-Za-z_]\w*|\d+)(\[(?:[@*]|\d+)\])?(?:(:?[-=?+])(.*))?", inside, re.DOTALL)
        if match is None:
            return unknown(f"${{{inside}}}")
        value = self.variables.get(match[1])
        place = (match[2] or "").strip("[]")
        if place.isdecimal() and isinstance(value, list):
            value = value[int(place)] if len(place) < 7 and int(place) < len(value) else None
        operation = match[3] or ""
        if operation.endswith(("-", "=")) and (value is None or (operation[0] == ":" and not value)):
            default = " ".join(self.fields(match[4], line, split=False))
            if operation.endswith("="):
                self.variables[match[1]] = default
            return default
        if operation.endswith("+"):
            if isinstance(value, str) and unknown_in(value) is not None:
                return unknown(f"${{{inside}}}")
            return " ".join(self.fields(match[4], line, split=False)) if value else ""
        if value is None:
            return [] if place in ("@", "*") else unknown(match[1])
        return value

    def _arithmetic(self, text: str, line: int) -> str:
        """The value of `$((...))`."""
        names = _NAME.findall(text)
        for name in names:
            value = self.variables.get(name)
            if not isinstance(value, str) or not re.fullmatch(r"-?\d+", value.strip()):
                return unknown(name)
        plain = _NAME.sub(lambda name: str(self.variables[name[0]]), text.replace("$", "").strip("{} "))
        plain = plain.replace("{", "").replace("}", "")
        try:
            return str(calculated(plain))
        except ValueError:
            raise StrettoError(f"{self.source}:{line}: $(({text})) is not read", hint=HINT) from None
