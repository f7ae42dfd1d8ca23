"""Hostile variants of valid input: of documents, of bytes, and of lines."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

HOSTILE: list[Any] = [
    *(0, -1, 1, 2, 1.5, -0.0, 1e308, 5e-324, 10**9, 2**31, 2**63, 2**64, 10**18, 10**400, -(10**400)),
    *(float("nan"), float("inf"), float("-inf"), None, True, False),
    *("", "x", "a" * 10_000, "1" * 5000, "1e999", "\0", "\ud800", "../../etc/passwd", "/dev/zero", "${HOME}"),
    *("9**9**9", "!!python/object/apply:os.system [true]", "\u202e", "nan", "[", "{}", "%s%n", "-1", "0x10"),
    *([], {}, [[]], [{}], [0] * 5, [None], {"": 0}, {"a": {"b": {"c": {}}}}, [1, "x", None]),
]


DEEP = {"deep lists": "[" * 3000 + "]" * 3000, "deep mappings": '{"a":' * 3000 + "1" + "}" * 3000}
"""What stands for them in a document: Python itself cannot write them."""


def nested(depth: int, how: int) -> Any:
    """Lists, mappings or both in each other."""
    value: Any = 0
    for at in range(depth):
        value = [value] if (how or at % 3) == 1 else {"a": value}
    return value


def document(valid: Any, draw: random.Random) -> Any:
    """A copy of a document of mappings and lists, changed in one to three places."""
    changed = copy.deepcopy(valid)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        holders = list(_holders(changed))
        if not holders:
            return copy.deepcopy(draw.choice(HOSTILE))
        _change(*draw.choice(holders), draw)
    return changed


def _holders(value: Any) -> Any:
    """Every mapping or list, with a key or an index in it."""
    left = [value]
    while left:
        value_left = left.pop()
        for key in (
            value_left
            if isinstance(value_left, dict)
            else range(len(value_left))
            if isinstance(value_left, list)
            else ()
        ):
            yield value_left, key
            left.append(value_left[key])


def _change(holder: Any, key: Any, draw: random.Random) -> None:
    match draw.randrange(9):
        case 0:
            del holder[key]
        case 1:
            holder[key] = draw.choice((nested(3, draw.randrange(3)), nested(50, draw.randrange(3)), *DEEP))
        case 2 if isinstance(holder, dict):
            holder[draw.choice((f"{key}x", key[:-1], "", "x" * 3000, "__class__", "\0"))] = holder.pop(key)
        case 2 | 3 if isinstance(holder, list):
            holder.extend(copy.deepcopy(holder[key]) for _ in range(draw.choice((1, 3, 300))))
        case 3:
            holder["more"] = copy.deepcopy(draw.choice(HOSTILE))
        case 4 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            number = holder[key]
            holder[key] = draw.choice(
                (-number, number + 1, number - 1, number * 2, 0.5, str(number), [number])
            )
        case 4 | 5 if isinstance(holder[key], str):
            text = holder[key]
            holder[key] = draw.choice((text[:-1], text + " ", text.upper(), text * 50, text[::-1], [text]))
        case _:
            holder[key] = copy.deepcopy(draw.choice(HOSTILE))


def as_json(valid: Any, draw: random.Random) -> bytes:
    """A changed document as JSON; at times broken as text."""
    text = _deep(json.dumps(document(valid, draw), ensure_ascii=draw.random() < 0.5))
    data = text.encode("utf-8", "surrogatepass")
    return broken(data, draw) if draw.random() < 0.2 else data


def as_yaml(valid: Any, draw: random.Random) -> bytes:
    """A changed document as YAML; at times broken as text, or with anchors that multiply."""
    import yaml

    if draw.random() < 0.03:
        bomb = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9))
        return f"a0: &a0 [x]\n{bomb}\n".encode()
    text = _deep(yaml.safe_dump(document(valid, draw), allow_unicode=True))
    data = text.encode("utf-8", "surrogatepass")
    return broken(data, draw) if draw.random() < 0.2 else data


def _deep(text: str) -> str:
    for name, written in DEEP.items():
        text = text.replace(f'"{name}"', written).replace(name, written)
    return text


def broken(data: bytes, draw: random.Random) -> bytes:
    """Bytes flipped, cut off, doubled, exchanged or put in."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at, to = sorted(draw.randrange(len(changed) + 1) for _ in range(2))
        match draw.randrange(7):
            case 0 if changed:
                changed[min(at, len(changed) - 1)] ^= 1 << draw.randrange(8)
            case 1:
                del changed[at:]
            case 2:
                del changed[at : min(to, at + 40)]
            case 3:
                changed[at:at] = changed[at : min(to, at + 2000)]
            case 4:
                changed[at : at + 8] = draw.choice((b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f"))
            case 5:
                changed[at:at] = draw.choice(
                    (b"\xef\xbb\xbf", b"\xff\xfe", b"{" * 3000, b"\x80", b"9" * 5000)
                )
            case _:
                changed[at:at] = bytes(draw.randrange(256) for _ in range(draw.choice((1, 4, 64))))
    return bytes(changed)


def lines(valid: list[list[str]], joined: str) -> Callable[[random.Random], bytes]:
    """Makes changed tables, whose cells `joined` separates."""

    def make(draw: random.Random) -> bytes:
        rows = document([list(row) for row in valid], draw)
        rows = rows if isinstance(rows, list) else [rows]
        text = "\n".join(joined.join(map(str, row if isinstance(row, list) else [row])) for row in rows)
        data = text.encode("utf-8", "surrogatepass")
        return broken(data, draw) if draw.random() < 0.3 else data

    return make
