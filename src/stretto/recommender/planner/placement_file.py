"""Table placements as YAML, written by the planner, editable by users and read by training jobs.

```yaml
version: 1
C1: {split: row, ranks: all}
C2: {split: column, ranks: [0, 1]}
C3: {split: table, ranks: [3], place: cpu, cache: 0.1}
C4: {split: row, ranks: node 0}
C5: {split: data}
```
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import yaml

from stretto.errors import StrettoError, nearest
from stretto.planner.machines.reading import read_fields
from stretto.recommender.placement import PLACES, SPLITS, Placements, TablePlacement
from stretto.versions import PLACEMENT

_FIELDS = ("split", "ranks", "place", "cache")
_YAML_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")  # YAML booleans and null
_SPAN = re.compile(r"(all|node (\d+))(?: from (\d+))?")
_Wrong = Callable[[str, str, str | None], StrettoError]


def read_placements(
    source: Path | str | Mapping[str, Any], world: int, ranks_per_node: int | None = None
) -> dict[str, TablePlacement]:
    """Read placements by table name, from a YAML file or an already parsed mapping.

    `ranks` is a list, a single rank (`ranks: 3`), `all`, or `node N`. `all from R` and `node N from R` rotate
    the ranks to start at R. `recommender.placement.check_placements` checks the result against the tables.

    Args:
        world: world size, used to expand `all` and `node N`.
        ranks_per_node: by default all ranks are on one node.

    Raises:
        StrettoError: missing file, invalid YAML, unknown field or invalid value; the message names the table
            and the field, and for a file the line.
    """
    placements = dict[str, TablePlacement]()
    if isinstance(source, Mapping):
        for name, value in source.items():
            if name == "version" and not isinstance(value, Mapping):  # a table may have this name
                PLACEMENT.check(value, "the placement")
                continue

            def wrong(field: str, rule: str, hint: str | None, name: str = name) -> StrettoError:
                message = f"placement of table {name}: " + (f"{field} {rule}" if field else rule)
                return StrettoError(message, hint=hint)

            placements[name] = _read_placement(value, world, ranks_per_node or world, wrong)
        return placements
    file = read_fields(Path(source))
    if "version" in file and not file.is_mapping("version"):
        PLACEMENT.check(file.plain("version"), str(source))
    for name, fields in file.items():
        values = {key: fields.plain(key) for key in _FIELDS if key in fields}
        fields.finish(_FIELDS)
        placements[name] = _read_placement(values, world, ranks_per_node or world, fields.wrong)
    return placements


def placements_to_yaml(
    placements: Placements,
    world: int,
    ranks_per_node: int | None = None,
    about: str = "",
    notes: Mapping[str, str] | None = None,
) -> str:
    """Serialise placements in the format of `read_placements`.

    Args:
        about: header comment, one or more lines.
        notes: trailing comments by table name.
    """
    lines = [f"# {line}".rstrip() for line in about.splitlines()]
    if "version" not in placements:
        lines.append(f"version: {PLACEMENT.version}")
    for name, placement in placements.items():
        parts = [f"split: {placement.split}"]
        if placement.split != "data":
            parts.append(f"ranks: {_ranks_text(placement.ranks, world, ranks_per_node or world)}")
        if placement.place != "device":
            parts.append(f"place: {placement.place}")
        if placement.place != "device" or placement.cache != TablePlacement.cache:
            parts.append(f"cache: {format(Decimal(repr(placement.cache)), 'f')}")
        note = f"  # {notes[name]}" if notes and notes.get(name) else ""
        # names are quoted unless YAML reads them as strings without quotes
        plain = re.fullmatch(r"[A-Za-z_][\w.\-]*", name) and name.lower() not in _YAML_WORDS
        key = name if plain else yaml.safe_dump(name, default_style='"', width=math.inf).strip()
        lines.append(f"{key}: {{{', '.join(parts)}}}{note}")
    return "\n".join(lines) + "\n"


def _read_placement(value: object, world: int, node: int, wrong: _Wrong) -> TablePlacement:
    """Read the placement of a table; `node` is the number of ranks of a node."""
    if isinstance(value, TablePlacement):
        return value
    if not isinstance(value, Mapping):
        raise wrong("", f"is {value!r}, not a mapping", "such as {split: row, ranks: all}")
    fields = cast(Mapping[str, object], value)
    for key in fields:
        if key not in _FIELDS:
            similar = nearest(str(key), _FIELDS)
            raise wrong(key, "is not a field", f"did you mean {similar}?" if similar else ", ".join(_FIELDS))
    if "split" not in fields:
        raise wrong("split", "is missing", ", ".join(SPLITS))
    split = _one_of(fields["split"], SPLITS, "split", wrong)
    place = _one_of(fields.get("place", "device"), PLACES, "place", wrong)
    cache = fields.get("cache", 0.1)
    if isinstance(cache, bool) or not isinstance(cache, int | float) or not 0 < cache <= 1:
        raise wrong("cache", f"is {cache!r}", "a share of the rows, above 0 and at most 1")
    ranks = _read_ranks(fields.get("ranks"), world, node, wrong)
    if split == "data":
        if ranks and ranks != tuple(range(world)):
            raise wrong("ranks", f"is {fields['ranks']!r} for a table that every rank copies", "leave it out")
        ranks = ()
    elif not ranks:
        raise wrong("ranks", "is missing", "a list of ranks, `all`, or `node 0`")
    return TablePlacement(split, ranks, place, float(cache))


def _one_of(value: object, allowed: tuple[str, ...], field: str, wrong: _Wrong) -> Any:
    if value not in allowed:
        similar = nearest(str(value), allowed)
        raise wrong(field, f"is {value!r}", f"did you mean {similar}?" if similar else ", ".join(allowed))
    return value


def _read_ranks(value: object, world: int, node: int, wrong: _Wrong) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str) and (match := _SPAN.fullmatch(value.strip())):
        nodes, index = math.ceil(world / node), int(match[2] or 0)
        if index >= nodes:
            raise wrong("ranks", f"is {value!r}", f"there are {nodes} nodes, from 0")
        span = range(world) if match[1] == "all" else range(index * node, min(world, (index + 1) * node))
        first = span.start if match[3] is None else int(match[3])
        if first not in span:
            raise wrong("ranks", f"is {value!r}", f"from one of {span.start} to {span.stop - 1}")
        return (*range(first, span.stop), *range(span.start, first))
    listed = cast(list[object], list(value) if isinstance(value, list | tuple) else [value])
    ranks = tuple(rank for rank in listed if isinstance(rank, int) and not isinstance(rank, bool))
    if not ranks or len(ranks) != len(listed):
        raise wrong("ranks", f"is {value!r}", "a list of ranks, `all`, or `node 0`")
    outside = [rank for rank in ranks if not 0 <= rank < world]
    if outside:
        raise wrong("ranks", f"has {outside[0]}", f"ranks are 0 to {world - 1}")
    return ranks


def _ranks_text(ranks: tuple[int, ...], world: int, node: int) -> str:
    """Ranks as `read_placements` reads them, as short as possible."""
    first = min(ranks, default=0) // node
    spans = {"all": range(world)}
    if 1 < node < world:
        spans[f"node {first}"] = range(first * node, min(world, (first + 1) * node))
    for name, span in spans.items():
        if len(ranks) == len(span) > 1 and ranks[0] in span:
            if ranks == tuple(span):
                return name
            if ranks == (*range(ranks[0], span.stop), *range(span.start, ranks[0])):
                return f"{name} from {ranks[0]}"
    return f"[{', '.join(str(rank) for rank in ranks)}]"
