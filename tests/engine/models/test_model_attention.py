from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stretto.engine.models.attention import FullAttention, merge_heads, split_heads
from stretto.engine.models.causal import CausalAttention, causal_probabilities, choose_kernel


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
    choose_kernel(model, "explicit")
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


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that operators give."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[tuple[int, ...]]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {tuple(t.shape) for t in tree_leaves(out) if isinstance(t, Tensor)}
        return out


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("core", [CausalAttention(0.0), FullAttention(0.0, causal=True)])
def test_causal_attention_makes_no_mask(core: nn.Module, kv_heads: int) -> None:
    n = 40
    leaves = [torch.randn(2, heads, n, 8).requires_grad_() for heads in (4, kv_heads, kv_heads)]
    with Shapes() as shapes:
        core(*leaves).sum().backward()
    assert (2, 4, n, 8) in shapes.seen
    assert not [shape for shape in shapes.seen if shape[-2:] == (n, n)]
    with Shapes() as shapes:
        CausalAttention(0.0, explicit=True)(*leaves)
    assert (n, n) in {shape[-2:] for shape in shapes.seen}


@pytest.mark.parametrize(("fused", "kv_heads"), [((), 2), (("wide",), 4), (("wide", "grouped"), 2)])
def test_key_heads_are_repeated_where_that_gives_a_fused_kernel(
    monkeypatch: pytest.MonkeyPatch, fused: tuple[str, ...], kv_heads: int
) -> None:
    """Torch's choice on devices whose fused kernels take no groups."""
    q, k, v = (torch.randn(2, heads, 6, 8) for heads in (4, 2, 2))
    wanted, calls = CausalAttention(0.0)(q, k, v), list[Tensor]()
    attention = F.scaled_dot_product_attention

    def choice(q: Tensor, k: Tensor, *_: Tensor, **__: Any) -> int:
        return int(("grouped" if k.shape[1] < q.shape[1] else "wide") in fused)

    def noted(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        calls.append(k)
        return attention(q, k, v, **named)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    torch.testing.assert_close(CausalAttention(0.0)(q, k, v), wanted)
    assert [k.shape[1] for k in calls] == [kv_heads]
