"""Models of SentencePiece (Kudo & Richardson 2018) as objects of the `tokenizers` library.

The `.model` is a protocol buffer of the message `ModelProto` in SentencePiece's `sentencepiece_model.proto`;
only the fields named here are read. Models whose ids the library would not reproduce are refused. Two
differences remain: of two cuts into unigrams with the same score either may be chosen, and a text that is
nothing but a user-defined symbol lacks the space that a BPE with `add_dummy_prefix` puts before it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from stretto.errors import StrettoError
from stretto.run.data.charsmap import character_class, rewriting, rules_of, unequal

SPACE = "▁"  # U+2581, which stands for a space
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2
_KINDS = {3: "WORD", 4: "CHAR"}
_NEVER = 1000.0
"""How far below all others a unigram scores that only its byte or its special token stands for."""
_INSTEAD = (
    "tokenise the text with SentencePiece itself, as Megatron's preprocess_data.py does, and name the PREFIX"
    " of the result as data.source with model.vocab=N"
)


@dataclass(frozen=True)
class _Piece:
    text: str
    score: float
    kind: int


@dataclass(kw_only=True)
class _Model:
    """The fields of the message that decide about ids, with the format's defaults."""

    pieces: list[_Piece] = field(default_factory=list[_Piece])
    kind: int = _UNIGRAM
    byte_fallback: bool = False
    suffix: bool = False
    """Whether the space belongs to the word before it."""
    charsmap: bytes = b""
    prefix: bool = True
    """Whether text begins with a space that it does not have."""
    trim: bool = True
    """Whether spaces at the ends and repeated ones are removed."""
    escape: bool = True
    ending: str = "</s>"

    @property
    def end(self) -> int | None:
        """The piece that ends a text (`eos`)."""
        ends = (
            i for i, piece in enumerate(self.pieces) if (piece.text, piece.kind) == (self.ending, _CONTROL)
        )
        return next(ends, None)

    @property
    def alphabet(self) -> set[str]:
        """The characters that pieces of text consist of."""
        return {letter for piece in self.pieces if piece.kind in (_NORMAL, _USER) for letter in piece.text}

    @property
    def spelling(self) -> set[str]:
        """The characters that special pieces are spelt with."""
        return {
            letter for piece in self.pieces if piece.kind not in (_NORMAL, _USER) for letter in piece.text
        }

    @property
    def symbols(self) -> list[str]:
        """What is always a token where text spells it."""
        return [piece.text for piece in self.pieces if piece.kind == _USER]


def is_sentencepiece(data: bytes) -> bool:
    """Whether data begins as a model does: with a piece that has a text."""
    try:
        number, value = next(_fields(data[: 1 << 16], partial=True))
        return number == 1 and isinstance(value, bytes) and any(n == 1 for n, _ in _fields(value))
    except (ValueError, StopIteration):
        return False


def read_sentencepiece(path: Path, data: bytes) -> tuple[tokenizers.Tokenizer, int | None]:
    """The tokenizer in the content of a `.model`, and the id of its end of text, if it has one.

    Raises:
        StrettoError: damaged, or of a kind whose ids would differ.
    """
    try:
        model = _parse(data)
        rules = rules_of(model.charsmap) if model.charsmap else {}
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        raise StrettoError(
            f"tokenizer {path}: damaged SentencePiece model ({error})", hint="copy it again"
        ) from None
    if why := _different(model, rules):
        raise StrettoError(f"tokenizer {path}: a SentencePiece model {why}", hint=_INSTEAD)
    inner = tokenizers.Tokenizer(_unigram(model) if model.kind == _UNIGRAM else _bpe(model))
    inner.normalizer = normalizers.Sequence(_normalizers(model, rules))
    cuts = list[str]()
    if not any(re.search(f"[^{SPACE}]{SPACE}", p.text) for p in model.pieces if p.kind in (_NORMAL, _USER)):
        # nothing is merged across the beginning of a word, and words are looked up once
        cuts.append(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
    if model.kind == _UNIGRAM and model.spelling - model.alphabet:
        # text that spells `</s>` is no piece: a slash that pieces of text lack is cut out before
        cuts.append(f"[^{character_class(model.alphabet)}]+")
    splits = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    inner.pre_tokenizer = (
        pre_tokenizers.Sequence(splits) if len(splits) > 1 else splits[0] if splits else None
    )
    strip = [decoders.Strip(" ", 1, 0)] if model.prefix or model.trim else []
    inner.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    inner.add_special_tokens([p.text for p in model.pieces if p.kind in (_CONTROL, _UNKNOWN)])
    if model.kind == _BPE:  # cut out before anything is merged; of unigrams the score decides
        inner.add_tokens([AddedToken(text, normalized=True, special=False) for text in model.symbols])
    return inner, model.end


def _different(model: _Model, rules: Mapping[str, str]) -> str | None:
    """Why the library would give other ids; None where it gives the same."""
    if model.kind not in (_UNIGRAM, _BPE):
        return f"of kind {_KINDS.get(model.kind, model.kind)}; BPE and UNIGRAM are read"
    if (unused := next((p.text for p in model.pieces if p.kind == _UNUSED), None)) is not None:
        return f"with unused pieces ({unused!r}), which are cut out of text in a way of their own"
    if (rule := unequal(rules)) is not None:
        return f"that rewrites text by rules of its own, such as {rule!r} (normalization_rule_name)"
    rewritten = normalizers.Sequence(rewriting(model.charsmap, rules) if rules else [])
    for symbol in model.symbols:
        if " " in symbol or rewritten.normalize_str(symbol) != symbol:
            return f"with the user-defined symbol {symbol!r}, which its own rules would rewrite"
    if model.suffix:
        return "with treat_whitespace_as_suffix"
    if not model.escape:
        return "with escape_whitespaces=false"
    if len({piece.text for piece in model.pieces}) < len(model.pieces):
        return "in which two pieces are alike"
    if not any(piece.kind == _UNKNOWN for piece in model.pieces):
        return "without an unknown piece"
    normal = {piece.text for piece in model.pieces if piece.kind == _NORMAL}
    others = (model.spelling & model.alphabet) - normal
    if model.kind == _UNIGRAM and others:
        return f"of kind UNIGRAM with the character {min(others)!r} of special pieces only inside of others"
    return None


def _normalizers(model: _Model, rules: Mapping[str, str]) -> list[normalizers.Normalizer]:
    steps = rewriting(model.charsmap, rules, model.symbols) if rules else []
    prefix = [normalizers.Prepend(SPACE)] if model.prefix else []
    if model.trim:
        steps.append(normalizers.Replace(Regex(r"\A +"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps += prefix
    else:  # before text of which the rules leave nothing, too
        steps = [*prefix, *steps]
    steps.append(normalizers.Replace(" ", SPACE))
    if model.trim:
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    if model.prefix and model.kind == _BPE and model.symbols:
        # the library looks for symbols as the steps leave them: without the prefix
        alone = "|".join(map(re.escape, model.symbols))
        steps.append(normalizers.Replace(Regex(rf"\A{SPACE}(?=(?:{alone})\z)"), ""))
    return steps


def _unigram(model: _Model) -> models.Unigram:
    scores = [p.score for p in model.pieces if p.kind == _NORMAL] or [0.0]
    vocab = [
        (
            p.text,
            p.score
            if p.kind == _NORMAL
            else len(p.text.encode()) * max(scores) - 0.1  # SentencePiece's own score
            if p.kind == _USER
            else min(scores) - _NEVER,
        )
        for p in model.pieces
    ]
    unknown = next(i for i, p in enumerate(model.pieces) if p.kind == _UNKNOWN)
    return models.Unigram(vocab, unknown, model.byte_fallback)


def _bpe(model: _Model) -> models.BPE:
    """Two neighbours are merged where together they are a piece, those of the best score first."""
    normal = {p.text: p.score for p in model.pieces if p.kind == _NORMAL}
    ids = {p.text: i for i, p in enumerate(model.pieces)}
    merges = list[tuple[str, str]]()
    for text in sorted(normal, key=lambda text: (-normal[text], ids[text])):
        cuts = [(text[:i], text[i:]) for i in range(1, len(text))]
        halves = [(a, b) for a, b in cuts if a in normal and b in normal]
        merges += sorted(halves, key=lambda half: (ids[half[0]], ids[half[1]]))
    unknown = next(p.text for p in model.pieces if p.kind == _UNKNOWN)
    return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)


def _parse(data: bytes) -> _Model:
    model, parts = _Model(), set[int]()
    for number, value in _fields(data):
        parts.add(number)
        if number == 1:
            model.pieces.append(_piece(_bytes(value)))
        elif number == 2:
            trainer = dict(_fields(_bytes(value)))
            model.kind = _int(trainer.get(3, _UNIGRAM))
            model.suffix = bool(trainer.get(24, 0))
            model.byte_fallback = bool(trainer.get(35, 0))
            model.ending = _bytes(trainer.get(47, b"</s>")).decode()
        elif number == 3:
            normalizer = dict(_fields(_bytes(value)))
            model.charsmap = _bytes(normalizer.get(2, b""))
            model.prefix = bool(normalizer.get(3, 1))
            model.trim = bool(normalizer.get(4, 1))
            model.escape = bool(normalizer.get(5, 1))
    if not {1, 2, 3} <= parts:
        raise ValueError("it ends after its pieces")
    return model


def _piece(data: bytes) -> _Piece:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", _bytes(fields.get(2, b"\0\0\0\0")))
    return _Piece(_bytes(fields.get(1, b"")).decode(), score, _int(fields.get(3, _NORMAL)))


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes belong")
    return value


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes where a number belongs")
    return value


def _fields(data: bytes, partial: bool = False) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of the fields of a message (protobuf's wire format): integers as such, everything
    else as bytes; `partial`: the message may be cut off.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if not number or (at + size > len(data) and not partial):
            raise ValueError(f"field {number} of {size} bytes at byte {at} of {len(data)}")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer in seven bits a byte, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("cut off")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError(f"an integer of more than 10 bytes at byte {at}")
