"""Plain single-process models, with their initial values, generation and exchange with Hugging Face."""

from stretto.engine.models.build import build
from stretto.engine.models.initial import initial_values, initialise
from stretto.engine.models.language import CrossEntropy, LanguageModel

__all__ = ["CrossEntropy", "LanguageModel", "build", "initial_values", "initialise"]
