"""Initial values of tables as a function of (seed, table, row, column), the same under every placement."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from stretto.recommender.tables.kernels.cpu import CompiledKernels, kernels_for
from stretto.recommender.tables.splitmix import GOLDEN, finalise_, logical_shift, signed

_CHUNK = 1 << 18  # elements at a time, to keep temporaries in cache


def initial_rows(
    seed: int,
    name: str,
    rows_of_table: float,
    rows: Tensor,
    start: int,
    stop: int,
    dim: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return initial values of columns [start, stop): uniform in +-sqrt(1 / rows_of_table), as in DLRM.

    Each value is a hash of (seed, name, row, column) alone, computed in float64 and then cast.

    Args:
        name: name of the stored table.
        rows: [n] int64, rows of the unsharded table; for a hash table ids.
        dim: columns of the unsharded table.

    Returns:
        [n, stop - start] on the device of `rows`.
    """
    if not 0 <= start <= stop <= dim:
        raise ValueError(f"columns {start} to {stop} of {dim}")
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    key = int.from_bytes(digest[:8], "big")
    out = torch.empty(len(rows), stop - start, dtype=dtype, device=rows.device)
    columns = finalise_(torch.arange(start + 1, stop + 1, device=rows.device) * signed(GOLDEN))
    bound = rows_of_table**-0.5
    kernels = kernels_for(rows.device, dtype)
    if isinstance(kernels, CompiledKernels) and dtype in (torch.float32, torch.float64):
        kernels.initial(out, rows, columns, key, bound)
        return out
    chunk = max(1, _CHUNK // max(1, stop - start))
    for first in range(0, len(rows), chunk):
        part = rows[first : first + chunk]
        seeds = finalise_((part + 1).mul_(signed(GOLDEN)).add_(signed(key)))
        bits = finalise_(seeds.unsqueeze(1) ^ columns)
        uniform = logical_shift(bits, 11).to(torch.float64).mul_(2.0**-52).sub_(1.0)
        out[first : first + chunk] = uniform.mul_(bound)
    return out
