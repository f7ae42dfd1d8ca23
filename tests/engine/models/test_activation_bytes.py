"""What one block of the real parallel layers keeps for its backward, by unique storage, parameters left out:
the published closed forms, and ours to the byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from half_models import to_halves
from ranks import on_ranks
from stretto import Layout
from stretto.engine import flex
from stretto.engine.models.build import build
from stretto.engine.models.causal import choose_kernel
from stretto.engine.models.language import LanguageModel
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.parallel.expert.auxiliary import Auxiliary, bind_auxiliary
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import parallelize
from stretto.engine.parallel.recompute import MODES, recompute_blocks
from stretto.engine.parallel.tensor.dropout import DropoutKeys, key_dropout
from stretto.engine.parallel.tensor.norm import use_memory_efficient_norms
from stretto.job.attention import AttentionKernel, AttentionShape, ContextKind
from stretto.job.experts import ExpertShape
from stretto.job.families import Family
from stretto.job.flops import Recompute
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.published_activations import published_formula
from stretto.planner.memory.layer import layer_saved, total

SEQUENCE, BATCH = 64, 2
# wide enough for what papers leave out, the statistics of norms, to be less than 1% of the rest
GPT = ModelShape(family="gpt", layers=1, hidden=256, heads=4, vocab=24, sequence=SEQUENCE, dropout=0.1)
LLAMA = ModelShape(
    family="llama", layers=1, hidden=128, heads=8, kv_heads=4, ffn=192, vocab=24, sequence=SEQUENCE
)
ATTENTION: tuple[AttentionKernel, ...] = ("auto", "explicit")
CONTEXTS: tuple[ContextKind, ...] = ("ring", "ulysses")
Cases = list[tuple[ModelShape, ComputeConfig]]
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def saved_bytes(run: Callable[[], Any], parameters: set[int]) -> int:
    """Bytes that autograd keeps: each storage once, none of `parameters`, no tables of rotary positions."""
    seen = dict[int, Tensor]()

    def pack(t: Tensor) -> Tensor:
        at = t.untyped_storage().data_ptr()
        if at not in parameters:
            seen[at] = t
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        y = run()
    del y
    return sum(t.untyped_storage().nbytes() for t in seen.values() if t.requires_grad or not _table(t))


def _table(t: Tensor) -> bool:
    """True if this is a table of rotary positions, which all microbatches share."""
    return t.dim() == 2 and t.shape[1] == LLAMA.head_dim // 2 and len(t) <= SEQUENCE


def expected(shape: ModelShape, compute: ComputeConfig) -> int:
    return total(layer_saved("block", shape, compute))


def parallel_model(shape: ModelShape, compute: ComputeConfig, mesh: Mesh) -> LanguageModel:
    """This rank's share of the model, in training."""
    torch.manual_seed(1)
    model, keys = build(shape), DropoutKeys(2)
    keys.samples = range(compute.batch)
    choose_kernel(model, compute.attention)
    use_memory_efficient_norms(model)
    key_dropout(model, keys)
    job = Job(
        shape=shape,
        layout=mesh.layout,
        sequence=compute.sequence,
        sequence_parallel=compute.sequence_parallel,
        context=compute.context,
        vocab_multiple=compute.vocab_multiple,
    )
    parallelize(model, sharding_plan(job), mesh)
    if compute.element == 2:
        to_halves(model)
    else:
        model.to(DTYPES[compute.element])
    bind_auxiliary(model, Auxiliary(torch.device("cpu")))
    recompute_blocks(list(model.blocks), [compute.recompute], mesh, compute.shard_inputs)
    return model


def measured(shape: ModelShape, compute: ComputeConfig, mesh: Mesh) -> int:
    """Bytes that this rank's share of one block keeps."""
    block = parallel_model(shape, compute, mesh).blocks[0]
    x = torch.randn(
        compute.batch, compute.shard // compute.batch, shape.hidden, dtype=DTYPES[compute.element]
    )
    x.requires_grad_()
    return saved_bytes(lambda: block(x * 1.0), storages(block))


def measured_ends(shape: ModelShape, compute: ComputeConfig, mesh: Mesh) -> tuple[int, int]:
    """Bytes that the embedding keeps, and those of head and loss; token ids and positions left out."""
    model = parallel_model(shape, compute, mesh)
    length = compute.tokens // compute.batch
    ids = torch.randint(shape.vocab, (compute.batch, length))
    targets = torch.randint(shape.vocab, (compute.batch, length))
    x = torch.randn(
        compute.batch, compute.shard // compute.batch, shape.hidden, dtype=DTYPES[compute.element]
    )
    x.requires_grad_()
    first = saved_bytes(lambda: model.embed(ids), storages(model))
    batch = {targets.untyped_storage().data_ptr()}
    return first, saved_bytes(lambda: model.loss(model.head(x * 1.0), targets), storages(model) | batch)


def storages(module: nn.Module) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in module.parameters()}


def published_cases(tp: int) -> list[ComputeConfig]:
    """The rows of table 2 of Korthikanti et al. 2022 for `tp` ranks."""
    cases = list[ComputeConfig]()
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    for sequence_parallel in (False, True) if tp > 1 else (False,):
        for mode in modes:
            cases.append(
                ComputeConfig(
                    batch=BATCH,
                    sequence=SEQUENCE,
                    tp=tp,
                    sequence_parallel=sequence_parallel,
                    attention="explicit",
                    recompute=mode,
                )
            )
    if tp > 1:
        cases.append(replace(cases[2], shard_inputs=True))
    return cases


def other_cases(tp: int) -> Cases:
    """Ours: flash and explicit attention, grouped heads, no dropout, all types."""
    cases = Cases()
    for compute in published_cases(tp):
        for shape in (
            LLAMA,
            replace(LLAMA, kv_heads=1),
            replace(GPT, dropout=0.0),
        ):
            cases.append((shape, replace(compute, attention="auto", element=4)))
            if compute.recompute == "none":
                cases.append((shape, replace(compute, element=8, batch=1)))
                cases.append((shape, replace(compute, attention="auto")))
    return cases


def context_cases(tp: int) -> Cases:
    """Both ways to split the sequence over two ranks, beside everything else."""
    cases = Cases()
    for shape in (GPT, replace(GPT, dropout=0.0), LLAMA, replace(LLAMA, kv_heads=1)):
        for compute in published_cases(tp):
            for context in CONTEXTS:
                for attention in ATTENTION if compute.recompute == "none" else ATTENTION[:1]:
                    cases.append(
                        (shape, replace(compute, cp=2, context=context, attention=attention, element=4))
                    )
        cases += [
            (shape, ComputeConfig(batch=BATCH, sequence=SEQUENCE, tp=tp, cp=2, context=context))
            for context in CONTEXTS
        ]
    return cases


def end_cases(tp: int) -> Cases:
    cases = Cases()
    for shape in (GPT, replace(LLAMA, vocab=33)):
        for element in (2, 4, 8):
            compute = ComputeConfig(batch=BATCH, sequence=SEQUENCE, element=element, tp=tp)
            cases += [(shape, compute), (shape, replace(compute, vocab_multiple=8))]
            if tp > 1:
                cases.append((shape, replace(compute, sequence_parallel=True)))
    return cases


def measure_all(layout: Layout, cases: Cases, ends: Cases) -> tuple[list[int], list[tuple[int, int]]]:
    mesh = Mesh(layout)
    results = [measured(shape, compute, mesh) for shape, compute in cases]
    at_ends = [measured_ends(shape, compute, mesh) for shape, compute in ends]
    mesh.close()
    return results, at_ends


def on_all(layout: Layout, cases: Cases, ends: Cases) -> list[tuple[list[int], list[tuple[int, int]]]]:
    if layout.world == 1:
        return [measure_all(layout, cases, ends)]
    return on_ranks(layout.world, measure_all, layout, cases, ends)


@pytest.mark.parametrize("element", [2, 4])
@pytest.mark.parametrize("special", [AttentionShape(softcap=2.0, window=5), AttentionShape(sinks=True)])
def test_flex_attention(special: AttentionShape, element: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's operator, not compiled, whose backward torch refuses on CPUs."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_compiled", lambda: torch_flex.flex_attention)
    monkeypatch.setattr(flex, "refusal", lambda *_, **__: None)
    shape = replace(LLAMA, attention=special)
    compute = ComputeConfig(batch=BATCH, sequence=SEQUENCE, element=element, attention="flex")
    mask = flex.block_mask(SEQUENCE, special.window, None, torch.device("cpu"))  # all layers have one
    shared = sum(t.nbytes for t in mask.as_tuple() if isinstance(t, Tensor))
    ((bytes_,), _) = measure_all(Layout(), [(shape, compute)], [])
    # compiled code keeps neither the largest scores nor a tensor of the cap
    largest, cap = compute.statistic * BATCH * shape.heads * SEQUENCE, element if special.softcap else 0
    assert bytes_ == expected(shape, compute) + shared + largest + cap


FOUR_RANKS = pytest.mark.slow  # what they keep follows the rules that two ranks show


@pytest.mark.parametrize("tp", [1, 2, pytest.param(4, marks=FOUR_RANKS)])
def test_tensor_and_sequence_parallel(tp: int):
    published = published_cases(tp)
    cases, ends = [(GPT, compute) for compute in published] + other_cases(tp), end_cases(tp)
    for results, at_ends in on_all(Layout(tp=tp), cases, ends):
        for compute, bytes_ in zip(published, results, strict=False):
            closed = published_formula(GPT, compute)
            assert closed is not None
            assert bytes_ == pytest.approx(closed.bytes, rel=0.01), (compute, closed.formula)
        for (shape, compute), bytes_ in zip(cases, results, strict=True):
            assert bytes_ == expected(shape, compute), (shape, compute)
        for (shape, compute), (first, last) in zip(ends, at_ends, strict=True):
            ids = 8 * compute.tokens  # those of the batch
            assert first - ids == total(layer_saved("embed", shape, compute)) - (ids if tp > 1 else 0), (
                shape,
                compute,
            )
            assert last == total(layer_saved("head", shape, compute)), (shape, compute)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=FOUR_RANKS)])
def test_context_parallel(tp: int):
    cases = context_cases(tp)
    for results, _ in on_all(Layout(tp=tp, cp=2), cases, []):
        for (shape, compute), bytes_ in zip(cases, results, strict=True):
            assert bytes_ == expected(shape, compute), (shape, compute)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [replace(GPT, dropout=0.0), LLAMA], ids=["gpt", "llama"])
def test_16_bits_keep_half_of_what_float32_keeps(shape: ModelShape, mode: Recompute):
    """All but the statistics of norms and attention, which are float32 in both; and no copies of weights."""
    compute = ComputeConfig(batch=BATCH, sequence=SEQUENCE, recompute=mode)
    results, mesh = measured(shape, compute, Mesh(Layout())), Mesh(Layout())
    assert results == expected(shape, compute)
    statistics = sum(
        saved.bytes for saved in layer_saved("block", shape, compute) if "statistics" in saved.name
    )
    assert measured(shape, replace(compute, element=4), mesh) == 2 * results - statistics


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("element", [2, 4])
@pytest.mark.parametrize("shared", [0, 64])
def test_experts_within_a_percent(family: Family, element: int, shared: int):
    """Router, copies of tokens, experts, what they made: on one rank, where balance is of no consequence."""
    base = LLAMA if family == "llama" else GPT
    shape = replace(base, moe=ExpertShape(experts=4, top_k=2, shared_ffn=shared))
    compute = ComputeConfig(batch=BATCH, sequence=SEQUENCE, element=element, attention="explicit")
    assert measured(shape, compute, Mesh(Layout())) == pytest.approx(expected(shape, compute), rel=0.01)
