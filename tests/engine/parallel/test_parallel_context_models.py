"""Whole language models whose sequence is split over cp, beside tp with and without sequence parallelism:
loss and every gradient are the plain model's, in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import on_ranks
from stretto.engine.documents import DocumentStarts, Packing, share_packing
from stretto.engine.models.build import build
from stretto.engine.models.language import IGNORED, LanguageModel
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import ShardedParameter, parallelize
from stretto.engine.parallel.recompute import recompute
from stretto.engine.parallel.tensor.dropout import DropoutKeys, key_dropout
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.engine.pipeline.shared import PartialGradient, sum_partial
from stretto.job.attention import RopeScaling
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout

GPT = ModelShape(family="gpt", layers=2, hidden=16, heads=4, vocab=22, sequence=20, dropout=0.3, tied=True)
LLAMA = ModelShape(family="llama", layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=22, sequence=20)

DYNAMIC = RopeScaling(type="dynamic", factor=4.0, original_positions=8)

SAMPLES = (7, 8)


@dataclass(frozen=True)
class Case:
    shape: ModelShape
    method: str
    length: int
    sequence_parallel: bool
    recompute: bool = False
    packed: bool = False  # with several documents in a sample


def cases(tp: int) -> Iterator[Case]:
    for method in ("ring", "ulysses"):
        for sp in (False, True) if tp > 1 else (False,):
            yield Case(GPT, method, 8 * tp, sp)
            yield Case(GPT, method, 9, sp, recompute=True)
            yield Case(LLAMA, method, 9, sp)
            yield Case(replace(LLAMA, kv_heads=1), method, 14, sp, recompute=True)
            yield Case(GPT, method, 13, sp, recompute=True, packed=True)
            yield Case(replace(LLAMA, kv_heads=1, rope=DYNAMIC), method, 14, sp, packed=True)


def plain_model(shape: ModelShape) -> LanguageModel:
    torch.manual_seed(5)
    model = build(shape).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


def documents_of(case: Case) -> DocumentStarts | None:
    """Documents of one token, of some tokens, and of all others, different in each sample."""
    if not case.packed:
        return None
    begins = torch.zeros(2, case.length, dtype=torch.int64)
    for row, firsts in zip(begins, ([5, 6, 8], [1, case.length // 2]), strict=True):
        row[firsts] = torch.tensor(firsts)
    return DocumentStarts(begins.cummax(1).values)


def step(
    model: LanguageModel, ids: Tensor, targets: Tensor, keys: DropoutKeys, packing: Packing, case: Case
) -> Tensor:
    keys.samples, packing.documents = SAMPLES, documents_of(case)
    loss = model.loss(model(ids), targets)
    keys.samples, packing.documents = (), None  # another microbatch may come before the backward
    return loss


def check(case: Case, mesh: Mesh) -> None:
    keys, packing = DropoutKeys(3), Packing()
    plain, sharded = plain_model(case.shape), plain_model(case.shape)
    for model in (plain, sharded):
        key_dropout(model, keys)
        share_packing(model, packing)
    job = Job(
        shape=case.shape,
        layout=mesh.layout,
        sequence=case.length,
        sequence_parallel=case.sequence_parallel,
        context=case.method,
        vocab_multiple=3,
    )
    table = parallelize(sharded, sharding_plan(job), mesh)
    if case.recompute:
        for block in sharded.blocks:
            recompute(block.get_submodule("attn.core"))
    torch.manual_seed(12)
    ids, targets = torch.randint(case.shape.vocab, (2, 2, case.length))
    targets = targets.masked_fill(torch.rand(targets.shape) < 0.2, IGNORED)
    split = SequenceSplit.of(mesh, case.length, case.sequence_parallel)
    there = step(plain, ids, targets, keys, packing, case)
    here = step(sharded, split.take(ids, 1, 0), split.take(targets, 1, IGNORED), keys, packing, case)
    total = here.detach().clone()
    dist.all_reduce(total, group=mesh.group("cp"))
    torch.testing.assert_close(total, there.detach(), rtol=1e-12, atol=0, msg=lambda m: f"{case}: {m}")
    (0.1 * there).backward()
    if case.recompute:  # what runs again draws again: the pipeline says for whom before a backward too
        keys.samples, packing.documents = SAMPLES, documents_of(case)
    (0.1 * here).backward()
    compare(case, plain, sharded, table, mesh)


def compare(
    case: Case, plain: LanguageModel, sharded: LanguageModel, table: dict[str, ShardedParameter], mesh: Mesh
) -> None:
    parameters = dict(sharded.named_parameters())
    sum_partial([PartialGradient(parameters[n], shared) for n, s in table.items() for shared in s.shared])
    for name, parameter in plain.named_parameters():
        grad = parameters[name].grad
        assert grad is not None
        assert parameter.grad is not None
        dist.all_reduce(grad, group=mesh.group("cp"))
        for piece in table[name].placed.pieces:
            wanted = piece.of_full(parameter.grad)
            wrong = float((piece.of_local(grad) - wanted).abs().max() / parameter.grad.abs().max())
            assert wrong < 1e-12, f"{case}: gradient of {name}: {wrong:.1e}"


def every_case(tp: int, cp: int, some: slice) -> None:
    mesh = Mesh(Layout(tp=tp, cp=cp))
    for case in list(cases(tp))[some]:
        check(case, mesh)
    mesh.close()


@pytest.mark.parametrize(
    ("tp", "cp", "first", "step"),
    [(1, 2, 1, 2), (2, 2, 0, 5), *(pytest.param(tp, 2, 0, 1, marks=pytest.mark.slow) for tp in (1, 2))],
)
def test_models_split_over_contexts_equal_the_plain_ones(tp: int, cp: int, first: int, step: int) -> None:
    on_ranks(tp * cp, every_case, tp, cp, slice(first, None, step))
