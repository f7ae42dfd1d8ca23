"""The small GPT of the step benchmarks, as Stretto trains it and as a peer would write it in plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from harness import Step
from torch import Tensor, nn

from stretto.engine.models.build import build
from stretto.engine.models.weights import initialise
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.tensor import matmul
from stretto.job.shape import ModelShape
from stretto.run.config.job import job_of
from stretto.run.config.load import parse
from stretto.run.config.schema import TrainConfig
from stretto.run.train.assemble import assemble
from stretto.run.train.language_task import apply_gradients
from stretto.run.train.rank_model import RankModel

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCAB = 8, 256, 4, 128, 8192
MICROBATCHES, SAMPLES = 8, 4
TOKENS = MICROBATCHES * SAMPLES * SEQUENCE
SHAPE = ModelShape(
    family="gpt", layers=LAYERS, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, sequence=SEQUENCE, tied=False
)


def resize(hidden: int, vocab: int = VOCAB) -> None:
    """Set the width of all contestants, with heads of 64 features, and the vocabulary."""
    global SHAPE, HIDDEN, HEADS, VOCAB
    HIDDEN, HEADS, VOCAB = hidden, hidden // 64, vocab
    sizes = {"heads": HEADS, "kv_heads": HEADS, "ffn": 4 * hidden}
    SHAPE = replace(SHAPE, hidden=hidden, vocab=vocab, **sizes)


def config(**overrides: Any) -> TrainConfig:
    """The job as a config; overrides as `layout__pp=2`."""
    text = f"""
model: {{family: gpt, layers: {LAYERS}, hidden: {HIDDEN}, heads: {HEADS}, vocab: {VOCAB}, tied: false}}
data: {{sequence: {SEQUENCE}, vocab: {VOCAB}}}
batch: {{global_size: {MICROBATCHES * SAMPLES}, micro_size: {SAMPLES}}}
optim: {{lr: 1e-3, weight_decay: 0.01, clip: null, betas: [0.9, 0.999]}}
train: {{device: cpu}}
"""
    return parse(text, overrides=[f"{name.replace('__', '.')}={value}" for name, value in overrides.items()])


def batch(step: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets of all microbatches, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCAB, (MICROBATCHES, SAMPLES, SEQUENCE + 1), generator=generator)
    return list(ids[..., :-1].contiguous()), list(ids[..., 1:].contiguous())


def plain() -> nn.Module:
    """The plain model with its initial values."""
    model = build(SHAPE)
    initialise(model, 0)
    return model


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss as peers compute it."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimiser as peers use it: fused AdamW."""
    return torch.optim.AdamW(list(parameters), lr=1e-3, weight_decay=0.01, fused=True)


def replica(config: TrainConfig) -> RankModel:
    """Stretto's contestant on this rank."""
    job = replace(job_of(config), shape=SHAPE)
    return assemble(job, Mesh(job.layout), seed=config.train.seed)


def stretto_step(replica: RankModel, dp: int = 1) -> Step:
    """One training step of Stretto, update included."""
    inputs, targets = batch()
    d = replica.mesh.index("dp")
    mine = slice(d, None, dp)
    scale = torch.full((len(inputs[mine]),), 1.0 / TOKENS)

    def step() -> Tensor | None:
        losses = replica.pipeline.step(inputs[mine], targets[mine], scale)
        apply_gradients(replica, 1e-3, float(replica.gradient_norm()))
        replica.states.ready()  # pending transfers would take time from the next contestant
        return losses

    return step


def with_blas(step: Step) -> Step:
    """The same step with torch's own matrix products, to separate the effect of the library."""

    def slow() -> object:
        chosen, matmul.ONEDNN = matmul.ONEDNN, False
        loss = step()
        matmul.ONEDNN = chosen
        return loss

    return slow


def single_step(model: nn.Module) -> Step:
    """One process in plain torch, with gradient accumulation."""
    inputs, targets = batch()
    optimizer = adamw(model.parameters())

    def step() -> None:
        for x, y in zip(inputs, targets, strict=True):
            (mean_loss(model(x), y) / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def only_rank(rank: int, step: Step, me: int) -> Step:
    """The step on one rank while the others wait."""
    return step if me == rank else (lambda: None)


def split(layers: Sequence[nn.Module], cut: Sequence[range], stages: Sequence[int]) -> list[nn.Sequential]:
    """The stages' layers as modules."""
    return [nn.Sequential(*(layers[i] for i in cut[s])) for s in stages]
