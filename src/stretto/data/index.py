"""`index.json` of a token folder: what is in it, and how to tell that it is whole."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from stretto.data.checksum import FileSums
from stretto.errors import StrettoError

FORMAT = "stretto-tokens"
VERSION = 1
INDEX, TOKENS, DOCUMENTS, TOKENIZER = "index.json", "tokens.bin", "documents.bin", "tokenizer.json"
ITEM_BYTES = {"uint16": 2, "uint32": 4}
_BIGGEST_CHUNK = 1 << 30
_REBUILD = "build the folder again"


@dataclass(frozen=True, slots=True)
class Index:
    """The facts of a token folder.

    `dtype` is uint16 or uint32, `tokens` and `documents` are counts, all ids are below `vocab`, `endoftext`
    is the id that ends each document, `tokenizer` the fingerprint of the tokenizer, `key` that of the source
    and the settings, `source` what the user named, `skipped` the number of files passed over; `files` has the
    sums of each file per `chunk` bytes.
    """

    dtype: str
    tokens: int
    documents: int
    vocab: int
    endoftext: int
    tokenizer: str
    key: str
    source: list[str]
    skipped: int
    chunk: int
    files: dict[str, FileSums]

    def to_bytes(self) -> bytes:
        """The file's content; `crc32` covers all of the rest."""
        body: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return (json.dumps({**body, "crc32": _crc32(body)}, indent=1) + "\n").encode()


def _crc32(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def dtype_for(vocab: int) -> str:
    """The narrowest dtype that holds ids below `vocab`."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def is_token_folder(path: Path) -> bool:
    """Whether `path` holds the files of a token folder, whole or not."""
    return (path / INDEX).is_file() and (path / TOKENS).exists()


def read_index(folder: Path) -> Index:
    """Read and check `index.json`.

    Raises:
        StrettoError: not a token folder, of another version, corrupt.
    """
    path = folder / INDEX
    try:
        data = path.read_bytes()
    except OSError:
        raise StrettoError(
            f"{folder}: not a token folder (no readable {INDEX})",
            hint="make one: stretto data build SOURCE --out DIR",
        ) from None
    return parse_index(data, path)


def parse_index(data: bytes, path: Path) -> Index:
    """The index in `data`, which came from `path`; raises as `read_index`."""
    try:
        parsed: object = json.loads(data)
    except (ValueError, RecursionError):
        raise StrettoError(f"{path}: corrupt: not JSON", hint=_REBUILD) from None
    if not isinstance(parsed, dict) or "format" not in parsed:
        raise StrettoError(f"{path}: not the index of a token folder", hint=f"it says no format {FORMAT!r}")
    body = cast(dict[str, Any], parsed)
    if body["format"] != FORMAT:
        raise StrettoError(
            f"{path}: format {str(body['format'])[:80]!r}, not {FORMAT!r}", hint="name a token folder"
        )
    version = body.get("version")
    if type(version) is not int or version != VERSION:
        raise StrettoError(
            f"{path}: format version {str(version)[:80]}; this stretto reads version {VERSION}",
            hint=f"{_REBUILD}, or use the stretto that wrote it",
        )
    if body.pop("crc32", None) != _crc32(body):
        raise StrettoError(f"{path}: corrupt: its own checksum does not match", hint=_REBUILD)
    index = _from_body(body, path)
    _check(index, path)
    return index


def _from_body(body: Mapping[str, Any], path: Path) -> Index:
    """The fields, each of its type."""

    def take(name: str, kind: type) -> Any:
        value = body.get(name)
        if type(value) is not kind:
            raise StrettoError(f"{path}: field {name!r} is not {kind.__name__}", hint=_REBUILD)
        return value

    files: dict[str, FileSums] = {}
    for name, sums in take("files", dict).items():
        match sums:
            case {"bytes": int(size), "crc32": list(crcs)} if all(
                type(c) is int for c in cast(list[Any], crcs)
            ):
                files[name] = FileSums(size, cast(list[int], crcs))
            case _:
                raise StrettoError(f"{path}: field 'files' has no sums for {name!r}", hint=_REBUILD)
    source = [str(part) for part in take("source", list)]
    text = {name: take(name, str) for name in ("dtype", "tokenizer", "key")}
    counts = {
        name: take(name, int) for name in ("tokens", "documents", "vocab", "endoftext", "skipped", "chunk")
    }
    return Index(**text, **counts, source=source, files=files)


def _check(index: Index, path: Path) -> None:
    """That the facts agree with one another."""
    if index.dtype not in ITEM_BYTES:
        raise StrettoError(
            f"{path}: dtype {index.dtype[:80]!r}; allowed are {', '.join(ITEM_BYTES)}", hint=_REBUILD
        )
    if not 0 < index.vocab <= 1 << 8 * ITEM_BYTES[index.dtype]:
        raise StrettoError(f"{path}: vocab {index.vocab} does not fit {index.dtype}", hint=_REBUILD)
    rules = {
        "endoftext": 0 <= index.endoftext < index.vocab,
        "tokens": index.tokens > 0,
        "documents": 0 < index.documents <= index.tokens,
        "chunk": 0 < index.chunk <= _BIGGEST_CHUNK and index.chunk % 8 == 0,
        "files": {TOKENS, DOCUMENTS} <= index.files.keys() <= {TOKENS, DOCUMENTS, TOKENIZER},
    }
    wanted = {TOKENS: index.tokens * ITEM_BYTES[index.dtype], DOCUMENTS: (index.documents + 1) * 8}
    for name, sums in index.files.items() if rules["chunk"] and rules["files"] else ():
        rules[f"files.{name}.bytes"] = sums.bytes == wanted.get(name, sums.bytes) and sums.bytes >= 0
        rules[f"files.{name}.crc32"] = len(sums.crc32) == -(-sums.bytes // index.chunk)
    for field, good in rules.items():
        if not good:
            raise StrettoError(f"{path}: field {field!r} contradicts the rest", hint=_REBUILD)
