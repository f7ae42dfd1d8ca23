"""Faults that only show in training's own step, or while nothing is read between steps, or when messages are
late: planted on the ranks one after another, each must be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import stretto.engine.parallel.late as late_module
import stretto.run.train.batches as batches_module
import stretto.run.train.language_task as task_module
from planted_faults import Planted, parameters, prove_planted, selected
from proofs import verify
from stretto.engine.parallel.data.layer_gather import LayerGather
from stretto.engine.parallel.data.unit import FlatParameter
from stretto.engine.pipeline.exchange import Transfer, TransferCalls
from stretto.run.train.batches import Batches
from stretto.verify.evidence import Verdict
from tiny_job import GPT, changes, job, varied

Fault = Callable[[pytest.MonkeyPatch], None]


def layers_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    def gather(self: LayerGather, at: int, following: int) -> None:
        self._gather(at)

    patch.setattr(LayerGather, "_gather_layer", gather)


def gather_a_stale_shard(patch: pytest.MonkeyPatch) -> None:
    """A gather does not wait for the update that is still spreading."""

    def gather(self: FlatParameter) -> None:
        if not self._gathered:
            self._gathered = True
            self._start(self._gather_steps())

    patch.setattr(FlatParameter, "gather", gather)


def do_not_wait_for_messages(patch: pytest.MonkeyPatch) -> None:
    right = TransferCalls.incoming

    def incoming(self: TransferCalls, action: Any) -> Any:
        call, receives = right(self, action), self.live.receives

        def fixed() -> Any:
            receives[action] = ()
            return call()

        return fixed

    def wait(self: TransferCalls, action: Any) -> Any:
        return lambda: None

    patch.setattr(TransferCalls, "incoming", incoming)
    patch.setattr(TransferCalls, "wait", wait)


def overwrite_what_is_sent(patch: pytest.MonkeyPatch) -> None:
    """What was sent is used for something else before the send is done."""
    send = Transfer.send

    def spoiling(self: Transfer, tensor: Tensor, channel: Any) -> Any:
        sent = tensor.clone()
        work = send(self, sent, channel)
        sent.zero_()
        return work

    patch.setattr(Transfer, "send", spoiling)


def share_a_slot(patch: pytest.MonkeyPatch) -> None:
    """All messages into a stage arrive in one buffer."""
    right = TransferCalls._buffers

    def buffers(self: TransferCalls, action: Any) -> Any:
        self.slots = dict.fromkeys(self.slots, 0)
        return right(self, action)

    patch.setattr(TransferCalls, "_buffers", buffers)


def dropout_of_the_first_replica(patch: pytest.MonkeyPatch) -> None:
    take = Batches.take

    def taking(self: Batches, samples: Any, first: int, keyed: bool, number: int = 0) -> Any:
        taken = take(self, samples, first, keyed, number)
        if keyed:
            self.model.samples[:] = self.indices(first, 0)
        return taken

    patch.setattr(Batches, "take", taking)


def count_own_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batches_module, "all_sum", lambda tensor, _: tensor)


def clip_before_unscaling(patch: pytest.MonkeyPatch) -> None:
    right = task_module.ratio
    patch.setattr(task_module, "ratio", lambda norm, largest, scale=1.0: right(norm * scale, largest, scale))


ALL = [
    Planted(
        layers_do_not_wait,
        changes(dp=4, mode="zero2"),
        (
            "is not finite while the allgather over ranks 0, 1, 2, 3 that "
            "engine.parallel.data.unit._publish_steps starts is still in flight: something is used before it "
            "has arrived",
        ),
    ),
    Planted(
        gather_a_stale_shard,
        changes(dp=4, mode="zero3", shard_parameters=2),
        ("that engine.parallel.data.unit._gather_steps starts uses memory of another one in flight",),
    ),
    Planted(do_not_wait_for_messages, changes(dp=2, pp=2, schedule="1f1b"), ("exchange.receive starts",)),
    Planted(
        overwrite_what_is_sent,
        changes(dp=2, pp=2, schedule="gpipe"),
        ("send starts is in flight while what it sends is overwritten",),
    ),
    Planted(
        share_a_slot, changes(pp=4, schedule="gpipe"), ("uses memory of another one in flight",), slow=True
    ),
    Planted(dropout_of_the_first_replica, changes(dp=4), ("wrong data or a wrong forward",), slow=True),
    Planted(count_own_tokens, changes(dp=2, cp=2), ("the loss is 2 times the reference",)),
    Planted(
        clip_before_unscaling,
        changes(dp=2, tp=2),
        ("with a loss scale of 1024, as in float16: gradients and norm are equal but the updated",),
    ),
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[int, Verdict]:
    config = job(tmp_path_factory.mktemp("waits"), model=GPT)
    return prove_planted(config, __name__, selected(request))


@pytest.mark.parametrize("at", parameters(ALL, lambda planted: planted.fault.__name__))
def test_each_fault_is_seen(verdicts: dict[int, Verdict], at: int) -> None:
    ALL[at].check(verdicts[at])


def test_steps_come_to_the_same_bits_with_messages_late(tmp_path: Path) -> None:
    config = job(tmp_path, "train.bucket_mib=0.005")
    cases = [changes(dp=2, mode="zero3", offload="nvme"), changes(pp=2, schedule="zb-h1"), changes(tp=2)]
    assert all(v.equal for v in verify(config, [varied(config, case) for case in cases], steps=2, twice=True))


def test_other_bits_with_messages_late_are_seen(tmp_path: Path) -> None:
    """A sum whose order depends on what has arrived differs in the last bits alone."""
    config = job(tmp_path)
    (verdict,) = verify(config, [varied(config, changes(dp=2))], twice=True, on_rank=sum_in_another_order)
    assert verdict.diagnosis is not None
    assert verdict.diagnosis.startswith(
        "equal where messages arrive at once; where they are late, ranks 0, 1"
    )
    assert verdict.error("weights") <= 1e-9


def sum_in_another_order() -> None:
    """Late messages bring numbers that differ by rounding."""
    right = late_module._Message.wait

    def wait(self: Any, *arguments: Any) -> bool:
        done = right(self, *arguments)
        for mine, _ in self._written:
            if mine.is_floating_point() and mine.numel() > 100:
                mine.data.mul_(1 + 2**-50)
        return done

    late_module._Message.wait = wait
