"""The manifest of a checkpoint, `manifest.json`: metadata, and the size and checksum of every file.

It is written last and includes its own checksum, so a checkpoint is intact if its manifest is and its files
match it.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stretto.engine.checkpoint.files import (
    DamageError,
    FileEntry,
    check_file,
    check_size,
    dump_json,
    open_plain,
    read_json,
    safe_name,
    write_file,
)
from stretto.engine.checkpoint.index import DTYPES, INDEX, Index, read_index
from stretto.engine.checkpoint.metadata import PER_RANK, index_problem, metadata_problem
from stretto.errors import StrettoError
from stretto.versions import CHECKPOINT

MANIFEST = "manifest.json"
FORMAT, VERSION = CHECKPOINT.name, CHECKPOINT.version
MAX_WORLD = 1 << 24  # ranks
MAX_TEXT = 200  # characters of a timestamp or version
STEP_FOLDER = re.compile(r"step-(\d{8,18})")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of a checkpoint.

    Attributes:
        step: training step.
        world: number of ranks that wrote it.
        tensors: number of tensors, without per-rank ones.
        dtypes: bytes of the tensors of each dtype.
        saved: UTC time in ISO format.
        stretto, torch: versions of the libraries.
        files: size and checksum by file name.
        meta: metadata of the training loop (layout, model, ...).
    """

    step: int
    world: int
    tensors: int
    dtypes: dict[str, int]
    saved: str
    stretto: str
    torch: str
    files: dict[str, FileEntry]
    meta: dict[str, Any]

    @property
    def bytes(self) -> int:
        """Size of all files except the manifest."""
        return sum(entry.size for entry in self.files.values())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest; it is durable on return."""
    files = {name: [entry.size, f"{entry.crc32:08x}"] for name, entry in sorted(manifest.files.items())}
    body = {"format": FORMAT, "version": VERSION, **vars(manifest), "files": files}
    write_file(folder / MANIFEST, dump_json({**body, "crc32": _crc(body)}))


def read_manifest(path: str | Path) -> Manifest:
    """Read and check the manifest of the checkpoint at `path`, without checking the other files.

    Raises:
        StrettoError: the path is no checkpoint, or its manifest is damaged.
    """
    folder = Path(path)
    if not folder.is_dir() or not ((folder / MANIFEST).exists() or STEP_FOLDER.match(folder.name)):
        raise StrettoError(
            f"no checkpoint at {folder}", hint="`stretto checkpoint list RUN` lists the checkpoints of a run"
        )
    try:
        return load_manifest(folder)
    except DamageError as error:
        raise StrettoError(
            f"checkpoint {folder} is damaged: {error}", hint="use an older one: `stretto checkpoint list`"
        ) from None


def load_manifest(folder: Path) -> Manifest:
    """Read and check the manifest in a folder.

    Raises:
        DamageError: it is missing or damaged.
        StrettoError: it has a version that this release does not read.
    """
    body = read_json(folder, MANIFEST)
    if not isinstance(body, dict):
        raise _bad("it is not an object")
    body = cast(dict[str, Any], body)
    with open_plain(folder, MANIFEST) as file:
        written = file.read()
    if dump_json(body) != written:
        raise _bad("it was changed after it was written")
    stored = body.pop("crc32", None)
    if stored != _crc(body):
        raise _bad("its own checksum differs")
    if body.pop("format", None) != FORMAT:
        raise _bad(f"it is not a {FORMAT}")
    writer = str(body.get("stretto"))[:MAX_TEXT]
    CHECKPOINT.check(body.pop("version", None), str(folder / MANIFEST), writer)
    kinds: dict[str, type] = {"step": int, "world": int, "tensors": int, "dtypes": dict, "saved": str}
    kinds |= {"stretto": str, "torch": str, "files": dict, "meta": dict}
    if set(body) != set(kinds):
        raise _bad(f"it does not have exactly the fields {', '.join(sorted(kinds))}")
    for field, kind in kinds.items():
        if type(body[field]) is not kind:
            raise _bad(f"{field} is {body[field]!r}")
        if kind is str and len(body[field]) > MAX_TEXT:
            raise _bad(f"{field} has {len(body[field])} characters")
    if any(name not in DTYPES or type(size) is not int for name, size in body["dtypes"].items()):
        raise _bad("dtypes is not a map of tensor dtypes to bytes")
    if not 0 <= body["step"] < 10**18:
        raise _bad("step is out of range")
    if not 1 <= body["world"] <= MAX_WORLD:
        raise _bad(f"world is {body['world']}, at most {MAX_WORLD} ranks are possible")
    files = {name: _entry(name, value) for name, value in body["files"].items()}
    if INDEX not in files:
        raise _bad(f"it does not list {INDEX}")
    if problem := metadata_problem(body["meta"], body["step"], body["world"]):
        raise _bad(problem)
    return Manifest(**cast("dict[str, Any]", {**body, "files": files}))


def problems(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Return the problems of a checkpoint, empty if it is intact.

    Reads every `parts`-th file completely, starting with file `part`; part 0 also checks the index.
    """
    try:
        manifest = _of_its_name(folder)
    except (DamageError, OSError) as error:
        return [str(error)]
    damage: list[str] = []
    for name in sorted(manifest.files)[part::parts]:
        try:
            check_file(folder, name, manifest.files[name])
        except (DamageError, OSError) as error:
            damage.append(str(error))
    if part == 0 and not damage:
        try:
            manifest_index(folder, manifest)
        except (DamageError, OSError) as error:
            damage.append(str(error))
    return damage


def manifest_index(folder: Path, manifest: Manifest) -> Index:
    """Read the index of a checkpoint and check it against the manifest; raise DamageError."""
    index = read_index(folder, manifest.files)
    tensors, dtypes = tally(index)
    if (manifest.tensors, manifest.dtypes) != (tensors, dtypes):
        raise _bad(f"it counts {manifest.tensors} tensors of {manifest.dtypes}, not {tensors} of {dtypes}")
    if problem := index_problem(manifest.meta, manifest.world, index):
        raise _bad(problem)
    return index


def read_tensors(path: Path, manifest: Manifest) -> Index:
    """Call `manifest_index`; raise StrettoError instead of DamageError."""
    try:
        return manifest_index(path, manifest)
    except DamageError as error:
        raise StrettoError(f"checkpoint {path} is damaged: {error}", hint="use an older one") from None


def tally(index: Index) -> tuple[int, dict[str, int]]:
    """Return the number of tensors in an index, without per-rank ones, and the bytes of all by dtype."""
    dtypes = dict[str, int]()
    for saved in index.values():
        dtypes[saved.dtype] = dtypes.get(saved.dtype, 0) + saved.bytes
    return sum(not name.startswith(f"{PER_RANK}.") for name in index), dtypes


def quick_problems(folder: Path) -> list[str]:
    """Return the problems of a checkpoint that its manifest and the sizes of its files show."""
    try:
        manifest = _of_its_name(folder)
        for name, entry in manifest.files.items():
            check_size(folder, name, entry)
    except (DamageError, OSError) as error:
        return [str(error)]
    return []


def _of_its_name(folder: Path) -> Manifest:
    """Read the manifest; raise DamageError if its step is not that of the folder's name."""
    manifest = load_manifest(folder)
    named = STEP_FOLDER.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        raise DamageError(f"the folder is named {folder.name}, but its manifest is of step {manifest.step}")
    return manifest


def _entry(name: str, value: Any) -> FileEntry:
    if not safe_name(name) or name == MANIFEST:
        raise _bad(f"file name {name!r} is not allowed")
    if not isinstance(value, list) or len(value) != 2:
        raise _bad(f"file {name} is not [size, crc32]")
    size, crc = value
    if type(size) is not int or size < 0 or not isinstance(crc, str) or not re.fullmatch("[0-9a-f]{8}", crc):
        raise _bad(f"file {name} has {value!r}")
    return FileEntry(size, int(crc, 16))


def _crc(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(dump_json(body)):08x}"


def _bad(problem: str) -> DamageError:
    return DamageError(f"file {MANIFEST}: {problem}")
