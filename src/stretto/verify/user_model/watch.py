"""A training step as it runs: its loss, its gradients before clipping, and the norm that clips them.

The step is the user's. Its gradients are seen where torch's clipping begins, or else where an optimiser's
step does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.errors import StrettoError
from stretto.verify.holdings import Entry

Step = Callable[[Any, Any, Any], Any]


@dataclass(kw_only=True)
class Observation:
    """What a step of this rank showed.

    loss, norm: as the step returned them, or for the norm as torch's clipping used it; None: neither.
    clip: the largest norm, where torch's clipping was used.
    gradients: by the key of the entry, before clipping where `clip` is set; None: there was none.
    updated: whether an optimiser made a step.
    """

    loss: float | None = None
    norm: float | None = None
    clip: float | None = None
    gradients: dict[int, Tensor | None] = field(default_factory=dict[int, "Tensor | None"])
    updated: bool = False


def watch(
    step: Step, built: Any, optimizers: Sequence[torch.optim.Optimizer], batch: Any, entries: Sequence[Entry]
) -> Observation:
    """Run one step, and see what it does.

    Args:
        step: called with `built`, the optimizer (a list where there are several) and the batch.
        entries: the parameters whose gradients to keep.

    Raises:
        StrettoError: the step returned something other than a loss, or a loss and a norm.
    """
    observation = Observation()
    norms = list[Tensor]()

    def capture() -> None:
        if not observation.gradients:
            for entry in entries:
                gradient = entry.gradient()
                observation.gradients[entry.key] = None if gradient is None else gradient.detach().clone()

    def clipped(largest: float, norm: Tensor) -> None:
        capture()
        observation.clip = float(largest)
        norms.append(norm.detach().clone())

    def before(*_: Any) -> None:
        capture()
        observation.updated = True

    with ExitStack() as stack:
        stack.enter_context(_clipping(clipped))
        for optimizer in optimizers:
            stack.callback(optimizer.register_step_pre_hook(before).remove)
        if _is_engine(built):
            stack.enter_context(_engine_step(built, before))
        result = step(built, optimizers[0] if len(optimizers) == 1 else optimizers, batch)
    capture()  # a step without an optimiser
    observation.loss, observation.norm = _returned(result)
    sizes = {_number(norm) for norm in norms}
    if observation.norm is None and len(sizes) == 1:  # several calls clip groups, each by a norm of its own
        (observation.norm,) = sizes
    return observation


@contextmanager
def _clipping(clipped: Callable[[float, Tensor], None]) -> Generator[None]:
    """Calls `clipped` wherever torch's functions scale gradients by a norm."""
    module = cast(Any, sys.modules["torch.nn.utils.clip_grad"])
    inner = module._clip_grads_with_norm_

    def observed(parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None = None) -> None:
        clipped(max_norm, total_norm)
        inner(parameters, max_norm, total_norm, foreach)

    module._clip_grads_with_norm_ = cast(Any, nn.utils).clip_grads_with_norm_ = observed
    try:
        yield
    finally:
        module._clip_grads_with_norm_ = cast(Any, nn.utils).clip_grads_with_norm_ = inner


def _is_engine(built: Any) -> bool:
    """Whether it is DeepSpeed's, which updates in a method of its own."""
    return isinstance(built, nn.Module) and type(built).__module__.startswith("deepspeed.")


@contextmanager
def _engine_step(engine: Any, before: Callable[[], None]) -> Generator[None]:
    inner = engine.step

    def observed(*arguments: Any, **keywords: Any) -> Any:
        before()
        return inner(*arguments, **keywords)

    engine.step = observed
    try:
        yield
    finally:
        del engine.step


def _returned(result: Any) -> tuple[float | None, float | None]:
    """Loss and norm of what a step returned."""
    loss, norm = result if isinstance(result, tuple) and len(cast(Any, result)) == 2 else (result, None)
    for quantity, value in (("loss", loss), ("norm", norm)):
        if value is not None and not isinstance(value, int | float) and not _is_number(value):
            raise StrettoError(
                f"step() returned {type(value).__name__} as the {quantity}",
                hint="return the loss, (loss, gradient norm), or None on ranks that compute no loss",
            )
    return None if loss is None else _number(loss), None if norm is None else _number(norm)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _number(value: Any) -> float:
    value = value.detach() if isinstance(value, Tensor) else value
    return float(value.full_tensor() if isinstance(value, DTensor) else value)
