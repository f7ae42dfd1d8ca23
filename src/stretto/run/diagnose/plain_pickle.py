"""Pickles that hold plain data only, read without Python's unpickler.

An unpickler looks up and calls whatever the file names, so a dump from somebody else's machine could run
code. This one walks the opcodes and knows those of dicts, lists, tuples, text, bytes, numbers, booleans and
None; a file with any other is refused. Nothing in it can name, import or call anything, and no opcode
allocates more than the file is long.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

from stretto.errors import StrettoError

LARGEST = 256 * 2**20  # bytes of a file
DEEPEST = 64  # containers open at the same time

_Stack = list[Any]
_IGNORED = frozenset({"PROTO", "FRAME"})
_INTEGERS = frozenset({"BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4"})
_TEXTS = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"})
_VALUES = _INTEGERS | _TEXTS | {"BINFLOAT", "FLOAT", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUT = frozenset({"BINPUT", "LONG_BINPUT", "PUT"})
_GET = frozenset({"BINGET", "LONG_BINGET", "GET"})


def read_pickle(data: bytes) -> Any:
    """The plain data in a pickle.

    Raises:
        StrettoError: the bytes are no pickle, hold something other than plain data, or are too large or
            nested too deeply.
    """
    if len(data) > LARGEST:
        raise StrettoError(
            f"{len(data):,} bytes, at most {LARGEST:,} are read",
            hint="record fewer calls: TORCH_FR_BUFFER_SIZE",
        )
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.result()
            machine.run(opcode.name, argument)
    except StrettoError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, UnicodeDecodeError, OverflowError) as error:
        raise StrettoError(f"it is no pickle of plain data: {error}", hint="is the file complete?") from None
    raise StrettoError("the pickle ends before its end", hint="is the file complete?")


class _Machine:
    """The stack of values, the values put aside for later use, and where each open container begins."""

    def __init__(self) -> None:
        self._stack = _Stack()
        self._marks = list[int]()
        self._memo = dict[int, Any]()

    def result(self) -> Any:
        (value,) = self._stack
        return value

    def run(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _IGNORED:
            return
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            self._replace(_TUPLES[name], tuple)
        elif name in _PUT:
            self._memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in _GET:
            stack.append(self._memo[int(argument)])
        elif name == "MARK":
            if len(self._marks) == DEEPEST:
                raise StrettoError(f"more than {DEEPEST} containers are nested in the pickle")
            self._marks.append(len(stack))
        else:
            self._fill(name)

    def _replace(self, count: int, make: Callable[[_Stack], Any]) -> None:
        """Make one value of the last `count`."""
        at = len(self._stack) - count
        if at < 0:
            raise IndexError("a container of values that are not there")
        self._stack[at:] = [make(self._stack[at:])]

    def _fill(self, name: str) -> None:
        """The opcodes that take values from the stack into a container."""
        stack = self._stack
        if name in ("TUPLE", "LIST", "DICT"):
            kinds: dict[str, Callable[[_Stack], Any]] = {"TUPLE": tuple, "LIST": list, "DICT": _pairs}
            self._replace(len(stack) - self._marks.pop(), kinds[name])
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else self._since_mark()
            _of(list, stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else self._since_mark()
            _of(dict, stack[-1]).update(_pairs(items))
        else:
            raise StrettoError(
                f"the pickle is more than plain data: it has {name}, which could run code",
                hint="no dump of torch has that; do not load the file elsewhere either",
            )

    def _since_mark(self) -> _Stack:
        at = self._marks.pop()
        items = self._stack[at:]
        del self._stack[at:]
        return items


def _pairs(items: _Stack) -> dict[Any, Any]:
    """Keys and values by turns; a key that holds others is refused, as hashing it may never end."""
    if any(type(key) not in (str, int) for key in items[::2]):
        raise TypeError("a key that is neither text nor a number")
    return dict(zip(items[::2], items[1::2], strict=True))


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} is filled")
    return value
