"""The sizes and rules of a mixture-of-experts MLP."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from stretto.errors import Problem, nearest

Score = Literal["softmax", "sigmoid"]
Drop = Literal["probs", "position"]
GroupScore = Literal["max", "top2"]


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """What stands in place of a block's MLP: a router, experts, and experts that every token goes to.

    experts: routed ones; each is an MLP of the model's family.
    top_k: routed experts of a token.
    ffn: inner width of each routed expert; None: the model's `ffn`.
    shared_ffn: inner width of the shared expert; 0: none.
    score: `softmax` over all experts (Shazeer et al. 2017), or each expert's `sigmoid` (DeepSeek-V3).
    normalise: the weights of a token's experts are scaled to sum to one, as Mixtral does.
    balance: coefficient of the balance loss: experts * sum over e of (share of the sequence's choices that
        fell on e) * (mean normalised score of e), for each sequence, times its tokens (Fedus et al. 2021,
        equation 4, with a sequence in place of the batch, so that it does not depend on the layout).
    z: coefficient of the z-loss: the squared log-sum-exp of a token's logits (Zoph et al. 2022, equation 5).
    capacity: in training an expert takes at most ceil(capacity * tokens * top_k / experts) tokens of a
        sequence; None, and in evaluation: all (dropless).
    drop: who stays where there are too many: those with the largest weights (`probs`), or the first ones
        (`position`).
    dense_layers: so many leading blocks have a plain MLP of the model's `ffn` instead.
    every: of the others only every n-th block, counted from the first of all, has experts.
    router_bias: the router has a number for each expert beside its weights.
    correction: the choice of experts, not their weights, adds a number for each expert to the scores, which
        has no gradient (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    correction_rate: after each step, the number of an expert with less than the mean load grows by so much,
        that of one with more falls by it; 0: never.
    groups: of equally many neighbouring experts; a token's experts come from its `top_groups` best ones
        (DeepSeek-V2, arXiv 2405.04434, section 2.2.2).
    group_score: of a group: its best expert's (`max`), or the sum of its two best ones' (`top2`).
    scale: by which the weights of routed experts are multiplied.
    shared_gate: the shared expert's output is weighed by a gate of the token.
    """

    experts: int
    top_k: int = 2
    ffn: int | None = None
    shared_ffn: int = 0
    score: Score = "softmax"
    normalise: bool = True
    balance: float = 0.01
    z: float = 0.0
    capacity: float | None = None
    drop: Drop = "probs"
    dense_layers: int = 0
    every: int = 1
    router_bias: bool = False
    shared_gate: bool = False
    correction: bool = False
    correction_rate: float = 0.0
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "every", "groups", "top_groups"):
            _whole(name, getattr(self, name), 1)
        for name in ("shared_ffn", "dense_layers"):
            _whole(name, getattr(self, name), 0)
        if self.ffn is not None:
            _whole("ffn", self.ffn, 1)
        if self.top_k > self.experts:
            raise Problem(
                "top_k", self.top_k, f"there are {self.experts} experts", f"at most top_k: {self.experts}"
            )
        for name, value, allowed in (
            ("score", self.score, ("softmax", "sigmoid")),
            ("drop", self.drop, ("probs", "position")),
            ("group_score", self.group_score, ("max", "top2")),
        ):
            if value not in allowed:
                near = nearest(str(value), allowed)
                hint = f"did you mean {near!r}?" if near else None
                raise Problem(name, value, f"it must be one of {', '.join(allowed)}", hint)
        self._check_groups()
        if not 0.0 < self.scale < float("inf"):
            raise Problem("scale", self.scale, "it must be above 0", "1.0 leaves weights as they are")
        for name, value in (
            ("balance", self.balance),
            ("z", self.z),
            ("correction_rate", self.correction_rate),
        ):
            if not 0.0 <= value < float("inf"):
                raise Problem(name, value, "it must be 0 or more", "0 switches it off")
        if self.capacity is not None and not 0.0 < self.capacity < float("inf"):
            raise Problem("capacity", self.capacity, "it must be above 0", "1.25 is usual")

    def _check_groups(self) -> None:
        if self.experts % self.groups:
            fits = min(
                (n for n in range(1, self.experts + 1) if self.experts % n == 0),
                key=lambda n: abs(n - self.groups),
            )
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
        """Most tokens of a sequence of `tokens` that an expert takes; None: all."""
        if self.capacity is None:
            return None
        return ceil(self.capacity * tokens * self.top_k / self.experts)


_MOST = {"ffn": 1 << 24, "shared_ffn": 1 << 24}  # widths, as of a model's MLP
_MOST_EXPERTS = 1 << 16  # and all that is counted beside them


def _whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        rule = f"it must be a whole number of at least {least}"
        raise Problem(name, value, rule, f"set {name} to {least} or more")
    if value > (most := _MOST.get(name, _MOST_EXPERTS)):
        raise Problem(name, value, f"it must be at most {most}", "is it a typing error?")
