"""Output layer and loss in chunks beside torch's: values, gradients, padding, and what exists at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ranks import on_ranks
from stretto.engine.parallel.styles import padded
from stretto.engine.parallel.tensor.chunked_loss import ChunkedCrossEntropy
from stretto.engine.parallel.tensor.linear import GatherLinear, ParallelLinear
from stretto.engine.parallel.tensor.vocabulary import IGNORED, VocabParallelCrossEntropy
from stretto.planner.counts.compute import loss_chunk_tokens
from stretto.run.train.memory_measured import MemoryTracker

HIDDEN, SAMPLES, LENGTH = 6, 3, 8


def close(computed: Tensor | None, plain: Tensor | None, label: str, tolerance: float = 1e-12) -> None:
    assert computed is not None
    assert plain is not None
    torch.testing.assert_close(
        computed, plain, rtol=tolerance, atol=tolerance, msg=lambda text: f"{label}: {text}"
    )


def case(
    *,
    vocab: int,
    multiple: int = 1,
    tokens: int,
    softcap: float = 0.0,
    sequence: bool = False,
    ignored: int = 0,
    trained: tuple[bool, bool] = (True, True),
) -> None:
    """Two microbatches.

    Args:
        ignored: targets of the first sample that are ignored.
        trained: whether the input and the weight get gradients.
    """
    torch.manual_seed(vocab)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD if ranks > 1 else None
    part = padded(vocab, rank, ranks, multiple)
    real, start = sum(run.size for run in part.runs), rank * part.size
    full = torch.randn(vocab, HIDDEN, dtype=torch.float64, requires_grad=trained[1])
    local = torch.full((part.size, HIDDEN), 9.0, dtype=torch.float64)  # what padding must not tell
    local[:real] = full.detach()[start : start + real]
    weight, reported = nn.Parameter(local, requires_grad=trained[1]), list[Tensor]()
    if sequence and group is not None:
        out: ParallelLinear = GatherLinear(weight, None, group)
    else:
        out = ParallelLinear(weight, None, input_group=group)
    out.on_gradient = reported.append
    loss = ChunkedCrossEntropy(out, VocabParallelCrossEntropy(start, real, group), tokens, softcap)
    mine = slice(rank * LENGTH // ranks, (rank + 1) * LENGTH // ranks) if sequence else slice(None)
    for scale in (1.0, 1024.0):
        x = torch.randn(SAMPLES, LENGTH, HIDDEN, dtype=torch.float64, requires_grad=trained[0])
        targets = torch.randint(vocab, (SAMPLES, LENGTH))
        targets[0, :ignored] = IGNORED
        logits = x @ full.t()
        logits = torch.tanh(logits / softcap) * softcap if softcap else logits
        plain = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        here = x.detach()[:, mine].clone().requires_grad_(trained[0])
        loss.expect(targets)
        losses = loss(loss.of(here), targets)
        with torch.no_grad():
            loss.expect(targets)
            close(loss.of(here), plain.detach(), "loss without gradients")
        if any(trained):
            value = losses.detach()
            assert value == 0.0
            (scale * losses).backward()
            (scale * plain).backward()
            close(value, plain.detach(), "loss")
        else:
            close(losses, plain.detach(), "loss of frozen weights")
        if trained[0]:
            close(here.grad, x.grad[:, mine] if x.grad is not None else None, "gradient of the input", 1e-10)
    if trained[1]:
        assert weight.grad is not None
        close(weight.grad[:real], full.grad[start : start + real], "gradient of the weight", 1e-9)  # type: ignore[index]
        assert not weight.grad[real:].any(), "padding has a gradient"
        assert len(reported) == 2, "one contribution a microbatch, however many chunks"
    assert weight.grad is None or trained[1]


def every_case() -> None:
    for tokens in (1, 7, 8, 24, 100):
        case(vocab=13, tokens=tokens)
    case(vocab=13, multiple=4, tokens=5)
    case(vocab=1, tokens=5)
    case(vocab=13, multiple=4, tokens=5, softcap=2.0, ignored=5)
    case(vocab=13, tokens=5, ignored=LENGTH)
    for trained in ((True, False), (False, True), (False, False)):
        case(vocab=5, multiple=2, tokens=5, trained=trained)
    if dist.get_world_size() > 1:
        case(vocab=13, multiple=4, tokens=5, softcap=2.0, ignored=5, sequence=True)
        case(vocab=5, tokens=7, sequence=True, trained=(True, False))
        case(vocab=5, tokens=7, sequence=True, trained=(False, True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_and_gradients_equal_torchs(ranks: int) -> None:
    on_ranks(ranks, every_case)


def bfloat16(softcap: float = 0.0, tokens: int = 16) -> tuple[ChunkedCrossEntropy, Tensor, Tensor]:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(500, 32).bfloat16())
    weight.grad_dtype = torch.float32
    x = torch.randn(2, 64, 32).bfloat16().requires_grad_()
    loss = ChunkedCrossEntropy(
        ParallelLinear(weight, None), VocabParallelCrossEntropy(0, 500, None), tokens, softcap
    )
    targets = torch.randint(500, (2, 64))
    loss.expect(targets)
    return loss, x, targets


def test_16_bit_weights_have_a_loss_and_gradients_in_32() -> None:
    loss, x, targets = bfloat16()
    value = loss.of(x)
    value.backward()
    weight = loss.out.weight
    logits = functional.linear(x.detach(), weight.detach()).float().flatten(0, 1).requires_grad_()
    plain = functional.cross_entropy(logits, targets.flatten(), reduction="sum")
    plain.backward()
    assert logits.grad is not None
    assert value.dtype == torch.float32
    close(value.detach(), plain.detach(), "loss", 1e-5)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    expected = logits.grad.t() @ x.detach().float().flatten(0, 1)
    assert float((weight.grad - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize(("softcap", "bytes_"), [(0.0, 6), (5.0, 10)])
def test_no_more_logits_exist_than_those_of_a_chunk(softcap: float, bytes_: int) -> None:
    loss, x, targets = bfloat16(softcap)
    loss.out.weight.requires_grad_(False)
    with MemoryTracker() as memory:
        assert (x.sum() + loss.out.weight.sum() + targets.sum()).isfinite()  # counted from here on
        memory.restart()
        before = memory.peak
        value = loss.of(x)
        assert memory.peak == before + 4
        value.backward()
    of_chunk, dx = 16 * 500 * bytes_, 2 * 64 * 32 * 2
    assert of_chunk + dx < memory.peak - before < 1.1 * (of_chunk + dx)


def test_the_targets_are_told_before_each_forward() -> None:
    loss, x, _ = bfloat16()
    loss.of(x)
    with pytest.raises(AssertionError, match="are not set"):
        loss.of(x)


@pytest.mark.parametrize(
    ("choice", "sizes", "chunk"),
    [
        (None, {"tokens": 8192, "columns": 128256, "hidden": 4096}, 2048),
        (None, {"tokens": 512, "columns": 131072, "hidden": 256}, 256),
        (None, {"tokens": 520, "columns": 131072, "hidden": 256}, 174),  # three of nearly one size
        (None, {"tokens": 256, "columns": 131072, "hidden": 256}, 0),  # one chunk would be all
        (None, {"tokens": 4096, "columns": 512, "hidden": 256}, 0),  # few logits
        (0, {"tokens": 8192, "columns": 128256, "hidden": 4096}, 0),
        (100, {"tokens": 512, "columns": 300, "hidden": 32}, 100),
        (1000, {"tokens": 512, "columns": 300, "hidden": 32}, 512),
    ],
)
def test_tokens_of_a_chunk(choice: int | None, sizes: dict[str, Any], chunk: int) -> None:
    assert loss_chunk_tokens(choice, **sizes) == chunk
