from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto.engine.models.attention import merge_heads, split_heads
from stretto.engine.models.causal import CausalAttention, causal_probabilities, make_explicit


def probabilities(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return causal_probabilities(q, k, CausalAttention(0.0).scores(q.shape[-1]))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_explicit_attention_equals_fused(kv_heads: int):
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
    assert torch.equal(seen[0], probabilities(q, k))


def test_probabilities_are_causal_and_sum_to_one():
    q, k = torch.randn(2, 1, 2, 5, 4)
    p = probabilities(q, k)
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


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("training", [True, False])
def test_explicit_gradients_equal_fused(kv_heads: int, training: bool):
    torch.manual_seed(1)
    qkv = torch.randn(2, 9, (4 + 2 * kv_heads) * 6, dtype=torch.float64)
    results = list[list[torch.Tensor]]()
    for explicit in (False, True):
        leaf = qkv.clone().requires_grad_()
        core = CausalAttention(0.0, explicit).train(training)
        y = core(*split_heads(leaf, 4, kv_heads, 6))
        y.backward(torch.sin(torch.arange(y.numel(), dtype=torch.float64)).view(y.shape))
        assert leaf.grad is not None
        results.append([y.detach(), leaf.grad])
    for fused, written in zip(*results, strict=True):
        torch.testing.assert_close(written, fused, rtol=1e-12, atol=1e-13)


def test_the_gradient_of_causal_softmax():
    q, k = torch.randn(2, 1, 2, 4, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(probabilities, (q.requires_grad_(), k.requires_grad_()))


def test_all_attention_of_a_model_is_made_explicit():
    model = nn.ModuleList([CausalAttention(0.0), nn.Sequential(CausalAttention(0.1))])
    make_explicit(model)
    assert [m.explicit for m in model.modules() if isinstance(m, CausalAttention)] == [True, True]


def test_probabilities_have_the_computing_type():
    q, k = torch.randn(2, 1, 2, 5, 4).bfloat16().requires_grad_()
    p = probabilities(q, k)
    assert p.dtype is torch.bfloat16
    torch.testing.assert_close(p.float(), probabilities(q.float(), k.float()), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("by_heads", [True, False])
def test_fused_output_is_merged_without_a_copy(by_heads: bool):
    """Queries fresh from rotary positions lie by head, those of the fused product by position."""
    q = torch.randn(2, 4, 9, 6) if by_heads else torch.randn(2, 9, 4, 6).transpose(1, 2)
    k, v = torch.randn(2, 2, 2, 9, 6)
    y = CausalAttention(0.0)(q, k, v)
    assert merge_heads(y).untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
