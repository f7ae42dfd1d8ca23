"""Lookups and updates of embedding tables on one thread: Stretto, plain PyTorch and, if installed, FBGEMM.

26 tables of 10^3 to 10^6 rows, batch 2048, uniform ids. A step looks up all tables and updates the rows
seen, with a fixed gradient of the sums; networks and exchange are excluded.

    python benchmarks/dlrm_kernels.py --hot 10 --rule rowwise_adagrad
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from harness import Step, arguments, race, report
from torch import Tensor, nn

from stretto.recommender.optim.rules import build_rule
from stretto.recommender.optim.updater import update_rows
from stretto.recommender.stores.store import DeviceStore
from stretto.recommender.tables.kernels.cpu import kernels_for
from stretto.recommender.tables.kernels.plain import Kernels

TABLES, LEAST, MOST = 26, 1_000, 1_000_000
LR = 0.01


def main() -> None:
    args = arguments(__doc__, rounds=15, hot=10, dim=64, batch=2048, rule="rowwise_adagrad", parts=0)
    torch.set_num_threads(1)
    rows = [round(LEAST * (MOST / LEAST) ** (i / (TABLES - 1))) for i in range(TABLES)]
    ids = [torch.randint(0, r, (args.batch, args.hot)) for r in rows]
    gradient = torch.randn(TABLES, args.batch, args.dim)
    title = f"{args.rule}, {args.hot} id(s) a feature, dim {args.dim}, batch {args.batch}"
    if args.parts:
        timings = race(_parts(args.rule, rows, ids, gradient), "lookup", rounds=args.rounds)
        report(f"parts of a step: {title}", timings, "lookup", args.out)
        return
    contestants: dict[str, Step | None] = {
        "plain PyTorch": _torch(args.rule, rows, ids, gradient),
        "Stretto": _stretto(args.rule, rows, ids, gradient, kernels_for("cpu", torch.float32)),
        "Stretto without numba": _stretto(args.rule, rows, ids, gradient, Kernels()),
    }
    if find_spec("fbgemm_gpu") is not None and args.rule in _OF_FBGEMM:
        contestants["FBGEMM"] = _fbgemm(args.rule, rows, ids, gradient)
    steps = {name: step for name, step in contestants.items() if step is not None}
    reference = next(iter(steps))
    report(f"lookup and update: {title}", race(steps, reference, rounds=args.rounds), reference, args.out)


def _make_inputs(rule_name: str, rows: list[int], ids: list[Tensor], gradient: Tensor) -> tuple[Any, ...]:
    """Rule, store, slots, offsets, flat gradient."""
    rule = build_rule(rule_name)
    store = DeviceStore(
        sum(rows), gradient.shape[2], rule.weight_dtype(torch.float32), rule.state_specs(torch.float32)
    )
    for first in range(0, store.rows, 1 << 18):
        count = min(1 << 18, store.rows - first)
        store.write(first, rule.encode(torch.randn(count, store.width) * 0.01))
    bases = [sum(rows[:i]) for i in range(len(rows))]
    slots = torch.cat([(table_ids + base).view(-1) for table_ids, base in zip(ids, bases, strict=True)])
    offsets = torch.arange(0, len(slots) + 1, ids[0].shape[1])
    return rule, store, slots, offsets, gradient.view(-1, gradient.shape[2])


def _stretto(rule_name: str, rows: list[int], ids: list[Tensor], gradient: Tensor, kernels: Kernels) -> Step:
    rule, store, slots, offsets, flat = _make_inputs(rule_name, rows, ids, gradient)

    def step() -> None:
        kernels.lookup(store.weight, slots, offsets)
        update_rows(
            rule=rule,
            kernels=kernels,
            weight=store.weight,
            states=store.states,
            slots=slots,
            offsets=offsets,
            gradient=flat,
            lr=LR,
        )

    return step


def _parts(rule_name: str, rows: list[int], ids: list[Tensor], gradient: Tensor) -> dict[str, Step]:
    rule, store, slots, offsets, flat = _make_inputs(rule_name, rows, ids, gradient)
    kernels = kernels_for("cpu", torch.float32)
    grouped = kernels.group(slots)
    return {
        "lookup": lambda: kernels.lookup(store.weight, slots, offsets),
        "group": lambda: kernels.group(slots),
        "update of groups": lambda: update_rows(
            *(rule, kernels, store.weight, store.states, slots, offsets, flat, LR), grouped=grouped
        ),
        "segment sum": lambda: kernels.segment_sum(flat, offsets, grouped),
        "squares": lambda: kernels.squares(flat, offsets, grouped),
        "torch: sort": lambda: Kernels().group(slots),
    }


class _RowwiseAdagrad:
    """A hand-written version, since torch has none."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights
        self.sums = [torch.zeros(len(weight)) for weight in weights]

    @torch.no_grad()
    def step(self) -> None:
        for weight, total in zip(self.weights, self.sums, strict=True):
            assert weight.grad is not None
            sparse = weight.grad.coalesce()
            rows, values = sparse.indices()[0], sparse.values()
            total.index_add_(0, rows, values.square().mean(1))
            scale = total[rows].sqrt_().add_(1e-8).reciprocal_().mul_(-LR)
            weight.index_add_(0, rows, values * scale.unsqueeze(1))


def _torch(rule: str, rows: list[int], ids: list[Tensor], gradient: Tensor) -> Step | None:
    """One `EmbeddingBag(sparse=True)` per table, and the optimiser that accepts its gradients."""
    makers: dict[str, Callable[[list[nn.Parameter]], Any]] = {
        "sgd": lambda weights: torch.optim.SGD(weights, lr=LR),
        "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=LR),
        "rowwise_adagrad": _RowwiseAdagrad,
        "lazy_adam": lambda weights: torch.optim.SparseAdam(weights, lr=LR),
    }
    if rule not in makers:
        return None
    bags = [nn.EmbeddingBag(r, gradient.shape[2], mode="sum", sparse=True) for r in rows]
    optimiser = makers[rule](list(nn.ModuleList(bags).parameters()))

    def step() -> None:
        for bag in bags:
            bag.weight.grad = None
        sums = [bag(table_ids) for bag, table_ids in zip(bags, ids, strict=True)]
        torch.autograd.backward(sums, list(gradient))
        optimiser.step()

    return step


_OF_FBGEMM = {
    "sgd": "EXACT_SGD",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
}


def _fbgemm(rule: str, rows: list[int], ids: list[Tensor], gradient: Tensor) -> Step:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType  # pyright: ignore
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation  # pyright: ignore
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # pyright: ignore
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    dim = gradient.shape[2]
    bags = SplitTableBatchedEmbeddingBagsCodegen(
        [(r, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for r in rows],
        optimizer=getattr(EmbOptimType, _OF_FBGEMM[rule]),
        learning_rate=LR,
        eps=1e-8,
    )
    indices = torch.cat([table_ids.view(-1) for table_ids in ids])
    offsets = torch.arange(0, len(indices) + 1, ids[0].shape[1])
    back = gradient.transpose(0, 1).reshape(-1, len(rows) * dim).contiguous()

    def step() -> None:
        bags(indices, offsets).backward(back)

    return step


if __name__ == "__main__":
    main()
