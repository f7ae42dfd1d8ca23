"""The store of an attempt: a new attempt finds nothing that dead ranks have left."""

from __future__ import annotations

from datetime import timedelta
from threading import Thread

import pytest
from torch.distributed import DistStoreError, HashStore, PrefixStore

from stretto.run.launch import rendezvous

SHORT = timedelta(seconds=0.2)
LONG = timedelta(seconds=20)


def names(store: HashStore, world: int) -> list[str]:
    """What each of so many ranks agrees on."""
    agreed = dict[int, str]()

    def join(rank: int) -> None:
        agreed[rank] = rendezvous._agreed_name(store, rank, world, LONG)

    ranks = [Thread(target=join, args=(rank,)) for rank in reversed(range(world))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return [agreed[rank] for rank in range(world)]


def test_each_attempt_has_a_store_of_its_own() -> None:
    store = HashStore()
    first, second = names(store, 3), names(store, 3)
    assert len(set(first)) == len(set(second)) == 1
    PrefixStore(first[0], store).set("address", "of a dead rank")
    assert not PrefixStore(second[0], store).check(["address"])
    assert len(set(names(store, 2))) == len(set(names(store, 4))) == 1, "of another number of ranks"


def test_what_a_dead_rank_said_is_no_answer_of_a_living_one() -> None:
    store, agreed = HashStore(), list[str]()
    store.set(rendezvous._hello(1), "of a dead rank")
    first = Thread(target=lambda: agreed.append(rendezvous._agreed_name(store, 0, 2, LONG)))
    first.start()
    store.wait(["stretto/of a dead rank"], LONG)  # it has been answered
    first.join(0.1)
    assert first.is_alive()
    second = rendezvous._agreed_name(store, 1, 2, LONG)
    first.join()
    assert agreed == [second]


def test_ranks_that_never_join_are_named() -> None:
    with pytest.raises(DistStoreError, match=r"Timed out after 0.2 s: ranks that never joined: 1, 2"):
        rendezvous._agreed_name(HashStore(), 0, 3, SHORT)
