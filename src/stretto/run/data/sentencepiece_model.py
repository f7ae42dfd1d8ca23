"""Models of SentencePiece (Kudo & Richardson 2018) as objects of the `tokenizers` library with the same ids.

The `sentencepiece` package reads the `.model`, a protocol buffer. Token folders, checkpoints and exports keep
a `tokenizer.json`, so the model becomes one; models whose ids the library would not reproduce are refused.
Two differences remain: of two cuts into unigrams with the same score either may be chosen, and a text that is
nothing but a user-defined symbol lacks the space that a BPE with `add_dummy_prefix` puts before it.

SentencePiece rewrites text by a table (`precompiled_charsmap`): from the left, the longest run of characters
that has a rule is replaced; the rules are those of Unicode's NFKC and some more. The library's own
`Precompiled` handles single characters: of a letter with several accents it loses some. So text is cut where
SentencePiece cuts it, by marks that no text has; `Precompiled` rewrites the characters one by one; and NFC,
which does not reach across a mark, composes those of one rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from stretto.errors import StrettoError

SPACE = "▁"  # U+2581, which stands for a space
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED = range(1, 6)
_UNIGRAM, _BPE = 1, 2
_KINDS = {3: "WORD", 4: "CHAR"}
_NEVER = 1000.0
"""How far below all others a unigram scores that only its byte or its special token stands for."""
_INSTEAD = (
    "tokenise the text with SentencePiece itself, as Megatron's preprocess_data.py does, and name the PREFIX"
    " of the result as data.source with model.vocab=N"
)
_ESCAPE = "\ufff0"
"""Begins a mark. No character: it ends what a reader sees as a letter, and composes with nothing."""
_ITSELF, _CUT, _ALONE = (_ESCAPE + digit for digit in "012")
_JOINS = r"\p{M}\x{200C}\x{200D}\x{E33}\x{EB3}\x{1F3FB}-\x{1F3FF}\x{E0020}-\x{E007F}\x{16D67}"
"""Continues the letter before it: marks, joiners, colours of skin, tags."""
_PLANE = 0x10000


class _Piece(NamedTuple):
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The pieces, the specifications of trainer and normalizer (`sentencepiece_model.proto`), and the rules
    by which text is rewritten.
    """

    pieces: Sequence[_Piece]
    trainer: Any
    normalizer: Any
    rules: Mapping[str, str]

    @classmethod
    def parse(cls, path: Path, data: bytes) -> SentencePieceModel:
        """Read the content of a `.model`.

        Raises:
            StrettoError: damaged, or the package is missing.
        """
        try:
            from google.protobuf.message import DecodeError  # pyright: ignore[reportMissingImports]
            from sentencepiece import SentencePieceNormalizer  # pyright: ignore[reportMissingImports]
            from sentencepiece.sentencepiece_model_pb2 import (  # pyright: ignore[reportMissingImports]
                ModelProto,  # pyright: ignore[reportAttributeAccessIssue]
            )
        except ImportError:
            raise StrettoError(
                f"tokenizer {path}: a SentencePiece model, which takes the package sentencepiece",
                hint="pip install 'stretto[sentencepiece]'",
            ) from None
        model = ModelProto()
        try:
            model.ParseFromString(data)
            if not (model.HasField("trainer_spec") and model.HasField("normalizer_spec")):
                raise ValueError("it ends after its pieces")
            spec = model.normalizer_spec
            has_rules = bool(spec.precompiled_charsmap)
            return cls(
                pieces=[_Piece(piece.piece, piece.score, piece.type) for piece in model.pieces],
                trainer=model.trainer_spec,
                normalizer=spec,
                rules=dict(SentencePieceNormalizer(normalizer_spec=spec).decompile()) if has_rules else {},
            )
        except (DecodeError, ValueError, RuntimeError) as error:
            raise StrettoError(
                f"tokenizer {path}: damaged SentencePiece model ({error})", hint="copy it again"
            ) from None

    @cached_property
    def scores(self) -> dict[str, float]:
        """The score of each piece of plain text."""
        return {piece.text: piece.score for piece in self.pieces if piece.kind == _NORMAL}

    @cached_property
    def symbols(self) -> list[str]:
        """The user-defined symbols: each is a token wherever text spells it."""
        return [piece.text for piece in self.pieces if piece.kind == _USER]

    @cached_property
    def alphabet(self) -> set[str]:
        """The characters of all pieces of text."""
        return {character for text in (*self.scores, *self.symbols) for character in text}

    @cached_property
    def special_characters(self) -> set[str]:
        """The characters that special pieces are spelt with."""
        special = (piece.text for piece in self.pieces if piece.kind not in (_NORMAL, _USER))
        return {character for text in special for character in text}

    @cached_property
    def unknown(self) -> int | None:
        """The id of the piece for unknown text."""
        return next((i for i, piece in enumerate(self.pieces) if piece.kind == _UNKNOWN), None)

    @property
    def end(self) -> int | None:
        """The id of the piece that ends a text (`eos`)."""
        ending = (self.trainer.eos_piece, _CONTROL)
        return next((i for i, piece in enumerate(self.pieces) if (piece.text, piece.kind) == ending), None)


def is_sentencepiece(data: bytes) -> bool:
    """Return True if data begins as a model does: with a piece, whose first field is its text."""
    match = re.match(rb"\n([\x03-\x7f])\n([\x01-\x7f])", data, re.DOTALL)
    return match is not None and match[2][0] <= match[1][0] - 2


def read_sentencepiece(path: Path, data: bytes) -> tuple[tokenizers.Tokenizer, int | None]:
    """Return the tokenizer in the content of a `.model`, and the id of its end of text, if it has one.

    Raises:
        StrettoError: damaged, of a kind whose ids would differ, or the package is missing.
    """
    model = SentencePieceModel.parse(path, data)
    if problem := _unsupported(model):
        raise StrettoError(f"tokenizer {path}: a SentencePiece model {problem}", hint=_INSTEAD)
    is_unigram = model.trainer.model_type == _UNIGRAM
    inner = tokenizers.Tokenizer(_unigram(model) if is_unigram else _bpe(model))
    inner.normalizer = normalizers.Sequence(_normalizers(model))
    patterns = list[str]()
    if not any(re.search(f"[^{SPACE}]{SPACE}", text) for text in (*model.scores, *model.symbols)):
        # nothing is merged across the beginning of a word, and words are looked up once
        patterns.append(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
    if is_unigram and model.special_characters - model.alphabet:
        # text that spells `</s>` is no piece: a slash that pieces of text lack is cut out before
        patterns.append(f"[^{character_class(model.alphabet)}]+")
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    inner.pre_tokenizer = (
        pre_tokenizers.Sequence(splits) if len(splits) > 1 else splits[0] if splits else None
    )
    strips = model.normalizer.add_dummy_prefix or model.normalizer.remove_extra_whitespaces
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if strips else []),
        ]
    )
    inner.add_special_tokens([piece.text for piece in model.pieces if piece.kind in (_CONTROL, _UNKNOWN)])
    if not is_unigram:  # cut out before anything is merged; of unigrams the score decides
        inner.add_tokens([AddedToken(text, normalized=True, special=False) for text in model.symbols])
    return inner, model.end


def _unsupported(model: SentencePieceModel) -> str | None:
    """Return why the library would give other ids, or None if it gives the same."""
    kind = model.trainer.model_type
    if kind not in (_UNIGRAM, _BPE):
        return f"of kind {_KINDS.get(kind, kind)}; BPE and UNIGRAM are read"
    if (unused := next((piece.text for piece in model.pieces if piece.kind == _UNUSED), None)) is not None:
        return f"with unused pieces ({unused!r}), which are cut out of text in a way of their own"
    if (rule := unequal(model.rules)) is not None:
        return f"that rewrites text by rules of its own, such as {rule!r} (normalization_rule_name)"
    charsmap = model.normalizer.precompiled_charsmap
    rewritten = normalizers.Sequence(rewriting(charsmap, model.rules) if model.rules else [])
    for symbol in model.symbols:
        if " " in symbol or rewritten.normalize_str(symbol) != symbol:
            return f"with the user-defined symbol {symbol!r}, which its own rules would rewrite"
    if model.trainer.treat_whitespace_as_suffix:
        return "with treat_whitespace_as_suffix"
    if not model.normalizer.escape_whitespaces:
        return "with escape_whitespaces=false"
    if len({piece.text for piece in model.pieces}) < len(model.pieces):
        return "in which two pieces are alike"
    if model.unknown is None:
        return "without an unknown piece"
    inside = (model.special_characters & model.alphabet) - model.scores.keys()
    if kind == _UNIGRAM and inside:
        return f"of kind UNIGRAM with the character {min(inside)!r} of special pieces only inside of others"
    return None


def _normalizers(model: SentencePieceModel) -> list[normalizers.Normalizer]:
    rules, options = model.rules, model.normalizer
    steps = rewriting(options.precompiled_charsmap, rules, model.symbols) if rules else []
    prefix = [normalizers.Prepend(SPACE)] if options.add_dummy_prefix else []
    if options.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps += prefix
    else:  # before text of which the rules leave nothing, too
        steps = [*prefix, *steps]
    steps.append(normalizers.Replace(" ", SPACE))
    if options.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    if prefix and model.trainer.model_type == _BPE and model.symbols:
        # the library looks for symbols as the steps leave them: without the prefix
        symbols = "|".join(map(re.escape, model.symbols))
        steps.append(normalizers.Replace(Regex(rf"\A{SPACE}(?=(?:{symbols})\z)"), ""))
    return steps


def _unigram(model: SentencePieceModel) -> models.Unigram:
    scores = [*model.scores.values()] or [0.0]
    never, best = min(scores) - _NEVER, max(scores)
    vocab = list[tuple[str, float]]()
    for text, score, kind in model.pieces:
        symbol = len(text.encode()) * best - 0.1  # SentencePiece's own score
        vocab.append((text, score if kind == _NORMAL else symbol if kind == _USER else never))
    return models.Unigram(vocab, model.unknown, model.trainer.byte_fallback)


def _bpe(model: SentencePieceModel) -> models.BPE:
    """Two neighbours are merged if together they are a piece, those of the best score first."""
    scores = model.scores
    ids = {piece.text: i for i, piece in enumerate(model.pieces)}
    merges = list[tuple[str, str]]()
    for text in sorted(scores, key=lambda text: (-scores[text], ids[text])):
        cuts = [(text[:i], text[i:]) for i in range(1, len(text))]
        halves = [(a, b) for a, b in cuts if a in scores and b in scores]
        merges += sorted(halves, key=lambda half: (ids[half[0]], ids[half[1]]))
    assert model.unknown is not None
    unknown = model.pieces[model.unknown].text
    byte_fallback = model.trainer.byte_fallback
    return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)


# ---------------------------------------------------------------------- rewriting by the table


def unequal(rules: Mapping[str, str]) -> str | None:
    """Return a rule that `rewriting` would not follow, or None if it follows all (except for composing
    characters of scripts that are newer than the library's tables of Unicode, beyond U+FFFF).
    """
    several = [text for text in rules if len(text) > 1]
    if not several:
        return None
    composed = normalizers.NFC().normalize_str(
        _ESCAPE.join("".join(rules.get(c, c) for c in text) for text in several)
    )
    for text, result in zip(several, composed.split(_ESCAPE), strict=True):
        if result != rules[text] and max(map(ord, text)) < _PLANE:
            return text
    odd = (text for text in rules if text[0] in "012" + _ESCAPE or "\0" in text)
    return next(odd, None)


def rewriting(
    charsmap: bytes, rules: Mapping[str, str], protected: Sequence[str] = ()
) -> list[normalizers.Normalizer]:
    """Return the steps that rewrite text by the rules.

    Args:
        protected: texts that no rule changes or reaches into.
    """
    several = [text for text in rules if len(text) > 1]
    follow = {c for text in several for c in text[1:]}
    follow |= {c for c, new in rules.items() if len(c) == 1 and new[:1] in follow}
    joins = f"[{_JOINS}{character_class(follow)}]"
    symbols = "".join(f"{re.escape(text)}|" for text in sorted(protected, key=len, reverse=True))
    keys = f"(?:{_matching(several)}|(?m:.))" if several else "(?m:.)"
    removed = [text for text, new in rules.items() if len(text) == 1 and not new]
    return [
        normalizers.Replace(_ESCAPE, _ITSELF),
        normalizers.Replace(Regex(rf"(?:{symbols}(?=(?m:.){joins}){keys})\K"), _CUT),
        # Precompiled panics where it removes what a text begins with
        *([normalizers.Replace(Regex(f"[{character_class(removed)}]"), "")] if removed else []),
        normalizers.Replace(Regex(rf"(?!\A)(?={joins})|(?<=\r)(?=\n)"), _ALONE),
        normalizers.Precompiled(charsmap),
        normalizers.Replace(_ALONE, ""),
        normalizers.NFC(),
        normalizers.Replace(_CUT, ""),
        normalizers.Replace(_ITSELF, _ESCAPE),
    ]


def _matching(texts: Iterable[str]) -> str:
    """Return an expression for the longest of these texts; firsts with the same continuations share one."""
    tails = dict[str, set[str]]()
    for text in texts:
        tails.setdefault(text[0], set()).add(text[1:])
    alike = dict[frozenset[str], list[str]]()
    for first, continuations in tails.items():
        alike.setdefault(frozenset(continuations), []).append(first)
    branches = list[str]()
    for continuations, firsts in alike.items():
        longer = sorted(continuations - {""})
        tail = f"(?:{_matching(longer)})" + "?" * ("" in continuations) if longer else ""
        branches.append(f"[{character_class(firsts)}]{tail}")
    return "|".join(branches)


def character_class(characters: Iterable[str]) -> str:
    """Return the inside of a class of characters in a regular expression."""
    ranges = list[list[int]]()
    for code in sorted(map(ord, characters)):
        if ranges and code <= ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(rf"\x{{{a:X}}}" + (rf"-\x{{{b:X}}}" if b > a else "") for a, b in ranges)
