"""What is plan_of of shards and made of their answers is what one table would give, and its gradient too."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto.recommender.tables.jagged import VARYING, Bags, Jagged, split_features
from stretto.recommender.tables.kernels.cpu import CompiledKernels
from stretto.recommender.tables.kernels.plain import Kernels
from stretto.recommender.tables.lookup_plan import LookupPlan, LookupPlanner, plan_pooled, plan_rows
from stretto.recommender.tables.splitmix import owner

ROWS, DIM = 12, 6
KERNELS: list[Kernels] = [Kernels(), CompiledKernels()]


@st.composite
def bags(draw: Any) -> Bags:
    samples = draw(st.integers(0, 6))
    hot = draw(st.sampled_from([VARYING, 0, 1, 3]))
    lengths = [draw(st.integers(0, 4)) if hot == VARYING else hot for _ in range(samples)]
    ids = draw(st.lists(st.integers(0, ROWS - 1), min_size=sum(lengths), max_size=sum(lengths)))
    scale = None
    if draw(st.booleans()):
        scale = torch.tensor([float(i % 5) - 1.5 for i in range(len(ids))], dtype=torch.float64)
    return Bags(
        ids=torch.tensor(ids, dtype=torch.int64),
        samples=samples,
        hot=hot,
        lengths=torch.tensor(lengths, dtype=torch.int64),
        scale=scale,
    )


def direct(weight: Tensor, bags: Bags) -> Tensor:
    """The sums, by a loop."""
    rows, at = list[Tensor](), 0
    for length in bags.lengths.tolist():
        total = torch.zeros(DIM, dtype=torch.float64)
        for i in range(at, at + length):
            factor = 1.0 if bags.scale is None else bags.scale[i]
            total = total + factor * weight[bags.ids[i]]
        at += length
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros(0, DIM, dtype=torch.float64)


def answered(plan: LookupPlan, weight: Tensor, by_rows: bool) -> list[Tensor]:
    """What the shards answer."""
    parts = len(plan.parts)
    answers = list[Tensor]()
    for part, plan_of in enumerate(plan.parts):
        part_weight = weight[part::parts] if by_rows else weight[:, _columns(part, parts)]
        answers.append(
            Kernels().lookup(part_weight.contiguous(), plan_of.ids, plan_of.offsets, plan_of.scale)
        )
    return answers


def _columns(part: int, parts: int) -> slice:
    return slice(DIM * part // parts, DIM * (part + 1) // parts)


@given(
    bags(),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(["samples", "rows", "once"]),
    st.sampled_from(KERNELS),
)
def test_answers_and_gradients_are_those_of_the_whole_table(
    batch: Bags, parts: int, by_rows: bool, how: str, kernels: Kernels
) -> None:
    weight = torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight.requires_grad_()
    if how == "samples":
        plan = plan_pooled(batch, parts, by_rows, False, kernels)
    else:
        plan = plan_rows(batch, parts, by_rows, how == "once", kernels)
    answers = answered(plan, weight.detach(), by_rows)
    gathered = plan.gather(answers)
    pooled = plan.pool(gathered, kernels)
    expected = direct(weight, batch)
    torch.testing.assert_close(pooled, expected.detach(), rtol=1e-13, atol=1e-13)

    given_back = torch.randn(pooled.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ((expected * given_back).sum() + 0 * weight.sum()).backward()
    widths = [_columns(part, parts) for part in range(parts)]
    spread = plan.scatter(
        plan.unpool(given_back, kernels),
        [columns.stop - columns.start for columns in widths],
    )
    gradients = torch.zeros(ROWS, DIM, dtype=torch.float64)
    for part, (plan_of, gradient) in enumerate(zip(plan.parts, spread, strict=True)):
        view = gradients[part::parts] if by_rows else gradients[:, widths[part]]
        grouped = Kernels().group(plan_of.ids)
        view[grouped.rows] += Kernels().segment_sum(gradient, plan_of.offsets, grouped, plan_of.scale)
    wanted = torch.zeros_like(gradients) if weight.grad is None else weight.grad
    torch.testing.assert_close(gradients, wanted, rtol=1e-13, atol=1e-13)


def test_each_row_is_asked_for_once() -> None:
    ids = torch.tensor([5, 1, 5, 5, 2, 1])
    bags = Bags(ids=ids, samples=6, hot=1, lengths=torch.ones(6, dtype=torch.int64))
    plan = plan_rows(bags, 2, True, True, KERNELS[0])
    assert [part.ids.tolist() for part in plan.parts] == [[1], [0, 2]]  # 2 of the even; 1 and 5 of the odd
    assert plan.unique_rows == 3


def test_ids_of_a_hash_table_go_to_their_owner_as_they_are() -> None:
    ids = torch.tensor([10**15 + 7, 3, 3, 10**18])
    bags = Bags(ids=ids, samples=2, hot=2, lengths=torch.tensor([2, 2]))
    plan = plan_pooled(bags, 3, True, True, KERNELS[0])
    for part, plan_of in enumerate(plan.parts):
        assert plan_of.ids.tolist() == ids[owner(ids, 3) == part].tolist()


def test_what_is_smaller_is_asked_for() -> None:
    def plan_of(ids: Tensor, hot: int, parts: int, by_rows: bool) -> LookupPlan:
        samples = len(ids) // hot
        bags = Bags(ids=ids, samples=samples, hot=hot, lengths=torch.full((samples,), hot))
        return LookupPlanner(1).plan(0, bags, parts, by_rows, False, KERNELS[0])

    many, few = torch.arange(64), torch.arange(64) % 3
    assert plan_of(many, 1, 1, False).inverse is None  # as many rows as samples
    assert plan_of(few, 1, 1, False).unique_rows == 3  # three rows for 64 samples
    assert plan_of(many, 1, 4, True).unique_rows == 64  # else a partial sum from each of four parts
    assert plan_of(many, 16, 4, True).inverse is None  # 4 samples, 4 parts: 16 sums for 64 rows
    assert plan_of(few, 16, 4, True).unique_rows == 3


def test_a_batch_by_features() -> None:
    ids = Jagged(torch.arange(7), torch.tensor([[1, 2], [0, 4]]), torch.arange(7.0))
    first, second = split_features(ids, torch.float64)
    assert first.ids.tolist() == [0, 1, 2]
    assert first.offsets.tolist() == [0, 1, 3]
    assert second.offsets.tolist() == [0, 0, 4]
    assert second.scale is not None
    assert second.scale.tolist() == [3.0, 4.0, 5.0, 6.0]
    part = ids.part(1, 2)
    assert part.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert part.lengths.tolist() == [[2], [4]]
