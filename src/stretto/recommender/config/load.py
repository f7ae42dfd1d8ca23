"""Reads the config of a recommender or a language model; only this module decides which of them it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.shape import is_dlrm
from stretto.run.config.load import parse_as, read_config, run_name, values_of
from stretto.run.config.schema import TrainConfig

AnyConfig = TrainConfig | RecommenderConfig
FAMILY = "dlrm"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> AnyConfig:
    """Read a job from a YAML file, a language model's or a recommender's, with overrides (`optim.clip=1.0`).

    Raises:
        StrettoError: as `stretto.run.config.load.load`.
    """
    path = Path(path)
    return parse_config(read_config(path), str(path), overrides, name=run_name(path))


def parse_config(
    text: str, source: str = "config", overrides: Sequence[str] = (), *, name: str = "train"
) -> AnyConfig:
    """As `load_config`, from text. Errors refer to the text as `source`; `name` is the default name of the
    run.
    """
    values, read = values_of(text, source)
    schema = RecommenderConfig if is_recommender(values, overrides) else TrainConfig
    return parse_as(schema, values, read, overrides, name)


def is_recommender(values: object, overrides: Sequence[str] = ()) -> bool:
    """True if the values of a config describe a recommender, judging by `model.family` and `model.preset`
    after overrides.
    """
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
    preset = model.get("preset")
    return model.get("family") == FAMILY or (isinstance(preset, str) and is_dlrm(preset))
