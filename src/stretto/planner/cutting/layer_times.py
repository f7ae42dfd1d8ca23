"""The layer profile of a known model as the cost model predicts it: embedding, blocks, head with the loss."""

from __future__ import annotations

from dataclasses import replace

from stretto.job.chain import layer_of
from stretto.job.flops import layer_names
from stretto.job.job import Job
from stretto.planner.assumptions import Assumptions
from stretto.planner.counts.activations import (
    ComputeConfig,
    Saved,
    between_saved,
    block_saved,
    embedding_saved,
    head_saved,
    total,
)
from stretto.planner.counts.rank_parameters import Shares
from stretto.planner.counts.state_bytes import StateConfig, state_bytes
from stretto.planner.cutting.profile import LayerProfile, ModelProfile, SharedWeights
from stretto.planner.estimate import precision_of
from stretto.planner.machines.cluster import Cluster
from stretto.planner.memory.ranks import message_bytes
from stretto.planner.memory.transient import TIED, stage_units
from stretto.planner.time.step import stage_time
from stretto.program.action import ActionKind
from stretto.program.program import Program


def predicted_profile(
    job: Job, cluster: Cluster, assumptions: Assumptions, program: Program
) -> tuple[ModelProfile, float]:
    """Time and bytes of every layer on one rank of the job, and the bytes of states per byte of weights.

    Blocks are recomputed as the job says; recompute mode `auto` is taken as none.
    """
    shape, compute = job.shape, ComputeConfig.of(job)
    split = any(action.kind is ActionKind.W for order in program.orders for action in order)
    shares = Shares.of(compute)
    keep = StateConfig.of(job, program)
    layers: list[LayerProfile] = []
    weights = states = tied = 0
    for at, name in enumerate(layer_names(shape)):
        time = stage_time(job, cluster, assumptions, precision_of(job), range(at, at + 1), unsplit=not split)
        forward, back, weight = time.times
        units = stage_units(shape, (at,), shares, keep, None).units
        state = state_bytes(units)
        weights, states = weights + state.weights, states + state.total
        shared = [u.weights for u in units if shape.tied and any(p.name == TIED for p in u.parameters)]
        tied = max([tied, *shared])
        output = 0 if at == shape.chain - 1 else message_bytes(shape, compute, at + 1)
        saved_bytes = total(_saved(job, at))
        layers.append(
            LayerProfile(
                name=name,
                forward=forward,
                backward=back + weight,
                parameters=state.weights,
                activations=saved_bytes,
                output=output,
                weight=weight,
                input=min(saved_bytes, output),
            )
        )
    shared_layers = (SharedWeights((0, len(layers) - 1), tied),) if tied else ()
    about = f"predicted: {cluster.device.name}, microbatches of {job.micro_batch} x {job.sequence} tokens"
    return ModelProfile(tuple(layers), shared_layers, about), states / weights


def _saved(job: Job, layer: int) -> tuple[Saved, ...]:
    """What a layer keeps for a microbatch."""
    chain_layer, mode = layer_of(job.shape, layer), job.recompute.mode
    compute = ComputeConfig.of(job).at(chain_layer)
    if chain_layer.kind == "block":
        return block_saved(chain_layer.shape, replace(compute, recompute="none" if mode == "auto" else mode))
    of = {"embed": embedding_saved, "between": between_saved, "head": head_saved}[chain_layer.kind]
    return of(chain_layer.shape, compute)
