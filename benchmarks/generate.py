"""Tokens per second of generation with and without the key/value cache, in one process."""

from __future__ import annotations

import time

import torch

from stretto.engine.models import build, initialise
from stretto.engine.models.generate import stream
from stretto.spec.shape import ModelShape

SHAPE = ModelShape(
    family="llama", layers=8, hidden=512, heads=8, kv_heads=4, ffn=1408, vocab=8192, sequence=1024
)
PROMPT, TOKENS = 128, 128


def seconds(cache: bool) -> float:
    """Of `TOKENS` tokens after a prompt of `PROMPT`, greedily."""
    model = build(SHAPE)
    initialise(model, 0)
    ids = torch.randint(0, SHAPE.vocab, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    for _ in stream(model, ids[:, :8], 2, temperature=0.0):
        pass
    started = time.perf_counter()
    for _ in stream(model, ids, TOKENS, temperature=0.0, cache=cache):
        pass
    return time.perf_counter() - started


if __name__ == "__main__":
    torch.set_num_threads(1)
    for cache in (False, True):
        print(f"cache {cache}: {TOKENS / seconds(cache):.1f} tokens/s")
