"""Messages of the ranks of each group, and the distribution of groups over nodes."""

from __future__ import annotations

import pytest

from stretto import Layout
from stretto.job.experts import ExpertShape
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.layout.layout import axes_of
from stretto.planner.rank_step.counts import counts
from stretto.view.exchanges import exchanges


def test_groups_that_communicate_by_layout() -> None:
    def axes(layout: str) -> list[str]:
        return [each.axes for each in exchanges(Layout.parse(layout), 8)]

    assert axes("single") == []
    assert axes("tp2 dp2 pp2") == ["tp", "dp", "pp"]
    assert axes("cp2") == ["cp", "cp-dp"]  # gradients are summed over the parts of a sample
    assert axes("cp2 dp2") == ["cp", "dp", "cp-dp"]
    assert axes("tp2 dp4 ep2") == ["tp", "dp", "expert_tp", "ep", "expert_dp"]
    assert axes("tp2 dp4 ep2 expert_tp1") == ["tp", "dp", "ep", "expert_dp"]


def test_gradients_are_summed_over_the_ranks_with_the_same_parameters() -> None:
    both = {each.axes: each for each in exchanges(Layout(cp=2, dp=2), 8)}
    assert both["dp"].sends == ()
    assert "cp-dp" in both["dp"].note
    assert [send.content for send in both["cp-dp"].sends] == ["gradients"]
    (only,) = exchanges(Layout(dp=2), 8)
    assert [send.content for send in only.sends] == ["gradients"]


@pytest.mark.parametrize(
    ("node", "inside", "links"), [(8, 4, "inside a node"), (1, 0, "across nodes"), (3, 3, "3 inside a node")]
)
def test_groups_on_nodes(node: int, inside: int, links: str) -> None:
    """Pairs 5 6, 7 8, 9 10, 11 12 on nodes that begin at rank 5."""
    tp, _ = exchanges(Layout(tp=2, dp=4, offset=5), node)
    assert (tp.size, tp.count, tp.inside, tp.links) == (2, 4, inside, links)


def test_further_axes_are_added_once() -> None:
    shown = exchanges(Layout(tp=2, pp=2), 8, ("tp-pp", "tp", "tp-pp", "dp"))
    assert [each.axes for each in shown] == ["tp", "pp", "tp-pp", "dp"]
    assert shown[-1].size == 1


LAYOUTS = (
    "tp2 dp2 pp2",
    "cp3 dp2",
    "tp2 cp2 dp2 pp2",
    "tp2 dp4 pp2 ep2 expert_tp2",
    "tp2 cp2 dp4 ep4 expert_tp1",
)
KINDS = {
    "tp": "all-reduce",
    "cp": "send",
    "pp": "send",
    "ep": "all-to-all",
    "expert_tp": "reduce-scatter",
    **dict.fromkeys(("dp", "cp-dp", "expert_dp"), "all-reduce"),
}


@pytest.mark.parametrize("text", LAYOUTS)
def test_what_is_said_to_be_sent_is_what_a_step_sends(text: str) -> None:
    """Against the calls of a rank's step, which `stretto dryrun` compares with the real code."""
    layout = Layout.parse(text)
    moe = ExpertShape(experts=8, top_k=2, ffn=32) if layout.ep > 1 else None
    shape = ModelShape(
        family="llama", layers=4, hidden=96, heads=12, kv_heads=6, vocab=512, sequence=48, moe=moe
    )
    job = Job(shape=shape, layout=layout, global_batch=32, micro_batch=2, sequence=48)
    shown = exchanges(layout, 8)
    named = {each.axes: axes_of(layout, layout.group(0, each.axes)) for each in shown}
    calls = set(counts(job, 0).calls)
    assert {(named[each.axes], KINDS[each.axes]) for each in shown if each.sends} <= calls
    # the rest are small: the norm of the gradients, and with experts the counts of routed tokens
    over = {axes for axes, _ in calls} - {named[each.axes] for each in shown}
    assert over <= {"tp-pp", "tp-dp-pp"} | ({"tp-cp", "tp-dp"} if moe else set())
