"""Language models split along the sequence, on real ranks in float64: blocks and whole models beside plain
ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import on_ranks
from stretto.engine.models.build import build
from stretto.engine.models.language import IGNORED, LanguageModel
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.parallel.collectives import join, start_gather
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import ShardedParameter, parallelize
from stretto.engine.parallel.styles import ColumnParallel, ParallelStyle, RowParallel
from stretto.engine.parallel.tensor.dropout import DropoutKeys, key_dropout
from stretto.engine.parallel.tensor.linear import AccumulatesOwnGradients, DeferredGradient
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.engine.parallel.traffic import traffic
from stretto.engine.pipeline.shared import PartialGradient, sum_partial
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout

GPT = ModelShape(family="gpt", layers=1, hidden=16, heads=4, vocab=22, sequence=8)
DROPOUT = replace(GPT, dropout=0.3, tied=True)
LLAMA = ModelShape(family="llama", layers=1, hidden=16, heads=4, kv_heads=4, ffn=24, vocab=22, sequence=8)
GROUPED = replace(LLAMA, kv_heads=2)
ONE_KEY = replace(LLAMA, kv_heads=1, tied=True)


@dataclass(frozen=True)
class Case:
    shape: ModelShape
    samples: int = 3
    deferred: bool = False
    ordered: bool = True
    length: int = 8


BLOCKS = [
    Case(GPT),
    Case(GPT, samples=1, deferred=True),
    Case(DROPOUT, deferred=True, ordered=False),
    Case(DROPOUT, samples=1),
    Case(LLAMA, ordered=False),
    Case(GROUPED, deferred=True),
    Case(ONE_KEY, ordered=False, deferred=True),
    Case(replace(GPT, hidden=32, ffn=8)),  # where the narrower side is the other one
    Case(replace(GPT, hidden=32, ffn=8), ordered=False, deferred=True),
]
MODELS = [
    Case(GPT),
    Case(DROPOUT, deferred=True, ordered=False),
    Case(ONE_KEY, ordered=False),
    Case(replace(GPT, tied=True), length=7, deferred=True),
    Case(GROUPED, length=5, ordered=False),
    Case(DROPOUT, length=6),
]


def plain_model(shape: ModelShape) -> LanguageModel:
    torch.manual_seed(5)
    model = build(shape).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)  # norms and biases too
    return model


def plan_of(case: Case, mesh: Mesh) -> dict[str, ParallelStyle]:
    job = Job(
        shape=case.shape,
        layout=mesh.layout,
        sequence=case.length,
        sequence_parallel=True,
        vocab_multiple=3,
    )
    plan = sharding_plan(job)
    for name, style in plan.items():
        if ".mlp." in name and isinstance(style, ColumnParallel | RowParallel):
            plan[name] = replace(style, ordered=case.ordered)
    return plan


class Both:
    """A case's plain model and the split one, with the same values and dropout."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        self.case, self.mesh = case, mesh
        self.plain, self.sharded = plain_model(case.shape), plain_model(case.shape)
        self.keys = DropoutKeys(3)
        self.keys.samples = range(7, 7 + case.samples)
        for model in (self.plain, self.sharded):
            key_dropout(model, self.keys)
        self.table: dict[str, ShardedParameter] = parallelize(self.sharded, plan_of(case, mesh), mesh)
        self.split = SequenceSplit.of(mesh, case.length, sequence_parallel=True)
        self.queue: list[DeferredGradient] = []
        if case.deferred:
            for layer in self.sharded.modules():
                if isinstance(layer, AccumulatesOwnGradients):
                    layer.queue = self.queue

    def finish(self) -> None:
        """Run the schedule's actions after the backward: W, and the sum of partial gradients."""
        if self.case.deferred:
            assert self.queue, "no weight gradient was put off"
        with torch.no_grad():
            for at, entry in enumerate(self.queue):  # the next starts before this one is added up
                if not at:
                    entry.start()
                if at + 1 < len(self.queue):
                    self.queue[at + 1].start()
                entry.finish()
        parameters = dict(self.sharded.named_parameters())
        sum_partial(
            [
                PartialGradient(parameters[name], shared)
                for name, sharded in self.table.items()
                if parameters[name].grad is not None
                for shared in sharded.shared
            ]
        )

    def compare_gradients(self, within: str = "") -> None:
        wanted, seen = dict(self.plain.named_parameters()), 0
        for name, parameter in self.sharded.named_parameters():
            if not name.startswith(within):
                continue
            full, seen = wanted[name].grad, seen + 1
            assert full is not None
            assert parameter.grad is not None, f"{self.case}: {name} has no gradient"
            for piece in self.table[name].placed.pieces:
                close(piece.of_local(parameter.grad), piece.of_full(full), f"{self.case}: gradient of {name}")
        assert seen

    def gather(self, shard: Tensor) -> Tensor:
        """Every rank's shard [b, s/t, ...], together."""
        pieces, work = start_gather(shard.detach(), self.mesh.group("tp"))
        work.wait()
        return join(pieces, 1)


def close(computed: Tensor, plain: Tensor, label: str) -> None:
    torch.testing.assert_close(computed, plain, rtol=1e-12, atol=1e-13, msg=lambda text: f"{label}: {text}")


def block(case: Case, mesh: Mesh) -> None:
    both = Both(case, mesh)
    torch.manual_seed(11)
    x, dy = torch.randn(2, case.samples, 8, case.shape.hidden, dtype=torch.float64)
    there, here = x.clone().requires_grad_(), x[:, both.split.shard].clone().requires_grad_()
    y, output = both.plain.blocks[0](there), both.sharded.blocks[0](here)
    close(both.gather(output), y, f"{case}: output")
    y.backward(dy)
    output.backward(dy[:, both.split.shard])
    both.finish()
    assert there.grad is not None
    assert here.grad is not None
    close(both.gather(here.grad), there.grad, f"{case}: input gradient")
    both.compare_gradients("blocks.0")


def model(case: Case, mesh: Mesh) -> None:
    both = Both(case, mesh)
    torch.manual_seed(12)
    ids, targets = torch.randint(case.shape.vocab, (2, case.samples, case.length))
    targets = targets.masked_fill(torch.rand(targets.shape) < 0.2, IGNORED)
    loss = both.plain.loss(both.plain(ids), targets)
    sharded_loss = both.sharded.loss(
        both.sharded(both.split.take(ids, 1, 0)), both.split.take(targets, 1, IGNORED)
    )
    close(sharded_loss, loss, f"{case}: loss")
    (0.1 * loss).backward()
    (0.1 * sharded_loss).backward()
    both.finish()
    both.compare_gradients()


def every_case() -> None:
    mesh = Mesh(Layout(tp=dist.get_world_size()))
    for case in BLOCKS:
        block(case, mesh)
    for case in MODELS:
        model(case, mesh)
    mesh.close()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_models_split_along_the_sequence_equal_the_plain_ones(ranks):
    on_ranks(ranks, every_case)


# ---------------------------------------------------------------------- what is kept, and what is sent


def saved_sizes(run: nn.Module, x: Tensor) -> set[int]:
    """Bytes of the different memories that the backward will need, parameters left out."""
    results = dict[int, int]()
    mine = {p.untyped_storage().data_ptr() for p in run.parameters()}

    def pack(t: Tensor) -> Tensor:
        at = t.untyped_storage().data_ptr()
        if at not in mine:
            results[at] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(x)
    return set(results.values())


def volumes() -> None:
    """One block, forward and backward, plain tensor parallel beside sequence parallel."""
    n, b, s, h = dist.get_world_size(), 2, 8, GPT.hidden
    mesh = Mesh(Layout(tp=n))
    shard = b * s * h * 8 * (n - 1) // n  # of one [b, s, h] in float64, what one collective moves
    sent = {}
    for sequence_parallel in (False, True):
        net = plain_model(GPT)
        job = Job(shape=GPT, layout=mesh.layout, sequence_parallel=sequence_parallel)
        parallelize(net, sharding_plan(job), mesh)
        x = torch.randn(b, s // n if sequence_parallel else s, h, dtype=torch.float64).requires_grad_()
        with traffic() as sent[sequence_parallel]:
            net.blocks[0](x).sum().backward()
    plain, in_sequence = sent[False], sent[True]
    assert plain.bytes == {"all-reduce": 4 * 2 * shard}
    assert in_sequence.bytes == {"all-gather": 4 * shard, "reduce-scatter": 4 * shard, "re-gather": 2 * shard}
    assert in_sequence.total - in_sequence.bytes["re-gather"] == plain.total
    assert in_sequence.calls == {"all-gather": 4, "reduce-scatter": 4, "re-gather": 2}
    mesh.close()


def only_shards_are_kept() -> None:
    n, b, s, h = dist.get_world_size(), 2, 8, GPT.hidden
    mesh = Mesh(Layout(tp=n))
    net = plain_model(GPT)
    parallelize(net, sharding_plan(Job(shape=GPT, layout=mesh.layout, sequence_parallel=True)), mesh)
    for layer in (net.blocks[0].attn.qkv, net.blocks[0].mlp.up):
        x = torch.randn(b, s // n, h, dtype=torch.float64).requires_grad_()
        assert saved_sizes(layer, x) == {b * s // n * h * 8}, "the gathered input is kept"
    mesh.close()


def both_counts() -> None:
    volumes()
    only_shards_are_kept()


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_parallelism_sends_as_much_as_tensor_parallelism_plus_regathers(ranks):
    on_ranks(ranks, both_counts)
