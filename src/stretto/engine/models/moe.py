"""A mixture of experts in one process (Shazeer et al. 2017; Fedus et al. 2021; Jiang et al. 2024), the
reference for every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engine.models.causal import dropout
from stretto.engine.models.mlp import MLP, activate
from stretto.errors import StrettoError
from stretto.job.experts import ExpertShape
from stretto.job.shape import Mlp, ModelShape


class Routing(NamedTuple):
    """The routing of tokens; the leading dimensions are those of the logits."""

    experts: Tensor  # [..., top_k], int64, each token's likeliest expert first
    weights: Tensor  # [..., top_k], factors of the experts' outputs in their sum; differentiable
    scores: Tensor  # [..., experts], summing to 1, for the balance loss; differentiable


class Router(nn.Module):
    """Routes every token to `top_k` experts.

    All methods treat tokens independently, except for `keep`, which needs complete sequences.

    Attributes:
        correction: added to the experts' scores for the choice only, [experts], by default nothing. It has no
            gradient; `correct` updates it after each step.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.moe = moe_of(shape)
        self.gate = nn.Linear(shape.hidden, self.moe.experts, bias=self.moe.router_bias)
        zeros = torch.zeros(self.moe.experts, dtype=torch.float32)
        self.correction = nn.Parameter(zeros, requires_grad=False) if self.moe.correction else None

    @property
    def limited(self) -> bool:
        """True if experts have a capacity: only in training, so that in evaluation a token's output does not
        depend on later tokens.
        """
        return self.training and self.moe.capacity is not None

    def logits(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to logits [..., experts], in float32, or in float64 for float64 x."""
        exact = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            bias = self.gate.bias.to(exact) if self.moe.router_bias else None
            return F.linear(x.to(exact), self.gate.weight.to(exact), bias)

    def choose(self, logits: Tensor) -> Routing:
        """Return the `top_k` experts that `preference` ranks first, and the weights of their outputs, which
        exclude the correction. Scores are normalised in log space, so that they sum to 1 even if some
        underflow.
        """
        logarithms = logits if self.moe.score == "softmax" else F.logsigmoid(logits)
        experts = self.preference(logits).topk(self.moe.top_k, dim=-1).indices
        chosen, scores = logarithms.gather(-1, experts), logarithms.softmax(-1)
        if self.moe.normalise:
            weights = chosen.softmax(-1)
        else:
            weights = chosen.exp() if self.moe.score == "sigmoid" else scores.gather(-1, experts)
        return Routing(experts, weights if self.moe.scale == 1.0 else weights * self.moe.scale, scores)

    @torch.no_grad()
    def preference(self, logits: Tensor) -> Tensor:
        """Return the values that rank the experts of each token, [..., experts]: scores plus `correction`,
        -inf outside the token's best groups (DeepSeek-V2, arXiv 2405.04434, section 2.2.2; DeepSeek-V3, arXiv
        2412.19437, section 2.1.2).

        DeepSeek's published inference code also uses -inf. Its first code for `transformers`, and still that
        for V2, uses 0: this is equivalent for positive scores, but with a correction below minus the score an
        expert of another group would precede one of the best groups.
        """
        moe = self.moe
        # logits rank experts (and groups by their best expert) like scores, and keep apart values that scores
        # round to the same
        ranked = logits
        if self.correction is not None or (moe.groups > moe.top_groups and moe.group_score == "top2"):
            ranked = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()
        if self.correction is not None:
            ranked = ranked + self.correction
        if moe.groups == moe.top_groups:
            return ranked
        members = ranked.unflatten(-1, (moe.groups, -1))
        best = members.amax(-1) if moe.group_score == "max" else members.topk(2, dim=-1).values.sum(-1)
        taken = best.topk(moe.top_groups, dim=-1).indices
        others = torch.ones_like(best, dtype=torch.bool).scatter(-1, taken, False)
        return members.masked_fill(others[..., None], float("-inf")).flatten(-2)

    @torch.no_grad()
    def keep(self, experts: Tensor, weights: Tensor) -> Tensor:
        """Return bool [b, s, k], True for choices within the experts' capacity.

        Ties are broken by position, then by the order of a token's choices.

        Args:
            experts, weights: choices of complete samples, [b, s, k].
        """
        limit = self.moe.capacity_of(experts.shape[1])
        if limit is None:
            return torch.ones_like(experts, dtype=torch.bool)
        flat = experts.flatten(1)
        first = torch.arange(flat.shape[1], device=flat.device).expand_as(flat)  # in order of preference
        if self.moe.drop == "probs":
            first = weights.flatten(1).argsort(dim=1, descending=True, stable=True)
        queues = flat.gather(1, first).argsort(dim=1, stable=True)
        order = first.gather(1, queues)  # by expert, then by preference
        counts = self.counts(experts)
        starts = (counts.cumsum(1) - counts).gather(1, flat.gather(1, order))
        places = torch.arange(flat.shape[1], device=flat.device) - starts
        return torch.zeros_like(flat).scatter(1, order, places).lt(limit).view_as(experts)

    def counts(self, experts: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the number of choices of each expert in each sample before any is dropped: [b, experts],
        int64.

        Args:
            experts: [b, s, k].
            valid: bool [s]; False for padding.
        """
        increments = torch.ones_like(experts)
        if valid is not None:
            increments = increments * valid[:, None]
        none = experts.new_zeros(len(experts), self.moe.experts)
        return none.scatter_add(1, experts.flatten(1), increments.flatten(1))

    def mass(self, scores: Tensor, valid: Tensor | None = None) -> Tensor:
        """Sum scores [b, s, experts] over the positions that are `valid` (bool [s]); return [b, experts]."""
        return (scores if valid is None else scores * valid[:, None]).sum(1)

    def balance(self, counts: Tensor, mass: Tensor, tokens: Tensor | int) -> Tensor:
        """Return the balance loss, summed over samples and their tokens; see `ExpertShape.balance`.

        Args:
            counts, mass: counts and mass of complete samples, [b, experts].
            tokens: number of tokens in each sample, [b], or one number for all.
        """
        share = counts.to(mass.dtype) / self.moe.top_k  # of all choices, times tokens
        each = (share * mass).sum(1) / tokens
        return self.moe.balance * self.moe.experts * each.sum()

    def z(self, logits: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the z-loss of logits [b, s, experts], summed over the tokens that are `valid` (bool [s])."""
        squares = logits.logsumexp(-1).square()
        return self.moe.z * (squares if valid is None else squares * valid).sum()


class Experts(nn.Module):
    """The routed experts, each an MLP like in a dense block, with stacked parameters.

    With a gate: gate_up [E, 2 f, h], down [E, h, f]; without: up [E, f, h], down [E, h, f]. With biases also
    gate_up_bias [E, 2 f] or up_bias [E, f], and down_bias [E, h].
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        moe, width = moe_of(shape), shape.expert_ffn
        self.experts = moe.experts  # number of local experts
        self.kind: Mlp = shape.mlp
        self.into = "gate_up" if shape.gated else "up"
        rows = 2 * width if shape.gated else width
        self._add(self.into, rows, shape.hidden, shape.bias)
        self._add("down", shape.hidden, width, shape.bias)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map rows [n, hidden], sorted by expert, to [n, hidden]; `counts` [E], int64, has rows per
        expert.
        """
        into, into_bias = self._each(self.into)
        down, down_bias = self._each("down")
        outputs: list[Tensor] = []
        for e, part in enumerate(x.split(counts.tolist())):
            inner = self.activation(F.linear(part, into[e], into_bias[e]))
            outputs.append(F.linear(inner, down[e], down_bias[e]))
        return torch.cat(outputs)

    def activation(self, y: Tensor) -> Tensor:
        """Apply the activation function to y [..., width] or [gate; up]."""
        return activate(y, self.kind)

    def _add(self, name: str, rows: int, columns: int, bias: bool) -> None:
        """Add the parameters of one linear of all experts, with the initial values of nn.Linear."""
        bound = 1 / sqrt(columns)
        weight = torch.empty(self.experts, rows, columns).uniform_(-bound, bound)
        self.register_parameter(name, nn.Parameter(weight))
        if bias:
            shift = torch.empty(self.experts, rows).uniform_(-bound, bound)
            self.register_parameter(f"{name}_bias", nn.Parameter(shift))

    def _each(self, name: str) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Return weight and bias of one linear for each expert."""
        bias = self._parameters.get(f"{name}_bias")
        none: list[Tensor | None] = [None] * self.experts
        return getattr(self, name).unbind(0), none if bias is None else bias.unbind(0)

    def extra_repr(self) -> str:
        return f"experts={self.experts}"


class MoE(nn.Module):
    """Replaces a block's MLP: the weighted sum of a token's experts, plus the shared expert if any.

    A choice dropped for its expert's capacity adds nothing, and the weights of the others do not change. A
    `shared_gate` multiplies the shared expert's output by a sigmoid, one value per token (Qwen2-MoE).
    """

    def __init__(self, shape: ModelShape, shared: nn.Module | None = None) -> None:
        super().__init__()
        gated = shared is not None and moe_of(shape).shared_gate
        self.router = Router(shape)
        self.experts = Experts(shape)
        self.shared = shared
        self.shared_gate = nn.Linear(shape.hidden, 1, bias=False) if gated else None
        self.drop = dropout(shape.dropout)
        self.auxiliary = torch.zeros((), device="cpu")
        self.load = torch.zeros(moe_of(shape).experts, dtype=torch.int64, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, hidden] to [b, s, hidden].

        Sets `auxiliary` to balance loss plus z-loss, summed over tokens like the cross-entropy, 0 in
        evaluation. In training also sets `load` [experts], int64, to the number of choices of each expert.
        """
        logits = self.router.logits(x)
        choice = self.router.choose(logits)
        self.auxiliary = logits.new_zeros(())
        if self.training:
            counts, mass = self.router.counts(choice.experts), self.router.mass(choice.scores)
            self.load = counts.sum(0)
            self.auxiliary = self.router.balance(counts, mass, logits.shape[1]) + self.router.z(logits)
        kept_choices = self.router.keep(choice.experts, choice.weights) if self.router.limited else None
        y = self._mix(x.flatten(0, 1), choice, kept_choices).view_as(x)
        if self.shared is not None:
            shared = self.shared(x)
            y = y + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())
        return self.drop(y)

    def _mix(self, x: Tensor, choice: Routing, kept_choices: Tensor | None) -> Tensor:
        """Run tokens [n, hidden] through their experts. A token's copies are summed in the order of its
        choices, the same under every layout.
        """
        count, k = self.experts.experts, choice.experts.shape[-1]
        experts = choice.experts.flatten()
        if kept_choices is not None:
            experts = experts.masked_fill(~kept_choices.flatten(), count)  # sorted after all experts
        counts = experts.bincount(minlength=count + 1)[:count]
        order = experts.argsort(stable=True)[: int(counts.sum())]
        y = self.experts(x[order // k], counts)
        weighted = y * choice.weights.flatten()[order, None].to(y.dtype)
        copies = weighted.new_zeros(len(x) * k, x.shape[-1]).index_copy(0, order, weighted)
        return copies.view(-1, k, x.shape[-1]).sum(1)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the last forward's autograd graph, which cannot be copied."""
        return {**self.__dict__, "auxiliary": self.auxiliary.detach()}


@torch.no_grad()
def correct(correction: Tensor, load: Tensor, rate: float) -> None:
    """Update the router's correction after a step, in place: up by `rate` for experts with less than the mean
    load, down for experts with more (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al. 2024, arXiv
    2408.15664, algorithm 1).

    Args:
        correction: [experts].
        load: number of choices of each expert in the step, before any is dropped; [experts].
    """
    choices = load.round().long()  # integers; ranks may have summed fractions of them
    below = choices.sum() - len(choices) * choices
    correction.add_(below.sign().to(correction.dtype), alpha=rate)


def feed_forward(shape: ModelShape) -> nn.Module:
    """Return a block's MLP, or its experts if the shape has any.

    The shared expert has no dropout, since dropout applies to the sum over all experts.
    """
    if shape.moe is None:
        return MLP(shape)
    width = shape.moe.shared_ffn
    return MoE(shape, MLP(replace(shape, ffn=width, dropout=0.0)) if width else None)


def moe_of(shape: ModelShape) -> ExpertShape:
    """Return the expert sizes of a shape.

    Raises:
        StrettoError: the shape has no experts.
    """
    if shape.moe is None:
        raise StrettoError("the model has no experts", hint="set model.moe.experts")
    return shape.moe
