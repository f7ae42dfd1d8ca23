"""The second pass of a proof, in the types of the job: right layouts, and faults that only it sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.engine.parallel.data.gradients import FlatGradient
from stretto.engine.parallel.data.unit import FlatParameter
from stretto.recommender.config.load import parse_config
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.train import engine
from stretto.verify.compare import MULTIPLE, rounding_bounds, worst_quantity
from stretto.verify.language.proof import language_proof
from stretto.verify.recommender.every import AllCases, small
from stretto.verify.recommender.proof import recommender_proof
from stretto.verify.run import Findings, run_proof
from tiny_job import LLAMA, Changes, changes, job, varied

pytestmark = pytest.mark.apart


def findings(folder: Path, fault: Any, *cases: dict[str, Any], dtype: str) -> Findings:
    config = job(folder, f"train.dtype={dtype}", model=LLAMA)
    proof = language_proof(config, [varied(config, case) for case in cases], 1, own_types=True)
    return run_proof(proof, fault)


def send_in_type_of_weights() -> None:
    original = FlatGradient._packed

    def packed(self: FlatGradient) -> Tensor:
        return original(self).to(self.unit.parameters[0].dtype)

    FlatGradient._packed = packed


def forget_masters() -> None:
    FlatParameter.copy_masters = lambda self: None


LAYOUTS = [
    changes(dp=2, mode="zero3"),
    changes(tp=2, sequence_parallel=True),
    changes(pp=2, mode="zero1"),
    changes(cp=2),
]


@pytest.mark.parametrize(
    ("dtype", "cases"),
    [
        ("float32", LAYOUTS[:2]),
        ("bfloat16", LAYOUTS[2:]),
        *(
            pytest.param(dtype, LAYOUTS, marks=pytest.mark.slow)
            for dtype in ("float32", "bfloat16", "float16")
        ),
    ],
    ids=[
        "float32",
        "bfloat16",
        *(f"{dtype} in every layout" for dtype in ("float32", "bfloat16", "float16")),
    ],
)
def test_right_layouts_are_equal_in_their_own_types(tmp_path: Path, dtype: str, cases: list[Changes]) -> None:
    found = findings(tmp_path, None, *cases, dtype=dtype)
    assert all(verdict.equal for verdict in found.verdicts)
    for verdict in found.rounded:
        assert verdict.equal, verdict.diagnosis
        assert verdict.dtype == dtype
        weights = ["weights"] if dtype == "float32" else []
        assert [quantity.name for quantity in verdict.quantities] == ["loss", "gradients", "norm", *weights]
        assert all(quantity.error for quantity in verdict.quantities), "rounding leaves something"


@pytest.mark.parametrize(
    ("fault", "case", "phrase"),
    [
        (
            send_in_type_of_weights,
            changes(dp=2, mode="zero3"),
            "is a number of bfloat16: it is summed or sent",
        ),
        (forget_masters, changes(dp=2), "modules compute with other values of"),
    ],
)
def test_what_float64_cannot_see_is_seen(
    tmp_path: Path, fault: Any, case: dict[str, Any], phrase: str
) -> None:
    found = findings(tmp_path, fault, case, dtype="bfloat16")
    assert found.verdicts[0].equal
    (verdict,) = found.rounded
    assert not verdict.equal
    assert phrase in (verdict.diagnosis or "")


_TABLES = """
model: {family: dlrm, bottom: [8, 4], top: [4, 1], rows: [10]}
layout: {ranks: 2}
train: {device: cpu, seed: 3}
optim: {dense: {lr: 0.02}, tables: {lr: 0.05}, clip: 0.05}
"""


def of_tables(fault: Any, *overrides: str, count: int = 3) -> Findings:
    """Placements of a small recommender with tables of every kind."""
    config = parse_config(_TABLES, overrides=overrides)
    assert isinstance(config, RecommenderConfig)
    config = small(config, 2)
    cases = AllCases(config.table_specs(), 2).cases[: 60 * count : 60]
    proof = recommender_proof(config, config.table_specs(), cases, 2, own_types=True)
    return run_proof(proof, fault)


def sum_in_16_bits() -> None:
    reduce = engine._Bucket.reduce

    def rounded(self: Any) -> None:
        if self._flat.dtype == torch.float32:
            self._flat.copy_(self._flat.bfloat16())
        reduce(self)

    engine._Bucket.reduce = rounded


def test_16_bit_messages_are_compared_before_their_rounding_opens_a_relu() -> None:
    """After one step of this case a row of C9 has made a whole step the other way, and the gradient of C2 is
    off by a fifth."""
    config = small(parse_config(_TABLES, overrides=("tables.wire=bfloat16",)), 2)
    tables = config.table_specs()
    case = next(c for c in AllCases(tables, 2).cases if str(c) == "mix 2 adagrad+lamb dot multi-hot overlap")
    (verdict,) = run_proof(recommender_proof(config, tables, [case], 2, own_types=True), None).rounded
    assert verdict.equal, verdict.diagnosis


@pytest.mark.parametrize("overrides", [(), pytest.param(("tables.wire=bfloat16",), marks=pytest.mark.slow)])
def test_right_placements_are_equal_in_their_own_types(overrides: tuple[str, ...]) -> None:
    found = of_tables(None, *overrides)
    assert len(found.rounded) == len(found.verdicts) > 2
    for verdict in (*found.verdicts, *found.rounded):
        assert verdict.equal, f"{verdict.layout}: {verdict.diagnosis}"
    names = [quantity.name for quantity in found.rounded[0].quantities]
    assert names == ["loss", "gradients", "norm", "weights"]
    assert found.rounded[0].dtype == "float32"


def test_dense_gradients_in_a_smaller_type_are_seen_in_the_second_pass_alone() -> None:
    found = of_tables(sum_in_16_bits, count=1)
    assert found.rounded
    assert all(verdict.equal for verdict in found.verdicts)
    for verdict in found.rounded:
        assert "times what rounding may do" in (verdict.diagnosis or ""), verdict.layout


def test_a_recommender_in_float64_has_no_second_pass() -> None:
    found = of_tables(None, "train.dtype=float64", count=1)
    assert not found.rounded
    assert all(verdict.equal for verdict in found.verdicts)


def test_what_rounding_may_do_is_a_multiple_of_one_process() -> None:
    bounds = rounding_bounds({"a": 1e-3, "b": 4e-3, "c": 0.0}, eps=2e-6)
    assert bounds == {"a": MULTIPLE * 1e-3, "b": MULTIPLE * 4e-3, "c": MULTIPLE * 1e-3}
    worst = worst_quantity("gradients", {"a": 9e-3, "b": 1e-3, "c": 0.0}, bounds)
    assert (worst.worst, worst.equal) == ("a", False)
    assert rounding_bounds({"": 0.0}, eps=torch.finfo(torch.float32).eps)[""] > 0.0
