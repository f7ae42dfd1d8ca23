"""A model that a function of the user's returns as a list of layers: built, and tried before ranks start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from stretto.engine.models.language import CrossEntropy
from stretto.engine.parallel.tensor.dropout import DropoutKeys, key_dropout
from stretto.engine.pipeline.shared import find_ties
from stretto.engine.pipeline.skips import Stage
from stretto.errors import StrettoError
from stretto.job.user_shape import UserShape
from stretto.user_file import find_function

_TOLERANCE = 1e-3  # of the largest logit: two computations of the same logits in float32 differ by less


class UserModel(nn.Module):
    """The user's layers as a chain, each under its name, so that parameters have the names that they have in
    the user's `nn.Sequential`; and the loss.

    Args:
        build: FILE.py:NAME of the function that returns the layers, with their initial values.
        arguments: its keyword arguments.
        seed: of torch's generator while it runs.

    Raises:
        StrettoError: there is no such function, it raises, or it returns no layers.
    """

    def __init__(self, build: str, arguments: Mapping[str, Any], seed: int) -> None:
        super().__init__()
        self.loss: nn.Module = CrossEntropy()
        self.values: dict[str, Tensor] = {}
        self.function = find_function(build, "model=mine.py:build", None)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            built: Any = self.function(**arguments)
        if isinstance(built, nn.Sequential):
            layers = dict(built._modules)  # a module that occurs twice has two names
        elif isinstance(built, list | tuple | nn.ModuleList):
            layers = {str(index): layer for index, layer in enumerate(built)}
        else:
            layers = {}
        wrong = [type(layer).__name__ for layer in layers.values() if not isinstance(layer, nn.Module)]
        if wrong or not layers:
            raise StrettoError(
                f"{build} returns {type(built).__name__}{f' of {wrong[0]}' if wrong else ''}, must return "
                "the layers of the model in order",
                hint="return nn.Sequential(embedding, *blocks, head), or a list of modules",
            )
        self._names = list(layers)
        for name, layer in layers.items():
            if hasattr(self, name):
                raise StrettoError(f"{build}: no layer may be named {name!r}", hint="give it another name")
            self.add_module(name, layer)

    def layers(self) -> list[tuple[str, nn.Module]]:
        """Return name and module of every layer, in forward order."""
        return [(name, self.get_submodule(name)) for name in self._names]

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits [b, s, vocab] of token ids [b, s], int64.

        Raises:
            StrettoError: a layer raises; with the user's line.
        """
        x: Any = (ids,)
        for name, layer in self.layers():
            try:
                x = Stage([layer])(*x)
            except Exception as error:
                failure = self.function.failure(error)
                raise StrettoError(f"layer {name}: {failure.message}", hint=failure.hint) from error
            x = x if isinstance(x, tuple) else (x,)
        return x[0]

    def auxiliary(self) -> Tensor:
        """Return 0: the loss is the only one."""
        return torch.zeros(())

    def take_values(self) -> None:
        """Move the parameters to the meta device, and their values to `values`."""
        self.values = {name: parameter.detach() for name, parameter in self.named_parameters()}
        moved = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in self.parameters()}
        for module in self.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[leaf] = moved[id(parameter)]


def move_buffers(layers: Iterable[nn.Module], device: torch.device, dtype: torch.dtype) -> None:
    """Move the buffers of layers to a device; those of floating point get this type."""
    for module in (module for layer in layers for module in layer.modules()):
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = buffer.to(device, dtype if buffer.is_floating_point() else None)


def try_user_model(build: str, arguments: Mapping[str, Any], sequence: int) -> UserShape:
    """Build the user's model on the CPU and run it forward and backward on two samples, so that mistakes
    are found before ranks start. Return its layers, parameters and vocabulary.

    Raises:
        StrettoError: as `UserModel`; or layouts would not compute what one process does: it is built with
            other values each time, changes buffers, draws random numbers other than by `nn.Dropout`, or mixes
            samples; or it is no model of text: the output is not logits, or depends on later tokens.
    """
    function = find_function(build, "model=mine.py:build", None)  # before its file is read
    digest = hashlib.sha256(function.path.read_bytes()).hexdigest()
    return _tried(build, json.dumps(arguments, sort_keys=True, default=str), digest, sequence)


@lru_cache(maxsize=16)
def _tried(build: str, arguments: str, digest: str, sequence: int) -> UserShape:
    """As `try_user_model`, of the file with this SHA-256."""
    model = UserModel(build, json.loads(arguments), seed=0)
    again = dict(UserModel(build, json.loads(arguments), seed=0).named_parameters())
    for name, parameter in model.named_parameters():
        if name not in again or not torch.equal(parameter, again[name]):
            raise StrettoError(
                f"{build} returns another {name} when it is called again, so ranks would begin with "
                "different weights",
                hint="draw initial values from torch's generator, which has the job's seed",
            )
        if not parameter.requires_grad:
            rule = f"{build}: {name} has requires_grad=False, which checkpoints and checks do not see"
            raise StrettoError(rule, hint=f"leave it, and set finetune.freeze=[{name}]")
    keys, before = DropoutKeys(0), {name: buffer.clone() for name, buffer in model.named_buffers()}
    key_dropout(model, keys)
    generator = torch.get_rng_state()
    ids = torch.arange(2 * sequence).view(2, sequence) % 3 % 2

    def run(ids: Tensor) -> Tensor:
        keys.samples = range(len(ids))
        return model(ids)

    logits = run(ids)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != ids.shape:  # pyright: ignore
        shown = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__  # pyright: ignore
        raise StrettoError(
            f"{build}: the last layer returns {shown} for 2 samples of {sequence} tokens, must return logits "
            f"[2, {sequence}, vocabulary]",
            hint="end with a projection to the vocabulary, such as nn.Linear(hidden, vocab)",
        )
    logits.logsumexp(-1).sum().backward()
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    if unused or not again:
        rule = f"the output does not depend on {unused[0]}" if unused else "the model has no parameters"
        raise StrettoError(f"{build}: {rule}", hint="each layer's parameters must act in its forward")
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
    if changed:
        raise StrettoError(
            f"{build}: the forward changes the buffer {changed[0]}, which no checkpoint has and each rank "
            "would change in its own way",
            hint="take a layer without such a state, as nn.LayerNorm in place of nn.BatchNorm1d",
        )
    if not torch.equal(generator, torch.get_rng_state()):
        raise StrettoError(
            f"{build}: a layer draws random numbers that would depend on the layout",
            hint="drop with nn.Dropout modules, whose masks depend on the sample; not with F.dropout",
        )
    with torch.no_grad():
        later = ids.clone()
        later[:, -1] = 1 - later[:, -1]
        _check_same(build, logits[:1], run(ids[:1]), "of a sample depend on the others of its microbatch")
        _check_same(build, logits[:, :-1], run(later)[:, :-1], "of a token depend on later tokens")
    layers = model.layers()
    ties = [tie.uses[0] for tie in find_ties([layer for _, layer in layers])]
    return UserShape(
        build=build,
        arguments=json.loads(arguments),
        layer_names=[name for name, _ in layers],
        parameters={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        shared=[f"{layers[at][0]}.{name}" for at, name in ties],
        vocab=logits.shape[-1],
        sequence=sequence,
    )


def _check_same(build: str, logits: Tensor, again: Tensor, rule: str) -> None:
    if logits.numel() and float((logits - again).abs().max()) > _TOLERANCE * float(logits.abs().max()):
        raise StrettoError(
            f"{build}: the logits {rule}",
            hint="take statistics over features, and mask attention: is_causal=True",
        )
