"""One mixture of experts: the plain layer, its sharding plan, and what one process makes of all samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stretto import Layout
from stretto.engine.models.moe import MoE, feed_forward
from stretto.engine.parallel.expert.experts import ExpertParallel, ExpertWeights
from stretto.engine.parallel.styles import ColumnParallel, ParallelStyle, Replicate, RowParallel, SplitDropout
from stretto.engine.parallel.tensor.dropout import DropoutKeys, key_dropout
from stretto.job.experts import ExpertShape
from stretto.job.shape import ModelShape

SAMPLES, SCALE = 3, 0.37  # samples of a replica, the gradient of the losses

LLAMA = ModelShape(
    family="llama",
    layers=1,
    hidden=16,
    heads=4,
    ffn=24,
    vocab=37,
    sequence=8,
    moe=ExpertShape(experts=4, top_k=2, ffn=8, balance=0.02, z=0.003),
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
    moe=ExpertShape(experts=4, top_k=3, shared_ffn=12, score="sigmoid", normalise=False, capacity=0.8),
)


def other(shape: ModelShape, **fields: Any) -> ModelShape:
    assert shape.moe is not None
    return replace(shape, moe=replace(shape.moe, **fields))


TIGHT = other(LLAMA, capacity=0.5, drop="position", score="sigmoid")
SHARED = other(
    LLAMA,
    shared_ffn=12,
    shared_gate=True,
    capacity=1.1,
    top_k=1,
    router_bias=True,
    groups=2,
    top_groups=1,
    scale=1.5,
)


@dataclass(frozen=True)
class Case:
    layout: Layout
    shape: ModelShape = LLAMA
    length: int = 8
    sequence: bool = False

    @property
    def expert_tp(self) -> int:
        return self.layout.tp if self.layout.expert_tp is None else self.layout.expert_tp


def plan_of(case: Case) -> dict[str, ParallelStyle]:
    sp, moe = case.sequence, case.shape.moe
    assert moe is not None
    plan: dict[str, ParallelStyle] = {
        "mlp": ExpertParallel(case.length, sequence=sp),
        "mlp.router": Replicate(sequence=True),
        "mlp.experts": ExpertWeights(case.expert_tp),
        "mlp.drop": SplitDropout(sequence=(1, case.length, sp)),
    }
    if moe.shared_ffn:
        up = "gate_up" if case.shape.gated else "up"
        blocks = ((moe.shared_ffn, 1),) * (2 if case.shape.gated else 1)
        plan[f"mlp.shared.{up}"] = ColumnParallel(segments=blocks, sequence=sp)
        plan["mlp.shared.down"] = RowParallel(sequence=sp)
    if moe.shared_gate:
        plan["mlp.shared_gate"] = Replicate(sequence=sp)
    return plan


class Layer(nn.Module):
    """One plain mixture of experts under the name that it has in a block."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        mlp = feed_forward(shape)
        assert isinstance(mlp, MoE)
        self.mlp = mlp


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
    """Return the results of one process for the samples of all replicas."""
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


def close(computed: Tensor, plain: Tensor, label: str) -> None:
    torch.testing.assert_close(computed, plain, rtol=1e-12, atol=1e-13, msg=lambda text: f"{label}: {text}")
