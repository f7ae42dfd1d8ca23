"""GPT and Llama through parallelize and Pipeline equal the plain model under layouts of four ranks."""

from __future__ import annotations

import itertools
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from ranks import on_ranks
from stretto import Layout, schedule
from stretto.engine.models.build import build
from stretto.engine.models.language import LanguageModel
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import materialise, parallelize
from stretto.engine.parallel.tensor.dropout import DropoutKeys, key_dropout
from stretto.engine.pipeline import PartialGradient, Pipeline, ReplicatedWeights
from stretto.engine.pipeline.shared import find_ties
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.program.program import Program

SEQUENCE, SIZE = 6, 2  # tokens of a sample, samples of a microbatch

GPT = ModelShape(family="gpt", layers=2, hidden=16, heads=4, vocab=37, sequence=SEQUENCE)
DROPOUT = replace(GPT, dropout=0.3)
GROUPED = ModelShape(
    family="llama", layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=37, sequence=SEQUENCE
)
ONE_KEY = ModelShape(
    family="llama",
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=1,
    ffn=24,
    vocab=37,
    sequence=SEQUENCE,
    tied=True,
    bias=True,
)
TINY_VOCAB = replace(GROUPED, vocab=5, tied=True)  # over four ranks the last has no real row


@dataclass(frozen=True)
class Case:
    shape: ModelShape
    layout: Layout
    name: str = "1f1b"
    microbatches: int = 3
    chunks: int | None = None
    multiple: int = 1

    def program(self) -> Program:
        return schedule(self.name, ranks=self.layout.pp, microbatches=self.microbatches, chunks=self.chunks)


CASES = [
    Case(DROPOUT, Layout(tp=4), multiple=8),
    Case(TINY_VOCAB, Layout(tp=4)),  # each key head on two ranks
    Case(ONE_KEY, Layout(tp=2, pp=2), "gpipe", 2),
    Case(DROPOUT, Layout(tp=2, dp=2, order="dp-tp-pp")),
    Case(DROPOUT, Layout(pp=2, dp=2), "interleaved", 4, 2),
]
MORE = [
    Case(GPT, Layout(tp=4)),
    Case(GROUPED, Layout(tp=4)),
    Case(ONE_KEY, Layout(tp=4), multiple=4),
    Case(GPT, Layout(tp=2, pp=2)),
    Case(DROPOUT, Layout(tp=2, pp=2), "interleaved", 3, 2),
    Case(ONE_KEY, Layout(tp=2, dp=2), "naive", 2, multiple=8),
    Case(GROUPED, Layout(pp=4), "1f1b", 2),
    Case(GPT, Layout(dp=4), multiple=64),
]


def tokens(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """Ids and targets [dp, m, size, s] of a step; some targets ignored."""
    stream = torch.Generator().manual_seed(step)
    size = (case.layout.dp, case.microbatches, SIZE, SEQUENCE)
    ids, targets = (torch.randint(case.shape.vocab, size, generator=stream) for _ in range(2))
    return ids, targets.masked_fill(torch.rand(size, generator=stream) < 0.2, -100)


def samples(case: Case, step: int, replica: int, microbatch: int) -> range:
    first = ((step * case.layout.dp + replica) * case.microbatches + microbatch) * SIZE
    return range(first, first + SIZE)


def plain_model(shape: ModelShape) -> LanguageModel:
    return deepcopy(_plain_model(shape))


@cache
def _plain_model(shape: ModelShape) -> LanguageModel:
    torch.manual_seed(5)
    model = build(shape).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)  # norms and biases too
    return model


def reference(case: Case, keys: DropoutKeys, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses [dp, m] and gradients of one process with the same dropout."""
    model = plain_model(case.shape)
    key_dropout(model, keys)
    losses = torch.zeros(case.layout.dp, case.microbatches, dtype=torch.float64)
    ids, targets = tokens(case, step)
    for replica in range(case.layout.dp):
        for i in range(case.microbatches):
            keys.samples = samples(case, step, replica, i)
            loss = model.loss(model(ids[replica, i]), targets[replica, i])
            (0.1 * loss).backward()
            losses[replica, i] = loss.detach()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def close(computed: Tensor, plain: Tensor, label: str) -> None:
    torch.testing.assert_close(computed, plain, rtol=1e-10, atol=1e-12, msg=lambda text: f"{label}: {text}")


def run(case: Case) -> None:
    keys, mesh = DropoutKeys(3), Mesh(case.layout)
    full = {name: p.detach() for name, p in plain_model(case.shape).named_parameters()}
    with torch.device("meta"):
        model = build(case.shape)
    key_dropout(model, keys)
    job = Job(shape=case.shape, layout=case.layout, vocab_multiple=case.multiple)
    table = parallelize(model, sharding_plan(job), mesh)
    ties = find_ties([layer for _, layer in model.layers()])  # before some layers leave the meta device
    layers, program, replica, now = model.layers(), case.program(), mesh.index("dp"), 0
    edges = [s * len(layers) // program.stages for s in range(program.stages + 1)]
    stages = [range(a, b) for a, b in itertools.pairwise(edges)]
    mine = [layers[i] for s in program.stages_of(mesh.index("pp")) for i in stages[s]]
    parameters = materialise(mine, table, lambda name, _: full[name], mesh.device, torch.float64)

    def before(microbatch: int) -> None:
        keys.samples = samples(case, now, replica, microbatch)

    pipe = Pipeline(
        [layer for _, layer in layers],
        program,
        mesh,
        model.loss,
        cut=stages,
        ties=ties,
        partial=[PartialGradient(parameters[n], shared) for n in parameters for shared in table[n].shared],
        weights=ReplicatedWeights(bucket_bytes=2000),
        before_forward=before,
    )
    for now in range(2):
        ids, targets = tokens(case, now)
        losses = pipe.step(list(ids[replica]), list(targets[replica]), 0.1)
        wanted, gradients = reference(case, DropoutKeys(3), now)
        if losses is not None:
            close(losses, wanted[replica], f"{case}: step {now} losses")
        for name, parameter in parameters.items():
            seen = torch.zeros_like(parameter)
            assert parameter.grad is not None
            for piece in table[name].placed.pieces:
                close(
                    piece.of_local(parameter.grad),
                    piece.of_full(gradients[name]),
                    f"{case}: step {now} gradient {name}",
                )
                piece.of_local(seen).fill_(1.0)
            assert not parameter.grad[seen == 0].any(), f"{case}: padding of {name} has a gradient"
    evaluated = pipe.evaluate(list(ids[replica]), list(targets[replica]))
    if evaluated is not None:
        plain = plain_model(case.shape).eval()
        with torch.no_grad():
            values = [plain.loss(plain(x), t) for x, t in zip(ids[replica], targets[replica], strict=True)]
        close(evaluated, torch.stack(values), f"{case}: evaluation")
    pipe.close()
    mesh.close()


def every_case(cases: list[Case]) -> None:
    for case in cases:
        run(case)


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"])
def test_language_models_equal_the_plain_model(cases: list[Case]):
    on_ranks(4, every_case, cases)


def test_one_rank_equals_the_plain_model():
    for shape in (DROPOUT, ONE_KEY):
        run(Case(shape, Layout(), "interleaved", 2, 2, multiple=64))
