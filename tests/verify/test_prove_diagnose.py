"""The diagnosis of each pattern of differences, without ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stretto.engine.parallel.fragment import ShardPlacement, TensorBox
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.verify.compare import TOLERANCE, Comparison, compare, misplaced, relative
from stretto.verify.diagnose import explain
from stretto.verify.evidence import Evidence, NormPart, Sum, times
from stretto.verify.outputs import beside_positions

NAMES = ("embed.tok.weight", "a", "b", "c")
NONE = dict.fromkeys(NAMES, 0.0)
ONES = dict.fromkeys(NAMES, 1.0)
SAME = Comparison(NONE, ONES, NONE)
REPLICAS = Sum(2, "replicas", "the data-parallel reduction")
CONTEXTS = Sum(4, "context-parallel ranks", "the sum over cp")
COPIES = Sum(2, "copies of the weights", "the sum over the copies")
EQUAL = Evidence(
    loss=2.0,
    reference_loss=2.0,
    gradients=SAME,
    norm=1.5,
    reference_norm=1.5,
    weights=SAME,
    microbatches=8,
    sums=[REPLICAS],
    tied=["embed.tok.weight"],
    misplaced={},
)
SPLIT = replace(
    EQUAL,
    sums=[REPLICAS, CONTEXTS],
    tp=4,
    experts=["c"],
    expert_copies=8,
    norm_parts=[NormPart("experts", 0.25, "ep")],
)


def off(errors: dict[str, float], ratio: float = 1.0, residual: float = 0.1) -> Comparison:
    ratios = {name: ratio if errors.get(name) else 1.0 for name in NAMES}
    residuals = {name: residual if errors.get(name) else 0.0 for name in NAMES}
    return Comparison({**NONE, **errors}, ratios, residuals)


SHARDS = [Sum(2, "ranks that share gradients", ""), Sum(4, "ranks that share states", "")]
STALE = replace(off({"c": 1e-3}), ranks=(0, 2))


def sentence(evidence: Evidence) -> str:
    cause = explain(evidence)
    return "" if cause is None else cause.sentence


def test_equal_results_have_no_diagnosis() -> None:
    assert explain(EQUAL) is None
    assert explain(replace(EQUAL, loss=2.0 * (1 + 1e-12))) is None


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (replace(EQUAL, loss=float("nan")), "the loss is not finite"),
        (replace(EQUAL, loss=float("inf")), "the loss is not finite"),
        (replace(EQUAL, loss=2.0 * 0.873), "about 1 of 8 microbatches short: a microbatch is dropped"),
        (replace(EQUAL, loss=2.0 * 0.62), "about 3 of 8 microbatches short"),
        (replace(EQUAL, loss=1.0), "0.5 times the reference: wrong scale of the loss"),
        (replace(EQUAL, loss=8.0), "4 times the reference: wrong scale of the loss"),
        (replace(EQUAL, loss=2.0002), "wrong data or a wrong forward"),
        (
            replace(EQUAL, gradients=off({"embed.tok.weight": 0.3})),
            "only the gradient of the tied parameter embed.tok.weight is wrong: it is not the sum over",
        ),
        (
            replace(EQUAL, gradients=off({"embed.tok.weight": 0.3}, 0.5)),
            "embed.tok.weight is wrong: it is not summed over the 2 stages that share it",
        ),
        (
            replace(EQUAL, gradients=off({"embed.tok.weight": 1.0}, 2.0, 0.0)),
            "it is 2 times the reference, summed twice over the 2 stages that share it",
        ),
        (
            replace(EQUAL, gradients=off({"embed.tok.weight": 0.5}, 0.5, 0.0)),
            "it is 0.5 times the reference, averaged over the 2 stages that share it",
        ),
        (
            replace(EQUAL, gradients=off({"embed.tok.weight": 0.4}, 1.4, 0.0)),
            "it is 1.4 times the reference: wrong gradient scale",
        ),
        (
            replace(EQUAL, gradients=off(dict.fromkeys(NAMES, 1e-7), 1 + 1e-7, 1e-16)),
            "every gradient is 1.0000001 times the reference: wrong gradient scale",
        ),
        (
            replace(EQUAL, gradients=off(dict.fromkeys(NAMES, 1e-7), 1 + 1e-9, 1e-7)),
            "every gradient is off by 1.0e-07 of its largest value, as if something were computed",
        ),
        (replace(EQUAL, loss=2.0 * (1 + 1e-7)), "the loss is 1.0000001 times the reference: wrong data"),
        (
            replace(EQUAL, gradients=off(dict.fromkeys(NAMES, 0.5), 0.5, 0.0)),
            "as if averaged over the 2 replicas",
        ),
        (
            replace(EQUAL, gradients=off(dict.fromkeys(NAMES, 2.0), 3.0, 0.0)),
            "every gradient is 3 times the reference",
        ),
        (replace(EQUAL, gradients=off({"a": 2.0}, 3.0, 0.0)), "the gradient of a is 3 times the reference"),
        (
            replace(EQUAL, gradients=off(dict.fromkeys(NAMES, 0.7), 0.5, 0.4)),
            "the data-parallel reduction is missing",
        ),
        (replace(EQUAL, gradients=off({"b": 0.1, "a": 0.7})), "the gradient of a, b differs in direction"),
        (
            replace(EQUAL, gradients=off({"b": 0.1, "a": 0.7}), recompute="full"),
            "a shard is misplaced, or what runs again (recompute=full) is not what ran",
        ),
        (
            replace(EQUAL, norm=1.8),
            "norm is 1.2 times the reference, so clipping is wrong: a shard is left out",
        ),
        (
            replace(EQUAL, norm=1.8, misplaced={"a": "a part of it is counted 2 times", "b": "..."}),
            "so clipping is wrong: of a a part of it is counted 2 times, and of 1 more",
        ),
        (
            replace(SPLIT, gradients=off(dict.fromkeys(NAMES, 0.7), 0.25, 0.4)),
            "every gradient differs between the 4 context-parallel ranks, and their sum is the reference: "
            "the sum over cp is missing",
        ),
        (
            replace(SPLIT, gradients=off(dict.fromkeys(NAMES, 0.7), 0.125, 0.4)),
            "every gradient differs between its 8 holders, and their sum is the reference: the data-parallel "
            "reduction and the sum over cp are missing",
        ),
        (
            replace(EQUAL, sums=[COPIES, REPLICAS], gradients=off(dict.fromkeys(NAMES, 0.7), 0.5, 0.4)),
            "its 2 holders, and their sum is the reference: the sum over the copies or the data-parallel "
            "reduction is missing",
        ),
        (
            replace(SPLIT, sums=[REPLICAS], gradients=off({"a": 0.7, "b": 0.6}, 0.25, 0.4)),
            "the gradient of a, b differs between the 4 tensor-parallel ranks, and their sum is the "
            "reference: the sum over tp of what ranks compute from their own tokens",
        ),
        (
            replace(SPLIT, sums=[CONTEXTS], gradients=off(dict.fromkeys(NAMES, 0.7), 0.25, 0.0)),
            "every gradient is 0.25 times the reference: wrong gradient scale, as if averaged over the 4 "
            "context-parallel ranks",
        ),
        (
            replace(SPLIT, gradients=off({"c": 0.7})),
            "the gradient of experts alone, c, differs in direction: it is summed over ranks that hold other",
        ),
        (
            replace(SPLIT, gradients=off({"c": 0.7}, 0.125, 0.3)),
            "experts alone, c, differs between the 8 ranks that hold the same experts, and their sum is the "
            "reference: the reduction over expert_dp is missing",
        ),
        (
            replace(SPLIT, norm=1.5 * 1.75**0.5),  # 0.75 + 4 x 0.25
            "so clipping is wrong: experts are counted 4 times",
        ),
        (
            replace(SPLIT, norm=1.5 * 0.875**0.5),
            "so clipping is wrong, as if 50% of the experts were counted: the sum over ep is missing",
        ),
        (replace(SPLIT, norm=1.5 * 1.6**0.5), "a shard is left out, or a replicated or tied"),
        (replace(EQUAL, weights=off({"c": 1e-3})), "the updated c are not: the optimiser differs"),
        (replace(EQUAL, misplaced={"a": "a part of it is not counted"}), "so checkpoints would be wrong"),
        (
            replace(EQUAL, gradients=off(dict.fromkeys(NAMES, 1.0), 2.0, 0.0)),
            "2 times the reference: wrong gradient scale, as if summed twice over the 2 replicas",
        ),
        (
            replace(EQUAL, gradients=off(dict.fromkeys(NAMES, 0.7), 0.27), shards=SHARDS),
            "about 0.27 of it is there, as if it were not summed over the 4 ranks that share states",
        ),
        (
            replace(EQUAL, gradients=off(dict.fromkeys(NAMES, 0.7), 0.12), shards=SHARDS),
            "not summed over the 2 ranks that share gradients and the 4 ranks that share states",
        ),
        (
            replace(EQUAL, gradients=off(dict.fromkeys(NAMES, 0.7), 0.8), shards=SHARDS),
            "not only in scale: a reduction is missing or a shard is misplaced",
        ),
        (replace(EQUAL, norm=1.5 * 2**0.5), "every element is counted 2 times, as if copies of shards"),
        (
            replace(EQUAL, weights=STALE, masters=SAME, updated_here=SAME),
            "what optimisers updated is equal, but ranks 0, 2 would compute with other c: of what others "
            "have updated it has older values",
        ),
        (
            replace(EQUAL, weights=off({"blocks.1.mlp.router.correction": 1e-3}), masters=SAME),
            "moved blocks.1.mlp.router.correction by other loads than those of the step: they are not summed",
        ),
        (
            replace(EQUAL, weights=STALE, masters=SAME, updated_here=STALE),
            "updated values are not copied into the weights, or older ones",
        ),
        (
            replace(EQUAL, weights=STALE, masters=off({"b": 1e-3})),
            "the updated b are not: the optimiser differs",
        ),
        (replace(EQUAL, masters=off({"b": 1e-3})), "the updated b are not: the optimiser differs"),
    ],
)
def test_each_pattern_has_its_sentence(seen: Evidence, says: str) -> None:
    assert says in sentence(seen)


ROUTED = ("early", "b.mlp.router.weight", "b.mlp.experts.up", "late")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (ROUTED[:2], True),  # and all that comes before
        (ROUTED[1:2], True),
        (ROUTED[:3], False),  # the experts too
        (ROUTED[:1], False),
        ((*ROUTED[:2], "late"), False),
    ],
)
def test_a_backward_that_goes_wrong_at_a_router_is_named(wrong: tuple[str, ...], named: bool) -> None:
    errors = {name: 0.3 if name in wrong else 0.0 for name in ROUTED}
    gradients = Comparison(errors, {name: 0.9 - 0.1 * len(name) for name in ROUTED}, errors)
    message = sentence(replace(EQUAL, gradients=gradients, experts=["b.mlp.experts.up"]))
    routing = "the gradient of b.mlp.router.weight is wrong, and those of its experts and of all that comes"
    assert (routing in message) is named, message


@pytest.mark.parametrize(
    ("ratio", "phrase"),
    [
        (2.0, "2"),
        (0.25, "0.25"),
        (1.0000001, "1.0000001"),
        (1 - 3e-12, "0.999999999997"),
    ],
)
def test_a_ratio_is_told_from_one(ratio: float, phrase: str) -> None:
    assert times(ratio) == f"{phrase} times"


def test_compare_measures_error_ratio_and_residual() -> None:
    reference = {"a": torch.tensor([1.0, -4.0]).double(), "b": torch.tensor([2.0, 2.0]).double()}
    places = {name: ShardPlacement.unsharded(name, (2,)) for name in reference}
    computed = {"a": 3 * reference["a"], "b": torch.tensor([2.0, 2.5]).double()}
    comparison = compare(computed, places, reference)
    assert comparison.errors == {"a": pytest.approx(2.0), "b": pytest.approx(0.25)}
    assert comparison.ratios == {"a": pytest.approx(3.0), "b": pytest.approx(1.125)}
    assert comparison.residuals["a"] < 1e-15
    assert comparison.residuals["b"] == pytest.approx(0.125)
    assert comparison.worst == "a"
    assert comparison.ranks == (0,)
    assert compare(reference, places, reference).ranks == ()


def test_what_is_no_number_is_infinitely_wrong() -> None:
    reference = {"a": torch.ones(2).double()}
    computed = {"a": torch.tensor([1.0, float("nan")]).double()}
    assert compare(computed, {"a": ShardPlacement.unsharded("a", (2,))}, reference).error == float("inf")
    assert relative(float("nan"), 1.0) == float("inf")


def error_beside(computed: float, reference: float) -> float:
    """The error of a parameter of these values in a model whose largest value is 1."""
    pair = [{"a": torch.ones(2).double(), "b": torch.full((2,), b).double()} for b in (computed, reference)]
    return compare(pair[0], {n: ShardPlacement.unsharded(n, (2,)) for n in pair[1]}, pair[1]).errors["b"]


ROUNDING = torch.finfo(torch.float64).eps


@pytest.mark.parametrize(
    ("computed", "reference"),
    [(-3e-18, 1e-18), (0.0, 1e-18), (ROUNDING, 0.0), (0.0, ROUNDING), (2 * ROUNDING, -2 * ROUNDING)],
)
def test_rounding_of_a_gradient_that_is_zero_in_exact_arithmetic_is_no_error(
    computed: float, reference: float
) -> None:
    """On either side and with either sign: CPUs differ in how they sum."""
    assert error_beside(computed, reference) < TOLERANCE


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 2.0, -1.0])
def test_wrong_small_gradients_are_errors(size: float, ratio: float) -> None:
    assert error_beside(ratio * size, size) > 100 * TOLERANCE


@pytest.mark.parametrize("reference", [0.0, 1e-18, ROUNDING])
def test_a_gradient_that_should_be_zero_and_is_not_is_an_error(reference: float) -> None:
    assert error_beside(1e-14, reference) > TOLERANCE
    assert error_beside(1e-6, reference) > 1e8 * TOLERANCE


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ((TensorBox(offsets=(0,), sizes=(4,), local=(0,)),), None),
        (
            (
                TensorBox(offsets=(0,), sizes=(2,), local=(0,)),
                TensorBox(offsets=(2,), sizes=(2,), local=(2,)),
            ),
            None,
        ),
        ((TensorBox(offsets=(0,), sizes=(3,), local=(0,)),), "a part of it is on no rank"),
        (
            (
                TensorBox(offsets=(0,), sizes=(4,), local=(0,)),
                TensorBox(offsets=(1,), sizes=(1,), local=(1,)),
            ),
            "a part of it is counted 2 times",
        ),
        (
            (
                TensorBox(offsets=(0,), sizes=(3,), local=(0,)),
                TensorBox(offsets=(3,), sizes=(1,), local=(3,), owned=False),
            ),
            "a part of it is not counted",
        ),
    ],
)
def test_misplaced_pieces_are_detected(pieces: tuple[TensorBox, ...], says: str | None) -> None:
    tensors = {"a": torch.ones(4).double()}
    faults = misplaced(tensors, {"a": ShardPlacement("a", (4,), pieces)}, tensors, lambda over: 1)
    assert faults == ({} if says is None else {"a": says})


@pytest.mark.parametrize(("copies", "says"), [(1, None), (2, "a part of it is on no rank")])
def test_copies_are_counted_over_the_axes_that_a_parameter_is_spread_over(
    copies: int, says: str | None
) -> None:
    tensors = {"a": torch.ones(4).double()}
    placed = ShardPlacement(
        "a", (4,), (TensorBox(offsets=(0,), sizes=(4,), local=(0,)),), over="expert_tp-ep"
    )
    faults = misplaced(tensors, {"a": placed}, tensors, {"expert_tp-ep": copies, "tp": 7}.__getitem__)
    assert faults == ({} if says is None else {"a": says})


def test_a_missing_sum_of_all_beside_one_of_the_experts_names_both() -> None:
    errors = dict.fromkeys(NAMES, 0.7)
    ratios = {**dict.fromkeys(NAMES, 0.5), "c": 0.125}
    both = Comparison(errors, ratios, dict.fromkeys(NAMES, 0.4))
    message = sentence(replace(SPLIT, tp=1, gradients=both))
    dense, experts = message.split("; ")
    assert dense.endswith("the data-parallel reduction is missing")
    assert experts.endswith("the reduction over expert_dp is missing")


def test_a_missing_sum_that_spoils_all_earlier_gradients_is_reported_as_all() -> None:
    """A wrong forward gradient reaches every layer before it, and has no factor."""
    message = sentence(replace(SPLIT, gradients=off(dict.fromkeys(NAMES[:3], 0.7))))
    assert message.endswith(
        "differs in direction, not only in scale: a reduction is missing or a shard is misplaced"
    )


CONTEXT = SequenceSplit(length=6, cp=2, cp_index=1)  # padded to 8: positions 2 to 5
SHARD = SequenceSplit(length=6, cp=2, cp_index=0, tp=2, tp_index=1)  # positions 6 and 7 are padding


def test_outputs_that_are_split_along_the_sequence_are_laid_beside_their_positions() -> None:
    full = torch.arange(2 * 6 * 3.0).reshape(2, 6, 3)
    mine, same = beside_positions(full[:, 2:6].clone(), full, CONTEXT) or (None, None)
    assert mine is not None
    assert torch.equal(mine, same)
    padding = beside_positions(torch.full((2, 2, 3), 7.0), full, SHARD)
    assert padding is not None
    assert padding[0].numel() == padding[1].numel() == 0
    heads = torch.zeros(2, 3, 4, 5)  # heads are split as well
    assert beside_positions(heads, torch.zeros(2, 6, 6, 5), CONTEXT) is None
    assert beside_positions(torch.zeros(2, 3, 5), torch.zeros(2, 4, 5), CONTEXT) is None
    assert beside_positions(torch.zeros(4, 5), torch.zeros(6, 5), CONTEXT) is None
