"""Cuts of long texts that leave their tokens as they are, so that all cores encode one text.

A text may be cut between two characters if every stage of its tokenizer is the same for both parts as for the
text: what rewrites characters does not join the two, no added token holds both, no word does (`WordPattern`),
and either a word ends there or no entry of a BPE's vocabulary holds both. If a stage is of another kind, the
text is not cut. Nothing here is a guess; the tokens around each cut are compared nevertheless.

The regular expression that cuts text into words is read as Glushkov (1961) does: its atoms, each of which
matches one character, and which atom may follow which. The library that runs the expression says whether an
atom matches a character, so what stands for letters or digits is its own.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise, product
from typing import Any

import tokenizers
from tokenizers import Regex, models
from tokenizers.pre_tokenizers import ByteLevel, Split

_ESCAPED = re.compile(
    r"\\(?:[pP]\{\^?\w+\}|x\{[0-9a-fA-F]+\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[dDwWsSnrtfv]|[^\w\s])"
)
_REPEATED = re.compile(r"(?:[?*+]|\{(\d+)(,?)(\d*)\})[?+]?")
_LOOKAHEAD = "(?=.)"
"""Stands for every look ahead: what it looks at does not matter."""


class UnsupportedRuleError(ValueError):
    """A tokenizer has an unsupported rule, such as an anchor or a look behind."""


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
        """Return True if a match may hold the two characters side by side, or look ahead between them."""
        if self._folds and max(len(before.casefold()), len(after.casefold())) > 1:
            return True  # a character like the German sharp s may stand for two of the expression
        return any(
            a != _LOOKAHEAD and _matches(a, before) and (b == _LOOKAHEAD or _matches(b, after))
            for a, b in self._pairs
        )

    def takes(self, character: str) -> bool:
        """Return True if the character is always within a match."""
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
            minimum = int(match[1]) if sign == "{" else int(sign == "+")
            if sign != "?" and not (sign == "{" and match[1] == "1" and not match[2]):
                self._pairs.update(product(part.last, part.first))
            part = _Part(
                nullable=part.nullable or minimum == 0,
                first=part.first,
                last=part.last,
                alone=part.alone if minimum <= 1 else frozenset(),
                plain=part.plain or minimum == 0,
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
    """Return True if an atom matches a character."""
    return not _splitter(atom).pre_tokenize_str(character)


# of the library's ByteLevel, which is GPT-2's
_BYTE_LEVEL_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WINDOW = 64  # characters on each side of a cut whose tokens are compared
_STABLE = frozenset(map(chr, [*range(128), *range(0x4E00, 0xA000)])) | frozenset("、。，！？：；")
"""Characters that Unicode's normal forms leave alone and never join to the one before."""

_BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
Pair = tuple[str, str]
Stage = Callable[[Pair], tuple[Pair, bool] | None]
"""Maps the characters before and after a cut to those that the next stage sees, and says whether a word ends
between them; None: the text must not be cut there."""


@dataclass(frozen=True)
class ExactCuts:
    """The places at which texts may be cut for one tokenizer."""

    encode: Callable[[str], Sequence[int]]
    stages: Sequence[Stage]
    joined: Callable[[Pair], bool]  # by the model, where no word ends
    allowed: dict[Pair, bool] = field(default_factory=dict[Pair, bool])

    @classmethod
    def of(cls, inner: tokenizers.Tokenizer) -> ExactCuts | None:
        """Return the cuts of a tokenizer that treats special tokens as text; None if no text may be cut."""
        added = [token for token in inner.get_added_tokens_decoder().values() if not token.special]
        if any(token.lstrip or token.rstrip or token.single_word for token in added):
            return None
        contents = [token.content for token in added]
        if inner.normalizer is not None:
            contents += [inner.normalizer.normalize_str(content) for content in contents]
        rewriting = _parts(_rule(inner.normalizer), "normalizers")
        last = rewriting[-1] if rewriting and rewriting[-1]["type"] == "Replace" else None
        absent = set(last["pattern"].get("String", "")) - set(last["content"]) if last else set[str]()
        try:
            stages = [_added_tokens(contents), *map(_rewriting, rewriting), _added_tokens(contents)]
            for rule in _parts(_rule(inner.pre_tokenizer), "pretokenizers"):
                stages += _word_stages(rule, absent)
        except UnsupportedRuleError:
            return None

        def encode(text: str) -> list[int]:
            return inner.encode(text, add_special_tokens=False).ids

        return cls(encode, stages, _Model(inner).joins)

    def allows(self, before: str, after: str) -> bool:
        """Return True if texts may be cut between two characters."""
        pair, ends = (before, after), False
        for stage in self.stages:
            if (result := stage(pair)) is None:
                return False
            pair, ends = result[0], ends or result[1]
        return ends or not self.joined(pair)

    def last(self, text: str, start: int, stop: int) -> int | None:
        """Return the last place from `start` to `stop` at which the text may be cut, or None."""
        for at in range(stop, start - 1, -1):
            pair = text[at - 1], text[at]
            if pair not in self.allowed:
                self.allowed[pair] = self.allows(*pair)
            if self.allowed[pair]:
                before, after = text[max(0, at - _WINDOW) : at], text[at : at + _WINDOW]
                if [*self.encode(before), *self.encode(after)] == [*self.encode(before + after)]:
                    return at
        return None


@cache
def trained_cuts() -> ExactCuts | None:
    """Return the cuts of every tokenizer that is trained here."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return ExactCuts.of(inner)


def _rule(part: Any) -> dict[str, Any] | None:
    """Return a part of a tokenizer as its file has it."""
    return None if part is None else json.loads(part.__getstate__())


def _parts(rule: dict[str, Any] | None, inside: str) -> list[dict[str, Any]]:
    """Return the steps of a rule that may be a sequence of them."""
    if rule is None:
        return []
    if rule["type"] != "Sequence":
        return [rule]
    return [step for part in rule[inside] for step in _parts(part, inside)]


def _added_tokens(contents: Sequence[str]) -> Stage:
    pairs = {pair for content in contents for pair in pairwise(content)}
    return lambda pair: None if pair in pairs else (pair, False)


def _rewriting(rule: dict[str, Any]) -> Stage:
    """Return the stage of a normalizer."""
    kind = rule["type"]
    if kind in ("NFC", "NFD", "NFKC", "NFKD"):
        return lambda pair: (
            (pair, False) if all(c in _STABLE and unicodedata.normalize(kind, c) == c for c in pair) else None
        )
    if kind == "Replace" and len(rule["pattern"].get("String", "")) == 1 and rule["content"]:
        old, new = rule["pattern"]["String"], rule["content"]

        def replaced(pair: Pair) -> tuple[Pair, bool]:
            before, after = pair
            return (new[-1] if before == old else before, new[0] if after == old else after), False

        return replaced
    raise UnsupportedRuleError(f"normalizer {kind}")


def _word_stages(rule: dict[str, Any], absent: Set[str]) -> list[Stage]:
    """Return the stages of a pre-tokenizer; `absent`: characters that the normalizers remove from texts."""
    kind = rule["type"]
    if kind == "Split":
        text: str = rule["pattern"].get("String", "")
        if absent & set(text):
            return []
        if rule["behavior"] not in ("Isolated", "Removed"):
            raise UnsupportedRuleError(f"behaviour {rule['behavior']}")
        return [_matching(rule["pattern"].get("Regex") or "".join(map(_literal, text)))]
    if kind == "Digits":
        return [_matching(r"\p{N}" if rule["individual_digits"] else r"\p{N}+")]
    if kind == "ByteLevel":
        matcher = [_matching(_BYTE_LEVEL_WORDS)] if rule.get("use_regex", True) else []
        return [_spaced_bytes, *matcher, _in_bytes] if rule["add_prefix_space"] else [*matcher, _in_bytes]
    if kind == "Metaspace":
        return [_metaspace(rule["replacement"], rule.get("split", True))]
    raise UnsupportedRuleError(f"pre-tokenizer {kind}")


def _literal(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"


def _matching(pattern: str) -> Stage:
    matcher = WordPattern(pattern)

    def stage(pair: Pair) -> tuple[Pair, bool] | None:
        return None if matcher.joins(*pair) else (pair, any(map(matcher.takes, pair)))

    return stage


def _spaced_bytes(pair: Pair) -> tuple[Pair, bool] | None:
    """A space is put before a text that does not begin with one."""
    return (pair, False) if pair[1] == " " else None


def _in_bytes(pair: Pair) -> tuple[Pair, bool]:
    before, after = (_BYTES.pre_tokenize_str(character)[0][0] for character in pair)
    return (before[-1], after[0]), False


def _metaspace(mark: str, split: bool) -> Stage:
    """Spaces become marks, and one is put before a text that does not begin with one."""

    def stage(pair: Pair) -> tuple[Pair, bool] | None:
        before, after = pair
        return ((before, mark), split) if after == " " and before not in (" ", mark) else None

    return stage


class _Model:
    """What a model of words may join where no word ends."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner

    @cached_property
    def _vocab(self) -> dict[str, int]:
        return self._inner.get_vocab(with_added_tokens=False)

    @cached_property
    def _pairs(self) -> set[Pair]:
        return {pair for token in self._vocab for pair in pairwise(token)}

    def joins(self, pair: Pair) -> bool:
        """Return True if characters side by side may be in one token: in a BPE only if an entry of its
        vocabulary has them side by side.
        """
        model = self._inner.model
        if not isinstance(model, models.BPE) or any(getattr(model, name) for name in _NOT_BY_PAIRS):
            return True
        return pair in self._pairs or not all(character in self._vocab for character in pair)


_NOT_BY_PAIRS = ("dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
