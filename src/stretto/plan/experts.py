"""A mixture of experts as a rank works on it, with tokens spread evenly over experts."""

from __future__ import annotations

from stretto.cost.activations import Computing
from stretto.cost.shape import ModelShape


class ExpertRows:
    """How many rows a rank works on, if every expert gets as many tokens as every other.

    Attributes:
        tokens: that this rank routes.
        copies: of these tokens, one for each expert that they go to.
        rows: that the experts held here work on; each has a slice of the inner width.
        width: the slice.
    """

    def __init__(self, shape: ModelShape, how: Computing) -> None:
        moe = shape.moe
        assert moe is not None
        expert_tp = how.tp if how.expert_tp is None else how.expert_tp
        self.together = how.ep == 1 and expert_tp == how.tp  # all tp ranks route the same tokens
        self.tokens = how.tokens if self.together else -(-how.tokens // how.tp)
        self.copies = self.tokens * moe.top_k
        self.rows = self.copies if self.together else self.copies * expert_tp
        self.width = shape.expert_ffn // expert_tp
