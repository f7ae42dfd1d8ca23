"""How tests start real ranks: gloo processes whose results and exceptions come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from stretto.run.launch.local import run_ranks


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run module-level `function(*arguments)` on `ranks` gloo ranks with the default group ready."""
    return run_ranks(ranks, _with_group, function, arguments)


def _with_group(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()
