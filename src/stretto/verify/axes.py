"""The ranks of a job as a grid, and which of its axes a difference between ranks is along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stretto.engine.device import carrier
from stretto.engine.parallel.control import gather_json, world_size
from stretto.errors import StrettoError

Grid = DeviceMesh | Mapping[str, int] | None


class Axes:
    """The axes of the ranks, by name.

    Attributes:
        over: groups of ranks that differ along some of the axes only, with words for such a group; a single
            axis comes first, all of them last.
    """

    def __init__(self, grid: Grid) -> None:
        """Args: grid: a device mesh, or sizes by name with the last axis varying fastest; None: no axes.

        Raises:
            StrettoError: sizes that do not make the number of ranks.
        """
        ranks = torch.arange(world_size())
        names: tuple[str, ...] = ()
        if isinstance(grid, DeviceMesh):
            names = grid.mesh_dim_names or tuple(f"axis {dim}" for dim in range(grid.ndim))
            ranks = grid.mesh.flatten()
            sizes = list(grid.mesh.shape)
        else:
            names, sizes = tuple(grid or ()), list((grid or {}).values())
        if names and torch.Size(sizes).numel() != world_size():
            shown = " x ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
            raise StrettoError(f"mesh is {shown}, and there are {world_size()} ranks", hint="mesh={'dp': 2}")
        shaped = ranks.reshape(sizes) if names else ranks
        self.over = list[tuple[str, list[list[int]]]]()
        for count in range(1, len(names) + 1):
            for dims in combinations(range(len(names)), count):
                moved = shaped.movedim(dims, tuple(range(-count, 0)))
                groups = moved.reshape(-1, moved.shape[-count:].numel()).tolist()
                if len(groups[0]) > 1:
                    label = " x ".join(names[dim] for dim in dims)
                    self.over.append((f"the {len(groups[0])} ranks of {label}", groups))
        if not self.over and world_size() > 1:
            self.over.append((f"the {world_size()} ranks", [ranks.tolist()]))

    def of_size(self, size: float, close: float) -> str | None:
        """Return the groups of this number of ranks, in words."""
        labels = [label for label, groups in self.over if abs(len(groups[0]) / size - 1.0) < close]
        return " or ".join(labels) or None


def gathered(local: Tensor | None, shape: Sequence[int]) -> list[Tensor | None]:
    """Return every rank's float64 tensor of a shape, or None for ranks without one. Collective."""
    present = gather_json(local is not None)
    if world_size() == 1:
        return [local]
    sent = torch.zeros(tuple(shape), dtype=torch.float64) if local is None else local
    sent = sent.contiguous().to(carrier())
    rows = [torch.empty_like(sent) for _ in present]
    dist.all_gather(rows, sent)
    return [row.cpu() if has else None for row, has in zip(rows, present, strict=True)]


def combined(
    values: Sequence[Tensor | None], groups: Sequence[Sequence[int]], mean: bool
) -> list[Tensor | None]:
    """Return for each rank with a value the sum or the mean over its group."""
    result: list[Tensor | None] = [None] * len(values)
    for group in groups:
        present = [value for rank in group if (value := values[rank]) is not None]
        if present:
            reduced = torch.stack(present).sum(0) / (len(present) if mean else 1)
            for rank in group:
                result[rank] = None if values[rank] is None else reduced
    return result


def missing_over(
    values: Sequence[Tensor | None], reference: Tensor, axes: Axes, close: float
) -> tuple[str, str] | None:
    """Return the ranks between which values differ, and "sum" or "mean", whichever of these is the reference.

    Args:
        close: largest difference that still counts as equal, in units of the reference's largest value.
    """
    size = float(reference.abs().max()) * close

    def is_reference(candidates: Sequence[Tensor | None]) -> bool:
        return all(bool((value - reference).abs().max() <= size) for value in candidates if value is not None)

    for label, groups in axes.over:
        present = [[value for rank in group if (value := values[rank]) is not None] for group in groups]
        if all(bool((value - row[0]).abs().max() <= size) for row in present for value in row[1:]):
            continue
        for mean, operation in ((False, "sum"), (True, "mean")):
            if is_reference(combined(values, groups, mean)):
                return label, operation
    return None
