"""Mixtures of experts over ranks: outputs, gradients and losses are those of the plain layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import on_ranks
from stretto import Layout
from stretto.cost.experts import ExpertShape
from stretto.cost.shape import ModelShape
from stretto.models import gpt, llama
from stretto.models.moe import MoE
from stretto.optim.norm import GradientNorm
from stretto.parallel.auxiliary import Auxiliary, bind_auxiliary
from stretto.parallel.dropout import DropoutKeys, key_dropout
from stretto.parallel.experts import ExpertParallel, ExpertWeights
from stretto.parallel.mesh import Mesh
from stretto.parallel.parallelize import Sharded, parallelize
from stretto.parallel.sequence import SequenceSplit
from stretto.parallel.styles import Column, Replicate, Row, SplitDropout, Style

SAMPLES, SCALE = 3, 0.37  # samples of a replica, the gradient of the losses

LLAMA = ModelShape(
    family="llama",
    layers=1,
    hidden=16,
    heads=4,
    ffn=24,
    vocab=37,
    sequence=8,
    moe=ExpertShape(4, top_k=2, ffn=8, balance=0.02, z=0.003),
)
GPT = ModelShape(
    family="gpt",
    layers=1,
    hidden=16,
    heads=4,
    ffn=24,
    vocab=37,
    sequence=8,
    dropout=0.3,
    moe=ExpertShape(4, top_k=3, shared_ffn=12, score="sigmoid", normalise=False, capacity=0.8),
)


def other(shape: ModelShape, **fields: Any) -> ModelShape:
    assert shape.moe is not None
    return replace(shape, moe=replace(shape.moe, **fields))


TIGHT = other(LLAMA, capacity=0.5, drop="position", score="sigmoid")
SHARED = other(LLAMA, shared_ffn=12, capacity=1.1, top_k=1)


@dataclass(frozen=True)
class Case:
    layout: Layout
    shape: ModelShape = LLAMA
    length: int = 8
    sequence: bool = False

    @property
    def expert_tp(self) -> int:
        return self.layout.tp if self.layout.expert_tp is None else self.layout.expert_tp


def plan_of(case: Case) -> dict[str, Style]:
    sp, moe = case.sequence, case.shape.moe
    assert moe is not None
    plan: dict[str, Style] = {
        "mlp": ExpertParallel(case.length, sequence=sp),
        "mlp.router": Replicate(sequence=True),
        "mlp.experts": ExpertWeights(case.expert_tp),
        "mlp.drop": SplitDropout(sequence=(1, case.length, sp)),
    }
    if moe.shared_ffn:
        up = "gate_up" if case.shape.gated else "up"
        blocks = ((moe.shared_ffn, 1),) * (2 if case.shape.gated else 1)
        plan[f"mlp.shared.{up}"] = Column(segments=blocks, sequence=sp)
        plan["mlp.shared.down"] = Row(sequence=sp)
    return plan


class Layer(nn.Module):
    """One plain mixture of experts under the name that it has in a block."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        assert shape.moe is not None
        shared = None
        if shape.moe.shared_ffn:
            inner = replace(shape, ffn=shape.moe.shared_ffn, dropout=0.0, moe=None)
            shared = llama.MLP(inner) if shape.gated else gpt.MLP(inner)
        self.mlp = MoE(shape, shared)


def plain_layer(shape: ModelShape) -> Layer:
    torch.manual_seed(5)
    layer = Layer(shape).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(2.0).add_(0.05 * torch.randn_like(p))
    return layer


def data(case: Case) -> tuple[Tensor, Tensor]:
    """Activations and output gradients [dp, samples, length, hidden]."""
    stream = torch.Generator().manual_seed(7)
    size = (case.layout.dp, SAMPLES, case.length, case.shape.hidden)
    x, dy = (torch.randn(size, generator=stream, dtype=torch.float64) for _ in range(2))
    return x, dy


@dataclass
class Result:
    y: Tensor
    dx: Tensor
    gradients: dict[str, Tensor]
    losses: Tensor
    load: Tensor


def reference(case: Case) -> Result:
    """What one process makes of all replicas' samples."""
    keys, layer = DropoutKeys(3), plain_layer(case.shape)
    key_dropout(layer, keys)
    x, dy = data(case)
    x.requires_grad_()
    ys, losses, load = [], torch.zeros(2, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for replica in range(case.layout.dp):
        keys.samples = range(replica * SAMPLES, (replica + 1) * SAMPLES)
        y = layer.mlp(x[replica])
        ((y * dy[replica]).sum() + SCALE * layer.mlp.auxiliary).backward()
        ys.append(y.detach())
        router = layer.mlp.router
        logits = router.logits(x[replica].detach())
        choice = router.choose(logits)
        counts = router.counts(choice.experts)
        balance = router.balance(counts, router.mass(choice.scores), case.length)
        losses += torch.stack([balance, router.z(logits)]).detach()
        load += counts.sum(0)
    assert x.grad is not None
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return Result(torch.stack(ys), x.grad, gradients, losses, load)


def close(ours: Tensor, plain: Tensor, what: str) -> None:
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13, msg=lambda text: f"{what}: {text}")


def local(x: Tensor, split: SequenceSplit) -> Tensor:
    """This rank's part [b, s', ...] of x [b, s, ...], zeros for padding."""
    return split.take(x, 1, 0.0).chunk(split.tp, 1)[split.tp_index].contiguous()


def reduce(table: dict[str, Sharded], parameters: dict[str, nn.Parameter], mesh: Mesh) -> None:
    """What a step does at its end."""
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        for dim, start, size, group in table[name].shared:
            part = parameter.grad.narrow(dim, start, size).contiguous()
            dist.all_reduce(part, group=group)
            parameter.grad.narrow(dim, start, size).copy_(part)
        group = mesh.copies(table[name].placed.over)
        if group is not None:
            dist.all_reduce(parameter.grad, group=group)


def run(case: Case) -> None:
    what, mesh, keys = f"{case.layout} {case}", Mesh(case.layout), DropoutKeys(3)
    wanted = reference(case)
    layer = plain_layer(case.shape)
    key_dropout(layer, keys)
    table = parallelize(layer, plan_of(case), mesh)
    auxiliary = Auxiliary()
    auxiliary.scale = SCALE
    bind_auxiliary(layer, auxiliary)
    parameters = dict(layer.named_parameters())
    replica, split = mesh.index("dp"), SequenceSplit.of(mesh, case.length, case.sequence)
    keys.samples = range(replica * SAMPLES, (replica + 1) * SAMPLES)
    x, dy = (local(t[replica], split) for t in data(case))
    x.requires_grad_()
    y = layer.mlp(x)
    y.backward(dy)
    reduce(table, parameters, mesh)
    real = split.shard < case.length
    assert x.grad is not None
    close(y[:, real], local(wanted.y[replica], split)[:, real], f"{what}: output")
    close(x.grad, local(wanted.dx[replica], split), f"{what}: input gradient")
    for name, parameter in parameters.items():
        for piece in table[name].placed.pieces:
            assert parameter.grad is not None
            ours, plain = piece.of_local(parameter.grad), piece.of_full(wanted.gradients[name])
            close(ours, plain, f"{what}: gradient of {name}")
    for ours, plain in ((auxiliary.losses, wanted.losses), (auxiliary.loads["mlp"], wanted.load)):
        dist.all_reduce(ours)
        close(ours, plain, f"{what}: losses, load")
    places = {name: sharded.placed for name, sharded in table.items()}
    norm = GradientNorm(parameters, places, mesh.spread())()
    whole = torch.cat([g.flatten() for g in wanted.gradients.values()]).norm()
    close(norm, whole, f"{what}: norm")
    mesh.close()


LAYOUTS = [
    Layout(dp=4, ep=2),  # two copies of the experts
    Layout(dp=4, ep=4),
    Layout(tp=4),  # together
    Layout(tp=2, dp=2),
    Layout(tp=2, dp=2, ep=2),  # ep over dp, experts split as all else
    Layout(tp=2, dp=2, ep=2, expert_tp=1),  # ep over tp
    Layout(tp=2, dp=2, ep=4, expert_tp=1),
    Layout(tp=2, dp=2, expert_tp=4),  # experts split over replicas too
    Layout(tp=2, dp=2, ep=2, order="dp-tp-cp-ep-pp"),
    Layout(tp=4, ep=1, expert_tp=1),  # a copy of all experts for each tp rank
    Layout(dp=4, ep=2, expert_tp=2),
    Layout(cp=2, dp=2, ep=2),
    Layout(cp=2, tp=2, ep=2),
    Layout(cp=2, tp=2, ep=4, expert_tp=1),
    Layout(cp=4, ep=2),
]


def cases() -> list[Case]:
    shapes = [LLAMA, GPT, TIGHT, SHARED]
    found = list[Case]()
    for i, layout in enumerate(LAYOUTS):
        for sequence in (False, True) if layout.tp > 1 else (False,):
            found.append(Case(layout, shapes[i % 4], 8, sequence))
            found.append(Case(layout, shapes[(i + 1 + sequence) % 4], 7, sequence))
    return found


def every_case() -> None:
    for case in cases():
        run(case)


def test_layers_equal_the_plain_layer():
    on_ranks(4, every_case)
