"""What the server does that ranks of tests are forked from, so that no rank need do it: the last module that
it imports.
"""

from __future__ import annotations

import gc

# no garbage collection of a rank need visit, and so copy, what it shares with the server
gc.collect()
gc.freeze()
