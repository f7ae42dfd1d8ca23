"""The sizes and rules of a mixture-of-experts MLP."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Annotated, Literal

from stretto.errors import Problem
from stretto.job.field import Field, check_fields

Score = Literal["softmax", "sigmoid"]
Drop = Literal["probs", "position"]
GroupScore = Literal["max", "top2"]


MOST_EXPERTS = 1 << 16  # a sanity bound, also for related counts


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """A mixture of experts in place of a block's MLP: a router, routed experts, and a shared expert for all
    tokens. Each expert is an MLP of the model's kind.
    """

    experts: Annotated[
        int,
        Field(
            "Routed experts of a block.", gt=0, largest=MOST_EXPERTS, null="the preset's, else a plain MLP"
        ),
    ]
    top_k: Annotated[int, Field("Routed experts that a token goes to.", gt=0, largest=MOST_EXPERTS)] = 2
    ffn: Annotated[
        int | None,
        Field(
            "Inner width of each routed expert.", gt=0, largest=1 << 24, null="the preset's, else `model.ffn`"
        ),
    ] = None
    shared_ffn: Annotated[int, Field("Inner width of the shared expert, 0: none.", ge=0, largest=1 << 24)] = 0
    score: Annotated[
        Score,
        Field(
            "How the router's logits become scores: `softmax` over all experts (Shazeer et al. 2017), or "
            "each expert's `sigmoid` (DeepSeek-V3)."
        ),
    ] = "softmax"
    normalise: Annotated[
        bool, Field("The weights of a token's experts are scaled to sum to one, as Mixtral does.")
    ] = True
    balance: Annotated[
        float,
        Field(
            "Coefficient of the loss that keeps experts equally busy, 0: none.", ge=0, fix="0 switches it off"
        ),
    ] = 0.01
    """The loss of a sequence, times its tokens, is experts * sum over e of (fraction of the sequence's
    choices that selected e) * (mean normalised score of e): Fedus et al. 2021, equation 4, but per sequence
    instead of per batch, so that it does not depend on the layout."""
    z: Annotated[
        float,
        Field(
            "Coefficient of the squared log-sum-exp of the router's logits (Zoph et al. 2022, equation 5), "
            "0: none.",
            ge=0,
            fix="0 switches it off",
        ),
    ] = 0.0
    capacity: Annotated[
        float | None,
        Field(
            "In training an expert takes at most `capacity tokens top_k / experts` tokens of a sample, "
            "rounded up, and the others skip it.",
            gt=0,
            fix="1.25 is usual",
            null="the preset's, else no limit, as in evaluation",
        ),
    ] = None
    drop: Annotated[
        Drop,
        Field(
            "Tokens that an overloaded expert processes: those with the largest weights (`probs`) or the "
            "first ones (`position`)."
        ),
    ] = "probs"
    dense_layers: Annotated[
        int, Field("Number of leading blocks with a plain MLP instead.", ge=0, largest=MOST_EXPERTS)
    ] = 0
    every: Annotated[
        int,
        Field(
            "Among the other blocks, only every n-th has experts, counted from the model's first block.",
            gt=0,
            largest=MOST_EXPERTS,
        ),
    ] = 1
    router_bias: Annotated[bool, Field("The router's linear has a bias (gpt-oss).")] = False
    shared_gate: Annotated[
        bool, Field("The shared expert's output is weighted by a gate of the token (Qwen2-MoE).")
    ] = False
    correction: Annotated[
        bool,
        Field(
            "A bias per expert, without a gradient, is added to the scores for the choice of experts, not "
            "for their weights (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."
        ),
    ] = False
    correction_rate: Annotated[
        float,
        Field(
            "After each step the bias of an expert with less than the mean load grows by this, and that of "
            "an expert with more falls by it, 0: never.",
            ge=0,
            fix="0 switches it off",
        ),
    ] = 0.0
    groups: Annotated[
        int,
        Field(
            "Groups of adjacent experts, all of one size (DeepSeek-V2, arXiv 2405.04434, section 2.2.2).",
            gt=0,
            largest=MOST_EXPERTS,
        ),
    ] = 1
    top_groups: Annotated[
        int, Field("Number of best groups that a token's experts come from.", gt=0, largest=MOST_EXPERTS)
    ] = 1
    group_score: Annotated[
        GroupScore,
        Field("A group's score: that of its best expert (`max`), or the sum of the two best (`top2`)."),
    ] = "max"
    scale: Annotated[
        float, Field("Factor of the weights of routed experts.", gt=0, fix="1.0 leaves weights as they are")
    ] = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.top_k > self.experts:
            rule = f"there are {self.experts} experts"
            raise Problem("top_k", self.top_k, rule, f"at most top_k: {self.experts}")
        if self.experts % self.groups:
            divisors = (n for n in range(1, self.experts + 1) if self.experts % n == 0)
            fits = min(divisors, key=lambda n: abs(n - self.groups))
            rule = f"it must divide experts, which is {self.experts}"
            raise Problem("groups", self.groups, rule, f"nearest: groups: {fits}")
        if self.top_groups > self.groups:
            rule = f"there are {self.groups} groups"
            raise Problem("top_groups", self.top_groups, rule, f"at most top_groups: {self.groups}")
        within = self.experts // self.groups * self.top_groups
        if self.top_k > within:
            rule = f"{self.top_groups} groups have {within} experts"
            raise Problem("top_k", self.top_k, rule, f"at most top_k: {within}, or more top_groups")

    def capacity_of(self, tokens: int) -> int | None:
        """Return the largest number of tokens that an expert takes from a sequence of `tokens`, or None if it
        takes all.
        """
        if self.capacity is None:
            return None
        return ceil(self.capacity * tokens * self.top_k / self.experts)
