"""The memory of layers: the head with a plain and a fused loss, against programs that run both; equal layers
in a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stretto.engine.parallel.tensor.vocabulary import VocabParallelCrossEntropy
from stretto.job.experts import ExpertShape
from stretto.job.flops import Recompute
from stretto.job.framework import Framework
from stretto.job.shape import ModelShape
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.memory.layer import layer_memory
from stretto.planner.memory.stage import GradientStep, Resident, stage_memory
from stretto.run.train.memory_measured import MemoryTracker

ROWS, HIDDEN, VOCAB = 64, 16, 1024
SHAPE = ModelShape(family="gpt", layers=1, hidden=HIDDEN, heads=2, vocab=VOCAB, sequence=ROWS)
COMPUTE = ComputeConfig(batch=1, sequence=ROWS)


class _Fused(torch.autograd.Function):
    """Cross entropy [n, V], [n] -> [1] row by row, as a kernel would: nothing of V columns but its input and
    the input's gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        sums = torch.stack([row.float().logsumexp(0) for row in logits])
        ctx.save_for_backward(logits, sums, targets)
        return (sums - logits.gather(1, targets[:, None])[:, 0]).sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, sums, targets = ctx.saved_tensors
        out = torch.empty_like(logits)
        for at, row in enumerate(logits):
            out[at] = (row.float() - sums[at]).exp() - functional.one_hot(targets[at], VOCAB)
        return out.mul_(dy.to(out.dtype)), None


LOSSES = {
    "fused": replace(COMPUTE, fused_loss=True),
    "torch": replace(COMPUTE, framework=Framework(torch_loss=True)),
    "stretto": COMPUTE,
}


def saved_bytes(loss_name: str) -> int:
    """Most bytes of norm, output layer and loss, beyond what they begin with."""
    x = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    scale = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16)  # not trained: its gradient is not in question
    targets = torch.randint(VOCAB, (ROWS,))
    memory = MemoryTracker()
    with memory:
        memory.name("given", [x, scale, weight, targets])
        memory.restart()
        before = memory.allocated
        logits = functional.layer_norm(x, (HIDDEN,), scale) @ weight.T
        if loss_name == "fused":
            loss: Tensor = _Fused.apply(logits, targets)  # pyright: ignore[reportAssignmentType]
        elif loss_name == "torch":
            loss = functional.cross_entropy(logits.float(), targets, reduction="sum")
        else:
            loss = VocabParallelCrossEntropy(0, VOCAB, None)(logits[None], targets[None])
        del logits
        loss.backward()
    return memory.peak - before


@pytest.mark.parametrize("loss", LOSSES)
def test_the_head_s_memory_equals_a_real_program_s(loss: str) -> None:
    work = stage_memory([layer_memory(SHAPE, LOSSES[loss], SHAPE.layers + 1)], 0)
    predicted = max(work.forward, work.saved + work.ends + work.backward)
    assert predicted == pytest.approx(saved_bytes(loss), rel=0.1)


def test_a_fused_loss_takes_a_third_of_the_memory() -> None:
    plain, fused = (
        stage_memory([layer_memory(SHAPE, LOSSES[loss], SHAPE.layers + 1)], 0) for loss in ("torch", "fused")
    )
    logits = 2 * ROWS * VOCAB
    assert fused.ends + fused.backward < 2.5 * logits < 6 * logits < plain.ends + plain.backward


def test_dtensor_makes_its_loss_s_gradient_from_three_tensors() -> None:
    """With a vocabulary split over tp: the log-probabilities, a tensor for the targets, exponentials, and the
    product with the incoming gradient.
    """
    compute = replace(COMPUTE, tp=2)
    plain, wide = (
        stage_memory([layer_memory(SHAPE, replace(compute, framework=Framework(dtensor_loss=d)), 2)], 0)
        for d in (False, True)
    )
    exact = 4 * ROWS * VOCAB // 2
    assert wide.ends == plain.ends
    assert wide.backward == 3 * exact - 10 * ROWS > plain.backward  # the targets are consumed first
    alone = [
        layer_memory(SHAPE, replace(COMPUTE, framework=Framework(dtensor_loss=d)), 2) for d in (False, True)
    ]
    assert alone[0] == alone[1]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_equal_layers_have_the_peaks_of_different_ones(recompute: Recompute, blocks: int) -> None:
    """Runs of equal layers are counted at once; copies that are not the same object, one by one."""
    shape = ModelShape(family="llama", layers=8, hidden=64, heads=4, vocab=300, sequence=128)
    compute = replace(COMPUTE, recompute=recompute)
    embedding, head = (layer_memory(shape, compute, layer) for layer in (0, shape.chain - 1))
    block = layer_memory(shape, compute, 1)
    step = GradientStep(parameter="mlp.down.weight", formed=70, packing=2000, after=60)
    for changes in ((), (Resident(forward=700, backward=900, gradients=40, steps=(step,)),)):
        resident = [Resident(), *(changes or (Resident(),)) * blocks, Resident()]
        equal = stage_memory([embedding, *[block] * blocks, head], 4096, resident)
        apart = stage_memory([embedding, *(replace(block) for _ in range(blocks)), head], 4096, resident)
        assert equal == apart


def test_a_gradient_is_packed_beside_what_its_product_leaves_alive() -> None:
    """Gradients of queries, keys, values and the input, and the inputs of norm and product."""
    shape = ModelShape(family="llama", layers=1, hidden=64, heads=4, vocab=300, sequence=128)
    block = layer_memory(shape, replace(COMPUTE, sequence=128, accelerator=True), 1)
    peaks = [
        stage_memory([block], 0, [Resident(steps=(GradientStep(name, 0, 2**30, 0),))]).backward
        for name in ("attn.qkv.weight", "norm1.weight")
    ]
    stream = 2 * 128 * 64
    assert peaks[0] - peaks[1] == (1 + 3) * stream + stream + 2 * stream + 4 * 128


def test_accelerators_add_products_to_gradients_in_place() -> None:
    shape = ModelShape(family="llama", layers=1, hidden=64, heads=4, vocab=300, sequence=128)
    for accelerator in (False, True):
        block = layer_memory(shape, replace(COMPUTE, accelerator=accelerator), 1)
        products = [tensor.product for tensor in block.tensors if tensor.held_until_w is not None]
        assert len(products) == 4
        assert [size > 0 for size in products] == [not accelerator] * 4


def test_shared_experts_wait_for_w_too() -> None:
    """The input, the gradient of the first product, and the input of the second, of each shared expert."""
    shapes = [
        ModelShape(family="llama", layers=1, hidden=64, heads=4, vocab=300, sequence=ROWS, moe=experts)
        for experts in (ExpertShape(experts=4, ffn=32), ExpertShape(experts=4, ffn=32, shared_ffn=16))
    ]
    queued = [layer_memory(shape, COMPUTE, 1).queued for shape in shapes]
    assert queued[1] - queued[0] == 2 * ROWS * (64 + 2 * 16 + 16 + 64)
