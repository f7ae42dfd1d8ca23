"""A config file to the job that it describes: a language model's or a recommender's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stretto.recommender.config.kind import is_recommender
from stretto.recommender.config.schema import RecommenderConfig
from stretto.run.config.load import parse_as, read_config, run_name, values_of
from stretto.run.config.schema import TrainConfig

AnyConfig = TrainConfig | RecommenderConfig


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> AnyConfig:
    """The job of a YAML file, with overrides such as `optim.clip=1.0` laid over it.

    Raises:
        StrettoError: as `stretto.run.config.load.load`.
    """
    path = Path(path)
    return parse_config(read_config(path), str(path), overrides, name=run_name(path))


def parse_config(
    text: str, source: str = "config", overrides: Sequence[str] = (), *, name: str = "train"
) -> AnyConfig:
    """As `load_config`, from text; `source` stands for the file in errors and `name` is the run's default
    name.
    """
    values, read = values_of(text, source)
    if is_recommender(values, overrides):
        return parse_as(RecommenderConfig, values, read, overrides, name)
    return parse_as(TrainConfig, values, read, overrides, name)
