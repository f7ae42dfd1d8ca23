"""Build the plain model of a shape."""

from __future__ import annotations

from collections.abc import Callable

from stretto.engine.models.gpt import GPT
from stretto.engine.models.language import LanguageModel
from stretto.engine.models.llama import Llama
from stretto.spec.shape import Family, ModelShape, check_built

_MODELS: dict[Family, Callable[[ModelShape], LanguageModel]] = {
    "gpt": GPT,
    "llama": Llama,
}


def build(shape: ModelShape) -> LanguageModel:
    """The plain model of that shape, with torch's default initial values (`weights.initialise` sets ours).

    Under `torch.device("meta")` the parameters have shapes but no storage.

    Raises:
        StrettoError: the shape has parts that can be planned but not yet built.
    """
    check_built(shape)
    return _MODELS[shape.family](shape)
