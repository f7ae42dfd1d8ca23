"""Heads shared out over context-parallel ranks; the orders of positions; the style's answers to what it
cannot do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fake_mesh import FakeMesh
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ranks import on_ranks
from stretto.engine.models.causal import CausalAttention
from stretto.engine.parallel.context.style import ContextAttention, RingAttention, UlyssesAttention
from stretto.engine.parallel.context.ulysses import HeadShare, in_order, in_zigzag
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.styles import SplitDropout
from stretto.engine.parallel.tensor.dropout import DropoutKeys, KeyedDropout
from stretto.engine.parallel.tensor.sequence import zigzag
from stretto.engine.parallel.traffic import traffic
from stretto.errors import StrettoError
from stretto.layout.layout import Layout


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 6))
def test_every_rank_gets_the_key_heads_of_its_query_heads(cp: int, kv_heads: int, group: int) -> None:
    heads = kv_heads * group
    if heads % cp:
        with pytest.raises(StrettoError, match=f"{heads} attention heads"):
            HeadShare(heads, kv_heads, cp)
        return
    share = HeadShare(heads, kv_heads, cp)
    mine, kv, values = share.widths
    assert kv == values
    sent = [head for head in range(kv_heads) for _ in range(share.copies)]
    for rank in range(cp):
        key_heads = sent[rank * kv : (rank + 1) * kv]
        for i in range(mine):
            assert key_heads[i // (mine // kv)] == (rank * mine + i) // group
    if not kv_heads % cp:
        assert share.copies == 1
    elif not cp % kv_heads:
        assert kv == 1


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
def test_natural_and_zigzag_order_are_inverse(cp: int, chunk: int, batch: int) -> None:
    length = 2 * cp * chunk
    full = torch.arange(batch * length * 2).reshape(batch, length, 2)
    by_rank = torch.stack([full[:, zigzag(length, cp, rank)] for rank in range(cp)])
    if cp == 1:
        by_rank = full[None]
    assert torch.equal(in_zigzag(full, cp), by_rank)
    assert torch.equal(in_order(by_rank), full)


@dataclass
class Alone(FakeMesh):
    cp: int = 1

    def size(self, axis: str) -> int:
        return self.cp if axis == "cp" else super().size(axis)

    def group(self, axes: str) -> Any:
        return object() if axes == "cp" and self.cp > 1 else None


def core(dropout: float = 0.0, explicit: bool = False) -> CausalAttention:
    attention = CausalAttention(0.0, explicit)
    if dropout:
        keys = DropoutKeys(2)
        keys.samples = (4,)
        attention.drop = KeyedDropout(dropout, "core", keys)
    return attention


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_one_context_rank_keeps_the_plain_core(method: str) -> None:
    plain = core(0.5)
    assert ContextAttention(method, 8).replace_module(plain, Alone(tp=2)) is plain  # type: ignore[arg-type]
    plain = core()
    assert ContextAttention(method, 7).replace_module(plain, Alone(tp=2)) is plain  # type: ignore[arg-type]


def test_padding_for_tensor_parallel_ranks_alone_leaves_the_masks_of_samples() -> None:
    """Sequence parallelism pads 7 tokens to 8; what is dropped is as in 7."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 7, 8).double() for _ in range(3))
    plain = core(0.5)(q, k, v)
    mesh: Any = Alone(tp=2, rank=1)
    module = ContextAttention("ring", 7).replace_module(core(0.5), mesh)
    module.drop = SplitDropout(heads=(1, 4)).replace_module(module.get_submodule("drop"), mesh)
    end = torch.full((1, 2, 1, 8), 9.0).double()
    shifted = module(*(torch.cat([x[:, 2:], end], 2) for x in (q, k, v)))
    torch.testing.assert_close(shifted[:, :, :7], plain[:, 2:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [RingAttention, UlyssesAttention])
def test_context_attention_keeps_the_cores_options(kind: type[RingAttention]) -> None:
    method = "ring" if kind is RingAttention else "ulysses"
    mesh: Any = Alone(cp=2)
    for explicit in (False, True):
        module = ContextAttention(method, 8).replace_module(core(explicit=explicit).eval(), mesh)
        assert isinstance(module, kind)
        assert module.explicit is explicit
        assert not any(part.training for part in module.modules())
    module.explicit = False
    assert not module.explicit
    assert {name for name, _ in module.named_children()} >= {"drop"}


def misuse(style: Callable[[], ContextAttention], module: nn.Module, n: int = 4) -> None:
    mesh: Any = Alone(cp=2)
    attention_style = style()
    attention_style.parts("blocks.0.attn.core", module, 0, 1)
    q = torch.randn(1, 3, n, 8)
    attention_style.replace_module(module, mesh)(q, q, q)


@pytest.mark.parametrize(
    ("method", "length", "module", "message"),
    [
        ("rings", 8, core(), "layout.context is 'rings'"),
        ("ring", 8, nn.Linear(2, 2), r"blocks.0.attn.core \(Linear\) has no drop"),
        ("ring", 9, core(), "4 positions of a sample of 9 tokens on each of 2 ranks"),
        ("ulysses", 9, core(), "4 positions of a sample of 9 tokens"),
        ("ring", 8, CausalAttention(0.1), "attention has Dropout, whose mask"),
        ("ulysses", 8, CausalAttention(0.1), "attention has Dropout, whose mask"),
        ("ulysses", 8, core(), r"3 attention heads \(after tp\) do not divide over cp=2"),
    ],
)
def test_every_mistake_is_named(method: str, length: int, module: nn.Module, message: str) -> None:
    with pytest.raises(StrettoError, match=message) as error:
        misuse(lambda: ContextAttention(method, length), module)
    assert error.value.hint


def exchanged() -> None:
    mesh = Mesh(Layout(cp=2))
    module = ContextAttention("ulysses", 8).replace_module(core(), mesh)
    q, k, v = (torch.randn(2, h, 4, 8).double().requires_grad_() for h in (4, 2, 2))
    with traffic() as sent:
        y = module(q, k, v)
    moved = (q.nbytes + k.nbytes + v.nbytes + y.nbytes) // 2
    assert sent.bytes == {"all-to-all": moved}
    assert sent.calls == {"all-to-all": 2}
    with traffic() as sent:
        y.sum().backward()
    assert sent.bytes == {"all-to-all": moved}
    mesh.close()


def test_ulysses_sends_half_of_everything_in_two_messages_each_way() -> None:
    on_ranks(2, exchanged)
