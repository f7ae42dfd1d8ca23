"""Training steps of a user's model: as the user makes them, and those of the plain model in one process.

Gradients are seen where torch's clipping begins, or else where an optimiser's step does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.errors import StrettoError
from stretto.verify.compare import Snapshot
from stretto.verify.holdings import Entry

Step = Callable[[Any, Any, Any], Any]


@dataclass(kw_only=True)
class Observation:
    """What was observed of a step of this rank.

    loss, norm: as the step returned them; the norm else as torch's clipping used it; None if there is none.
    clip: the largest norm, if torch's clipping was used.
    gradients: by the key of the entry, before clipping if `clip` is set; None if there was none.
    updated: True if an optimiser made a step.
    """

    loss: float | None = None
    norm: float | None = None
    clip: float | None = None
    gradients: dict[int, Tensor | None] = field(default_factory=dict[int, "Tensor | None"])
    updated: bool = False


def watch(
    step: Step, built: Any, optimizers: Sequence[torch.optim.Optimizer], batch: Any, entries: Sequence[Entry]
) -> Observation:
    """Run one step and observe it.

    Args:
        step: called with `built`, the optimizer (a list if there are several) and the batch.
        entries: parameters whose gradients are recorded.

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
        if isinstance(built, nn.Module) and type(built).__module__.startswith("deepspeed."):
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
    """Call `clipped` whenever torch's functions scale gradients by a norm."""
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
    """Return the loss and norm that a step returned."""
    loss, norm = result if isinstance(result, tuple) and len(cast(Any, result)) == 2 else (result, None)
    for quantity, value in (("loss", loss), ("norm", norm)):
        if (
            value is not None
            and not isinstance(value, int | float)
            and not (isinstance(value, Tensor) and value.numel() == 1)
        ):
            raise StrettoError(
                f"step() returned {type(value).__name__} as the {quantity}",
                hint="return the loss, (loss, gradient norm), or None on ranks that compute no loss",
            )
    return None if loss is None else _number(loss), None if norm is None else _number(norm)


def _number(value: Any) -> float:
    value = value.detach() if isinstance(value, Tensor) else value
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


Loss = Callable[[Any, Any], Tensor]


class PlainRun:
    """The plain model and its optimisers, step by step.

    Args:
        step: the training step to run; None: backward of `loss`, clipping, and an update.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], loss: Loss | None, step: Step
    ) -> None:
        self.model, self.optimizers = model, optimizers
        self._loss, self._step = loss, step
        self.entries = [
            Entry(name=name, local=name, tensor=tensor, rule=None)
            for name, tensor in model.named_parameters()
        ]

    def run(self, batch: Any, clip: float | None) -> Snapshot:
        """One step on the global batch."""
        step: Step = self._step if self._loss is None else lambda m, o, b: self._plain_step(m, o, b, clip)
        observation = watch(step, self.model, self.optimizers, batch, self.entries)
        if observation.loss is None:
            raise StrettoError("the plain model has no loss", hint="return the loss from step() or loss()")
        gradients = {
            entry.name: entry.full_tensor(gradient).clone()
            for entry in self.entries
            if (gradient := observation.gradients[entry.key]) is not None
        }
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        return Snapshot(
            loss=observation.loss,
            norm=float(norm),
            gradients=gradients,
            weights={entry.name: entry.full_tensor(entry.tensor).clone() for entry in self.entries},
            states=states_of(self.entries, self.optimizers),
            buffers={name: float64_copy(buffer) for name, buffer in self.model.named_buffers()},
        )

    def _plain_step(self, model: Any, optimizers: Any, batch: Any, clip: float | None) -> Tensor:
        assert self._loss is not None
        loss = self._loss(model, batch)
        if not isinstance(cast(Any, loss), Tensor) or loss.numel() != 1:
            raise StrettoError(
                f"loss() returned {type(loss).__name__}, must be a tensor of one number",
                hint="return the mean over the global batch",
            )
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers if isinstance(optimizers, Sequence) else [optimizers]:
            optimizer.step()
            optimizer.zero_grad()
        return loss


def float64_copy(tensor: Tensor) -> Tensor:
    """A copy in float64 on the CPU."""
    return tensor.detach().to("cpu", torch.float64, copy=True)


def states_of(entries: Sequence[Entry], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimisers' states that are as large as their parameter, as NAME.STATE; those of this rank."""
    states = dict[str, Tensor]()
    for entry in entries:
        for key, state in parameter_states(entry, optimizers).items():
            states[f"{entry.name}.{key}"] = entry.full_tensor(state).clone()
    return states


def parameter_states(entry: Entry, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The states of a parameter that lie as it does, by key."""
    for optimizer in optimizers:
        # ZeroRedundancyOptimizer keeps those of its share in an optimizer of its own
        state_by_parameter: Mapping[Any, Any] = getattr(optimizer, "optim", optimizer).state
        if entry.tensor in state_by_parameter:
            states: Mapping[str, Any] = state_by_parameter[entry.tensor]
            tensors = {key: value for key, value in sorted(states.items()) if isinstance(value, Tensor)}
            return {key: tensor for key, tensor in tensors.items() if tensor.shape == entry.tensor.shape}
    return {}


def without_dropout(modules: Sequence[nn.Module]) -> int:
    """Switch off dropout, whose masks no two layouts share; return the number of its modules."""
    count = 0
    for root in modules:
        for module in root.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                module.p = 0.0
                count += 1
    return count


def converted(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a batch, with its tensors in mappings and sequences, on a device; floating ones in a dtype."""
    if isinstance(batch, Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else None)
    if isinstance(batch, Mapping):
        return {key: converted(item, device, dtype) for key, item in cast(Mapping[Any, Any], batch).items()}
    if isinstance(batch, tuple) and hasattr(cast(Any, batch), "_fields"):
        return type(batch)(*(converted(item, device, dtype) for item in cast(Sequence[Any], batch)))
    if isinstance(batch, list | tuple):
        return type(batch)(converted(item, device, dtype) for item in cast(Sequence[Any], batch))
    return batch
