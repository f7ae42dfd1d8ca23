"""FLOPs that recomputation adds, counted while a GPT trains, compared with the published formulas.

    python benchmarks/recompute_flops.py [--hidden 256 --sequence 128 --layers 4]

Counts matrix products with torch's counter, in float64 (it does not see the float32 products that oneDNN
computes) and with explicit attention, every position attending to every other, as the papers count.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.flop_counter import FlopCounterMode

from stretto import Layout
from stretto.engine.models.build import build
from stretto.engine.models.causal import choose_kernel
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import parallelize
from stretto.engine.parallel.recompute import MODES, recompute_blocks
from stretto.job.flops import Recompute, hardware_flops_per_token, model_flops_per_token
from stretto.job.job import Job
from stretto.job.shape import ModelShape


def measured(shape: ModelShape, batch: int, mode: Recompute) -> int:
    """FLOPs of one forward and backward over `batch` whole samples."""
    torch.manual_seed(1)
    mesh, model = Mesh(Layout()), build(shape).double()
    choose_kernel(model, "explicit")
    parallelize(model, sharding_plan(Job(shape=shape)), mesh)
    modes: list[Recompute] = [mode] * shape.layers
    recompute_blocks(list(model.blocks), modes, mesh)
    ids, targets = torch.randint(shape.vocab, (2, batch, shape.sequence))
    with FlopCounterMode(display=False) as counter:
        model.loss(model(ids), targets).backward()
    return counter.get_total_flops()


def published(shape: ModelShape, batch: int, mode: Recompute) -> float:
    """The papers' closed forms: 72BLsh^2(1+s/(6h)+V/(12hL)), with s/(3h) where attention is recomputed
    (Korthikanti et al. 2022, appendix A), and 96BLsh^2(1+s/(6h)+V/(16Lh)) where blocks are (Narayanan et al.
    2021, equation 3).
    """
    s, h, layers, vocab = shape.sequence, shape.hidden, shape.layers, shape.vocab
    if mode == "full":
        return 96 * batch * layers * s * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    part = s / (3 * h) if mode == "selective" else s / (6 * h)
    return 72 * batch * layers * s * h**2 * (1 + part + vocab / (12 * h * layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("hidden", 256), ("sequence", 128), ("layers", 4), ("vocab", 512), ("batch", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    shape = ModelShape(
        family="gpt",
        layers=args.layers,
        hidden=args.hidden,
        heads=args.hidden // 64,
        vocab=args.vocab,
        sequence=args.sequence,
    )
    tokens = args.batch * args.sequence
    model = tokens * model_flops_per_token(shape, args.sequence)
    print(f"{args}: model FLOPs {model:.6g}")
    print("recompute   measured     formula      extra/model  formula/measured  paper/measured")
    for mode in MODES:
        counted, formula = (
            measured(shape, args.batch, mode),
            tokens * hardware_flops_per_token(shape, args.sequence, mode),
        )
        paper = published(shape, args.batch, mode)
        print(
            f"{mode:10}  {counted:<11.6g}  {formula:<11.6g}  {(counted - model) / model:<11.4f}  "
            f"{formula / counted:<13.6f}  {paper / counted:.6f}"
        )


if __name__ == "__main__":
    main()
