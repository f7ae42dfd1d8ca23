"""Read pickles as plain data, without Python's unpickler.

Python's unpickler looks up and calls any name in a file, so a file of unknown origin could run code. This one
interprets only the opcodes of dicts, lists, tuples, text, bytes, numbers, booleans and None. A caller that
expects objects lists the allowed names: each object becomes a `Record` of its name and arguments. Nothing is
imported, looked up or called, all other opcodes are refused, and none allocates more than the file's length.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from stretto.errors import StrettoError

LARGEST = 256 * 2**20  # bytes of a file
DEEPEST = 64  # containers open at the same time
LONGEST_NAME = 80  # characters of a refused name that are shown

T = TypeVar("T")
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
_OBJECTS = frozenset({"GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID"})


@dataclass(frozen=True)
class Name:
    """A name in a pickle, such as "torch.float32", as text; it was not looked up."""

    text: str


@dataclass(eq=False, slots=True)
class Record:
    """The description of an object in a pickle; equal only to itself.

    name: name of the class or function that creates the object; "" for a reference out of the pickle.
    arguments: arguments of that class or function.
    state: state that is set afterwards.
    """

    name: str
    arguments: Any
    state: Any = None


def read_pickle(data: bytes, names: Container[str] = (), largest: int = LARGEST) -> Any:
    """Return the plain data in a pickle.

    Args:
        names: allowed names of classes, functions and constants; objects become a `Record`.
        largest: maximum number of bytes.

    Raises:
        StrettoError: the bytes are no pickle, are more than plain data, too large, or nested too deeply.
    """
    if len(data) > largest:
        raise StrettoError(f"{len(data):,} bytes, at most {largest:,} are read")
    machine = _Machine(names)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.result()
            machine.run(opcode.name, argument)
    except StrettoError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, UnicodeDecodeError, OverflowError) as error:
        raise StrettoError(f"it is no pickle of plain data: {error}", hint="is the file complete?") from None
    raise StrettoError("the pickle is truncated", hint="is the file complete?")


class _Machine:
    """The stack of values, the memo of values for later use, and the start of each open container."""

    def __init__(self, names: Container[str]) -> None:
        self._names = names
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
        elif name in _OBJECTS and self._names != ():
            self._note(name, argument)
        else:
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
                    hint="no such file of torch has that; do not load it elsewhere either",
                )

    def _note(self, opcode: str, argument: Any) -> None:
        """Record an opcode that would look up, create or change an object."""
        stack = self._stack
        if opcode == "GLOBAL":
            stack.append(self._name(".".join(argument.split(" ", 1))))
        elif opcode == "STACK_GLOBAL":
            module, name = _of(str, stack.pop(-2)), _of(str, stack.pop())
            stack.append(self._name(f"{module}.{name}"))
        elif opcode == "BINPERSID":
            stack.append(Record("", stack.pop()))
        elif opcode == "BUILD":
            state = stack.pop()
            _of(Record, stack[-1]).state = state
        else:
            arguments = _of(tuple, stack.pop())
            stack.append(Record(_of(Name, stack.pop()).text, arguments))

    def _name(self, text: str) -> Name:
        if text not in self._names:
            raise StrettoError(
                f"the pickle is more than plain data: it names {text[:LONGEST_NAME]!r}, which could run code",
                hint="no such file of torch has that; do not load it elsewhere either",
            )
        return Name(text)

    def _replace(self, count: int, make: Callable[[_Stack], Any]) -> None:
        """Replace the last `count` values by the one that `make` returns for them."""
        at = len(self._stack) - count
        if at < 0:
            raise IndexError("a container has more values than the stack")
        self._stack[at:] = [make(self._stack[at:])]

    def _since_mark(self) -> _Stack:
        at = self._marks.pop()
        items = self._stack[at:]
        del self._stack[at:]
        return items


def _pairs(items: _Stack) -> dict[Any, Any]:
    """Pair alternating keys and values; nested keys other than names are refused, since hashing may not
    end.
    """
    if not all(map(_is_key, items[::2])):
        raise TypeError("a key that is neither text nor a number")
    return dict(zip(items[::2], items[1::2], strict=True))


def _is_key(key: Any) -> bool:
    names = cast("tuple[Any, ...]", key) if type(key) is tuple else (key,)
    return type(key) in (str, int, Record) or all(type(name) is Name for name in names)


def _of(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value
