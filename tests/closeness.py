"""Compares results with references, for tests of gradients."""

from __future__ import annotations

import torch
from torch import Tensor

ULPS = 8  # how far rounding may take a result that should be zero, in units in the last place of what cancels


def check_close(
    computed: Tensor, reference: Tensor, tolerance: float, label: str, *, terms: float = 0.0
) -> None:
    """Fail unless all differences are within `tolerance` times the largest reference value.

    A reference that is zero but for rounding does not tell how large its rounding error may be: another CPU
    sums in another order and gets exactly zero, or ten times as much. The error is as large as rounding makes
    it in the terms that cancel, so there it is measured in units in the last place of `terms`.

    Args:
        terms: the size of the terms of `reference`, where they cancel in exact arithmetic; zero where they do
            not.
    """
    wrong = float((computed.detach() - reference).abs().max())
    size = float(reference.abs().max())
    allowed = max(tolerance * size, ULPS * torch.finfo(reference.dtype).eps * terms)
    assert wrong <= allowed, f"{label}: {wrong:.1e} off, {allowed:.1e} allowed, reference up to {size:.1e}"
