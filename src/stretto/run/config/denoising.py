"""How much of a text a denoising objective cuts out: the lengths of its samples, before any text is read."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from stretto.errors import Problem

Corruption = Literal["span-corruption", "infilling"]
USUAL_DENSITY: dict[Corruption, float] = {"span-corruption": 0.15, "infilling": 0.3}
"""Of T5 (Raffel et al. 2020, section 3.1.4) and of BART (Lewis et al. 2020, section 5.1)."""


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """The lengths of every sample of an objective, in tokens.

    Attributes:
        corruption: what replaces the spans; see `run.data.denoising`.
        window: tokens of text from which a sample is made.
        noise: tokens of the window that are cut out.
        spans: number of spans that are cut out.
    """

    corruption: Corruption
    window: int
    noise: int
    spans: int

    @property
    def unmasked(self) -> int:
        """Tokens of the window that stay in the encoder's input."""
        return self.window - self.noise

    @property
    def inputs(self) -> int:
        """Tokens that the encoder reads: those that are left, a mark for each span, and the end."""
        return self.unmasked + self.spans + 1

    @property
    def targets(self) -> int:
        """Tokens that the decoder predicts: of span corruption those that were cut out, a sentinel before
        each span, and the end; of infilling the window and the end.
        """
        return 1 + (self.window if self.corruption == "infilling" else self.noise + self.spans)

    def describe(self) -> str:
        """Such as `span-corruption: of 568 tokens 85 in 28 spans; 512 to the encoder, 114 to the decoder`."""
        return (
            f"{self.corruption}: of {self.window} tokens {self.noise} in {self.spans} "
            f"span{'s' * (self.spans > 1)}; {self.inputs} to the encoder, {self.targets} to the decoder"
        )


@lru_cache(maxsize=256)
def denoising(corruption: Corruption, sequence: int, density: float, mean_span: float) -> Denoising:
    """The longest window whose sample fills an encoder of `sequence` tokens, which one does exactly: a token
    more in the window is one or none more in the input.

    The numbers of tokens and spans are fixed by the lengths, as in T5's own pipeline
    (`random_spans_helper` in its `preprocessors.py`): 512 tokens of input come from 568 of text, 85 of them
    in 28 spans, and give 114 targets.

    Args:
        density: the part of the window that is cut out, above 0 and below 1.
        mean_span: the mean length of a span, at least 1.

    Raises:
        Problem: a sequence without room for a token, a span and the end; or spans without a token that is
            kept between them.
    """

    def of(window: int) -> Denoising:
        noise = min(max(round(window * density), 1), window - 1)
        spans = max(round(noise / mean_span), 1)
        return Denoising(corruption=corruption, window=window, noise=noise, spans=spans)

    if sequence < 3:
        rule = "a sample needs a token, the mark of a span and the end"
        raise Problem("sequence", sequence, rule, "sequence=512, as T5 was trained")
    longest = int(sequence / (1 - density)) + 2
    window = bisect_right(range(longest + 1), sequence, lo=2, key=lambda size: of(size).inputs) - 1
    chosen = of(window)
    if chosen.spans > chosen.unmasked or chosen.inputs != sequence:
        spans = f"{chosen.spans} spans between {chosen.unmasked} tokens"
        rule = f"with mean_span_length={mean_span:g} that is {spans}"
        raise Problem("noise_density", density, rule, f"{USUAL_DENSITY[corruption]} is usual")
    return chosen
