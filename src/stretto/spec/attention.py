"""What attention of a model has beside heads: norms, biases, a window, latent keys and values, and rotary
positions beyond those of training.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Literal

from stretto.errors import Problem, nearest

HeadNorm = Literal["head", "all"]
AttentionKernel = Literal["auto", "sdpa", "flex", "explicit"]
ContextKind = Literal["ring", "ulysses"]
RopeType = Literal["linear", "dynamic", "yarn", "llama3"]
ROPE_TYPES: tuple[RopeType, ...] = ("linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary positions reach beyond those of the first training.

    type: `linear`: positions divided by `factor`; `dynamic`: a base that grows with the length (NTK);
        `yarn`: Peng et al. 2023, arXiv 2309.00071, section 3; `llama3`: Llama 3.1, frequencies below
        `low_freq_factor` turns divided by `factor`, those above `high_freq_factor` kept.
    factor: of the longer context.
    original_positions: of the first training; of all types but `linear`.
    low_freq_factor, high_freq_factor: turns within the original positions; llama3.
    beta_fast, beta_slow: the same for yarn.
    truncate: yarn's bounds are rounded to whole features.
    attention_factor: of queries and keys; yarn; None: 0.1 ln(factor) + 1, or as the next two say.
    mscale, mscale_all_dim: DeepSeek's weights of that logarithm, for queries and keys and for all scores.
    """

    type: RopeType
    factor: float
    original_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            near = nearest(str(self.type), ROPE_TYPES)
            hint = f"did you mean {near!r}?" if near else None
            raise Problem("type", self.type, f"it must be one of {', '.join(ROPE_TYPES)}", hint)
        if not 1.0 <= self.factor < float("inf"):
            raise Problem("factor", self.factor, "it must be 1 or more", "8 is Llama 3.1's")
        if self.type != "linear" and (self.original_positions is None or self.original_positions < 1):
            rule = f"it must be above 0, since type is {self.type}"
            raise Problem("original_positions", self.original_positions, rule, "8192 is Llama 3.1's")
        if not 0.0 < self.low_freq_factor < self.high_freq_factor < float("inf"):
            rule = f"it must be above 0 and below high_freq_factor, which is {self.high_freq_factor}"
            raise Problem("low_freq_factor", self.low_freq_factor, rule, "1 and 4 are Llama 3.1's")
        if not 0.0 < self.beta_slow <= self.beta_fast < float("inf"):
            rule = f"it must be above 0 and at most beta_fast, which is {self.beta_fast}"
            raise Problem("beta_slow", self.beta_slow, rule, "32 and 1 are usual")

    @property
    def magnitude(self) -> float:
        """By which rotated queries and keys are multiplied each; 1 for all types but yarn."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _stretch(self.factor, self.mscale) / _stretch(self.factor, self.mscale_all_dim)
        return _stretch(self.factor, 1.0)

    @property
    def score_factor(self) -> float:
        """By which latent attention multiplies its scores beside `magnitude` (DeepSeek-V3's code)."""
        return _stretch(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def _stretch(factor: float, weight: float) -> float:
    return 0.1 * weight * log(factor) + 1.0 if factor > 1.0 else 1.0


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
    """What attention has beside heads.

    norm: queries and keys have a norm each, over a `head`'s features or over `all` heads'.
    qkv_bias: biases of queries, keys and values; None: where all linears have them.
    proj_bias: bias of the projection into the residual stream; None: where all linears have them.
    sinks: a number for each head that takes part in the softmax (gpt-oss, arXiv 2508.10925).
    window: positions that a block sees, itself among them; None: all that came before.
    full_every: every n-th block sees all, though there is a window; 0: none does.
    latent: keys and values come from a narrow vector.
    softcap: scores are cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118, section 2).
    query_scale: scores are divided by its root; None: by that of the head's features.
    local_theta: base of the rotary frequencies, unscaled, in blocks with a window (Gemma 3, arXiv 2503.19786,
        section 2); None: that of the others.
    interleaved: rotary positions turn pairs of neighbouring features (2i, 2i + 1); otherwise (i, i + d/2).
    causal: a position sees none that come after it; not so in an encoder.
    buckets: distances that have a bias of their own, where positions are relative; in an encoder half of them
        are of keys after the query (Raffel et al. 2020, arXiv 1910.10683, section 2.1).
    max_distance: from which on all distances share one.
    """

    norm: HeadNorm | None = None
    qkv_bias: bool | None = None
    proj_bias: bool | None = None
    sinks: bool = False
    window: int | None = None
    full_every: int = 0
    latent: LatentShape | None = None
    softcap: float | None = None
    query_scale: float | None = None
    local_theta: float | None = None
    interleaved: bool = False
    causal: bool = True
    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        for name in ("softcap", "query_scale", "local_theta"):
            value: float | None = getattr(self, name)
            if value is not None and not 0.0 < value < float("inf"):
                raise Problem(name, value, "it must be above 0", "null: none")
        if self.norm not in (None, "head", "all"):
            raise Problem("norm", self.norm, "it must be head or all")
        if self.window is not None and self.window < 1:
            raise Problem("window", self.window, "it must be above 0", "null: no window")
        if self.buckets < 4 or self.buckets % 2:
            raise Problem("buckets", self.buckets, "it must be even, and at least 4", "32 is T5's")
        if self.max_distance <= self.buckets // 2:
            rule = f"it must be above half of buckets, which is {self.buckets}"
            raise Problem("max_distance", self.max_distance, rule, "128 is T5's")
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
