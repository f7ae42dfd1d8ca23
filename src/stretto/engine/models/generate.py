"""Generate tokens one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.models.cache import KeyValueCache, cacheable
from stretto.engine.models.language import LanguageModel
from stretto.errors import StrettoError
from stretto.job.shape import ModelShape


def stream(
    model: LanguageModel,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    stop: int | Sequence[int] | None = None,
    *,
    top_p: float | None = None,
    cache: bool = True,
    group: ProcessGroup | None = None,
) -> Iterator[Tensor]:
    """Yield the tokens that follow prompts `ids` [b, s], int64: [b] at a time, each as soon as it is sampled.

    Args:
        model: run on the last `model.shape.sequence` tokens, without dropout.
        temperature: 0 selects the likeliest token.
        top_k: sample from the k likeliest tokens only.
        generator: generator on the model's device; one per row makes rows independent of each other.
        stop: a row repeats such a token once it has been sampled, and the stream ends when all rows do.
        top_p: sample from the likeliest tokens, out of the k, that together have this probability (Holtzman
            et al. 2020, section 3.1).
        cache: cache keys and values, if that changes no result (`cacheable`); otherwise, and for tokens
            beyond the model's positions, the last window is run again for each token.
        group: ranks that share the model, whose head returns all logits on each. All sample with equal
            generators, and use the first rank's token, so that rounding cannot make them differ. Collective.

    Raises:
        StrettoError: at once, for an empty prompt, a token outside the vocabulary, or arguments out of range.
    """
    check_generates(model.shape)
    if ids.ndim != 2 or ids.numel() == 0:
        raise StrettoError(f"prompt of {list(ids.shape)} tokens", hint="give at least one row of one token")
    low, high = int(ids.min()), int(ids.max())
    check_tokens(low if low < 0 else high, model.shape.vocab)
    check_sampling(max_new_tokens, temperature, top_k, top_p)
    stops = torch.tensor(
        [] if stop is None else [stop] if isinstance(stop, int) else list(stop),
        dtype=torch.int64,
        device=ids.device,
    )

    def tokens() -> Iterator[Tensor]:
        window, last = ids, model.shape.sequence
        cached = KeyValueCache(model) if cache and cacheable(model.shape) else None
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for _ in range(max_new_tokens):
            if cached is not None and window.shape[1] <= last:
                logits = _evaluated(model, cached.forward, window[:, cached.length :])
            else:
                window, cached = window[:, -last:], None
                logits = _evaluated(model, model, window)
            token = sample(logits, temperature, top_k, generator, top_p)
            if group is not None:
                dist.broadcast(token, group=group, group_src=0)
            if len(stops):
                token = torch.where(ended, window[:, -1], token)
                ended = ended | torch.isin(token, stops)
            yield token
            if len(stops) and bool(ended.all()):  # which waits for the device
                return
            window = torch.cat([window, token[:, None]], dim=1)

    return tokens()


@torch.no_grad()
def _evaluated(model: LanguageModel, forward: Callable[[Tensor, bool], Tensor], ids: Tensor) -> Tensor:
    """Return the logits [b, vocab] of the next token; the model's training mode is restored."""
    training = model.training
    model.eval()
    try:
        return forward(ids, True)[:, -1]
    finally:
        model.train(training)


def sample(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | Sequence[torch.Generator] | None,
    top_p: float | None = None,
) -> Tensor:
    """Sample one token for every row of `logits` [b, vocab]: [b], int64."""
    if temperature == 0.0:
        return logits.argmax(-1)
    scores = logits.float() / temperature
    if top_k is not None and top_k < scores.shape[-1]:
        likeliest, indices = scores.topk(top_k, dim=-1)
        scores = torch.full_like(scores, float("-inf")).scatter(-1, indices, likeliest)
    probabilities = scores.softmax(-1)
    if top_p is not None and top_p < 1.0:
        ordered, indices = probabilities.sort(dim=-1, descending=True, stable=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
        probabilities = torch.zeros_like(ordered).scatter(-1, indices, ordered)
    if not isinstance(generator, Sequence):
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
    rows = zip(probabilities, generator, strict=True)
    return torch.cat([torch.multinomial(row, 1, generator=draw) for row, draw in rows])


def check_generates(shape: ModelShape) -> None:
    """Raise StrettoError for a model that this module cannot generate with."""
    if shape.encoder_layers:
        raise StrettoError(
            "generation is not supported for models with an encoder: they do not continue a prompt",
            hint="export the checkpoint (`stretto checkpoint export`) and generate with transformers",
        )


def check_tokens(largest: int, vocab: int) -> None:
    """Raise StrettoError if a prompt's largest, or a negative, token is outside the vocabulary."""
    if not 0 <= largest < vocab:
        raise StrettoError(
            f"token {largest} is outside the model's vocabulary of {vocab}",
            hint="encode the prompt with the tokeniser that the model was trained with",
        )


def check_sampling(
    max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None = None
) -> None:
    """Raise StrettoError for arguments of `stream` that are out of range."""
    if max_new_tokens < 0:
        raise StrettoError(f"max_new_tokens {max_new_tokens} is below 0", hint="0 or more")
    if not 0.0 <= temperature < float("inf"):
        raise StrettoError(
            f"temperature is {temperature}, must be 0 or more", hint="0 selects the likeliest token"
        )
    if top_k is not None and top_k < 1:
        raise StrettoError(
            f"top_k is {top_k}, must be 1 or more", hint="leave it out to sample from the full vocabulary"
        )
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise StrettoError(
            f"top_p is {top_p}, must be above 0 and at most 1", hint="common values are 0.9 to 1"
        )
