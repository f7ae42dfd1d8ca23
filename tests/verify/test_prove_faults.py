"""Bugs that users of parallel models report: each is seen, and called by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from plain_models import (
    BY_HAND,
    Plain,
    Row,
    Stage,
    batch,
    flat_loss,
    loss,
    plain,
    plain_tied,
    ragged,
    samples,
    split_by_hand,
    step,
    unclipped,
)
from ranks import on_ranks
from stretto.errors import StrettoError
from stretto.prove import Differs, Report, Split, prove
from stretto.run.launch.local import RankFailed

CASES: dict[str, tuple[Callable[[], Report], str]] = {}


def case(message: str) -> Callable[[Callable[[], Report]], Callable[[], Report]]:
    """A bug on two ranks, and what must be said of it."""

    def enter(check: Callable[[], Report]) -> Callable[[], Report]:
        CASES[check.__name__] = check, message
        return check

    return enter


def same(model: nn.Module) -> nn.Module:
    return model


def reduced(model: nn.Module, mean: bool = True) -> None:
    """Sum gradients over all ranks, or average them."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if mean:
            parameter.grad /= dist.get_world_size()


def trained(
    model: Any, optimizer: Any, batch: Any, after: Callable[[nn.Module], Any] | None = None, of: Any = loss
) -> Any:
    """A step with something between backward and update."""
    mean = of(model, batch)
    mean.backward()
    norm = None if after is None else after(model)
    optimizer.step()
    optimizer.zero_grad()
    return mean if norm is None else (mean, norm)


def with_after(after: Callable[[nn.Module], Any], of: Any = loss) -> Any:
    return lambda model, optimizer, batch: trained(model, optimizer, batch, after, of)


def data_parallel(step: Any, **settings: Any) -> Report:
    return prove(plain, same, batch(), step, **{"loss": loss, "share": samples, **settings})


# ------------------------------------------------------------------ reductions over replicas and contexts


@case("every gradient differs between the 2 ranks, and their mean is the reference: the reduction over them")
def gradients_are_not_reduced() -> Report:
    return data_parallel(step)


@case("every gradient is 2 times the reference: wrong gradient scale, as if summed over the 2 ranks")
def gradients_are_summed() -> Report:
    return data_parallel(with_after(lambda model: reduced(model, mean=False)))


@case("every gradient is 0.5 times the reference: wrong gradient scale, as if averaged over the 2 ranks")
def gradients_are_averaged() -> Report:
    def sum_of_part(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch) / dist.get_world_size()

    return data_parallel(with_after(reduced, sum_of_part), reduction="sum")


@case(
    "means over unequal numbers of tokens are averaged; sum them, and divide by the number of tokens of the"
)
def means_over_unequal_tokens() -> Report:
    return prove(plain, DistributedDataParallel, ragged(), step, loss=loss, share=samples)


@case("it is the mean of what each rank's share gives alone, and the shares have unequal numbers of tokens")
def gradients_of_unequal_tokens() -> Report:
    """The loss that is logged is right."""

    def logged(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        step(model, optimizer, batch)
        with torch.no_grad():
            x, y = ragged()
            return loss(plain().double(), (x, y))

    return prove(plain, DistributedDataParallel, ragged(), logged, loss=loss, share=samples, steps=1)


def positions(batch: Any, rank: int) -> Any:
    """This rank's positions of every sample, as under context parallelism."""
    return tuple(tensor.chunk(2, 1)[rank] for tensor in batch)


@case(
    "the losses of the 2 ranks of cp differ, and their mean is the reference: the loss that the step returns"
)
def loss_is_not_reduced_over_contexts() -> Report:
    settings: Any = {"share": positions, "reduction": "same", "mesh": {"dp": 1, "cp": 2}}
    return prove(plain, DistributedDataParallel, batch(), step, loss=loss, **settings)


# ------------------------------------------------------------------ tensor parallelism


class Unreduced(Row):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias / 2


class BiasEverywhere(Row):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


def with_rows(kind: type[Row]) -> Any:
    def build(model: Any) -> nn.Module:
        downs = [block.down for block in model.blocks]
        model = split_by_hand(model)
        for block, down in zip(model.blocks, downs, strict=True):
            block.down = kind(down)
        return model

    return build


def by_hand(parallel: Any, step: Any = unclipped, model: Any = plain, **settings: Any) -> Report:
    return prove(model, parallel, batch(), step, loss=loss, gather=BY_HAND, **settings)


@case("the first output that differs is blocks.0.down's: the outputs of the 2 ranks of tp sum to the")
def no_reduction_after_row_parallel() -> Report:
    return by_hand(with_rows(Unreduced), mesh={"tp": 2})


def biased() -> Plain:
    model = plain()
    for block in model.blocks:
        nn.init.normal_(block.down.bias)
    return model


@case("the first output that differs is blocks.0.down's: its bias is added 2 times, once on each rank")
def bias_on_every_rank() -> Report:
    return by_hand(with_rows(BiasEverywhere), model=biased)


@case("differs between the 2 ranks of tp, and their sum is the reference: the reduction over them is missing")
def no_reduction_before_column_parallel() -> Report:
    def build(model: Any) -> nn.Module:
        model = split_by_hand(model)
        last = model.blocks[-1]
        last.forward = lambda x: x + last.down(nn.functional.gelu(last.up(last.norm(x))))
        return model

    return by_hand(build, mesh={"tp": 2})


# ------------------------------------------------------------------ norm and clipping


def clipped_by(norm: Callable[[nn.Module], Tensor]) -> Any:
    def after(model: nn.Module) -> Tensor:
        total = norm(model)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total)
        return total

    return with_after(after)


def own_norm(model: nn.Module) -> Tensor:
    return nn.utils.get_total_norm([p.grad for p in model.parameters()])


def split_norm(model: nn.Module) -> Tensor:
    """Squares of shards are summed over ranks, those of whole parameters are counted once."""
    shards = [p.grad for name, p in model.named_parameters() if ".up." in name or "down.weight" in name]
    replicated = [p.grad for p in model.parameters() if all(p.grad is not shard for shard in shards)]
    square = nn.utils.get_total_norm(shards) ** 2
    dist.all_reduce(square)
    return (square + nn.utils.get_total_norm(replicated) ** 2).sqrt()


def test_a_norm_over_all_shards_is_equal() -> None:
    first, _ = on_ranks(2, right_norm)
    assert first.equal, str(first)
    assert first["norm"].error is not None


def right_norm() -> Report:
    return by_hand(split_by_hand, clipped_by(split_norm))


class AllSplit(nn.Module):
    """Linear layers of which each rank has a part of the outputs, with no parameter whole."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.layers = model
        for layer in model:
            part = layer.weight.detach().chunk(2)[dist.get_rank()].clone()
            layer.weight = nn.Parameter(part)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            parts = [torch.empty_like(y := layer(x)) for _ in range(2)]
            x = torch.cat(torch.distributed.nn.functional.all_gather(y), -1) if parts else y
        return x


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@case("so clipping is wrong: each rank's is over its own shards only, its square is not summed over")
def norm_of_own_shards() -> Report:
    def halved(model: nn.Module) -> Tensor:
        for parameter in model.parameters():
            parameter.grad /= 2  # every rank computes the whole loss
        total = own_norm(model)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total)
        return total

    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    step = with_after(halved, squares)
    return prove(two_layers, AllSplit, rows, step, loss=squares, gather={"*": Split(0)})


@case("every gradient is 65536 times the reference: as if gradients were clipped before the loss")
def clipped_before_unscaling() -> Report:
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)

    def scaled(model: Any, optimizer: Any, batch: Any) -> Tensor:
        mean = loss(model, batch)
        scaler.scale(mean).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return mean

    return prove(plain, DistributedDataParallel, batch(), scaled, loss=loss, share=samples)


@case("every gradient is 1.52588e-05 times the reference: as if gradients were clipped before the loss")
def clipped_before_unscaling_by_own_code() -> Report:
    """Clipping that is not torch's: what the optimizer is handed is too small by the scale."""

    def scaled(model: Any, optimizer: Any, batch: Any) -> Tensor:
        mean = loss(model, batch)
        (mean * 65536.0).backward()
        norm = own_norm(model)
        for parameter in model.parameters():
            parameter.grad *= torch.clamp(0.1 / (norm + 1e-6), max=1.0) / 65536.0
        optimizer.step()
        optimizer.zero_grad()
        return mean

    own = clipped_plain
    return prove(plain, DistributedDataParallel, batch(), scaled, loss=own, share=samples, clip=None)


def clipped_plain(model: nn.Module, batch: Any) -> Tensor:
    """The plain loss, of which the gradients come clipped to 0.1."""
    mean = loss(model, batch)
    if torch.is_grad_enabled():
        grads = torch.autograd.grad(mean, list(model.parameters()), retain_graph=True)
        factor = min(1.0, 0.1 / (float(torch.stack([g.square().sum() for g in grads]).sum().sqrt()) + 1e-6))
        return mean.detach() + factor * (mean - mean.detach())
    return mean


# ------------------------------------------------------------------ tied weights of a pipeline


TIED = "only the gradient of the tied parameter embed.weight is wrong: it is"


def tied_stages(tie: Callable[[Tensor], Any]) -> Report:
    """Embedding and head on two stages, each with the weight; `tie` brings its gradients together."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    def build(model: Any) -> Any:
        stage = Stage(model, dist.get_rank(), 2)
        return ScheduleGPipe(
            PipelineStage(stage, dist.get_rank(), 2, torch.device("cpu")), 4, loss_fn=flat_loss
        )

    def step(schedule: Any, optimizer: Any, batch: Any) -> Any:
        x, y = batch
        losses = list[Tensor]()
        schedule.step(*((x,) if dist.get_rank() == 0 else ()), target=y, losses=losses)
        stage = schedule._stage.submod
        tie((stage.embed if dist.get_rank() == 0 else stage.head).weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if losses else None

    return prove(plain_tied, build, batch(), step, loss=loss)


def right_ties() -> Report:
    return tied_stages(dist.all_reduce)


def test_tied_weights_that_are_summed_once_are_equal() -> None:
    first, _ = on_ranks(2, right_ties)
    assert first.equal, str(first)


@case(f"{TIED} not summed over the 2 places that share it")
def tied_weights_are_not_summed() -> Report:
    return tied_stages(lambda gradient: None)


@case(f"{TIED} 2 times the reference, summed twice")
def tied_weights_are_summed_twice() -> Report:
    return tied_stages(lambda gradient: (dist.all_reduce(gradient), gradient.mul_(2)))


@case(f"{TIED} 0.5 times the reference, averaged")
def tied_weights_are_averaged() -> Report:
    return tied_stages(lambda gradient: (dist.all_reduce(gradient), gradient.div_(2)))


# ------------------------------------------------------------------ update, buffers, initial values


@case("gradients and norm are equal but the updated")
def another_optimizer() -> Report:
    def build(model: nn.Module) -> Any:
        wrapped = DistributedDataParallel(model)
        return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.2)

    return prove(
        plain, build, batch(), step, loss=loss, share=samples, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )


@case("losses and gradients are equal, but the optimiser made no step on some rank")
def no_update() -> Report:
    def without(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        mean = loss(model, batch)
        mean.backward()
        return mean

    return prove(plain, DistributedDataParallel, batch(), without, loss=loss, share=samples)


@case("begin with other values than in the plain model: build the parallel model of the one that parallel()")
def other_initial_values() -> Report:
    return prove(plain, lambda _: DistributedDataParallel(Plain().double()), batch(), step, loss=loss)


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


@case("the first output that differs is 1's: it normalises by the samples of one rank; convert it with")
def batch_statistics_of_one_rank() -> Report:
    rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    take = with_after(lambda model: None, squares)
    share = lambda batch, rank: batch.chunk(2)[rank]  # noqa: E731
    return prove(normalised, DistributedDataParallel, rows, take, loss=squares, share=share)


class Counted(nn.Module):
    """A layer with a running mean that nothing computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean(0)
        return self.linear(x)


@case("weights are equal but the buffers seen are not: ranks do not keep them alike")
def buffers_differ() -> Report:
    def counted() -> Counted:
        torch.manual_seed(0)
        return Counted()

    rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    share = lambda batch, rank: batch.chunk(2)[rank]  # noqa: E731
    take = with_after(lambda model: None, squares)
    return prove(counted, DistributedDataParallel, rows, take, loss=squares, share=share)


def run_all() -> dict[str, Report]:
    return {name: check() for name, (check, _) in CASES.items()}


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Report]]:
    return on_ranks(2, run_all)


@pytest.mark.parametrize("name", CASES)
def test_a_bug_is_seen_and_named(name: str, reports: list[dict[str, Report]]) -> None:
    first, second = (rank[name] for rank in reports)
    assert not first.equal
    assert CASES[name][1] in (first.diagnosis or ""), str(first)
    assert (first.diagnosis, first.first_module) == (second.diagnosis, second.first_module)
    with pytest.raises(Differs, match="DIFFERS from one process"):
        first.raise_for_difference()


# ------------------------------------------------------------------ two axes


def over_two_axes(over: str) -> Report:
    """Two replicas of two contexts; gradients are averaged over one axis only."""
    rank = dist.get_rank()
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
    group = groups[rank // 2] if over == "cp" else groups[2 + rank % 2]

    def share(batch: Any, rank: int) -> Any:
        return tuple(tensor.chunk(2)[rank // 2].chunk(2, 1)[rank % 2] for tensor in batch)

    def averaged(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= 2

    return prove(plain, same, batch(), with_after(averaged), loss=loss, share=share, mesh={"dp": 2, "cp": 2})


def both_axes() -> dict[str, Report]:
    return {over: over_two_axes(over) for over in ("dp", "cp")}


def test_the_axis_that_gradients_are_not_reduced_over_is_named() -> None:
    reports = on_ranks(4, both_axes)[0]
    template = "every gradient differs between the 2 ranks of {}, and their mean is the reference"
    assert template.format("cp") in (reports["dp"].diagnosis or "")
    assert template.format("dp") in (reports["cp"].diagnosis or "")


# ------------------------------------------------------------------ mistakes in the call


def failing_rank() -> Report:
    def fails(model: Any, optimizer: Any, batch: Any) -> Tensor:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("of rank 1")
        return step(model, optimizer, batch)

    return prove(plain, DistributedDataParallel, batch(), fails, loss=loss, share=samples)


def test_a_rank_that_fails_brings_its_exception_back() -> None:
    with pytest.raises(RankFailed, match="ZeroDivisionError: of rank 1"):
        on_ranks(2, failing_rank)


def absent_rank() -> Report:
    def absent(model: Any, optimizer: Any, batch: Any) -> Tensor | None:
        return step(model, optimizer, batch) if dist.get_rank() == 0 else None

    return prove(plain, DistributedDataParallel, batch(), absent, loss=loss, share=samples, timeout=2.0)


def test_a_rank_that_takes_no_part_is_an_error_and_no_hang() -> None:
    message = r"rank 0 waits for its collective \(.*\), rank 1 waits for the other ranks, to compare"
    with pytest.raises((RankFailed, StrettoError), match=message):
        on_ranks(2, absent_rank)


def ungathered() -> Report:
    return prove(plain, split_by_hand, batch(), unclipped, loss=loss)


def unnamed() -> Report:
    def build(model: Any) -> nn.Module:
        return nn.ModuleDict({"words": nn.Embedding(24, 16).double()})

    return prove(plain, build, batch(), unclipped, loss=loss)


def incomplete() -> Report:
    return prove(plain, lambda model: model.head, batch(), unclipped, loss=loss)


def no_module() -> Report:
    return prove(plain, lambda model: "model", batch(), unclipped, loss=loss)


def flattened() -> Report:
    def build(model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))

    return prove(plain, build, batch(), unclipped, loss=loss)


def wrong_mesh() -> Report:
    return prove(plain, same, batch(), unclipped, loss=loss, mesh={"dp": 3})


def wrong_reduction() -> Report:
    return prove(plain, same, batch(), unclipped, loss=loss, reduction="meen")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (ungathered, "down.weight is [16, 32] on a rank and [16, 64] in the plain model"),
        (ungathered, "give gather={'blocks.0.down.weight': Split(1)}"),
        (unnamed, "the parallel model's parameter words.weight is not in the plain model"),
        (incomplete, "no rank holds embed.weight of the plain model, nor 12 more"),
        (no_module, "parallel() returned str, in which there is no module"),
        (flattened, "FullyShardedDataParallel flattens its parameters"),
        (wrong_mesh, "mesh is dp=3, and there are 2 ranks"),
        (wrong_reduction, "reduction is 'meen'"),
    ],
)
def test_a_mistake_in_the_call_is_one_clear_error(check: Any, message: str) -> None:
    with pytest.raises(StrettoError) as error:
        on_ranks(2, check)
    assert message in str(error.value)
