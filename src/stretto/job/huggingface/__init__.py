"""Hugging Face's `config.json` to shapes and back, both from one description of each kind of model."""

from stretto.job.huggingface.fields import config_names, differences
from stretto.job.huggingface.read import (
    Reading,
    config_to_huggingface,
    kind_of,
    parse_config,
    read_config,
    read_file,
    read_shape,
    shape_from_huggingface,
)

__all__ = [
    "Reading",
    "config_names",
    "config_to_huggingface",
    "differences",
    "kind_of",
    "parse_config",
    "read_config",
    "read_file",
    "read_shape",
    "shape_from_huggingface",
]
