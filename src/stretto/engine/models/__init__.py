"""Plain single-process models: initial values, generation, sharding plans, exchange with Hugging Face."""

from stretto.engine.models.build import build
from stretto.engine.models.language import CrossEntropy, LanguageModel
from stretto.engine.models.weights import initial_values, initialise

__all__ = ["CrossEntropy", "LanguageModel", "build", "initial_values", "initialise"]
