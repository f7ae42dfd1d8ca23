"""Expert parallelism: a mixture of experts whose experts are distributed over ranks (Lepikhin et al. 2020,
"GShard", section 3.3; Fedus et al. 2021, section 2.4).

The experts have a rank grid separate from that of the dense layers: `ep` ranks hold different experts,
`expert_tp` ranks hold slices of the same experts, `expert_dp` ranks hold the same slices. A layer works in
one of two ways:

together: ep is 1 and the experts are split over the tp ranks like a dense MLP. All tp ranks route the same
    tokens, and each computes a part of every expert's output: one sum in, one sum out, and no all-to-all.
apart: every rank of tp x cp x dp routes different tokens: under sequence parallelism its own, otherwise its
    part of the tokens that all tp ranks have. `dispatch` sends the copies.

In both cases each tp rank computes a part of the router's gradient, so the router's style is
`Replicate(sequence=True)`, which sums it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.engine.parallel.collectives import (
    all_sum,
    copy_to,
    gather,
    gather_copy,
    gather_from,
    reduce_from,
    scatter_to,
    slice_to,
)
from stretto.engine.parallel.expert.auxiliary import Auxiliary, Reporting, inject
from stretto.engine.parallel.expert.dispatch import Dispatch, ExpertRanks, plan
from stretto.engine.parallel.expert.grouped import GroupedLayer, Groups
from stretto.engine.parallel.styles import ParallelStyle, ParameterShard, ShardRange
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.engine.parallel.mesh import Mesh


class _OnDevice(NamedTuple):
    valid: Tensor | None
    natural: Tensor
    local: Tensor


@dataclass(frozen=True, kw_only=True)
class SampleTokens:
    """The tokens of each sample on this rank, and the ranks with its other tokens.

    Attributes:
        length: tokens of a sample.
        positions: positions of this rank's tokens, [local tokens], int64; `length` and above are padding.
        group: ranks that share a sample, with equally many tokens including padding.
        natural: index of each position in the concatenation of the group's tokens by rank; [length], int64.
    """

    length: int
    positions: Tensor
    group: ProcessGroup | None
    natural: Tensor
    _moved: dict[torch.device, _OnDevice] = field(
        default_factory=dict[torch.device, "_OnDevice"], compare=False, repr=False
    )

    @classmethod
    def of(cls, mesh: Mesh, length: int, *, sequence: bool, route_apart: bool) -> SampleTokens:
        """Return this rank's part of samples of `length` tokens.

        Args:
            sequence: outside of the layer the sequence is split over the tp ranks.
            route_apart: tp ranks route different tokens; otherwise all route the same.
        """
        axes = "tp-cp" if route_apart else "cp"
        ranks = mesh.layout.group(mesh.rank, axes)
        parts = [_positions(mesh, rank, length, sequence, route_apart) for rank in ranks]
        every = torch.cat(parts)
        natural = every.argsort(stable=True)[:length]
        return cls(
            length=length, positions=parts[ranks.index(mesh.rank)], group=mesh.group(axes), natural=natural
        )

    @property
    def alone(self) -> bool:
        """True if this rank has all tokens of its samples, in order."""
        return self.group is None and len(self.positions) == self.length

    def valid(self, device: torch.device) -> Tensor | None:
        """Return bool [local tokens], False for padding, or None without padding."""
        return self._on(device).valid

    def gather_samples(self, x: Tensor) -> Tensor:
        """Gather x [b, local tokens, ...] of all ranks to [b, length, ...], by position. Not
        differentiable.
        """
        return x if self.alone else gather(x, self.group, 1).index_select(1, self._on(x.device).natural)

    def to_local(self, x: Tensor) -> Tensor:
        """Return this rank's part of x [b, length, ...]; padding gets the values of the last position."""
        return x if self.alone else x.index_select(1, self._on(x.device).local)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks that share a sample, in new memory."""
        return x if self.group is None else all_sum(x.clone(), self.group)

    def _on(self, device: torch.device) -> _OnDevice:
        """Return the tables on a device, copied once."""
        if device not in self._moved:
            real = self.positions < self.length
            self._moved[device] = _OnDevice(
                None if bool(real.all()) else real.to(device),
                self.natural.to(device),
                self.positions.clamp(max=self.length - 1).to(device),
            )
        return self._moved[device]


def _positions(mesh: Mesh, rank: int, length: int, sequence: bool, route_apart: bool) -> Tensor:
    """Return the positions of the tokens that a rank routes."""
    at, tp = mesh.layout.coordinates(rank), mesh.size("tp")
    split = SequenceSplit(
        length=length,
        cp=mesh.size("cp"),
        cp_index=at["cp"],
        tp=tp if sequence else 1,
        tp_index=at["tp"] if sequence else 0,
    )
    if not route_apart:
        return split.positions
    if sequence:
        return split.shard
    parts = even_parts(split.positions.unsqueeze(0), tp, split.padded)
    return parts.squeeze(0).chunk(tp)[at["tp"]]


def even_parts(x: Tensor, parts: int, fill: int | float) -> Tensor:
    """Pad x [b, s, ...] with `fill` at the end of each sample to make s a multiple of `parts`."""
    missing = -x.shape[1] % parts
    return x if not missing else torch.cat([x, x.new_full((x.shape[0], missing, *x.shape[2:]), fill)], 1)


CHILDREN = ("router", "experts", "shared", "shared_gate", "drop")


@dataclass(frozen=True)
class Tokens:
    """Moves tokens from the layer's input to the ranks that route them, and back.

    Attributes:
        route_apart: tp ranks route different tokens; otherwise all route the same.
        sequence: outside of the layer the sequence is split over the tp ranks.
    """

    route_apart: bool
    sequence: bool
    tp_group: ProcessGroup | None

    @property
    def share(self) -> float:
        """The fraction that this rank contributes to the statistics of each token that it routes."""
        return 1.0 if self.route_apart or self.tp_group is None else 1.0 / self.tp_group.size()

    def to_routed(self, x: Tensor) -> Tensor:
        """Convert x [b, s, hidden] to the tokens that this rank routes, [b, s', hidden]."""
        group = self.tp_group
        if group is None:
            return x
        if not self.route_apart:
            return gather_from(x, group, 1) if self.sequence else copy_to(x, group)
        return x if self.sequence else slice_to(even_parts(x, group.size(), 0.0), group, 1)

    def from_routed(self, y: Tensor, length: int) -> Tensor:
        """Convert y [b, s', hidden] of the tokens that this rank routed to [b, s = length, hidden]."""
        group = self.tp_group
        if group is None:
            return y
        if not self.route_apart:
            return scatter_to(y, group, 1) if self.sequence else reduce_from(y, group)
        return y if self.sequence else gather_copy(y, group, 1)[:, :length]


class ParallelMoE(Reporting):
    """A mixture of experts on one of several ranks. A forward leaves no state on the module.

    The children `router`, `experts`, `shared`, `shared_gate` and `drop` are the plain module's, so that a
    sharding plan applies to them.
    """

    router: Any
    experts: Any
    shared: Any  # or None
    shared_gate: Any  # or None
    drop: Any

    def __init__(self, plain: nn.Module, tokens: Tokens, samples: SampleTokens, ranks: ExpertRanks) -> None:
        super().__init__()
        for child in CHILDREN:
            setattr(self, child, getattr(plain, child, None))
        self.tokens = tokens
        self.samples = samples
        self.ranks = ranks
        self.train(plain.training)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] to [b, s, hidden]: this rank's part of the sequence under sequence parallelism, else
        the tokens that all tp ranks have.
        """
        router = self.router
        tokens = self.tokens.to_routed(x)
        logits = router.logits(tokens)
        choice = router.choose(logits)
        kept_choices = self._kept_choices(choice)
        dispatch = plan(
            choice.experts.flatten(0, 1),
            None if kept_choices is None else kept_choices.flatten(0, 1),
            router.moe.experts,
            self.ranks,
        )
        # experts compute in autocast's dtype, so tokens are sent in it
        kind = tokens.device.type
        sent = tokens.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tokens
        rows = self.experts(dispatch.to_experts(sent.flatten(0, 1)), dispatch.groups)
        y = dispatch.from_experts(rows, choice.weights.flatten(0, 1))
        y = self.tokens.from_routed(y.view(tokens.shape), x.shape[1])
        if self.training and torch.is_grad_enabled():
            y = self._report(y, logits, choice, dispatch)
        if self.shared is not None:
            shared = self.shared(x)
            y = y + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())
        return y if self.drop is None else self.drop(y)

    def _kept_choices(self, choice: Any) -> Tensor | None:
        """Return bool [b, s', top_k], False for dropped choices, or None if none is dropped. An expert's
        capacity applies to entire samples, so the choices of all ranks that share them are gathered.
        """
        router = self.router
        valid = self.samples.valid(choice.experts.device)
        kept_choices = None if valid is None else valid[:, None].expand_as(choice.experts)
        if not router.limited:
            return kept_choices
        weights = choice.weights.detach()
        both = self.samples.gather_samples(torch.stack([weights, choice.experts.to(weights.dtype)], -1))
        fits = self.samples.to_local(router.keep(both[..., 1].long(), both[..., 0]))
        return fits if kept_choices is None else fits & kept_choices

    def _report(self, y: Tensor, logits: Tensor, choice: Any, dispatch: Dispatch) -> Tensor:
        """Return y, whose backward also counts the auxiliary losses of this rank's tokens and injects their
        gradient.
        """
        router = self.router
        auxiliary = self.bound()
        samples = self.samples
        share = self.tokens.share
        valid = samples.valid(logits.device)
        counts_here = router.counts(choice.experts, valid)
        counts = samples.sum(counts_here) if router.moe.balance else counts_here
        length = logits.shape[1] if samples.alone else samples.length
        # linear in the mass: the mass of this rank's tokens gives their part of the loss
        balance = router.balance(counts, router.mass(choice.scores, valid), length)
        losses = share * torch.stack([balance, router.z(logits, valid)])
        reported, load = losses.detach(), share * counts_here.sum(0)
        dropped = share * (counts_here.sum() - len(dispatch.order))
        name = self.name

        def report() -> None:
            auxiliary.add(name, reported, load, dropped)

        return inject(y, losses, auxiliary.scale, report)

    def extra_repr(self) -> str:
        mode = "apart" if self.tokens.route_apart else "together"
        return f"{mode}, ep={self.ranks.ep}, expert_tp={self.ranks.tp}"


class GroupedExperts(GroupedLayer):
    """The experts of a rank, complete or a slice of the inner width of each.

    Args:
        plain: module with these parameters and an `activation` that also works on slices.
        into: name of the first stacked matrix; the second is `down`, and biases end in `_bias`.
        biased: this rank adds the second bias.
    """

    def __init__(self, plain: nn.Module, into: str, biased: bool) -> None:
        super().__init__()
        for name, parameter in plain.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.activation = cast(Any, plain).activation
        self.into, self.biased = into, biased
        self.train(plain.training)

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """Map rows [n, hidden], sorted by expert, to [n, hidden], partial sums if experts are split."""
        inner = self.activation(self.product(x, self.into, self._bias(self.into), groups))
        return self.product(inner, "down", self._bias("down"), groups, biased=self.biased)

    def _bias(self, weight: str) -> str | None:
        name = f"{weight}_bias"
        return name if name in self._parameters else None

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={list(p.shape)}" for name, p in self._parameters.items() if p is not None)


@dataclass(frozen=True)
class ExpertParallel(ParallelStyle):
    """A mixture of experts with children `router` and `experts`, for samples of `length` tokens.

    Attributes:
        sequence: input and output are split along the sequence over the tp ranks.
    """

    length: int
    sequence: bool = False

    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        children = dict(module.named_children())
        if not {"router", "experts"} <= children.keys():
            raise StrettoError(
                f"{name} ({type(module).__name__}) has no router and experts",
                hint="ExpertParallel style is for mixtures of experts",
            )
        return {}

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        ranks, layout = ExpertRanks.of(mesh), mesh.layout
        route_apart = ranks.ep > 1 or layout.group(mesh.rank, "expert_tp") != layout.group(mesh.rank, "tp")
        return ParallelMoE(
            module,
            Tokens(route_apart, self.sequence, mesh.group("tp")),
            SampleTokens.of(mesh, self.length, sequence=self.sequence, route_apart=route_apart),
            ranks if route_apart else ExpertRanks(),
        )


@dataclass(frozen=True)
class ExpertWeights(ParallelStyle):
    """Stacked experts: split by expert over the ep ranks, and by inner width over the `expert_tp` ranks.

    All expert-tensor-parallel ranks hold the bias of the output: each computes its full gradient, and one
    adds it to the output.
    """

    axes: ClassVar[str] = "expert_tp-ep"

    expert_tp: int = 1

    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        slices = self.expert_tp
        if tp % slices:
            raise StrettoError(
                f"{name}: expert_tp={slices} does not divide the {tp} ranks that share its experts",
                hint="give the style the layout's expert_tp",
            )
        ep = tp // slices
        at = index % slices
        ep_at = index // slices
        parts = dict[str, ParameterShard]()
        for leaf, parameter in module.named_parameters():
            experts = parameter.shape[0]
            if experts % ep:
                divisors = [n for n in range(1, experts + 1) if experts % n == 0]
                raise StrettoError(
                    f"{name}: {experts} experts do not divide over ep={ep} ranks",
                    hint=f"the nearest ep is {min(divisors, key=lambda n: abs(n - ep))}",
                )
            expert_range = ShardRange(ep_at * (experts // ep), experts // ep)
            if leaf == "down_bias":
                parts[leaf] = ParameterShard(
                    dim=0, runs=(ShardRange(expert_range.start, expert_range.size, owned=at == 0),)
                )
                continue
            dim = 2 if leaf == "down" else 1
            blocks = 2 if leaf.startswith("gate_up") else 1
            runs = _slices(name, parameter.shape[dim] // blocks, blocks, slices, at)
            parts[leaf] = ParameterShard(
                dim=dim, runs=runs, within=(0, expert_range.start, expert_range.size)
            )
        return parts

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        names = {name for name, _ in module.named_parameters(recurse=False)}
        into = "gate_up" if "gate_up" in names else "up"
        return GroupedExperts(module, into, biased=mesh.index("expert_tp") == 0)


def _slices(name: str, width: int, blocks: int, slices: int, index: int) -> tuple[ShardRange, ...]:
    """Return one rank's slice of the inner width in each of `blocks` consecutive blocks."""
    if width % slices:
        divisors = [n for n in range(1, width + 1) if width % n == 0]
        raise StrettoError(
            f"{name}: inner width {width} does not divide over expert_tp={slices} ranks",
            hint=f"the nearest expert_tp is {min(divisors, key=lambda n: abs(n - slices))}",
        )
    size = width // slices
    return tuple(ShardRange(block * width + index * size, size) for block in range(blocks))


__all__ = [
    "Auxiliary",
    "ExpertParallel",
    "ExpertWeights",
    "GroupedExperts",
    "ParallelMoE",
]
