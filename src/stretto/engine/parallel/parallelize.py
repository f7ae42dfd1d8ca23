"""Apply a sharding plan to a plain model, and check that it covers every parameter exactly once and every
module that draws random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from stretto.engine.parallel.follow import SplitPropagation, check_call, declared, defaults, propagate_splits
from stretto.engine.parallel.fragment import ShardPlacement, TensorBox
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.random_ops import draws, watch_first_forward
from stretto.engine.parallel.splits import AfterModule, BeforeModule, Split
from stretto.engine.parallel.styles import (
    BatchParallel,
    GatherBatch,
    ParallelStyle,
    ParameterShard,
    Replicate,
    empty_shard,
)
from stretto.engine.parallel.tensor.batch_norm import over_ranks
from stretto.engine.parallel.tensor.dropout import Cut, KeyedDropout
from stretto.engine.parallel.tensor.linear import FusedLinear
from stretto.engine.parallel.tensor.rounds import finish_rounds
from stretto.errors import StrettoError, nearest

Plan = Mapping[str, ParallelStyle]


class SharedSlice(NamedTuple):
    """A slice of a local gradient to which other ranks contribute: summed over `group` once a step."""

    dim: int
    start: int
    size: int
    group: ProcessGroup


class SplitRecord(NamedTuple):
    """Placement of a split parameter, stored on the parameter itself under the attribute `SPLIT_RECORD`, and
    the ranks that together hold one copy of it.
    """

    placed: ShardPlacement
    group: ProcessGroup | None


SPLIT_RECORD = "_stretto_held"
SUMMED = "_stretto_summed"  # set on parameters whose gradients are summed over ranks once a step


@dataclass
class ShardedParameter:
    """This rank's part of one parameter of the plain model.

    Attributes:
        names: all of the parameter's names (several if it is tied); the first is its name in checkpoints.
        placed: placement of this rank's part in the plain tensor.
        shared: slices of the gradient to which other ranks contribute.
    """

    names: tuple[str, ...]
    placed: ShardPlacement
    shared: tuple[SharedSlice, ...] = ()


def matches(pattern: str, name: str) -> bool:
    """True if `pattern` matches a module name, part by part; `*` stands for any text within one part.

    The model itself has the name "", which only the pattern "" matches.
    """
    if not name or not pattern:
        return name == pattern
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def parallelize(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    *,
    convert: bool | None = None,
    inputs: Split = "whole",
    outputs: Split = "whole",
) -> dict[str, ShardedParameter]:
    """Replace the modules of `model` by their tensor-parallel forms under `plan`, in place, with this rank's
    part of the parameters.

    Parameters keep this rank's part of their values. A model too large for one device is built on the meta
    device and gets its values from `materialise`. A module with several names is replaced under all of them.

    If the split of activations changes between layers, as from `BatchParallel` to `ColumnParallel`, the
    model is traced with torch.fx, and every module gets its input in the split that its style requires.

    Args:
        convert: trace the model. Default: only if a style is `BatchParallel` or `GatherBatch`. If False, only
            the inputs and outputs that styles declare are converted.
        inputs: split of a traced model's inputs: "whole", the same on all ranks, or "batch", each rank's part
            of the batch.
        outputs: split of a traced model's output. With "whole", the loss of the full batch is computed on
            every rank. With "batch" each rank's loss is a term of it: the sum over its samples, divided by
            the size of the full batch.

    Returns:
        The placement of each parameter, by plain-model name.

    Raises:
        StrettoError: a pattern matches nothing, a module is matched twice, a parameter has no style, sizes do
            not divide, shares do not add up to the plain model, a style does not fit its module, the model
            cannot be traced, no conversion matches the splits, or, with tp > 1, a module's random numbers
            would not be those of one process. If its type does not show that it draws any, the error is
            raised in the model's first forward in training.
    """
    styles = _assign(model, plan)
    flow = None
    if mesh.size("tp") > 1:
        if convert is None:
            convert = any(isinstance(style, BatchParallel | GatherBatch) for style in plan.values())
        flow = propagate_splits(model, styles, inputs, outputs) if convert else declared(styles)
        _check_random(model, styles, flow if convert else flow.only("batch"))
        _check_statistics(styles)
    aliases_of = dict[int, tuple[nn.Parameter, list[str]]]()  # every parameter once, with all of its names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases_of.setdefault(id(parameter), (parameter, []))[1].append(name)
    parts = dict[str, list[dict[str, ParameterShard]]]()
    for name, (module, style) in styles.items():
        size = mesh.size(style.axes)
        parts[name] = [style.parts(name, module, i, size) for i in range(size)]
    table = dict[str, ShardedParameter]()
    local = dict[int, nn.Parameter]()  # by id of the plain parameter, so that tied parameters stay tied
    for parameter, names in aliases_of.values():
        aliases = tuple(names)
        shares, owner = _shares(aliases, parts)
        axes = styles[owner][1].axes
        _cover(aliases[0], parameter, shares)
        index = mesh.index(axes)
        placed = _placed(aliases[0], parameter, shares[index], index, axes)
        table[aliases[0]] = ShardedParameter(aliases, placed, _shared(parameter, shares[index], mesh, axes))
        share = empty_shard(parameter.detach(), shares[index])
        if not share.is_meta:
            placed.fill(share, parameter.detach())
        local[id(parameter)] = nn.Parameter(share, parameter.requires_grad)
        if shares[index].dim is not None:
            setattr(local[id(parameter)], SPLIT_RECORD, SplitRecord(placed, mesh.group(axes)))
        if table[aliases[0]].shared:
            setattr(local[id(parameter)], SUMMED, True)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in local:
                module._parameters[name] = local[id(parameter)]
    swapped = dict[int, nn.Module]()  # by id of the plain module, so that shared modules stay shared
    for name, (module, style) in styles.items():
        if id(module) not in swapped:
            swapped[id(module)] = style.replace_module(module, mesh)
        _set(model, name, swapped[id(module)])
    if flow is not None:
        _connect(model, styles, flow, mesh)
        if convert and defaults(model) is not None:
            model.register_forward_pre_hook(check_call, with_kwargs=True)
        watch_first_forward(model)
    return table


def _connect(
    model: nn.Module,
    styles: Mapping[str, tuple[nn.Module, ParallelStyle]],
    flow: SplitPropagation,
    mesh: Mesh,
) -> None:
    """Register the hooks that convert inputs and outputs of modules and of the model, and configure the
    modules that compute on a part of the batch.
    """
    group = mesh.group("tp")
    for name, changes in flow.before.items():
        module = model.get_submodule(name)
        module.register_forward_pre_hook(BeforeModule(changes, group), with_kwargs=True)
    for name, change in flow.after.items():
        model.get_submodule(name).register_forward_hook(AfterModule((change,), group))
    for name in flow.terms:
        cast(FusedLinear, model.get_submodule(name)).input_group = None
    for name, changes in flow.rounds.items():
        if group is not None:
            finish_rounds(model.get_submodule(name), AfterModule(changes, group).converted)
    if any(flow.output):
        model.register_forward_hook(AfterModule(flow.output, group))
    for name, module in model.named_modules():
        split, size = flow.of(name) or ("whole", 0)
        if isinstance(module, _BatchNorm) and split == "batch" and group is not None:
            over_ranks(module, group)
        elif isinstance(module, KeyedDropout) and split == "batch":
            module.share = mesh.index("tp"), mesh.size("tp")
        elif isinstance(module, KeyedDropout) and split == "features" and size and name not in styles:
            module.cuts = (Cut.even(-1, size, mesh.index("tp"), mesh.size("tp")),)


def _assign(model: nn.Module, plan: Plan) -> dict[str, tuple[nn.Module, ParallelStyle]]:
    """Return the style of each styled module, by name. Every pattern must match a module, and a module at
    most one pattern. All names of a module get the style of the name that matches; matches must agree.
    """
    assigned = dict[str, tuple[nn.Module, ParallelStyle]]()
    names = dict(model.named_modules(remove_duplicate=False))
    for pattern, style in plan.items():
        matching = [pattern] if pattern in names else [name for name in names if matches(pattern, name)]
        if not matching:
            raise StrettoError(
                f"sharding plan: pattern {pattern!r} matches no module",
                hint=f"did you mean {nearest(pattern, names)!r}?" if nearest(pattern, names) else None,
            )
        for name in matching:
            if name in assigned:
                raise StrettoError(f"sharding plan: module {name!r} is matched twice, again by {pattern!r}")
            assigned[name] = (names[name], style)
    style_of = dict[int, tuple[str, ParallelStyle]]()
    for name, (module, style) in assigned.items():
        first, other = style_of.setdefault(id(module), (name, style))
        if other != style:
            raise StrettoError(
                f"sharding plan: {first!r} and {name!r} are one module, with the styles {other} and {style}",
                hint="give both names the same style",
            )
    for name, module in names.items():
        if id(module) in style_of:
            assigned.setdefault(name, (module, style_of[id(module)][1]))
    return assigned


def _check_random(
    model: nn.Module, styles: Mapping[str, tuple[nn.Module, ParallelStyle]], flow: SplitPropagation
) -> None:
    """Reject modules whose random numbers would differ from those of one process under tensor parallelism.

    A mask from torch's global generator depends on the rank. A keyed mask is the same on every rank, which is
    right for a replicated activation and wrong for a split one. The modules do not show the split, so the
    plan must: by a style of the dropout itself, or by `Replicate` for a module that contains it and no split
    module.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        if draws(module):
            raise StrettoError(
                f"{name!r} is {type(module).__name__}: each tensor-parallel rank would draw a different mask",
                hint="call key_dropout(model, keys) before parallelize"
                if isinstance(module, nn.Dropout)
                else "use nn.Dropout, and call key_dropout(model, keys) before parallelize",
            )
        if not isinstance(module, KeyedDropout) or not module.p:
            continue
        if flow.of(name) is not None:
            continue
        if not (_replicated(name, styles) or (name in styles and not isinstance(styles[name][1], Replicate))):
            raise StrettoError(
                f"sharding plan: no style gives the split of the input of dropout {name!r}",
                hint=f"add {name!r}: SplitDropout(...), or Replicate() if every rank has the whole input",
            )


def _check_statistics(styles: Mapping[str, tuple[nn.Module, ParallelStyle]]) -> None:
    """Reject norms over the batch whose statistics would be those of one rank's tokens."""
    for name, (module, style) in styles.items():
        norms = [
            ".".join(filter(None, (name, inner)))
            for inner, m in module.named_modules()
            if isinstance(m, _BatchNorm)
        ]
        if isinstance(style, Replicate) and style.sequence and norms:
            raise StrettoError(
                f"sharding plan: {norms[0]!r} takes statistics over the batch, of which each rank would see "
                "its own tokens only",
                hint="Replicate() without sequence, or a norm over features, such as nn.LayerNorm",
            )
        if isinstance(style, GatherBatch) and style.schedule != "all" and norms:
            raise StrettoError(
                f"sharding plan: {norms[0]!r} takes statistics over the batch, of which {name!r} has a part "
                f"in each round of {style}",
                hint="GatherBatch('all'), or a norm over features, such as nn.LayerNorm",
            )


def _replicated(name: str, styles: Mapping[str, tuple[nn.Module, ParallelStyle]]) -> bool:
    """True if the module computes the same on all ranks: it, or the nearest styled module that contains it,
    has no split module inside.
    """
    while name and name not in styles:
        name = name.rpartition(".")[0]
    prefix = f"{name}." if name else ""
    inside = [style for other, (_, style) in styles.items() if other == name or other.startswith(prefix)]
    return name in styles and all(isinstance(style, Replicate) and not style.sequence for style in inside)


def _shares(
    aliases: Sequence[str], parts: Mapping[str, list[dict[str, ParameterShard]]]
) -> tuple[list[ParameterShard], str]:
    """Return every rank's share of one parameter, and the name of the module whose style defines it. The
    shares of a tied parameter must agree.
    """
    claims = dict[str, tuple[list[ParameterShard], str]]()
    for alias in aliases:
        owner, _, leaf = alias.rpartition(".")
        while True:
            if owner in parts and leaf in parts[owner][0]:
                claims[alias] = [share[leaf] for share in parts[owner]], owner
                break
            if not owner:
                raise StrettoError(
                    f"sharding plan: no pattern covers parameter {alias!r}",
                    hint=f"add {alias.rpartition('.')[0]!r}: Replicate() or a style that splits it",
                )
            owner, _, step = owner.rpartition(".")
            leaf = f"{step}.{leaf}"
    first, *others = claims.values()
    if any(other[0] != first[0] for other in others):
        raise StrettoError(
            f"sharding plan: tied parameter {' = '.join(aliases)} is split in different ways",
            hint="give all modules that share it styles that split it alike",
        )
    return first


def _cover(name: str, parameter: nn.Parameter, shares: Sequence[ParameterShard]) -> None:
    """Check that the owned shares of all ranks contain each element of the plain parameter once."""
    first = shares[0]
    if first.dim is None:
        return
    slices = sorted({share.within for share in shares if share.within is not None})
    if slices:
        _cover_along(name, parameter, slices[0][0], [(start, start + size) for _, start, size in slices])
    for at in slices or [None]:
        runs = [run for share in shares if share.within == at for run in share.runs]
        _cover_along(name, parameter, first.dim, [(r.start, r.start + r.size) for r in runs if r.owned])


def _cover_along(name: str, parameter: nn.Parameter, dim: int, spans: Sequence[tuple[int, int]]) -> None:
    full, reached = parameter.shape[dim], 0
    for start, stop in sorted(spans):
        if start != reached:
            problem = "no rank holds" if start > reached else "two ranks own"
            raise StrettoError(
                f"sharding plan: {problem} {name} from {min(start, reached)} along dimension {dim}"
            )
        reached = stop
    if reached != full:
        raise StrettoError(
            f"sharding plan: the shares of {name} hold {reached} of {full} along dimension {dim}"
        )


def _placed(
    name: str, parameter: nn.Parameter, part: ParameterShard, index: int, axes: str
) -> ShardPlacement:
    shape = tuple(parameter.shape)
    if part.dim is None:
        return replace(ShardPlacement.unsharded(name, shape, owned=index == 0), over=axes)
    pieces, at = list[TensorBox](), 0
    for run in part.runs:
        offsets = [0] * len(shape)
        sizes = list(shape)
        local = [0] * len(shape)
        offsets[part.dim] = run.start
        sizes[part.dim] = run.size
        local[part.dim] = at
        if part.within is not None:
            dim, offsets[dim], sizes[dim] = part.within
        pieces.append(
            TensorBox(offsets=tuple(offsets), sizes=tuple(sizes), local=tuple(local), owned=run.owned)
        )
        at += run.size
    return ShardPlacement(name, shape, tuple(pieces), axes)


def _shared(parameter: nn.Parameter, part: ParameterShard, mesh: Mesh, axes: str) -> tuple[SharedSlice, ...]:
    """Return the slices that several ranks hold, each of which computes a part of their gradient."""
    if part.partial:
        group = mesh.group(axes)
        rows = parameter.shape[0] if parameter.dim() else 1
        return () if group is None else (SharedSlice(0, 0, rows, group),)
    shared = list[SharedSlice]()
    at = 0
    for run in part.runs:
        if run.copies > 1 and part.dim is not None:
            group = mesh.split(axes, run.copies)
            assert group is not None
            shared.append(SharedSlice(part.dim, at, run.size, group))
        at += run.size
    return tuple(shared)


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    if model.get_submodule(name) is module:
        return
    if not name:
        raise StrettoError(
            f"sharding plan: pattern '' swaps the model itself, a {type(model).__name__}",
            hint="put the module into a parent, such as nn.Sequential(module), and name it there",
        )
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


@torch.no_grad()
def materialise(
    layers: Sequence[tuple[str, nn.Module]],
    table: Mapping[str, ShardedParameter],
    values: Callable[[str, tuple[int, ...]], Tensor] | None,
    device: torch.device | str,
    dtype: torch.dtype | Callable[[str], torch.dtype],
    without_storage: bool = False,
) -> dict[str, nn.Parameter]:
    """Create the parameters of this rank's layers; the other layers remain on the meta device.

    Args:
        layers: (plain name, module) of every layer of this rank.
        values: returns the full initial value of a parameter, from its name and full shape; None leaves
            parameters uninitialised, to be loaded from a checkpoint.
        dtype: dtype of all parameters, or a function from the plain name.
        without_storage: do not allocate the parameters; `ShardedStates` does.

    Returns:
        This rank's parameters by plain-model name; a parameter tied between its layers is one tensor.
    """
    names = {alias: sharded for sharded in table.values() for alias in sharded.names}
    parameters = dict[str, nn.Parameter]()
    for layer_name, layer in layers:
        for module_name, module in layer.named_modules():
            prefix = ".".join(filter(None, (layer_name, module_name)))
            for leaf, parameter in module._parameters.items():
                if parameter is None:
                    continue
                sharded = names[f"{prefix}.{leaf}" if prefix else leaf]
                key = sharded.names[0]
                if key not in parameters:
                    kind = dtype if isinstance(dtype, torch.dtype) else dtype(key)
                    real = torch.empty(parameter.shape, dtype=kind, device=device)
                    if without_storage:
                        real.untyped_storage().resize_(0)
                    if values is not None:
                        sharded.placed.fill(real, values(key, sharded.placed.shape))
                    parameters[key] = nn.Parameter(real, parameter.requires_grad)
                module._parameters[leaf] = parameters[key]
    return parameters


__all__ = [
    "SPLIT_RECORD",
    "SUMMED",
    "Plan",
    "ShardedParameter",
    "SharedSlice",
    "SplitRecord",
    "matches",
    "materialise",
    "parallelize",
]
