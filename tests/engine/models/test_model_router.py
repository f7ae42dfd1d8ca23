"""The router's laws, each against its definition written out with loops."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import transformers.models.mixtral.modeling_mixtral as mixtral
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.engine.models.moe import Router, correct
from stretto.job.experts import Drop, ExpertShape, GroupScore, Score
from stretto.job.shape import ModelShape

FEW = settings(max_examples=60, deadline=None)
SEEDS = st.integers(0, 2**31)
SCORES: st.SearchStrategy[Score] = st.sampled_from(["softmax", "sigmoid"])


def router(moe: ExpertShape, hidden: int = 8) -> Router:
    return Router(ModelShape(family="llama", layers=1, hidden=hidden, heads=2, vocab=9, sequence=64, moe=moe))


def numbers(seed: int, *sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def choices(draw: st.DrawFn) -> tuple[int, int, int]:
    """Seed, experts, top_k."""
    experts = draw(st.integers(1, 9))
    return draw(SEEDS), experts, draw(st.integers(1, experts))


@FEW
@given(sizes=choices(), score=SCORES, normalise=st.booleans(), spread=st.sampled_from([0.1, 3.0, 40.0]))
def test_routing_by_definition(
    sizes: tuple[int, int, int], score: Score, normalise: bool, spread: float
) -> None:
    seed, experts, k = sizes
    logits = spread * numbers(seed, 2, 5, experts)
    results = router(ExpertShape(experts=experts, top_k=k, score=score, normalise=normalise)).choose(logits)
    assert results.experts.dtype == torch.int64
    for token, chosen, weights, scores in zip(
        logits.flatten(0, 1).tolist(),
        results.experts.flatten(0, 1).tolist(),
        results.weights.flatten(0, 1).tolist(),
        results.scores.flatten(0, 1).tolist(),
        strict=True,
    ):
        assert chosen == sorted(range(experts), key=lambda e: -token[e])[:k]
        top = max(token)
        raw = [math.exp(t - top) if score == "softmax" else 1 / (1 + math.exp(-t)) for t in token]
        assert scores == pytest.approx([r / sum(raw) for r in raw], rel=1e-12)
        if normalise:
            assert sum(weights) == pytest.approx(1, rel=1e-12)
            assert weights == pytest.approx([raw[e] / sum(raw[c] for c in chosen) for e in chosen], rel=1e-12)
        else:
            total = sum(raw) if score == "softmax" else 1.0
            assert weights == pytest.approx([raw[e] / total for e in chosen], rel=1e-12)


@FEW
@given(sizes=choices(), score=SCORES, cut=st.integers(1, 11))
def test_routing_does_not_depend_on_the_batch(sizes: tuple[int, int, int], score: Score, cut: int) -> None:
    seed, experts, k = sizes
    logits = numbers(seed, 2, 12, experts).round(decimals=1)  # with ties
    layer = router(ExpertShape(experts=experts, top_k=k, score=score))
    of_all = layer.choose(logits)
    for part in (slice(0, cut), slice(cut, 12)):
        for all_of_it, results in zip(of_all, layer.choose(logits[:, part]), strict=True):
            assert torch.equal(all_of_it[:, part], results)


@FEW
@given(
    seed=SEEDS,
    score=SCORES,
    group_score=st.sampled_from(["max", "top2"]),
    top_groups=st.integers(1, 4),
    k=st.integers(1, 3),
    correction=st.booleans(),
)
def test_choices_within_groups_by_definition(
    seed: int, score: Score, group_score: GroupScore, top_groups: int, k: int, correction: bool
) -> None:
    """Four groups of three experts."""
    logits = 2 * numbers(seed, 2, 5, 12)
    moe = ExpertShape(
        experts=12,
        top_k=k,
        score=score,
        groups=4,
        top_groups=top_groups,
        group_score=group_score,
        correction=correction,
        scale=1.7,
    )
    layer = router(moe).double()
    shifts = [0.0] * 12
    if layer.correction is not None:
        layer.correction.copy_(numbers(seed + 1, 12) - 1)  # most below minus the score
        shifts = layer.correction.tolist()
    results = layer.choose(logits)
    raw = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    for token, chosen, weights in zip(
        raw.flatten(0, 1).tolist(),
        results.experts.flatten(0, 1).tolist(),
        results.weights.flatten(0, 1).tolist(),
        strict=True,
    ):
        ranked = [a + b for a, b in zip(token, shifts, strict=True)]
        groups = [sorted(ranked[at : at + 3], reverse=True) for at in range(0, 12, 3)]
        worth = [group[0] if group_score == "max" else group[0] + group[1] for group in groups]
        best = sorted(range(4), key=lambda g: -worth[g])[:top_groups]
        inside = [e for e in range(12) if e // 3 in best]
        assert chosen == sorted(inside, key=lambda e: -ranked[e])[:k]
        assert weights == pytest.approx([1.7 * token[e] / sum(token[c] for c in chosen) for e in chosen])


def test_a_correction_has_no_gradient() -> None:
    layer = router(ExpertShape(experts=4, score="sigmoid", correction=True))
    layer.choose(layer.logits(torch.randn(2, 3, 8))).weights.sum().backward()
    assert layer.correction is not None
    assert layer.correction.grad is None
    assert not layer.correction.requires_grad
    assert layer.gate.weight.grad is not None


def test_a_correction_moves_against_the_load() -> None:
    correction = torch.tensor([0.5, 0.5, 0.5, 0.5])
    correct(correction, torch.tensor([9.0, 5.0, 4.999999999, 1.0], dtype=torch.float64), 0.125)
    assert correction.tolist() == [0.375, 0.5, 0.5, 0.625]
    correct(correction, torch.tensor([3, 2, 1, 1]), 0.125)  # a mean of 7/4
    assert correction.tolist() == [0.25, 0.375, 0.625, 0.75]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_scores_that_underflow_still_sum_to_one(score: Score) -> None:
    logits = torch.tensor([[-300.0, -301.0, -302.0], [0.0, -500.0, -600.0]], requires_grad=True)
    results = router(ExpertShape(experts=3, top_k=2, score=score)).choose(logits)
    for sums in (results.weights.sum(-1), results.scores.sum(-1)):
        torch.testing.assert_close(sums, torch.ones(2))
    (results.weights[:, 0] + results.scores[:, 0]).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def kept_by_definition(experts: Tensor, weights: Tensor, limit: int, drop: Drop) -> Tensor:
    """Choices of one sample [s, k] in order of preference, each taken while its expert has room."""
    _, k = experts.shape
    order = list(range(experts.numel()))
    if drop == "probs":
        order.sort(key=lambda i: -weights.flatten()[i].item())  # stable: equals by position
    taken: Counter[int] = Counter()
    within_capacity = torch.zeros_like(experts, dtype=torch.bool)
    for i in order:
        expert = int(experts[i // k, i % k])
        within_capacity[i // k, i % k] = taken[expert] < limit
        taken[expert] += 1
    return within_capacity


@FEW
@given(
    sizes=choices(),
    drop=st.sampled_from(["probs", "position"]),
    capacity=st.floats(0.05, 3.0),
    ties=st.booleans(),
)
def test_capacity_by_definition(sizes: tuple[int, int, int], drop: Drop, capacity: float, ties: bool) -> None:
    seed, count, k = sizes
    moe = ExpertShape(experts=count, top_k=k, capacity=capacity, drop=drop)
    layer = router(moe)
    chosen = layer.choose(
        numbers(seed, 3, 11, count) + torch.linspace(2, 0, count)
    )  # the first are the busiest
    experts, weights = chosen.experts, chosen.weights.round(decimals=1) if ties else chosen.weights
    within_capacity, limit = layer.keep(experts, weights), moe.capacity_of(11)
    assert within_capacity.shape == experts.shape
    assert limit == math.ceil(capacity * 11 * k / count)
    for sample in range(3):
        expected = kept_by_definition(experts[sample], weights[sample], limit, drop)
        assert torch.equal(within_capacity[sample], expected)
        busy = Counter(experts[sample].flatten().tolist())
        taken = Counter(experts[sample][within_capacity[sample]].tolist())
        assert all(taken[e] == min(n, limit) for e, n in busy.items())  # no more than fit, and no fewer


def test_without_a_capacity_all_stay() -> None:
    assert (
        router(ExpertShape(experts=3))
        .keep(torch.zeros(2, 5, 2, dtype=torch.int64), torch.ones(2, 5, 2))
        .all()
    )


def test_capacity_is_for_training() -> None:
    limited, free = router(ExpertShape(experts=3, capacity=1.0)), router(ExpertShape(experts=3))
    assert limited.limited
    assert not limited.eval().limited
    assert not free.limited


@FEW
@given(sizes=choices(), score=SCORES, ignored=st.integers(0, 4))
def test_auxiliary_losses_by_definition(sizes: tuple[int, int, int], score: Score, ignored: int) -> None:
    seed, count, k = sizes
    layer = router(ExpertShape(experts=count, top_k=k, score=score, balance=0.3, z=0.07))
    logits = numbers(seed, 2, 7, count)
    chosen = layer.choose(logits)
    tokens = 7 - ignored
    valid = torch.arange(7) < tokens
    counts, mass = layer.counts(chosen.experts, valid), layer.mass(chosen.scores, valid)
    assert counts.dtype == torch.int64
    balance = z = 0.0
    for sample in range(2):
        for expert in range(count):
            f = sum((chosen.experts[sample, t] == expert).sum().item() for t in range(tokens)) / (k * tokens)
            p = sum(chosen.scores[sample, t, expert].item() for t in range(tokens)) / tokens
            balance += 0.3 * tokens * count * f * p
        for t in range(tokens):
            z += 0.07 * math.log(sum(math.exp(x) for x in logits[sample, t].tolist())) ** 2
    assert layer.balance(counts, mass, tokens).item() == pytest.approx(balance, rel=1e-12)
    each = torch.tensor([tokens, tokens])
    assert layer.balance(counts, mass, each).item() == pytest.approx(balance, rel=1e-12)
    assert layer.z(logits, valid).item() == pytest.approx(z, rel=1e-12)
    if not ignored:
        assert torch.equal(counts, layer.counts(chosen.experts))
        assert torch.equal(mass, layer.mass(chosen.scores))
        assert torch.equal(layer.z(logits, valid), layer.z(logits))


def test_sums_of_slices_are_those_of_the_whole() -> None:
    layer = router(ExpertShape(experts=5, top_k=2, balance=0.5))
    chosen = layer.choose(numbers(3, 2, 12, 5))
    parts = [slice(0, 3), slice(3, 12)]
    counts = sum(layer.counts(chosen.experts[:, part]) for part in parts)
    mass = torch.stack([layer.mass(chosen.scores[:, part]) for part in parts]).sum(0)
    assert torch.equal(torch.as_tensor(counts), layer.counts(chosen.experts))
    torch.testing.assert_close(mass, layer.mass(chosen.scores), rtol=1e-14, atol=0)


def test_balance_of_equal_shares_is_its_coefficient_a_token() -> None:
    layer = router(ExpertShape(experts=4, top_k=2, balance=0.25))
    counts, mass = torch.full((3, 4), 5), torch.full((3, 4), 2.5)  # 10 tokens a sample
    assert layer.balance(counts, mass, 10).item() == pytest.approx(0.25 * 30)


def test_balance_as_transformers_has_it() -> None:
    """Of one layer and one sample; theirs is a mean over tokens, and top_k times as large."""
    logits = numbers(5, 1, 16, 6)
    layer = router(ExpertShape(experts=6, top_k=2, balance=1.0))
    chosen = layer.choose(logits)
    loss = layer.balance(layer.counts(chosen.experts), layer.mass(chosen.scores), 16)
    transformers_loss = mixtral.load_balancing_loss_func((logits[0],), 6, 2)
    assert isinstance(transformers_loss, Tensor)
    assert loss.item() == pytest.approx(transformers_loss.item() * 16 / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("inputs", "exact"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_logits_in_at_least_float32(inputs: torch.dtype, exact: torch.dtype) -> None:
    layer, x = router(ExpertShape(experts=3)).to(inputs), numbers(1, 2, 4, 8).to(inputs)
    with torch.autocast("cpu", torch.bfloat16, enabled=inputs == torch.float32):
        logits = layer.logits(x)
    assert logits.dtype == exact
    expected = (x.double() @ layer.gate.weight.detach().double().t()).to(exact)
    torch.testing.assert_close(logits, expected)
