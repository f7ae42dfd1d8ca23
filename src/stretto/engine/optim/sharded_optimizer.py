"""The optimiser of a rank's fragments, with states on the device, in host memory or in files.

Offloaded states are updated unit by unit, each with a separate torch optimiser, so that transfers of one unit
overlap the update of another. Optimisers are unaware of placement; results are bitwise identical.
ZeRO-Offload (Ren et al. 2021) stores states in host memory and updates there; ZeRO-Infinity (Rajbhandari et
al. 2021) adds files. Unlike ZeRO-Infinity, gradients stay in host memory; unlike ZeRO-Offload (section 5.2),
no update is delayed to the next step, so results never depend on the location of states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from stretto.engine.device import current_stream, new_stream, on_accelerator, on_stream, recorded_event
from stretto.engine.offload.tensor_files import TensorFiles
from stretto.engine.optim.norm import finite
from stretto.engine.optim.states import STEP, prepare
from stretto.engine.parallel.fragment import ParameterFragment
from stretto.job.data_parallel import Offload


class GradientCopies:
    """Asynchronous copies of reduced gradients from an accelerator to pinned host memory, as in ZeRO-Offload
    (Ren et al. 2021). The host memory of each is allocated at its first copy and then reused.
    """

    def __init__(self) -> None:
        self._memory = dict[int, Tensor]()
        self._events = dict[int, torch.Event]()
        self._side: torch.Stream | None = None

    def start(self, key: int, gradient: Tensor, dtype: torch.dtype) -> None:
        """Start a copy, ordered after the current stream; later changes to the gradient are not copied."""
        host = self._memory.get(key)
        if host is None:
            host = torch.empty(gradient.shape, dtype=dtype, pin_memory=True)
            self._memory[key] = host
        if self._side is None:
            self._side = new_stream(gradient.device)
        self._side.wait_stream(current_stream(gradient.device))
        with on_stream(self._side):
            # converted on the device if dtypes differ: only a copy without conversion is asynchronous
            host.copy_(gradient.to(dtype), non_blocking=True)
            gradient.record_stream(self._side)
        self._events[key] = recorded_event(self._side)

    def wait_for(self, key: int) -> Tensor | None:
        """Wait for the copy and return it, or None if none was started. The caller may modify it until the
        next `start`.
        """
        event = self._events.pop(key, None)
        if event is None:
            return None
        event.synchronize()
        return self._memory[key]


Build = Callable[[Sequence[ParameterFragment]], torch.optim.Optimizer]
UnitCallback = Callable[[int], None]
READ_AHEAD = 2  # number of units


class ShardedOptimizer:
    """Updates a rank's fragments.

    Args:
        fragments: this rank's fragments in the order of their units. With `nvme` they are consumed lazily, so
            that masters created on demand are in memory for two units at most.
        build: creates the torch optimiser of some of the fragments.
        offload: location of states and updates. With `cpu` and `nvme` all parameters are in host memory.
        path: folder for files, in which this rank creates a subfolder.
        device: device of the gradients.
        rank: rank in the name of the subfolder.
        after: called with a unit's index once its parameters are updated, in the order of units on every
            rank, by the thread that calls `step`: it may start collectives.
        copy: called before `after`, by the updating thread. With `eager` it must copy the parameters that it
            needs, which may be moved back to their file afterwards.
        eager: updates start in `gradient_ready`, on a separate thread, during the remaining backward. Not for
            updates that need all gradients (clipping, overflow checks), nor for optimisers whose step is
            collective. A unit whose gradients are not finite is not updated; the caller detects this in their
            norm and must stop.

    Attributes:
        optimizers: the torch optimisers: a single one, or one per unit.

    Raises:
        StrettoError: files cannot be created, or the disk is full.
    """

    def __init__(
        self,
        fragments: Iterable[ParameterFragment],
        build: Build,
        *,
        offload: Offload = "none",
        path: str | Path | None = None,
        device: torch.device | None = None,
        rank: int = 0,
        after: UnitCallback | None = None,
        copy: UnitCallback | None = None,
        eager: bool = False,
    ) -> None:
        self._device = device if device is not None and on_accelerator(device) else None
        self._after, self._copy = after, copy
        self.files: TensorFiles | None = None
        if offload == "nvme":
            assert path is not None, "files need a path"
            pin = self._device is not None
            self.files = TensorFiles(path, rank, "optimiser states of unit", READ_AHEAD + 1, pin)
        self._units = dict[int, list[ParameterFragment]]()
        self._of = dict[int, torch.optim.Optimizer]()
        for unit, group in groupby(fragments, lambda fragment: fragment.unit):
            assert unit not in self._units, f"fragments of unit {unit} are apart"
            self._units[unit] = members = list(group)
            if offload != "none":
                self._of[unit] = build(members)
            if self.files is not None:
                self._move_to_files(self.files, unit)
        if offload == "none":
            shared = build([fragment for members in self._units.values() for fragment in members])
            self._of = dict.fromkeys(self._units, shared)
            self.optimizers = [shared]
        else:
            self.optimizers = list(self._of.values())
        self._offloads = offload != "none"
        self._host = GradientCopies() if self._device is not None and self._offloads else None
        assert not eager or self._offloads, "one optimiser updates everything at once"
        self._thread = ThreadPoolExecutor(1, "stretto-update") if eager else None
        self._begun = dict[int, Future[None]]()
        self._read_ahead(list(self._units))

    def _move_to_files(self, files: TensorFiles, unit: int) -> None:
        """Create a unit's states and write them with its masters, before the next unit's are created."""
        members, optimizer = self._units[unit], self._of[unit]
        prepare(optimizer, members, 0)
        tensors: list[Tensor] = [fragment.parameter for fragment in members]
        for fragment in members:
            state: dict[str, Tensor] = optimizer.state[fragment.parameter]
            tensors += [value for key, value in state.items() if key != STEP]
        files.add(unit, tensors)

    # ------------------------------------------------------------------ states

    @property
    def units(self) -> list[int]:
        """Indices of the units, in the order of their updates."""
        return list(self._units)

    def owners(self) -> Iterator[tuple[torch.optim.Optimizer, ParameterFragment]]:
        """Yield all fragments with the torch optimiser that holds their states, in the order of units. If
        states are in files, access parameters and states through
        `stretto.engine.offload.tensor_files.at_hand`.
        """
        for unit, members in self._units.items():
            for fragment in members:
                yield self._of[unit], fragment

    def visit(self, change: bool = False) -> Iterator[int]:
        """Iterate over the units, each with its states and parameters in memory during its turn; with
        `change`, changes to them are written back.
        """
        for at, unit in enumerate(self._units):
            if self.files is not None:
                self.files.fetch(unit)
                self._read_ahead(self.units[at + 1 :])
            yield unit
            if self.files is not None:
                (self.files.put if change else self.files.release)(unit)

    def prepare(self, weight_updates: int) -> None:
        """Create zero states with `step` = `weight_updates`, to be loaded from a checkpoint."""
        for unit, members in self._units.items():
            if self.files is None:
                prepare(self._of[unit], members, weight_updates)
                continue
            for fragment in members:  # states in files exist from the start
                state: dict[str, Tensor] = self._of[unit].state[fragment.parameter]
                if STEP in state:
                    state[STEP].fill_(weight_updates)

    def skip(self) -> None:
        """Count a skipped update."""
        for unit, members in self._units.items():
            for fragment in members:
                state: dict[str, Tensor] = self._of[unit].state.get(fragment.parameter, {})
                if not state:
                    prepare(self._of[unit], [fragment], 1)
                elif STEP in state:
                    state[STEP] += 1

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of later updates."""
        assert not self._begun, "updates have begun"
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    # ------------------------------------------------------------------ a step

    def gradient_ready(self, unit: int) -> None:
        """Called when a unit's gradients are reduced: start their copies to host memory and, with `eager`,
        the update. The gradients must not change before `step` returns.
        """
        if self._host is not None:
            for fragment in self._units[unit]:
                if fragment.gradient is not None:
                    self._host.start(id(fragment), fragment.gradient, fragment.parameter.dtype)
        if self._thread is not None:
            self._begin(unit)

    def _begin(self, unit: int) -> None:
        assert self._thread is not None
        assert unit not in self._begun, f"unit {unit} is updated already"
        following = [other for other in self._units if other > unit]
        self._begun[unit] = self._thread.submit(self._update, unit, 1.0, following)

    @torch.no_grad()
    def step(self, rate: float | None = None, ratio: float = 1.0) -> None:
        """Update everything.

        Args:
            rate: learning rate; by default the last one set, which it must equal if updates have begun.
            ratio: factor of all gradients, from clipping and loss scaling. Gradients may be scaled in place.

        Raises:
            OffloadError: states could not be read or written.
        """
        if rate is not None and not self._begun:
            self.set_rate(rate)
        elif rate is not None:
            assert all(group["lr"] == rate for o in self.optimizers for group in o.param_groups)
        if self._thread is not None:
            assert ratio == 1.0, "updates have begun"
            self._finish()
        elif not self._offloads:
            self._update_all(ratio)
        else:
            for at, unit in enumerate(self._units):
                self._update(unit, ratio, self.units[at + 1 :], self._after)
        if self.files is not None:
            self.files.ring.check()
            self._read_ahead(self.units)  # for the next step

    def _finish(self) -> None:
        """Wait for the eager updates, and run those of the remaining units."""
        for unit in self._units:
            if unit not in self._begun:
                self._begin(unit)
            self._begun[unit].result()
            if self._after is not None:
                self._after(unit)
        self._begun.clear()

    def _update_all(self, ratio: float) -> None:
        every = [fragment for members in self._units.values() for fragment in members]
        self._step(self.optimizers[0], every, ratio)
        for unit in self._units:
            for call in (self._copy, self._after):
                if call is not None:
                    call(unit)

    @torch.no_grad()
    def _update(
        self, unit: int, ratio: float, following: Sequence[int], after: UnitCallback | None = None
    ) -> None:
        if self.files is not None:
            self.files.fetch(unit)
            self._read_ahead(following)
        self._step(self._of[unit], self._units[unit], ratio)
        for call in (self._copy, after):
            if call is not None:
                call(unit)
        if self.files is not None:
            if self._device is not None:  # copies to it must finish before another unit reuses the memory
                current_stream(self._device).synchronize()
            self.files.put(unit)

    def _step(
        self, optimizer: torch.optim.Optimizer, fragments: Sequence[ParameterFragment], ratio: float
    ) -> None:
        """Run one torch optimiser's update; `parameter.grad` is set for it and restored."""
        before = [fragment.parameter.grad for fragment in fragments]
        gradients = list[Tensor | None]()  # in the parameters' dtype and on their device
        for fragment in fragments:
            gradient = None if self._host is None else self._host.wait_for(id(fragment))
            if gradient is None and fragment.gradient is not None:
                parameter = fragment.parameter
                gradient = fragment.gradient.detach().to(parameter.device, parameter.dtype)
            gradients.append(gradient)
        if self._thread is not None and not finite([g for g in gradients if g is not None]):
            return
        if ratio != 1.0 and (scaled := [g for g in gradients if g is not None]):
            torch._foreach_mul_(scaled, ratio)
        for fragment, gradient in zip(fragments, gradients, strict=True):
            fragment.parameter.grad = gradient
        optimizer.step()
        for fragment, gradient in zip(fragments, before, strict=True):
            fragment.parameter.grad = gradient

    def _read_ahead(self, units: Sequence[int]) -> None:
        if self.files is not None:
            for unit in units[:READ_AHEAD]:
                self.files.start_fetch(unit)

    def close(self) -> None:
        """Stop the thread and remove the files."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        if self.files is not None:
            self.files.close()
