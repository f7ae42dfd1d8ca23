"""What attention of a model has beside heads: norms, biases, a window, latent keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stretto.errors import Problem

HeadNorm = Literal["head", "all"]
AttentionKernel = Literal["flash", "explicit"]
ContextKind = Literal["ring", "ulysses"]


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values come from one
    narrow vector a token, queries from another.

    kv_rank: width of the vector of keys and values.
    rope_dim: features of a head that are turned by position; their key is one for all heads.
    value_dim: features of a head's values; those of queries and keys are the model's `head_dim`.
    q_rank: width of the vector of queries; None: queries are of the residual stream.
    """

    kv_rank: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None

    def __post_init__(self) -> None:
        for name in ("kv_rank", "rope_dim", "value_dim", "q_rank"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise Problem(name, value, "it must be above 0", f"set {name} to 1 or more")


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What attention has beside heads. Nothing of it can be built yet, but all of it can be planned.

    norm: queries and keys have a norm each, over a `head`'s features or over `all` heads'.
    qkv_bias: biases of queries, keys and values; None: where all linears have them.
    sinks: a number a head that takes part in the softmax (gpt-oss, arXiv 2508.10925).
    window: positions that a block sees, itself among them; None: all that came before.
    full_every: every n-th block sees all, though there is a window; 0: none does.
    latent: keys and values come from a narrow vector.
    """

    norm: HeadNorm | None = None
    qkv_bias: bool | None = None
    sinks: bool = False
    window: int | None = None
    full_every: int = 0
    latent: LatentShape | None = None

    def __post_init__(self) -> None:
        if self.norm not in (None, "head", "all"):
            raise Problem("norm", self.norm, "it must be head or all")
        if self.window is not None and self.window < 1:
            raise Problem("window", self.window, "it must be above 0", "null: no window")
        if self.full_every < 0:
            raise Problem("full_every", self.full_every, "it must be 0 or more", "0: no block sees all")

    def seen(self, sequence: int, causal: bool) -> float:
        """Positions that a position is scored against, on average: all of `sequence`; with `causal` half of
        it, the convention of published figures (and not (s + 1)/2). A window counts what it lets through.
        """
        window = min(self.window or sequence, sequence)
        if not causal:
            return float(window)
        return window - window * window / (2 * sequence)


PLAIN = AttentionShape()
