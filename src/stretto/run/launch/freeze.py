"""The last module that the server of ranks imports: its objects stay out of the ranks' garbage collections.

Ranks are forked from the server and share its memory until one of them writes; a collection writes to every
object that it visits, and so would copy all of them.
"""

from __future__ import annotations

import gc

gc.freeze()  # without a collection before, which would take 0.2 s of every start
