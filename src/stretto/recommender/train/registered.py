"""Compiled kernels, to be imported before ranks are forked. numba registers what it can compile when a
process first calls a compiled function: half a second of its time or more, which forks of this one save.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Any

with contextlib.suppress(ImportError):
    target: Any = import_module("numba.core.registry").cpu_target
    import_module("stretto.recommender.tables.ids.compiled")
    import_module("stretto.recommender.tables.kernels.compiled")
    target.typing_context.refresh()
    target.target_context.refresh()
