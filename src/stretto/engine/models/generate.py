"""Text from a model, token by token: each step runs the last window again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stretto.engine.models.language import LanguageModel
from stretto.errors import StrettoError


def generate(
    model: LanguageModel,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    stop: int | None = None,
) -> Tensor:
    """Prompts `ids` [b, s], int64, with what follows them, [b, s + n], n <= max_new_tokens.

    See `stream` for the arguments and errors.
    """
    tokens = stream(
        model=model,
        ids=ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        generator=generator,
        stop=stop,
    )
    return torch.cat([ids, *(token[:, None] for token in tokens)], dim=1)


def stream(
    model: LanguageModel,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    stop: int | None = None,
) -> Iterator[Tensor]:
    """The tokens after prompts `ids` [b, s], one [b] at a time, as soon as each is there.

    The model sees the last `model.shape.sequence` tokens. Temperature 0 takes the likeliest token; `top_k`
    draws from the k likeliest only; `generator` must be on the model's device. After `stop` a row repeats
    it, and when all rows have stopped the stream ends. Dropout is off while a token is made.

    Raises:
        StrettoError: an empty prompt, a token that the model does not know, or arguments out of range.
    """
    _check(model, ids, max_new_tokens, temperature, top_k)
    return _tokens(
        model=model,
        ids=ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        generator=generator,
        stop=stop,
    )


def _tokens(
    model: LanguageModel,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
    stop: int | None,
) -> Iterator[Tensor]:
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


@torch.no_grad()
def _next_logits(model: LanguageModel, window: Tensor) -> Tensor:
    """Logits [b, vocab] after the window; the model is left in the mode it was in."""
    training = model.training
    model.eval()
    try:
        return model(window)[:, -1]
    finally:
        model.train(training)


def sample(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """One token for every row of `logits` [b, vocab], as [b], int64."""
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
