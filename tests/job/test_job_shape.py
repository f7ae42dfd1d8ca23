from __future__ import annotations

import pickle
from dataclasses import asdict, replace
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.job.shape import ModelShape, shape_from_record

GPT: dict[str, Any] = {"family": "gpt", "layers": 2, "hidden": 48, "heads": 4, "vocab": 100, "sequence": 16}
LLAMA: dict[str, Any] = {**GPT, "family": "llama"}


def test_gpt_defaults():
    shape = ModelShape(**GPT)
    assert (shape.kv_heads, shape.head_dim, shape.ffn) == (4, 12, 192)
    assert shape.tied
    assert shape.bias
    assert not shape.gated


def test_llama_defaults():
    shape = ModelShape(**LLAMA | {"hidden": 4096, "heads": 32})
    assert (shape.kv_heads, shape.head_dim, shape.ffn) == (32, 128, 11008)
    assert not shape.tied
    assert not shape.bias
    assert shape.gated


def test_widths_follow_head_dim():
    shape = ModelShape(**LLAMA, kv_heads=2, head_dim=8)
    assert (shape.attention_width, shape.kv_width) == (32, 16)


def test_none_is_the_default():
    none = dict.fromkeys(("kv_heads", "head_dim", "ffn", "tied", "bias"))
    assert ModelShape(**GPT, **none) == ModelShape(**GPT)


def test_the_hash_is_of_all_fields_and_stays_in_its_process():
    shape = ModelShape(**LLAMA)
    assert hash(shape) == hash(ModelShape(**LLAMA)) != hash(replace(shape, norm_eps=1e-3))
    assert vars(pickle.loads(pickle.dumps(shape))) == vars(ModelShape(**LLAMA))


def test_survives_a_dictionary_and_replace():
    shape = ModelShape(**LLAMA, kv_heads=2)
    assert shape_from_record(asdict(shape)) == shape
    assert hash(shape_from_record(asdict(shape))) == hash(shape)
    assert replace(shape, layers=7).layers == 7


@pytest.mark.parametrize(
    ("change", "says", "hint"),
    [
        ({"family": "lama"}, "family is lama", "'llama'"),
        ({"layers": 0}, "layers is 0", "layers"),
        ({"vocab": 10.5}, "vocab is 10.5", "vocab"),
        ({"heads": True}, "heads is True", "heads"),
        ({"hidden": 50}, "hidden is 50: it must be a multiple of heads, which is 4", "48|52"),
        ({"kv_heads": 3}, "kv_heads is 3: it must divide heads, which is 4", "2|4"),
        ({"dropout": 1.0}, "dropout is 1.0", "0.1"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0", "1e-5"),
        ({"family": "llama", "dropout": 0.1}, "dropout is 0.1", "dropout: 0"),
        ({"family": "llama", "head_dim": 7}, "head_dim is 7: it must be even", "8"),
        ({"family": "llama", "rope_theta": -1.0}, "rope_theta is -1.0", "10000"),
    ],
)
def test_bad_shapes_are_named(change: dict[str, Any], says: str, hint: str):
    with pytest.raises(StrettoError, match=says) as caught:
        ModelShape(**GPT | change)
    assert any(part in (caught.value.hint or "") for part in hint.split("|"))
