"""FlexAttention beside the formula written out. On CPUs torch refuses its backward and has no kernel that
trains; but the operator itself can be differentiated there. So these tests lift torch's refusal, and most of
them leave out the compiler: masks, scores, sinks and choices are the product's own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stretto.engine import flex
from stretto.engine.documents import DocumentStarts
from stretto.engine.kernels import ScoreOptions
from stretto.engine.models import causal
from stretto.engine.models.causal import CausalAttention
from stretto.errors import StrettoError

CPU = torch.device("cpu")


@pytest.fixture
def trains(monkeypatch: pytest.MonkeyPatch) -> Generator[list[dict[str, Any]]]:
    """FlexAttention trains on the CPU, uncompiled; the calls of it."""
    calls = list[dict[str, Any]]()

    def uncompiled(*tensors: Tensor, **named: Any) -> Any:
        calls.append(named)
        return torch_flex.flex_attention(*tensors, **named)

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # the operator as it is
    monkeypatch.setattr(flex, "_compiled", lambda: uncompiled)
    flex.refusal.cache_clear()
    yield calls
    flex.refusal.cache_clear()


def documents(begins: list[list[int]], n: int) -> DocumentStarts:
    """Documents of samples of n tokens, which begin at these positions and at 0."""
    rows = torch.zeros(len(begins), n, dtype=torch.int64)
    for row, of in zip(rows, begins, strict=True):
        for at in sorted(of):
            row[at:] = at
    return DocumentStarts(rows)


def core(
    kernel: Any, window: int | None, softcap: float | None, of: DocumentStarts | None
) -> CausalAttention:
    attention = CausalAttention(0.0, window=window, softcap=softcap, scale=0.3)
    attention.kernel, attention.packing.documents = kernel, of
    return attention


def drawn(n: int, kv_heads: int, dv: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k and v of 2 samples with 4 heads, sinks, and the gradient of the output."""
    random = torch.Generator().manual_seed(n)
    sizes = ((2, 4, n, 8), (2, kv_heads, n, 8), (2, kv_heads, n, dv), (4,), (2, 4, n, dv))
    return [2 * torch.randn(size, generator=random, dtype=dtype) for size in sizes]


def trained(module: CausalAttention, tensors: list[Tensor], sinks: bool) -> list[Tensor]:
    """Output and gradients."""
    leaves = [t.clone().requires_grad_() for t in tensors[: 4 if sinks else 3]]
    y = module(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, tensors[4])]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.sampled_from([33, 129, 300]))
    begins = st.lists(st.integers(1, n - 1), max_size=4)
    return {
        "n": n,
        "window": draw(st.none() | st.integers(1, n + 3)),
        "softcap": draw(st.sampled_from([None, 1.5])),
        "sinks": draw(st.booleans()),
        "begins": draw(st.none() | st.tuples(begins, begins)),
        "kv_heads": draw(st.sampled_from([1, 2, 4])),
        "dv": draw(st.sampled_from([8, 4])),
    }


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_it_is_the_formula_with_its_gradients(trains: list[Any], case: dict[str, Any]) -> None:
    of = None if case["begins"] is None else documents(list(case["begins"]), case["n"])
    tensors, before = drawn(case["n"], case["kv_heads"], case["dv"]), len(trains)
    by_flex, wanted = (
        trained(core(kernel, case["window"], case["softcap"], of), tensors, case["sinks"])
        for kernel in ("flex", "sdpa")
    )
    assert len(trains) > before
    torch.testing.assert_close(by_flex, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", [(300, None, None), (1, 1, None), (257, 130, [[], [5, 6, 255]])])
@settings(max_examples=25)
@given(drawn=st.data())
def test_blocks_are_those_of_torch(case: tuple[Any, ...], drawn: st.DataObject) -> None:
    n, window, begins = case
    if n > 1:
        n = drawn.draw(st.integers(2, 600))
        window = drawn.draw(st.none() | st.integers(1, n + 200))
        starts = st.lists(st.integers(1, n - 1), max_size=4)
        begins = drawn.draw(st.none() | st.lists(starts, min_size=2, max_size=2))
    of = None if begins is None else documents(begins, n)
    mask = flex.block_mask(n, window, of, CPU)
    first = torch.zeros(1, n) if of is None else of.begins

    def seen(b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = torch.ones_like(i, dtype=torch.bool) if window is None else i - j < window
        return (j <= i) & near & (j >= first[b, i])

    torch_mask = torch_flex.create_block_mask(seen, len(first), None, n, n, device="cpu")
    for name in ("kv", "full_kv", "q", "full_q"):
        count, columns = (getattr(mask, f"{name}_{part}") for part in ("num_blocks", "indices"))
        wanted = getattr(torch_mask, f"{name}_num_blocks")
        torch.testing.assert_close(count, wanted)
        rows = zip(count.flatten(), columns.flatten(0, -2), strict=True)
        others = zip(wanted.flatten(), getattr(torch_mask, f"{name}_indices").flatten(0, -2), strict=True)
        assert [row[:size].tolist() for size, row in rows] == [row[:size].tolist() for size, row in others]


def test_masks_are_shared_by_layers_and_microbatches() -> None:
    first_documents, other = documents([[3], [9]], 20), documents([[4], []], 20)
    masks = [
        flex.block_mask(20, window, of, CPU)
        for of in (first_documents, first_documents, other)
        for window in (None, 5, 5)
    ]
    assert len({id(mask) for mask in masks}) == 4
    assert flex.block_mask(20, 7, None, CPU) is flex.block_mask(20, 7, None, CPU)
    assert flex.block_mask(20, 20, None, CPU) is flex.block_mask(20, None, None, CPU)


def test_what_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes it on accelerators, in training, for what would be written out."""
    monkeypatch.setattr(flex, "refusal", lambda *_, **__: None)

    def by_flex(kernel: Any, training: bool = True, **scores: Any) -> bool:
        q, k, v, sinks, _ = drawn(12, 2, scores.pop("dv", 8))
        module = core(kernel, scores.get("window"), scores.get("softcap"), scores.get("of"))
        return module.train(training)._by_flex(q, k, v, sinks if scores.get("sinks") else None)

    capped, of = {"softcap": 2.0}, documents([[4], []], 12)
    assert by_flex("flex")
    assert not by_flex("flex", training=False)
    assert not by_flex("sdpa", **capped)
    assert not by_flex("auto", **capped)  # no accelerator
    monkeypatch.setattr(causal, "on_accelerator", lambda _: True)
    assert by_flex("auto", **capped)
    assert by_flex("auto", of=of, dv=4)
    assert not by_flex("auto", training=False, **capped)
    assert not by_flex("auto")
    assert not by_flex("auto", of=of, window=5, sinks=True)  # a fused kernel has all of these
    assert not by_flex("auto", dv=4, window=12)


def test_cpus_are_refused_in_words() -> None:
    flex.refusal.cache_clear()
    module = core("flex", None, None, None)
    with pytest.raises(StrettoError, match=r"train\.attention is flex, .* on cpu with torch 2\."):
        trained(module, drawn(9, 2, 8), sinks=False)
    with pytest.raises(StrettoError, match="does not support backward on CPU") as raised:
        flex.check_trains_on_host()
    assert "train.attention=auto" in str(raised.value.hint)


def wrong(*tensors: Tensor, **named: Any) -> Any:
    """Without the cap."""
    return torch_flex.flex_attention(*tensors, **{**named, "score_mod": None})


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no compiler. It is gone.")


@pytest.mark.parametrize(("kernel", "why"), [(wrong, "its output is not"), (broken, "Error: no compiler$")])
def test_a_kernel_that_fails_its_trial_is_not_used(
    trains: list[Any], monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Any], why: str
) -> None:
    monkeypatch.setattr(causal, "on_accelerator", lambda _: True)
    monkeypatch.setattr(flex, "_compiled", lambda: kernel)
    tensors = drawn(33, 2, 8)
    with pytest.warns(UserWarning, match=f"written out, since FlexAttention fails its trial: .*{why}"):
        by_auto = trained(core("auto", None, 1.5, None), tensors, sinks=True)
    wanted = trained(core("sdpa", None, 1.5, None), tensors, sinks=True)
    torch.testing.assert_close(by_auto, wanted, rtol=0.0, atol=0.0)
    with pytest.raises(StrettoError, match=why.replace("$", "")):
        trained(core("flex", None, 1.5, None), tensors, sinks=True)


@pytest.mark.slow
def test_it_is_compiled_once_for_all_layers_and_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import lookup_backend

    graphs = list[Any]()

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex.compiler, "BACKEND", backend)
    monkeypatch.setattr(flex, "refusal", lambda *_, **__: None)
    flex._compiled.cache_clear()
    tensors = drawn(140, 2, 8)
    layers = [core("flex", window, 1.5, None) for window in (5, None, 5, None)]
    for of in (documents([[3], [9, 130]], 140), documents([[], [100]], 140)):
        for layer in layers:
            layer.packing.documents = of
            by_flex = trained(layer, tensors, sinks=True)
            wanted = trained(core("sdpa", layer.window, 1.5, of), tensors, sinks=True)
            torch.testing.assert_close(by_flex, wanted, rtol=1e-10, atol=1e-10)
    assert len(graphs) == 1  # a window of documents is part of their tensor
    for layer in layers:
        layer.packing.documents = None
        trained(layer, tensors, sinks=True)
    assert len(graphs) == 3
    shapes = list[tuple[int, ...]]()
    with saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        y = layers[0](*(t.requires_grad_() for t in tensors[:3]))
    q, k = (2, 4, 140, 8), (2, 2, 140, 8)
    assert sorted(shape for shape in shapes if shape[0] == 2) == sorted([q, k, k, tuple(y.shape), q[:3]])
    flex._compiled.cache_clear()


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "options"),
    [
        ((9, 0), torch.bfloat16, 128, {"bwd_num_warps": 8}),
        ((8, 0), torch.float16, 64, {"bwd_num_warps": 8}),
        ((9, 0), torch.bfloat16, 32, None),
        ((9, 0), torch.float32, 128, {"fwd_num_warps": 8}),
        ((9, 0), torch.float32, 256, None),
        ((0, 0), torch.bfloat16, 128, None),
    ],
)
def test_kernels_of_wide_heads_on_gpus_use_eight_warps(
    trains: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    width: int,
    options: dict[str, int] | None,
) -> None:
    monkeypatch.setattr(flex, "compute_capability", lambda _: capability)
    q = torch.zeros(1, 1, 4, width, dtype=dtype)
    flex.attend(q, q, q, ScoreOptions(1.0))
    assert [call["kernel_options"] for call in trains] == [options]
