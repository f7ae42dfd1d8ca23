"""Whether a config is a recommender's: by the family or the preset that its model names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from stretto.recommender.shape import DLRM_PRESETS

FAMILIES = ("dlrm",)


def is_recommender(values: object, overrides: Sequence[str] = ()) -> bool:
    """Of a config's plain values, with overrides such as `model.family=dlrm` laid over them."""
    model: dict[str, Any] = {}
    if isinstance(values, Mapping):
        section = cast("Mapping[str, Any]", values).get("model")
        if isinstance(section, Mapping):
            model.update(cast("Mapping[str, Any]", section))
    for override in overrides:
        name, _, text = override.partition("=")
        section, _, field = name.strip().partition(".")
        if section == "model":
            model[field] = text.strip()
    return model.get("family") in FAMILIES or named_recommender(model.get("preset"))


def named_recommender(preset: object) -> bool:
    """Whether it is the name of a known recommender."""
    return isinstance(preset, str) and preset.lower().replace("_", "-") in DLRM_PRESETS
