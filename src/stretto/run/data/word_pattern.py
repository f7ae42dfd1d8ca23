"""What the regular expression of a tokenizer, which cuts text into words, can match.

The expression is read as Glushkov (1961) does: its atoms, each of which matches one character, and which atom
may follow which. The library that runs the expression says whether an atom matches a character, so what
stands for letters or digits is its own.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from functools import cache
from itertools import product

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

_ESCAPED = re.compile(
    r"\\(?:[pP]\{\^?\w+\}|x\{[0-9a-fA-F]+\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[dDwWsSnrtfv]|[^\w\s])"
)
_REPEATED = re.compile(r"(?:[?*+]|\{(\d+)(,?)(\d*)\})[?+]?")
_LOOKAHEAD = "(?=.)"
"""Stands for every look ahead: what it looks at does not matter."""


class UnsupportedRuleError(ValueError):
    """A tokenizer has a rule of which nothing is known here, such as an anchor or a look behind."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A part of the expression.

    Attributes:
        nullable: it may match nothing.
        first, last: the atoms that its matches may begin and end with, and looks ahead.
        alone: atoms that may be all of a match, whatever comes next, and those that take a character before.
        plain: it may match nothing without a look ahead.
        possessive: atoms of which it does not give up what they have matched.
    """

    nullable: bool
    first: Set[str] = frozenset()
    last: Set[str] = frozenset()
    alone: Set[tuple[str, Set[str]]] = frozenset()
    plain: bool = False
    possessive: Set[str] = frozenset()


_NOTHING = _Part(nullable=True, plain=True)


class WordPattern:
    """An expression that is matched from left to right, each match from where the last one ended.

    Cut between two characters that no match holds side by side, a text has the same matches: until there no
    attempt to match gets further in one text than in the other, and from there the search begins anew. It
    must not look ahead over the cut either.
    """

    def __init__(self, pattern: str) -> None:
        """Read it.

        Raises:
            UnsupportedRuleError: it has a part that is not known here.
        """
        self._pattern, self._at = pattern, 0
        self._pairs = set[tuple[str, str]]()
        self._folds = False
        self._part = self._alternatives(folded=False)
        if self._at < len(pattern):
            raise UnsupportedRuleError(pattern)

    def joins(self, before: str, after: str) -> bool:
        """Whether a match may hold the two characters side by side, or look ahead between them."""
        if self._folds and max(len(before.casefold()), len(after.casefold())) > 1:
            return True  # a character like the German sharp s may stand for two of the expression
        return any(
            a != _LOOKAHEAD and _matches(a, before) and (b == _LOOKAHEAD or _matches(b, after))
            for a, b in self._pairs
        )

    def takes(self, character: str) -> bool:
        """Whether the character is within a match wherever it stands."""
        return not self._part.nullable and any(
            _matches(atom, character) and not any(_matches(other, character) for other in others)
            for atom, others in self._part.alone
        )

    def _alternatives(self, folded: bool) -> _Part:
        parts = [self._sequence(folded)]
        while self._take("|"):
            parts.append(self._sequence(folded))
        return _Part(
            nullable=any(part.nullable for part in parts),
            first=frozenset().union(*(part.first for part in parts)),
            last=frozenset().union(*(part.last for part in parts)),
            alone=frozenset().union(*(part.alone for part in parts)),
            plain=any(part.plain for part in parts),
            possessive=frozenset().union(*(part.possessive for part in parts)),
        )

    def _sequence(self, folded: bool) -> _Part:
        so_far = _NOTHING
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            part = self._repeated(folded)
            self._pairs.update(product(so_far.last, part.first))
            so_far = _Part(
                nullable=so_far.nullable and part.nullable,
                first=so_far.first | part.first if so_far.nullable else so_far.first,
                last=so_far.last | part.last if part.nullable else part.last,
                alone=(so_far.alone if part.plain else frozenset())
                | frozenset(
                    (atom, others | so_far.possessive) for atom, others in part.alone if so_far.plain
                ),
                plain=so_far.plain and part.plain,
                possessive=so_far.possessive | part.possessive,
            )
        return so_far

    def _repeated(self, folded: bool) -> _Part:
        part = self._single(folded)
        while (match := _REPEATED.match(self._pattern, self._at)) is not None:
            self._at = match.end()
            sign = match[0][0]
            least = int(match[1]) if sign == "{" else int(sign == "+")
            if sign != "?" and not (sign == "{" and match[1] == "1" and not match[2]):
                self._pairs.update(product(part.last, part.first))
            part = _Part(
                nullable=part.nullable or least == 0,
                first=part.first,
                last=part.last,
                alone=part.alone if least <= 1 else frozenset(),
                plain=part.plain or least == 0,
                possessive=part.possessive | (part.first if match[0][-1] == "+" != match[0] else frozenset()),
            )
        return part

    def _single(self, folded: bool) -> _Part:
        """A group, a look ahead or an atom."""
        if self._take("(?=") or self._take("(?!"):
            before = set(self._pairs)
            inside = self._alternatives(folded)
            self._close()
            # it must look at one character only
            if inside.nullable or self._pairs != before or _LOOKAHEAD in inside.first:
                raise UnsupportedRuleError(self._pattern)
            return _Part(nullable=True, first={_LOOKAHEAD}, last={_LOOKAHEAD})
        if self._take("(?:"):
            return self._group(folded)
        if self._take("(?i:"):
            return self._group(True)
        if self._take("(?"):
            raise UnsupportedRuleError(self._pattern)
        if self._take("("):
            return self._group(folded)
        start, character = self._at, self._pattern[self._at]
        if character == "\\":
            match = _ESCAPED.match(self._pattern, start)
            if match is None:
                raise UnsupportedRuleError(self._pattern)
            self._at = match.end()
        elif character == "[":
            self._at = self._class_end(start)
        elif character in "^$?*+{":
            raise UnsupportedRuleError(self._pattern)
        else:
            self._at += 1
        atom = self._pattern[start : self._at]
        if folded:
            if any(len(character.casefold()) > 1 for character in atom):
                raise UnsupportedRuleError(self._pattern)
            self._folds, atom = True, f"(?i:{atom})"
        none = frozenset[str]()
        return _Part(nullable=False, first={atom}, last={atom}, alone={(atom, none)})

    def _group(self, folded: bool) -> _Part:
        part = self._alternatives(folded)
        self._close()
        return part

    def _take(self, text: str) -> bool:
        if not self._pattern.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _close(self) -> None:
        if not self._take(")"):
            raise UnsupportedRuleError(self._pattern)

    def _class_end(self, start: int) -> int:
        """The end of the class of characters that begins there; classes may be nested."""
        at, depth = start, 0
        while at < len(self._pattern):
            character = self._pattern[at]
            if character == "\\":
                at += 1
            elif character == "[":
                depth += 1
                at += self._pattern.startswith("^", at + 1)
                at += self._pattern.startswith("]", at + 1)
            elif character == "]":
                depth -= 1
                if depth == 0:
                    return at + 1
            at += 1
        raise UnsupportedRuleError(self._pattern)


@cache
def _splitter(atom: str) -> Split:
    return Split(Regex(atom), "removed")


@cache
def _matches(atom: str, character: str) -> bool:
    """Whether an atom matches a character."""
    return not _splitter(atom).pre_tokenize_str(character)
