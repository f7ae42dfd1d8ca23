"""Where the host waits for a device that computes while the host goes on: for what it reads of the device,
copies to it that are not asynchronous, operators whose shape depends on values, and synchronisations.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as trees
from torch.utils._python_dispatch import TorchDispatchMode

import stretto

PACKAGE, LIBRARY = f"{Path(stretto.__file__).parent}/", "stretto_fake_npu"
READING = {  # operators of torch's that read values on CUDA devices before they go on
    *("_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim"),
    *("unique_consecutive", "bincount", "equal"),
}


class Waits(TorchDispatchMode):
    """Counts them while it is entered, by file and function of the package.

    Args:
        kind: of device.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.counts, self._kind = Counter[str](), kind

    def note(self, why: str) -> None:
        """A wait of the package's line that is now executed; not one of a simulated library."""
        frame: Any = sys._getframe(1)
        while frame is not None and PACKAGE not in frame.f_code.co_filename:
            if LIBRARY in frame.f_code.co_filename and why.startswith("copy"):
                return
            frame = frame.f_back
        assert frame is not None, why
        self.counts[f"{frame.f_code.co_filename.partition(PACKAGE)[2]} {frame.f_code.co_name}: {why}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func._schema.name.partition("::")[2]
        given = [tensor for tensor in trees.tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        if not any(
            tensor.device.type == self._kind for tensor in (*given, result) if isinstance(tensor, Tensor)
        ):
            return result
        if name in ("_to_copy", "copy_"):
            ends = (args[1], args[0]) if name == "copy_" else (args[0], result)
            asked = args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)
            if len({end.device.type for end in ends}) > 1 and not asked:
                self.note(f"copy to {ends[1].device.type}")
        elif (
            name in READING
            or (name == "repeat_interleave" and (kwargs or {}).get("output_size") is None)
            or (
                name in ("index", "index_put_", "_index_put_impl_")
                and any(index is not None and index.dtype == torch.bool for index in args[1])
            )
        ):
            self.note(name)
        return result
