"""Build the plain model of a shape."""

from __future__ import annotations

from stretto.engine.models.language import LanguageModel
from stretto.engine.models.lora import add_adapters
from stretto.job.shape import ModelShape, check_built


def build(shape: ModelShape) -> LanguageModel:
    """Return the plain model of a shape, with torch's default initial values (`weights.initialise` sets
    Stretto's).

    Under `torch.device("meta")` the parameters have shapes but no storage.

    Raises:
        StrettoError: the shape has parts that can be planned but not built.
    """
    check_built(shape)
    model = LanguageModel(shape)
    if shape.lora is not None:
        for i, block in enumerate(model.blocks):
            add_adapters(block, shape.block(i), shape.lora)
    return model
