"""Activation recomputation (checkpointing): forwards that save only their inputs and run again in the
backward (Chen et al. 2016).

Full recomputation repeats an entire block; selective recomputation (Korthikanti et al. 2022, section 5)
repeats only softmax(q k^T) v, which takes most of a block's memory and little of its time. The state that a
forward depends on is restored for the backward: torch's random generators and autocast by this module, the
samples of keyed dropout and the version of the weights by `engine.pipeline.compute`. Layers that communicate
do so again, so all ranks of a group must recompute the same layers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.engine.device import (
    forked_random,
    is_capturing,
    on_accelerator,
    random_state,
    set_random_state,
)
from stretto.engine.parallel.collectives import gather
from stretto.errors import StrettoError, nearest
from stretto.job.flops import Recompute as Mode

if TYPE_CHECKING:
    from stretto.engine.parallel.mesh import Mesh


class RandomState:
    """The state of the random generators at a forward, so that its repetition draws the same numbers."""

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._devices = list[torch.device]()
        self._states = list[Tensor]()

    def save(self, x: tuple[Any, ...]) -> None:
        """Save the state of the CPU's generator and of those of the inputs' devices, unless a graph is being
        captured, in which these cannot be read.
        """
        self._host = torch.get_rng_state()
        tensors = () if is_capturing() else x
        devices = {t.device for t in tensors if isinstance(t, Tensor) and on_accelerator(t.device)}
        self._devices = sorted(devices, key=str)
        self._states = [*map(random_state, self._devices)]

    @property
    def drawn(self) -> bool:
        """True if any random number has been drawn since `save`."""
        assert self._host is not None, "save was not called"
        saved, now = [self._host, *self._states], [torch.get_rng_state(), *map(random_state, self._devices)]
        return not all(map(torch.equal, saved, now))

    @contextmanager
    def restored(self) -> Generator[None]:
        """Within this context draw from the saved state; the current state is restored afterwards."""
        assert self._host is not None, "save was not called"
        with forked_random(self._devices):
            torch.set_rng_state(self._host)
            for device, state in zip(self._devices, self._states, strict=True):
                set_random_state(device, state)
            yield


MODES: tuple[Mode, ...] = ("none", "selective", "full")


def recompute_blocks(
    blocks: Sequence[nn.Module], modes: Sequence[Mode], mesh: Mesh, shard_inputs: bool = False
) -> None:
    """Make each block save all its activations, recompute its `attn.core` (and `cross.core`), or recompute
    completely. In place; may be called again with other modes. Parameter names do not change; evaluation and
    no_grad are unaffected.

    Args:
        modes: one mode per block.
        shard_inputs: each tp rank saves only its part, along s, of a block's input [b, s, ...], and gathers
            it in the backward. Only without sequence parallelism, since all tp ranks must have the full
            input. The input of a pipeline stage is not sharded, since the pipeline stores it anyway.

    Raises:
        StrettoError: a mode is unknown, or a block has no `attn.core`.
    """
    if len(modes) != len(blocks):
        raise StrettoError(f"{len(modes)} modes of recomputation for {len(blocks)} blocks")
    group = mesh.group("tp") if shard_inputs else None
    for block, mode in zip(blocks, modes, strict=True):
        if mode not in MODES:
            suggestion = nearest(str(mode), MODES)
            raise StrettoError(
                f"recompute mode {mode!r} is not one of {', '.join(MODES)}",
                hint=f"did you mean {suggestion!r}?" if suggestion else None,
            )
        for part in block.modules():
            undo_recompute(part)
        if mode == "full":
            recompute(block, group)
        elif mode == "selective":
            named = dict(block.named_modules())
            if "attn.core" not in named:
                raise StrettoError(
                    f"selective recomputation of {type(block).__name__}, which has no attn.core",
                    hint="recompute it in full",
                )
            for name in ("attn.core", "cross.core"):
                if name in named:
                    recompute(named[name])


def recompute(module: nn.Module, shards: ProcessGroup | None = None) -> None:
    """Make the module run again in the backward instead of saving its activations.

    Args:
        shards: group of ranks that all have the inputs and each save a part along dimension 1.
    """
    undo_recompute(module)
    module.forward = RecomputedForward(module, shards)


def undo_recompute(module: nn.Module) -> None:
    """Undo `recompute`."""
    if isinstance(module.__dict__.get("forward"), RecomputedForward):
        del module.__dict__["forward"]


class RecomputedForward:
    """Replaces a module's forward, with the same arguments and results."""

    def __init__(self, module: nn.Module, shards: ProcessGroup | None = None) -> None:
        self.module = module
        self.run: Callable[..., Any] = module.forward
        self.shards = shards

    def __call__(self, *inputs: Any) -> Any:
        if not (torch.is_grad_enabled() and self.module.training):
            return self.run(*inputs)
        anchor = None
        if not any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
            if not any(p.requires_grad for p in self.module.parameters()):
                return self.run(*inputs)
            anchor = torch.empty(0, requires_grad=True)  # otherwise autograd would skip the parameters
        return _Recomputed.apply(self, anchor, *inputs)

    def saved(self, x: Any) -> Tensor | None:
        """Return the part of an input to save, or None if it is not a tensor."""
        if not isinstance(x, Tensor) or not self.splits(x):
            return x if isinstance(x, Tensor) else None
        assert self.shards is not None
        length, index = -(-x.shape[1] // self.shards.size()), self.shards.rank()
        part = x[:, index * length : (index + 1) * length]
        padded = x.new_zeros(x.shape[0], length, *x.shape[2:])  # all ranks' parts must have one size
        padded[:, : part.shape[1]] = part
        return padded

    def restore(self, saved: Tensor, length: int | None) -> Tensor:
        """Return the input; `length` is the size of its dimension 1 if ranks saved parts, else None."""
        return saved if length is None else gather(saved, self.shards, 1)[:, :length]

    def splits(self, x: Tensor) -> bool:
        """True if only a part of x is saved. Leaves are saved completely, since they stay alive anyway."""
        return self.shards is not None and x.dim() > 1 and not x.is_leaf


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: RecomputedForward, anchor: Tensor | None, *inputs: Any) -> Any:
        ctx.of = of
        ctx.precision = _Precision(inputs)
        random = RandomState()
        random.save(inputs)
        inputs = _compact(inputs)
        with ctx.precision.applied():
            y = of.run(*inputs)
        ctx.random = random if random.drawn else None
        ctx.constants = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.lengths = [x.shape[1] if isinstance(x, Tensor) and of.splits(x) else None for x in inputs]
        ctx.save_for_backward(*(of.saved(x) for x in inputs))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(t for t in _bundle(y) if isinstance(t, Tensor) and not t.is_floating_point())
        )
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        of: RecomputedForward = ctx.of
        inputs, needs = list[Any](ctx.constants), ctx.needs_input_grad[2:]
        for at, saved in enumerate(ctx.saved_tensors):
            if saved is not None:
                inputs[at] = of.restore(saved, ctx.lengths[at]).detach().requires_grad_(needs[at])
        with torch.enable_grad(), ctx.precision.applied():
            if ctx.random is None:
                y = of.run(*inputs)
            else:
                with ctx.random.restored():
                    y = of.run(*inputs)
        ends = [
            (t, dy)
            for t, dy in zip(_bundle(y), grads, strict=True)
            if dy is not None and isinstance(t, Tensor) and t.requires_grad
        ]
        if ends:
            torch.autograd.backward([t for t, _ in ends], [dy for _, dy in ends])
        return None, None, *(x.grad if need else None for x, need in zip(inputs, needs, strict=True))


class _Precision:
    """The state of autocast at a forward: on or off, and its dtype."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.kind = next((x.device.type for x in inputs if isinstance(x, Tensor)), "cpu")
        self.enabled = torch.is_autocast_enabled(self.kind)
        self.dtype = torch.get_autocast_dtype(self.kind)

    @contextmanager
    def applied(self) -> Generator[None]:
        """Within this context autocast has the state of the forward."""
        if not self.enabled and not torch.is_autocast_enabled(self.kind):
            yield
            return
        with torch.autocast(self.kind, self.dtype, self.enabled):
            yield


def _compact(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy inputs that are views of a part of their storage, since a saved view keeps all of it alive."""
    used, size = dict[int, int](), dict[int, int]()
    for x in inputs:
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            at = storage._cdata
            used[at] = used.get(at, 0) + x.numel() * x.element_size()
            size[at] = storage.nbytes()

    def compact(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.is_leaf:
            return x
        at = x.untyped_storage()._cdata
        return x.clone() if used[at] < size[at] else x

    return tuple(map(compact, inputs))


def _bundle(y: Any) -> tuple[Any, ...]:
    return y if isinstance(y, tuple) else (y,)
