"""Generate tokens one by one; each step runs the whole last window again, without a key-value cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stretto.engine.models.language import LanguageModel
from stretto.errors import StrettoError


def stream(
    model: LanguageModel,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    stop: int | None = None,
) -> Iterator[Tensor]:
    """The tokens that follow prompts `ids` [b, s], int64: [b] at a time, each as soon as it is sampled.

    Args:
        model: sees the last `model.shape.sequence` tokens, with dropout off.
        temperature: 0 takes the likeliest token.
        top_k: sample from the k likeliest tokens only.
        generator: on the model's device.
        stop: a row repeats this token once it has been sampled, and the stream ends when all rows do.

    Raises:
        StrettoError: at once, for an empty prompt, a token outside the vocabulary, or arguments out of range.
    """
    _check(model, ids, max_new_tokens, temperature, top_k)

    def tokens() -> Iterator[Tensor]:
        window = ids
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for _ in range(max_new_tokens):
            window = window[:, -model.shape.sequence :]
            token = sample(_next_logits(model, window), temperature, top_k, generator)
            if stop is not None:
                token = token.masked_fill(ended, stop)
                ended = ended | (token == stop)
            yield token
            if bool(ended.all()):
                return
            window = torch.cat([window, token[:, None]], dim=1)

    return tokens()


@torch.no_grad()
def _next_logits(model: LanguageModel, window: Tensor) -> Tensor:
    """Logits [b, vocab] of the token after the window; the model's training mode is restored."""
    training = model.training
    model.eval()
    try:
        return model(window)[:, -1]
    finally:
        model.train(training)


def sample(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """Sample one token for every row of `logits` [b, vocab]: [b], int64."""
    if temperature == 0.0:
        return logits.argmax(-1)
    scores = logits.float() / temperature
    if top_k is not None and top_k < scores.shape[-1]:
        likeliest, where = scores.topk(top_k, dim=-1)
        scores = torch.full_like(scores, float("-inf")).scatter(-1, where, likeliest)
    return torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(-1)


def _check(
    model: LanguageModel, ids: Tensor, max_new_tokens: int, temperature: float, top_k: int | None
) -> None:
    if ids.ndim != 2 or ids.numel() == 0:
        raise StrettoError(f"prompt of {list(ids.shape)} tokens", hint="give at least one row of one token")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= model.shape.vocab:
        raise StrettoError(
            f"token {low if low < 0 else high} is outside the model's vocabulary of {model.shape.vocab}",
            hint="encode the prompt with the tokeniser that the model was trained with",
        )
    if max_new_tokens < 0:
        raise StrettoError(f"max_new_tokens {max_new_tokens} is below 0", hint="0 or more")
    if not 0.0 <= temperature < float("inf"):
        raise StrettoError(f"temperature {temperature} is not 0 or more", hint="0 takes the likeliest token")
    if top_k is not None and top_k < 1:
        raise StrettoError(f"top_k {top_k} is below 1", hint="leave it out to draw from the whole vocabulary")
