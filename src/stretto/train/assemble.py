"""From a config to this rank's model, ready to step: plain model, parallelize, cut, place, initialise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.config.memory import memory_job
from stretto.config.schema import TrainConfig
from stretto.cost.layers import layer_costs
from stretto.cost.shape import ModelShape
from stretto.layout.cut import cut
from stretto.models.attention import make_explicit
from stretto.models.build import build
from stretto.models.initial import initial_values
from stretto.models.language import IGNORED
from stretto.models.sharding import Splitting, sharding_plan
from stretto.optim.build import build_optimizer
from stretto.optim.norm import GradientNorm, clip
from stretto.parallel.auxiliary import Auxiliary, bind_auxiliary
from stretto.parallel.dropout import DropoutKeys, key_dropout
from stretto.parallel.mesh import Mesh
from stretto.parallel.norm import lean_norms
from stretto.parallel.parallelize import Sharded, materialise, parallelize
from stretto.parallel.placed import Piece, Placed
from stretto.parallel.recompute import recompute_blocks
from stretto.parallel.sequence import SequenceSplit
from stretto.pipeline import Boundary, PartialGradient, Pipeline, Recorder
from stretto.pipeline.ties import find_ties
from stretto.train.banner import program_of

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass
class Replica:
    """This rank's share of the model and what updates it.

    parameters, places: by plain-model name; `places` knows which pieces are owned here.
    optimizers: one for all parameters, or one for each stage where weights change within the step.
    norm: None where they do: a stage's gradients are gone before the others have theirs.
    samples: of each microbatch, set before the step: what dropout depends on.
    split: which positions of a sample this rank holds.
    auxiliary: what layers add to the loss of a step, and tell of it.
    scales: gradients of the microbatches' losses, set by `step`.
    """

    shape: ModelShape
    mesh: Mesh
    pipeline: Pipeline
    parameters: dict[str, nn.Parameter]
    places: dict[str, Placed]
    optimizers: list[torch.optim.Optimizer]
    norm: GradientNorm | None
    samples: list[range]
    clip: float | None
    split: SequenceSplit
    auxiliary: Auxiliary
    scales: list[float]

    def step(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        scale: float | Sequence[float],
        recorder: Recorder | None = None,
    ) -> Tensor | None:
        """Forward and backward of one batch, each microbatch as `share` gives it; see `Pipeline.step`."""
        self.auxiliary.reset()
        self.scales[:] = scale if isinstance(scale, Sequence) else [scale] * len(inputs)
        return self.pipeline.step(inputs, targets, scale, recorder)

    def share(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's positions of samples [b, s] and their targets; padding has no target."""
        return self.split.take(inputs, 1, 0), self.split.take(targets, 1, IGNORED)

    def gradients(self) -> list[Tensor]:
        """All gradients of this rank, as few flat tensors."""
        return [flat for buffers in self.pipeline.buffers.values() for flat in buffers.flats]

    @property
    def asynchronous(self) -> bool:
        """Whether the step itself updates the weights."""
        return bool(self.pipeline.program.versions)

    def set_rate(self, rate: float) -> None:
        """The learning rate of the updates to come."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def update(self, rate: float) -> Tensor:
        """Clip and apply the gradients at learning rate `rate`; returns the norm before clipping.

        Nothing is applied where the norm is not finite.
        """
        assert self.norm is not None, "an asynchronous schedule has updated already"
        norm = self.norm()
        if not bool(norm.isfinite()):
            return norm
        if self.clip is not None:
            clip(self.gradients(), norm, self.clip)
        self.set_rate(rate)
        for optimizer in self.optimizers:
            optimizer.step()
        return norm

    def close(self) -> None:
        """Give back communicators."""
        self.pipeline.close()
        self.mesh.close()


def assemble(config: TrainConfig, shape: ModelShape, mesh: Mesh, fresh: bool = True) -> Replica:
    """Build this rank's replica. Collective over all ranks.

    Args:
        shape: the model's sizes with the tokenizer's vocabulary.
        fresh: give parameters their initial values; otherwise a checkpoint fills them.
    """
    keys, samples, scales = DropoutKeys(config.train.seed), list[range](), list[float]()
    auxiliary = Auxiliary(mesh.device)
    with torch.device("meta"):
        model = build(shape)
    key_dropout(model, keys)
    lean_norms(model)
    if config.train.attention == "explicit":
        make_explicit(model)
    how = splitting_of(config, mesh)
    table = parallelize(model, sharding_plan(shape, how), mesh)
    split = SequenceSplit.of(mesh, config.data.sequence, how.sequence_parallel)
    names = [name for name, _ in model.layers()]
    layers = [layer for _, layer in model.layers()]
    program = program_of(config)
    bind_auxiliary(model, auxiliary)
    modes = memory_job(config, shape, program).modes
    shard_inputs = config.recompute.shard_inputs
    recompute_blocks(list(model.blocks), modes, mesh, shard_inputs)
    stages = cut(layer_costs(shape, config.data.sequence), program.depth)
    ties = find_ties(layers)
    mine = [i for s in program.stages_of(mesh.index("pp")) for i in stages[s % program.depth]]
    dtype = DTYPES[config.train.dtype]
    kept = torch.float32 if dtype == torch.bfloat16 else dtype
    parameters = materialise(
        [(names[i], layers[i]) for i in mine],
        table,
        (lambda name, size: initial_values(name, size, config.train.seed, shape)) if fresh else None,
        mesh.device,
        kept,
    )

    def before_forward(microbatch: int) -> None:
        keys.samples = samples[microbatch]
        auxiliary.scale = scales[microbatch]

    asynchronous = bool(program.versions)
    pipeline = Pipeline(
        layers,
        program,
        mesh,
        model.loss,
        optimizer=(lambda own: build_optimizer(_named(own, parameters), config.optim))
        if asynchronous
        else None,
        cut=stages,
        ties=ties,
        partial=[PartialGradient(parameters[n], *shared) for n in parameters for shared in table[n].shared],
        boundary=Boundary((config.batch.micro_size, len(split.shard), shape.hidden), kept),
        group_of=_groups(parameters, table, mesh),
        bucket_bytes=int(config.train.bucket_mib * 2**20),
        before_forward=before_forward if shape.dropout or shape.moe is not None else None,
        autocast=dtype if dtype != kept else None,
    )
    places = _places(parameters, table, pipeline)
    return Replica(
        shape,
        mesh,
        pipeline,
        parameters,
        places,
        list(pipeline.optimizers.values())
        if asynchronous
        else [build_optimizer(parameters.items(), config.optim)],
        None if asynchronous else GradientNorm(parameters, places, _spread(table, mesh)),
        samples,
        config.optim.clip,
        split,
        auxiliary,
        scales,
    )


def splitting_of(config: TrainConfig, mesh: Mesh) -> Splitting:
    """What the sharding plan depends on beside the model."""
    layout = config.layout
    return Splitting(
        config.data.sequence,
        layout.sequence_parallel and layout.tp > 1,
        layout.context,
        config.train.vocab_multiple,
        mesh.size("expert_tp"),
    )


def _spread(table: Mapping[str, Sharded], mesh: Mesh) -> dict[str, ProcessGroup | None]:
    """For the axes that the model's parameters are spread over, the ranks that hold one copy of them."""
    over = {sharded.placed.over for sharded in table.values()}
    return {axes: group for axes, group in mesh.spread().items() if axes in over}


def _groups(
    parameters: Mapping[str, nn.Parameter], table: Mapping[str, Sharded], mesh: Mesh
) -> Callable[[nn.Parameter], ProcessGroup | None]:
    """The ranks that a parameter's gradient is summed over."""
    over = {id(parameter): table[name].placed.over for name, parameter in parameters.items()}
    return lambda parameter: mesh.copies(over[id(parameter)])


def _named(
    own: Sequence[nn.Parameter], parameters: Mapping[str, nn.Parameter]
) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a stage with their names."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [(names[id(parameter)], parameter) for parameter in own]


def _places(
    parameters: Mapping[str, nn.Parameter], table: Mapping[str, Sharded], pipeline: Pipeline
) -> dict[str, Placed]:
    """Where each parameter lies; of a tied one only the first stage's copy is owned."""
    elsewhere = {id(p) for p in pipeline.copies_elsewhere()}
    places = dict[str, Placed]()
    for name, parameter in parameters.items():
        placed = table[name].placed
        if id(parameter) in elsewhere:
            pieces: tuple[Piece, ...] = tuple(replace(piece, owned=False) for piece in placed.pieces)
            placed = replace(placed, pieces=pieces)
        places[name] = placed
    return places
