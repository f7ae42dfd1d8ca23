"""Apply a sharding plan to a plain model, and account for every parameter while doing so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.errors import StrettoError, nearest
from stretto.parallel.mesh import Mesh
from stretto.parallel.placed import Piece, Placed
from stretto.parallel.styles import Part, Style, shrink

Plan = Mapping[str, Style]


@dataclass
class Sharded:
    """One parameter of the plain model as this rank holds it.

    names: every name the parameter goes by (several when it is tied); the first is its name in checkpoints.
    shared: parts of the gradient that other ranks hold too and contribute to: (dimension, start, size, group), to be
        summed over the group once a step.
    """

    names: tuple[str, ...]
    placed: Placed
    shared: tuple[tuple[int, int, int, ProcessGroup], ...] = ()


def matches(pattern: str, name: str) -> bool:
    """`pattern` against a module name, part by part: `*` stands for any text within one part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def parallelize(model: nn.Module, plan: Plan, mesh: Mesh) -> dict[str, Sharded]:
    """Swap `model`'s modules by `plan` for this rank's tensor-parallel share; in place.

    Build the model on the meta device: parameters take their local shape here and their values in `materialise`.

    Returns:
        The parameters by plain-model name, with their place.

    Raises:
        StrettoError: a pattern that matches nothing, a module matched twice, a parameter without a style, sizes that do
            not divide, or shares that do not add up to the plain model.
    """
    tp, index = mesh.size("tp"), mesh.index("tp")
    styles = _assign(model, plan)
    names = _names(model)
    parts = {
        name: [style.parts(name, module, i, tp) for i in range(tp)] for name, (module, style) in styles.items()
    }
    table = dict[str, Sharded]()
    local = dict[int, nn.Parameter]()  # by id of the plain parameter, so that ties survive
    for parameter, aliases in names:
        shares = _shares(aliases, parts, tp)
        _cover(aliases[0], parameter, shares)
        placed = _placed(aliases[0], parameter, shares[index], index)
        table[aliases[0]] = Sharded(aliases, placed, _shared(shares[index], mesh))
        local[id(parameter)] = nn.Parameter(shrink(parameter.detach(), shares[index]), parameter.requires_grad)
    _replace_parameters(model, local)
    for name, (module, style) in styles.items():
        _set(model, name, style.swap(module, mesh))
    return table


def _assign(model: nn.Module, plan: Plan) -> dict[str, tuple[nn.Module, Style]]:
    """Which style each module gets: exactly one pattern a module, every pattern at least one module."""
    assigned = dict[str, tuple[nn.Module, Style]]()
    names = dict(model.named_modules())
    for pattern, style in plan.items():
        found = [name for name in names if matches(pattern, name)]
        if not found:
            raise StrettoError(
                f"sharding plan: pattern {pattern!r} matches no module",
                hint=f"did you mean {nearest(pattern, names)!r}?" if nearest(pattern, names) else None,
            )
        for name in found:
            if name in assigned:
                raise StrettoError(f"sharding plan: module {name!r} is matched twice, again by {pattern!r}")
            assigned[name] = (names[name], style)
    return assigned


def _names(model: nn.Module) -> list[tuple[nn.Parameter, tuple[str, ...]]]:
    """Every parameter once, with all names it goes by."""
    found = dict[int, tuple[nn.Parameter, list[str]]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    return [(parameter, tuple(aliases)) for parameter, aliases in found.values()]


def _shares(aliases: Sequence[str], parts: Mapping[str, list[dict[str, Part]]], tp: int) -> list[Part]:
    """Every tp rank's share of one parameter; the styles of a tied one must agree."""
    claims = dict[str, list[Part]]()
    for alias in aliases:
        owner, _, leaf = alias.rpartition(".")
        while True:
            if owner in parts and leaf in parts[owner][0]:
                claims[alias] = [parts[owner][i][leaf] for i in range(tp)]
                break
            if not owner:
                raise StrettoError(
                    f"sharding plan: no pattern covers parameter {alias!r}",
                    hint=f"add {alias.rpartition('.')[0]!r}: Replicate() or a style that splits it",
                )
            owner, _, step = owner.rpartition(".")
            leaf = f"{step}.{leaf}"
    first, *others = claims.values()
    if any(other != first for other in others):
        raise StrettoError(
            f"sharding plan: tied parameter {' = '.join(aliases)} is split in different ways",
            hint="give all modules that share it styles that split it alike",
        )
    return first


def _cover(name: str, parameter: nn.Parameter, shares: Sequence[Part]) -> None:
    """The owned shares of all ranks must be the plain parameter, each element once."""
    first = shares[0]
    if first.dim is None:
        return
    full = parameter.shape[first.dim]
    runs = sorted((r.start, r.start + r.size) for s in shares for r in s.runs if r.owned)
    reached = 0
    for start, stop in runs:
        if start != reached:
            break
        reached = stop
    if reached != full:
        raise StrettoError(f"sharding plan: the shares of {name} hold {reached} of {full} along dimension {first.dim}")


def _placed(name: str, parameter: nn.Parameter, part: Part, index: int) -> Placed:
    shape = tuple(parameter.shape)
    if part.dim is None:
        return Placed.whole(name, shape, owned=index == 0)
    pieces, at = list[Piece](), 0
    for run in part.runs:
        offsets, sizes, local = [0] * len(shape), list(shape), [0] * len(shape)
        offsets[part.dim], sizes[part.dim], local[part.dim] = run.start, run.size, at
        pieces.append(Piece(tuple(offsets), tuple(sizes), tuple(local), run.owned))
        at += run.size
    return Placed(name, shape, tuple(pieces))


def _shared(part: Part, mesh: Mesh) -> tuple[tuple[int, int, int, ProcessGroup], ...]:
    """Runs held by several ranks, each of which computes its own part of their gradient."""
    shared, at = list[tuple[int, int, int, ProcessGroup]](), 0
    for run in part.runs:
        if run.copies > 1 and part.dim is not None:
            group = mesh.split("tp", run.copies)
            assert group is not None
            shared.append((part.dim, at, run.size, group))
        at += run.size
    return tuple(shared)


def _replace_parameters(model: nn.Module, local: Mapping[int, nn.Parameter]) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in local:
                module._parameters[name] = local[id(parameter)]


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    owner = model.get_submodule(parent)
    if owner._modules[leaf] is not module:
        setattr(owner, leaf, module)


def count(table: Mapping[str, Sharded]) -> int:
    """Elements of the plain model's parameters."""
    return sum(prod(sharded.placed.shape) for sharded in table.values())


@torch.no_grad()
def materialise(
    layers: Sequence[tuple[str, nn.Module]],
    table: Mapping[str, Sharded],
    values: Callable[[str, tuple[int, ...]], Tensor] | None,
    device: torch.device | str,
    dtype: torch.dtype,
) -> dict[str, nn.Parameter]:
    """Give this rank's layers real parameters; the other layers stay on the meta device.

    Args:
        layers: (plain name, module) of every layer held here.
        values: full initial value of a parameter, from its name and full shape; None leaves them empty (a
            checkpoint follows).

    Returns:
        This rank's parameters by plain-model name; a parameter tied between layers held here is one tensor.
    """
    names = {alias: sharded for sharded in table.values() for alias in sharded.names}
    made = dict[str, nn.Parameter]()
    for layer_name, layer in layers:
        for module_name, module in layer.named_modules():
            prefix = ".".join(filter(None, (layer_name, module_name)))
            for leaf, parameter in module._parameters.items():
                if parameter is None:
                    continue
                sharded = names[f"{prefix}.{leaf}"]
                key = sharded.names[0]
                if key not in made:
                    real = torch.empty(parameter.shape, dtype=dtype, device=device)
                    if values is not None:
                        sharded.placed.fill(real, values(key, sharded.placed.shape))
                    made[key] = nn.Parameter(real, parameter.requires_grad)
                module._parameters[leaf] = made[key]
    return made


def tied_stages(table: Mapping[str, Sharded], stage_of: Callable[[str], int]) -> dict[str, tuple[int, ...]]:
    """Parameters that several stages hold, by plain name, with those stages."""
    found = dict[str, tuple[int, ...]]()
    for name, sharded in table.items():
        stages = tuple(sorted({stage_of(alias) for alias in sharded.names}))
        if len(stages) > 1:
            found[name] = stages
    return found


__all__ = ["Plan", "Sharded", "count", "materialise", "matches", "parallelize", "tied_stages"]
