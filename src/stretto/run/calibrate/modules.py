"""Profile every layer of a user's model: seconds forward and backward, and activations kept in bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stretto.engine.device import forked_random, synchronize
from stretto.engine.pipeline.shared import find_ties
from stretto.errors import StrettoError
from stretto.planner.cutting.profile import LayerProfile, ModelProfile, SharedWeights

_WARMUP = 2


def profile_layers(
    layers: Sequence[nn.Module],
    sample: Any,
    loss: Callable[[Any, Any], Tensor] | None = None,
    target: Any = None,
    *,
    names: Sequence[str] = (),
    repeats: int = 11,
) -> ModelProfile:
    """Time and memory of one microbatch in each layer: the best of several runs, since other load only adds.

    Gradients and buffers are restored afterwards.

    Args:
        layers: in order; each takes what the one before it returns, a tuple as several arguments.
        sample: one microbatch, as the first layer takes it: a tensor or a tuple; on the device to measure.
        loss: (output, target) to a scalar; counted with the last layer.
        names: of the layers; default: their numbers and classes.

    Raises:
        StrettoError: no layers, or a layer that fails on its input.
    """
    if not layers:
        raise StrettoError("there are no layers", hint="give the model as a list of modules, in order")
    runs = [_ProfiledLayer(module=layer, index=index) for index, layer in enumerate(layers)]
    if loss is not None:
        runs[-1].after = lambda *y: loss(y[0] if len(y) == 1 else y, target)
    first = sample if isinstance(sample, tuple) else (sample,)
    device = next((t.device for t in first if isinstance(t, Tensor)), torch.device("cpu"))
    gradients = [(p, p.grad) for layer in layers for p in layer.parameters()]
    buffers = [(b, b.clone()) for layer in layers for b in layer.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None  # so that nothing accumulates into it
    try:
        with forked_random([device]):
            _count_activations(runs, first)
            for turn in range(_WARMUP + repeats):
                _round(runs, first, device, turn >= _WARMUP)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    named = list(names) or [f"{index} {type(layer).__name__}" for index, layer in enumerate(layers)]
    shared = tuple(
        SharedWeights(
            tuple(index for index, _ in tie.uses), _size(layers[tie.uses[0][0]].get_parameter(tie.uses[0][1]))
        )
        for tie in find_ties(layers)
    )
    shapes = ", ".join(str(list(t.shape)) for t in first if isinstance(t, Tensor))
    about = f"measured: {device}, {torch.get_num_threads()} threads, microbatch {shapes}"
    return ModelProfile(
        tuple(run.profile(name) for run, name in zip(runs, named, strict=True)), shared, about
    )


@dataclass(kw_only=True)
class _ProfiledLayer:
    """One layer and its measurements."""

    module: nn.Module
    index: int
    after: Callable[..., Any] | None = None
    forwards: list[float] = field(default_factory=list[float])
    backwards: list[float] = field(default_factory=list[float])
    inputs: list[float] = field(default_factory=list[float])
    output: int = 0
    activations: int = 0
    input_bytes: int = 0

    def __call__(self, x: tuple[Any, ...]) -> tuple[Any, ...]:
        try:
            y = self.module(*x)
        except Exception as error:
            raise StrettoError(
                f"layer {self.index} ({type(self.module).__name__}) fails: {' '.join(str(error).split())}",
                hint="each layer takes what the one before it returns, a tuple as several arguments",
            ) from error
        y = y if type(y) is tuple else (y,)
        if self.after is not None:
            y = (self.after(*y),)
        return y

    def profile(self, name: str) -> LayerProfile:
        forward, backward = min(self.forwards), min(self.backwards)
        # the input gradient is measured separately, and noise may make it the longer one
        weight = max(0.0, backward - min(self.inputs)) if self.inputs else backward
        parameters = {id(p): p for p in self.module.parameters()}
        size = sum(_size(p) for p in parameters.values())
        return LayerProfile(
            name=name,
            forward=forward,
            backward=backward,
            parameters=size,
            activations=self.activations,
            output=self.output,
            weight=weight,
            input=self.input_bytes,
        )


def _round(runs: Sequence[_ProfiledLayer], x: tuple[Any, ...], device: torch.device, counts: bool) -> None:
    """All layers once: forward, backward, and the backward of inputs alone."""
    for run in runs:
        x = _entering(x, run.index)
        begin = _now(device)
        y = run(x)
        middle = _now(device)
        results, gradients = _ends(y)
        if results:
            torch.autograd.backward(results, gradients)
        end = _now(device)
        if counts:
            run.forwards.append(middle - begin)
            run.backwards.append(end - middle)
        differentiable = [t for t in x if isinstance(t, Tensor) and t.requires_grad]
        if differentiable and counts:
            results, gradients = _ends(run(x))
            begin = _now(device)
            torch.autograd.grad(results, differentiable, gradients, allow_unused=True)
            run.inputs.append(_now(device) - begin)
        x = y


def _ends(y: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor]]:
    results = [t for t in y if isinstance(t, Tensor) and t.requires_grad]
    return results, [torch.ones_like(t) for t in results]


def _entering(x: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    """A layer's arguments as leaves, as a stage receives them; the sample itself needs no gradient."""
    return tuple(
        t.detach().requires_grad_(index > 0 and t.is_floating_point()) if isinstance(t, Tensor) else t
        for t in x
    )


def _count_activations(runs: Sequence[_ProfiledLayer], x: tuple[Any, ...]) -> None:
    """Count the memory that each layer saves for its backward and no layer before it has saved."""
    counted = {t.untyped_storage().data_ptr() for t in x if isinstance(t, Tensor)}
    counted |= {p.untyped_storage().data_ptr() for run in runs for p in run.module.parameters()}
    counted |= {b.untyped_storage().data_ptr() for run in runs for b in run.module.buffers()}
    alive: list[Any] = []  # so that no address is reused
    for run in runs:
        x = _entering(x, run.index)
        entered = {t.untyped_storage().data_ptr() for t in x if isinstance(t, Tensor)}

        def pack(t: Tensor, run: _ProfiledLayer = run, entered: set[int] = entered) -> Tensor:
            memory = t.untyped_storage()
            if memory.data_ptr() not in counted:
                counted.add(memory.data_ptr())
                run.activations += memory.nbytes()
                run.input_bytes += memory.nbytes() if memory.data_ptr() in entered else 0
            alive.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = run(x)
        alive.append((x, y))
        run.output = sum(t.untyped_storage().nbytes() for t in y if isinstance(t, Tensor))
        x = y


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


def _size(t: Tensor) -> int:
    return t.numel() * t.element_size()
