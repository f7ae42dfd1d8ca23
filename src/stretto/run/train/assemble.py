"""From a config to this rank's model, ready to step: plain model, parallelize, cut, place, initialise."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.engine.models.attention import make_explicit
from stretto.engine.models.build import build
from stretto.engine.models.initial import initial_values
from stretto.engine.models.language import LanguageModel
from stretto.engine.models.sharding import Splitting, sharding_plan
from stretto.engine.optim.norm import GradientNorm
from stretto.engine.optim.scale import LossScale
from stretto.engine.parallel.data.sharded import ShardedStates, Sharing
from stretto.engine.parallel.expert.auxiliary import Auxiliary, bind_auxiliary
from stretto.engine.parallel.fragment import Placed
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import Sharded, materialise, parallelize
from stretto.engine.parallel.precision import HALVES, master_dtype, weight_dtype
from stretto.engine.parallel.recompute import recompute_blocks
from stretto.engine.parallel.tensor.dropout import DropoutKeys, key_dropout
from stretto.engine.parallel.tensor.fp8 import enable_fp8
from stretto.engine.parallel.tensor.norm import lean_norms
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.engine.pipeline import Boundary, PartialGradient, Pipeline
from stretto.engine.pipeline.ties import find_ties
from stretto.layout.cut import cut
from stretto.program.program import Program
from stretto.run.config.job import job_of, memory_job
from stretto.run.config.schema import TrainConfig
from stretto.run.train.banner import program_of
from stretto.run.train.optimizer import ReplicaOptimizer
from stretto.run.train.replica import Replica
from stretto.spec.flops import layer_costs
from stretto.spec.reduction import reduction
from stretto.spec.shape import ModelShape

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def compute_dtype(config: TrainConfig) -> torch.dtype:
    """The type of activations and of most weights."""
    return DTYPES[config.train.dtype]


def dtype_of(config: TrainConfig, name: str) -> torch.dtype:
    """The type of one parameter's weights."""
    return weight_dtype(name, compute_dtype(config), config.precision.keep)


def sharing_of(config: TrainConfig, program: Program) -> Sharing:
    """How this job keeps parameters, gradients and states."""
    job, dtype = job_of(config), compute_dtype(config)
    half = dtype in HALVES
    return Sharing(
        mode=job.dp.mode,
        sizes=job.dp.sizes(job.copies),
        master=master_dtype(dtype),
        gradients=torch.float32 if half and config.precision.gradients == "float32" else None,
        each=reduction(program, job.dp.mode, job.dp.reduce) == "microbatch",
        lasting=bool(program.versions),
        layers=job.dp.gathers(job.layout.pp) != "stage",
        host=job.dp.offload != "none",
        store=job.dp.offload_parameters,
        path=job.dp.path,
        bucket_bytes=int(config.train.bucket_mib * 2**20),
    )


def assemble(config: TrainConfig, shape: ModelShape, mesh: Mesh, fresh: bool = True) -> Replica:
    """Build this rank's replica. Collective over all ranks.

    Args:
        shape: the model's sizes with the tokenizer's vocabulary.
        fresh: give parameters their initial values; otherwise a checkpoint fills them.
    """
    keys = DropoutKeys(config.train.seed)
    samples = list[range]()
    scales = list[float]()
    auxiliary, program = Auxiliary(mesh.device), program_of(config)
    model, table = _split_model(config, shape, mesh, keys, program)
    bind_auxiliary(model, auxiliary)
    how = splitting_of(config, mesh)
    split = SequenceSplit.of(mesh, config.data.sequence, how.sequence_parallel)
    names = [name for name, _ in model.layers()]
    layers = [layer for _, layer in model.layers()]
    stages = cut(layer_costs(shape, config.data.sequence), program.depth)
    ties = find_ties(layers)
    mine = [i for s in program.stages_of(mesh.index("pp")) for i in stages[s % program.depth]]
    parameters = materialise(
        [(names[i], layers[i]) for i in mine],
        table,
        None,
        mesh.device,
        lambda name: dtype_of(config, name),
        hollow=True,
    )

    def before_forward(microbatch: int) -> None:
        keys.samples = samples[microbatch]
        auxiliary.scale = scales[microbatch]

    over = sorted({sharded.placed.over for sharded in table.values()})
    states = ShardedStates(
        mesh,
        parameters,
        {name: table[name].placed for name in parameters},
        over,
        sharing_of(config, program),
    )
    optimizer = ReplicaOptimizer(states, config)
    asynchronous = bool(program.versions)
    if asynchronous:
        states.stage_update = optimizer.step_stage
    stream = dtype_of(config, "embed.tok.weight")  # of the residual stream, which begins there
    pipeline = Pipeline(
        layers,
        program,
        mesh,
        model.loss,
        cut=stages,
        ties=ties,
        partial=[PartialGradient(parameters[n], shared) for n in parameters for shared in table[n].shared],
        boundary=Boundary((config.batch.micro_size, len(split.shard), shape.hidden), stream),
        before_forward=before_forward if shape.dropout or shape.moe is not None else None,
        weights=states,
    )
    elsewhere = frozenset(id(p) for p in pipeline.copies_elsewhere())

    def values(name: str, size: tuple[int, ...]) -> Tensor:
        return initial_values(name, size, config.train.seed, shape)

    optimizer.begin(values if fresh else None, elsewhere, asynchronous)
    optimizer.follow_reductions(frozenset(id(p) for p in pipeline.changing()))
    places = {name: _place(table[name].placed, id(p) in elsewhere) for name, p in parameters.items()}
    counted = {axes: states.groups[axes].counted for axes in over}
    return Replica(
        shape=shape,
        mesh=mesh,
        pipeline=pipeline,
        parameters=parameters,
        places=places,
        states=states,
        optimizer=optimizer,
        norm=None if asynchronous else GradientNorm(states.fragments, counted),
        samples=samples,
        clip=config.optim.clip,
        split=split,
        auxiliary=auxiliary,
        scales=scales,
        loss_scale=loss_scale(config),
    )


def _split_model(
    config: TrainConfig, shape: ModelShape, mesh: Mesh, keys: DropoutKeys, program: Program
) -> tuple[LanguageModel, dict[str, Sharded]]:
    """The model on the meta device, its modules swapped for this rank's, and where its parameters lie."""
    with torch.device("meta"):
        model = build(shape)
    key_dropout(model, keys)
    lean_norms(model)
    if config.train.attention == "explicit":
        make_explicit(model)
    table = parallelize(model, sharding_plan(shape, splitting_of(config, mesh)), mesh)
    if config.precision.fp8 != "none":
        enable_fp8(model, config.precision.fp8, mesh)
    modes = memory_job(config, shape, program).modes
    recompute_blocks(list(model.blocks), modes, mesh, config.recompute.shard_inputs)
    return model, table


def loss_scale(config: TrainConfig) -> LossScale | None:
    """With float16, what keeps gradients in its range."""
    if config.train.dtype != "float16":
        return None
    return LossScale(value=config.precision.loss_scale, steps=config.precision.loss_scale_steps)


def splitting_of(config: TrainConfig, mesh: Mesh) -> Splitting:
    """What the sharding plan depends on beside the model."""
    layout = config.layout
    return Splitting(
        sequence=config.data.sequence,
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
        context=layout.context,
        vocab_multiple=config.train.vocab_multiple,
        expert_tp=mesh.size("expert_tp"),
    )


def _place(placed: Placed, elsewhere: bool) -> Placed:
    """Where a parameter lies; of a tied one only the first stage's copy is owned."""
    return placed.elsewhere() if elsewhere else placed


__all__ = ["Replica", "assemble", "splitting_of"]
