"""A shape to and from plain values, as checkpoints keep it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from stretto.cost.attention import AttentionShape, LatentShape
from stretto.cost.experts import ExpertShape
from stretto.cost.shape import ModelShape

_LATER = ("attention", "mlp", "norm", "beyond")  # written only where they are not the family's usual


def shape_to_record(shape: ModelShape) -> dict[str, Any]:
    """The fields of the shape, in values that JSON has."""
    usual = ModelShape(family=shape.family, layers=1, hidden=2, heads=1, vocab=1, sequence=1)
    same = {name for name in _LATER if getattr(shape, name) == getattr(usual, name)}
    return {name: value for name, value in asdict(shape).items() if name not in same}


def shape_from_record(sizes: Mapping[str, Any]) -> ModelShape:
    """The shape of such fields; a field that was not there yet when they were written takes its usual value.

    Raises:
        TypeError: they are not a shape's fields.
        StrettoError: the sizes do not fit each other.
    """
    experts, attention = sizes.get("moe"), sizes.get("attention")
    moe = ExpertShape(**experts) if isinstance(experts, Mapping) else None
    given: dict[str, Any] = {**sizes, "moe": moe, "beyond": tuple(sizes.get("beyond", ()))}
    if isinstance(attention, Mapping):
        own = dict(cast(Mapping[str, Any], attention))
        latent = own.pop("latent", None)
        given["attention"] = AttentionShape(**own, latent=latent and LatentShape(**latent))
    return ModelShape(**given)


def fields_of(shape: ModelShape) -> dict[str, Any]:
    """The fields as they are, what is a shape of its own among them whole."""
    return {name: getattr(shape, name) for name in shape.__dataclass_fields__}
