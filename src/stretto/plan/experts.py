"""What a mixture of experts keeps for its backward, with tokens spread evenly over experts."""

from __future__ import annotations

from stretto.cost.activations import Computing, Saved
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
        self.tokens = how.tokens if self.together else how.tokens // how.tp
        self.copies = self.tokens * moe.top_k
        self.rows = self.copies if self.together else self.copies * expert_tp
        self.width = shape.expert_ffn // expert_tp


def experts_saved(shape: ModelShape, how: Computing) -> list[Saved]:
    """What stands in place of a dense MLP's tensors. Dropless, or with a capacity that nothing exceeds."""
    moe, at, e, h = shape.moe, ExpertRows(shape, how), how.element, shape.hidden
    assert moe is not None
    wide = 2 if shape.gated else 1
    first = "gate_up" if shape.gated else "up"
    inner = e * at.rows * at.width
    gathered = at.together and how.sequence_parallel and how.tp > 1
    routed = how.residual * (how.tokens if gathered else how.shard) * h
    found = [
        Saved("mlp.router input", routed, f"{how.residual}sbh"),
        Saved("mlp.router scores", 3 * how.statistic * at.tokens * moe.experts, f"{3 * how.statistic}sbE"),
        Saved("mlp.experts order", 24 * at.copies, "24sbk"),
        Saved(f"mlp.experts.{first} input", e * at.rows * h, f"{e}sbkh"),
        Saved(f"mlp.experts.{first} output", wide * inner, f"{wide * e}sbkf"),
    ]
    if shape.gated:
        found.append(Saved("mlp.experts silu", inner, f"{e}sbkf"))
    found += [
        Saved("mlp.experts.down input", inner, f"{e}sbkf"),
        Saved("mlp.experts copies", e * at.copies * h, f"{e}sbkh"),
    ]
    if how.autocast:
        held = moe.experts // how.ep * (wide + 1) * h * at.width
        found.append(Saved("mlp.experts weights, cast", e * held, f"{e} bytes an element"))
    if moe.shared_ffn:
        found += _shared(shape, how, moe.shared_ffn)
    if shape.dropout:
        found.append(Saved("mlp.drop mask", how.shard * h, "sbh"))
    return found


def _shared(shape: ModelShape, how: Computing, width: int) -> list[Saved]:
    """The shared expert, a dense MLP on the same input."""
    inner = how.element * how.tokens * width // how.tp
    wide = 2 if shape.gated else 1
    first = "gate_up" if shape.gated else "up"
    found = [Saved(f"mlp.shared.{first} output", wide * inner, f"{wide * how.element}sbf")]
    if shape.gated:
        found.append(Saved("mlp.shared silu", inner, f"{how.element}sbf"))
    return [*found, Saved("mlp.shared.down input", inner, f"{how.element}sbf")]
