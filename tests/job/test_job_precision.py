"""Which names stay in float32."""

from __future__ import annotations

import pytest

from stretto.job.parameters import stays_float32


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        ("blocks.0.norm1.weight", True),
        ("head.norm.bias", True),
        ("blocks.3.mlp.router.gate.weight", True),
        ("blocks.0.attn.qkv.weight", False),
        ("embed.tok.weight", False),
    ],
)
def test_norms_and_routers_by_pattern(name: str, stays: bool) -> None:
    assert stays_float32(name, ["*norm*", "*router*"]) is stays
    assert not stays_float32(name, [])
    assert stays_float32(name, ["*"])


def test_patterns_mind_case_and_the_whole_name() -> None:
    assert not stays_float32("blocks.0.norm1.weight", ["norm*", "*NORM*"])
