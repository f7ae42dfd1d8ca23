"""GPT and Llama with experts through parallelize and Pipeline equal the plain model: schedules, split
backwards, recomputation, several microbatches in flight.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import on_ranks
from stretto import Layout, schedule
from stretto.engine.models.build import build
from stretto.engine.models.language import LanguageModel
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.parallel.expert.auxiliary import Auxiliary, bind_auxiliary
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import materialise, parallelize
from stretto.engine.parallel.recompute import Mode, recompute_blocks
from stretto.engine.parallel.tensor.dropout import DropoutKeys, key_dropout
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.engine.pipeline import PartialGradient, Pipeline, ReplicatedWeights
from stretto.engine.pipeline.shared import find_ties
from stretto.job.attention import AttentionShape, LatentShape
from stretto.job.experts import ExpertShape
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.program.program import Program
from stretto.program.transforms.activations import recompute

SIZE, SCALE = 2, 0.1  # samples of a microbatch, gradient of its loss
LLAMA = ModelShape(
    family="llama",
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=2,
    ffn=24,
    vocab=37,
    sequence=6,
    moe=ExpertShape(experts=4, top_k=2, ffn=8, balance=0.5, z=0.1),
)
GPT = ModelShape(
    family="gpt",
    layers=2,
    hidden=16,
    heads=4,
    vocab=37,
    sequence=6,
    dropout=0.2,
    moe=ExpertShape(
        experts=4, top_k=2, ffn=8, shared_ffn=12, score="sigmoid", capacity=1.0, balance=0.5, z=0.1
    ),
)
DEEPSEEK = ModelShape(
    family="deepseek_v3",
    layers=3,
    hidden=16,
    heads=4,
    head_dim=6,
    ffn=20,
    vocab=37,
    sequence=6,
    attention=AttentionShape(
        latent=LatentShape(kv_rank=5, rope_dim=2, value_dim=3, q_rank=7), interleaved=True
    ),
    moe=ExpertShape(
        experts=8,
        top_k=3,
        ffn=8,
        shared_ffn=12,
        score="sigmoid",
        groups=4,
        top_groups=2,
        group_score="top2",
        scale=2.5,
        correction=True,
        dense_layers=1,
        balance=0.5,
    ),
)
GPT_OSS = ModelShape(
    family="gpt_oss",
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn=8,
    vocab=37,
    sequence=6,
    moe=ExpertShape(experts=4, top_k=2, router_bias=True, balance=0.5),
)
QWEN = ModelShape(
    family="qwen2_moe",
    layers=3,
    hidden=16,
    heads=4,
    ffn=20,
    vocab=37,
    sequence=6,
    moe=ExpertShape(experts=4, ffn=8, shared_ffn=12, shared_gate=True, normalise=False, every=2, balance=0.5),
)


@dataclass(frozen=True)
class Case:
    shape: ModelShape
    layout: Layout
    name: str = "1f1b"
    microbatches: int = 3
    chunks: int | None = None
    sequence_parallel: bool = False
    repeat: str = ""  # "program" or "block": who runs forwards again

    def program(self) -> Program:
        program = schedule(
            self.name, ranks=self.layout.pp, microbatches=self.microbatches, chunks=self.chunks
        )
        return recompute(program) if self.repeat == "program" else program

    @property
    def job(self) -> Job:
        return Job(shape=self.shape, layout=self.layout, sequence_parallel=self.sequence_parallel)


CASES = [
    Case(GPT, Layout(tp=2, pp=2, ep=2, expert_tp=1), "interleaved", 4, 2, True),
    Case(LLAMA, Layout(tp=2, dp=2, ep=2), "naive", 2, None, True, "block"),
    Case(replace(LLAMA, sequence=7), Layout(cp=2, tp=2, ep=2), "gpipe", 2, None, True),
    Case(DEEPSEEK, Layout(tp=2, pp=2), "zb-h1", 3, None, True),
]
MORE = [
    Case(GPT_OSS, Layout(tp=2, dp=2, ep=2), "1f1b", 2, None, True),
    Case(LLAMA, Layout(dp=2, pp=2, ep=2)),
    Case(GPT, Layout(dp=2, pp=2, ep=2), "zb-h1"),
    Case(GPT, Layout(dp=2, pp=2, ep=2), "1f1b", 3, None, False, "program"),
    Case(LLAMA, Layout(tp=2, pp=2), "zb-v", 4),
    Case(GPT, Layout(cp=2, pp=2, ep=2), "1f1b", 2, None, False, "block"),
    Case(GPT, Layout(tp=2, dp=2, ep=4, expert_tp=1), "naive", 2),
    Case(QWEN, Layout(tp=2, pp=2), "1f1b", 3, None, True),
    Case(DEEPSEEK, Layout(tp=2, dp=2, ep=4, expert_tp=1), "1f1b", 2),
    Case(replace(DEEPSEEK, sequence=7), Layout(tp=2, dp=2, ep=2), "naive", 2, None, True, "block"),
    Case(GPT_OSS, Layout(tp=2, pp=2), "zb-h1", 3),
    Case(QWEN, Layout(tp=2, dp=2, ep=4, expert_tp=1), "naive", 2),
]


def tokens(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """Ids and targets [dp, m, size, s] of a step."""
    stream = torch.Generator().manual_seed(step)
    size = (case.layout.dp, case.microbatches, SIZE, case.shape.sequence)
    ids, targets = (torch.randint(case.shape.vocab, size, generator=stream) for _ in range(2))
    return ids, targets.masked_fill(torch.rand(size, generator=stream) < 0.2, -100)


def samples(case: Case, step: int, replica: int, microbatch: int) -> range:
    first = ((step * case.layout.dp + replica) * case.microbatches + microbatch) * SIZE
    return range(first, first + SIZE)


def plain_model(shape: ModelShape) -> LanguageModel:
    torch.manual_seed(5)
    model = build(shape).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)
    return model


def reference(case: Case, step: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Losses [dp, m], the auxiliary losses, and gradients, of one process."""
    model, keys = plain_model(case.shape), DropoutKeys(3)
    key_dropout(model, keys)
    losses = torch.zeros(case.layout.dp, case.microbatches, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    ids, targets = tokens(case, step)
    for replica in range(case.layout.dp):
        for i in range(case.microbatches):
            keys.samples = samples(case, step, replica, i)
            loss = model.loss(model(ids[replica, i]), targets[replica, i])
            auxiliary = model.auxiliary()
            (SCALE * (loss + auxiliary)).backward()
            losses[replica, i] = loss.detach()
            total += auxiliary.detach()
    return losses, total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def close(computed: Tensor, plain: Tensor, label: str) -> None:
    torch.testing.assert_close(computed, plain, rtol=1e-10, atol=1e-12, msg=lambda text: f"{label}: {text}")


def share(split: SequenceSplit, ids: Tensor, targets: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's positions of every microbatch."""
    return [split.take(x, 1, 0) for x in ids], [split.take(t, 1, -100) for t in targets]


def run(case: Case) -> None:
    keys, mesh, auxiliary = DropoutKeys(3), Mesh(case.layout), Auxiliary()
    full = {name: p.detach() for name, p in plain_model(case.shape).named_parameters()}
    with torch.device("meta"):
        model = build(case.shape)
    key_dropout(model, keys)
    table = parallelize(model, sharding_plan(case.job), mesh)
    bind_auxiliary(model, auxiliary)
    if case.repeat == "block":
        modes: list[Mode] = ["full"] * len(model.blocks)
        recompute_blocks(list(model.blocks), modes, mesh)
    ties = find_ties([layer for _, layer in model.layers()])
    layers, program, replica, now = model.layers(), case.program(), mesh.index("dp"), 0
    edges = [s * len(layers) // program.stages for s in range(program.stages + 1)]
    stages = [range(a, b) for a, b in itertools.pairwise(edges)]
    mine = [layers[i] for s in program.stages_of(mesh.index("pp")) for i in stages[s]]
    parameters = materialise(mine, table, lambda name, _: full[name], mesh.device, torch.float64)
    over = {id(parameter): table[name].placed.over for name, parameter in parameters.items()}

    def before(microbatch: int) -> None:
        keys.samples = samples(case, now, replica, microbatch)
        auxiliary.scale = SCALE

    pipe = Pipeline(
        [layer for _, layer in layers],
        program,
        mesh,
        model.loss,
        cut=stages,
        ties=ties,
        partial=[PartialGradient(parameters[n], shared) for n in parameters for shared in table[n].shared],
        weights=ReplicatedWeights(
            group_of=lambda parameter: mesh.copies(over[id(parameter)]), bucket_bytes=2000
        ),
        before_forward=before,
    )
    split = SequenceSplit.of(mesh, case.shape.sequence, case.sequence_parallel)
    ids, targets = tokens(case, 0)
    for now in range(2):
        ids, targets = tokens(case, now)
        auxiliary.reset()
        losses = pipe.step(*share(split, ids[replica], targets[replica]), SCALE)
        wanted, total, gradients = reference(case, now)
        if losses is not None:
            if mesh.size("cp") > 1:
                dist.all_reduce(losses, group=mesh.group("cp"))
            close(losses, wanted[replica], f"{case}: step {now} losses")
        dist.all_reduce(auxiliary.losses)
        close(auxiliary.losses.sum(), total, f"{case}: step {now} auxiliary losses")
        for name, parameter in parameters.items():
            assert (parameter.grad is not None) == parameter.requires_grad == (name in gradients)
            if parameter.grad is None:
                continue
            for piece in table[name].placed.pieces:
                gradient, plain = piece.of_local(parameter.grad), piece.of_full(gradients[name])
                close(gradient, plain, f"{case}: step {now} gradient {name}")
    evaluated = pipe.evaluate(*share(split, ids[replica], targets[replica]))
    if evaluated is not None:
        if mesh.size("cp") > 1:
            dist.all_reduce(evaluated, group=mesh.group("cp"))
        plain = plain_model(case.shape).eval()
        with torch.no_grad():
            values = [plain.loss(plain(x), t) for x, t in zip(ids[replica], targets[replica], strict=True)]
        close(evaluated, torch.stack(values), f"{case}: evaluation")
    pipe.close()
    mesh.close()


def every_case(cases: list[Case]) -> None:
    for case in cases:
        run(case)


def test_models_with_experts_equal_the_plain_model():
    on_ranks(4, every_case, CASES)


@pytest.mark.slow
def test_more_models_with_experts_equal_the_plain_model():
    on_ranks(4, every_case, MORE)
