"""How many examples of a property are tried: more of them where slow tests run too."""

from hypothesis import settings

THOROUGH = 100
"""Hypothesis's own number, which is tried of properties that name none where slow tests run too."""


def scaled(count: int) -> int:
    """`count` where slow tests run too, else the share that `conftest`'s quick profile has of THOROUGH."""
    return count * settings.default.max_examples // THOROUGH
