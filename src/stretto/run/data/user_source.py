"""A source of the user's: a function in a file that yields documents, written once as JSON lines."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.run.config.data import DataConfig
from stretto.run.data.block_cache import cache_dir
from stretto.user_file import UserFunction, find_function, is_function_name


def written_sources(names: Sequence[str], data: DataConfig) -> list[str]:
    """Return the names of sources, with a file of documents in the cache for each function of the user's.

    The file is written unless there is one for these bytes of the user's file, so that samples can be read in
    any order, by any number of ranks, and again after a resume.

    Raises:
        StrettoError: the function fails, or yields something other than texts and rows.
    """
    return [_written(name, data) if is_function_name(name) else name for name in names]


def _written(name: str, data: DataConfig) -> str:
    function, field = find_function(name, "data.source=mine.py:documents"), data.reading.text_field or "text"
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
                    hint="yield texts",
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
