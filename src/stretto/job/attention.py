"""Attention options other than head counts: norms, biases, windows, latent attention, rotary scaling."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Annotated, Literal, get_args

from stretto.errors import Problem
from stretto.job.field import Field, check_fields

HeadNorm = Literal["head", "all"]
AttentionKernel = Literal["auto", "sdpa", "flex", "explicit"]
ContextKind = Literal["ring", "ulysses"]
RopeType = Literal["linear", "dynamic", "yarn", "llama3"]
ROPE_TYPES: tuple[RopeType, ...] = get_args(RopeType)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary positions for contexts longer than that of pretraining."""

    type: Annotated[
        RopeType,
        Field(
            "`linear`: positions divided by `factor`; `dynamic`: a base that grows with the length (NTK); "
            "`yarn`: Peng et al. 2023, arXiv 2309.00071, section 3; `llama3`: Llama 3.1.",
            off="none",
            null="the preset's, else none",
        ),
    ]
    factor: Annotated[
        float, Field("Extended context over the original one.", ge=1, fix="8 is Llama 3.1's")
    ] = 1.0
    original_positions: Annotated[
        int | None,
        Field(
            "Positions of pretraining; required by all types but `linear`.",
            gt=0,
            fix="8192 is Llama 3.1's",
        ),
    ] = None
    low_freq_factor: Annotated[
        float,
        Field(
            "`llama3`: frequencies with fewer turns than this within the original positions are divided by "
            "`factor`.",
            gt=0,
        ),
    ] = 1.0
    high_freq_factor: Annotated[
        float, Field("`llama3`: frequencies with more turns than this do not change.", gt=0)
    ] = 4.0
    beta_fast: Annotated[
        float, Field("`yarn`: frequencies with more turns than this do not change.", gt=0)
    ] = 32.0
    beta_slow: Annotated[
        float, Field("`yarn`: frequencies with fewer turns than this are divided by `factor`.", gt=0)
    ] = 1.0
    truncate: Annotated[bool, Field("`yarn`: both bounds are rounded to whole features.")] = True
    attention_factor: Annotated[
        float | None,
        Field(
            "`yarn`: factor that multiplies queries and keys.",
            gt=0,
            null="the preset's, else derived from the next two if set, else `0.1 ln(factor) + 1`",
        ),
    ] = None
    mscale: Annotated[
        float | None, Field("`yarn`: DeepSeek's weight of that logarithm for queries and keys.", ge=0)
    ] = None
    mscale_all_dim: Annotated[float | None, Field("`yarn`: the same weight for all scores.", ge=0)] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.type != "linear" and self.original_positions is None:
            rule = f"it must be above 0, since type is {self.type}"
            raise Problem("original_positions", None, rule, "8192 is Llama 3.1's")
        if self.low_freq_factor >= self.high_freq_factor:
            rule = f"it must be above 0 and below high_freq_factor, which is {self.high_freq_factor}"
            raise Problem("low_freq_factor", self.low_freq_factor, rule, "1 and 4 are Llama 3.1's")
        if self.beta_slow > self.beta_fast:
            rule = f"it must be above 0 and at most beta_fast, which is {self.beta_fast}"
            raise Problem("beta_slow", self.beta_slow, rule, "32 and 1 are usual")

    @property
    def magnitude(self) -> float:
        """Factor that multiplies rotated queries and rotated keys; 1 for all types but yarn."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _stretch(self.factor, self.mscale) / _stretch(self.factor, self.mscale_all_dim)
        return _stretch(self.factor, 1.0)

    @property
    def score_factor(self) -> float:
        """Factor that multiplies the scores of latent attention, in addition to `magnitude` (DeepSeek-V3's
        code).
        """
        return _stretch(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def _stretch(factor: float, weight: float) -> float:
    return 0.1 * weight * log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values are projected
    from one low-rank latent vector per token, queries from another or from the residual stream.
    """

    kv_rank: Annotated[
        int,
        Field(
            "Rank of the latent vector that keys and values are projected from, 0: no latent attention.",
            gt=0,
            off=0,
        ),
    ]
    rope_dim: Annotated[
        int,
        Field(
            "Features of a head with rotary positions, part of `model.head_dim`; all heads share one rotary "
            "key.",
            gt=0,
        ),
    ]
    value_dim: Annotated[int, Field("Features of a head's values.", gt=0)]
    q_rank: Annotated[
        int | None,
        Field(
            "Rank of the latent vector that queries are projected from, 0: none, they are projected from the "
            "residual stream.",
            gt=0,
            off=0,
        ),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Attention options other than head counts."""

    norm: Annotated[
        HeadNorm | None,
        Field(
            "A norm of queries and of keys, over the features of each `head` or of `all` heads together.",
            off="none",
        ),
    ] = None
    qkv_bias: Annotated[
        bool | None,
        Field(
            "Biases of queries, keys and values.", null="the preset's, else the family's, else `model.bias`"
        ),
    ] = None
    proj_bias: Annotated[
        bool | None,
        Field("Bias of the projection into the residual stream.", null="the preset's, else `model.bias`"),
    ] = None
    sinks: Annotated[
        bool,
        Field(
            "A learned logit per head that takes part in the softmax (attention sinks; gpt-oss, arXiv "
            "2508.10925)."
        ),
    ] = False
    window: Annotated[
        int | None,
        Field(
            "Positions that a token attends to, itself included, 0: all before it.",
            gt=0,
            off=0,
            fix="null: no window",
        ),
    ] = None
    full_every: Annotated[
        int,
        Field(
            "Every n-th block has full attention instead of the window, 0: none has.",
            ge=0,
            fix="0: every block has the window",
        ),
    ] = 0
    latent: Annotated[
        LatentShape | None,
        Field(
            "Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); by default the preset's, else the "
            "family's, if any."
        ),
    ] = None
    softcap: Annotated[
        float | None,
        Field(
            "Scores are `softcap tanh(score / softcap)` (Gemma 2, arXiv 2408.00118, section 2), 0: "
            "unchanged.",
            gt=0,
            off=0,
            fix="null: none",
        ),
    ] = None
    query_scale: Annotated[
        float | None,
        Field(
            "Scores are divided by the square root of this, 0: of `head_dim`.",
            gt=0,
            off=0,
            fix="null: none",
            null="the preset's, else `head_dim`",
        ),
    ] = None
    local_theta: Annotated[
        float | None,
        Field(
            "Base of the rotary frequencies, unscaled, in blocks with a window (Gemma 3, arXiv 2503.19786, "
            "section 2), 0: the base of the other blocks.",
            gt=0,
            off=0,
            fix="null: none",
        ),
    ] = None
    interleaved: Annotated[
        bool,
        Field(
            "Rotary positions rotate pairs of adjacent features (2i, 2i + 1), otherwise pairs across the "
            "halves of a head (i, i + d/2)."
        ),
    ] = False
    causal: bool = True
    """False in an encoder, in which a position also attends to later ones."""
    buckets: Annotated[
        int,
        Field(
            "Relative positions: number of distance buckets, each with its own bias; in an encoder half of "
            "them are for keys after the query (Raffel et al. 2020, arXiv 1910.10683, section 2.1).",
            gt=0,
        ),
    ] = 32
    max_distance: Annotated[
        int, Field("Relative positions: this distance and all larger ones share one bias.", gt=0)
    ] = 128

    def __post_init__(self) -> None:
        check_fields(self)
        if self.buckets < 4 or self.buckets % 2:
            raise Problem("buckets", self.buckets, "it must be even, and at least 4", "32 is T5's")
        if self.max_distance <= self.buckets // 2:
            rule = f"it must be above half of buckets, which is {self.buckets}"
            raise Problem("max_distance", self.max_distance, rule, "128 is T5's")

    def mean_context(self, sequence: int, causal: bool) -> float:
        """Return the mean number of positions that a query attends to: `sequence`, or half of it with
        `causal`, the convention of published figures (not (s + 1)/2). A window limits it.
        """
        window = min(self.window or sequence, sequence)
        if not causal:
            return float(window)
        return window - window * window / (2 * sequence)
