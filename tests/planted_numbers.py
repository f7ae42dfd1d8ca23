"""Numbers that are not finite, planted in a real run on one of its ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.engine.parallel.control import this_rank
from train_runs import Hook, around_step

BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def plant(step: int, rank: int | None, target: str, value: str = "nan", name: str | None = None) -> Hook:
    """Plant a value in one step, once.

    Args:
        step: from 1.
        rank: None: on all.
        what: `weight`, `gradient`, `activation`, `loss`; or `no update`, for a step whose update is skipped
            with nothing planted.
        name: of the parameter; None: the first that the rank has.
    """
    return _plant, (step, rank, target, BAD[value], name)


def _plant(step: int, rank: int | None, target: str, value: float, name: str | None) -> None:
    done = list[int]()

    def wrapped(inner: Any, self: Any, stop: Any) -> Any:
        here = self.progress.step + 1 == step and rank in (None, this_rank()) and not done
        if here:
            done.append(1)
            globals()["_" + target.replace(" ", "_")](self, value, name)
        return inner(self, stop)

    around_step(wrapped)


def _parameter(trainer: Any, name: str | None) -> Tensor:
    """By default a norm's, which every token meets, or, of a rank without one, the first; of gathered weights
    the rank's own part.
    """
    here = [(n, p) for n, p in trainer.task.model.parameters.items() if p.untyped_storage().size()]
    here += [(f.name, f.parameter) for f in trainer.task.model.fragments if f.parameter.numel()]
    with_elements = [(n, p) for n, p in here if p.numel()]
    wanted = [p for n, p in with_elements if (n == name if name else "norm" in n)]
    return wanted[0] if wanted or name else with_elements[0][1]


@torch.no_grad()
def _weight(trainer: Any, value: float, name: str | None) -> None:
    trainer.task.model.states.ready()  # else what arrives may overwrite it
    weight = _parameter(trainer, name)
    weight.view(-1)[weight.numel() // 2] = value


def _gradient(trainer: Any, value: float, name: str | None) -> None:
    """In the gradient of what a module computes, in the first microbatch: loss and activations are right."""

    def spoil(out: Tensor) -> Tensor:
        out.register_hook(lambda gradient: _spoiled(gradient, value))
        return out

    _in_forward(trainer, spoil)


def _activation(trainer: Any, value: float, name: str | None) -> None:
    """In what a module computes, in the first microbatch."""
    _in_forward(trainer, lambda out: _spoiled(out, value))


def _spoiled(tensor: Tensor, value: float) -> Tensor:
    spoiled = tensor.clone()
    spoiled.view(-1)[0] = value
    return spoiled


def _in_forward(trainer: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Change what a norm of the rank's last stage puts out, once."""
    stage = list(trainer.task.model.pipeline.stages.values())[-1]
    module = next(m for name, m in stage.named_modules() if name.endswith("norm1"))

    def changed(_: Any, __: Any, out: Any) -> Any:
        handle.remove()
        return change(out)

    handle = module.register_forward_hook(changed)


def _loss(trainer: Any, value: float, name: str | None) -> None:
    """In the loss that the rank reports, of its first microbatch: the gradients are as they were."""
    replica, done = trainer.task.model, list[int]()

    def spoiling(inner: Any) -> Any:
        def step(*arguments: Any, **named: Any) -> Any:
            losses = inner(*arguments, **named)
            if losses is not None and len(losses) and not done:
                done.append(1)
                losses = losses.clone()
                losses[0] = value
            return losses

        return step

    replica.step, replica.advance = spoiling(replica.step), spoiling(replica.advance)


def _no_update(trainer: Any, value: float, name: str | None) -> None:
    """The step is bad by decree, on every rank alike."""
    guard = trainer.guard
    inner = guard.spike

    def spike(loss: float, norm: float | None) -> str:
        guard.spike = inner
        return "by decree"

    guard.config = replace(guard.config, on_spike="skip")
    guard.spike = spike


def flip_bit(step: int, rank: int, name: str | None, *, element: int, bit: int) -> Hook:
    """Flip one bit of what a rank holds, before a step: of a tensor by its name in `Task.tensors`, or
    without a name, of one by its number in order of names.
    """
    return _flip_bit, (step, rank, name, element, bit)


def _flip_bit(step: int, rank: int, name: str | None, element: int, bit: int) -> None:
    done = list[int]()

    def wrapped(inner: Any, self: Any, stop: Any) -> Any:
        if self.progress.step + 1 == step and rank == this_rank() and not done:
            done.append(1)
            flip(self.task.tensors("replicas")[name][0], element, bit)
        return inner(self, stop)

    around_step(wrapped)


@torch.no_grad()
def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit of a tensor in place, numbers taken modulo what it has."""
    bits = tensor.detach().view(-1).view(torch.uint8)
    width = tensor.element_size()
    bits[element % tensor.numel() * width + bit // 8 % width] ^= 1 << bit % 8


def watch(step: int, folder: str) -> Hook:
    """Note of every rank, in a file of its number, what the step with the planted value changed of weights
    and states, bit by bit, and what is not finite after it that was before.
    """
    return _watch, (step, folder)


def _watch(step: int, folder: str) -> None:
    done = list[int]()

    def wrapped(inner: Any, self: Any, stop: Any) -> Any:
        if self.progress.step + 1 != step or done:
            return inner(self, stop)
        done.append(1)
        before = _in_memory(self)
        try:
            return inner(self, stop)
        finally:
            after = _in_memory(self)
            changed = [name for name, bits in before.items() if not torch.equal(bits, after[name])]
            spoiled = [name for name in before if _finite(before[name]) and not _finite(after[name])]
            line = json.dumps({"changed": changed, "spoiled": spoiled, "watched": len(before)})
            Path(folder, str(this_rank())).write_text(line)
            dist.barrier()  # a rank that fails first has the others killed

    around_step(wrapped)


def _in_memory(trainer: Any) -> dict[str, Tensor]:
    """Copies of what the rank holds in memory, as the bytes of their elements."""
    there = dict[str, Tensor]()
    for name, (tensor, _) in trainer.task.tensors("replicas").items():
        if tensor.numel() and tensor.untyped_storage().size() >= tensor.numel() * tensor.element_size():
            there[name] = (
                tensor.detach()
                .clone()
                .view(-1)
                .view(torch.int32 if tensor.element_size() == 4 else torch.int16)
            )
    return there


def _finite(bits: Tensor) -> bool:
    kind = torch.float32 if bits.element_size() == 4 else torch.bfloat16
    return bool(bits.view(kind).isfinite().all())


def flip_bits(flips: Sequence[tuple[int, int, int, int, int]], copies: bool) -> Hook:
    """Flip bits before steps, each once: (step, rank, number of the tensor, element, bit), numbers taken
    modulo what there is.

    Args:
        copies: of tensors that other ranks hold too; else of any that only an update changes.
    """
    return _flip_bits, (flips, copies)


def _flip_bits(flips: Sequence[tuple[int, int, int, int, int]], copies: bool) -> None:
    left = list(flips)

    def wrapped(inner: Any, self: Any, stop: Any) -> Any:
        for flip_at in list(left):
            step, rank, number, element, bit = flip_at
            if self.progress.step + 1 == step and rank == this_rank():
                left.remove(flip_at)
                tensors = {name: tensor for name, (tensor, _) in self.task.tensors("replicas").items()}
                # weights beside masters and shards are written anew by every update
                shared = (n for n in self._copies._index_of or () if not n.startswith("weights."))
                names = sorted(shared if copies else self.task.tensors("memory"))
                there = [n for n in names if tensors[n].numel() and tensors[n].untyped_storage().size()]
                flip(tensors[there[number % len(there)]], element, bit)
        return inner(self, stop)

    around_step(wrapped)
