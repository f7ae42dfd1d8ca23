"""Cuts of long texts that leave their tokens as they are, so that all cores encode one text.

A text may be cut between two characters if every stage of its tokenizer is the same for both parts as for the
text: what rewrites characters does not join the two, no added token holds both, no word does (`WordPattern`),
and either a word ends there or no entry of a BPE's vocabulary holds both. Where a stage is of another kind, a
text is not cut. Nothing here is a guess; the tokens around each cut are compared nevertheless.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import tokenizers
from tokenizers import models
from tokenizers.pre_tokenizers import ByteLevel

from stretto.run.data.word_pattern import UnsupportedRuleError, WordPattern

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
    """Where texts may be cut for one tokenizer."""

    encode: Callable[[str], Sequence[int]]
    stages: Sequence[Stage]
    joined: Callable[[Pair], bool]  # by the model, where no word ends
    allowed: dict[Pair, bool] = field(default_factory=dict[Pair, bool])

    @classmethod
    def of(cls, inner: tokenizers.Tokenizer) -> ExactCuts | None:
        """Those of a tokenizer that takes special tokens for text; None where no text may be cut."""
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
        """Whether texts may be cut between two characters."""
        pair, ends = (before, after), False
        for stage in self.stages:
            if (result := stage(pair)) is None:
                return False
            pair, ends = result[0], ends or result[1]
        return ends or not self.joined(pair)

    def last(self, text: str, start: int, stop: int) -> int | None:
        """The last place from `start` to `stop` at which the text may be cut; None: there is none."""
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
    """Those of every tokenizer that is trained here."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return ExactCuts.of(inner)


def _rule(part: Any) -> dict[str, Any] | None:
    """A part of a tokenizer as its file has it."""
    return None if part is None else json.loads(part.__getstate__())


def _parts(rule: dict[str, Any] | None, inside: str) -> list[dict[str, Any]]:
    """The steps of a rule that may be a sequence of them."""
    if rule is None:
        return []
    if rule["type"] != "Sequence":
        return [rule]
    return [step for part in rule[inside] for step in _parts(part, inside)]


def _added_tokens(contents: Sequence[str]) -> Stage:
    pairs = {pair for content in contents for pair in pairwise(content)}
    return lambda pair: None if pair in pairs else (pair, False)


def _rewriting(rule: dict[str, Any]) -> Stage:
    """The stage of a normalizer."""
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
    """The stages of a pre-tokenizer; `absent`: characters that a text has no longer."""
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
        words = [_matching(_BYTE_LEVEL_WORDS)] if rule.get("use_regex", True) else []
        return [_spaced_bytes, *words, _in_bytes] if rule["add_prefix_space"] else [*words, _in_bytes]
    if kind == "Metaspace":
        return [_metaspace(rule["replacement"], rule.get("split", True))]
    raise UnsupportedRuleError(f"pre-tokenizer {kind}")


def _literal(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"


def _matching(pattern: str) -> Stage:
    words = WordPattern(pattern)

    def stage(pair: Pair) -> tuple[Pair, bool] | None:
        return None if words.joins(*pair) else (pair, any(map(words.takes, pair)))

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
        """Whether characters side by side may be in one token: of a BPE only if they are so in an entry of
        its vocabulary.
        """
        model = self._inner.model
        if not isinstance(model, models.BPE) or any(getattr(model, name) for name in _NOT_BY_PAIRS):
            return True
        return pair in self._pairs or not all(character in self._vocab for character in pair)


_NOT_BY_PAIRS = ("dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
