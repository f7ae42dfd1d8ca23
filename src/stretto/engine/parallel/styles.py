"""Styles of splitting one module over tensor-parallel ranks: the values of a sharding plan.

A style gives the part of each parameter that every rank holds (`parts`), without communication, and replaces
the module by one that computes with this rank's part (`replace_module`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import nn

from stretto.engine.parallel.splits import Split
from stretto.engine.parallel.tensor.dropout import Cut, KeyedDropout
from stretto.engine.parallel.tensor.linear import GatherLinear, ParallelLinear, ScatterLinear, ToHeads
from stretto.engine.parallel.tensor.rounds import SCHEDULES, Schedule, in_rounds
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.engine.parallel.tensor.vocabulary import (
    GatheredLogits,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
)
from stretto.errors import StrettoError, nearest

if TYPE_CHECKING:
    from stretto.engine.parallel.mesh import Mesh


@dataclass(frozen=True)
class ShardRange:
    """Rows (or columns) [start, start + size) of the full tensor, held by `copies` adjacent ranks, one of
    which owns them.
    """

    start: int
    size: int
    copies: int = 1
    owned: bool = True


@dataclass(frozen=True, kw_only=True)
class ParameterShard:
    """One rank's share of one parameter: ranges along `dim` in local order, then `padding` rows of zeros.

    Attributes:
        within: (dimension, start, size) of a slice along another dimension, to which all ranges are
            restricted.
        partial: every rank holds the full tensor, and computes the part of its gradient from its own tokens.
    """

    dim: int | None  # None: the full tensor on every rank
    runs: tuple[ShardRange, ...] = ()
    padding: int = 0
    within: tuple[int, int, int] | None = None
    partial: bool = False

    @property
    def size(self) -> int:
        return sum(run.size for run in self.runs) + self.padding


def even(name: str, size: int, index: int, parts: int) -> ShardRange:
    """Return part `index` of `parts` equal parts of `size` rows."""
    if size % parts:
        raise StrettoError(
            f"{name}: size {size} does not divide over tp={parts} ranks",
            hint=f"choose tp from {[t for t in range(1, size + 1) if size % t == 0][:8]}",
        )
    step = size // parts
    return ShardRange(index * step, step)


def padded(size: int, index: int, parts: int, multiple: int) -> ParameterShard:
    """Return the share of rank `index` in a vocabulary that is padded to equal shares, multiples of
    `multiple`; the last ranks hold the padding.
    """
    step = -(-size // (parts * multiple)) * multiple
    start = min(index * step, size)
    real = min(step, size - start)
    return ParameterShard(dim=0, runs=(ShardRange(start, real),) if real else (), padding=step - real)


@dataclass(frozen=True, kw_only=True)
class ParallelStyle(ABC):
    """Style of splitting a module; one instance serves all modules that its pattern matches.

    Attributes:
        axes: axes of the layout over which the parameters are split.
        input: split of the module's input tensors. By default `parallelize` finds it by tracing the model, or
            assumes the split that the style requires.
        output: split of the module's output; by default the one that the style produces.
    """

    axes: ClassVar[str] = "tp"
    input: Split | None = field(default=None, repr=False)
    output: Split | None = field(default=None, repr=False)

    @property
    def natural(self) -> tuple[Split, Split] | None:
        """Splits of the module's input and output, or None if they cannot be converted."""
        return None

    @abstractmethod
    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        """Return the share of rank `index`, among `tp` ranks along the axes, in each of the module's
        parameters, by name in the module.
        """

    @abstractmethod
    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        """Return the module's replacement; its parameters have already been replaced by this rank's parts."""


def _linear(module: nn.Module, name: str) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise StrettoError(
            f"{name} is {type(module).__name__}",
            hint="ColumnParallel, RowParallel and ReplicatedLinear styles take nn.Linear",
        )
    _replaceable(name, module, nn.Linear)
    return module


def _replaceable(name: str, module: nn.Module, kind: type[nn.Module]) -> None:
    """Reject a module with buffers, hooks or an overridden forward, which its replacement would lose."""
    buffers = [leaf for leaf, _ in module.named_buffers()]
    hooks = (
        "_forward_pre_hooks",
        "_forward_hooks",
        "_backward_pre_hooks",
        "_backward_hooks",
    )
    if buffers:
        loss = f"the buffer {buffers[0]!r}"
    elif any(getattr(module, attribute) for attribute in hooks):
        loss = "hooks"
    elif type(module).forward is not kind.forward or "forward" in vars(module):
        loss = f"a forward other than that of nn.{kind.__name__}"
    else:
        return
    raise StrettoError(
        f"{name} is {type(module).__name__} with {loss}, which its tensor-parallel form would not have",
        hint="give it Replicate style or a style of your own; add hooks after parallelize",
    )


def _weight_and_bias(linear: nn.Linear) -> tuple[nn.Parameter, nn.Parameter | None]:
    return cast("tuple[nn.Parameter, nn.Parameter | None]", (linear.weight, linear.bias))


def _column(linear: nn.Linear, mesh: Mesh, sequence: bool, ordered: bool) -> nn.Module:
    """Return the layer with this rank's output features."""
    parameters, group = _weight_and_bias(linear), mesh.group("tp")
    if sequence and group is not None:
        return GatherLinear(*parameters, group, ordered)
    return ParallelLinear(*parameters, input_group=group)


@dataclass(frozen=True)
class Replicate(ParallelStyle):
    """The same parameters and the same computation on every rank; with `sequence` each rank computes on its
    part of the tokens, so gradients are summed over the ranks.
    """

    sequence: bool = False

    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        return {
            n: ParameterShard(dim=None, partial=self.sequence and p.requires_grad)
            for n, p in module.named_parameters()
        }

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        return module

    @property
    def natural(self) -> tuple[Split, Split] | None:
        return None if self.sequence else ("whole", "whole")


@dataclass(frozen=True)
class BatchParallel(ParallelStyle):
    """The same parameters on every rank, each of which computes on its part of the batch, in the order of the
    ranks: data parallelism over the ranks that split other layers. Gradients are summed over the ranks once a
    step, by `sum_gradients`. BatchNorm takes its statistics over the full batch.
    """

    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        for inner, child in module.named_modules():
            if getattr(child, "batch_first", True) is False:
                raise StrettoError(
                    f"{name}{'.' * bool(inner)}{inner} takes batches along dimension 1, and BatchParallel "
                    "style splits dimension 0",
                    hint=f"{type(child).__name__}(..., batch_first=True)",
                )
        return {n: ParameterShard(dim=None, partial=p.requires_grad) for n, p in module.named_parameters()}

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        return module

    @property
    def natural(self) -> tuple[Split, Split] | None:
        return "batch", "batch"


@dataclass(frozen=True)
class GatherBatch(ParallelStyle):
    """A module whose input is each rank's part of the batch, and which computes on the full batch; its layers
    with styles are split, parameters without a style are replicated. It takes and returns one tensor.

    Attributes:
        schedule: when the ranks' parts are gathered (Krizhevsky 2014, section 4, schemes a, b and c).
            "all" gathers at once, before the module computes. With "turns", the ranks take turns to broadcast
            their parts, each while the module computes on the previous one. With "shares", in each round, one
            per rank, every rank sends an equal share of its part, while the module computes on the shares of
            the previous round: no rank's link is the bottleneck.
    """

    schedule: Schedule = "all"

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            suggestion = nearest(self.schedule, SCHEDULES)
            raise StrettoError(
                f"schedule is {self.schedule!r}",
                hint=f"did you mean {suggestion!r}?" if suggestion else " or ".join(map(repr, SCHEDULES)),
            )

    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        return {n: ParameterShard(dim=None) for n, _ in module.named_parameters()}

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        group = mesh.group("tp")
        return module if group is None else in_rounds(module, group, self.schedule)

    @property
    def natural(self) -> tuple[Split, Split] | None:
        return "batch", "whole"


@dataclass(frozen=True)
class ReplicatedLinear(Replicate):
    """An nn.Linear with Replicate style that accumulates its gradients in place, like split ones."""

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        return ParallelLinear(*_weight_and_bias(_linear(module, "ReplicatedLinear")))


@dataclass(frozen=True)
class ColumnParallel(ParallelStyle):
    """nn.Linear split by output features; its input is replicated, its output is split.

    `segments` lists the fused blocks of rows as (units, unit size), which are split between units: ((heads,
    d), (kv, d), (kv, d)) for a fused query-key-value product. In a segment with fewer units than ranks,
    tp/units adjacent ranks hold the same unit and sum its gradients. With `sequence` the input is split along
    the sequence and is gathered; the output then has all tokens, as samples if `ordered`, else as the
    concatenation of the ranks' pieces, which saves copies (see `SequenceLinear`).
    """

    segments: tuple[tuple[int, int], ...] = ()
    sequence: bool = False
    ordered: bool = True

    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        rows = _linear(module, name).out_features
        segments = self.segments or ((rows, 1),)
        if sum(units * size for units, size in segments) != rows:
            raise StrettoError(f"{name}: segments {segments} do not add up to its {rows} output features")
        runs, start = list[ShardRange](), 0
        for units, size in segments:
            if units < tp and tp % units == 0:
                copies = tp // units
                runs.append(ShardRange(start + index // copies * size, size, copies, index % copies == 0))
            else:
                run = even(name, units, index, tp)
                runs.append(ShardRange(start + run.start * size, run.size * size))
            start += units * size
        part = ParameterShard(dim=0, runs=tuple(runs))
        return {n: part for n, _ in module.named_parameters()}

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        return _column(_linear(module, "ColumnParallel"), mesh, self.sequence, self.ordered)

    @property
    def natural(self) -> tuple[Split, Split] | None:
        return None if self.sequence else ("whole", "features")


@dataclass(frozen=True)
class RowParallel(ParallelStyle):
    """nn.Linear split by input features; its input is split, its output is summed over the ranks. With
    `sequence` the output is split along the sequence; `ordered` must be that of the preceding ColumnParallel
    style.
    """

    sequence: bool = False
    ordered: bool = True

    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        linear = _linear(module, name)
        part = ParameterShard(dim=1, runs=(even(name, linear.in_features, index, tp),))
        bias = ParameterShard(dim=None, partial=self.sequence)
        return {n: part if n == "weight" else bias for n, _ in module.named_parameters()}

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        parameters, group = _weight_and_bias(_linear(module, "RowParallel")), mesh.group("tp")
        if self.sequence and group is not None:
            return ScatterLinear(*parameters, group, self.ordered)
        return ParallelLinear(*parameters, output_group=group)

    @property
    def natural(self) -> tuple[Split, Split] | None:
        return None if self.sequence else ("features", "whole")


@dataclass(frozen=True)
class VocabParallel(ParallelStyle):
    """nn.Embedding or the output nn.Linear, split by vocabulary rows, each share padded to a multiple of
    `multiple`. With `sequence` the embedding's output and the output layer's input are split along the
    sequence. With `gather_logits` the output layer, without a bias, returns all logits on every rank, without
    gradients.
    """

    multiple: int = 1
    sequence: bool = False
    gather_logits: bool = False

    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise StrettoError(
                f"{name} is {type(module).__name__}",
                hint="VocabParallel style takes nn.Embedding or nn.Linear",
            )
        if isinstance(module, nn.Embedding):
            for option in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
                value = getattr(module, option)
                if value is not None and value is not False:  # padding_idx=0 is an option set
                    raise StrettoError(
                        f"{name} has {option}={value}, which VocabParallel style does not support",
                        hint=f"leave {option} out, or give the module Replicate style",
                    )
        _replaceable(name, module, nn.Embedding if isinstance(module, nn.Embedding) else nn.Linear)
        part = padded(module.weight.shape[0], index, tp, self.multiple)
        return {n: part for n, _ in module.named_parameters()}

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        if isinstance(module, nn.Linear) and self.gather_logits:
            return GatheredLogits(cast(nn.Parameter, module.weight), module.out_features, mesh.group("tp"))
        if isinstance(module, nn.Linear):
            return _column(module, mesh, self.sequence, ordered=True)
        assert isinstance(module, nn.Embedding)
        weight = cast(nn.Parameter, module.weight)
        return VocabParallelEmbedding(
            weight, mesh.index("tp") * weight.shape[0], mesh.group("tp"), self.sequence
        )


@dataclass(frozen=True)
class VocabParallelLoss(ParallelStyle):
    """The cross-entropy over the logits of an output layer with VocabParallel style."""

    vocab: int
    multiple: int = 1

    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        return {}

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        part = padded(self.vocab, mesh.index("tp"), mesh.size("tp"), self.multiple)
        real = sum(run.size for run in part.runs)
        return VocabParallelCrossEntropy(mesh.index("tp") * part.size, real, mesh.group("tp"))


@dataclass(frozen=True)
class HeadParallel(ParallelStyle):
    """An attention module whose `heads` and `kv_heads` become the numbers of local heads; its `sinks` and the
    rows of `relative`, if any, are split like its query heads.
    """

    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        heads = getattr(module, "heads", None)
        if not isinstance(heads, int) or not isinstance(getattr(module, "kv_heads", None), int):
            raise StrettoError(
                f"{name} ({type(module).__name__}) has no heads and kv_heads",
                hint="HeadParallel style is for attention modules that read self.heads and self.kv_heads",
            )
        own_heads = even(f"{name}.heads", heads, index, tp)  # key heads may be copied, query heads may not
        parameters = (leaf for leaf, _ in module.named_parameters(recurse=False))
        return {
            leaf: ParameterShard(dim=0, runs=(own_heads,))
            for leaf in parameters
            if leaf in ("sinks", "relative")
        }

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        tp = mesh.size("tp")
        for attribute in ("heads", "kv_heads"):
            count = getattr(module, attribute)
            setattr(module, attribute, count // tp if count >= tp else 1)
        return module


@dataclass(frozen=True)
class SharedInput(ParallelStyle):
    """An nn.Identity whose output [b, s, n] the heads of all ranks use, so its gradients are summed over the
    ranks. With `sequence` its input is each rank's part of the tokens, and its output has all of them.
    """

    sequence: bool = False

    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        if type(module) is not nn.Identity:
            raise StrettoError(
                f"{name} is {type(module).__name__}", hint="SharedInput style takes nn.Identity"
            )
        return {}

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        group = mesh.group("tp")
        return module if group is None else ToHeads(group, self.sequence)


@dataclass(frozen=True)
class SplitDropout(ParallelStyle):
    """Dropout of a split activation, whose masks are this rank's slices of the masks of one process.

    Attributes:
        heads: (dimension, full size) of a dimension that is split evenly over the tp ranks.
        sequence: (dimension, tokens of a sample, True if also split over tp) of the positions.
    """

    heads: tuple[int, int] | None = None
    sequence: tuple[int, int, bool] | None = None

    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        return {}

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        if isinstance(module, KeyedDropout):
            cuts = list[Cut]()
            if self.heads is not None and mesh.size("tp") > 1:
                cuts.append(Cut.even(*self.heads, mesh.index("tp"), mesh.size("tp")))
            if self.sequence is not None:
                dim, length, sharded = self.sequence
                split = SequenceSplit.of(mesh, length, sharded)
                if not split.complete or split.padded > length:
                    cuts.append(Cut(dim, length, split.shard))
            return KeyedDropout(module.p, module.name, module.keys, cuts).train(module.training)
        if isinstance(module, nn.Dropout) and module.p:
            raise StrettoError(
                "SplitDropout style on nn.Dropout, whose mask would be the same on every rank",
                hint="call key_dropout(model, keys) before parallelize",
            )
        return module


@dataclass(frozen=True)
class ShardedPositions(ParallelStyle):
    """A module whose `positions` become this rank's positions of samples of `length` tokens.

    Attributes:
        sequence: sequence parallelism is on, which pads samples for the tp ranks.
        sharded: each tp rank has only its part of the positions in this module.
    """

    length: int
    sequence: bool = False
    sharded: bool = False

    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        if not hasattr(module, "positions"):
            raise StrettoError(
                f"{name} ({type(module).__name__}) has no positions",
                hint="ShardedPositions style is for modules that read self.positions",
            )
        return {}

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        split = SequenceSplit.of(mesh, self.length, self.sequence)
        if not split.complete or split.padded > self.length:
            setattr(module, "positions", _positions(split, self.sharded, mesh.device))  # noqa: B010
        if hasattr(module, "length"):
            setattr(module, "length", self.length)  # noqa: B010
        return module


@lru_cache(maxsize=8)
def _positions(split: SequenceSplit, sharded: bool, device: torch.device) -> torch.Tensor:
    """Return one tensor for all layers, so that they share tables derived from it."""
    return (split.shard if sharded else split.positions).to(device)


def empty_shard(parameter: torch.Tensor, part: ParameterShard) -> torch.Tensor:
    """Return an uninitialised tensor of the local shape on the parameter's device."""
    if part.dim is None:
        return torch.empty_like(parameter)
    shape = list(parameter.shape)
    shape[part.dim] = part.size
    if part.within is not None:
        dim, _, size = part.within
        shape[dim] = size
    return parameter.new_empty(shape)
