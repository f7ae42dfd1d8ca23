"""From a job to this rank's replica in five steps: plain model, sharding, stages, weights, optimiser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from stretto.engine.compiler import Compiler
from stretto.engine.documents import DocumentStarts, Packing, share_packing
from stretto.engine.models.build import build
from stretto.engine.models.causal import choose_kernel
from stretto.engine.models.compiled import compile_blocks
from stretto.engine.models.language import LanguageModel
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.models.weights import freeze, initial_values
from stretto.engine.optim.norm import GradientNorm
from stretto.engine.optim.scale import LossScale
from stretto.engine.parallel.data.sharded import ShardedStates
from stretto.engine.parallel.expert.auxiliary import Auxiliary, bind_auxiliary
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import ShardedParameter, materialise, parallelize
from stretto.engine.parallel.precision import master_dtype, weight_dtype
from stretto.engine.parallel.recompute import recompute, recompute_blocks
from stretto.engine.parallel.tensor.chunked_loss import ChunkedCrossEntropy
from stretto.engine.parallel.tensor.dropout import DropoutKeys, key_dropout
from stretto.engine.parallel.tensor.fp8 import enable_fp8
from stretto.engine.parallel.tensor.linear import ParallelLinear
from stretto.engine.parallel.tensor.norm import use_memory_efficient_norms
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.engine.parallel.tensor.user_loss import UserLoss
from stretto.engine.parallel.tensor.vocabulary import VocabParallelCrossEntropy
from stretto.engine.pipeline import Boundary, PartialGradient, Pipeline
from stretto.engine.pipeline.rank_buffers import Boundaries
from stretto.engine.pipeline.shared import Tie, find_ties
from stretto.engine.user_model import UserModel, move_buffers
from stretto.job.chain import layer_of
from stretto.job.data_parallel import Precision
from stretto.job.job import Job
from stretto.job.lora import is_adapter
from stretto.job.reduction import reduction
from stretto.job.user_shape import UserShape
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.memory.job import memory_of
from stretto.program.program import Program
from stretto.run.train.rank_model import RankModel, StageOptimizers, Values

Fresh = bool | Literal["adapters"]

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_of(precision: Precision, name: str) -> torch.dtype:
    """The type of one parameter's weights."""
    return weight_dtype(name, DTYPES[precision.dtype], precision.keep)


@dataclass(frozen=True, kw_only=True)
class _Setup:
    """What every step of building a replica reads.

    compiler: None where nothing is compiled.
    samples, documents, decoders, auxiliary_scales: of each microbatch, written by the replica when a step
        begins; the pipeline reads them before each forward.
    """

    job: Job
    seed: int
    mesh: Mesh
    program: Program
    keys: DropoutKeys
    auxiliary: Auxiliary
    split: SequenceSplit
    compiler: Compiler | None
    packing: Packing = field(default_factory=Packing)
    samples: list[range] = field(default_factory=list[range])
    documents: list[DocumentStarts] = field(default_factory=list[DocumentStarts])
    decoders: list[tuple[Tensor, Tensor | None]] = field(default_factory=list[tuple[Tensor, Tensor | None]])
    auxiliary_scales: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, kw_only=True)
class _Stages:
    """The model cut into stages.

    layers: of each stage of the program, indices into the model's layers.
    ties: parameters that layers on different stages share.
    parameters: of the stages held by this rank, by plain-model name.
    """

    layers: Sequence[range]
    ties: Sequence[Tie]
    parameters: dict[str, nn.Parameter]


def assemble(job: Job, mesh: Mesh, *, seed: int, fresh: Fresh = True, guarded: bool = False) -> RankModel:
    """Build this rank's replica: plain model, sharding, stages, weights, optimiser. Collective over all
    ranks.

    Args:
        job: a legal one, whose model has the tokenizer's vocabulary.
        seed: of initial values and dropout.
        fresh: initialise the parameters; False where a checkpoint fills them, "adapters" where it fills all
            but these.
        guarded: no rank updates where gradients are not finite on another; see `StageOptimizers`.
    """
    setup = _Setup(
        job=job,
        seed=seed,
        mesh=mesh,
        program=job.program(),
        keys=DropoutKeys(seed),
        auxiliary=Auxiliary(mesh.device),
        split=SequenceSplit.of(mesh, job.sequence, job.sequence_parallel and job.layout.tp > 1),
        compiler=Compiler() if job.compile == "blocks" else None,
    )
    model = _plain_model(setup)
    table = _shard(setup, model)
    stages = _cut_stages(setup, model, table)
    states = _share_weights(setup, stages, table)
    optimizer = StageOptimizers(states, job, together=guarded)
    if setup.program.versions:  # an asynchronous schedule updates each stage within the step
        states.stage_update = optimizer.step_stage
    pipeline = _connect(setup, model, table, stages, states)
    elsewhere = frozenset(id(p) for p in pipeline.copies_elsewhere())
    values = _initial_values(setup, model, fresh)
    optimizer.begin(values, elsewhere, bool(setup.program.versions))
    optimizer.follow_reductions(frozenset(id(p) for p in pipeline.post_reduced_parameters()))
    return RankModel(
        job=job,
        mesh=mesh,
        pipeline=pipeline,
        parameters=stages.parameters,
        places={n: _place(table[n].placed, id(p) in elsewhere) for n, p in stages.parameters.items()},
        states=states,
        optimizer=optimizer,
        norm=None if setup.program.versions else _gradient_norm(states, table),
        samples=setup.samples,
        documents=setup.documents,
        decoders=setup.decoders,
        split=setup.split,
        auxiliary=setup.auxiliary,
        auxiliary_scales=setup.auxiliary_scales,
        loss_scale=loss_scale(job.precision),
        compiler=setup.compiler,
    )


def _plain_model(setup: _Setup) -> LanguageModel | UserModel:
    """The model of one process, on the meta device, with the kernels and the dropout of the job."""
    if isinstance(shape := setup.job.shape, UserShape):
        user_model = UserModel(shape.build, shape.arguments, setup.seed)
        user_model.take_values()
        freeze(user_model, setup.job.trained)
        key_dropout(user_model, setup.keys)
        return user_model
    with torch.device("meta"):
        model = build(shape)
    freeze(model, setup.job.trained)
    key_dropout(model, setup.keys)
    share_packing(model, setup.packing)
    use_memory_efficient_norms(model)
    choose_kernel(model, setup.job.attention)
    if setup.compiler is not None:
        compile_blocks(model, setup.compiler)
    return model


def _shard(setup: _Setup, model: LanguageModel | UserModel) -> dict[str, ShardedParameter]:
    """Replace modules by this rank's shards of them; returns where each parameter lies, by name."""
    job, mesh = setup.job, setup.mesh
    if isinstance(model, UserModel):
        full = job.recompute.mode == "full"
        for stage in job.stages(setup.program.depth) if full else ():
            for at in stage[: job.recompute.blocks]:
                recompute(model.layers()[at][1])
        _set_loss(job, model, mesh)
        names = dict[int, list[str]]()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return {
            name: ShardedParameter(
                tuple(names[id(parameter)]), ShardPlacement.unsharded(name, tuple(parameter.shape))
            )
            for name, parameter in model.named_parameters()
        }
    table = parallelize(model, sharding_plan(job), mesh)
    if job.precision.fp8 != "none":
        enable_fp8(model, job.precision.fp8, mesh)
    modes = memory_of(job, setup.program).modes
    recompute_blocks([*model.encoder, *model.blocks], modes, mesh, job.recompute.shard_inputs)
    bind_auxiliary(model, setup.auxiliary)
    _set_loss(job, model, mesh)
    return table


def _set_loss(job: Job, model: LanguageModel | UserModel, mesh: Mesh) -> None:
    """Take the user's loss, or let the head compute the loss from some tokens' logits at a time, if that pays
    off.
    """
    loss = model.get_submodule("loss")
    if job.loss is not None:
        model.loss = UserLoss(job.loss, loss, job.shape.vocab, mesh.group("tp"))
    if job.loss is not None or isinstance(model, UserModel):
        return
    head = model.head
    compute = ComputeConfig.of(job).for_layer(layer_of(job.shape, job.shape.chain - 1))
    if tokens := compute.loss_chunk_tokens(job.shape):
        assert isinstance(head.out, ParallelLinear)
        assert isinstance(loss, VocabParallelCrossEntropy)
        chunked = ChunkedCrossEntropy(head.out, loss, tokens, head.softcap or 0.0)
        head.loss, model.loss = chunked.of, chunked


def _cut_stages(
    setup: _Setup, model: LanguageModel | UserModel, table: dict[str, ShardedParameter]
) -> _Stages:
    """Cut the layers into stages; the parameters of those on this rank leave the meta device, without
    memory yet.
    """
    job, program = setup.job, setup.program
    layers = model.layers()
    stages = job.stages(program.depth)
    # before materialising, which replaces the parameters by whose identity ties are recognised
    ties = find_ties([layer for _, layer in layers])
    local = [i for s in program.stages_of(setup.mesh.index("pp")) for i in stages[s % program.depth]]
    parameters = materialise(
        [layers[i] for i in local],
        table,
        None,
        setup.mesh.device,
        lambda name: dtype_of(job.precision, name),
        without_storage=True,
    )
    if isinstance(model, UserModel):
        move_buffers([layers[i][1] for i in local], setup.mesh.device, DTYPES[job.precision.dtype])
    return _Stages(layers=stages, ties=ties, parameters=parameters)


def _share_weights(setup: _Setup, stages: _Stages, table: dict[str, ShardedParameter]) -> ShardedStates:
    """How the data-parallel ranks share the parameters, their gradients and optimiser states."""
    job, program = setup.job, setup.program
    sums_in_float32 = job.precision.half and job.precision.gradients == "float32"
    return ShardedStates(
        setup.mesh,
        stages.parameters,
        {name: table[name].placed for name in stages.parameters},
        _axes(table),
        job.dp,
        master=master_dtype(DTYPES[job.precision.dtype]),
        gradients=torch.float32 if sums_in_float32 else None,
        each_microbatch=reduction(program, job.dp.mode, job.dp.reduce) == "microbatch",
        keep_gradients=bool(program.versions) or job.graphs != "off",
        gather_layers=job.dp.gathers(job.layout.pp) != "stage",
        bucket_bytes=job.bucket,
    )


def _connect(
    setup: _Setup,
    model: LanguageModel | UserModel,
    table: dict[str, ShardedParameter],
    stages: _Stages,
    states: ShardedStates,
) -> Pipeline:
    """The pipeline that runs the stages with these weights."""
    job, parameters = setup.job, stages.parameters

    def before_forward(microbatch: int) -> None:
        setup.packing.documents = setup.documents[microbatch] if setup.documents else None
        if setup.decoders:
            setup.packing.decoder, setup.packing.lengths = setup.decoders[microbatch]
        if setup.samples:  # an evaluation needs neither these nor scales
            setup.keys.samples = setup.samples[microbatch]
        if setup.auxiliary_scales:
            setup.auxiliary.scale = setup.auxiliary_scales[microbatch]

    return Pipeline(
        [layer for _, layer in model.layers()],
        setup.program,
        setup.mesh,
        model.loss,
        cut=stages.layers,
        ties=stages.ties,
        partial=[
            PartialGradient(p, shared)
            for n, p in parameters.items()
            if p.requires_grad
            for shared in table[n].shared
        ],
        window=job.window,
        boundary=None if isinstance(model, UserModel) else _boundaries(setup, stages),
        before_forward=before_forward,
        weights=states,
        graphs=job.graphs != "off",
    )


def _boundaries(setup: _Setup, stages: _Stages) -> Boundary | dict[int, Boundaries]:
    """What enters each stage: the activation of its first layer, in a decoder beside an encoder with the
    memory.
    """
    job, shape = setup.job, setup.job.shape
    stream = dtype_of(job.precision, "embed.tok.weight")  # the embedding's type is the residual stream's
    first = Boundary((job.micro_batch, len(setup.split.shard), shape.hidden), stream)
    if not shape.encoder_layers:
        return first
    ranks = job.layout.tp if setup.split.tp > 1 else 1
    second = Boundary((job.micro_batch, job.target_sequence // ranks, shape.hidden), stream)
    embedding, head = shape.encoder_layers + 1, shape.chain - 1
    return {
        stage: (first,) if at <= embedding else (second,) if at == head else (second, first)
        for stage, at in enumerate(layers.start for layers in stages.layers)
        if stage
    }


def _initial_values(setup: _Setup, model: LanguageModel | UserModel, fresh: Fresh) -> Values | None:
    """Return the initial values of parameters by name; None if a checkpoint fills them."""

    def values(name: str, size: tuple[int, ...]) -> Tensor:
        if isinstance(model, UserModel):
            return model.values[name]
        if fresh == "adapters" and not is_adapter(name):
            return torch.zeros(()).expand(size)
        return initial_values(name, size, setup.seed, setup.job.shape, setup.job.initial)

    return values if fresh else None


def _gradient_norm(states: ShardedStates, table: dict[str, ShardedParameter]) -> GradientNorm:
    counted = {axes: states.groups[axes].counted for axes in _axes(table)}
    return GradientNorm(states.fragments, counted)


def _axes(table: dict[str, ShardedParameter]) -> list[str]:
    """The axes over which any parameter is sharded (`ShardPlacement.over`)."""
    return sorted({sharded.placed.over for sharded in table.values()})


def loss_scale(precision: Precision) -> LossScale | None:
    """The dynamic loss scale of float16; None for other types."""
    if precision.dtype != "float16":
        return None
    return LossScale(value=precision.loss_scale, steps=precision.loss_scale_steps)


def _place(placed: ShardPlacement, elsewhere: bool) -> ShardPlacement:
    """Where a parameter lies; only the first stage's copy of a tied parameter is owned."""
    return placed.unowned() if elsewhere else placed
