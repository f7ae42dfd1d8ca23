"""Values of a shell script's variables: what is unknown in them, parts of them, arithmetic and tests."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase

MARK = "\x00"  # around what is unknown, inside of words
_LONGEST_CUT = 4096  # characters of a value of which a part is taken: patterns cost their square


def unknown(what: str) -> str:
    """A value that nothing tells, by the name of a variable or by a command."""
    return f"{MARK}{what.replace(MARK, '')}{MARK}"


def unknown_in(word: str) -> str | None:
    """What is unknown in an expanded word: the name of a variable, or a command."""
    start = word.find(MARK)
    return None if start < 0 else word[start + 1 :].partition(MARK)[0]


def split_fields(text: str) -> list[str]:
    """The words of an unquoted value; what is unknown stays in one word, whatever its command has."""
    return re.findall(rf"(?:{MARK}[^{MARK}]*{MARK}|\S)+", text) if MARK in text else text.split()


def without_match(text: str, where: str, pattern: str) -> str:
    """`${NAME#PATTERN}` and its kind: a text without what matches at its begin or end, short or long.

    Raises:
        ValueError: the text is too long for that.
    """
    if len(text) > _LONGEST_CUT:
        raise ValueError(f"a value of more than {_LONGEST_CUT} characters")
    sizes = range(len(text) + 1) if len(where) == 1 else range(len(text), -1, -1)
    for size in sizes:
        part, kept = (
            (text[:size], text[size:]) if where[0] == "#" else (text[-size:], text[: len(text) - size])
        )
        if fnmatchcase(part if size else "", pattern):
            return kept
    return text


def _divided(left: int, right: int) -> int:
    """The quotient towards zero, as the shell's."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divided,
    ast.Mod: lambda left, right: left - right * _divided(left, right),
}
_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


def calculated(text: str) -> int:
    """The value of arithmetic on whole numbers.

    Raises:
        ValueError: it is something else, longer than 1,000 characters, or leaves 64 bits.
    """
    if len(text) > 1000:
        raise ValueError(f"arithmetic of {len(text)} characters")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            value = -_value(inner)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            value = _OPERATORS[type(sign)](_value(left), _value(right))
        case _:
            raise ValueError(node)
    if not -(2**63) <= value < 2**63:
        raise ValueError(value)
    return value


def decided(words: list[str], variables: Collection[str]) -> bool | None:
    """The outcome of a test of few words; None: not known.

    Args:
        variables: those that are set; others, which are unknown in `words`, are taken to be empty.
    """
    if len(words) > 100:
        return None
    for sign in ("||", "&&"):
        if sign in words:
            at = words.index(sign)
            left, right = decided(words[:at], variables), decided(words[at + 1 :], variables)
            if sign == "&&" and False in (left, right):
                return False
            if sign == "||" and True in (left, right):
                return True
            return None if None in (left, right) else sign == "&&"
    if words[:1] == ["!"]:
        inner = decided(words[1:], variables)
        return None if inner is None else not inner
    match words:
        case ["-n", word]:
            empty = _is_empty(word, variables)
            return None if empty is None else not empty
        case ["-z", word]:
            return _is_empty(word, variables)
        case [left, "=" | "==" | "!=" as sign, right]:
            if unknown_in(left + right) or re.search(r"[*?[]", right):  # a pattern, unless it is quoted
                return None
            return (left == right) is (sign != "!=")
        case [left, sign, right] if sign in _COMPARED:
            numbers = [word for word in (left, right) if re.fullmatch(r"-?\d{1,18}", word)]
            return _COMPARED[sign](int(left), int(right)) if len(numbers) == 2 else None
        case _:
            return None


def _is_empty(word: str, variables: Collection[str]) -> bool | None:
    """Whether a word is empty, as it is if all that is unknown in it are variables that nobody set."""
    parts = word.split(MARK)
    if any(parts[::2]):
        return False
    unset = [re.fullmatch(r"\$?\w+", name) is not None and name not in variables for name in parts[1::2]]
    return True if all(unset) else None
