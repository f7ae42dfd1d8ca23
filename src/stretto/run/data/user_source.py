"""A source of the user's: a function in a file that yields documents, written once as JSON lines, or a class
with samples of token ids, written once as a Megatron dataset. Samples can then be read in any order, by any
number of ranks, and again after a resume.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stretto.errors import StrettoError
from stretto.run.config.data import DataConfig
from stretto.run.config.sources import USER_SOURCE, missing_half
from stretto.run.data.block_cache import cache_dir
from stretto.run.data.megatron import MegatronWriter
from stretto.run.data.tokenizer import Tokenizer
from stretto.user_file import UserFunction, find_function, is_function_name


def written_sources(names: Sequence[str], data: DataConfig) -> list[str]:
    """Return the names of sources, with a file of documents in the cache for each function of the user's.

    The file is written unless there is one for these bytes of the user's file.

    Raises:
        StrettoError: the function fails, or yields something other than texts and rows.
    """
    return [_written(name, data) if is_function_name(name) else name for name in names]


def written_tokens(name: str, data: DataConfig, vocab: int | None) -> str:
    """Return the prefix of a Megatron dataset in the cache with the samples of a user's class, each a
    document. It is written unless there is one for these bytes of the user's file.

    Args:
        vocab: number of ids, unless `data.tokenizer` says it.

    Raises:
        StrettoError: the class fails, or a sample is no row of ids of the vocabulary.
    """
    samples_of = find_function(name, USER_SOURCE)
    if data.tokenizer is not None:
        vocab = Tokenizer.load(data.tokenizer).vocab_size
    if vocab is None:
        raise StrettoError(
            f"{samples_of} does not say what vocabulary its ids are of",
            hint="give their number with model.vocab=N, or their tokenizer with data.tokenizer",
        )
    key = hashlib.sha256(samples_of.path.read_bytes() + f"\0{samples_of.name}\0{vocab}".encode())
    folder = Path(data.cache or cache_dir()).expanduser() / "samples"
    prefix = folder / f"{samples_of.path.stem}-{samples_of.name}-{key.hexdigest()[:32]}"
    if missing_half(prefix) is not None:
        samples = samples_of()
        if not hasattr(samples, "__len__") or not len(samples):
            raise StrettoError(f"{samples_of} has no samples", hint="__len__ returns their number")
        with MegatronWriter(prefix) as writer:
            for number in range(len(samples)):
                try:
                    ids = np.asarray(samples[number])
                except Exception as error:
                    failure = samples_of.failure(error)
                    raise StrettoError(f"sample {number}: {failure.message}", hint=failure.hint) from error
                wrong = None
                if ids.ndim != 1 or not ids.size:
                    wrong = f"has the shape {list(ids.shape)}, must be one row"
                elif ids.dtype.kind not in "iu":
                    wrong = f"is of {ids.dtype}, must be whole numbers"
                elif (outside := (ids < 0) | (ids >= vocab)).any():
                    at = int(outside.argmax())
                    wrong = f"has the id {ids[at]} at {at}, outside the vocabulary of {vocab}"
                if wrong is not None:
                    raise StrettoError(f"{samples_of}: sample {number} {wrong}", hint="a row of token ids")
                writer.add(ids, ends=True)
            writer.commit()
    return str(prefix)


def _written(name: str, data: DataConfig) -> str:
    function, field = find_function(name, USER_SOURCE), data.reading.text_field or "text"
    key = hashlib.sha256(function.path.read_bytes() + f"\0{function.name}\0{field}".encode())
    folder = Path(data.cache or cache_dir()).expanduser() / "documents"
    path = folder / f"{function.path.stem}-{function.name}-{key.hexdigest()[:32]}.jsonl"
    if path.exists():
        return str(path)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{path.name}.{os.getpid()}.new"  # several processes may do the same at once
    try:
        with partial.open("w", encoding="utf-8") as file:
            _write(function, field, file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return str(path)


def _write(function: UserFunction, field: str, file: Any) -> None:
    documents, number = function(), 0
    try:
        for document in documents:
            row = {field: document} if isinstance(document, str) else document
            if not isinstance(row, dict):
                raise StrettoError(
                    f"{function}: document {number} is {type(document).__name__}, must be a text, or a row "
                    f"of fields such as {field} or messages",
                    hint="yield texts; token ids come from a class with __len__ and __getitem__",
                )
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            number += 1
    except StrettoError:
        raise
    except Exception as error:
        raise StrettoError(
            f"{function}: after {number} documents: {type(error).__name__}: {error}",
            hint="it must return an iterable of texts, or yield them",
        ) from error
