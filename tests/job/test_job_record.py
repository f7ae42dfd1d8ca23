"""A shape as a checkpoint keeps it reads back as it was."""

from __future__ import annotations

import json

import pytest

from stretto.job.experts import ExpertShape
from stretto.job.presets import preset
from stretto.job.shape import ModelShape, shape_from_record, shape_to_record

PLAIN = preset("llama3-8b")
EXPERTS = ModelShape(
    family="llama",
    layers=2,
    hidden=32,
    heads=4,
    vocab=50,
    sequence=8,
    moe=ExpertShape(experts=4, capacity=1.5, z=1e-3),
)


@pytest.mark.parametrize("shape", [PLAIN, EXPERTS], ids=["plain", "experts"])
def test_a_shape_reads_back(shape: ModelShape) -> None:
    assert shape_from_record(json.loads(json.dumps(shape_to_record(shape)))) == shape


def test_a_record_from_before_there_were_experts_has_none() -> None:
    record = shape_to_record(PLAIN)
    del record["moe"]
    assert shape_from_record(record) == PLAIN


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(TypeError):
        shape_from_record({"layers": 2, "colour": "red"})
