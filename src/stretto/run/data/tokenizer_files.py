"""Tokenizers in the files of other programs, as objects of the `tokenizers` library that give the same ids.

GPT-2's `vocab.json` and `merges.txt` (Radford et al. 2019), files of ranks (`run/data/rank_files.py`), and
models of SentencePiece (`run/data/sentencepiece_model.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import models

from stretto.errors import StrettoError
from stretto.run.config.sources import tokenizer_at
from stretto.run.data.rank_files import (
    END_OF_TEXT,
    KINDS,
    Read,
    byte_level,
    check_ids,
    from_ranks,
    from_tekken,
    from_tiktoken_json,
    not_a_tokenizer,
)
from stretto.run.data.sentencepiece_model import is_sentencepiece, read_sentencepiece

TokenizerPath = str | os.PathLike[str] | Sequence[str]


def read_tokenizer(path: TokenizerPath, ids: Sequence[int] = ()) -> Read:
    """Return the tokenizer in a file of any of these kinds, in a folder that holds one, or in two files: a
    vocabulary and its merges, or ranks and the regular expression that cuts text into words; and the end of
    text that the format itself names, if it does.

    Args:
        ids: ids of special tokens that the user names, for formats that do not.

    Raises:
        StrettoError: no such file, or not a tokenizer.
    """
    names = [path] if isinstance(path, str | os.PathLike) else list(path)
    files = [Path(name).expanduser() for name in names]
    origin = ", ".join(map(str, files))
    if len(files) == 1:
        files = tokenizer_at(files[0]) or files
    for file in files:
        if not file.is_file():
            raise StrettoError(f"tokenizer {file}: no such file", hint=KINDS)
    with _reading(origin):
        return _read(files, ids)


def parse_tokenizer(origin: str, data: bytes) -> tokenizers.Tokenizer:
    """Return the tokenizer in the content of a `tokenizer.json`; `origin`: its file, for messages.

    Raises:
        StrettoError: not a tokenizer.
    """
    with _reading(origin):
        return _from_json(origin, data)[0]


@contextmanager
def _reading(origin: str) -> Generator[None]:
    """Turn errors while a tokenizer is read into a StrettoError."""
    try:
        with library_errors(lambda reason: not_a_tokenizer(origin, reason)):
            yield
    except OSError as error:
        raise StrettoError(
            f"tokenizer {origin}: cannot be read: {error.strerror}", hint="check its permissions"
        ) from None


@contextmanager
def library_errors(named: Callable[[str], StrettoError]) -> Generator[None]:
    """Turn errors of the library into a StrettoError. It raises bare Exception, and if it panics a
    BaseException.

    Args:
        named: returns the error for a reason.
    """
    try:
        yield
    except (StrettoError, OSError, KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit):
        raise
    except BaseException as error:
        raise named(str(error)) from None


def _read(files: Sequence[Path], ids: Sequence[int]) -> Read:
    if len(files) > 2:
        raise not_a_tokenizer(", ".join(map(str, files)), f"{len(files)} files")
    data = files[0].read_bytes()
    if len(files) == 2:
        if data.lstrip()[:1] == b"{":
            return _from_merges(files[0], files[1])
        if files[1].read_bytes().lstrip()[:1] == b"{":
            return _from_merges(files[1], files[0])
        return from_ranks(files[0], data, files[1].read_text(encoding="utf-8").strip("\n"), ids)
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
    return from_ranks(files[0], data)


def _from_json(path: Path | str, data: bytes) -> Read:
    body: Any = json.loads(data)
    if "bpe_ranks" in body:
        return from_tiktoken_json(path, data, body)
    if isinstance(body.get("vocab"), list) and "default_num_special_tokens" in body.get("config", {}):
        return from_tekken(path, body)
    if len(body) >= 256 and all(type(value) is int for value in body.values()):
        raise StrettoError(
            f"tokenizer {path}: the vocabulary of a BPE without its merges",
            hint=f"put its merges.txt beside it, or name both: data.tokenizer=[{Path(path).name}, MERGES]",
        )
    if not isinstance(body.get("model"), dict):
        raise not_a_tokenizer(path, "a JSON object without a model")
    # before the library allocates room for them
    model, added = body["model"], body.get("added_tokens") or []
    vocab: Any = model.get("vocab") or {}
    ids = [*(vocab.values() if isinstance(vocab, dict) else ()), *(token["id"] for token in added)]
    check_ids(path, cast(list[Any], ids))
    unknown = model.get("unk_token")
    if isinstance(vocab, dict) and isinstance(unknown, str) and unknown not in vocab:
        raise StrettoError(
            f"tokenizer {path}: its unk_token {unknown!r} is not in its vocabulary, so text that it does not"
            " know has no tokens",
            hint="copy the file again, or take an unk_token of its vocabulary",
        )
    steps = json.dumps([body.get("normalizer"), body.get("pre_tokenizer")])
    by_bytes = "ByteLevel" in steps or model.get("byte_fallback")
    if model.get("type") == "BPE" and unknown is None and not by_bytes:
        raise StrettoError(
            f"tokenizer {path}: a BPE of characters without unk_token, which leaves out of a text what it"
            " does not know, without a sign",
            hint="give it an unk_token of its vocabulary, or byte_fallback",
        )
    return tokenizers.Tokenizer.from_str(data.decode()), None


def _from_merges(vocab: Path, merges: Path) -> Read:
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
    check_ids(vocab, list(ids.values()))
    inner = byte_level(models.BPE.from_file(str(vocab), str(merges)))
    # what is neither a byte nor merged is in no text
    lines = merges.read_text(encoding="utf-8").splitlines()
    merged = {"".join(line.split(" ")) for line in lines if not line.startswith("#version")}
    special = [token for token in sorted(ids, key=ids.__getitem__) if len(token) > 1 and token not in merged]
    inner.add_special_tokens(special)
    return inner, ids.get(END_OF_TEXT)
