"""What a training job is: a strict YAML file, its overrides, and all that can be checked before it starts."""

from stretto.config.load import dump, load
from stretto.config.schema import TrainConfig

__all__ = ["TrainConfig", "dump", "load"]
