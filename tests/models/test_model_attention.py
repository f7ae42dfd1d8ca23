from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto.models.attention import CausalAttention, causal_probabilities, merge_heads, split_heads


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_written_out_equals_fused(kv_heads: int):
    q = torch.randn(2, 4, 9, 6, dtype=torch.float64)
    k, v = torch.randn(2, 2, kv_heads, 9, 6, dtype=torch.float64)
    core = CausalAttention(0.5)
    fused = core.eval()(q, k, v)
    core.train().drop = nn.Dropout(0.0)  # written out, yet nothing dropped
    torch.testing.assert_close(core(q, k, v), fused, rtol=1e-12, atol=1e-14)


def test_dropout_falls_on_the_probabilities():
    seen: list[torch.Tensor] = []

    class Watch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return torch.zeros_like(x)

    core = CausalAttention(0.5)
    core.drop = Watch()
    q, k, v = torch.randn(3, 2, 4, 5, 6)
    assert torch.equal(core(q, k, v), torch.zeros(2, 4, 5, 6))
    assert torch.equal(seen[0], causal_probabilities(q, k))


def test_probabilities_are_causal_and_sum_to_one():
    q, k = torch.randn(2, 1, 2, 5, 4)
    p = causal_probabilities(q, k)
    torch.testing.assert_close(p.sum(-1), torch.ones(1, 2, 5))
    assert (p.triu(1) == 0).all()


def test_heads_split_by_rows_of_q_then_k_then_v():
    qkv = torch.arange(2 * 3 * 16.0).view(2, 3, 16)
    q, k, v = split_heads(qkv, heads=4, kv_heads=2, head_dim=2)
    assert (q.shape, k.shape, v.shape) == ((2, 4, 3, 2), (2, 2, 3, 2), (2, 2, 3, 2))
    assert q[1, 3, 2].tolist() == qkv[1, 2, 6:8].tolist()
    assert k[1, 1, 2].tolist() == qkv[1, 2, 10:12].tolist()
    assert v[1, 0, 2].tolist() == qkv[1, 2, 12:14].tolist()
    assert torch.equal(merge_heads(q), qkv[..., :8])
