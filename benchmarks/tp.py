"""Claim: two tensor-parallel ranks beat torch's parallelize_module (DTensor) by 20%.

The peer's attention keeps query, key and value of a head together, so that its shards are whole heads.

    python benchmarks/tp.py
"""

from __future__ import annotations

import torch.distributed as dist
from harness import Step, Timing, arguments, on_ranks, race, report
from small_gpt import (
    HEADS,
    HIDDEN,
    MICROBATCHES,
    adamw,
    batch,
    config,
    mean_loss,
    only_rank,
    plain,
    replica,
    single_step,
    stretto_step,
    with_blas,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import functional

REFERENCE = "torch DTensor"


class HeadwiseAttention(nn.Module):
    """The plain model's attention with its features ordered (head, q/k/v, d)."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.qkv, self.proj = plain.get_submodule("qkv"), plain.get_submodule("proj")

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        features = self.qkv(x)
        q, k, v = features.view(b, s, -1, 3, HIDDEN // HEADS).permute(3, 0, 2, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, s, -1))


def dtensor(split_loss: bool) -> Step:
    """parallelize_module with the usual plan; with `split_loss` the logits stay split in the loss."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = plain()
    for block in model.blocks:  # pyright: ignore
        block.attn = HeadwiseAttention(block.attn)
        plan: dict[str, ParallelStyle] = {
            "attn.qkv": ColwiseParallel(),
            "attn.proj": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    out = (
        ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        if split_loss
        else ColwiseParallel(output_layouts=Replicate())
    )
    parallelize_module(model, mesh, {"head.out": out})
    sharded = [p for p in model.parameters() if hasattr(p, "placements")]
    rest = [p for p in model.parameters() if not hasattr(p, "placements")]
    optimizers = [adamw(sharded), adamw(rest)]
    inputs, targets = batch()

    def work() -> None:
        for x, y in zip(inputs, targets, strict=True):
            (mean_loss(model(x), y) / MICROBATCHES).backward()
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


def compete(rounds: int) -> list[Timing]:
    contestants = {
        "one process": only_rank(0, single_step(plain()), dist.get_rank()),
        REFERENCE: dtensor(False),
        "torch DTensor, loss_parallel": dtensor(True),
        "Stretto": stretto_step(replica(config(layout__tp=dist.get_world_size()))),
        "Stretto, BLAS products": with_blas(stretto_step(replica(config(layout__tp=dist.get_world_size())))),
    }
    return race(contestants, REFERENCE, rounds=rounds)


def main() -> None:
    args = arguments(__doc__, rounds=15)
    timings = on_ranks(2, compete, args.rounds)[0]
    report("2 tensor-parallel ranks", timings, REFERENCE, args.out)


if __name__ == "__main__":
    main()
