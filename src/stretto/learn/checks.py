"""What graders have in common: the outcome of a check, and comparisons that say what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stretto.prove import Report

CLOSE = 1e-9  # relative difference that float64's rounding explains, as in `stretto.prove`


class Check(NamedTuple):
    """The outcome of one check on this rank: what was checked, and what is wrong, or None."""

    subject: str
    problem: str | None = None


def proved(subject: str, report: Report) -> Check:
    """A check by a proof: its cause of a difference, and how far the worst parameter is off."""
    if report.equal:
        return Check(subject)
    quantity = next((each for each in report.quantities if not each.equal), None)
    distance = ""
    if quantity is not None and quantity.worst is not None:
        distance = f" (worst: the {quantity.name} of {quantity.worst}, off by {quantity.error:.1e})"
    return Check(subject, f"{report.diagnosis}{distance}")


def shaped(subject: str, actual: object, shape: Sequence[int]) -> Check:
    """A check of the shape of a tensor that the reader's code returned."""
    if not isinstance(actual, Tensor):
        return Check(subject, f"it is {type(actual).__name__}, must be a tensor of shape {list(shape)}")
    wrong = list(actual.shape) != list(shape)
    return Check(subject, f"it is {list(actual.shape)}, must be {list(shape)}" if wrong else None)


def compared(
    subject: str, actual: object, expected: Tensor, causes: Mapping[str, Tensor] | None = None
) -> Check:
    """A check of a tensor that the reader's code returned.

    Args:
        causes: wrong results by what is wrong with the code that returns them.
    """
    if not isinstance(actual, Tensor) or actual.shape != expected.shape:
        return shaped(subject, actual, expected.shape)
    if not bool(actual.isfinite().all()):
        return Check(subject, f"{int((~actual.isfinite()).sum())} of {actual.numel()} values are not finite")
    actual, expected = actual.detach().double(), expected.detach().double()
    if is_close(actual, expected):
        return Check(subject)
    for cause, wrong in (causes or {}).items():
        if is_close(actual, wrong.detach().double()):
            return Check(subject, cause)
    ratio = float((actual * expected).sum() / expected.square().sum())
    if ratio and is_close(actual, expected * ratio):
        return Check(subject, f"it is {ratio:.4g} times what one process computes")
    error = float((actual - expected).abs().max() / expected.abs().max())
    return Check(subject, f"it differs from what one process computes, by {error:.1e} of its largest value")


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """True if two tensors differ by rounding only."""
    scale = max(float(expected.abs().max()), 1e-300)
    return actual.shape == expected.shape and float((actual - expected).abs().max()) <= CLOSE * scale


def at_most(subject: str, actual: float, limit: float, explanation: str) -> Check:
    """A check of a number; the explanation of a larger one may name {actual} and {limit}."""
    too_large = actual > limit * (1 + 1e-9)
    numbers = {"actual": f"{actual:,.6g}", "limit": f"{limit:,.6g}"}
    return Check(subject, explanation.format(**numbers) if too_large else None)


def split(batch: Sequence[Tensor], parts: int, rank: int, dim: int = 0) -> Any:
    """Return a rank's part of every tensor of a batch."""
    return tuple(tensor.chunk(parts, dim)[rank] for tensor in batch)


def saved_bytes(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Return the bytes of floating-point tensors that a forward saves for the backward, parameters apart."""
    saved = dict[int, Tensor]()  # the largest by storage; held, so that no address is used twice
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        counts = tensor.is_floating_point() and address not in parameters
        if counts and (address not in saved or tensor.nbytes > saved[address].nbytes):
            saved[address] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    assert output is not None
    return sum(tensor.nbytes for tensor in saved.values())
