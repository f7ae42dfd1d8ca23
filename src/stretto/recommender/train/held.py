"""What a rank of a recommender holds: dense networks and copied tables, which every rank has, and its own."""

from __future__ import annotations

from torch import Tensor

from stretto.engine.parallel.fragment import ShardPlacement
from stretto.engine.parallel.replica_check import RankTensors
from stretto.recommender.stores.store import DeviceStore
from stretto.recommender.train.engine import Recommender


def updated_by(recommender: Recommender) -> dict[str, Tensor]:
    """Weights and optimiser states by name that only an update changes: of the dense networks, and of tables
    on the device, the rank's own too. Those with `ids: hash` are left out, which new ids extend at any time.
    """
    updated = {f"{key or 'weights'}.{name}": t for key, name, t, _ in recommender.dense.tensors()}
    tables = recommender.tables
    for number, pool in enumerate((*tables.replicated_pools, *tables.pools)):
        if isinstance(pool.store, DeviceStore) and pool.ids is None:
            names = "+".join(tables.shard_map.tables[one.table].name for one in pool.pool.shards)
            for state, tensor in {"weights": pool.store.weight, **pool.store.states}.items():
                updated[f"{state} of pool {number}, tables {names}"] = tensor
    return updated


def held_by(recommender: Recommender) -> RankTensors:
    """Weights and optimiser states by name, each with its place. Of copied tables those on the device: a
    cache has other rows on each rank.
    """
    held = dict[str, tuple[Tensor, ShardPlacement]]()
    for key, name, tensor, place in recommender.dense.tensors():
        held[f"{key or 'weights'}.{name}"] = tensor, place
    for pool in recommender.tables.replicated_pools:
        if not isinstance(pool.store, DeviceStore):
            continue
        tables = "+".join(recommender.tables.shard_map.tables[one.table].name for one in pool.pool.shards)
        for state, tensor in {"weights": pool.store.weight, **pool.store.states}.items():
            name = f"{state} of tables {tables}"
            held[name] = tensor, ShardPlacement.unsharded(name, tuple(tensor.shape))
    return held
