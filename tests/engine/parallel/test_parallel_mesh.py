"""Process groups of a layout on real ranks, against the layout's own arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks
from stretto import Layout
from stretto.engine.parallel.mesh import EXPERT_GROUPS, GROUPS, Mesh
from stretto.errors import StrettoError

LAYOUTS = [
    Layout(tp=2, pp=2),
    Layout(dp=2, tp=2),
    Layout(dp=2, pp=2),
    Layout(tp=4),
    Layout(pp=4),
    Layout(tp=2, dp=2, order="dp-tp-pp"),
    Layout(tp=2, cp=2),
    Layout(cp=2, dp=2),
    Layout(tp=2, dp=2, ep=4, expert_tp=1),
    Layout(dp=4, ep=2),
]


def groups() -> None:
    for layout in LAYOUTS * 2:  # twice: groups can be made again after they were given back
        mesh = Mesh(layout)
        rank = dist.get_rank()
        assert mesh.rank == rank
        for axes in (*GROUPS, *EXPERT_GROUPS):
            mine = layout.group(rank, axes)
            assert used(mesh.group(axes)) == (sorted(mine) if len(mine) > 1 else None), f"{layout} {axes}"
            assert mesh.size(axes) == len(mine)
            assert mesh.index(axes) == layout.index(rank, axes)
        for axis in ("tp", "cp", "dp", "pp"):
            assert mesh.size(axis) == layout.sizes[axis]
            assert mesh.index(axis) == layout.coordinates(rank)[axis]
        assert mesh.group("expert_dp") is mesh.copies("expert_tp-ep")
        mesh.close()


def used(group: Any) -> list[int] | None:
    """The group's members, by a sum of their bits over it."""
    if group is None:
        return None
    bits = torch.tensor(1 << dist.get_rank())
    dist.all_reduce(bits, group=group)
    results = [rank for rank in range(dist.get_world_size()) if int(bits) >> rank & 1]
    assert results == sorted(dist.get_process_group_ranks(group))
    return results


def cuts() -> None:
    rank, mesh = dist.get_rank(), Mesh(Layout(tp=4))
    pair = mesh.split("tp", 2)
    assert used(pair) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert mesh.split("tp", 2) is pair  # made once
    assert mesh.split("tp", 1) is None
    assert used(mesh.split("tp", 4)) == [0, 1, 2, 3]
    mesh.close()


def pairs() -> None:
    rank, mesh = dist.get_rank(), Mesh(Layout(pp=4))
    assert used(mesh.pair_group((0, 3))) == ([0, 3] if rank in (0, 3) else None)
    assert used(mesh.pair_group((0, 1, 2))) == ([0, 1, 2] if rank < 3 else None)
    mesh.close()
    mesh = Mesh(Layout(dp=2, pp=2))  # ranks 0 and 2 are one pipeline, 1 and 3 the other
    for axes in ("dp", "pp"):
        assert used(mesh.group(axes)) == mesh.layout.group(rank, axes)
    assert used(mesh.pair_group((0, 1))) == sorted(mesh.layout.group(rank, "pp"))
    mesh.close()


def unused() -> None:
    """A rank may close its groups while others are still on their way into theirs."""
    for _ in range(8):
        Mesh(Layout(tp=2, dp=2)).close()


def wrong_world() -> str:
    with pytest.raises(StrettoError) as error:
        Mesh(Layout(tp=2))
    return str(error.value)


def every_case() -> str:
    groups()
    cuts()
    pairs()
    unused()
    return wrong_world()


def test_groups_are_those_of_the_layout_and_can_be_made_again():
    for message in on_ranks(4, every_case):
        assert "tp2 is for 2 ranks, 4 are running" in message
        assert "start 2 ranks" in message


def test_one_process_needs_no_groups():
    mesh = Mesh(Layout())
    assert mesh.rank == 0
    assert all(mesh.group(axes) is None for axes in ("tp", "dp", "pp", "tp-cp"))
    assert mesh.split("tp", 1) is None
    mesh.close()
    with pytest.raises(StrettoError, match="pp2 is for 2 ranks, 1 are running"):
        Mesh(Layout(pp=2))
