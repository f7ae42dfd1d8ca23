"""A shell script as statements of words, which keep their quotes; nothing is expanded and nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from stretto.errors import StrettoError

ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
HINT = 'have the script print its arguments, and give those: echo "${ARGS[@]}"'
_BRACKETS = re.compile(r"\([ \t]*\)")  # of a function
Join = Literal["", "&&", "||"]


@dataclass(frozen=True)
class Document:
    """The lines behind `<<WORD`; `plain`: WORD is quoted, so that no variable is put in."""

    text: str
    plain: bool


@dataclass(frozen=True, kw_only=True)
class Statement:
    """Words as they stand, with their quotes; an array's are a list of words in one.

    Attributes:
        line: it begins on.
        join: what stands between the statement before and this one.
        document: what it reads in place of a file.
    """

    words: tuple[str | list[str], ...]
    line: int
    join: Join = ""
    document: Document | None = None


def statements(text: str, source: str) -> Iterator[Statement]:
    """The statements of a script, in order.

    Raises:
        StrettoError: quotes, brackets or documents that do not end.
    """
    return _Reader(text=text.replace("\r\n", "\n"), source=source).statements()


@dataclass(kw_only=True)
class _Reader:
    """Splits a script into statements of words, which keep their quotes."""

    text: str
    source: str
    at: int = 0
    line: int = 1
    words: list[str | list[str]] = field(default_factory=list[str | list[str]])
    begun: int = 1
    join: Join = ""
    testing: bool = False  # inside of `[[`, where && and || are words

    def statements(self) -> Iterator[Statement]:
        while self.at < len(self.text):
            letter = self.text[self.at]
            if self._continued():
                self._skip(2)
            elif letter in "&|" and self.testing:
                self.words.append(self.text[self.at : self.at + 2])
                self._skip(2)
            elif letter == "\n" or (letter in ";&|" and not self._redirected()):
                yield from self._end()
            elif letter.isspace():
                self._skip(1)
            elif letter == "#":
                self._comment()
            else:
                self._take()
        yield from self._end()

    def _end(self) -> Iterator[Statement]:
        """The statement so far, at the separator that ends it, and the place behind that."""
        words, two = tuple(self.words), self.text[self.at : self.at + 2]
        document = self._document() if self.text[self.at : self.at + 1] == "\n" else None
        if document is None:
            self._skip(2 if two in ("&&", "||") else 1)
        if words:
            yield Statement(words=words, line=self.begun, join=self.join, document=document)
        if two == "&&" or two == "||":
            self.join = two
        elif words:
            self.join = ""
        self.words, self.testing = [], False

    def _document(self) -> Document | None:
        """The lines behind the one that ends here, where it has `<<WORD`."""
        plain = [word for word in self.words if isinstance(word, str)]
        at = next((i for i, word in enumerate(plain) if re.match(r"<<(?!<)", word)), None)
        if at is None:
            return None
        mark = plain[at].lstrip("<").lstrip("-") or "".join(plain[at + 1 : at + 2])
        word = mark.strip("'\"\\")
        match = re.compile(rf"^[ \t]*{re.escape(word)}[ \t]*$", re.MULTILINE).search(self.text, self.at)
        if not word or match is None:
            raise self._error(f"a document <<{word} that does not end")
        text = self.text[self.at + 1 : match.start()]
        self._skip(match.end() - self.at)
        return Document(text=text, plain=mark != word)

    def _redirected(self) -> bool:
        """Whether & belongs to a redirection, as in 2>&1."""
        return self.text[self.at] == "&" and (
            self.text[self.at - 1 : self.at] == ">" or self.text[self.at + 1 : self.at + 2] == ">"
        )

    def _take(self) -> None:
        if not self.words:
            self.begun = self.line
        word = self._word()
        if word.endswith("=") and self.text[self.at : self.at + 1] == "(" and ASSIGNED.fullmatch(word):
            self.words.append([word, *self._array()])
        elif word:
            self.words.append(word)
            self.testing = word == "[[" or (self.testing and word != "]]")
        elif len(self.words) <= 2 and (brackets := _BRACKETS.match(self.text, self.at)):
            self.words += ["()"] if self.words else []
            self._skip(len(brackets[0]))
        else:  # a bracket of a group
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
            if letter.isspace() or letter in "();|" or self._continued():
                break
            if letter == "&" and not self._redirected():
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
        begun = self.line
        self._skip(1)
        while self.text[self.at : self.at + 1] != quote:
            if self.at >= len(self.text):
                self.line = begun
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
        return StrettoError(f"{self.source}:{self.line}: {what}", hint=HINT)
