"""Faults of splitting by sequence, context and experts, planted on the ranks one after another: each must be
named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import stretto.engine.parallel.data.reduction as reduction_module
import stretto.engine.parallel.data.sharded as sharded_module
import stretto.engine.pipeline.pipeline as pipeline_module
from planted_faults import Planted, parameters, prove_planted, selected
from stretto.engine.parallel.data.reduction import ShardGroups
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.styles import ShardedPositions
from stretto.layout.shards import ShardSizes
from stretto.run.train.rank_model import RankModel
from stretto.verify.compare import TOLERANCE
from stretto.verify.evidence import Verdict
from tiny_job import LLAMA, changes, job, name_of

STRICT = TOLERANCE * 1e3  # a planted fault is far above rounding
JOB = (
    "model.moe.experts=4",
    "model.moe.shared_ffn=32",
    "data.sequence=15",
    "model.positions=15",
    "batch.global_size=4",
)


class Done:
    def wait(self) -> None:
        pass


def forget_the_sums(patch: pytest.MonkeyPatch) -> None:
    """Gradients are not summed over cp and dp."""
    patch.setattr(reduction_module, "start_sum", lambda *_: Done())


def forget_what_is_partial(patch: pytest.MonkeyPatch) -> None:
    """Each tensor-parallel rank keeps the gradient of its tokens, for norms and routers."""
    patch.setattr(pipeline_module, "sum_partial", lambda *_: None)


def change_experts(
    change: Callable[[Mesh, ShardGroups], ShardGroups],
) -> Callable[[pytest.MonkeyPatch], None]:
    """Replace the groups over which experts are sharded."""
    right = sharded_module.shard_groups

    def changed(mesh: Mesh, over: str, sizes: ShardSizes) -> ShardGroups:
        groups = right(mesh, over, sizes)
        return groups if over == "tp" else change(mesh, groups)

    return lambda patch: patch.setattr(sharded_module, "shard_groups", changed)


# gradients of experts are summed over the ranks of other parameters, or not at all
sum_experts_over_dp = change_experts(
    lambda mesh, groups: replace(
        groups, copies=mesh.size("dp"), levels=(None, None, None, mesh.group("cp-dp"))
    )
)
leave_experts_unsummed = change_experts(lambda mesh, groups: replace(groups, levels=(None,) * 4))


def spread_experts_over(group: Callable[[Mesh], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    return change_experts(lambda mesh, groups: replace(groups, counted=group(mesh)))


def count_positions_from_0(patch: pytest.MonkeyPatch) -> None:
    """Rotary positions of every part start at 0."""
    patch.setattr(ShardedPositions, "replace_module", lambda self, module, mesh: module)


def show_the_padding(patch: pytest.MonkeyPatch) -> None:
    """Padding has a target."""

    def share(self: RankModel, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.split.take(inputs, 1, 0), self.split.take(targets, 1, 0)

    patch.setattr(RankModel, "share", share)


ALL = [
    Planted(
        forget_the_sums,
        changes(tp=1, dp=1, pp=1, schedule="1f1b", cp=4),
        (
            "every gradient differs between the 4 context-parallel ranks, and their sum is the reference: "
            "the sum over cp is missing",
        ),
    ),
    Planted(
        forget_the_sums,
        changes(tp=1, dp=2, pp=1, schedule="1f1b", cp=2),
        ("its 4 holders", "the data-parallel reduction and the sum over cp are missing"),
        slow=True,
    ),
    Planted(
        forget_what_is_partial,
        changes(tp=2, dp=1, pp=2, schedule="1f1b", sequence_parallel=True),
        (
            "norm",
            "differs between the 2 tensor-parallel ranks, and their sum is the reference: the sum over tp",
        ),
    ),
    Planted(
        sum_experts_over_dp,
        changes(tp=1, dp=2, pp=2, schedule="1f1b", ep=2),
        (
            "the gradient of experts alone, ",
            "summed over ranks that hold other experts (expert_dp is not dp)",
        ),
    ),
    Planted(
        leave_experts_unsummed,
        changes(tp=1, dp=4, pp=1, schedule="gpipe", ep=2),
        ("the 2 ranks that hold the same experts", "the reduction over expert_dp is missing"),
        slow=True,
    ),
    Planted(
        spread_experts_over(lambda mesh: dist.group.WORLD),
        changes(tp=1, dp=4, pp=1, schedule="1f1b", ep=2),
        ("their norm is 1.", "so clipping is wrong: experts are counted 2 times"),
    ),
    Planted(
        spread_experts_over(lambda mesh: None),
        changes(tp=1, dp=4, pp=1, schedule="1f1b", ep=4),
        ("their norm is 0.", "% of the experts were counted: the sum over ep is missing"),
        slow=True,
    ),
    Planted(
        count_positions_from_0,
        changes(tp=1, dp=2, pp=1, schedule="gpipe", cp=2, context="ulysses"),
        ("wrong forward; the first output that differs is blocks.0.attn.rotary's",),
    ),
    Planted(
        show_the_padding,
        changes(tp=2, dp=1, pp=1, schedule="1f1b", cp=2, sequence_parallel=True),
        ("no output of the first microbatch differs, so padding may be in the loss",),
    ),
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[int, Verdict]:
    config = job(tmp_path_factory.mktemp("faults"), *JOB, model=LLAMA)
    return prove_planted(config, __name__, selected(request), steps=1)


@pytest.mark.parametrize("at", parameters(ALL, lambda planted: name_of(planted.case)))
def test_each_fault_is_named(verdicts: dict[int, Verdict], at: int) -> None:
    verdict = verdicts[at]
    ALL[at].check(verdict)
    assert max(q.error or 0.0 for q in verdict.quantities if q.name != "weights") > STRICT
