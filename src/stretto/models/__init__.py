"""Plain single-process models, with their initial values, generation and exchange with Hugging Face."""

from stretto.models.build import build
from stretto.models.initial import initial_values, initialise
from stretto.models.language import CrossEntropy, LanguageModel

__all__ = ["CrossEntropy", "LanguageModel", "build", "initial_values", "initialise"]
