"""Replicas that attend by FlexAttention equal one process that does not, on every kind of layout. On CPUs
torch refuses its backward; each rank lifts that, and takes the operator without the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor

from proofs import verify
from stretto.engine import flex
from stretto.verify.evidence import Verdict
from tiny_job import Changes, changes, job, varied

pytestmark = pytest.mark.slow  # each rank imports torch._dynamo

GEMMA = (
    "{family: gemma2, layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 64, "
    "attention: {window: 5, full_every: 2, softcap: 2.0}}"
)
OSS = (
    "{family: gpt_oss, layers: 2, hidden: 32, heads: 4, kv_heads: 2, head_dim: 8, ffn: 16, "
    "attention: {window: 5, full_every: 2}, moe: {experts: 4}}"
)


def operator() -> None:
    torch_flex._validate_device = lambda *_: None
    torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True

    def uncompiled(*tensors: Tensor, **named: Any) -> Any:
        return torch_flex.flex_attention(*tensors, **named)

    flex._compiled = lambda: uncompiled


def forget_the_cap() -> None:
    operator()
    flex.refusal = lambda *_, **__: None  # which would notice
    original = flex._compiled()
    flex._compiled = lambda: lambda *tensors, **named: original(*tensors, **{**named, "score_mod": None})


def proved(
    folder: Path, model: str, case: Changes, *overrides: str, on_rank: Callable[[], None] = operator
) -> Verdict:
    config = job(folder, "batch.global_size=4", "train.attention=flex", *overrides, model=model)
    (verdict,) = verify(config, [varied(config, case)], on_rank=on_rank)
    return verdict


CASES: list[tuple[str, Changes, tuple[str, ...]]] = [
    (GEMMA, changes(tp=2, sequence_parallel=True), ("recompute.mode=selective",)),
    (GEMMA, changes(pp=2, schedule="zb-h1"), ("recompute.mode=full",)),
    (GEMMA, changes(pp=2, schedule="zb-h1"), ("data.packing=documents",)),
    (GEMMA, changes(cp=2), ("layout.context=ulysses", "data.packing=documents")),
    (GEMMA, changes(dp=2, mode="zero3"), ()),
    (OSS, changes(tp=2), ("data.packing=documents",)),
    (OSS, changes(cp=2), ("layout.context=ulysses",)),
    (OSS, changes(dp=2, ep=2), ()),
]


@pytest.mark.parametrize(("model", "case", "overrides"), CASES)
def test_flex_attention_equals_one_process(
    tmp_path: Path, model: str, case: Changes, overrides: tuple[str, ...]
) -> None:
    verdict = proved(tmp_path, model, case, *overrides)
    assert verdict.equal, verdict.diagnosis


def test_a_missing_cap_is_seen(tmp_path: Path) -> None:
    verdict = proved(tmp_path, GEMMA, changes(tp=2), on_rank=forget_the_cap)
    assert not verdict.equal
