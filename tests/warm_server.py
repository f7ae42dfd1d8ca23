"""What the server does that ranks of tests are forked from, so that no rank need do it: the last module that
it imports.
"""

from __future__ import annotations

import contextlib
import gc

# numba registers what it can compile when a process first calls a compiled function: half a second or more
with contextlib.suppress(ImportError):
    from numba.core.registry import cpu_target

    import stretto.recommender.tables.ids.compiled
    import stretto.recommender.tables.kernels.compiled  # noqa: F401

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()

# no garbage collection of a rank need visit, and so copy, what it shares with the server
gc.collect()
gc.freeze()
