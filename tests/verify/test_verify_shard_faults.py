"""Faults in sharded gradients and states, planted on the ranks one after another: each must be named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import stretto.engine.parallel.data.gradients as gradients_module
import stretto.engine.parallel.data.reduction as reduction_module
import stretto.engine.parallel.data.sharded as sharded_module
from planted_faults import Planted, parameters, prove_planted, selected
from stretto.engine.parallel.data.gradients import GradientBuffer
from stretto.engine.parallel.data.reduction import ShardGroups
from stretto.engine.parallel.data.unit import FlatParameter
from stretto.verify.compare import TOLERANCE
from stretto.verify.evidence import Verdict
from tiny_job import EIGHT, LLAMA, changes, job, name_of

STRICT = TOLERANCE * 1e3  # a planted fault is far above rounding


class Done:
    def wait(self) -> None:
        pass


def forget_level(level: int) -> Callable[[pytest.MonkeyPatch], None]:
    """At this level each rank keeps its part of its local gradients, without a sum."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        groups, scatter, marked = sharded_module.shard_groups, reduction_module.start_scatter_sum, list[Any]()

        def marking(*arguments: Any) -> ShardGroups:
            shards = groups(*arguments)
            marked.append(shards.levels[level])
            return shards

        def local_part(pieces: Tensor, group: Any, out: Tensor | None = None) -> Any:
            if not any(group is marked_group for marked_group in marked):
                return scatter(pieces, group, out)
            part = pieces[group.rank()]
            return (part.clone() if out is None else out.copy_(part)), Done()

        patch.setattr(sharded_module, "shard_groups", marking)
        patch.setattr(reduction_module, "start_scatter_sum", local_part)

    return fault


def forget_the_copies(patch: pytest.MonkeyPatch) -> None:
    """Ranks with the same shard do not sum it."""
    patch.setattr(reduction_module, "start_sum", lambda *_: Done())


def average(patch: pytest.MonkeyPatch) -> None:
    scatter = reduction_module.start_scatter_sum
    patch.setattr(
        reduction_module,
        "start_scatter_sum",
        lambda pieces, group, out=None: scatter(pieces / group.size(), group, out),
    )


def keep_what_the_server_has(patch: pytest.MonkeyPatch) -> None:
    """The server uses its local gradients alone."""

    def local(x: Tensor, _: Any) -> Iterator[Any]:
        yield Done()
        return x

    patch.setattr(gradients_module, "reduce_to_first", local)


def lose_the_last_microbatch(patch: pytest.MonkeyPatch) -> None:
    """Reductions still in flight at the end of the step are dropped."""
    wait = GradientBuffer.wait

    def forgetting(self: GradientBuffer) -> None:
        for _, work in self._works:
            work.finish()
        self._works.clear()
        wait(self)

    patch.setattr(GradientBuffer, "wait", forgetting)


def forget_to_gather(patch: pytest.MonkeyPatch) -> None:
    """Updated weights are not sent to the other ranks."""
    patch.setattr(FlatParameter, "_publish_steps", lambda self, *_: iter(()))


def keep_what_was_gathered(patch: pytest.MonkeyPatch) -> None:
    """Weights that a layer has gathered are kept after the update."""
    release, released = FlatParameter.release, set[int]()

    def once(self: FlatParameter) -> None:
        if id(self) not in released:
            released.add(id(self))
            release(self)

    patch.setattr(FlatParameter, "release", once)


def forget_to_copy(patch: pytest.MonkeyPatch) -> None:
    """The optimiser's masters are not copied into the weights."""
    patch.setattr(FlatParameter, "copy_masters", lambda self: None)


def count_copies_of_shards(patch: pytest.MonkeyPatch) -> None:
    """The norm counts copies as different parts."""
    right = sharded_module.shard_groups
    patch.setattr(
        sharded_module,
        "shard_groups",
        lambda *arguments: replace(right(*arguments), counted=dist.group.WORLD),
    )


FOUR = changes(tp=1, dp=4, pp=1, schedule="1f1b")
ALL = [
    Planted(
        forget_level(1),
        changes(**FOUR, mode="zero3", shard_parameters=2),
        (
            "every gradient differs in direction",
            "not summed over the 2 ranks that share parameters or the 2 ranks that share gradients",
        ),
    ),
    Planted(
        forget_level(1),
        changes(**FOUR, mode="zero2", reduce="step"),
        ("not summed over the 4 ranks that share gradients",),
        slow=True,
    ),
    Planted(
        forget_level(2),
        changes(**FOUR, mode="zero2", shard_gradients=2),
        ("the 2 ranks that share states",),
        slow=True,
    ),
    Planted(
        forget_level(0),
        changes(tp=1, dp=2, pp=2, schedule="gpipe", mode="zero3", gather="stage"),
        ("not summed over the 2 ranks that share parameters",),
        slow=True,
    ),
    Planted(
        forget_the_copies,
        changes(**FOUR, mode="zero1", shard_states=2),
        (
            "every gradient differs between the 2 ranks that keep the same shards, and their sum is the "
            "reference: the sum over copies of a shard is missing",
        ),
    ),
    Planted(
        average,
        changes(tp=2, dp=2, pp=1, schedule="1f1b", mode="zero2"),
        ("every gradient is 0.5 times the reference", "as if averaged over the 2 replicas"),
    ),
    Planted(
        keep_what_the_server_has,
        changes(**FOUR, mode="server"),
        ("not summed over the 4 ranks of the server",),
    ),
    Planted(
        lose_the_last_microbatch,
        changes(**FOUR, mode="zero2", reduce="microbatch"),
        ("differs in direction, not only in scale",),
    ),
    *(
        Planted(
            forget_to_gather,
            case,
            ("what optimisers updated is equal, but ranks 0, 1, 2, 3 would compute", "older"),
            slow="offload" not in case,
        )
        for case in (
            changes(**FOUR, mode="zero1"),
            changes(tp=1, dp=2, pp=2, schedule="1f1b", mode="zero2"),
            changes(tp=2, dp=2, pp=1, schedule="1f1b", mode="zero2", offload="cpu"),
        )
    ),
    Planted(
        keep_what_was_gathered,
        changes(**FOUR, mode="zero3", gather="layer"),
        ("what optimisers updated is equal, but ranks", "or older ones that were gathered are kept"),
    ),
    Planted(
        forget_to_gather,
        changes(tp=2, dp=2, pp=1, schedule="1f1b", mode="server"),
        ("what optimisers updated is equal, but ranks 2, 3 would compute with other", "older values"),
        slow=True,
    ),
    *(
        Planted(
            forget_to_copy,
            changes(**FOUR, mode=mode, offload="cpu"),
            ("are not copied into the weights",),
            slow=mode == "ddp",
        )
        for mode in ("ddp", "zero3")
    ),
    Planted(
        count_copies_of_shards,
        changes(**FOUR, mode="zero2", shard_states=2),
        ("their norm is 1.41421 times", "every element is counted 2 times"),
    ),
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[int, Verdict]:
    config = job(tmp_path_factory.mktemp("faults"), EIGHT, model=LLAMA)
    return prove_planted(config, __name__, selected(request), steps=1)


@pytest.mark.parametrize("at", parameters(ALL, lambda p: f"{name_of(p.case)}-{p.fault.__name__}"))
def test_each_fault_is_named(verdicts: dict[int, Verdict], at: int) -> None:
    verdict = verdicts[at]
    ALL[at].check(verdict)
    assert max(quantity.error or 0.0 for quantity in verdict.quantities) > STRICT
