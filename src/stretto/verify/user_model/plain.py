"""The plain model's training steps in one process: what the parallel model's must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from stretto.errors import StrettoError
from stretto.verify.compare import Snapshot
from stretto.verify.holdings import Entry
from stretto.verify.user_model.watch import Step, watch

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
    """Switch off dropout, whose masks no two layouts share; how many modules of it there were."""
    count = 0
    for root in modules:
        for module in root.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                module.p = 0.0
                count += 1
    return count


def converted(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A batch with its tensors, in mappings and sequences, on a device, and floating ones in a dtype."""
    if isinstance(batch, Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else None)
    if isinstance(batch, Mapping):
        return {key: converted(item, device, dtype) for key, item in cast(Mapping[Any, Any], batch).items()}
    if isinstance(batch, tuple) and hasattr(cast(Any, batch), "_fields"):
        return type(batch)(*(converted(item, device, dtype) for item in cast(Sequence[Any], batch)))
    if isinstance(batch, list | tuple):
        return type(batch)(converted(item, device, dtype) for item in cast(Sequence[Any], batch))
    return batch
