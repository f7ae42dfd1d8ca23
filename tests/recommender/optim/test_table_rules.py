"""Rules of tables: formulas element by element, and every way of applying them alike."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.errors import StrettoError
from stretto.recommender.optim.rules import (
    RULES,
    Sgd,
    TableRule,
    build_rule,
    join_halves,
    options_of,
    split_halves,
)
from stretto.recommender.optim.updater import update_rows
from stretto.recommender.tables.kernels.cpu import CompiledKernels
from stretto.recommender.tables.kernels.plain import Kernels

LR, SLOTS, STEPS = 0.3, 11, 4
OPTIONS: dict[str, dict[str, float]] = {
    "adagrad": {"eps": 0.02},
    "rowwise_adagrad": {"eps": 0.03},
    "lazy_adam": {"beta1": 0.8, "beta2": 0.95, "eps": 0.01},
}
Table = tuple[Tensor, dict[str, Tensor]]
Batch = tuple[Tensor, Tensor, Tensor, Tensor | None]  # slots, offsets, gradient, scale


def rule_of(name: str) -> TableRule:
    return build_rule(name, **OPTIONS.get(name, {}))


def table(rule: TableRule, values: Tensor) -> Table:
    states = {
        name: torch.zeros(values.shape[: 1 if spec.per_row else 2], dtype=spec.dtype)
        for name, spec in rule.state_specs(values.dtype).items()
    }
    encoded = rule.encode(values)
    return encoded.pop("weight").clone(), states | {name: value.clone() for name, value in encoded.items()}


def values_of(rule: TableRule, trained_table: Table) -> Tensor:
    return rule.decode({"weight": trained_table[0], **trained_table[1]})


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, list[Batch]]:
    """Weights, and some steps: bags of no and of many lookups, few rows, weights of lookups."""
    width = draw(st.sampled_from([1, 3, 8, 16, 20, 64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    drawn = list[Batch]()
    for _ in range(STEPS):
        lengths = torch.tensor(draw(st.lists(st.sampled_from([0, 1, 3]), max_size=12)), dtype=torch.int64)
        count = int(lengths.sum())
        slots = torch.randint(0, draw(st.sampled_from([1, SLOTS])), (count,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        scale = numbers(count) if draw(st.booleans()) else None
        drawn.append((slots, offsets, numbers(len(lengths), width), scale))
    return numbers(SLOTS, width), drawn


def by_hand(name: str, values: Tensor, steps: list[Batch]) -> Tensor:
    """Each element for itself, in Python's numbers."""
    options = OPTIONS.get(name, {})
    eps = options.get("eps", 0.0)
    beta1, beta2 = options.get("beta1", 0.0), options.get("beta2", 0.0)
    rows = values.tolist()
    width, seen = values.shape[1], dict[tuple[int, int], list[float]]()
    sums, counts = [0.0] * SLOTS, [0] * SLOTS
    for slots, offsets, gradient, scale in steps:
        total = dict[int, list[float]]()
        for bag in range(len(offsets) - 1):
            for k in range(int(offsets[bag]), int(offsets[bag + 1])):
                row_sum = total.setdefault(int(slots[k]), [0.0] * width)
                for j in range(width):
                    row_sum[j] += float(gradient[bag, j]) * (1.0 if scale is None else float(scale[k]))
        for row, g in total.items():
            sums[row] += sum(x * x for x in g) / width
            counts[row] += 1
            for j in range(width):
                state = seen.setdefault((row, j), [0.0, 0.0])
                if name == "sgd":
                    rows[row][j] -= LR * g[j]
                elif name == "adagrad":
                    state[0] += g[j] ** 2
                    rows[row][j] -= LR * g[j] / (math.sqrt(state[0]) + eps)
                elif name == "rowwise_adagrad":
                    rows[row][j] -= LR * g[j] / (math.sqrt(sums[row]) + eps)
                else:
                    state[0] = beta1 * state[0] + (1 - beta1) * g[j]
                    state[1] = beta2 * state[1] + (1 - beta2) * g[j] ** 2
                    first = state[0] / (1 - beta1 ** counts[row])
                    second = state[1] / (1 - beta2 ** counts[row])
                    rows[row][j] -= LR * first / (math.sqrt(second) + eps)
    return torch.tensor(rows, dtype=torch.float64).view_as(values)


def trained(rule: TableRule, kernels: Kernels, values: Tensor, steps: list[Batch]) -> Table:
    weight, states = table(rule, values)
    for slots, offsets, gradient, scale in steps:
        update_rows(
            rule=rule,
            kernels=kernels,
            weight=weight,
            states=states,
            slots=slots,
            offsets=offsets,
            gradient=gradient,
            lr=LR,
            scale=scale,
        )
    return weight, states


@pytest.mark.parametrize("kernels", [Kernels(), CompiledKernels()], ids=["plain", "compiled"])
@pytest.mark.parametrize("name", [name for name in RULES if name != "split_sgd"])
@given(given_=batches())
@settings(max_examples=25, deadline=None)
def test_a_rule_is_its_formula(name: str, kernels: Kernels, given_: tuple[Tensor, list[Batch]]) -> None:
    values, steps = given_
    got, _ = trained(rule_of(name), kernels, values, steps)
    torch.testing.assert_close(got, by_hand(name, values, steps), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
@given(given_=batches())
@settings(max_examples=25, deadline=None)
def test_one_pass_leaves_the_states_of_two(name: str, given_: tuple[Tensor, list[Batch]]) -> None:
    values, steps = given_
    rule = rule_of(name)
    compiled, two = (trained(rule, kernels, values, steps) for kernels in (CompiledKernels(), Kernels()))
    assert set(compiled[1]) == set(two[1]) == set(rule.state_specs(values.dtype))
    if name == "split_sgd":  # an update is rounded once, to float32, which may tip either way
        torch.testing.assert_close(values_of(rule, compiled), values_of(rule, two), rtol=1e-6, atol=1e-6)
        return
    for got, want in zip((compiled[0], *compiled[1].values()), (two[0], *two[1].values()), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
@given(given_=batches())
@settings(max_examples=8, deadline=None)
def test_float32_is_close_in_both_ways(name: str, given_: tuple[Tensor, list[Batch]]) -> None:
    values, steps = given_
    rule = rule_of(name)
    narrow = [(s, o, g.float(), None if w is None else w.float()) for s, o, g, w in steps]
    want = by_hand("sgd" if name == "split_sgd" else name, values, steps)
    for kernels in (CompiledKernels(), Kernels()):
        trained_table = trained(rule, kernels, values.float(), narrow)
        torch.testing.assert_close(values_of(rule, trained_table).double(), want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kernels", [Kernels(), CompiledKernels()], ids=["plain", "compiled"])
@pytest.mark.parametrize("name", RULES)
def test_rows_that_were_not_seen_stay_bit_by_bit(name: str, kernels: Kernels) -> None:
    rule, values = rule_of(name), torch.randn(SLOTS, 16)
    weight, states = table(rule, values)
    before = {"weight": weight.clone()} | {name: state.clone() for name, state in states.items()}
    slots, offsets = torch.tensor([3, 8, 3]), torch.tensor([0, 2, 3])
    update_rows(
        rule=rule,
        kernels=kernels,
        weight=weight,
        states=states,
        slots=slots,
        offsets=offsets,
        gradient=torch.ones(2, 16),
        lr=LR,
    )
    seen = torch.zeros(SLOTS, dtype=torch.bool).index_fill_(0, slots, True)
    for key, value in ({"weight": weight} | states).items():
        assert torch.equal(value[~seen], before[key][~seen])
        assert not torch.equal(value[seen], before[key][seen])


@pytest.mark.parametrize("kernels", [Kernels(), CompiledKernels()], ids=["plain", "compiled"])
def test_columns_apart_with_the_mean_of_the_whole_row_are_the_whole_row(kernels: Kernels) -> None:
    rule = rule_of("rowwise_adagrad")
    torch.manual_seed(0)
    values, offsets = torch.randn(SLOTS, 24, dtype=torch.float64), torch.tensor([0, 3, 3, 5])
    slots, gradient = torch.tensor([4, 1, 4, 9, 1]), torch.randn(3, 24, dtype=torch.float64)
    all_columns = trained(rule, kernels, values, [(slots, offsets, gradient, None)])
    grouped = kernels.group(slots)
    parts = [slice(0, 8), slice(8, 24)]
    total = torch.zeros(len(grouped.rows), dtype=torch.float64)
    for part in parts:
        total += kernels.squares(gradient[:, part], offsets, grouped)
    for part in parts:
        weight, states = table(rule, values[:, part].contiguous())
        columns = gradient[:, part]
        update_rows(
            *(rule, kernels, weight, states, slots, offsets, columns, LR),
            grouped=grouped,
            mean_square=total / 24,
        )
        torch.testing.assert_close(weight, all_columns[0][:, part], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(states["sum"], all_columns[1]["sum"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernels", [Kernels(), CompiledKernels()], ids=["plain", "compiled"])
@pytest.mark.parametrize("name", RULES)
def test_a_factor_is_of_the_gradient(name: str, kernels: Kernels) -> None:
    rule, values = rule_of(name), torch.randn(SLOTS, 16, dtype=torch.float64)
    slots, offsets = torch.tensor([3, 8, 3]), torch.tensor([0, 2, 3])
    gradient = torch.randn(2, 16, dtype=torch.float64)
    want = trained(rule, kernels, values, [(slots, offsets, gradient * 0.25, None)])
    got = table(rule, values)
    update_rows(rule, kernels, *got, slots, offsets, gradient, LR, factor=0.25)
    torch.testing.assert_close(values_of(rule, got), values_of(rule, want), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_many_rows_go_some_after_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, offsets = rule_of(name), torch.arange(0, 401, 2)
    values, slots = torch.randn(90, 16, dtype=torch.float64), torch.randint(0, 90, (400,))
    steps: list[Batch] = [
        (slots, offsets, torch.randn(200, 16, dtype=torch.float64), torch.rand(400).double())
    ]
    want = trained(rule, Kernels(), values, steps)
    for at_once in (1, 7, len(slots.unique())):
        monkeypatch.setattr("stretto.recommender.optim.updater._CHUNK_ROWS", at_once)
        got = trained(rule, Kernels(), values, steps)
        assert torch.equal(values_of(rule, got), values_of(rule, want))
    means = torch.rand(len(slots.unique()), dtype=torch.float64)
    if rule.row_statistic:
        for at_once in (7, 1000):
            monkeypatch.setattr("stretto.recommender.optim.updater._CHUNK_ROWS", at_once)
            trained_table = table(rule, values)
            update_rows(rule, Kernels(), *trained_table, slots, offsets, steps[0][2], LR, mean_square=means)
            assert torch.equal(trained_table[1]["sum"][slots.unique()], means)


def test_what_one_pass_does_not_know_goes_in_two() -> None:
    class Doubled(Sgd):
        def apply(
            self,
            weight: Tensor,
            states: dict[str, Tensor],
            slots: Tensor,
            gradient: Tensor,
            lr: float,
            mean_square: Tensor | None = None,
        ) -> None:
            weight[slots] *= 2

    weight = torch.ones(4, 3)
    slots, offsets = torch.tensor([1, 1]), torch.tensor([0, 1, 2])
    update_rows(
        rule=Doubled(),
        kernels=CompiledKernels(),
        weight=weight,
        states={},
        slots=slots,
        offsets=offsets,
        gradient=torch.ones(2, 3),
        lr=LR,
    )
    assert weight[:, 0].tolist() == [1, 2, 1, 1]
    apart = torch.ones(3, 4).T
    update_rows(
        rule=build_rule("sgd"),
        kernels=CompiledKernels(),
        weight=apart,
        states={},
        slots=slots,
        offsets=offsets,
        gradient=torch.ones(2, 3),
        lr=0.5,
    )
    assert apart[:, 0].tolist() == [1, 0, 1, 1]


@given(patterns=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20))
def test_a_float32_comes_back_from_its_halves_whatever_it_is(patterns: list[int]) -> None:
    """Numbers below the normal ones, infinities and what is no number, too."""
    values = torch.tensor(patterns, dtype=torch.int32).view(torch.float32).unsqueeze(1).expand(-1, 2)
    upper, lower = split_halves(values)
    assert upper.dtype == torch.bfloat16
    assert torch.equal(join_halves(upper, lower).view(torch.int32), values.contiguous().view(torch.int32))
    finite = values.isfinite() & upper.isfinite()
    assert (upper.float()[finite] - values[finite]).abs().le(values[finite].abs() / 128 + 1e-38).all()


@pytest.mark.parametrize("kernels", [Kernels(), CompiledKernels()], ids=["plain", "compiled"])
def test_split_sgd_is_float32_sgd_to_the_last_bit(kernels: Kernels) -> None:
    """Of float32 gradients with one lookup a row, there is one rounding in each and nothing to reorder."""
    torch.manual_seed(0)
    rule, values = build_rule("split_sgd"), torch.randn(SLOTS, 32)
    weight, states = table(rule, values)
    want, slots, offsets = values.clone(), torch.randperm(SLOTS)[:6], torch.arange(7)
    for _ in range(20):
        gradient = torch.randn(6, 32)
        update_rows(
            rule=rule,
            kernels=kernels,
            weight=weight,
            states=states,
            slots=slots,
            offsets=offsets,
            gradient=gradient,
            lr=0.25,
        )  # exact: a power of two
        want[slots] -= 0.25 * gradient
    assert torch.equal(values_of(rule, (weight, states)), want)


def test_adagrad_is_torchs_and_a_row_seen_always_is_torchs_adam() -> None:
    torch.manual_seed(0)
    values = torch.randn(SLOTS, 8, dtype=torch.float64)
    steps = [torch.randn(SLOTS, 8, dtype=torch.float64) for _ in range(5)]
    slots, offsets = torch.arange(SLOTS), torch.arange(SLOTS + 1)
    for name, torch_rule in (("adagrad", torch.optim.Adagrad), ("lazy_adam", torch.optim.Adam)):
        rule, wanted = build_rule(name), values.clone().requires_grad_()
        optimiser = torch_rule([wanted], lr=LR)
        trained_table = table(rule, values)
        for gradient in steps:
            wanted.grad = gradient.clone()
            optimiser.step()
            update_rows(rule, Kernels(), *trained_table, slots, offsets, gradient, LR)
        torch.testing.assert_close(trained_table[0], wanted.detach(), rtol=1e-12, atol=1e-12)


def test_a_rule_by_name_says_what_is_wrong() -> None:
    assert options_of("lazy_adam") == ("beta1", "beta2", "eps")
    assert options_of("sgd") == ()
    for name, options, phrase in (
        ("adagard", {}, "adagrad"),
        ("sgd", {"eps": 1.0}, "no option eps"),
        ("adagrad", {"eps": 0.0}, "eps is 0"),
        ("adagrad", {"eps": math.nan}, "eps is nan"),
        ("lazy_adam", {"beta2": 1.0}, "beta2 is 1"),
    ):
        with pytest.raises(StrettoError) as raised:
            build_rule(name, **options)
        assert phrase in f"{raised.value} {raised.value.hint}"
