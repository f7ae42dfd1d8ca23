"""Byte-level BPE in files of ranks: tiktoken's (also Llama 3's, Llama 4's and Whisper's), each line a token
in base64 and its rank; tiktoken's JSON, as Claude's; and Mistral's tekken.

Text is cut into words by a regular expression, and in each word the two neighbours are joined that together
have the lowest rank. Of two files with the same number of ranks one may be GPT-4's and one anybody's: which
encoding a file without an expression is of, its checksum says.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from stretto.errors import StrettoError

END_OF_TEXT = "<|endoftext|>"
_FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_BEGIN, _END = "<|begin_of_text|>", "<|end_of_text|>"  # of Llama 3 and 4
_MOST_IDS = 1 << 24
"""Ids above this are taken for damage; the largest published vocabularies have 2^18."""
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


@dataclass(frozen=True, kw_only=True)
class _Encoding:
    """The parts of an encoding that its rank file lacks: the expression that cuts text into words, the
    special tokens by id, and which of them ends a text, and begins one.
    """

    name: str
    pattern: str
    special: Mapping[int, str]
    end: str | None = END_OF_TEXT
    begin: str | None = None


def _reserved(family: str, numbers: Iterable[int]) -> list[str]:
    return [f"<|{family}reserved_special_token_{number}|>" for number in numbers]


def _llama_4() -> dict[int, str]:
    vision = _reserved("vision_", range(1048))
    names = [_BEGIN, _END, *_FIM, "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>"]
    names += _reserved("text_post_train_", range(6))
    names += ["<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>"]
    names += _reserved("text_post_train_", range(8, 69))
    names += ["<|image_start|>", "<|image_end|>", *vision[:2], "<|tile_x_separator|>", "<|tile_y_separator|>"]
    names += [*vision[2:6], "<|image|>", vision[6], "<|patch|>", *vision[7:]]
    names += _reserved("reasoning_", range(8))
    names += ["<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>"]
    return dict(enumerate([*names, *_reserved("", range(2048 - len(names)))], 200_000))


_CLAUDE = "58dad83d85e9cd57be209172449ebfbc395df2b455c11fe8b7e5b661e6f462ad"

# published rank files, by their SHA-256
_ENCODINGS = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": _Encoding(
        name="gpt2 (r50k_base)", pattern=_GPT2, special={50_256: END_OF_TEXT}
    ),
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": _Encoding(
        name="p50k_base", pattern=_GPT2, special={50_256: END_OF_TEXT}
    ),
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": _Encoding(
        name="cl100k_base",
        pattern=_CL100K,
        special={100_257: END_OF_TEXT, **dict(enumerate(_FIM, 100_258)), 100_276: "<|endofprompt|>"},
    ),
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": _Encoding(
        name="o200k_base", pattern=_O200K, special={199_999: END_OF_TEXT, 200_018: "<|endofprompt|>"}
    ),
    "b34b360dbb493e781e479794586d661700670d65564001f23024971d1f2fa126": _Encoding(
        # those after them depend on the number of languages
        name="Whisper's multilingual",
        pattern=_GPT2,
        special={50_257: END_OF_TEXT, 50_258: "<|startoftranscript|>"},
    ),
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": _Encoding(
        name="Llama 3",
        pattern=_CL100K,
        special={
            128_000: _BEGIN,
            128_001: _END,
            128_006: "<|start_header_id|>",
            128_007: "<|end_header_id|>",
            128_009: "<|eot_id|>",
            128_255: "<|reserved_special_token_250|>",
        },
        end=_END,
        begin=_BEGIN,
    ),
    "d0bdbaf59b0762c8c807617e2d8ea51420eb1b1de266df2495be755c8e0ed6ed": _Encoding(
        name="Llama 4",
        pattern=_O200K,
        special=_llama_4(),
        end=_END,
        begin=_BEGIN,
    ),
}

Read = tuple[tokenizers.Tokenizer, int | None]
"""A tokenizer, and the id of the end of text, if the format names it."""


def from_ranks(path: Path, data: bytes, pattern: str | None = None, ids: Sequence[int] = ()) -> Read:
    """Return the tokenizer in a rank file, of a published encoding or with the expression that cuts text into
    words.

    Args:
        ids: ids of special tokens that the user names, for a file of no published encoding.

    Raises:
        StrettoError: not a rank file; neither published nor with an expression.
    """
    ranks = _parse_lines(path, data)
    canonical = b"".join(
        (base64.b64encode(token) or b"=") + b" %d\n" % ranks[token]
        for token in sorted(ranks, key=ranks.__getitem__)
    )
    digests = [hashlib.sha256(content).hexdigest() for content in (data, canonical)]
    encoding = next((_ENCODINGS[digest] for digest in digests if digest in _ENCODINGS), None)
    if encoding is None and pattern is None:
        raise StrettoError(
            f"tokenizer {path}: {len(ranks)} ranks of no published encoding; the expression that cuts text"
            " into words is not in the file",
            hint=f"write it into a file, and name both: data.tokenizer=[{path.name}, PATTERN.txt], with"
            f" data.end_of_text=ID; known are {', '.join(encoding.name for encoding in _ENCODINGS.values())}",
        )
    if encoding is None:
        check_ids(path, ids)
        taken = set(ranks.values())
        special = {id_: f"<|special_{id_}|>" for id_ in ids if id_ not in taken}
        encoding = _Encoding(name=path.name, pattern="", special=special, end=None)
    return _built(path, ranks, encoding if pattern is None else replace(encoding, pattern=pattern))


def from_tiktoken_json(path: Path | str, data: bytes, body: Mapping[str, Any]) -> Read:
    """Return the tokenizer in the JSON of tiktoken's ports: `pat_str`, `special_tokens` and `bpe_ranks`, a
    text of lines with the rank of their first token.

    Raises:
        StrettoError: damaged.
    """
    ranks = dict[bytes, int]()
    for number, line in enumerate(str(body["bpe_ranks"]).splitlines(), 1):
        try:
            _, first, *tokens = line.split()
            ranks |= {
                base64.b64decode(token, validate=True): int(first) + i for i, token in enumerate(tokens)
            }
        except (ValueError, binascii.Error):
            raise not_a_tokenizer(path, f"line {number} of bpe_ranks is not a rank and tokens") from None
    special = {int(id_): str(text) for text, id_ in dict(body["special_tokens"]).items()}
    _check_ranks(path, ranks)
    check_ids(path, list(special))
    unnamed = _Encoding(name="", pattern=str(body["pat_str"]), special=special, end=None)
    inner, _ = _built(path, ranks, unnamed)
    if hashlib.sha256(data).hexdigest() == _CLAUDE:  # its package does this before
        inner.normalizer = normalizers.NFKC()
    return inner, None


_TEKKEN = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
"""The special tokens of rank files that do not list them."""


def from_tekken(path: Path | str, body: Mapping[str, Any]) -> Read:
    """Return the tokenizer in a `tekken.json`: ids are those of the special tokens, then ranks, as many as
    the vocabulary has room for.

    Raises:
        StrettoError: damaged.
    """
    config, special = body["config"], dict[int, str]()
    count, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
    listed: Any = body.get("special_tokens")
    if listed is None:
        listed = [{"rank": rank, "token_str": text} for rank, text in enumerate(_TEKKEN)]
    for token in listed:
        special[int(token["rank"])] = str(token["token_str"])
    if not 0 <= count <= size <= _MOST_IDS or any(not 0 <= id_ < count for id_ in special):
        raise not_a_tokenizer(path, f"{count} special tokens of {size}")
    special = {id_: special.get(id_, f"<SPECIAL_{id_}>") for id_ in range(count)}
    ranks = dict[bytes, int]()
    for entry in cast("list[Any]", body["vocab"])[: size - count]:
        ranks[base64.b64decode(entry["token_bytes"], validate=True)] = int(entry["rank"]) + count
    if sorted(ranks.values()) != [*range(count, size)]:
        raise not_a_tokenizer(path, f"its ranks do not fill a vocabulary of {size}")
    _check_ranks(path, ranks)
    names = special.values()
    end, begin = ("</s>" if "</s>" in names else None), ("<s>" if "<s>" in names else None)
    pattern = str(config["pattern"])
    encoding = _Encoding(name="tekken", pattern=pattern, special=special, end=end, begin=begin)
    return _built(path, ranks, encoding)


def _built(path: Path | str, ranks: Mapping[bytes, int], encoding: _Encoding) -> Read:
    """Build the tokenizer: each pair of tokens that makes up a token is a merge, in the order of its rank."""
    ranks = {token: rank for token, rank in ranks.items() if token}  # no text has Whisper's empty token
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
        id_: encoding.special.get(id_, f"<|reserved_{id_}|>")
        for id_ in range(max(top, *encoding.special, top) + 1)
        if id_ not in taken
    }
    if (twice := next((name for name in others.values() if name in vocab), None)) is not None:
        raise not_a_tokenizer(path, f"{twice!r} is a special token and text")
    vocab |= {name: id_ for id_, name in others.items() if id_ < top}
    inner = byte_level(models.BPE(vocab, merges, ignore_merges=True), encoding.pattern)
    inner.add_special_tokens(list(others.values()))
    if encoding.begin is not None:
        begin = (encoding.begin, inner.token_to_id(encoding.begin))
        inner.post_processor = processors.TemplateProcessing(
            single=f"{encoding.begin} $A", pair=f"{encoding.begin} $A $B", special_tokens=[begin]
        )
    return inner, None if encoding.end is None else inner.token_to_id(encoding.end)


def byte_level(model: models.BPE, pattern: str | None = None) -> tokenizers.Tokenizer:
    """Return a tokenizer of bytes; `pattern` cuts text into words, by default GPT-2's."""
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


def check_ids(path: object, ids: Sequence[Any]) -> None:
    """Raise StrettoError unless all are ids that a vocabulary may have."""
    wrong = next((i for i in ids if type(i) is not int or not 0 <= i < _MOST_IDS), None)
    if wrong is not None:
        raise StrettoError(
            f"tokenizer {path}: a token has the id {wrong!r:.80}; ids are integers from 0 to {_MOST_IDS - 1}",
            hint="copy the file again, or name another",
        )


def not_a_tokenizer(path: object, reason: str) -> StrettoError:
    """Return the error for a file that is not a rank file."""
    return StrettoError(f"tokenizer {path}: not a tokenizer file ({reason})", hint=KINDS)


KINDS = (
    "name a tokenizer.json, GPT-2's vocab.json with its merges.txt, a SentencePiece .model, a .tiktoken file,"
    " a tekken.json, or a folder that holds one"
)


def _parse_lines(path: Path, data: bytes) -> dict[bytes, int]:
    ranks = dict[bytes, int]()
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            text = b"" if token == b"=" else base64.b64decode(token, validate=True)
            if text in ranks:
                raise not_a_tokenizer(path, f"line {number} has a token that has a rank already")
            ranks[text] = int(rank)
        except (UnicodeDecodeError, binascii.Error, ValueError) as error:
            if isinstance(error, StrettoError):
                raise
            raise not_a_tokenizer(path, f"line {number} is not a token in base64 and its rank") from None
    _check_ranks(path, ranks)
    return ranks


def _check_ranks(path: Path | str, ranks: Mapping[bytes, int]) -> None:
    if len({token for token in ranks if len(token) == 1}) != 256:
        raise not_a_tokenizer(path, "not all 256 bytes have a rank")
    check_ids(path, list(ranks.values()))
    if len(set(ranks.values())) != len(ranks):
        raise not_a_tokenizer(path, "two tokens have one rank")


def _alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    shown = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [shown[byte] for byte in range(256)]
