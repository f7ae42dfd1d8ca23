"""Replicas whose blocks are compiled equal one process that compiles nothing, on every kind of layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import stretto.engine.compiler as compiler_module
import stretto.engine.models.compiled as compiled_module
from proofs import verify
from stretto.engine.models.compiled import HeadSizes, rotate_heads
from stretto.verify.evidence import Verdict
from tiny_job import GPT, LLAMA, MOE, Changes, changes, job, varied

pytestmark = pytest.mark.slow  # each rank compiles

GEMMA = "{family: gemma2, layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 64}"


def trace_only() -> None:
    """Trace and differentiate, without a code generator."""
    compiler_module.BACKEND = "aot_eager"


def proved(
    folder: Path, model: str, case: Changes, *overrides: str, on_rank: Callable[[], None] | None = trace_only
) -> Verdict:
    config = job(folder, "batch.global_size=4", "train.compile=blocks", *overrides, model=model)
    (verdict,) = verify(config, [varied(config, case)], on_rank=on_rank)
    return verdict


CASES: list[tuple[str, Changes, tuple[str, ...]]] = [
    (LLAMA, changes(tp=2), ()),
    (LLAMA, changes(tp=2, sequence_parallel=True), ("recompute.mode=selective",)),
    (LLAMA, changes(tp=2), ("precision.fp8=row",)),
    (LLAMA, changes(cp=2), ()),
    (LLAMA, changes(pp=2, schedule="zb-h1"), ()),
    (LLAMA, changes(pp=2, schedule="zb-h1"), ("recompute.mode=full",)),
    (LLAMA, changes(pp=2, schedule="pipedream"), ()),
    (LLAMA, changes(pp=2), ("data.packing=documents",)),
    (LLAMA, changes(dp=2, mode="zero3"), ("recompute.mode=full",)),
    (GEMMA, changes(dp=2, mode="zero3", offload="cpu", offload_parameters="cpu"), ()),
    (GPT, changes(tp=2), ()),
    (MOE, changes(dp=2, ep=2), ()),
    (MOE, changes(tp=2), ()),
]


@pytest.mark.parametrize(("model", "case", "overrides"), CASES)
def test_compiled_blocks_equal_one_process(
    tmp_path: Path, model: str, case: Changes, overrides: tuple[str, ...]
) -> None:
    verdict = proved(tmp_path, model, case, *overrides)
    assert verdict.equal, verdict.diagnosis


def test_generated_code_equals_one_process(tmp_path: Path) -> None:
    verdict = proved(tmp_path, LLAMA, changes(tp=2, sequence_parallel=True), on_rank=None)
    assert verdict.equal, verdict.diagnosis


def rotate_backwards() -> None:
    trace_only()

    def rotate(qkv: Tensor, sizes: HeadSizes, tables: tuple[Tensor, Tensor], *rest: Any) -> Any:
        return rotate_heads(qkv, sizes, (tables[0], -tables[1]), *rest)

    compiled_module.rotate_heads = rotate


def forget_the_residual_stream() -> None:
    trace_only()

    def add_and_norm(x: Tensor, y: Tensor, *rest: Any) -> Any:
        from stretto.engine.models.compiled import add_and_norm as original

        return original(x.detach(), y, *rest)

    compiled_module.add_and_norm = add_and_norm


@pytest.mark.parametrize("fault", [rotate_backwards, forget_the_residual_stream])
def test_faults_in_what_is_compiled_are_found(tmp_path: Path, fault: Callable[[], None]) -> None:
    verdict = proved(tmp_path, LLAMA, changes(dp=2), on_rank=fault)
    assert not verdict.equal
