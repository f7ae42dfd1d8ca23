"""What a name in `data.source` refers to, as far as the names of files tell."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, Self, TypeVar

from stretto.errors import StrettoError, nearest
from stretto.run.config.data import DataConfig
from stretto.user_file import find_function, is_function_name

PYTHON_STDLIB = "python-stdlib"
SAMPLE = "stretto-sample"
SAMPLE_FOLDER = Path(__file__).parents[1] / "data" / "sample"  # shipped with the package

INDEX, TOKENS = "index.json", "tokens.bin"  # of a token folder
LABELS = "labels.bin"  # of a click folder, which has an index too
BIN, IDX = ".bin", ".idx"
USER_SOURCE = "data.source=mine.py:documents"  # an example, for errors

_PACKED = (".gz", ".bz2", ".xz", ".zst")
_TEXTS = (".txt", ".md", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", *_PACKED)
# packages of fsspec's file systems, and the extra that installs them
_PACKAGES = {
    "file": None,
    "memory": None,
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "hdfs": ("pyarrow", "hdfs"),
}


def is_url(name: str) -> bool:
    """True if a source is named by a URL, such as s3://bucket/tokens."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name) is not None


def protocol_problem(protocol: str) -> tuple[str, str] | None:
    """Why URLs of a protocol cannot be read here, and what to do; None where they can."""
    if protocol in _PACKAGES:
        needed = _PACKAGES[protocol]
        if needed is None or find_spec(needed[0]) is not None:
            return None
        return f"reading {protocol}:// takes the package {needed[0]}", f"pip install 'stretto[{needed[1]}]'"
    from fsspec.registry import known_implementations, registry

    if protocol in registry or protocol in known_implementations:
        return None  # fsspec says itself which package it lacks
    similar = nearest(protocol, _PACKAGES)
    protocols = ", ".join(f"{name}://" for name in _PACKAGES)
    return (
        f"no such protocol: {protocol}",
        f"did you mean {similar}://?" if similar else f"known are {protocols}",
    )


def megatron_prefix(name: str) -> Path | None:
    """The path without `.bin` and `.idx` of the Megatron indexed dataset that `name` refers to, by this path
    or by one of its two files, one of which may be missing; None where it refers to something else.
    """
    path = Path(name).expanduser()
    if path.suffix in (BIN, IDX):
        return path.with_suffix("") if path.is_file() or _half_there(path.with_suffix("")) else None
    return path if not os.path.exists(path) and _half_there(path) else None


def tokenizer_at(path: Path) -> list[Path]:
    """The files of the tokenizer that a path names, in a folder or by itself: a `tokenizer.json`, a
    vocabulary with the merges that lie beside it, a SentencePiece model, or ranks of tiktoken or tekken; none
    where there is no tokenizer.
    """
    if os.path.isdir(path):
        named = ("tokenizer.json", "vocab.json", "tekken.json")
        singles = [*(path / name for name in named), *_models(path)]
        return next((files for single in singles if (files := tokenizer_at(single))), [])
    if not os.path.isfile(path):
        return []
    if path.name.endswith("vocab.json"):
        merges = path.with_name(path.name.removesuffix("vocab.json") + "merges.txt")
        return [path, merges] if merges.is_file() else [path]
    return [path]


def _models(folder: Path) -> list[Path]:
    """Files of vocabularies in a folder by the names that programs give them."""
    named = [path for suffix in ("*vocab.json", "*.model", "*.tiktoken") for path in folder.glob(suffix)]
    return sorted(named) if len(named) == 1 else []


def is_token_folder(path: Path) -> bool:
    """True if `path` holds the files of a token folder, complete or not."""
    return (path / INDEX).is_file() and (path / TOKENS).exists()


def token_folder(name: str) -> Path | None:
    """The token folder that `name` refers to, complete or not; `SAMPLE` is the one in the package, unless a
    file or folder has this name. None where it refers to something else.
    """
    path = Path(name).expanduser()
    if name == SAMPLE and not path.exists():
        return SAMPLE_FOLDER
    return path if is_token_folder(path) else None


def is_click_folder(path: Path) -> bool:
    """True if `path` holds the files of a click folder, whole or not."""
    return (path / INDEX).is_file() and (path / LABELS).exists()


class _FilePath(Protocol):
    """As much of a path as tells whether a file is there."""

    @property
    def name(self) -> str: ...

    def with_name(self, name: str) -> Self: ...

    def is_file(self) -> bool: ...


F = TypeVar("F", bound=_FilePath)


def missing_half(prefix: F) -> tuple[F, F] | None:
    """Of a Megatron dataset the file that is missing and the one that is there; None where both are."""
    data, index = (prefix.with_name(prefix.name + suffix) for suffix in (BIN, IDX))
    if data.is_file() and index.is_file():
        return None
    return (index, data) if data.is_file() else (data, index)


def holds_tokens(names: Sequence[str]) -> bool:
    """True if sources are tokens already, whose vocabulary is known without reading any text.

    Raises:
        StrettoError: some are, and some are text.
    """
    tokens = [name for name in names if _is_tokens(name)]
    if tokens and len(tokens) < len(names):
        text = next(name for name in names if name not in tokens)
        raise StrettoError(
            f"data.source lists {tokens[0]}, which is tokens already, and {text}, which is not",
            hint=f"tokenise the text first: stretto data build {text} --out DIR",
        )
    return bool(tokens)


def vocabulary_is_known(data: DataConfig) -> bool:
    """True if some of the data are tokens already: no tokenizer is trained for the others.

    Raises:
        StrettoError: a list of tokens and text.
    """
    if data.weights is None:
        return holds_tokens(data.sources)
    return any(map(_is_tokens, data.weights))


def _is_tokens(name: str) -> bool:
    """True if a name is that of tokens: on the disk by the files there, of a URL by its last part alone, of a
    user's class if its objects can be indexed.
    """
    if is_function_name(name):
        try:
            return find_function(name, USER_SOURCE).has_method("__getitem__")
        except StrettoError:  # `missing_sources` reports it
            return False
    if is_url(name):
        last = name.rstrip("/").rpartition("/")[2]
        return not last.lower().endswith(_TEXTS) and not glob.has_magic(name)
    return megatron_prefix(name) is not None or token_folder(name) is not None


def _half_there(prefix: Path) -> bool:
    return any(prefix.with_name(prefix.name + suffix).is_file() for suffix in (BIN, IDX))
