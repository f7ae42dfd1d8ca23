"""Pickles are read as plain data: equal to what the unpickler makes of harmless ones, and nothing else."""

from __future__ import annotations

import collections
import os
import pickle
import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.engine.checkpoint.plain_pickle import Name, Record, read_pickle
from stretto.errors import StrettoError

SHARED = ["shared", 1]
PLAIN = {
    "entries": [
        {"sizes": [[1, 2], []], "pair": ("0", "x"), "three": (1, 2, 3), "many": (1, 2, 3, 4), "none": ()}
    ],
    "numbers": [0, -1, 255, 70000, 2**40, -(2**70), 1.5, True, False, None],
    "text": "é" * 300,
    "bytes": b"x" * 300,
    "shared": [SHARED, SHARED],
    7: {},
}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_comes_back(protocol: int) -> None:
    value = {
        key: each for key, each in PLAIN.items() if protocol > 2 or key != "bytes"
    }  # has no opcode there
    back = read_pickle(pickle.dumps(value, protocol))
    assert back == value
    assert back["shared"][0] is back["shared"][1]
    assert [type(number) for number in back["numbers"]] == [type(number) for number in PLAIN["numbers"]]


def test_plain_text_pickles_come_back() -> None:
    value = {"list": [1, 2], "tuple": (1, 2, 3, 4), "text": "a\nb", "float": 0.5, "long": 2**70}
    assert read_pickle(pickle.dumps(value, 0)) == value


def test_names_and_pairs_of_them_are_keys_and_nothing_deeper() -> None:
    """Megatron names a buffer by the types of its parameters and gradients."""
    types = {"torch.float32", "torch.bfloat16"}
    value = {(torch.bfloat16, torch.float32): 1, torch.float32: 2}
    pair = (Name("torch.bfloat16"), Name("torch.float32"))
    assert read_pickle(pickle.dumps(value, 2), types) == {pair: 1, pair[1]: 2}
    for key in (((torch.float32,),), (1, torch.float32), 1.5):
        with pytest.raises(StrettoError, match="a key that is neither text nor a number"):
            read_pickle(pickle.dumps({key: 1}, 2), types)


class Evil:
    def __init__(self, make: Any) -> None:
        self.make = make

    def __reduce__(self) -> Any:
        return self.make


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_run(protocol: int, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    code = f"open({str(planted)!r}, 'w').close()"
    for evil in (
        Evil((os.mkdir, (str(planted),))),
        Evil((eval, (code,))),
        Evil((exec, (code,))),
        Path("x"),
        collections.OrderedDict(a=1),
        {1, 2},
        bytearray(b"x"),
        complex(1, 2),
        Evil,
    ):
        data = pickle.dumps({"version": "2.10", "entries": [evil]}, protocol)
        with pytest.raises(StrettoError, match="more than plain data: it has"):
            read_pickle(data)
    assert not planted.exists()


@dataclass
class Pair:
    first: Any
    second: Any


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_listed_names_are_noted_and_nothing_is_made(protocol: int) -> None:
    """A class whose constructor and functions would be noticed is read without any of them being called."""
    names = {f"{__name__}.Pair", f"{__name__}.Evil", "posix.mkdir", "builtins.eval"}
    names |= {"__builtin__.eval"}  # its name in the protocols before 3
    both = pickle.dumps({"pair": Pair(Pair, (1, 2)), "evil": Evil((os.mkdir, ("/",)))}, protocol)
    back = read_pickle(both, names)
    pair, evil = back["pair"], back["evil"]
    assert (type(pair), pair.name, pair.arguments) == (Record, f"{__name__}.Pair", ())
    assert pair.state == {"first": Name(f"{__name__}.Pair"), "second": (1, 2)}
    assert (evil.name, evil.arguments, evil.state) == ("posix.mkdir", ("/",), None)
    with pytest.raises(StrettoError, match=r"it names '\w+.mkdir', which could run code"):
        read_pickle(both, names - {"posix.mkdir"})


@pytest.mark.parametrize(
    "data",
    [
        b"Na}b.",  # BUILD of what is no object
        b"}}b.",
        b"N)R.",  # a call of nothing
        b"X\x01\0\0\0x)R.",
        b"cx\ny\nNR.",  # arguments that are no tuple
        b"cx\ny\n.",  # a name that is not listed
        b"\x8c\x01xN\x93.",  # a name that is no text
        b"\x93.",
        b"Q.",
        b"cy\nx\n)R)}b.",
    ],
)
def test_objects_that_do_not_hold_together_are_refused(data: bytes) -> None:
    with pytest.raises(StrettoError):
        read_pickle(data, {"y.x"})


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'true'\ntR.",  # GLOBAL, REDUCE
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x82\x01.",  # EXT1
        b"P1\n.",  # PERSID
        b"N\x81.",  # NEWOBJ
        b"}}b.",  # BUILD
        b"\x96" + struct.pack("<Q", 2**50) + b"x.",  # BYTEARRAY8 of a petabyte
        b"\x97.",  # NEXT_BUFFER
    ],
)
def test_opcodes_that_could_do_something_are_refused(data: bytes) -> None:
    with pytest.raises(StrettoError, match="plain data"):
        read_pickle(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"N",
        b"garbage",
        b".",
        b"NN.",
        b"a.",
        b"Na.",
        b"u.",
        b"NNs.",
        b"](NNu.",
        b"}(]Nu.",  # an unhashable key
        b"}(((ttNu.",  # a nested key
        b"h\x05.",
        b"\x86.",
        b"t.",
        b"X\xff\xff\xff\x7fabc.",  # text of 2 GB
        b"\x8d" + struct.pack("<Q", 2**62) + b"x.",
        b"L" + b"9" * 5000 + b"L\n.",
    ],
)
def test_broken_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(StrettoError):
        read_pickle(data)


def test_limits() -> None:
    assert read_pickle(b"Nr\xff\xff\xff\x7f.") is None  # a memo of 2**31 places, of which one is used
    nested = b"(" * 100 + b"l" * 100 + b"."
    with pytest.raises(StrettoError, match="more than 64 containers"):
        read_pickle(nested)
    deep = read_pickle(b"]" * 100_000 + b"a" * 99_999 + b".")  # nothing walks down it
    del deep
    with pytest.raises(StrettoError, match="11 bytes, at most 10"):
        read_pickle(b"N" * 11, largest=10)


def test_damaged_pickles_are_plain_or_refused() -> None:
    stream = random.Random(0)
    undamaged = pickle.dumps(PLAIN, 4)
    for _ in range(3000):
        damaged = bytearray(undamaged)
        for _ in range(stream.randint(1, 4)):
            damaged[stream.randrange(len(damaged))] = stream.randrange(256)
        try:
            read_pickle(bytes(damaged))
        except StrettoError:
            continue
