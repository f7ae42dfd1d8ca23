"""Layouts: known ones, the expert grid, text, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counted_calls import counted_calls
from stretto.errors import StrettoError
from stretto.layout import AXES, Layout


def letters(ranks: list[int]) -> str:
    return "".join("ABCDEFGHIJKLMNOP"[rank] for rank in ranks)


def test_pipeline_outermost_puts_a_stage_on_neighbouring_ranks() -> None:
    layout = Layout(dp=4, pp=4)
    assert layout.groups("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    for stage in range(4):
        stage_ranks = [rank for rank in range(16) if layout.coordinates(rank)["pp"] == stage]
        assert stage_ranks == list(range(stage * 4, stage * 4 + 4))


def test_replicas_outermost_keep_a_pipeline_together() -> None:
    layout = Layout(tp=2, pp=4, dp=2, order="tp-pp-dp")
    assert [letters(group) for group in layout.groups("pp")] == ["ACEG", "BDFH", "IKMO", "JLNP"]
    assert letters(layout.group(0, "tp")) == "AB"
    assert letters(layout.group(0, "dp")) == "AI"


def test_a_known_group_set_over_two_axes() -> None:
    # Megatron-core documents this case: tp 2, pp 4, dp 2 on 16 ranks in order tp-cp-ep-dp-pp
    layout = Layout(tp=2, pp=4, dp=2)
    assert layout.groups("tp") == [[i, i + 1] for i in range(0, 16, 2)]
    assert layout.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert layout.groups("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert layout.groups("tp-pp") == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    assert layout.groups("tp-dp") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_experts_have_their_own_replicas() -> None:
    layout = Layout(tp=2, dp=4, ep=4, pp=2)
    assert layout.expert_grid.sizes == {"tp": 2, "ep": 4, "dp": 1, "pp": 2}
    assert layout.groups("ep") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    thin = Layout(tp=2, dp=4, ep=4, pp=2, expert_tp=1)
    assert thin.expert_grid.sizes == {"tp": 1, "ep": 4, "dp": 2, "pp": 2}
    assert thin.group(5, "ep") == [4, 5, 6, 7]
    assert thin.groups("expert_tp") == [[rank] for rank in range(16)]
    assert thin.expert_grid.group(5, "dp") == [1, 5]
    assert thin.groups("expert_dp") == [[r, r + 4] for r in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert thin.group(5, "expert_tp-ep-pp") == [4, 5, 6, 7, 12, 13, 14, 15]
    assert (thin.size("expert_tp-ep"), thin.index(6, "expert_tp-ep"), thin.index(13, "ep")) == (4, 2, 1)


def test_the_place_along_several_axes_goes_by_their_names_not_by_the_order_of_ranks() -> None:
    for order in ("tp-ep-dp-pp", "dp-ep-tp-pp", "ep-tp-dp-pp"):
        layout = Layout(tp=2, dp=4, ep=2, pp=2, order=order)
        for rank in range(layout.world):
            tp, ep = layout.index(rank, "expert_tp"), layout.index(rank, "ep")
            assert layout.index(rank, "expert_tp-ep") == tp + 2 * ep
            assert layout.index(rank, "ep-expert_tp") == ep + 2 * tp


def test_without_expert_axes_experts_lie_as_dense_layers_in_any_order() -> None:
    layout = Layout(tp=2, cp=2, dp=2, pp=2, order="tp-pp-cp-dp")  # pipelines of a cp-less grid would differ
    assert layout.groups("expert_dp") == layout.groups("cp-dp")
    assert layout.groups("expert_tp-ep-pp") == layout.groups("tp-pp")
    assert layout.groups("ep") == [[rank] for rank in range(16)]
    assert (layout.size("ep"), layout.index(9, "ep")) == (1, 0)


@given(
    st.integers(1, 4), st.integers(1, 2), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3),
    st.sampled_from([None, 1, 2]), st.sampled_from(list(permutations(AXES))),
)  # fmt: skip
def test_expert_layouts_share_pipelines_or_are_refused(
    tp: int, cp: int, ep: int, dp: int, pp: int, expert_tp: int | None, order: tuple[str, ...]
) -> None:
    inner = tp if expert_tp is None else expert_tp
    divides = (tp * cp * dp) % (inner * ep) == 0
    refused = ""
    layout = None
    try:
        layout = Layout(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, order="-".join(order), expert_tp=expert_tp)
    except StrettoError as error:
        refused = error.message
    if layout is None:
        assert ("does not divide" in refused) == (not divides)
        assert divides <= (pp > 1 and "different ranks" in refused)
    elif ep > 1 or expert_tp is not None:
        assert layout.expert_grid.world == layout.world
        experts = {tuple(group) for group in layout.expert_grid.groups("pp")}
        assert experts == {tuple(group) for group in layout.groups("pp")}


def test_groups_of_100_000_ranks_have_each_rank_once_and_take_linear_work() -> None:
    masks = ["-".join(some) for size in range(1, 6) for some in combinations(AXES, size)]
    masks = [mask for mask in masks if not ("cp" in mask and "ep" in mask)]

    def work(layout: Layout) -> int:
        sets = list[list[list[int]]]()
        calls = counted_calls(lambda: sets.extend(layout.groups(mask) for mask in masks))
        assert all(sum(map(len, groups)) == layout.world for groups in sets)
        return calls

    small, large = work(Layout(tp=8, dp=125, ep=5, pp=10)), work(Layout(tp=8, dp=1250, ep=5, pp=10))
    assert large < 11 * small


layouts = st.builds(
    Layout,
    tp=st.integers(1, 4), cp=st.integers(1, 4), dp=st.integers(1, 4), pp=st.integers(1, 4),
    order=st.permutations(AXES).map("-".join), offset=st.integers(0, 20),
)  # fmt: skip


@given(layouts)
def test_text_reads_back(layout: Layout) -> None:
    assert Layout.parse(layout.describe()) == layout
    assert Layout.parse(str(layout)) == layout


@given(layouts)
def test_rank_and_coordinates(layout: Layout) -> None:
    for rank in range(layout.offset, layout.offset + layout.world):
        assert layout.rank(**layout.coordinates(rank)) == rank


def test_text_forms() -> None:
    assert (
        Layout.parse("tp2-dp2") == Layout.parse("dp2 tp2") == Layout.parse("tp=2, dp=2") == Layout(tp=2, dp=2)
    )
    assert Layout(tp=2, dp=2, pp=4).describe() == "tp2 dp2 pp4"
    assert Layout().describe() == "single"
    assert Layout.parse("single") == Layout()
    assert Layout(tp=2, ep=2, dp=2, expert_tp=1).describe() == "tp2 ep2 dp2 expert_tp1"


def test_an_order_may_leave_out_what_is_one() -> None:
    assert Layout(tp=2, dp=2, order="dp-tp").groups("dp") == [[0, 1], [2, 3]]
    assert Layout(tp=2, dp=2, order="dp-tp") == Layout(tp=2, dp=2, order="dp-tp-cp-ep-pp")


def test_dp_fills_the_world() -> None:
    assert Layout.fill(16, pp=4) == Layout(dp=4, pp=4)
    assert Layout.fill(16, tp=2, pp=4, ep=2) == Layout(tp=2, dp=2, pp=4, ep=2)
    assert Layout.fill(8, dp=8).dp == 8


@pytest.mark.parametrize(
    ("make", "says", "hint"),
    [
        (lambda: Layout(tp=0), "tp=0", "at least 1"),
        (lambda: Layout(dp=True), "dp=True", "integer of at least"),
        (lambda: Layout(pp=2.0), "pp=2.0", "integer of at least"),  # type: ignore[arg-type]
        (lambda: Layout(order="tp-dp-xp"), "'xp'", "axes are tp, cp, ep, dp, pp"),
        (lambda: Layout(order="tp-dp-xpp"), "'xpp'", "did you mean 'pp'?"),
        (lambda: Layout(order="tp-dp-tp"), "tp twice", "once"),
        (lambda: Layout(pp=2, order="tp-dp"), "leaves out pp", "tp-dp-pp"),
        (lambda: Layout(dp=6, ep=4), "ep=4", "nearest ep is 3"),
        (
            lambda: Layout(tp=2, cp=1, ep=2, dp=2, pp=2, order="tp-pp-dp-ep", expert_tp=1),
            "different ranks",
            "pp last",
        ),
        (lambda: Layout.fill(18, pp=4), "world=18 is not a multiple of pp=4", "nearest legal world is 16"),
        (lambda: Layout.fill(2, tp=4), "world=2", "nearest legal world is 4"),
        (lambda: Layout.fill(16, pp=4, dp=2), "has 8 ranks, world is 16", "use 8 ranks, or dp=4"),
        (lambda: Layout.fill(16, pp=0), "pp=0", "at least 1"),
        (lambda: Layout(tp=2).group(2, "tp"), "rank 2 is outside", "0 to 1"),
        (lambda: Layout(tp=2, offset=4).coordinates(0), "rank 0 is outside", "4 to 5"),
        (lambda: Layout(tp=2).rank(tp=2), "tp=2 is outside", "0 to 1"),
        (lambda: Layout(tp=2).rank(ep=0), "'ep'", "tp, cp, dp, pp"),
        (lambda: Layout.parse("tp2 xx3"), "'xx3'", "tp2-dp2-pp4"),
        (lambda: Layout.parse("tp2 tp3"), "tp twice", "once"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named_with_a_fix(make: Callable[[], object], says: str, hint: str) -> None:
    with pytest.raises(StrettoError) as caught:
        make()
    assert says in caught.value.message
    assert caught.value.hint is not None
    assert hint in caught.value.hint
