"""What recomputation of single operators keeps and repeats, against PyTorch blocks that recompute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,  # pyright: ignore[reportUnknownVariableType]
    create_selective_checkpoint_contexts,
)

from stretto.job.experts import ExpertShape
from stretto.job.flops import hardware_flops_per_token, model_flops_per_token
from stretto.job.framework import OPERATORS, Framework, Operator
from stretto.job.presets import preset
from stretto.job.shape import ModelShape
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.traffic import block_traffic
from stretto.planner.memory.layer import layer_memory, layer_saved, total
from stretto.planner.memory.stage import stage_memory
from stretto.run.train.memory_measured import MemoryTracker

BATCH, ROWS, HIDDEN, HEADS, KV_HEADS, INNER = 2, 64, 64, 8, 2, 192
SHAPE = ModelShape(
    family="llama",
    layers=1,
    hidden=HIDDEN,
    heads=HEADS,
    kv_heads=KV_HEADS,
    ffn=INNER,
    vocab=256,
    sequence=ROWS,
)
COMPUTE = ComputeConfig(batch=BATCH, sequence=ROWS, element=4)
WIDE = HIDDEN // HEADS


def selective(*operators: Operator, compute: ComputeConfig = COMPUTE) -> ComputeConfig:
    return replace(compute, recompute="selective", framework=Framework(operators=operators))


class _Block:
    """A Llama block without rotary positions, as a sequence of plain operators."""

    def __init__(self) -> None:
        sizes = {
            "q": (HIDDEN, HIDDEN),
            "k": (KV_HEADS * WIDE, HIDDEN),
            "v": (KV_HEADS * WIDE, HIDDEN),
            "o": (HIDDEN, HIDDEN),
            "gate": (INNER, HIDDEN),
            "up": (INNER, HIDDEN),
            "down": (HIDDEN, INNER),
        }
        self.weights = {name: torch.randn(*size).mul_(0.1).requires_grad_() for name, size in sizes.items()}

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(BATCH, ROWS, -1, WIDE).transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(BATCH, ROWS, HIDDEN)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (functional.linear(x, self.weights[name]) for name in "qkv")
        return functional.linear(self.core(q, k, v), self.weights["o"])

    def mlp(self, x: Tensor) -> Tensor:
        gate = functional.silu(functional.linear(x, self.weights["gate"]))
        return functional.linear(gate * functional.linear(x, self.weights["up"]), self.weights["down"])

    def forward(self, x: Tensor, mlp: Callable[[Tensor], Tensor]) -> Tensor:
        x = x + self.attention(functional.rms_norm(x, (HIDDEN,)))
        return x + mlp(functional.rms_norm(x, (HIDDEN,)))

    def mlp_again(self, x: Tensor) -> Tensor:
        out = self.forward(x, lambda y: checkpoint(self.mlp, y, use_reentrant=False))  # pyright: ignore[reportArgumentType]
        assert isinstance(out, Tensor)
        return out

    def alternate_again(self, x: Tensor) -> Tensor:
        """As torchtitan's policy "op": every second product, and what is no product, runs again."""
        seen = [0, 0]

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if operator is torch.ops.aten.mm.default:
                seen[context.is_recompute] += 1
                saves = seen[context.is_recompute] % 2 == 1
            else:
                saves = "scaled_dot_product" in str(operator)
            return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return create_selective_checkpoint_contexts(policy)

        out = checkpoint(self.forward, x, self.mlp, use_reentrant=False, context_fn=contexts)
        assert isinstance(out, Tensor)
        return out


def measured(run: Callable[[_Block], Callable[[Tensor], Tensor]]) -> int:
    """Bytes that a block's forward keeps, its input included and its output not."""
    block = _Block()
    x = torch.randn(BATCH, ROWS, HIDDEN, requires_grad=True)
    memory = MemoryTracker()
    with memory:
        memory.name("given", list(block.weights.values()))
        memory.restart()
        before = memory.allocated
        out = run(block)(x.clone())
        saved_bytes = memory.allocated - before
    return saved_bytes - 4 * out.numel()


def test_without_the_mlp_a_real_block_keeps_as_little() -> None:
    plain = measured(lambda block: lambda x: block.forward(x, block.mlp))
    freed = plain - measured(lambda block: block.mlp_again)
    counted = total(layer_saved("block", SHAPE, COMPUTE)) - total(
        layer_saved("block", SHAPE, selective("mlp"))
    )
    assert counted == freed == 4 * BATCH * ROWS * INNER * 4


def test_a_real_block_that_repeats_every_second_product_keeps_as_little() -> None:
    """Beside its input, which a block that runs again as a whole keeps, too."""
    alone = measured(lambda block: lambda x: checkpoint(block.forward, x, block.mlp, use_reentrant=False))  # pyright: ignore
    counted = total(layer_saved("block", SHAPE, selective("alternate_mm"))) - 4 * BATCH * ROWS * HIDDEN
    assert counted == measured(lambda block: block.alternate_again) - alone


@pytest.mark.parametrize(
    ("operators", "freed"),
    [
        (("layernorm",), 2 * HIDDEN),
        (("layernorm", "mlp"), 2 * HIDDEN + 4 * INNER),
        (("core_attn",), HEADS),  # the statistics of the fused kernel
        (("moe", "moe_act", "shared_experts", "mla_up_proj"), 0),  # of other models
    ],
)
def test_dense_operators_free_these_elements_of_a_token(operators: Sequence[Operator], freed: int) -> None:
    without = total(layer_saved("block", SHAPE, COMPUTE)) - total(
        layer_saved("block", SHAPE, selective(*operators))
    )
    assert without == 4 * BATCH * ROWS * freed


MOE = replace(SHAPE, moe=ExpertShape(experts=8, top_k=2, ffn=96, shared_ffn=128))


@pytest.mark.parametrize(
    ("operators", "freed"),
    [
        (("moe_act",), 2 * (2 * 96)),  # silu and its product, of two experts
        (("shared_experts",), 4 * 128),
        (("mlp",), 0),  # no dense MLP
    ],
)
def test_operators_of_experts_free_these_elements_of_a_token(
    operators: Sequence[Operator], freed: int
) -> None:
    compute = replace(COMPUTE, element=2)
    without = total(layer_saved("block", MOE, compute)) - total(
        layer_saved("block", MOE, selective(*operators, compute=compute))
    )
    assert without == 2 * BATCH * ROWS * freed


def test_recomputed_experts_keep_their_input_alone() -> None:
    compute = selective("moe", compute=replace(COMPUTE, element=2))
    for moe in (MOE, replace(MOE, moe=ExpertShape(experts=8, top_k=2, ffn=96))):
        names = {saved.name for saved in layer_saved("block", moe, compute) if saved.name.startswith("mlp")}
        assert names == {"mlp input"}


def test_latent_attention_keeps_narrow_vectors_in_place_of_heads() -> None:
    shape = preset("deepseek-v3").block(0)
    compute = ComputeConfig(batch=1, sequence=4096)
    plain, again = (
        total(layer_saved("block", shape, c)) for c in (compute, selective("mla_up_proj", compute=compute))
    )
    heads = 2 * 4096 * shape.heads * (2 * shape.head_dim + shape.value_dim)
    assert plain - again == heads


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_freed_is_there_again_in_the_backward(operator: Operator) -> None:
    """A block's peak falls by what is freed at most, and not at all where its MLP runs again; that of eight
    blocks falls by what seven free.
    """
    for shape in (replace(MOE, layers=8), replace(SHAPE, layers=8), preset("deepseek-v3")):
        compute = replace(COMPUTE, element=2)
        layers = {
            many: [
                stage_memory([layer_memory(shape, c, 1)] * many, 2 * BATCH * ROWS * shape.hidden)
                for c in (compute, selective(operator, compute=compute))
            ]
            for many in (1, 8)
        }
        peaks = {many: [work.saved + work.backward for work in works] for many, works in layers.items()}
        freed = layers[1][0].saved - layers[1][1].saved
        assert peaks[1][1] >= peaks[1][0] - freed * (operator not in ("mlp", "moe"))
        assert peaks[8][1] <= peaks[8][0] - 7 * freed + 2 * max(peaks[1])


def test_flops_that_run_again() -> None:
    plain = model_flops_per_token(SHAPE, ROWS)
    assert hardware_flops_per_token(SHAPE, ROWS, "selective", operators=("layernorm",)) == plain
    mlp = hardware_flops_per_token(SHAPE, ROWS, "selective", operators=("mlp",)) - plain
    assert mlp == 2 * 3 * HIDDEN * INNER
    alternate = hardware_flops_per_token(SHAPE, ROWS, "selective", operators=("alternate_mm",)) - plain
    assert alternate == 2 * HIDDEN * (KV_HEADS * WIDE + HIDDEN + INNER)
    core = hardware_flops_per_token(SHAPE, ROWS, "selective") - plain
    both = hardware_flops_per_token(SHAPE, ROWS, "selective", operators=("core_attn", "mlp")) - plain
    assert both == core + mlp


def test_a_recomputed_mlp_sums_its_output_again() -> None:
    compute = replace(selective("mlp"), tp=2)
    repeated = [message for message in block_traffic(SHAPE, compute) if message.phase == "R"]
    assert [message.kind for message in repeated] == ["all-reduce"]


def test_inputs_of_recomputed_blocks_in_host_memory() -> None:
    full = replace(COMPUTE, recompute="full")
    there, gone = (
        stage_memory([layer_memory(replace(SHAPE, layers=4), c, layer) for layer in range(1, 5)], 0)
        for c in (full, replace(full, framework=Framework(inputs_on_host=True)))
    )
    residual = 4 * BATCH * ROWS * HIDDEN
    assert (there.saved, gone.saved) == (3 * residual, 0)
    assert there.backward + there.saved - residual <= gone.backward + 3 * residual


def test_inputs_of_8_bit_products() -> None:
    """Of the five inputs of linears one is the core's output too, which stays as it is."""
    compute = replace(COMPUTE, element=2)
    plain, small = (
        total(layer_saved("block", SHAPE, replace(compute, framework=Framework(inputs_in_8_bits=eight))))
        for eight in (False, True)
    )
    assert plain - small == BATCH * ROWS * (HIDDEN + HIDDEN + INNER - HIDDEN)
