"""Counts the bytes that a rank sends, by kind of communication.

    with traffic() as sent:
        pipeline.step(...)
    print(sent.bytes)

The methods of ProcessGroup are replaced while counting, so there is no cost otherwise. Functions of
torch.distributed are counted too; collectives issued from C++, as by DTensor, are not.

The bytes are those that leave this rank under a bandwidth-optimal algorithm, for S bytes over n ranks:
all-reduce 2 (n-1)/n S, all-gather and reduce-scatter (n-1)/n S with S of the full tensor (Patarasuk & Yuan
2009), all-to-all the rows for other ranks, a message its size. A broadcast counts (n-1) S at its root,
although other ranks may forward it; a gather, or a sum on one rank ("reduce"), S at every rank but the root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

Options = TypeVar("Options")

OnCollective = Callable[[ProcessGroup, str, int], None]

_kinds = dict[int, tuple[object, str]]()  # by id of the options, which are stored so that it stays unique
_open = list["Traffic"]()
_replaced = dict[str, Any]()  # the original methods


class Traffic:
    """Counts of the messages that this process has sent.

    Attributes:
        bytes: bytes by kind: "all-reduce", "all-gather", "re-gather" (activations that the backward gathers
            again), "reduce-scatter", "all-to-all", "broadcast", "gather", "reduce", "send".
        calls: number of calls by kind.
        on_collective: called for each collective with the group, the kind, and the bytes of its largest
            tensor (the input of a reduce-scatter, the output of an all-gather, else this rank's tensor).
    """

    def __init__(self, on_collective: OnCollective | None = None) -> None:
        self.on_collective = on_collective
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.bytes.values())


def counted_as(kind: str, options: Options) -> Options:
    """Count calls with this options object as `kind`, such as a reduce-scatter implemented by an
    all-to-all.
    """
    _kinds[id(options)] = options, kind
    return options


@contextmanager
def traffic(on_collective: OnCollective | None = None) -> Generator[Traffic]:
    """Count the messages that all threads of this process send within the context; may be nested.

    Args:
        on_collective: see `Traffic`.
    """
    counted = Traffic(on_collective)
    _open.append(counted)
    if len(_open) == 1:
        for method, (kind, size) in _METHODS.items():
            if method in vars(ProcessGroup):
                _replaced[method] = vars(ProcessGroup)[method]  # getattr would not return the descriptor
                setattr(ProcessGroup, method, _counting(getattr(ProcessGroup, method), kind, size))
    try:
        yield counted
    finally:
        _open.remove(counted)
        if not _open:
            for method, original in _replaced.items():
                setattr(ProcessGroup, method, original)
            _replaced.clear()


def _counting(original: Any, kind: str, size: Callable[..., int]) -> Any:
    def call(group: ProcessGroup, *arguments: Any, **named: Any) -> Any:
        name = kind
        for value in (*arguments, *named.values()):
            if id(value) in _kinds:
                name = _kinds[id(value)][1]
        sent = size(group, *arguments)
        for counted in _open:
            counted.bytes[name] += sent
            counted.calls[name] += 1
            if counted.on_collective is not None:
                # the tensor with the data of all ranks: the output of a gather, else the input
                in_place = kind in ("all-reduce", "broadcast", "reduce", "send")
                largest = arguments[0 if in_place or name in ("all-gather", "re-gather") else 1]
                counted.on_collective(group, name, _all(largest))
        return original(group, *arguments, **named)

    return call


# ---------------------------------------------------------------------- bytes sent, from a call's arguments


def _all(tensors: Tensor | Sequence[Tensor]) -> int:
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_all, tensors))


def _reduced(group: ProcessGroup, tensors: Any, *_: Any) -> int:
    return 2 * _all(tensors) * (group.size() - 1) // group.size()


def _gathered(group: ProcessGroup, _out: Any, part: Any, *_: Any) -> int:
    return _all(part) * (group.size() - 1)


def _scattered(group: ProcessGroup, _out: Any, full: Any, *_: Any) -> int:
    return _all(full) * (group.size() - 1) // group.size()


def _exchanged(
    group: ProcessGroup, _out: Any, x: Tensor, _receive: Sequence[int] = (), send: Sequence[int] = (), *_: Any
) -> int:
    if not send or not len(x):
        return _scattered(group, None, x)
    return x.nbytes // len(x) * (len(x) - send[group.rank()])


def _exchanged_list(group: ProcessGroup, _out: Any, tensors: Sequence[Tensor], *_: Any) -> int:
    return _all(tensors) - tensors[group.rank()].nbytes


def _broadcast(group: ProcessGroup, tensors: Any, root: Any = 0, *_: Any) -> int:
    return _all(tensors) * (group.size() - 1) if _is_root(group, root) else 0


def _collected(group: ProcessGroup, _out: Any, part: Any, root: Any = 0, *_: Any) -> int:
    return 0 if _is_root(group, root) else _all(part)


def _summed_at(group: ProcessGroup, tensors: Any, root: Any = 0, *_: Any) -> int:
    return 0 if _is_root(group, root) else _all(tensors)


def _is_root(group: ProcessGroup, root: Any) -> bool:
    """True if this rank is the root of a call, whose argument is the root's rank or options with it."""
    return group.rank() == getattr(root, "rootRank", root)


def _sent(_group: ProcessGroup, tensors: Any, *_: Any) -> int:
    return _all(tensors)


_METHODS: dict[str, tuple[str, Callable[..., int]]] = {
    "allreduce": ("all-reduce", _reduced),
    "allreduce_coalesced": ("all-reduce", _reduced),
    "_allgather_base": ("all-gather", _gathered),
    "allgather": ("all-gather", _gathered),
    "allgather_into_tensor_coalesced": ("all-gather", _gathered),
    "_reduce_scatter_base": ("reduce-scatter", _scattered),
    "reduce_scatter": ("reduce-scatter", _scattered),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", _scattered),
    "alltoall_base": ("all-to-all", _exchanged),
    "all_gather_single": ("all-gather", _gathered),  # as torch 2.13 names them
    "reduce_scatter_single": ("reduce-scatter", _scattered),
    "all_to_all_single": ("all-to-all", _exchanged),
    "alltoall": ("all-to-all", _exchanged_list),
    "broadcast": ("broadcast", _broadcast),
    "gather": ("gather", _collected),
    "reduce": ("reduce", _summed_at),
    "send": ("send", _sent),
}
