"""Mixtures of experts over ranks: outputs, gradients and losses are those of the plain layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from expert_layer import (
    GPT,
    LLAMA,
    SAMPLES,
    SCALE,
    SHARED,
    TIGHT,
    Case,
    Layer,
    close,
    data,
    plain_layer,
    plan_of,
    reference,
)
from torch import Tensor, nn

from ranks import on_ranks
from stretto import Layout
from stretto.engine.optim.norm import GradientNorm
from stretto.engine.parallel.data.reduction import shard_groups
from stretto.engine.parallel.expert.auxiliary import Auxiliary, bind_auxiliary
from stretto.engine.parallel.expert.experts import ExpertParallel, ExpertWeights
from stretto.engine.parallel.fragment import ParameterFragment
from stretto.engine.parallel.mesh import COPIES, Mesh
from stretto.engine.parallel.parallelize import ShardedParameter, parallelize
from stretto.engine.parallel.tensor.dropout import DropoutKeys, key_dropout
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.errors import StrettoError
from stretto.job.shape import ModelShape
from stretto.layout.shards import ShardSizes


def local(x: Tensor, split: SequenceSplit) -> Tensor:
    """This rank's part [b, s', ...] of x [b, s, ...], zeros for padding."""
    return split.take(x, 1, 0.0).chunk(split.tp, 1)[split.tp_index].contiguous()


def reduce(table: dict[str, ShardedParameter], parameters: dict[str, nn.Parameter], mesh: Mesh) -> None:
    """Run the end of a step."""
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        for dim, start, size, group in table[name].shared:
            part = parameter.grad.narrow(dim, start, size).contiguous()
            dist.all_reduce(part, group=group)
            parameter.grad.narrow(dim, start, size).copy_(part)
        group = mesh.copies(table[name].placed.over)
        if group is not None:
            dist.all_reduce(parameter.grad, group=group)


def over_all(x: Tensor) -> Tensor:
    """The sum over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


@dataclass
class Norms:
    """The gradient norm of a layout, and what the field's usual mistakes make of it."""

    right: float
    as_dense: float  # experts summed over the ranks that dense parameters are spread over
    everywhere: float  # every rank's experts counted, copies too


def norms(parameters: dict[str, nn.Parameter], table: dict[str, ShardedParameter], mesh: Mesh) -> Norms:
    fragments = [
        ParameterFragment(name=n, parameter=p, placed=table[n].placed) for n, p in parameters.items()
    ]
    groups = {over: shard_groups(mesh, over, ShardSizes()).counted for over in COPIES}

    def norm(groups: dict[str, dist.ProcessGroup | None]) -> float:
        return float(GradientNorm(fragments, groups)())

    return Norms(
        norm(groups),
        norm({**groups, "expert_tp-ep": groups["tp"]}),
        norm({**groups, "expert_tp-ep": dist.group.WORLD if dist.is_initialized() else None}),
    )


def run(case: Case, mesh: Mesh) -> Norms:
    label, keys = f"{case.layout} {case}", DropoutKeys(3)
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
    close(y[:, real], local(wanted.y[replica], split)[:, real], f"{label}: output")
    close(x.grad, local(wanted.dx[replica], split), f"{label}: input gradient")
    for name, parameter in parameters.items():
        for piece in table[name].placed.pieces:
            assert parameter.grad is not None
            computed, plain = piece.of_local(parameter.grad), piece.of_full(wanted.gradients[name])
            close(computed, plain, f"{label}: gradient of {name}")
    for computed, plain in ((auxiliary.losses, wanted.losses), (auxiliary.loads["mlp"], wanted.load)):
        close(over_all(computed), plain, f"{label}: losses, load")
    results = norms(parameters, table, mesh)
    norm = torch.cat([g.flatten() for g in wanted.gradients.values()]).norm()
    close(torch.tensor(results.right, dtype=torch.float64), norm, f"{label}: norm")
    return results


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
    Layout(tp=2, dp=2, ep=2, order="ep-tp-cp-dp-pp"),  # neighbours hold different experts
    Layout(cp=2, tp=2, ep=2, order="cp-ep-tp-dp-pp"),
    Layout(tp=4, ep=1, expert_tp=1),  # a copy of all experts for each tp rank
    Layout(dp=4, ep=2, expert_tp=2),
    Layout(cp=2, dp=2, ep=2),
    Layout(cp=2, tp=2, ep=2),
    Layout(cp=2, tp=2, ep=4, expert_tp=1),
    Layout(cp=4, ep=2),
]


def cases(at: int) -> list[Case]:
    """Two models, one of them with padding, with and without sequence parallelism."""
    shapes, layout = [LLAMA, GPT, TIGHT, SHARED], LAYOUTS[at]
    results = list[Case]()
    for sequence in (False, True) if layout.tp > 1 else (False,):
        results.append(Case(layout, shapes[at % 4], 8, sequence))
        results.append(Case(layout, shapes[(at + 1 + sequence) % 4], 7, sequence))
    return results


def every_case(indices: Sequence[int]) -> dict[str, Norms]:
    results = dict[str, Norms]()
    for at in indices:
        layout = LAYOUTS[at]
        mesh = Mesh(layout)
        for case in cases(at):
            results[layout.describe()] = run(case, mesh)
        mesh.close()
    return results


@pytest.mark.parametrize(
    "indices",
    [range(0, len(LAYOUTS), 5), pytest.param(range(len(LAYOUTS)), id="all", marks=pytest.mark.slow)],
)
def test_layers_equal_the_plain_layer(indices: range) -> None:
    """Norms too; and there the mistakes show, so that a test of the norm alone would see them."""
    ranks = on_ranks(4, every_case, indices)
    for layout in (LAYOUTS[at] for at in indices):
        name = layout.describe()
        results = [norms[name] for norms in ranks]
        if layout.size("expert_tp-ep") > layout.size("tp"):
            assert any(abs(n.as_dense / n.right - 1) > 0.01 for n in results), f"{name}: experts left out"
        if layout.size("expert_dp") > 1:
            assert all(n.everywhere > 1.01 * n.right for n in results), f"{name}: copies counted"


def test_one_rank_equals_the_plain_layer() -> None:
    for shape in (LLAMA, GPT, TIGHT, SHARED):
        run(Case(Layout(), shape), Mesh(Layout()))


def short(case: Case) -> None:
    """bfloat16 products in float32 layers: as far from the plain layer in float32 as that is itself."""
    mesh, exact, plain, sharded = Mesh(case.layout), *(plain_layer(case.shape).float() for _ in range(3))
    parallelize(sharded, plan_of(case), mesh)
    bind_auxiliary(sharded, Auxiliary())
    x = data(case)[0][mesh.index("dp")].float()
    with torch.autocast("cpu", torch.bfloat16):
        rounded, y = plain.mlp(x), sharded.mlp(x)
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    gradient = sharded.mlp.experts.down.grad
    assert gradient is not None
    assert gradient.dtype is torch.float32
    wanted = exact.mlp(x)
    far = (rounded.float() - wanted).norm()
    assert 0 < (y.float() - wanted).norm() < 1.5 * far < 0.05 * wanted.norm()
    mesh.close()


def every_short() -> None:
    for layout in (Layout(dp=2, ep=2), Layout(tp=2), Layout(tp=2, ep=2, expert_tp=1)):
        short(Case(layout, LLAMA))


def test_autocast() -> None:
    on_ranks(2, every_short)


def meta_layer(shape: ModelShape) -> Layer:
    with torch.device("meta"):
        return Layer(shape)


@pytest.mark.parametrize(
    ("shape", "style", "ranks", "says", "hint"),
    [
        (LLAMA, ExpertWeights(), 3, "4 experts do not divide over ep=3", "nearest ep is 2"),
        (LLAMA, ExpertWeights(3), 6, "inner width 8 does not divide over expert_tp=3", "expert_tp is 2"),
        (LLAMA, ExpertWeights(2), 3, "expert_tp=2 does not divide the 3 ranks", "the layout's expert_tp"),
    ],
)
def test_sizes_that_do_not_divide(
    shape: ModelShape, style: ExpertWeights, ranks: int, says: str, hint: str
) -> None:
    with pytest.raises(StrettoError, match=says) as caught:
        style.parts("mlp.experts", meta_layer(shape).mlp.experts, 0, ranks)
    assert hint in str(caught.value.hint)


def test_expert_styles_refuse_other_modules() -> None:
    with pytest.raises(StrettoError, match="has no router and experts"):
        ExpertParallel(8).parts("mlp", nn.Linear(2, 2), 0, 1)
