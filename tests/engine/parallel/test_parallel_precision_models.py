"""Whole models with 16-bit weights: near float64 however they are split, with gradients added in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from half_models import KEEP, to_halves
from ranks import on_ranks
from stretto.engine.models.build import build
from stretto.engine.models.causal import choose_kernel
from stretto.engine.models.language import IGNORED, LanguageModel
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.parallel.expert.auxiliary import Auxiliary, bind_auxiliary
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import ShardedParameter, parallelize
from stretto.engine.parallel.recompute import recompute_blocks
from stretto.engine.parallel.tensor import matmul
from stretto.engine.parallel.tensor.linear import AccumulatesOwnGradients, DeferredGradient, run_deferred
from stretto.engine.parallel.tensor.norm import use_memory_efficient_norms
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.engine.pipeline.shared import PartialGradient, sum_partial
from stretto.job.experts import ExpertShape
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout

LENGTH, BATCH = 16, 4
GPT = ModelShape(family="gpt", layers=2, hidden=32, heads=4, vocab=40, sequence=LENGTH, tied=True)
LLAMA = ModelShape(
    family="llama", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=40, sequence=LENGTH
)
EXPERTS = replace(LLAMA, moe=ExpertShape(experts=4, top_k=4, ffn=16, shared_ffn=32))
NOISE = 2.0**-8  # of one rounding to bfloat16


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(12)
    return [tuple(torch.randint(GPT.vocab, (2, BATCH, LENGTH), generator=random)) for _ in range(count)]  # type: ignore[misc]


def initialised(shape: ModelShape, dtype: torch.dtype | None = torch.bfloat16, **how: Any) -> LanguageModel:
    """One process' model as ranks have it; None: in float64."""
    torch.manual_seed(5)
    model = build(shape)
    use_memory_efficient_norms(model)
    parallelize(model, sharding_plan(Job(shape=shape)), Mesh(Layout()))
    bind_auxiliary(model, Auxiliary())
    model.bfloat16().float()  # values that all types hold
    if dtype is None:
        model.double()
    else:
        to_halves(model, dtype, **how)
    return model.train()


def gradients(model: LanguageModel, count: int, scale: float = 0.01) -> dict[str, Tensor]:
    """Sums over microbatches, in float64."""
    for ids, targets in batches(count):
        (scale * model.loss(model(ids), targets)).backward()
    return {n: p.grad.double() / scale for n, p in model.named_parameters() if p.grad is not None}


def error(results: dict[str, Tensor], exact: dict[str, Tensor], part: str = "") -> float:
    """The relative error of the gradients of what has `part` in its name."""
    names = [name for name in exact if part in name]
    rounded, reference = (torch.cat([of[name].flatten() for name in names]) for of in (results, exact))
    return float((rounded - reference).norm() / reference.norm())


def test_gradients_of_many_microbatches_are_added_in_float32() -> None:
    for shape in (GPT, LLAMA, EXPERTS):
        exact = gradients(initialised(shape, None), 8)
        long, short = initialised(shape), initialised(shape, gradients=torch.bfloat16)
        in_float32, in_bfloat16 = gradients(long, 8), gradients(short, 8)
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in long.parameters())
        parts = ["embed", "attn", "norm", "mlp"] + (["router", "experts"] if shape.moe else [])
        for part in parts:
            near, far = error(in_float32, exact, part), error(in_bfloat16, exact, part)
            assert near < 3 * NOISE, (shape.family, part, near)
            assert near < far or part == "router", (shape.family, part, near, far)
        assert error(in_float32, exact) < 0.9 * error(in_bfloat16, exact)


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_training_is_as_in_float32(shape: ModelShape) -> None:
    """With masters in float32, the losses of some steps."""
    curves = list[list[float]]()
    for dtype in (torch.float32, torch.bfloat16):
        model = initialised(shape, dtype)
        masters = [p.detach().float().clone() for p in model.parameters()]
        optimizer, losses = torch.optim.AdamW(masters, lr=3e-3), list[float]()
        for ids, targets in batches(3) * 4:
            loss = model.loss(model(ids), targets) / targets.numel()
            loss.backward()
            losses.append(loss.item())
            for parameter, master in zip(model.parameters(), masters, strict=True):
                master.grad, parameter.grad = parameter.grad, None
            optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(model.parameters(), masters, strict=True):
                    parameter.copy_(master)
        curves.append(losses)
    exact, mixed = torch.tensor(curves[0]), torch.tensor(curves[1])
    assert float(exact[-1]) < 0.9 * float(exact[0]), "it was to learn"
    torch.testing.assert_close(mixed, exact, rtol=2 * NOISE, atol=0)
    assert not torch.equal(mixed, exact)


@pytest.mark.parametrize("shape", [GPT, LLAMA, EXPERTS], ids=["gpt", "llama", "experts"])
def test_float16_needs_and_gets_a_loss_scale(shape: ModelShape) -> None:
    if shape.moe is not None:
        shape = replace(shape, moe=replace(shape.moe, balance=0.0))
    exact = gradients(initialised(shape, None), 1)
    scaled = gradients(initialised(shape, torch.float16), 1, scale=2.0**4)
    lost = gradients(initialised(shape, torch.float16), 1, scale=2.0**-20)
    assert all(bool(g.isfinite().all()) for g in scaled.values())
    assert error(scaled, exact) < 2.0**-8
    assert error(lost, exact) > 4 * error(scaled, exact), "small gradients were to be lost"


def test_patterns_of_parameters_kept_in_float32() -> None:
    """The residual path has the embedding's type whatever is kept, and kept logits are exact."""
    types = list[torch.dtype]()
    for shape in (replace(GPT, tied=False), LLAMA):
        types.clear()
        model = initialised(shape, keep=(*KEEP, "*proj*", "*.bias", "blocks.1.*", "head.*"))
        for block in model.blocks:
            block.register_forward_hook(lambda _m, _x, y: types.append(y.dtype))
        ids, targets = batches(1)[0]
        logits = model(ids)
        assert types == [torch.bfloat16] * 2
        assert logits.dtype == torch.float32
        model.loss(logits, targets).backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        assert (
            error(gradients(initialised(shape, keep=("*",)), 1), gradients(initialised(shape, None), 1))
            < 1e-5
        )


def test_devices_that_sum_in_float32_do(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()

    def product(a: Tensor, b: Tensor) -> Tensor:
        calls.append("product")
        return a.float() @ b.float()

    def add(grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
        calls.append("sum")
        return grad.add_(a.float() @ b.float())

    x, dy = torch.randn(300, 8).bfloat16(), torch.randn(300, 6).bfloat16()
    exact = dy.double().t() @ x.double()
    assert matmul._wide(x.device, x.dtype) is None
    monkeypatch.setattr(matmul, "_wide_product", product)
    monkeypatch.setattr(matmul, "_wide_sum", add)
    for way, used in (("sum", ["product", "sum"]), ("product", ["product", "product"]), (None, [])):
        monkeypatch.setattr(matmul, "_wide", lambda _device, _dtype, way=way: way)
        calls.clear()
        first = matmul.add_weight_gradient(None, dy, x, torch.float32)
        again = matmul.add_weight_gradient(first, dy, x, torch.float32)
        assert again is first
        assert first.dtype == torch.float32
        assert calls == used
        within = 1e-6 if way else NOISE
        assert float((first - 2 * exact).norm() / exact.norm()) < 2 * within


# ---------------------------------------------------------------------- on ranks


@dataclass(frozen=True)
class Case:
    shape: ModelShape
    layout: Layout
    sequence_parallel: bool = False
    context: str = "ring"
    recompute: str = "none"
    later: bool = False
    explicit: bool = False


def cases() -> Iterator[Case]:
    tp, cp = Layout(tp=2), Layout(cp=2)
    yield Case(GPT, tp)
    yield Case(GPT, tp, True, later=True, explicit=True)
    yield Case(LLAMA, tp, True, recompute="full")
    yield Case(LLAMA, tp, later=True, recompute="selective")
    yield Case(GPT, cp, recompute="full")
    yield Case(LLAMA, cp, context="ulysses", later=True)
    yield Case(EXPERTS, tp, True)
    yield Case(EXPERTS, Layout(dp=2, ep=2), later=True)


def run(case: Case, mesh: Mesh, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, ShardedParameter]]:
    """This rank's gradients of two microbatches, float32 for 16 bits."""
    torch.manual_seed(5)
    model = build(case.shape)
    use_memory_efficient_norms(model)
    model.bfloat16().float()
    if case.explicit:
        choose_kernel(model, "explicit")
    job = Job(
        shape=case.shape,
        layout=mesh.layout,
        sequence=LENGTH,
        sequence_parallel=case.sequence_parallel,
        context=case.context,
    )
    table = parallelize(model, sharding_plan(job), mesh)
    bind_auxiliary(model, Auxiliary())
    model.double() if dtype == torch.float64 else to_halves(model, dtype)
    recompute_blocks(list(model.blocks), [case.recompute] * case.shape.layers, mesh)  # type: ignore[list-item]
    queue: list[DeferredGradient] | None = [] if case.later else None
    for layer in model.modules():
        if isinstance(layer, AccumulatesOwnGradients):
            layer.queue = queue
    split = SequenceSplit.of(mesh, LENGTH, case.sequence_parallel)
    for ids, targets in batches(2):
        mine = slice(None) if mesh.size("dp") == 1 else slice(2 * mesh.index("dp"), 2 * mesh.index("dp") + 2)
        x, y = split.take(ids[mine], 1, 0), split.take(targets[mine], 1, IGNORED)
        (0.01 * model.loss(model(x), y)).backward()
        if queue is not None:
            with torch.no_grad():
                run_deferred(queue)
    parameters = dict(model.named_parameters())
    sum_partial([PartialGradient(parameters[n], shared) for n, s in table.items() for shared in s.shared])
    for name, parameter in parameters.items():
        group = mesh.copies(table[name].placed.over)
        if group is not None:
            dist.all_reduce(parameter.grad, group=group)
    return {n: p.grad for n, p in parameters.items() if p.grad is not None}, table


ByShape = dict[str, dict[str, Tensor]]  # gradients by shape and name


def every_case(exact: ByShape, alone: ByShape) -> list[tuple[str, float, float]]:
    """The error of each case's gradients on this rank, and that of one process."""
    results = list[tuple[str, float, float]]()
    meshes = {case.layout: Mesh(case.layout) for case in cases()}
    for case in cases():
        key = repr(case.shape)
        grads, table = run(case, meshes[case.layout], torch.bfloat16)
        assert all(g.dtype == torch.float32 for g in grads.values())
        sharded, reference, one_process = list[Tensor](), list[Tensor](), list[Tensor]()
        for name, grad in grads.items():
            for piece in table[name].placed.pieces:
                sharded.append(piece.of_local(grad).double().flatten() / 0.01)
                reference.append(piece.of_full(exact[key][name]).flatten())
                one_process.append(piece.of_full(alone[key][name]).flatten())
        size = torch.cat(reference).norm()
        wrong, wrong_alone = (
            float((torch.cat(of) - torch.cat(reference)).norm() / size) for of in (sharded, one_process)
        )
        results.append((repr(case), wrong, wrong_alone))
    for mesh in meshes.values():
        mesh.close()
    return results


def test_split_models_are_as_near_to_float64_as_one_process() -> None:
    """Sums over ranks are rounded to bfloat16 once more than in one process."""
    shapes = {repr(case.shape): case.shape for case in cases()}
    exact = {key: gradients(initialised(shape, None), 2) for key, shape in shapes.items()}
    alone = {key: gradients(initialised(shape), 2) for key, shape in shapes.items()}
    for rank in on_ranks(2, every_case, exact, alone):
        for case, wrong, alone in rank:
            assert wrong < 1.5 * alone + NOISE / 2, (case, wrong, alone)
            assert wrong > 1e-4, "this was not in 16 bits"
