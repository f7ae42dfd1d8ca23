"""Claim: two tensor-parallel ranks with sequence parallelism beat torch's parallelize_module (DTensor) with
SequenceParallel by 30%, and by 5% Megatron-core's layers with theirs, if it is installed.

    python benchmarks/sequence_parallel.py [--hidden 512]
"""

from __future__ import annotations

import importlib.util
from typing import Any

import small_gpt
import torch.distributed as dist
from harness import Step, Timing, arguments, on_ranks, race, report
from small_gpt import adamw, batch, config, mean_loss, plain, replica, resize, stretto_step, with_blas
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import functional

DTENSOR, MEGATRON = "torch DTensor, SequenceParallel", "Megatron-core, sequence parallel"


class HeadwiseAttention(nn.Module):
    """The plain model's attention with its features ordered (head, q/k/v, d), so that shards are heads."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.qkv, self.proj = plain.get_submodule("qkv"), plain.get_submodule("proj")

    def forward(self, x: Tensor) -> Tensor:
        """[b, s/t, hidden] to [b, s/t, hidden]."""
        features = self.qkv(x)
        b, s, _ = features.shape
        q, k, v = features.view(b, s, -1, 3, 64).permute(3, 0, 2, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, s, -1))


def dtensor(split_loss: bool) -> Step:
    """parallelize_module with the plan of torch's tutorial; with `split_loss` the logits stay split."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = plain()
    into, out = {"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}
    for block in model.blocks:  # pyright: ignore
        block.attn = HeadwiseAttention(block.attn)
        plan: dict[str, ParallelStyle] = {
            "norm1": SequenceParallel(),
            "attn.qkv": ColwiseParallel(**into),
            "attn.proj": RowwiseParallel(**out),
            "norm2": SequenceParallel(),
            "mlp.up": ColwiseParallel(**into),
            "mlp.down": RowwiseParallel(**out),
        }
        parallelize_module(block, mesh, plan)
    logits: dict[str, Any] = {"output_layouts": Shard(-1), "use_local_output": False} if split_loss else {}
    ends: dict[str, ParallelStyle] = {
        "embed": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
        "head.norm": SequenceParallel(),
        "head.out": ColwiseParallel(**into, **(logits or {"output_layouts": Replicate()})),
    }
    parallelize_module(model, mesh, ends)
    sharded = [p for p in model.parameters() if hasattr(p, "placements")]
    rest = [p for p in model.parameters() if not hasattr(p, "placements")]
    optimizers = [adamw(sharded), adamw(rest)]
    inputs, targets = batch()

    def work() -> None:
        for x, y in zip(inputs, targets, strict=True):
            (mean_loss(model(x), y) / small_gpt.MICROBATCHES).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def step() -> None:
        if split_loss:
            with loss_parallel():
                work()
        else:
            work()

    return step


def contestant(sequence_parallel: bool) -> Step:
    """Stretto on this rank."""
    settings = {"layout__tp": dist.get_world_size(), "layout__sequence_parallel": sequence_parallel}
    return stretto_step(replica(config(**settings)))


def compete(hidden: int, rounds: int) -> list[Timing]:
    """Against DTensor."""
    resize(hidden)
    contestants = {
        DTENSOR: dtensor(False),
        f"{DTENSOR}, loss_parallel": dtensor(True),
        "Stretto": contestant(True),
        "Stretto, BLAS products": with_blas(contestant(True)),
        "Stretto, tensor parallel": contestant(False),
    }
    return race(contestants, DTENSOR, rounds=rounds)


def compete_megatron(hidden: int, rounds: int) -> list[Timing]:
    """Against Megatron-core, in a separate process, since it needs stand-ins for CUDA."""
    import megatron_core

    resize(hidden)
    megatron_core.HIDDEN, megatron_core.HEADS = small_gpt.HIDDEN, small_gpt.HEADS
    contestants = {
        "Stretto": contestant(True),
        "Stretto, BLAS products": with_blas(contestant(True)),
        "Stretto, tensor parallel": contestant(False),
    }
    megatron_core.without_cuda()
    contestants[MEGATRON] = megatron_core.megatron(dist.get_world_size(), 1, 1, sequence_parallel=True)
    return race(contestants, MEGATRON, rounds=rounds)


def main() -> None:
    args = arguments(__doc__, rounds=15, hidden=256, ranks=2)
    title = f"{args.ranks} tensor-parallel ranks, sequence parallel, hidden {args.hidden}"
    timings = on_ranks(args.ranks, compete, args.hidden, args.rounds)[0]
    report(title, timings, DTENSOR, args.out)
    if importlib.util.find_spec("megatron") is None:
        print("Megatron-core is not installed here.")
        return
    timings = on_ranks(args.ranks, compete_megatron, args.hidden, args.rounds)[0]
    report(f"{title}, against Megatron-core", timings, MEGATRON, args.out)


if __name__ == "__main__":
    main()
