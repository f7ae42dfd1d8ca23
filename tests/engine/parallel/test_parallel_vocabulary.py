"""Split embedding and cross-entropy beside torch's: values, gradients, padding, and what crosses ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from counting import CountingGroup
from torch import Tensor, nn
from torch.nn import functional

from ranks import on_ranks
from stretto.engine.parallel.styles import padded
from stretto.engine.parallel.tensor.vocabulary import VocabParallelCrossEntropy, VocabParallelEmbedding

IGNORED = -100


def group() -> CountingGroup | None:
    return CountingGroup(dist.group.WORLD) if dist.get_world_size() > 1 else None


def mine(size: int, multiple: int) -> tuple[int, int, int]:
    """First id, real rows and all rows of this rank."""
    part = padded(size, dist.get_rank(), dist.get_world_size(), multiple)
    return dist.get_rank() * part.size, sum(run.size for run in part.runs), part.size


def close(computed: Tensor, plain: Tensor, label: str, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(
        computed, plain, rtol=tolerance, atol=tolerance, msg=lambda text: f"{label}: {text}"
    )


def embedding(size: int, multiple: int) -> None:
    torch.manual_seed(1)
    table = torch.randn(size, 6, dtype=torch.float64)
    start, real, rows = mine(size, multiple)
    weight = nn.Parameter(torch.zeros(rows, 6, dtype=torch.float64))
    weight.data[:real] = table[start : start + real]
    layer, counted = VocabParallelEmbedding(weight, start, group()), []
    layer.on_gradient = counted.append
    plain = table.clone().requires_grad_()
    for seed in range(2):
        torch.manual_seed(seed)
        ids = torch.randint(size, (3, 4))  # some ids twice, so that their gradients add up
        ids[0, :2] = size - 1
        embedded, there = layer(ids), functional.embedding(ids, plain)
        assert torch.equal(embedded, there), "rows"
        dy = torch.randn_like(there)
        if embedded.requires_grad:
            embedded.backward(dy)
        there.backward(dy)
    assert plain.grad is not None
    assert weight.grad is not None
    close(weight.grad[:real], plain.grad[start : start + real], "table gradient")
    assert not weight.grad[real:].any(), "padding has a gradient"
    assert len(counted) == 2
    if layer.group is not None:
        assert layer.group.log == [("reduce", 3 * 4 * 6)] * 2  # type: ignore[union-attr]  # forward only
    with torch.no_grad():
        assert torch.equal(layer(ids), there)


def embedding_along_the_sequence(size: int, multiple: int, length: int) -> None:
    """Each rank gets its part of the tokens, and all of the gradient's rows that it holds."""
    torch.manual_seed(1)
    table = torch.randn(size, 6, dtype=torch.float64)
    start, real, rows = mine(size, multiple)
    weight = nn.Parameter(torch.zeros(rows, 6, dtype=torch.float64))
    weight.data[:real] = table[start : start + real]
    layer = VocabParallelEmbedding(weight, start, dist.group.WORLD, sequence=True)
    plain = table.clone().requires_grad_()
    for samples in (1, 3):
        ids = torch.randint(size, (samples, length))
        embedded, there = layer(ids), functional.embedding(ids, plain)
        step = length // dist.get_world_size()
        here = slice(dist.get_rank() * step, (dist.get_rank() + 1) * step)
        assert torch.equal(embedded, there[:, here]), "rows"
        dy = torch.randn_like(there)
        embedded.backward(dy[:, here])
        there.backward(dy)
    assert plain.grad is not None
    assert weight.grad is not None
    close(weight.grad[:real], plain.grad[start : start + real], "table gradient")
    assert not weight.grad[real:].any(), "padding has a gradient"


def entropy(size: int, multiple: int, logits: Tensor, targets: Tensor, tolerance: float) -> None:
    """Loss and gradient of `logits` [b, s, size] against torch's."""
    start, real, rows = mine(size, multiple)
    local = torch.full((*logits.shape[:-1], rows), 50.0, dtype=logits.dtype)  # what padding must not tell
    local[..., :real] = logits[..., start : start + real]
    local.requires_grad_()
    there = logits.clone().requires_grad_()
    counting = group()
    loss = VocabParallelCrossEntropy(start, real, counting)(local, targets)  # type: ignore[arg-type]
    plain = functional.cross_entropy(
        there.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    close(loss.detach(), plain.detach(), "loss", tolerance)
    (3.0 * loss).backward()
    (3.0 * plain).backward()
    assert local.grad is not None
    assert there.grad is not None
    close(local.grad[..., :real], there.grad[..., start : start + real], "gradient", tolerance)
    assert not local.grad[..., real:].any(), "padding has a gradient"
    if counting is not None:  # largest, sum and chosen of each token; nothing that grows with the vocabulary
        assert counting.elements == 3 * targets.numel()


def every_case() -> None:
    for size, multiple in ((16, 1), (5, 1), (3, 1), (13, 4), (1, 1)):
        embedding(size, multiple)
        torch.manual_seed(size)
        logits = torch.randn(2, 5, size, dtype=torch.float64)
        targets = torch.randint(size, (2, 5))
        entropy(size, multiple, logits, targets, 1e-12)
        targets[0, :3] = IGNORED
        entropy(size, multiple, logits, targets, 1e-12)
        entropy(size, multiple, logits * 1e4, targets, 1e-12)
        entropy(size, multiple, logits.float() * 3e37, targets, 1e-5)  # exp overflows at 89
        entropy(size, multiple, logits.float() - 1e6, targets, 1e-5)
        entropy(size, multiple, logits, torch.full((2, 5), IGNORED), 1e-12)
    if dist.get_world_size() > 1:
        for size, multiple in ((16, 1), (5, 1), (3, 4)):
            embedding_along_the_sequence(size, multiple, 8)
    frozen()
    short_logits()


def frozen() -> None:
    start, _, rows = mine(8, 1)
    weight = nn.Parameter(torch.randn(rows, 2), requires_grad=False)
    layer = VocabParallelEmbedding(weight, start, group())  # type: ignore[arg-type]
    assert not layer(torch.arange(8)[None]).requires_grad


def short_logits() -> None:
    """Logits in bfloat16: the loss is summed in float32, the gradient comes back in bfloat16."""
    torch.manual_seed(3)
    size = 12
    logits, targets = torch.randn(2, 4, size).bfloat16(), torch.randint(size, (2, 4))
    start, real, _ = mine(size, 1)
    local = logits[..., start : start + real].clone().requires_grad_()
    losses = VocabParallelCrossEntropy(start, real, group())(local, targets)  # type: ignore[arg-type]
    plain = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    assert losses.dtype == torch.float32
    close(losses.detach(), plain, "loss of short logits", 1e-5)
    losses.backward()
    assert local.grad is not None
    assert local.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_embedding_and_cross_entropy_equal_torchs(ranks):
    on_ranks(ranks, every_case)


def test_a_gradient_is_used_once():
    """The saved probabilities become the gradient in place, so a second backward must not read them."""
    loss = VocabParallelCrossEntropy(0, 3, None)(
        torch.randn(1, 2, 4, requires_grad=True), torch.tensor([[0, 2]])
    )
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
