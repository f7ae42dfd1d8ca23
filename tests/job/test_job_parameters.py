from __future__ import annotations

import csv
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.job.experts import ExpertShape
from stretto.job.parameters import count_parameters, parameter_shapes
from stretto.job.presets import PRESETS, preset
from stretto.job.shape import ModelShape

ROWS = list(csv.DictReader((Path(__file__).parent / "models.csv").read_text().splitlines()))
EXACT = [row for row in ROWS if row["params_exact"]]
ROUNDED = [row for row in ROWS if row["params_b"]]

# The counts given for Llama 2 are of all tensors in its published files, which keep the rotary frequencies,
# head_dim / 2 numbers a layer, as buffers. They are no parameters.
STORED_BUFFERS = {"llama2-7b": 32 * 64, "llama2-13b": 40 * 64, "llama2-70b": 80 * 64}


@pytest.mark.parametrize("row", EXACT, ids=lambda row: row["name"])
def test_published_counts_to_the_integer(row: dict[str, str]):
    published = int(row["params_exact"]) - STORED_BUFFERS.get(row["name"], 0)
    assert count_parameters(preset(row["name"])).total == published


@pytest.mark.parametrize("row", ROUNDED, ids=lambda row: row["name"])
def test_published_counts_to_their_rounding(row: dict[str, str]):
    billions = Decimal(row["params_b"])
    last_place = Decimal(1).scaleb(billions.normalize().as_tuple().exponent)  # pyright: ignore
    if "." in row["params_b"]:
        last_place = Decimal("0.1")
    counted = Decimal(count_parameters(preset(row["name"])).total) / 10**9
    assert abs(counted - billions) <= last_place / 2


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_presets_have_the_published_sizes(row: dict[str, str]):
    shape = preset(row["name"])
    for field in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"):
        assert getattr(shape, field) == int(row[field]), field
    assert shape.pretraining_sequence == int(row["sequence"])


@pytest.mark.parametrize(
    ("name", "total"),
    [  # model cards: GPT-2's published files; Llama 3.2 1B and 3B
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        # half of the bytes that the indices of the published bfloat16 files sum up
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
    ],
)
def test_other_published_counts(name: str, total: int):
    assert count_parameters(preset(name)).total == total


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", "12.9"), ("mixtral-8x22b", "39")])
def test_published_counts_of_active_parameters(name: str, billions: str):
    """Jiang et al. 2024 give 13 of 47 billion; the announcements 12.9 of 46.7, and 39 of 141."""
    counted = Decimal(count_parameters(preset(name)).active) / 10**9
    assert counted.quantize(Decimal(billions)) == Decimal(billions)


SIZES = st.integers(1, 6)


@given(
    experts=st.integers(1, 9),
    data=st.data(),
    f=SIZES,
    shared=st.integers(0, 4),
    gated=st.booleans(),
    bias=st.booleans(),
)
def test_experts_closed_form(experts: int, data: st.DataObject, f: int, shared: int, gated: bool, bias: bool):
    k = data.draw(st.integers(1, experts))
    plain = ModelShape(
        family="llama" if gated else "gpt",
        layers=3,
        hidden=8,
        heads=2,
        ffn=5,
        vocab=11,
        sequence=4,
        bias=bias,
    )
    shape = replace(plain, moe=ExpertShape(experts=experts, top_k=k, ffn=f, shared_ffn=shared))

    def mlp(width: int) -> int:
        wide = 2 * width if gated else width
        return (wide + width) * 8 + (wide + 8 if bias else 0)

    before, after = count_parameters(plain), count_parameters(shape)
    second = experts * mlp(f) + 8 * experts + (mlp(shared) if shared else 0)
    assert after.per_layer == before.per_layer - mlp(5) + second
    assert after.total - after.active == 3 * (experts - k) * mlp(f)
    assert before.active == before.total
    assert (after.embedding, after.norm, after.output) == (before.embedding, before.norm, before.output)


@given(layers=SIZES, heads=SIZES, head_dim=SIZES, vocab=st.integers(1, 99), sequence=st.integers(1, 99))
def test_gpt_closed_form(layers: int, heads: int, head_dim: int, vocab: int, sequence: int):
    h = heads * head_dim
    shape = ModelShape(family="gpt", layers=layers, hidden=h, heads=heads, vocab=vocab, sequence=sequence)
    count = count_parameters(shape)
    assert count.total == 12 * layers * h**2 + 13 * layers * h + 2 * h + (vocab + sequence) * h
    assert count.embedding == (vocab + sequence) * h
    assert count.non_embedding == 12 * layers * h**2 + 13 * layers * h + 2 * h


@given(layers=SIZES, kv=SIZES, group=SIZES, half=SIZES, f=SIZES, tied=st.booleans())
def test_llama_closed_form(layers: int, kv: int, group: int, half: int, f: int, tied: bool):
    heads, d, vocab = kv * group, 2 * half, 11
    h = heads * d
    shape = ModelShape(
        family="llama",
        layers=layers,
        hidden=h,
        heads=heads,
        kv_heads=kv,
        ffn=f,
        vocab=vocab,
        sequence=4,
        tied=tied,
    )
    count = count_parameters(shape)
    per_layer = 2 * h * heads * d + 2 * h * kv * d + 3 * h * f + 2 * h
    assert count.per_layer == per_layer
    assert count.total == layers * per_layer + h + vocab * h * (1 if tied else 2)
    assert count.output == (0 if tied else vocab * h)


@pytest.mark.parametrize("name", PRESETS)
def test_names_add_up_to_the_count(name: str):
    shape = preset(name)
    total = 0
    for sizes in parameter_shapes(shape).values():
        elements = 1
        for size in sizes:
            elements *= size
        total += elements
    count = count_parameters(shape)
    assert total == count.total
    assert total == count.embedding + count.encoder + count.blocks + count.norm + count.output
