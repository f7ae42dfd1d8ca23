"""A JSON array, read element by element: memory is that of the longest element."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from stretto.errors import StrettoError

_LONGEST_TOKEN = 16  # characters of -Infinity, of a pair of escapes
_SPACE = re.compile(r"[ \t\r\n]*")


def _may_be_cut_off(error: Exception, length: int) -> bool:
    """Whether more text could mend the error: it is at the end, or in a string that has not ended.

    Without this a mistake in the first element would read all of a large file into memory.
    """
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.pos > length - _LONGEST_TOKEN or error.msg.startswith("Unterminated string")


def array_elements(path: object, blocks: Iterable[str]) -> Iterator[Any]:
    """The elements of the array whose text comes in blocks.

    Raises:
        StrettoError: not JSON, with the number of the element; or something before or after the array.
    """
    source = iter(blocks)
    text, at = "", 0
    number = 0
    decoder = json.JSONDecoder()

    def more() -> bool:
        """Read as much again as is waiting, so that a long element is looked at few times."""
        nonlocal text, at
        parts = [text[at:]]
        wanted = max(len(parts[0]), 1)
        while wanted > 0 and (block := next(source, None)) is not None:
            parts.append(block)
            wanted -= len(block)
        text, at = "".join(parts), 0
        return len(parts) > 1

    def next_character() -> str:
        """The next character that is no white space, which is not taken; empty at the end."""
        nonlocal at
        while True:
            at = _SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if at < len(text) or not more():
                return text[at : at + 1]

    def broken(why: str) -> StrettoError:
        return StrettoError(f"{path}, element {number}: not JSON ({why})", hint="write the array again")

    if next_character() != "[":
        raise broken("no array")
    at += 1
    if next_character() == "]":
        at += 1
    else:
        while True:
            number += 1
            next_character()
            while True:
                try:
                    element, end = decoder.raw_decode(text, at)
                except (ValueError, RecursionError) as error:
                    if _may_be_cut_off(error, len(text)) and more():
                        continue
                    raise broken(str(error)) from None
                if end < len(text) or not more():  # a number may go on in the next block
                    break
            yield element
            at = end
            separator = next_character()
            at += 1
            if separator == "]":
                break
            if separator != ",":
                raise broken(f"{separator!r} after it" if separator else "it ends within the array")
    if next_character():
        raise StrettoError(
            f"{path}: text after the JSON array", hint="write one array, or one JSON object a line"
        )
