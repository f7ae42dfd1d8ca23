"""A proof that cannot fail proves nothing: faults are planted on the ranks, and verify must name each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto.engine.parallel.data.reduction as reduction_module
import stretto.engine.pipeline.pipeline as pipeline_module
import stretto.engine.pipeline.shared as shared_module
import stretto.run.train.async_step as async_module
import stretto.run.train.language_task as task_module
import stretto.run.train.rank_model as model_module
from proofs import verify
from stretto.engine.models.language import IGNORED
from stretto.engine.parallel.data.sharded import ShardedStates
from stretto.engine.parallel.expert.dispatch import Dispatch
from stretto.engine.parallel.fragment import ParameterFragment
from stretto.engine.parallel.styles import ParameterShard, RowParallel
from stretto.engine.pipeline import Pipeline
from stretto.engine.pipeline.compute import ComputeCalls
from stretto.engine.pipeline.versions import WeightVersions
from stretto.job.job import Job
from stretto.job.optimiser import Optimiser
from stretto.run.config.schema import TrainConfig
from stretto.run.train.rank_model import RankModel
from stretto.verify.compare import TOLERANCE
from stretto.verify.evidence import Verdict
from stretto.verify.language.cases import describe
from tiny_job import EIGHT, GPT, LLAMA, Changes, changes, job, varied

STRICT = TOLERANCE * 1e3  # a planted fault is far above rounding


def halve_gradients() -> None:
    original = Pipeline.step

    def step(self: Pipeline, inputs: Any, targets: Any, scale: Any, *rest: Any) -> Tensor | None:
        return original(self, inputs, targets, [factor / 2 for factor in scale], *rest)

    Pipeline.step = step


def average_over_replicas() -> None:
    original = Pipeline.step

    def step(self: Pipeline, *arguments: Any) -> Tensor | None:
        losses = original(self, *arguments)
        for buffer in self.buffers.values():
            for flat in buffer.flats:
                flat.div_(self.mesh.size("dp"))
        return losses

    Pipeline.step = step


def drop_a_microbatch() -> None:
    original = Pipeline.step

    def step(self: Pipeline, inputs: Any, targets: Any, *rest: Any) -> Tensor | None:
        if self.mesh.index("dp") == 0:
            targets = [*targets[:-1], torch.full_like(targets[-1], IGNORED)]
        return original(self, inputs, targets, *rest)

    Pipeline.step = step


def forget_the_tied_sum() -> None:
    shared_module.all_sum = lambda tensor, _: tensor


def sum_ties_twice() -> None:
    original = shared_module.all_sum
    shared_module.all_sum = lambda tensor, group: original(tensor, group).mul_(2)


def average_ties() -> None:
    original = shared_module.all_sum
    shared_module.all_sum = lambda tensor, group: original(tensor, group).div_(2)


def reweight(change: Callable[[Tensor], Tensor]) -> None:
    """Change the weights with which the outputs of a token's experts are summed."""
    from_experts = Dispatch.from_experts
    Dispatch.from_experts = lambda self, rows, weights: from_experts(self, rows, change(weights))


def detach_routing() -> None:
    reweight(lambda weights: weights.detach())


def leave_routing_unnormalised() -> None:
    reweight(lambda weights: weights * weights.amax(-1, keepdim=True))


def drop_routing() -> None:
    reweight(torch.ones_like)


def change_fragments(change: Callable[[ShardedStates, ParameterFragment], None]) -> None:
    begin = ShardedStates.begin

    def changed(self: ShardedStates, *arguments: Any) -> Any:
        for fragment in begin(self, *arguments):
            change(self, fragment)
            yield fragment

    ShardedStates.begin = changed


def count_all_copies() -> None:
    """Tied parameters are owned on every stage, replicated ones on every tensor-parallel rank."""

    def everywhere(_: ShardedStates, fragment: ParameterFragment) -> None:
        pieces = tuple(replace(piece, owned=True) for piece in fragment.placed.pieces)
        fragment.placed, fragment.counted_elsewhere = replace(fragment.placed, pieces=pieces), False

    change_fragments(everywhere)


def leave_a_shard_out() -> None:
    """The last tensor-parallel rank's share of the first block is not in the norm."""

    def partly(states: ShardedStates, fragment: ParameterFragment) -> None:
        if states.mesh.index("tp") == 1 and fragment.name == "blocks.0.mlp.up.weight":
            fragment.placed = fragment.placed.unowned()

    change_fragments(partly)


class Done:
    def wait(self) -> None:
        pass


def forget_the_replicas() -> None:
    reduction_module.start_sum = lambda *_: Done()


def swap_shards() -> None:
    """The input columns of row-parallel layers in the reverse order of ranks."""
    parts = RowParallel.parts

    def swapped(self: RowParallel, name: str, module: Any, index: int, tp: int) -> dict[str, ParameterShard]:
        return parts(self, name, module, tp - 1 - index, tp)

    RowParallel.parts = swapped


def forget_the_shared_heads() -> None:
    pipeline_module.sum_partial = lambda *_: None


def shift_dropout() -> None:
    """Each microbatch gets the dropout of the next one."""
    build = Pipeline.__init__

    def shifted(self: Pipeline, *arguments: Any, before_forward: Callable[[int], None], **named: Any) -> None:
        count = arguments[1].microbatches
        build(self, *arguments, before_forward=lambda mb: before_forward((mb + 1) % count), **named)

    Pipeline.__init__ = shifted


def decay_all_weights() -> None:
    build = model_module.build_optimizer

    def decayed(named: Any, optimiser: Optimiser) -> torch.optim.Optimizer:
        optimizer = build(named, optimiser)
        for group in optimizer.param_groups:
            group["weight_decay"] = optimiser.weight_decay
        return optimizer

    model_module.build_optimizer = decayed


def lose_the_second_update() -> None:
    apply_gradients = task_module.apply_gradients
    done = list[int]()

    def once(model: RankModel, rate: float, norm: float) -> None:
        done.append(1)
        if len(done) == 1:
            apply_gradients(model, rate, norm)

    task_module.apply_gradients = once


PP2_DP2, TP2, PP2 = (
    changes(tp=1, dp=2, pp=2, schedule="1f1b"),
    changes(tp=2, dp=1, pp=1, schedule="1f1b"),
    changes(tp=1, dp=1, pp=2, schedule="1f1b"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verify")


def four(folder: Path, *overrides: str, model: str = GPT) -> TrainConfig:
    """A job of four microbatches."""
    return job(folder, "batch.global_size=4", *overrides, model=model)


def proved(config: TrainConfig, case: Changes, fault: Callable[[], None], steps: int = 1) -> Verdict:
    proof = varied(config, case)
    (verdict,) = verify(config, [proof], steps, on_rank=fault)
    assert not verdict.equal
    assert verdict.layout == describe(proof)
    return verdict


@pytest.mark.parametrize(
    ("fault", "case", "says"),
    [
        (halve_gradients, PP2, "every gradient is 0.5 times the reference: wrong gradient scale"),
        pytest.param(
            average_over_replicas,
            PP2_DP2,
            "every gradient is 0.5 times the reference: wrong gradient scale, as if averaged over the 2 "
            "replicas",
            marks=pytest.mark.slow,
        ),
        (
            forget_the_replicas,
            changes(dp=2),
            "every gradient differs between the 2 replicas, and their sum is the reference: the "
            "data-parallel reduction is missing",
        ),
    ],
)
def test_wrong_gradients_are_named(folder: Path, fault: Callable[[], None], case: Changes, says: str) -> None:
    verdict = proved(four(folder), case, fault)
    assert verdict.diagnosis == says
    assert verdict.error("gradients") > STRICT


@pytest.mark.parametrize(
    ("fault", "case", "says"),
    [
        (forget_the_tied_sum, PP2, "it is not summed over the 2 stages that share it"),
        pytest.param(
            sum_ties_twice,
            PP2_DP2,
            "it is 2 times the reference, summed twice over the 2 stages that share it",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            average_ties,
            PP2_DP2,
            "it is 0.5 times the reference, averaged over the 2 stages that share it",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wrong_tied_sum_names_its_parameter(
    folder: Path, fault: Callable[[], None], case: Changes, says: str
) -> None:
    verdict = proved(four(folder), case, fault)
    assert verdict["gradients"].worst == "embed.tok.weight"
    tied = "only the gradient of the tied parameter embed.tok.weight is wrong"
    assert verdict.diagnosis == f"{tied}: {says}"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            detach_routing,
            "the gradient of blocks.1.mlp.router.gate.weight is wrong, and those of its experts and of all "
            "that comes later are right: the gradient of the routing weights is dropped or wrong",
        ),
        (
            leave_routing_unnormalised,
            "so the routing weights of a token do not sum to what they should, as if not normalised",
        ),
        (
            drop_routing,
            "the first output that differs is blocks.0.mlp.drop's: tokens go to other experts, or their "
            "outputs are summed with other weights or with none",
        ),
    ],
)
def test_wrong_routing_weights_are_named(folder: Path, fault: Callable[[], None], says: str) -> None:
    case = changes(tp=1, dp=2, pp=1, schedule="1f1b", ep=2)
    verdict = proved(four(folder, "model.moe.experts=4", model=LLAMA), case, fault)
    assert says in (verdict.diagnosis or "")


def test_a_missing_sum_over_shared_heads_names_its_parameter(folder: Path) -> None:
    verdict = proved(four(folder, "model.kv_heads=1", model=LLAMA), TP2, forget_the_shared_heads)
    assert verdict["gradients"].worst in ("blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight")
    assert verdict.diagnosis is not None
    assert "blocks.0.attn.qkv.weight" in verdict.diagnosis
    assert "blocks.1.attn.qkv.weight" in verdict.diagnosis
    assert verdict.diagnosis.endswith("a reduction is missing or a shard is misplaced")


def test_a_dropped_microbatch_is_named(folder: Path) -> None:
    verdict = proved(job(folder, EIGHT), PP2, drop_a_microbatch)
    assert verdict.diagnosis is not None
    assert "about 1 of 8 microbatches short: a microbatch is dropped" in verdict.diagnosis
    assert "first output" not in verdict.diagnosis
    assert verdict.error("loss") == pytest.approx(1 / 8, rel=0.1)


@pytest.mark.parametrize(
    ("fault", "case", "says"),
    [
        pytest.param(
            count_all_copies,
            PP2_DP2,
            "of embed.tok.weight a part of it is counted 2 times",
            marks=pytest.mark.slow,
        ),
        (count_all_copies, TP2, "of embed.pos.weight a part of it is counted 2 times"),
        (leave_a_shard_out, TP2, "of blocks.0.mlp.up.weight a part of it is not counted"),
    ],
)
def test_a_wrong_clip_norm_is_named(
    folder: Path, fault: Callable[[], None], case: Changes, says: str
) -> None:
    verdict = proved(four(folder), case, fault)
    assert verdict.diagnosis is not None
    assert "gradients are equal but their norm is" in verdict.diagnosis
    assert "so clipping is wrong" in verdict.diagnosis
    assert says in verdict.diagnosis
    assert verdict.error("gradients") <= TOLERANCE
    assert verdict.error("norm") > STRICT


def test_swapped_shards_are_traced_to_the_first_wrong_output(folder: Path) -> None:
    verdict = proved(four(folder), TP2, swap_shards)
    assert verdict.diagnosis is not None
    assert "wrong data or a wrong forward" in verdict.diagnosis
    assert verdict.diagnosis.endswith("the first output that differs is blocks.0.attn.proj's")
    assert verdict.error("loss") > STRICT


def test_wrong_dropout_is_traced_to_the_first_wrong_output(folder: Path) -> None:
    verdict = proved(four(folder), PP2, shift_dropout)
    assert verdict.diagnosis is not None
    assert verdict.diagnosis.endswith("the first output that differs is embed.drop's")


def drop_out_otherwise_again() -> None:
    """Recomputation uses the dropout of the newest microbatch."""
    right = ComputeCalls.backward

    def backward(self: ComputeCalls, action: Any) -> Any:
        self._prepare = lambda action: None
        try:
            return right(self, action)
        finally:
            del self._prepare

    ComputeCalls.backward = backward


@pytest.mark.parametrize("mode", [pytest.param("selective", marks=pytest.mark.slow), "full"])
def test_a_forward_that_runs_again_otherwise_is_named(folder: Path, mode: Any) -> None:
    verdict = proved(four(folder), changes(**PP2, recompute=mode), drop_out_otherwise_again)
    assert verdict.diagnosis is not None
    assert verdict.error("loss") <= TOLERANCE
    assert (
        f"or what runs again (recompute={mode}) is not what ran, as with other dropout" in verdict.diagnosis
    )
    assert verdict.error("gradients") > STRICT


def forget_the_copies() -> None:
    """Each copy of the weights keeps the gradients of its own microbatches."""
    shared_module.SharedGradients._copied = lambda self, mesh: []


@pytest.mark.parametrize(
    ("case", "overrides", "says"),
    [
        (
            changes(tp=1, dp=1, pp=2, schedule="dualpipe"),
            (),
            "differs between the 2 copies of the weights, and their sum is the reference: the sum over the "
            "copies is missing",
        ),
        pytest.param(
            changes(tp=1, dp=2, pp=2, schedule="chimera"),
            ("model.tied=false",),
            "the sum over the copies or the data-parallel reduction is missing",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_missing_sum_over_copies_is_named(
    folder: Path, case: Changes, overrides: tuple[str, ...], says: str
) -> None:
    verdict = proved(four(folder, *overrides), case, forget_the_copies)
    assert verdict.diagnosis is not None
    assert says in verdict.diagnosis
    assert verdict.error("gradients") > STRICT


def one_update_later() -> None:
    """Each microbatch uses the weights of one update less."""
    later(lambda versions: tuple(tuple(max(0, v - 1) for v in row) for row in versions))


def never_stash() -> None:
    """All microbatches of a stage use its first weights."""
    later(lambda versions: tuple(tuple(0 for _ in row) for row in versions))


def later(change: Callable[[Any], Any]) -> None:
    build = Job.window.fget
    assert build is not None

    def window(self: Job) -> Any:
        window_of = build(self)
        assert window_of is not None

        def changed(steps: int) -> Any:
            program = window_of(steps)
            return replace(program, versions=change(program.versions))

        return changed

    Job.window = property(window)  # type: ignore[assignment]


def last_update_is_lost() -> None:
    """The last update of each window."""
    update = WeightVersions.update

    def updating(self: WeightVersions, following: int) -> None:
        inner = self._step
        if self.newest + 1 == self.left:  # one for each microbatch
            self._step = lambda: None
        update(self, following)
        self._step = inner

    WeightVersions.update = updating


def scale_by_the_whole_step() -> None:
    """The loss is scaled by the tokens of the step, not of the update."""
    async_module.loss_weights = lambda updates, tokens: (1.0 / tokens.sum()).expand(len(tokens))


SGD = ("optim.name=sgd", "optim.momentum=0.9", "optim.clip=null")


@pytest.mark.parametrize(
    ("fault", "case", "says"),
    [
        (
            one_update_later,
            changes(tp=1, dp=1, pp=2, schedule="pipedream"),
            "one later than promised, on every stage",
        ),
        pytest.param(
            one_update_later,
            changes(tp=1, dp=1, pp=2, schedule="pipedream-2bw"),
            "one later than promised, on every stage",
            marks=pytest.mark.slow,
        ),
        (never_stash, changes(tp=1, dp=1, pp=2, schedule="pipedream-2bw"), "differ, most of all"),
        (
            last_update_is_lost,
            changes(tp=1, dp=2, pp=1, schedule="pipedream"),
            "the losses are equal, but the weights after 4",
        ),
        pytest.param(
            forget_the_replicas,
            changes(tp=1, dp=2, pp=1, schedule="pipedream"),
            "the weights after 4 delayed updates differ",
            marks=pytest.mark.slow,
        ),
        (
            scale_by_the_whole_step,
            changes(tp=1, dp=1, pp=2, schedule="pipedream"),
            "after 8 delayed updates differ, most of all",
        ),
    ],
)
def test_wrong_delayed_updates_are_seen(
    folder: Path, fault: Callable[[], None], case: Changes, says: str
) -> None:
    verdict = proved(job(folder, *SGD, EIGHT, model=LLAMA), case, fault, steps=2)
    assert verdict.diagnosis is not None
    assert says in verdict.diagnosis
    assert verdict.error("weights") > STRICT
    assert verdict["gradients"].error is None


@pytest.mark.parametrize(
    ("fault", "eps"),
    [
        pytest.param(decay_all_weights, 1e-8, marks=pytest.mark.slow),
        (lose_the_second_update, 1e-8),
        (decay_all_weights, 1e-15),
    ],
)
def test_a_wrong_update_is_named(folder: Path, fault: Callable[[], None], eps: float) -> None:
    verdict = proved(four(folder, f"optim.eps={eps}"), TP2, fault, steps=2)
    assert verdict.error("weights") > STRICT
    assert verdict.diagnosis is not None
    assert verdict.diagnosis.startswith("gradients and norm are equal but the updated ")
    assert verdict.diagnosis.endswith(" are not: the optimiser differs")
    assert verdict["weights"].worst in verdict.diagnosis
