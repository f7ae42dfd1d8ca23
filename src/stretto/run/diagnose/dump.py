"""The calls that each rank has recorded: torch's flight recorder, as pickle or JSON, one file a rank.

The format is that of torch 2.13: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp writes it,
torch/distributed/flight_recorder/components/builder.py lists its fields. NCCL's watchdog writes a file
`nccl_trace_rank_3` when a call times out; `torch._C._distributed_c10d._dump_fr_trace()` and
`_dump_fr_trace_json()` return the same for gloo.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from stretto.engine.checkpoint.plain_pickle import LARGEST, read_pickle
from stretto.errors import StrettoError

_FILE = re.compile(r"(\d+)(\.(json|pickle|pkl|bin|pt))?$")
_SEND = re.compile(r"send (\d+)->(\d+)$")
_RECV = re.compile(r"recv (\d+)<-(\d+)$")
_TORCH = re.compile(
    r"-packages/torch/|/torch/(distributed|nn|autograd|utils)/|/(typing_extensions|contextlib)\.py$"
)
Sizes = tuple[tuple[int, ...], ...]


class RecordedGroup(NamedTuple):
    """A process group: its name, what it is for, and its ranks; () where the dump does not say."""

    name: str
    about: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return self.about if self.about and self.about != "undefined" else f"group {self.name}"


class Frame(NamedTuple):
    """A line of the code that made a call."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """One collective, or one message, that a rank has asked for.

    number: of the call in its group: the same on all ranks of a collective; messages have their own.
    message: it is between two ranks, or closes a bracket of such calls.
    peer: rank that a message goes to or comes from; None: a collective.
    sends: whether the message is sent.
    completed: it is known to have ended well.
    retired: the group has forgotten it, because it ended, well or (under gloo) not.
    started: its device has begun with it.
    created_ns: time since the epoch.
    """

    rank: int
    group: RecordedGroup
    operation: str
    number: int
    record: int
    message: bool = False
    peer: int | None = None
    sends: bool = False
    input_sizes: Sizes = ()
    output_sizes: Sizes = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    completed: bool = False
    retired: bool = False
    started: bool = False
    created_ns: int = 0
    frames: tuple[Frame, ...] = ()

    @property
    def done(self) -> bool:
        return self.completed or self.retired

    @property
    def frame(self) -> Frame | None:
        """The innermost line of code outside of torch."""
        return next((frame for frame in self.frames if not _TORCH.search(frame.file)), None)

    @property
    def details(self) -> str:
        """What was called, with which sizes and types, and where."""
        kinds = "".join(f" {kind}" for kind in sorted({*self.input_dtypes, *self.output_dtypes}))
        return f"{self.operation}{self.sizes}{kinds}{self.location}"

    @property
    def sizes(self) -> str:
        """Of its first tensors."""
        sizes = self.input_sizes or self.output_sizes
        return "".join(f" {list(size)}" for size in sizes[:3]) + (" ..." if len(sizes) > 3 else "")

    @property
    def location(self) -> str:
        """Where it was called, to follow other words."""
        return f", at {self.frame}" if self.frame is not None else ""

    def __str__(self) -> str:
        if self.peer is None:
            return f"{self.operation} #{self.number} of {self.group}"
        direction = f"send to rank {self.peer}" if self.sends else f"receive from rank {self.peer}"
        return f"{direction} in {self.group}"


@dataclass(frozen=True, kw_only=True)
class RankDump:
    """What one rank has recorded, the oldest call first.

    complete: no older call has been overwritten.
    enqueued: number of the last collective by name of its group, as the group itself counts them.
    """

    rank: int
    path: Path
    version: str
    calls: tuple[RecordedCall, ...]
    groups: Mapping[str, RecordedGroup]
    complete: bool
    enqueued: Mapping[str, int] = field(default_factory=dict[str, int])


def read_dumps(folder: Path) -> list[RankDump]:
    """The dumps in a folder, one a rank, in order of the ranks; a file's name ends with its rank.

    Raises:
        StrettoError: there are none, a rank has two, or a file cannot be read as one.
    """
    if not folder.is_dir():
        raise StrettoError(f"{folder} is no folder", hint="the folder that has one dump for each rank")
    paths = dict[int, Path]()
    for path in sorted(folder.iterdir()):
        match = _FILE.search(path.name)
        if match is None or not path.is_file():
            continue
        rank = int(match[1][-9:])
        if rank in paths:
            raise StrettoError(
                f"{folder} has two dumps of rank {rank}: {paths[rank].name} and {path.name}",
                hint="keep the dumps of one moment in a folder of their own",
            )
        paths[rank] = path
    if not paths:
        raise StrettoError(
            f"{folder} has no dumps",
            hint="their names end with the rank, as in nccl_trace_rank_0 or dump_0.json",
        )
    return [read_dump(path, rank) for rank, path in sorted(paths.items())]


def read_dump(path: Path, rank: int) -> RankDump:
    """One rank's dump.

    Raises:
        StrettoError: it cannot be read, is no dump, or has a field of another kind than torch writes.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise StrettoError(f"{path} is larger than {LARGEST:,} bytes", hint="record fewer calls")
        data = path.read_bytes()
    except OSError as error:
        raise StrettoError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return _dump(_plain(data), path, rank)
    except StrettoError as error:
        raise StrettoError(f"{path}: {error.message}", hint=error.hint) from None


def _plain(data: bytes) -> Any:
    if data.lstrip()[:1] != b"{":
        return read_pickle(data)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StrettoError(f"it is no JSON: {error}", hint="is the file complete?") from None


def _dump(value: Any, path: Path, rank: int) -> RankDump:
    fields = _mapping("the dump", value)
    if "entries" not in fields or "version" not in fields:
        raise StrettoError(
            "it is no dump of torch's flight recorder: it has no 'version' and 'entries'",
            hint="dumps are written by NCCL's watchdog, or by _dump_fr_trace",
        )
    groups = _groups(fields.get("pg_config", {}))
    entries = [
        _mapping(f"entries[{index}]", entry)
        for index, entry in enumerate(_list("entries", fields["entries"]))
    ]
    calls = [_call(f"entries[{index}]", entry, rank, groups) for index, entry in enumerate(entries)]
    status = _mapping("pg_status", fields.get("pg_status", {}))
    return RankDump(
        rank=rank,
        path=path,
        version=_text("version", fields["version"]),
        calls=tuple(sorted(_coalesced(calls), key=lambda call: call.record)),
        groups=groups,
        complete=not calls or min(call.record for call in calls) == 0,
        enqueued={
            name: _number(f"pg_status.{name}", _mapping("pg_status", each).get("last_enqueued_collective", 0))
            for name, each in status.items()
        },
    )


def _groups(value: Any) -> dict[str, RecordedGroup]:
    """The process groups by name; gloo of torch 2.13 writes none."""
    groups = dict[str, RecordedGroup]()
    for name, config in _mapping("pg_config", value).items():
        each = _mapping(f"pg_config.{name}", config)
        try:
            ranks = json.loads(_text(f"pg_config.{name}.ranks", each.get("ranks", "[]")))
        except (ValueError, RecursionError):
            ranks = []  # said in another way, by another version
        field_name = f"pg_config.{name}"
        members = tuple(sorted({_number(field_name, rank) for rank in _list(field_name, ranks)}))
        groups[name] = RecordedGroup(name, _text(field_name, each.get("desc", "")), members)
    return groups


def _call(
    field_name: str, entry: Mapping[str, Any], rank: int, groups: Mapping[str, RecordedGroup]
) -> RecordedCall:
    pair = [
        _text(field_name, part)
        for part in _list(f"{field_name}.process_group", entry.get("process_group", ["", ""]))
    ]
    name, about = (*pair, "", "")[:2]
    group = RecordedGroup(name, about, groups[name].ranks if name in groups else ())
    _, _, operation = _text(field_name, entry.get("profiling_name", "")).partition(":")
    send, recv = _SEND.match(operation), _RECV.match(operation)
    peer = None
    if match := send or recv:
        local = int(match[2][-9:])
        peer = group.ranks[local] if local < len(group.ranks) else local
    single = peer is not None or bool(entry.get("is_p2p"))
    state = entry.get("state")
    return RecordedCall(
        rank=rank,
        group=group,
        operation=operation.partition(" ")[0],
        number=_number(field_name, entry.get("p2p_seq_id" if single else "collective_seq_id", 0)),
        record=_number(field_name, entry.get("record_id", 0)),
        message=single,
        peer=peer,
        sends=send is not None,
        input_sizes=_sizes(f"{field_name}.input_sizes", entry.get("input_sizes", [])),
        output_sizes=_sizes(f"{field_name}.output_sizes", entry.get("output_sizes", [])),
        input_dtypes=_texts(field_name, entry.get("input_dtypes", [])),
        output_dtypes=_texts(field_name, entry.get("output_dtypes", [])),
        completed=state == "completed",
        retired=entry.get("retired") is True,
        started=state in ("started", "completed"),
        created_ns=_number(field_name, entry.get("time_created_ns", 0)),
        frames=tuple(_frame(field_name, frame) for frame in _list(field_name, entry.get("frames", []))),
    )


def _coalesced(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """The calls without those that close a bracket of coalesced ones, whose state is that of the close: NCCL
    keeps no event for a call in a bracket. All in a bracket have one number.
    """
    brackets = dict[tuple[str, bool, int], list[RecordedCall]]()
    for call in calls:
        brackets.setdefault((call.group.name, call.message, call.number), []).append(call)
    merged = list[RecordedCall]()
    for *inner, last in brackets.values():
        if not inner or not last.operation.endswith("coalesced"):
            merged += [*inner, last]
            continue
        state = {"completed": last.completed, "retired": last.retired, "started": last.started}
        merged += [replace(call, **state) for call in inner]
    return merged


def _frame(field_name: str, value: Any) -> Frame:
    fields = _mapping(f"{field_name}.frames", value)
    line = _number(f"{field_name}.frames", fields.get("line", 0))
    function, file = (_text(f"{field_name}.frames", fields.get(name, "")) for name in ("name", "filename"))
    return Frame(function, file, line)


def _sizes(field_name: str, value: Any) -> Sizes:
    return tuple(
        tuple(_number(field_name, n) for n in _list(field_name, row)) for row in _list(field_name, value)
    )


def _texts(field_name: str, value: Any) -> tuple[str, ...]:
    return tuple(_text(field_name, each) for each in _list(field_name, value))


def _mapping(field_name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise StrettoError(
            f"{field_name} is a {type(value).__name__}, must be a dict", hint="is it a dump of torch?"
        )
    return value


def _list(field_name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise StrettoError(
            f"{field_name} is a {type(value).__name__}, must be a list", hint="is it a dump of torch?"
        )
    return value


def _number(field_name: str, value: Any) -> int:
    """A whole number; JSON dumps have some as text."""
    if isinstance(value, str) and value.lstrip("-").isdigit() and len(value) < 20:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise StrettoError(
            f"{field_name} has a {type(value).__name__}, must be a whole number",
            hint="is it a dump of torch?",
        )
    return value


def _text(field_name: str, value: Any) -> str:
    if not isinstance(value, str):  # str() of what is nested deeply would not end
        raise StrettoError(
            f"{field_name} has a {type(value).__name__}, must be text", hint="is it a dump of torch?"
        )
    return value
