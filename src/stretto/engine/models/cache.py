"""A cache of the keys and values of past tokens, so that a step of generation computes only the new token."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from stretto.engine.models.causal import CausalAttention
from stretto.engine.models.language import Embedding, LanguageModel
from stretto.engine.models.rotary import Rotary
from stretto.job.shape import ModelShape


def cacheable(shape: ModelShape) -> bool:
    """True if keys can be cached; with dynamic scaling all are rotated again as a sequence grows."""
    return shape.rope is None or shape.rope.type != "dynamic"


class KeyValueCache:
    """The cache of one model for one batch of sequences of equal length.

    The modules are unaware of it. During a call, each `CausalAttention` gets the keys and values of all
    tokens so far instead of only the new ones, and rotary and learned positions start at the first new token.
    It therefore works for any attention with that core: grouped heads are cached as key heads; a block with a
    window caches about that number of positions; latent attention is cached as expanded heads, not as its
    narrow vector. Under tensor parallelism a rank caches its own heads.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.length = 0
        self._model = model
        self._caches = [
            _CachedAttention(core) for core in model.modules() if isinstance(core, CausalAttention)
        ]
        self._placed = [module for module in model.modules() if isinstance(module, Rotary | Embedding)]

    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        """Compute the logits [b, n, vocab] of new token ids [b, n], int64, and add the tokens to the cache.

        With `last`, return the logits of the last token only, [b, 1, vocab].
        """
        with self._installed(torch.arange(self.length, self.length + ids.shape[1], device=ids.device)):
            logits = self._model(ids, last)
        self.length += ids.shape[1]
        return logits

    @contextmanager
    def _installed(self, positions: Tensor) -> Generator[None]:
        before = [module.positions for module in self._placed]
        try:
            for cache in self._caches:
                cache.core.forward = cache.attend
            for module in self._placed:
                module.positions = positions
            yield
        finally:
            for cache in self._caches:
                del cache.core.forward  # uncovers the method of the class
            for module, at in zip(self._placed, before, strict=True):
                module.positions = at


class _CachedAttention:
    """Keys and values of one attention, each [b, kv_heads, capacity, d], of which `length` are filled."""

    def __init__(self, core: CausalAttention) -> None:
        self.core = core
        self._attend = partial(CausalAttention.forward, core)
        self._keys = self._values = torch.empty(0)
        self._length = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Run `CausalAttention.forward` with the keys and values of earlier calls before the new ones."""
        new = k.shape[2]
        self._make_room(k, v)
        self._keys[:, :, self._length : self._length + new] = k
        self._values[:, :, self._length : self._length + new] = v
        self._length += new
        filled = slice(0, self._length)
        return self._attend(q, self._keys[:, :, filled], self._values[:, :, filled], sinks)

    def _make_room(self, k: Tensor, v: Tensor) -> None:
        """Make room for new positions, and drop old ones that are outside the window."""
        new, window = k.shape[2], self.core.window
        if self._length and self._length + new <= self._keys.shape[2]:
            return
        retained = self._length if window is None else min(self._length, window - 1)
        capacity = 2 * (retained + new)
        keys, values = (
            k.new_empty(*k.shape[:2], capacity, k.shape[3]),
            v.new_empty(*v.shape[:2], capacity, v.shape[3]),
        )
        if retained:
            old = slice(self._length - retained, self._length)
            keys[:, :, :retained], values[:, :, :retained] = self._keys[:, :, old], self._values[:, :, old]
        self._keys, self._values = keys, values
        self._length = retained
