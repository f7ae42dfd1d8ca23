"""Compiled kernels, imported before ranks are forked: numba registers what it can compile when a process first
calls a compiled function, which takes 0.5 s of processor time or more. A fork of this process need not do it.
"""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    from numba.core.registry import cpu_target

    import stretto.recommender.tables.ids.compiled
    import stretto.recommender.tables.kernels.compiled  # noqa: F401

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
