"""What a training job is: a strict YAML file, its overrides, and all that can be checked before it starts."""

from stretto.run.config.load import dump, load
from stretto.run.config.schema import TrainConfig

__all__ = ["TrainConfig", "dump", "load"]
