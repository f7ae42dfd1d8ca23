"""Tensors between stages: several, integers, skips, and microbatches of different shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ranks import on_ranks
from stretto import Layout, schedule
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.tensor.linear import ParallelLinear
from stretto.engine.pipeline import Pipeline, Skip
from stretto.engine.pipeline.exchange import DTYPES, MOST_DIMENSIONS, MOST_TENSORS, pack, unpack
from stretto.engine.pipeline.rank_buffers import Boundary
from stretto.errors import StrettoError
from stretto.program.program import Program
from stretto.program.transforms.activations import recompute

WIDTH = 6
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v", "dualpipe")
ON_ONE = SCHEDULES[:-1]  # a rank does not hold two copies


class Block(nn.Module):
    """Takes a stream, a mask of whole numbers and a bias; hands on all three. The mask has no gradient."""

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        linear = nn.Linear(WIDTH, WIDTH).double()
        self.linear = ParallelLinear(linear.weight, linear.bias) if parallel else linear

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.tanh(self.linear(x)) * mask.unsqueeze(-1) + bias
        return y, mask, bias * 0.5


class Start(nn.Module):
    """Two arguments in, three tensors out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH).double()

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.table(tokens)
        return x, mask, x.mean(dim=1, keepdim=True)


class End(nn.Module):
    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        return (x + bias) * mask.unsqueeze(-1)


def streams(layers: int, parallel: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Start(), *(Block(parallel) for _ in range(layers - 2)), End()]


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y.sum(dim=(1, 2)) - target).square().sum()


def tokens(m: int, varying: bool) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Microbatches of tokens with masks, of one length or of their own."""
    draw = torch.Generator().manual_seed(m)
    inputs = list[tuple[Tensor, Tensor]]()
    for i in range(m):
        size = (2 + i % 2, 3 + i) if varying else (2, 5)
        mask = torch.randint(2, size, generator=draw)
        inputs.append((torch.randint(11, size, generator=draw), mask))
    return inputs, [torch.randn(len(x), dtype=torch.float64, generator=draw) for x, _ in inputs]


def sequential(layers: list[nn.Module], skips: tuple[Skip, ...], x: tuple[Tensor, ...]) -> Tensor:
    """The plain model: one layer after the other, skips as a person would write them."""
    outputs = list[Tensor]()
    for at, layer in enumerate(layers):
        y = layer(*x, *(outputs[s.source] for s in skips if s.target == at))
        x = y if isinstance(y, tuple) else (y,)
        outputs.append(x[0])
    return x[0]


def equal(
    make: Callable[[], list[nn.Module]],
    program: Program,
    varying: bool,
    label: str,
    skips: tuple[Skip, ...] = (),
    plain_inputs: bool = False,
) -> None:
    """Losses, gradients and evaluation beside one process."""
    plain, layers, m = make(), make(), program.microbatches
    inputs, targets = tokens(m, varying)
    arguments = (
        [(mask.double().unsqueeze(-1).expand(-1, -1, WIDTH),) for _, mask in inputs]
        if plain_inputs
        else inputs
    )
    names = {id(p): i for i, p in enumerate(nn.ModuleList(layers).parameters())}
    wanted = list(nn.ModuleList(plain).parameters())
    losses = [loss(sequential(plain, skips, x), t) for x, t in zip(arguments, targets, strict=True)]
    (0.1 * torch.stack(losses).sum()).backward()
    mesh = Mesh(Layout(pp=program.ranks))
    pipe = Pipeline(layers, program, mesh, loss, skips=skips, varying=varying)
    for _ in range(2):
        results = pipe.step(arguments, targets, 0.1)
        if results is not None and program.copies == 1:
            torch.testing.assert_close(results, torch.stack(losses).detach(), rtol=1e-11, atol=1e-12)
        for p in pipe.parameters():
            close = torch.allclose(p.grad, wanted[names[id(p)]].grad, rtol=1e-10, atol=1e-12)
            assert close, f"{label}: gradient {names[id(p)]}"
    results = pipe.evaluate(arguments, targets)
    if results is not None:
        torch.testing.assert_close(results, torch.stack(losses).detach(), rtol=1e-11, atol=1e-12)
    pipe.close()
    mesh.close()


def several(ranks: int) -> None:
    for at, name in enumerate(SCHEDULES if ranks > 1 else ON_ONE):
        for parallel in (True, False):
            varying = parallel == (at % 2 == 0)  # of parallel layers for every second schedule
            program = schedule(name, ranks, 4)
            label = f"{name} on {ranks}, parallel={parallel}, varying={varying}"
            equal(lambda n=program.depth, o=parallel: streams(max(n, 3), o), program, varying, label)
    program = recompute(schedule("1f1b", ranks, 3))
    equal(lambda: streams(6, True), program, True, "recomputed")


def test_several_tensors_and_varying_shapes():
    several(1)
    on_ranks(2, several, 2)


class Deaf(Block):
    """Makes a bias of its own."""

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(x, mask, x.mean(dim=1, keepdim=True))


def test_an_input_that_is_not_used_has_no_gradient():
    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Start(), *(Deaf(True) for _ in range(4)), End()]

    for name in ("interleaved", "zb-v"):  # two stages, cut between two of the deaf
        equal(layers, schedule(name, 1, 3), False, name)


class Join(nn.Module):
    """A layer with one input more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, *skips: Tensor) -> Tensor:
        for at, skip in enumerate(skips):
            x = x + (at + 2) * skip
        return torch.tanh(self.linear(x))


def joins(layers: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Join() for _ in range(layers)]


LONG = (Skip(0, 7), Skip(1, 6), Skip(2, 5), Skip(2, 7), Skip(3, 4))


def skipped(ranks: int) -> None:
    for at, name in enumerate(SCHEDULES if ranks > 1 else ON_ONE):
        program = schedule(name, ranks, 2 * ranks)
        for varying in (False, True) if ranks == 1 else (at % 2 == 0,):
            label = f"{name} with skips on {ranks}, varying={varying}"
            equal(lambda: joins(8), program, varying, label, LONG, plain_inputs=True)


def test_skips_between_any_stages():
    skipped(1)
    on_ranks(2, skipped, 2)


def test_skips_over_four_ranks():
    on_ranks(4, skipped, 4)


@pytest.mark.parametrize("skip", [Skip(3, 3), Skip(4, 2), Skip(-1, 2), Skip(2, 8)])
def test_a_skip_goes_on_to_a_later_layer(skip: Skip):
    with pytest.raises(StrettoError, match="must go to a later layer"):
        Pipeline(joins(8), schedule("gpipe", 1, 1), Mesh(Layout()), loss, skips=[skip])


def test_a_skip_carries_one_tensor():
    pipe = Pipeline(streams(4, True), schedule("gpipe", 1, 1), Mesh(Layout()), loss, skips=[Skip(1, 3)])
    with pytest.raises(Exception, match="layer 1 returns 3 tensors, but a skip starts there"):
        pipe.step(*tokens(1, False))


def test_headers_hold_every_type_and_the_most_tensors_and_dimensions():
    sizes = [tuple(range(2, 2 + n % (MOST_DIMENSIONS + 1))) for n in range(MOST_TENSORS)]
    types = DTYPES * MOST_TENSORS
    boundaries = tuple(Boundary(shape, dtype) for shape, dtype in zip(sizes, types, strict=False))
    assert unpack(pack(boundaries, torch.device("cpu"))) == boundaries
    for more in ((*boundaries, boundaries[0]), (Boundary((1,) * (MOST_DIMENSIONS + 1), torch.float32),)):
        with pytest.raises(StrettoError, match="at most"):
            pack(more, torch.device("cpu"))
