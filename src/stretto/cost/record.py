"""A shape to and from plain values, as checkpoints keep it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stretto.cost.experts import ExpertShape
from stretto.cost.shape import ModelShape


def shape_to_record(shape: ModelShape) -> dict[str, Any]:
    """The fields of the shape, in values that JSON has."""
    return asdict(shape)


def shape_from_record(sizes: Mapping[str, Any]) -> ModelShape:
    """The shape of such fields; a field that was not there yet when they were written takes its usual value.

    Raises:
        TypeError: they are not a shape's fields.
        StrettoError: the sizes do not fit each other.
    """
    experts = sizes.get("moe")
    moe = ExpertShape(**experts) if isinstance(experts, Mapping) else None
    given: dict[str, Any] = {**sizes, "moe": moe}
    return ModelShape(**given)
