"""Layers that run again in the backward, under every schedule: bit by bit the gradients of layers that keep
all, and those of one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ranks import on_ranks
from stretto import Layout, schedule
from stretto.engine.models.build import build
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import ShardedParameter, parallelize
from stretto.engine.parallel.recompute import Mode, recompute_blocks
from stretto.engine.parallel.tensor.dropout import DropoutKeys, KeyedDropout, key_dropout
from stretto.engine.pipeline import PartialGradient, Pipeline, ReplicatedWeights
from stretto.errors import StrettoError
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.program import names
from stretto.program.program import Program
from stretto.program.transforms.activations import offload, recompute

SIZE, RATE = 2, 0.5  # samples of a microbatch; large steps, so that versions of weights differ
GPT = ModelShape(
    family="gpt", layers=6, hidden=8, heads=2, vocab=11, sequence=4, dropout=0.3, tied=False, ffn=8
)
LLAMA = replace(GPT, family="llama", dropout=0.0, kv_heads=1, ffn=8, bias=False, mlp="swiglu", norm="rms")
Ways = tuple[tuple[Mode, ...], ...]  # modes of the blocks, repeated
ALIKE: Ways = (("selective",), ("full",))
MIXED: Ways = (("full", "selective", "none"),)


HARD = ("pipedream-2bw", "hanayo", "chimera")


def programs(ranks: int, wanted: Sequence[str] = ()) -> list[Program]:
    """One of every schedule that trains and whose stages find a layer each."""
    chosen = list[Program]()
    for name in wanted or names():
        try:
            program = schedule(name, ranks, 2 * ranks)
        except StrettoError:
            continue
        if program.trains and program.depth <= GPT.layers + 2:
            chosen.append(program)
    return chosen


class Masks:
    """All masks drawn, by layer and samples; each drawing of one must be the same."""

    def __init__(self) -> None:
        self.seen = dict[tuple[str, tuple[int, ...]], Tensor]()
        self.drawn = 0

    def watch(self, layer: KeyedDropout) -> None:
        draw = layer.mask

        def mask(*inputs: object) -> Tensor:
            results = draw(*inputs)  # type: ignore[arg-type]
            key = (layer.name, tuple(layer.keys.samples))
            assert torch.equal(self.seen.setdefault(key, results), results), key
            self.drawn += 1
            return results

        layer.mask = mask  # type: ignore[method-assign, assignment]


def descend(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def batch(shape: ModelShape, step: int, microbatches: int) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(step)
    size = (microbatches, SIZE, shape.sequence)
    return torch.randint(shape.vocab, size, generator=stream), torch.randint(
        shape.vocab, size, generator=stream
    )


def samples(mb: int) -> range:
    return range(SIZE * mb, SIZE * (mb + 1))


class Rank:
    """One rank's share of the model, trained for two steps."""

    def __init__(self, shape: ModelShape, program: Program, mesh: Mesh, modes: Sequence[Mode]) -> None:
        torch.manual_seed(5)
        self.model, keys, m = build(shape).double(), DropoutKeys(3), program.microbatches
        self.masks = Masks()
        key_dropout(self.model, keys)
        plan = sharding_plan(Job(shape=shape, layout=mesh.layout))
        self.table: dict[str, ShardedParameter] = parallelize(self.model, plan, mesh)
        for part in self.model.modules():
            if isinstance(part, KeyedDropout):
                self.masks.watch(part)
        blocks = list(self.model.blocks)
        recompute_blocks(blocks, [modes[i % len(modes)] for i in range(len(blocks))], mesh)

        def before(mb: int) -> None:
            keys.samples = samples(mb)

        layers = [layer for _, layer in self.model.layers()]
        edges = [s * len(layers) // program.depth for s in range(program.depth + 1)]
        cut = [range(a, b) for a, b in itertools.pairwise(edges)]
        mine = [layers[i] for s in program.stages_of(mesh.index("pp")) for i in cut[s % program.depth]]
        local = {id(p) for layer in mine for p in layer.parameters()}
        parameters = {n: p for n, p in self.model.named_parameters() if id(p) in local}
        pipe = Pipeline(
            layers,
            program,
            mesh,
            self.model.loss,
            cut=cut,
            weights=ReplicatedWeights(optimizer=descend if program.versions else None),
            partial=[
                PartialGradient(p, shared) for n, p in parameters.items() for shared in self.table[n].shared
            ],
            before_forward=before,
        )
        self.losses = list[Tensor | None]()
        for step in range(2):
            ids, targets = batch(shape, step, m)
            self.losses.append(pipe.step(list(ids), list(targets), 0.1))
        wanted = (lambda p: p.detach()) if program.versions else (lambda p: p.grad)
        self.found: dict[str, Tensor] = {n: wanted(p).clone() for n, p in parameters.items()}
        pipe.close()


def one_process(shape: ModelShape, microbatches: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses and gradients of the second step."""
    torch.manual_seed(5)
    model, keys = build(shape).double(), DropoutKeys(3)
    key_dropout(model, keys)
    ids, targets = batch(shape, 1, microbatches)
    losses = list[Tensor]()
    for mb in range(microbatches):
        keys.samples = samples(mb)
        losses.append(model.loss(model(ids[mb]), targets[mb]))
        (0.1 * losses[-1]).backward()
    return torch.stack(losses).detach(), {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }


def compare(shape: ModelShape, program: Program, mesh: Mesh, label: str, ways: Ways) -> None:
    """Ways to recompute under one program, beside one another and one process."""
    plain = Rank(shape, program, mesh, ["none"])
    if not program.versions:
        losses, gradients = one_process(shape, program.microbatches)
        for name, gradient in plain.found.items():
            for piece in plain.table[name].placed.pieces:
                computed, expected = piece.of_local(gradient), piece.of_full(gradients[name])
                largest = float(gradients[name].abs().max())
                torch.testing.assert_close(
                    computed, expected, rtol=1e-12, atol=1e-12 * largest, msg=f"{label} {name}"
                )
        if plain.losses[1] is not None and program.copies == 1:
            torch.testing.assert_close(plain.losses[1], losses, rtol=1e-12, atol=0.0)
    for modes in ways:
        again = Rank(shape, program, mesh, modes)
        for a, b in zip(plain.losses, again.losses, strict=True):
            assert (a is None and b is None) or torch.equal(a, b), f"{label} {modes}: losses"  # type: ignore[arg-type]
        for name, wanted in plain.found.items():
            assert torch.equal(wanted, again.found[name]), f"{label} {modes}: {name}"
        assert again.masks.seen.keys() == plain.masks.seen.keys()
        for key, mask in plain.masks.seen.items():
            assert torch.equal(mask, again.masks.seen[key]), f"{label} {modes}: mask {key}"
        here = {int(name.split(".")[1]) for name in plain.found if name.startswith("blocks.")}
        if shape.dropout and any(modes[i % len(modes)] != "none" for i in here):
            assert again.masks.drawn > plain.masks.drawn, f"{label} {modes}: nothing was repeated"


def every_schedule(ranks: int, ways: Ways, wanted: Sequence[str] = ()) -> int:
    mesh, chosen = Mesh(Layout(pp=ranks)), programs(ranks, wanted)
    for program in chosen:
        compare(GPT, program, mesh, f"{program.name} on {ranks}", ways)
    mesh.close()
    return len(chosen)


def with_tensor_parallel(shape: ModelShape, name: str, ways: Ways) -> None:
    mesh = Mesh(Layout(tp=2, pp=2))
    compare(shape, schedule(name, 2, 4), mesh, f"{name} tp2", ways)
    mesh.close()


def with_programs_that_keep_less() -> None:
    """Whole stages repeated, or moved to the host, and blocks repeated inside of them."""
    mesh = Mesh(Layout(pp=2))
    for name in ("zb-h1", "pipedream"):
        program = schedule(name, 2, 4)
        compare(GPT, recompute(program), mesh, f"{name} recomputed", MIXED)
        compare(GPT, offload(program), mesh, f"{name} offloaded", MIXED)
    mesh.close()


def test_hard_schedules():
    assert min(on_ranks(2, every_schedule, 2, MIXED, HARD)) == len(HARD)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_schedule_with_every_kind_of_layer(ranks: int):
    assert min(on_ranks(ranks, every_schedule, ranks, (*ALIKE, *MIXED))) >= 15


@pytest.mark.parametrize(
    ("shape", "name", "ways"),
    [(GPT, "zb-v", ALIKE[:1]), pytest.param(LLAMA, "1f1b", ALIKE[1:], marks=pytest.mark.slow)],
    ids=["gpt", "llama"],
)
def test_tensor_parallel(shape: ModelShape, name: str, ways: Ways):
    on_ranks(4, with_tensor_parallel, shape, name, ways)


def test_programs_with_recomputation_and_offload():
    on_ranks(2, with_programs_that_keep_less)
