"""Tokenizers in the files of other programs, as objects of the `tokenizers` library that give the same ids.

GPT-2's `vocab.json` and `merges.txt` (Radford et al. 2019), rank files of tiktoken and Llama 3 (each line a
token in base64 and its rank), and models of SentencePiece (`run/data/sentencepiece_model.py`).
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from stretto.errors import StrettoError
from stretto.run.config.sources import tokenizer_at
from stretto.run.data.sentencepiece_model import is_sentencepiece, read_sentencepiece

TokenizerPath = str | os.PathLike[str] | Sequence[str]
END_OF_TEXT = "<|endoftext|>"
_MOST_IDS = 1 << 24
"""Ids of a tokenizer that are believed; the largest published vocabularies have 2^18."""
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Encoding:
    """What a rank file leaves out: the expression that cuts text into words, and the special tokens by id."""

    pattern: str
    special: dict[int, str]


# published encodings, by the number of their ranks
_ENCODINGS = {
    50_256: _Encoding(_GPT2, {50_256: END_OF_TEXT}),  # gpt2, r50k_base
    50_280: _Encoding(_GPT2, {50_256: END_OF_TEXT}),  # p50k_base, which has a gap there
    100_256: _Encoding(
        _CL100K,
        {
            100_257: END_OF_TEXT,
            100_258: "<|fim_prefix|>",
            100_259: "<|fim_middle|>",
            100_260: "<|fim_suffix|>",
            100_276: "<|endofprompt|>",
        },
    ),  # cl100k_base
    199_998: _Encoding(_O200K, {199_999: END_OF_TEXT, 200_018: "<|endofprompt|>"}),  # o200k_base
    128_000: _Encoding(
        _CL100K,
        {
            128_000: "<|begin_of_text|>",
            128_001: "<|end_of_text|>",
            128_006: "<|start_header_id|>",
            128_007: "<|end_header_id|>",
            128_009: "<|eot_id|>",
            128_255: "<|reserved_special_token_250|>",
        },
    ),  # Llama 3
}


def read_tokenizer(path: TokenizerPath) -> tokenizers.Tokenizer:
    """The tokenizer in a file of any of these kinds, in a folder that holds one, or in two files: a
    vocabulary and its merges, or ranks and the regular expression that cuts text into words.

    Raises:
        StrettoError: no such file, or not a tokenizer.
    """
    names = [path] if isinstance(path, str | os.PathLike) else list(path)
    files = [Path(name).expanduser() for name in names]
    where = ", ".join(map(str, files))
    if len(files) == 1:
        files = tokenizer_at(files[0]) or files
    for file in files:
        if not file.is_file():
            raise StrettoError(f"tokenizer {file}: no such file", hint=_KINDS)
    with _reading(where):
        return _read(files)


def parse_tokenizer(where: str, data: bytes) -> tokenizers.Tokenizer:
    """The tokenizer in the content of a `tokenizer.json`; `where` it came from, for messages.

    Raises:
        StrettoError: not a tokenizer.
    """
    with _reading(where):
        return _from_json(where, data)


@contextmanager
def _reading(where: str) -> Generator[None]:
    """What goes wrong while a tokenizer is read becomes a StrettoError."""
    try:
        yield
    except StrettoError:
        raise
    except OSError as error:
        raise StrettoError(
            f"tokenizer {where}: cannot be read: {error.strerror}", hint="check its permissions"
        ) from None
    except BaseException as error:  # the library raises bare Exception, and where it panics a BaseException
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError | GeneratorExit):
            raise
        raise _not_one(where, str(error)) from None


_KINDS = (
    "name a tokenizer.json, GPT-2's vocab.json with its merges.txt, a SentencePiece .model, a .tiktoken file,"
    " or a folder that holds one"
)


def _not_one(where: object, why: str) -> StrettoError:
    return StrettoError(f"tokenizer {where}: not a tokenizer file ({why})", hint=_KINDS)


def _read(files: Sequence[Path]) -> tokenizers.Tokenizer:
    if len(files) > 2:
        raise _not_one(", ".join(map(str, files)), f"{len(files)} files")
    data = files[0].read_bytes()
    if len(files) == 2:
        if data.lstrip()[:1] == b"{":
            return _from_merges(files[0], files[1])
        if files[1].read_bytes().lstrip()[:1] == b"{":
            return _from_merges(files[1], files[0])
        return _from_ranks(files[0], data, files[1].read_text(encoding="utf-8").strip("\n"))
    if data.lstrip()[:1] == b"{":
        return _from_json(files[0], data)
    if is_sentencepiece(data):
        return read_sentencepiece(files[0], data)
    if {b"[UNK]", b"[CLS]", b"[SEP]"} <= {line.strip() for line in data[: 1 << 20].splitlines()}:
        raise StrettoError(
            f"tokenizer {files[0]}: the vocabulary of a WordPiece (BERT's), which does not say how text is"
            " cleaned and whether it is lower-cased",
            hint=f"write its tokenizer.json: BertTokenizerFast({str(files[0])!r}, do_lower_case=...)"
            ".save_pretrained(DIR)",
        )
    if data.lstrip()[:1] == b"[":
        raise StrettoError(
            f"tokenizer {files[0]}: a JSON list, as Megatron's TikTokenizer has of its ranks, which says"
            " neither the special tokens before them nor the expression that cuts text into words",
            hint="name the PREFIX of text that Megatron has tokenised as data.source, with model.vocab=N",
        )
    return _from_ranks(files[0], data)


def _from_json(path: Path | str, data: bytes) -> tokenizers.Tokenizer:
    body: Any = json.loads(data)
    if len(body) >= 256 and all(type(value) is int for value in body.values()):
        raise StrettoError(
            f"tokenizer {path}: the vocabulary of a BPE without its merges",
            hint=f"put its merges.txt beside it, or name both: data.tokenizer=[{Path(path).name}, MERGES]",
        )
    if not isinstance(body.get("model"), dict):
        raise _not_one(path, "a JSON object without a model")
    # before the library allocates room for them
    model, added = body["model"], body.get("added_tokens") or []
    vocab: Any = model.get("vocab") or {}
    ids = [*(vocab.values() if isinstance(vocab, dict) else ()), *(token["id"] for token in added)]
    _check_ids(path, cast(list[Any], ids))
    return tokenizers.Tokenizer.from_str(data.decode())


def _check_ids(path: object, ids: Sequence[Any]) -> None:
    wrong = next((i for i in ids if type(i) is not int or not 0 <= i < _MOST_IDS), None)
    if wrong is not None:
        raise StrettoError(
            f"tokenizer {path}: a token has the id {wrong!r:.80}; ids are integers from 0 to {_MOST_IDS - 1}",
            hint="copy the file again, or name another",
        )


def _byte_level(model: models.BPE, pattern: str | None = None) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    if pattern is None:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    inner.decoder = decoders.ByteLevel()
    return inner


def _from_merges(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    """GPT-2's files; those of its kind whose text is cut into words in another way are refused."""
    config = vocab.parent / "tokenizer_config.json"
    if config.is_file():
        kind = str(json.loads(config.read_bytes()).get("tokenizer_class", "GPT2Tokenizer"))
        if kind.removesuffix("Fast") != "GPT2Tokenizer":
            raise StrettoError(
                f"tokenizer {vocab}: of {kind}, whose words {config.name} does not describe",
                hint=f"write its tokenizer.json: AutoTokenizer.from_pretrained({str(vocab.parent)!r})"
                ".save_pretrained(DIR)",
            )
    ids: Any = json.loads(vocab.read_bytes())
    _check_ids(vocab, list(ids.values()))
    inner = _byte_level(models.BPE.from_file(str(vocab), str(merges)))
    special = [token for token in (END_OF_TEXT, "</s>", "<s>", "<pad>", "<unk>", "<mask>") if token in ids]
    inner.add_special_tokens(special)
    return inner


def _from_ranks(path: Path, data: bytes, pattern: str | None = None) -> tokenizers.Tokenizer:
    """tiktoken's ranks; every way of cutting a token in two known ones is a merge of its rank."""
    ranks = _ranks(path, data)
    known = _ENCODINGS.get(len(ranks))
    if known is None or pattern is not None:
        if pattern is None:
            raise StrettoError(
                f"tokenizer {path}: {len(ranks)} ranks, as no published encoding has; the expression that"
                " cuts text into words is not in the file",
                hint="write it into a file, and name both: "
                f"data.tokenizer=[{path.name}, PATTERN.txt]; known are files of "
                + ", ".join(map(str, _ENCODINGS)),
            )
        end = max(ranks.values()) + 1
        known = _Encoding(pattern, {end: END_OF_TEXT})
    alphabet = _alphabet()
    spelt = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    merges = list[tuple[str, str]]()
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        halves = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        merges += [(spelt[a], spelt[b]) for a, b in sorted(halves, key=lambda h: (ranks[h[0]], ranks[h[1]]))]
    vocab = {spelt[token]: rank for token, rank in ranks.items()}
    taken, top = set(ranks.values()), max(ranks.values())
    # ids that are neither rank nor special token have a name too: the library numbers without gaps
    others = {
        i: known.special.get(i, f"<|reserved_{i}|>")
        for i in range(max(top, *known.special) + 1)
        if i not in taken
    }
    vocab |= {name: i for i, name in others.items() if i < top}
    inner = _byte_level(models.BPE(vocab, merges, ignore_merges=True), known.pattern)
    inner.add_special_tokens(list(others.values()))
    return inner


def _ranks(path: Path, data: bytes) -> dict[bytes, int]:
    ranks = dict[bytes, int]()
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise _not_one(path, f"line {number} is not a token in base64 and its rank") from None
    if len({token for token in ranks if len(token) == 1}) != 256:
        raise _not_one(path, "not all 256 bytes have a rank")
    _check_ids(path, list(ranks.values()))
    if len(set(ranks.values())) != len(ranks):
        raise _not_one(path, "two tokens have one rank")
    return ranks


def _alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    shown = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [shown[byte] for byte in range(256)]
