"""Random numbers under tensor parallelism: modules that draw them, and a check of all others.

Every tensor-parallel rank has its own global generator, so a module would draw different numbers than one
process, and ranks with the same activation would continue with different ones. torch's modules are recognised
by their type. A random function inside any other module, such as `F.dropout` in an attention of transformers,
is detected when it is called: the model's first forward in training runs under a dispatch mode that rejects
it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.errors import StrettoError

_DRAWS: dict[type[nn.Module], Callable[[Any], bool]] = {
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), lambda m: m.p > 0),
    **dict.fromkeys((nn.AlphaDropout, nn.FeatureAlphaDropout), lambda m: m.p > 0),
    nn.RReLU: lambda m: m.lower != m.upper,
    nn.MultiheadAttention: lambda m: m.dropout > 0,
    nn.RNNBase: lambda m: m.dropout > 0 and m.num_layers > 1,
    nn.FractionalMaxPool2d: lambda m: m._random_samples is None,
    nn.FractionalMaxPool3d: lambda m: m._random_samples is None,
}


def draws(module: nn.Module) -> bool:
    """True if a module of torch draws from the global generator in training."""
    return any(isinstance(module, kind) and drawn(module) for kind, drawn in _DRAWS.items())


def watch_first_forward(model: nn.Module) -> None:
    """Make the model's first forward in training raise if a function draws from the global generator.

    Not detected: models that are compiled or whose layers are called without the model itself, as in a
    pipeline, and random numbers from outside of torch.
    """
    watch = _Watch()
    model.register_forward_pre_hook(watch.begin)
    model.register_forward_hook(watch.end, always_call=True)


class _Watch:
    """Hooks of a model that run its first training forward under `_Refuse`."""

    def __init__(self) -> None:
        self._done = False
        self._mode: _Refuse | None = None

    def begin(self, model: nn.Module, _: Any) -> None:
        if self._done or not model.training or torch.compiler.is_compiling():
            return
        self._done = True
        self._mode = _Refuse({id(module): name for name, module in model.named_modules()})
        self._mode.__enter__()

    def end(self, *_: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None


class _Refuse(TorchDispatchMode):
    """Rejects operations that draw from a global generator; an explicit generator is the caller's concern."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _is_random(func, args, kwargs or {}):
            name, place = self._caller()
            raise StrettoError(
                f"{name} calls {func} at {place}: nothing makes tensor-parallel ranks draw what one process "
                "would",
                hint="use nn.Dropout, and call key_dropout(model, keys) before parallelize; or pass a "
                "torch.Generator that is seeded alike on all of these ranks",
            )
        return func(*args, **(kwargs or {}))

    def _caller(self) -> tuple[str, str]:
        """Return the innermost running module of the model, and the line of its code."""
        frame = sys._getframe(1)
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) in self._names:
                name = self._names[id(module)] or "the model"
                place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                return f"{name!r} ({type(module).__name__})", place
            frame = frame.f_back
        return "the model", "an unknown place"


def _is_random(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True unless the call has an explicit generator, a probability of 0 or 1, or is made in evaluation."""
    arguments = func._schema.arguments
    values = {argument.name: argument.default_value for argument in arguments}
    values.update(zip((argument.name for argument in arguments), args, strict=False))
    values.update(kwargs)
    if values.get("generator") is not None:
        return False
    if any(values.get(name) is False for name in ("train", "training")):
        return False
    chance = [values[name] for name in ("dropout_p", "dropout", "p") if name in values]
    return not any(isinstance(p, float | int) and p in (0, 1) for p in chance)
