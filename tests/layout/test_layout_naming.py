"""Names of groups of ranks."""

from __future__ import annotations

from stretto.layout.layout import Layout, axes_of


def test_a_group_is_named_after_the_axes_its_ranks_differ_in() -> None:
    layout = Layout(tp=2, cp=2, dp=2, pp=2)
    for axes in ("tp", "cp", "dp", "pp", "cp-dp"):
        assert all(axes_of(layout, ranks) == axes for ranks in layout.groups(axes))
    assert axes_of(layout, [3]) == "single"


def test_the_same_ranks_have_one_name() -> None:
    layout = Layout(tp=2, dp=4, ep=2)
    assert axes_of(layout, layout.group(0, "cp-dp")) == "dp"
    assert axes_of(layout, layout.group(0, "dp")[:2]) == "dp"
    assert axes_of(layout, layout.group(0, "ep")) == "dp"
