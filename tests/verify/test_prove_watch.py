"""What a step shows of itself: its clipping, and whether there was anything to compare."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from plain_models import batch, loss, plain, samples, step, unclipped
from ranks import on_ranks
from stretto.errors import StrettoError
from stretto.prove import Report, prove


def clipped_by_hand(largest: float) -> Any:
    """A step that clips by code of its own, and returns only the loss."""

    def clip(model: nn.Module) -> None:
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
        for p in model.parameters():
            p.grad *= (largest / (norm + 1e-6)).clamp(max=1.0)

    def own_step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        mean = loss(model, batch)
        mean.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        return mean

    return own_step


def proof_of_clipping_by_hand(largest: float, clip: float | None) -> Report:
    return prove(
        plain, DistributedDataParallel, batch(), clipped_by_hand(largest), loss=loss, share=samples, clip=clip
    )


def test_a_step_that_clips_and_returns_only_the_loss_is_equal_with_clip() -> None:
    report = on_ranks(2, proof_of_clipping_by_hand, 0.5, 0.5)[0]
    assert report.equal, str(report)
    assert "not seen by this proof: the norm, " in str(report)
    wrong = on_ranks(2, proof_of_clipping_by_hand, 0.4, 0.5)[0]
    assert "every gradient is 0.8 times the reference" in str(wrong.diagnosis)


def test_clipping_that_nothing_tells_of_is_asked_for() -> None:
    report = on_ranks(2, proof_of_clipping_by_hand, 0.5, None)[0]
    assert "clipping by code of the step's own: then give clip=0.5)" in str(report.diagnosis)
    without = on_ranks(2, proof_of_clipping_by_hand, 100.0, 0.5)[0]
    assert "as if the step did not clip to a norm of 0.5" in str(without.diagnosis)


def proof_of_copies() -> Report:
    return prove(plain, lambda model: model, batch(), step, loss=loss, steps=1)


def test_what_compares_nothing_does_not_pass_without_a_word() -> None:
    """Copies of the whole job on every rank, no step at all, and a loss that nothing reaches."""
    report = on_ranks(2, proof_of_copies)[0]
    assert any("every rank computes the whole batch with the whole model" in note for note in report.notes)
    with pytest.raises(StrettoError, match="steps is 0, must be at least 1"):
        prove(plain, lambda model: model, batch(), step, loss=loss, steps=0)
    with pytest.raises(StrettoError, match="no gradient of the plain model differs from 0 in step 1"):
        prove(
            plain,
            lambda model: model,
            batch(),
            step,
            loss=lambda model, batch: 0.0 * loss(model, batch),
            steps=1,
        )


def test_the_last_lines_list_what_was_compared_shared_and_not_seen() -> None:
    *_, compared, shared, unseen = str(
        prove(plain, lambda model: model, batch(), unclipped, loss=loss, steps=1)
    ).splitlines()
    assert compared == "compared with the plain model in one process: loss, gradients, weights, states"
    assert "the optimizer's rule" in shared
    assert unseen.startswith("not seen by this proof: the norm, mistakes of what is shared")
