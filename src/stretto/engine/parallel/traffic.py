"""How many bytes a rank sends, by kind of communication.

    with traffic() as sent:
        pipeline.step(...)
    print(sent.bytes)

Counts at the methods of ProcessGroup, which are replaced while counting, so there is no cost otherwise.
Functions of torch.distributed are counted too; sends from C++, as for DTensor, are not.

The bytes are those that leave this rank under a bandwidth-optimal algorithm, for S bytes over n ranks:
all-reduce 2 (n-1)/n S, all-gather and reduce-scatter (n-1)/n S where S is the whole (Patarasuk & Yuan 2009),
all-to-all the part for other ranks, a message its size. A broadcast counts (n-1) S at its root, though other
ranks may forward it; a gather S at all ranks but the root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

Options = TypeVar("Options")

Heard = Callable[[ProcessGroup, str, int], None]

_names = dict[int, tuple[object, str]]()  # by id; the object stays so that its id does
_open = list["Traffic"]()
_plain = dict[str, Any]()  # the methods that are replaced


class Traffic:
    """The counts.

    Attributes:
        bytes: by kind: "all-reduce", "all-gather", "re-gather" (activations that the backward gathers once
            more), "reduce-scatter", "all-to-all", "broadcast", "gather", "send".
        calls: by kind, how often.
        heard: called for each collective with the group, the kind, and the bytes of the whole (of all ranks
            together before a reduce-scatter or after an all-gather, else of this rank's tensor).
    """

    def __init__(self, heard: Heard | None = None) -> None:
        self.heard = heard
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.bytes.values())


def called(options: Options, kind: str) -> Options:
    """Calls with just these options are counted as `kind`, such as a reduce-scatter made of an all-to-all."""
    _names[id(options)] = options, kind
    return options


@contextmanager
def traffic(heard: Heard | None = None) -> Generator[Traffic]:
    """Count what this process sends while in the `with`, all threads together; may be nested.

    Args:
        heard: called for each collective, see `Traffic`.
    """
    counted = Traffic(heard)
    _open.append(counted)
    if len(_open) == 1:
        for method, (kind, size) in _METHODS.items():
            if method in vars(ProcessGroup):
                _plain[method] = vars(ProcessGroup)[method]  # getattr would not give what binds to a group
                setattr(ProcessGroup, method, _counting(getattr(ProcessGroup, method), kind, size))
    try:
        yield counted
    finally:
        _open.remove(counted)
        if not _open:
            for method, plain in _plain.items():
                setattr(ProcessGroup, method, plain)
            _plain.clear()


def _counting(plain: Any, kind: str, size: Callable[..., int]) -> Any:
    def call(group: ProcessGroup, *arguments: Any, **named: Any) -> Any:
        name = kind
        for value in (*arguments, *named.values()):
            if id(value) in _names:
                name = _names[id(value)][1]
        sent = size(group, *arguments)
        for counted in _open:
            counted.bytes[name] += sent
            counted.calls[name] += 1
            if counted.heard is not None:
                counted.heard(group, name, _whole(kind, name, arguments))
        return plain(group, *arguments, **named)

    return call


# ---------------------------------------------------------------------- bytes sent, from a call's arguments


def _all(tensors: Tensor | Sequence[Tensor]) -> int:
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_all, tensors))


def _whole(kind: str, name: str, arguments: Sequence[Any]) -> int:
    """Of a call of a method of one kind that counts as another."""
    in_place = kind in ("all-reduce", "broadcast", "send")
    return _all(arguments[0 if in_place or name in ("all-gather", "re-gather") else 1])


def _reduced(group: ProcessGroup, tensors: Any, *_: Any) -> int:
    return 2 * _all(tensors) * (group.size() - 1) // group.size()


def _gathered(group: ProcessGroup, _out: Any, mine: Any, *_: Any) -> int:
    return _all(mine) * (group.size() - 1)


def _scattered(group: ProcessGroup, _out: Any, whole: Any, *_: Any) -> int:
    return _all(whole) * (group.size() - 1) // group.size()


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


def _collected(group: ProcessGroup, _out: Any, mine: Any, root: Any = 0, *_: Any) -> int:
    return 0 if _is_root(group, root) else _all(mine)


def _is_root(group: ProcessGroup, root: Any) -> bool:
    """Of a call that names its root, or has it in its options."""
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
    "send": ("send", _sent),
}
