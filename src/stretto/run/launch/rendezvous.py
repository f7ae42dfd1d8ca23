"""The store of one attempt of a job, which holds nothing of the attempts before.

torchrun keeps one store for all attempts, in which a new attempt would find the addresses of ranks that are
dead. Ranks therefore agree on a name for their attempt and keep everything under it. Its count of restarts is
no such name: it stays the same where nodes come or go.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_S = 0.01
_early: list[tuple[Store, int, int]] = []  # of `early_store`, for the process group to take


def early_store(timeout: timedelta) -> tuple[Store, int, int]:
    """As `attempt_store`, for what ranks have to tell each other before their process group begins, which
    takes this store in its turn. Collective.
    """
    _early.append(attempt_store(timeout))
    return _early[-1]


def attempt_store(timeout: timedelta) -> tuple[Store, int, int]:
    """The store of this attempt, this rank, and the number of ranks, for the job that RANK, WORLD_SIZE and
    MASTER_ADDR describe. Collective, unless `early_store` came before.

    Raises:
        DistStoreError: a rank has not come in time.
    """
    if _early:
        return _early.pop()
    from torch.distributed import PrefixStore, rendezvous

    store, rank, world = next(rendezvous("env://", timeout=timeout))
    return PrefixStore(_agreed_name(store, rank, world, timeout), store), rank, world


def _agreed_name(store: Store, rank: int, world: int, timeout: timedelta) -> str:
    """A name that the ranks which are alive have agreed on, whatever dead ones have left in the store.

    Each rank says hello with a word of its own, and rank 0 answers under that word with the name of the
    attempt. A word may be that of a dead rank; so rank 0 answers until every rank has thanked it by that
    name.
    """
    if rank:
        word = uuid.uuid4().hex
        store.set(_hello(rank), word)
        name = store.get(f"stretto/{word}").decode()
        store.set(_thanks(name, rank), "")
        return name
    name = uuid.uuid4().hex
    missing, answered = set(range(1, world)), set[str]()
    end = time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if not store.check([_hello(other)]):
                continue
            word = store.get(_hello(other)).decode()
            if word not in answered:
                store.set(f"stretto/{word}", name)
                answered.add(word)
            if store.check([_thanks(name, other)]):
                missing.discard(other)
        if missing and time.monotonic() > end:
            raise _late(missing, timeout)
        time.sleep(_POLL_S)
    return name


def _hello(rank: int) -> str:
    return f"stretto/hello/{rank}"


def _thanks(name: str, rank: int) -> str:
    return f"stretto/{name}/{rank}"


def _late(missing: set[int], timeout: timedelta) -> Exception:
    from torch.distributed import DistStoreError

    who = ", ".join(map(str, sorted(missing)[:8])) + ", ..." * (len(missing) > 8)
    return DistStoreError(f"Timed out after {timeout.total_seconds():g} s: ranks that never joined: {who}")
