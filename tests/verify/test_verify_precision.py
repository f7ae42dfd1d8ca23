"""The second pass of a proof, in the types of the job: right layouts, and faults that only it sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.engine.parallel.data.gradients import FlatGradient
from stretto.engine.parallel.data.unit import FlatParameter
from stretto.verify.compare import MULTIPLE, rounding_bounds, worst_quantity
from stretto.verify.language.proof import language_proof
from stretto.verify.run import Findings, run_proof
from tiny_job import LLAMA, changes, job, varied

pytestmark = pytest.mark.apart


def findings(folder: Path, fault: Any, *cases: dict[str, Any], dtype: str) -> Findings:
    config = job(folder, f"train.dtype={dtype}", model=LLAMA)
    proof = language_proof(config, [varied(config, case) for case in cases], 1, own_types=True)
    return run_proof(proof, fault)


def send_in_type_of_weights() -> None:
    whole = FlatGradient._packed

    def packed(self: FlatGradient) -> Tensor:
        return whole(self).to(self.unit.parameters[0].dtype)

    FlatGradient._packed = packed


def forget_masters() -> None:
    FlatParameter.copy_masters = lambda self: None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_right_layouts_are_equal_in_their_own_types(tmp_path: Path, dtype: str) -> None:
    cases = (changes(dp=2, mode="zero3"), changes(tp=2, sequence_parallel=True), changes(pp=2, mode="zero1"))
    found = findings(tmp_path, None, *cases, changes(cp=2), dtype=dtype)
    assert all(verdict.equal for verdict in found.verdicts)
    for one in found.rounded:
        assert one.equal, one.diagnosis
        assert one.dtype == dtype
        weights = ["weights"] if dtype == "float32" else []
        assert [quantity.name for quantity in one.quantities] == ["loss", "gradients", "norm", *weights]
        assert all(quantity.error for quantity in one.quantities), "rounding leaves something"


@pytest.mark.parametrize(
    ("fault", "case", "words"),
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
    tmp_path: Path, fault: Any, case: dict[str, Any], words: str
) -> None:
    found = findings(tmp_path, fault, case, dtype="bfloat16")
    assert found.verdicts[0].equal
    (one,) = found.rounded
    assert not one.equal
    assert words in (one.diagnosis or "")


def test_what_rounding_may_do_is_a_multiple_of_one_process() -> None:
    bounds = rounding_bounds({"a": 1e-3, "b": 4e-3, "c": 0.0}, eps=2e-6)
    assert bounds == {"a": MULTIPLE * 1e-3, "b": MULTIPLE * 4e-3, "c": MULTIPLE * 1e-3}
    worst = worst_quantity("gradients", {"a": 9e-3, "b": 1e-3, "c": 0.0}, bounds)
    assert (worst.worst, worst.equal) == ("a", False)
    assert rounding_bounds({"": 0.0}, eps=torch.finfo(torch.float32).eps)[""] > 0.0
