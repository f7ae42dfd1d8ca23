"""Each kind of parallel model equals its plain model: on real ranks, with the code that its users write."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import plain_models as models
from plain_models import (
    BY_HAND,
    ByHand,
    Stage,
    batch,
    flat_loss,
    loss,
    plain,
    plain_tied,
    samples,
    split_by_hand,
    step,
    unclipped,
)
from ranks import on_ranks
from stretto.prove import Report, prove


def proves(ranks: int, check: Any, *arguments: Any) -> Report:
    """The report of the first rank; those of the others say the same."""
    first, *others = on_ranks(ranks, check, *arguments)
    assert all(other.quantities == first.quantities for other in others)
    assert all(
        (other.diagnosis, other.first_module) == (first.diagnosis, first.first_module) for other in others
    )
    return first


def holds(report: Report, *quantities: str) -> None:
    """Everything is equal, and these were compared."""
    assert report.equal, str(report)
    for name in ("loss", "gradients", "weights", "states", *quantities):
        assert report[name].error is not None, name
        assert report[name].error < 1e-12
    report.raise_for_difference()


# ------------------------------------------------------------------ data parallelism


def by_ddp() -> Report:
    return prove(plain, DistributedDataParallel, batch(), step, loss=loss, share=samples)


def by_its_own_step() -> Report:
    return prove(plain, DistributedDataParallel, batch(), step, share=samples)


def zero_redundancy(model: nn.Module) -> Any:
    wrapped = DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-3)


def by_zero1() -> Report:
    return prove(plain, zero_redundancy, batch(), step, loss=loss, share=samples)


def sharded(model: Any, shape: tuple[int, ...]) -> nn.Module:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_fully_shard(*shape: int) -> Report:
    return prove(plain, lambda model: sharded(model, shape), batch(), step, loss=loss, share=samples)


@pytest.mark.parametrize("check", [pytest.param(by_ddp, marks=pytest.mark.slow), by_its_own_step, by_zero1])
def test_data_parallel_models(check: Any) -> None:
    holds(proves(2, check), "norm")


@pytest.mark.parametrize(
    "shape", [pytest.param((2,), id="full"), pytest.param((2, 2), id="hybrid", marks=pytest.mark.slow)]
)
def test_fully_sharded_models(shape: tuple[int, ...]) -> None:
    holds(proves(shape[0] * shape[-1] if len(shape) > 1 else 2, by_fully_shard, *shape), "norm")


# ------------------------------------------------------------------ tensor parallelism


def tensor_parallel(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def sequence_parallel(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
    for at in range(len(model.blocks)):
        plan[f"blocks.{at}.norm"] = SequenceParallel()
        plan[f"blocks.{at}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{at}.down"] = RowwiseParallel(output_layouts=Shard(1))
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return parallelize_module(model, mesh, plan)


def by_tensor_parallelism(sequence: bool) -> Report:
    return prove(plain, sequence_parallel if sequence else tensor_parallel, batch(), unclipped, loss=loss)


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tensor_parallel_models(sequence: bool) -> None:
    holds(proves(2, by_tensor_parallelism, sequence))


def sharded_and_tensor_parallel(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def replica_samples(batch: Any, rank: int) -> Any:
    return tuple(tensor.chunk(2)[rank // 2] for tensor in batch)


def by_two_axes() -> Report:
    return prove(
        plain,
        sharded_and_tensor_parallel,
        batch(),
        unclipped,
        loss=loss,
        share=replica_samples,
        mesh={"dp": 2, "tp": 2},
    )


def test_fully_sharded_tensor_parallel_models() -> None:
    holds(proves(4, by_two_axes))


# ------------------------------------------------------------------ code of one's own


def by_hand() -> Report:
    return prove(plain, split_by_hand, batch(), unclipped, loss=loss, gather=BY_HAND)


class Anew(nn.Module):
    """The same model with other names and other values."""

    def __init__(self) -> None:
        super().__init__()
        model = models.Plain().double()
        self.tokens, self.head = model.embed, model.head
        self.layers = nn.Sequential(*map(ByHand, model.blocks))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(x)))


def by_hand_anew() -> Report:
    names = {"layers.*": "blocks.*", "tokens.*": "embed.*"}
    return prove(
        plain,
        lambda _: Anew(),
        batch(),
        unclipped,
        loss=loss,
        gather=BY_HAND,
        names=names,
        initial="load",
    )


@pytest.mark.parametrize("check", [pytest.param(by_hand, marks=pytest.mark.slow), by_hand_anew])
def test_models_split_with_plain_tensors(check: Any) -> None:
    holds(proves(2, check))


# ------------------------------------------------------------------ pipelines


def pipeline(model: Any, schedule: Any, chunks: int = 1) -> Any:
    ranks, here = dist.get_world_size(), dist.get_rank()
    of = ranks * chunks
    stages = [
        PipelineStage(Stage(model, at, of), at, of, torch.device("cpu")) for at in range(here, of, ranks)
    ]
    return schedule(stages if chunks > 1 else stages[0], 4, loss_fn=flat_loss)


def pipelined_step(schedule: Any, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    x, y = batch
    losses = list[Tensor]()
    arguments = (x,) if dist.get_rank() == 0 else ()
    schedule.step(*arguments, target=y, losses=losses)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).mean() if losses else None


def four_blocks() -> models.Plain:
    torch.manual_seed(0)
    return models.Plain(blocks=4)


def by_pipeline(name: str) -> Report:
    kinds: dict[str, tuple[Any, int]] = {
        "gpipe": (ScheduleGPipe, 1),
        "1f1b": (Schedule1F1B, 1),
        "interleaved": (ScheduleInterleaved1F1B, 2),
    }
    schedule, chunks = kinds[name]
    return prove(
        four_blocks, lambda model: pipeline(model, schedule, chunks), batch(), pipelined_step, loss=loss
    )


@pytest.mark.parametrize("name", [pytest.param("gpipe", marks=pytest.mark.slow), "1f1b", "interleaved"])
def test_pipelined_models(name: str) -> None:
    holds(proves(2, by_pipeline, name))


# ------------------------------------------------------------------ transformers


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def by_plan(model: Any) -> nn.Module:
    """What `from_pretrained(tp_plan="auto")` does to a model; that itself needs accelerate."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    ranks = dist.get_world_size()
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_plan="auto", tp_size=ranks))
    return apply_tensor_parallelism(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)), plan)


def language_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss


def language_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    mean = language_loss(model, batch)
    mean.backward()
    optimizer.step()
    optimizer.zero_grad()
    return mean


def by_transformers() -> Report:
    os.environ["HF_HUB_OFFLINE"] = "1"
    inputs = {"input_ids": torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(1))}
    return prove(llama, by_plan, inputs, language_step, loss=language_loss)


def test_transformers_with_a_plan() -> None:
    holds(proves(2, by_transformers))


# ------------------------------------------------------------------ what is said of it


def test_tied_weights_are_compared_once() -> None:
    report = proves(2, by_tied_ddp)
    holds(report, "norm")


def by_tied_ddp() -> Report:
    return prove(plain_tied, DistributedDataParallel, batch(), step, loss=loss, share=samples)


def in_type(dtype: torch.dtype) -> Report:
    return prove(
        plain,
        lambda model: sharded(model, (dist.get_world_size(),)),
        batch(),
        step,
        loss=loss,
        share=samples,
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_models_that_stay_in_their_type_are_held_to_its_rounding(dtype: torch.dtype) -> None:
    report = proves(2, in_type, dtype)
    assert report.equal, str(report)
    for quantity in report.quantities:
        if quantity.error is not None:
            assert quantity.error < quantity.bound < (1e-2 if dtype == torch.float32 else 1.0), quantity


def test_one_process_needs_no_ranks() -> None:
    report = prove(plain, lambda model: model, batch(), step, loss=loss, dtype=torch.float64)
    holds(report, "norm")
    assert str(report).splitlines()[-4].startswith("1 rank in ")
