"""Claims: a layer of experts on two expert-parallel ranks is faster than one process with all of the tokens;
the products of all experts are as fast as the better of torch's grouped call and a loop.

python benchmarks/experts.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import Step, Timing, arguments, on_ranks, race, report
from small_gpt import only_rank
from torch import Tensor, nn

from stretto import Layout
from stretto.engine.models.moe import MoE
from stretto.engine.parallel.expert import grouped
from stretto.engine.parallel.expert.auxiliary import Auxiliary, bind_auxiliary
from stretto.engine.parallel.expert.experts import ExpertParallel, ExpertWeights
from stretto.engine.parallel.expert.grouped import Groups
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import parallelize
from stretto.engine.parallel.styles import Replicate
from stretto.job.experts import ExpertShape
from stretto.job.shape import ModelShape

RANKS, SAMPLES, SEQUENCE = 2, 4, 256
SHAPE = ModelShape(
    family="llama",
    layers=1,
    hidden=256,
    heads=4,
    ffn=1024,
    vocab=64,
    sequence=SEQUENCE,
    moe=ExpertShape(experts=8, top_k=2, ffn=512, balance=0.01, z=0.001),
)
# rows, experts, out, in: shares of small and of larger layers
PRODUCTS = ((64, 4, 32, 16), (512, 8, 256, 64), (1024, 8, 512, 128), (1024, 8, 1024, 256))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Layer(nn.Module):
    """The layer under a name that the sharding plan matches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.mlp = MoE(SHAPE)


def samples(ranks: int) -> Tensor:
    """Activations of the samples of several ranks."""
    return torch.randn(ranks * SAMPLES, SEQUENCE, SHAPE.hidden)


def plain_step(layer: Layer) -> Step:
    """The plain layer, one process with the samples of all ranks, forward and backward."""
    x = samples(RANKS).requires_grad_()

    def step() -> None:
        y = layer.mlp(x)
        (y.sum() + layer.mlp.auxiliary).backward()

    return step


def our_step(mesh: Mesh, expert_tp: int = 1) -> Step:
    """Stretto's layer on each rank's own samples: forward, backward and the router's sum over replicas."""
    layer, auxiliary = Layer(), Auxiliary()
    plan = {
        "mlp": ExpertParallel(SEQUENCE),
        "mlp.router": Replicate(sequence=True),
        "mlp.experts": ExpertWeights(expert_tp),
    }
    parallelize(layer, plan, mesh)
    bind_auxiliary(layer, auxiliary)
    x, group = samples(1).requires_grad_(), mesh.copies("tp")
    router = layer.mlp.router.gate.weight

    def step() -> None:
        router.grad = None
        layer.mlp(x).sum().backward()
        assert router.grad is not None
        if group is not None:
            dist.all_reduce(router.grad, group=group)

    return step


def layers(rounds: int) -> list[Timing]:
    """One process, expert parallelism, and experts split by tensor parallelism."""
    contestants = {
        "one process": only_rank(0, plain_step(Layer()), dist.get_rank()),
        "ep=2": our_step(Mesh(Layout(dp=RANKS, ep=RANKS))),
        "expert_tp=2": our_step(Mesh(Layout(dp=RANKS, expert_tp=RANKS)), RANKS),
    }
    return race(contestants, "one process", rounds=rounds)


def products(
    rows: int, experts: int, out: int, into: int, dtype: torch.dtype
) -> dict[str, Callable[[], None]]:
    """Forward and both gradients with torch's grouped call, with a loop, and with Stretto's choice."""
    x, dy = torch.randn(rows, into).to(dtype), torch.randn(rows, out).to(dtype)
    weight, gradient = torch.randn(experts, out, into).to(dtype), torch.zeros(experts, out, into)
    counts = torch.randint(experts, (rows,)).bincount(minlength=experts)
    groups, chosen = Groups(tuple(counts.tolist()), x.device), grouped.in_one_call

    def all_three(rule: Callable[..., bool]) -> None:
        grouped.in_one_call = rule
        grouped.grouped_linear(x, weight, None, groups)
        grouped.grouped_input_gradient(dy, weight, groups)
        grouped.add_grouped_weight_gradient(gradient, dy, x, groups)
        grouped.in_one_call = chosen

    return {
        "a loop": lambda: all_three(lambda *_: False),
        "one call": lambda: all_three(lambda *_: True),
        "chosen": lambda: all_three(chosen),
    }


def main() -> None:
    args = arguments(__doc__, rounds=20)
    tokens = RANKS * SAMPLES * SEQUENCE
    timings = on_ranks(RANKS, layers, args.rounds)[0]
    report(f"a layer of {SHAPE.moe}, {tokens} tokens", timings, "one process", args.out)
    for timing in timings:
        print(f"{timing.name}: {tokens / timing.median_ms * 1e3:,.0f} tokens/s")
    torch.set_num_threads(1)
    for name, dtype in DTYPES.items():
        for sizes in PRODUCTS:
            rows, experts, out, into = sizes
            timings = race(products(*sizes, dtype), "a loop", rounds=args.rounds, inner=5)
            title = f"{name}, {rows} rows over {experts} experts, {into} -> {out}, forward and both gradients"
            report(title, timings, "a loop", args.out)


if __name__ == "__main__":
    main()
