"""Outputs of modules beside those of the plain model, and the first of them that differs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from stretto.engine.parallel.control import gather_json
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.verify.compare import largest, share

Outputs = dict[str, Tensor]
Pairing = Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None]
_TOLERANCE = 1e-9


@contextmanager
def recorded(modules: Iterable[tuple[str, nn.Module]]) -> Generator[Outputs]:
    """The first output of each module while in the `with`, by name, in the order of computing; of several
    tensors the first.
    """
    outputs = Outputs()

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is not None and tensor.is_floating_point() and name not in outputs:
                outputs[name] = tensor.detach().clone()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in modules if name]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Mapping):
        output = tuple(cast(Mapping[Any, Any], output).values())
    if isinstance(output, tuple | list):
        output = next((item for item in cast(Sequence[Any], output) if isinstance(item, Tensor)), None)
    return output if isinstance(output, Tensor) else None


def first_difference(
    actual: Outputs, reference: Outputs | None, pairing: Pairing, tolerance: float = _TOLERANCE
) -> tuple[str | None, int]:
    """Return the name of the first module whose output differs, or None, and the number of modules whose
    output was compared on some rank. Collective over the default group.

    Args:
        actual: outputs of the first microbatch; none on ranks that compute other samples.
        reference: the plain model's for the same samples, on rank 0.
        pairing: lays this rank's output beside the same part of the plain model's; returns None if it cannot.
            Such modules are skipped: the one that brings the parts together is compared.
        tolerance: relative to the largest value of the output.
    """
    named = None if reference is None else [(name, list(t.shape)) for name, t in reference.items()]
    order: list[tuple[str, list[int]]] = gather_json(named)[0]
    compared, differs = torch.zeros(2, len(order), dtype=torch.int64)
    for at, (name, shape) in enumerate(order):
        expected = share(None if reference is None else reference[name], tuple(shape))
        pair = pairing(actual[name], expected) if name in actual else None
        if pair is not None and pair[0].numel():
            error = (pair[0] - pair[1]).abs().max() / expected.abs().max().clamp(min=_TOLERANCE)
            compared[at], differs[at] = 1, int(not bool(error <= tolerance))
    for row in (compared, differs):
        largest(row)
    first = int(differs.argmax()) if bool(differs.any()) else None
    return None if first is None else order[first][0], int(compared.sum())


def row_factors(
    actual: Outputs, reference: Outputs | None, pairing: Pairing, name: str
) -> tuple[float, float] | None:
    """The smallest and the largest factor between rows of a module's output and the plain model's; None where
    some row differs by more than a factor. Collective.
    """
    shape = gather_json(None if reference is None else list(reference[name].shape))[0]
    expected = share(None if reference is None else reference[name], tuple(shape))
    pair = pairing(actual[name], expected) if name in actual else None
    extremes = [None, None]
    if pair is not None and pair[0].numel():
        rows, expected_rows = (tensor.flatten(0, -2) for tensor in pair)
        factors = (rows * expected_rows).sum(-1) / expected_rows.square().sum(-1)
        error = float((rows - factors[:, None] * expected_rows).abs().max())
        if error <= _TOLERANCE * float(expected.abs().max()):
            extremes = [float(factors.min()), float(factors.max())]
        else:
            extremes = [float("nan"), float("nan")]
    spans: list[list[float]] = [span for span in gather_json(extremes) if span[0] is not None]
    if not spans or any(low != low for low, _ in spans):
        return None
    return min(low for low, _ in spans), max(high for _, high in spans)


def beside_positions(output: Tensor, expected: Tensor, split: SequenceSplit) -> tuple[Tensor, Tensor] | None:
    """This rank's output and the same part of the plain model's, without padding; None where it is split
    otherwise than along the sequence, or has no dimension of samples and positions.
    """
    if output.dim() != expected.dim() or output.dim() < 3:
        return None
    if output.shape == expected.shape:
        return output, expected
    unequal = [dim for dim, size in enumerate(expected.shape) if output.shape[dim] != size]
    if len(unequal) != 1 or expected.shape[dim := unequal[0]] != split.length:
        return None
    for positions in (split.shard, split.positions):
        if len(positions) == output.shape[dim]:
            real = positions < split.length
            part = expected.index_select(dim, positions[real])
            return output.index_select(dim, real.nonzero().flatten()), part
    return None


def beside_rows(output: Tensor, expected: Tensor) -> tuple[Tensor, Tensor] | None:
    """This rank's output and the rows of the plain model's that come closest to it, where it has some of its
    samples and positions, or some of its columns; None where both are split.

    Rows are looked for, not counted off, so any share of a batch is recognised: contiguous, strided, or two
    pieces from both ends of a sequence.
    """
    if output.shape == expected.shape:
        return output, expected
    if output.dim() != expected.dim() or output.dim() < 2:
        return None
    unequal = [dim for dim, size in enumerate(expected.shape) if output.shape[dim] != size]
    last = output.dim() - 1
    if unequal == [last]:
        return _nearest(output.movedim(-1, 0).flatten(1), expected.movedim(-1, 0).flatten(1))
    if last in unequal:
        return None
    return _nearest(output.flatten(0, -2), expected.flatten(0, -2))


def _nearest(rows: Tensor, among: Tensor) -> tuple[Tensor, Tensor] | None:
    """[n, size] rows, and for each that of [m, size] which is nearest in one random direction."""
    if rows.shape[1] < 2 or not len(among):
        return None
    direction = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(0), dtype=rows.dtype)
    projected, order = (among @ direction).sort()
    coordinates = rows @ direction
    above = torch.searchsorted(projected, coordinates).clamp(max=len(among) - 1)
    below = (above - 1).clamp(min=0)
    closer = (projected[below] - coordinates).abs() < (projected[above] - coordinates).abs()
    return rows, among[order[torch.where(closer, below, above)]]
