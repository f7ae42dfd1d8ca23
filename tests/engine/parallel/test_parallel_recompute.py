"""A forward that runs again in the backward gives the same gradients, draws the same and keeps its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_mesh import FakeMesh
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from ranks import on_ranks
from stretto import Layout
from stretto.engine.models.build import build
from stretto.engine.models.causal import choose_kernel
from stretto.engine.models.language import TransformerBlock
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import parallelize
from stretto.engine.parallel.recompute import MODES, Mode, recompute, recompute_blocks
from stretto.engine.parallel.tensor.dropout import DropoutKeys, key_dropout
from stretto.engine.parallel.tensor.linear import DeferredGradient, FusedLinear
from stretto.errors import StrettoError
from stretto.job.flops import hardware_flops_per_token
from stretto.job.job import Job
from stretto.job.shape import ModelShape

SHAPE = ModelShape(family="gpt", layers=1, hidden=16, heads=4, vocab=8, sequence=6, dropout=0.3)


def gradients(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Output and all gradients of one forward and backward, from one state of the random stream."""
    module.zero_grad()
    torch.manual_seed(3)
    inputs = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
    ys = module(*inputs)
    ys = ys if isinstance(ys, tuple) else (ys,)
    ends = [y for y in ys if y.requires_grad]
    torch.autograd.backward(ends, [torch.cos(y.detach()) for y in ends])
    after = torch.rand(1)  # the stream goes on as if nothing had been repeated
    results = [*ys, *(x.grad for x in inputs), *(p.grad for p in module.parameters()), after]
    return [t.detach() for t in results if t is not None]


def same(module: nn.Module, *inputs: Tensor, **how: Any) -> None:
    plain = gradients(module, *inputs)
    recompute(module, **how)
    again = gradients(module, *inputs)
    assert len(plain) == len(again)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def saved_bytes(run: Callable[[], Any]) -> int:
    """Bytes that autograd keeps, each storage once."""
    seen = dict[int, Tensor]()

    def pack(t: Tensor) -> Tensor:
        seen[t.untyped_storage().data_ptr()] = t
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        y = run()
    del y
    return sum(t.untyped_storage().nbytes() for t in seen.values())


def test_recomputation_repeats_torchs_dropout():
    same(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.GELU()), torch.randn(5, 4, requires_grad=True))


def test_recomputation_when_only_parameters_need_gradients():
    same(nn.Sequential(nn.Embedding(4, 8), nn.Dropout(0.5)), torch.tensor([[1, 2, 1]]))


def test_several_arguments_and_results():
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return a * b.exp(), b, ids + 1

    a, b = torch.randn(2, 3, requires_grad=True)
    same(Two(), a, b, torch.tensor([1, 2, 3]))
    same(Two(), a, b.detach(), torch.tensor([1, 2, 3]))


def test_arguments_that_are_not_tensors():
    class Scaled(nn.Module):
        def forward(self, x: Tensor, by: float) -> Tensor:
            return (x * by).sin()

    module, x = Scaled(), torch.ones(3, requires_grad=True)
    recompute(module)
    module(x, 2.0).sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.cos(torch.full((3,), 2.0)))


def test_recomputation_restores_autocast():
    seen = list[torch.dtype]()

    class Watched(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            y = super().forward(input)
            seen.append(y.dtype)
            return y

    first, x = Watched(4, 4), torch.randn(3, 4, requires_grad=True)
    module = nn.Sequential(first, nn.Tanh(), Watched(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        plain = module(x)
    plain.sum().backward()
    wanted = [p.grad for p in module.parameters()]
    module.zero_grad()
    recompute(module)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
        other = first(x.detach())  # must not meet a cast that was made without gradients
        assert torch.autograd.grad(other.sum(), first.weight)[0].any()
    y.sum().backward()  # outside of autocast
    for p, w in zip(module.parameters(), wanted, strict=True):
        assert p.grad is not None
        assert w is not None
        assert torch.equal(p.grad, w)
    module.zero_grad()
    y = module(x)
    with torch.autocast("cpu", torch.bfloat16):  # as the pipeline's backward
        y.sum().backward()
    assert seen[-4:] == [torch.float32] * 4


def test_evaluation_and_no_grad_do_not_recompute():
    module = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    recompute(module)
    x = torch.randn(2, 4, requires_grad=True)
    assert type(module.eval()(x).grad_fn).__name__ == "SigmoidBackward0"
    with torch.no_grad():
        assert module.train()(x).grad_fn is None
    for p in module.parameters():
        p.requires_grad_(False)
    assert module(x.detach()).grad_fn is None


def test_inputs_changed_in_between_are_refused():
    module = nn.Linear(2, 2)
    recompute(module)
    x = torch.ones(1, 2, requires_grad=True) * 1.0
    y = module(x)
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.fixture
def block() -> TransformerBlock:
    torch.manual_seed(1)
    layer, keys = TransformerBlock(SHAPE).double(), DropoutKeys(2)
    keys.samples = [4, 5]
    key_dropout(layer, keys)
    return layer


X = torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_every_mode_of_a_block_gives_the_same(block: TransformerBlock):
    plain, names = gradients(block, X), [n for n, _ in block.named_parameters()]
    sizes = dict[Mode, int]()
    for mode in (*MODES, *reversed(MODES)):
        recompute_blocks([block], [mode], FakeMesh())  # type: ignore[arg-type]
        results = gradients(block, X)
        assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True)), mode
        assert [n for n, _ in block.named_parameters()] == names
        sizes[mode] = saved_bytes(lambda: block(X * 1.0))
    assert sizes["full"] == X.numel() * 8
    core = 2 * SHAPE.heads * 6 * 6 * (8 + 1 + 8)  # probabilities, mask, dropped
    assert sizes["none"] - sizes["selective"] == core


def test_selective_inside_full_is_full(block: TransformerBlock):
    plain = gradients(block, X)
    recompute(block.attn.core)
    recompute(block)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(block, X), strict=True))
    assert saved_bytes(lambda: block(X * 1.0)) == X.numel() * 8


def test_deferred_weight_gradients(block: TransformerBlock):
    parallelize(block, _block_plan(), Mesh(Layout()))
    plain = gradients(block, X)
    for mode in MODES:
        queue: list[DeferredGradient] = []
        for part in block.modules():
            if isinstance(part, FusedLinear):
                part.queue = queue
        recompute_blocks([block], [mode], Mesh(Layout()))
        before = gradients(block, X)
        assert len(queue) == 4
        assert len(before) < len(plain)
        for entry in queue:
            entry.start()
            entry.finish()
        late = [p.grad for p in block.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(plain[2:-1], late, strict=True) if b is not None), mode


def _block_plan() -> dict[str, Any]:
    plan = sharding_plan(Job(shape=SHAPE))
    return {n.removeprefix("blocks.*."): style for n, style in plan.items() if n.startswith("blocks.*.")}


def on_two_or_three(ranks: int) -> None:
    """A tp block whose input every rank keeps a part of, also where the parts are uneven."""
    mesh = Mesh(Layout(tp=ranks))
    shape = ModelShape(family="gpt", layers=1, hidden=12, heads=6, vocab=8, sequence=8, dropout=0.2)
    for length in (6, 7, 1):
        torch.manual_seed(1)
        block, keys = TransformerBlock(shape).double(), DropoutKeys(2)
        keys.samples = [4, 5]
        key_dropout(block, keys)
        styles = sharding_plan(Job(shape=shape, layout=mesh.layout, sequence=length))
        plan = {n.removeprefix("blocks.*."): s for n, s in styles.items() if "blocks" in n}
        parallelize(block, plan, mesh)
        base = torch.randn(2, length, 12, dtype=torch.float64).requires_grad_()
        inner = _After(block)
        plain = gradients(inner, base)
        for sharded in (False, True):
            recompute_blocks([block], ["full"], mesh, shard_inputs=sharded)
            results = gradients(inner, base)
            assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True)), (ranks, length)
            part = -(-length // ranks) if sharded else length
            assert saved_bytes(lambda b=block, x=base: b(x * 1.0)) == 2 * part * 12 * 8
            assert saved_bytes(lambda b=block, x=base: b(x.detach().requires_grad_())) == 2 * length * 12 * 8
        recompute_blocks([block], ["selective"], mesh, shard_inputs=True)
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(inner, base), strict=True))
    mesh.close()


class _After(nn.Module):
    """The block behind something, so that its input is no leaf."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x * 1.5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sharded_inputs_are_gathered_for_recomputation(ranks: int):
    on_ranks(ranks, on_two_or_three, ranks)


@pytest.mark.parametrize("mode", MODES)
def test_flops_are_the_published_ones(mode: Mode):
    shape = ModelShape(family="gpt", layers=2, hidden=64, heads=4, vocab=48, sequence=32)
    batch, s, h, layers, vocab = 2, 32, 64, 2, 48
    model, mesh = build(shape).double(), Mesh(Layout())
    choose_kernel(model, "explicit")
    parallelize(model, sharding_plan(Job(shape=shape)), mesh)
    modes: list[Mode] = [mode] * layers
    recompute_blocks(list(model.blocks), modes, mesh)
    ids, targets = torch.randint(vocab, (2, batch, s))
    with FlopCounterMode(display=False) as counter:
        model.loss(model(ids), targets).backward()
    results = counter.get_total_flops()
    # Narayanan et al. 2021, equation 3, and Korthikanti et al. 2022, appendix A: 24BLsh^2(1+s/(6h)) a forward
    trained = 72 * batch * layers * s * h**2 * (1 + s / (6 * h) + vocab / (12 * h * layers))
    again = {
        "none": 0.0,
        "selective": 4 * batch * layers * s**2 * h,
        "full": 24 * batch * layers * s * h**2 * (1 + s / (6 * h)),
    }
    assert results - trained == pytest.approx(again[mode], rel=0.01)
    assert results == pytest.approx(batch * s * hardware_flops_per_token(shape, s, mode), rel=1e-12)
    if mode == "full":
        paper = 96 * batch * layers * s * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
        assert results == pytest.approx(paper, rel=1e-12)


def test_bad_modes_are_named():
    with pytest.raises(StrettoError, match="'selectiv' is not one of") as caught:
        recompute_blocks([nn.Linear(1, 1)], ["selectiv"], FakeMesh())  # type: ignore[list-item, arg-type]
    assert caught.value.hint == "did you mean 'selective'?"
    with pytest.raises(StrettoError, match=r"Linear, which has no attn\.core"):
        recompute_blocks([nn.Linear(1, 1)], ["selective"], FakeMesh())  # type: ignore[arg-type]
    with pytest.raises(StrettoError, match="0 modes of recomputation for 1 blocks"):
        recompute_blocks([nn.Linear(1, 1)], [], FakeMesh())  # type: ignore[arg-type]
