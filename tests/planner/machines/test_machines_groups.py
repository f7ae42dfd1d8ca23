"""Groups of ranks on the nodes of a cluster."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.layout.layout import Layout
from stretto.planner.machines.cluster import group_of

SIZE = st.integers(1, 4)


@given(
    layout=st.builds(Layout, tp=SIZE, cp=SIZE, dp=SIZE, pp=SIZE, offset=st.integers(0, 2)),
    node=st.integers(1, 16),
    axes=st.sampled_from(["tp", "cp", "dp", "pp", "tp-cp", "cp-dp", "tp-cp-dp-pp"]),
)
def test_a_group_is_priced_as_the_one_that_spans_the_most_nodes(layout: Layout, node: int, axes: str) -> None:
    groups = layout.groups(axes)
    spans = max(len({(rank - layout.offset) // node for rank in group}) for group in groups)
    group = group_of(layout, axes, node)
    assert group.ranks == len(groups[0])
    assert group.local >= ceil(group.ranks / spans)
    assert group.nodes <= spans
    if layout.world % node == 0 or layout.world <= node:
        assert (group.nodes > 1) == (spans > 1)


@pytest.mark.parametrize(
    ("layout", "axes", "ranks", "local"),
    [
        (Layout(tp=8, dp=2), "tp", 8, 8),
        (Layout(tp=2, dp=8), "dp", 8, 4),
        (Layout(tp=3, dp=8), "tp", 3, 2),  # ranks 6 to 8 are on two nodes of 8
        (Layout(dp=12), "dp", 12, 6),  # 8 ranks on one node and 4 on the other
        (Layout(tp=6, dp=2), "tp", 6, 3),
        (Layout(ep=4, dp=12), "ep", 4, 4),
    ],
)
def test_groups_that_a_node_cuts(layout: Layout, axes: str, ranks: int, local: int) -> None:
    group = group_of(layout, axes, 8)
    assert (group.ranks, group.local) == (ranks, local)
