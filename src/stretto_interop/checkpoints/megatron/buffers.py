"""The flat buffers of Megatron's distributed optimizer, as checkpoints have them rank by rank.

Every model-parallel rank has its own, `optimizer.distributed.dp_group_idx_RANK...`, whatever the number of
data-parallel replicas, in one of two forms (`distrib_optimizer.py`, core_v0.16.1):

- `dp_reshardable`, the default since core_v0.14: each bucket is a tensor, without its padding at the end.
- `dp_zero_gather_scatter`: an object with the buckets of a buffer one after the other.

What lies in them is no part of the checkpoint; `ordering` finds it.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, cast

from torch import Tensor

from stretto.engine.checkpoint.plain_pickle import Name
from stretto.errors import StrettoError
from stretto_interop.checkpoints.dcp.archive import Archives, PickledTensor
from stretto_interop.checkpoints.dcp.index import DcpIndex
from stretto_interop.checkpoints.megatron.common import NAMES

MASTER = "param"
BUCKETS, GATHERED = "dp_reshardable", "dp_zero_gather_scatter"
SAVE_WHOLE = (
    "save once more in Megatron with --dist-ckpt-optim-fully-reshardable (before core_v0.14: "
    "--ckpt-fully-parallel-save), or --weights-only"
)
_KEYS = ("exp_avg", "exp_avg_sq", MASTER)
_NAME = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_BUCKET = re.compile(r"gbuf_idx_(\d+)\.dtype_\((.+)\)\.bucket_idx_(\d+)\.(\w+)")
_SETTINGS, _STATE = "optimizer/shard_0_1", "param_state/shard_0_1"


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A rank's buffer, without the padding after each bucket.

    Attributes:
        size: its elements.
        buckets: elements of each bucket; None: the checkpoint does not say them.
        read: the elements of a state that begin at a place, into a flat float32 tensor; a place and its
            elements lie in one bucket.
    """

    size: int
    buckets: tuple[int, ...] | None
    read: Callable[[str, int, Tensor], None]


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """All buffers in a checkpoint.

    Attributes:
        form: Megatron's name of their form.
        dense, experts: the buffers of each model-parallel rank, one for each chunk of the model; experts have
            ranks of their own where they are spread over ranks, and none otherwise.
        settings: the optimiser's settings as each rank has them.
    """

    form: str
    dense: Sequence[Sequence[Buffer]]
    experts: Sequence[Sequence[Buffer]]
    settings: Sequence[Any]


def has_buffers(index: DcpIndex) -> bool:
    """Whether a checkpoint has the optimiser's states in buffers of ranks."""
    return any(_NAME.fullmatch(name) for name in (*index.tensors, *index.objects))


def read_buffers(archives: Archives) -> BufferLayout:
    """What buffers there are.

    Raises:
        StrettoError: some are missing or damaged, or they are of a kind that is not read.
    """
    index = archives.index
    settings, objects = list[Any](), dict[tuple[int, int], Sequence[Buffer]]()
    prefixes: dict[tuple[int, int], dict[int, dict[int, str]]] = {}
    types = set[str]()
    for name in (*index.objects, *index.tensors):
        if (match := _NAME.fullmatch(name)) is None:
            continue
        rank = int(match[1] or 0), int(match[2])
        if match[3] == _SETTINGS:
            settings.append(_only(archives.read_object(name, NAMES)))
        elif match[3] == _STATE:
            each = dict(_gathered(archives, name))
            types |= {kind for kind, _ in each.values()}
            objects[rank] = [each[number][1] for number in _round_up(each, archives)]
        elif (bucket := _BUCKET.fullmatch(match[3])) is not None:
            types.add(bucket[2])
            parts = prefixes.setdefault(rank, {}).setdefault(int(bucket[1]), {})
            parts[int(bucket[3])] = name.removesuffix(bucket[4])
    buffers = objects or {
        rank: [_bucketed(archives, each[number]) for number in _round_up(each, archives)]
        for rank, each in prefixes.items()
    }
    chains = {chain for chain, _ in buffers}
    if len(types) != 1 or chains not in ({0}, {0, 1}):
        raise StrettoError(
            f"the optimiser's buffers in {index.folder} are of {len(chains)} optimisers and hold "
            f"{' and '.join(sorted(types)) or 'nothing that is known'}; those of one type are read, of one "
            "optimiser or of one beside that of the experts",
            hint=SAVE_WHOLE,
        )
    dense, experts = (
        [by_rank[n] for n in _round_up(by_rank, archives)]
        for by_rank in ({rank: each for (item, rank), each in buffers.items() if item == n} for n in (0, 1))
    )
    form = GATHERED if objects else BUCKETS
    return BufferLayout(form=form, dense=dense, experts=experts, settings=settings)


def _round_up(numbered: Mapping[int, Any], archives: Archives) -> Sequence[int]:
    """The numbers, which must be those from 0 on."""
    if missing := set(range(len(numbered))) - set(numbered):
        raise StrettoError(
            f"{archives.index.folder} lacks buffers of the optimiser: number {min(missing)} of "
            f"{len(numbered)} or more",
            hint="copy the whole folder again",
        )
    return range(len(numbered))


def _bucketed(archives: Archives, prefixes: Mapping[int, str]) -> Buffer:
    """A buffer whose buckets are tensors."""
    tensors, sizes = archives.index.tensors, list[int]()
    for number in _round_up(prefixes, archives):
        stored = [tensors.get(prefixes[number] + key) for key in _KEYS]
        record = {(item.shape, item.dtype) for item in stored if item is not None}
        shape, dtype = record.pop() if None not in stored else ((), "")
        if record or len(shape) != 1 or dtype != "float32":
            raise StrettoError(
                f"{prefixes[number]}* in {archives.index.folder} are not {', '.join(_KEYS)} in float32, "
                "flat and of one size",
                hint=SAVE_WHOLE,
            )
        sizes.append(shape[0])
    starts = [0, *accumulate(sizes)]

    def read(key: str, start: int, into: Tensor) -> None:
        bucket = bisect(starts, start) - 1
        archives.read_box(prefixes[bucket] + key, (start - starts[bucket],), into)

    return Buffer(size=starts[-1], buckets=tuple(sizes), read=read)


def _gathered(archives: Archives, name: str) -> Iterator[tuple[int, tuple[str, Buffer]]]:
    """The buffers in a rank's object, by number, and the types of their parameters and gradients."""
    state = _only(archives.read_object(name, NAMES))
    fields = cast("dict[Any, Any]", state) if isinstance(state, dict) else {}
    for number, by_type in fields.items():
        if type(number) is not int:
            continue
        for kind, each in _items(by_type):
            if not isinstance(kind, tuple):
                continue
            tensors: dict[str, PickledTensor] = {
                key: value for key, value in _items(each) if key in _KEYS and isinstance(value, PickledTensor)
            }
            sizes = {prod(tensor.sizes) for tensor in tensors.values()}
            if len(tensors) != len(_KEYS) or len(sizes) != 1:
                raise StrettoError(
                    f"{name} in {archives.index.folder} has not {', '.join(_KEYS)} of one size",
                    hint=SAVE_WHOLE,
                )

            def read(key: str, start: int, into: Tensor, of: Mapping[str, PickledTensor] = tensors) -> None:
                archives.read_from_object(name, of[key], start, into)

            text = ", ".join(item.text for item in cast("tuple[Name, ...]", kind))
            yield number, (text, Buffer(size=sizes.pop(), buckets=None, read=read))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    yield from cast("dict[Any, Any]", value).items() if isinstance(value, dict) else ()


def _only(value: Any) -> Any:
    """What is saved as an object stands in a list of its own."""
    several = cast("list[Any]", value) if isinstance(value, list) else []
    return several[0] if len(several) == 1 else value
