"""The update of all fragments of a rank, with optimiser states on the device, in host memory or in files.

Where states are away the update goes unit by unit, each with an optimiser of its own, so that transfers of
one unit run beside the update of another. The rules of the optimisers know nothing of it, and come to the
same bits. ZeRO-Offload (Ren et al. 2021) keeps states in host memory and updates there, ZeRO-Infinity
(Rajbhandari et al. 2021) adds files. Other than there, gradients stay in host memory, and no
update is delayed to the next step (Ren et al. 2021, section 5.2): what a run comes to never depends on where
states are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from stretto.engine.offload.host import HostCopies
from stretto.engine.offload.tensor_files import TensorFiles
from stretto.engine.optim.states import STEP, prepare
from stretto.engine.parallel.fragment import Fragment
from stretto.spec.data_parallel import Offload

Build = Callable[[Sequence[Fragment]], torch.optim.Optimizer]
OfUnit = Callable[[int], None]
READ_AHEAD = 2  # units


class ShardedOptimizer:
    """Updates fragments.

    Args:
        fragments: in the order of their units. With `nvme` taken as they are needed, so that masters may be
            made then, and those of two units at most are in memory.
        build: makes the optimiser of some of the fragments.
        where: states are, and updates are done. With `cpu` and `nvme` all parameters are in host memory.
        path: folder for files, in which this rank makes its own.
        device: that gradients are on.
        rank: this one's number, for the name of its folder.
        after: called once a unit's parameters are updated, with its number; in the order of units on every
            rank, and by the thread that calls `step`, so it may begin collectives.
        copy: as `after`, before it, but by the thread that updates: what it needs of the parameters must be
            taken here when `eager`, since after that they may be in their file again.
        eager: updates begin with `gradient_ready`, beside the rest of the backward, in a thread of their own.
            Not for a rule that needs all gradients, as clipping and the search for overflows do, nor for an
            optimiser whose step is collective.

    Attributes:
        optimizers: one, or one for each unit.

    Raises:
        StrettoError: files cannot be made, or have no room.
    """

    def __init__(
        self,
        fragments: Iterable[Fragment],
        build: Build,
        *,
        where: Offload = "none",
        path: str | Path | None = None,
        device: torch.device | None = None,
        rank: int = 0,
        after: OfUnit | None = None,
        copy: OfUnit | None = None,
        eager: bool = False,
    ) -> None:
        self._cuda = device is not None and device.type == "cuda"
        self._after, self._copy = after, copy
        self.files: TensorFiles | None = None
        if where == "nvme":
            assert path is not None, "files need a path"
            self.files = TensorFiles(path, rank, "optimiser states of unit", READ_AHEAD + 1, self._cuda)
        self._units = dict[int, list[Fragment]]()
        self._of = dict[int, torch.optim.Optimizer]()
        for unit, group in groupby(fragments, lambda fragment: fragment.unit):
            assert unit not in self._units, f"fragments of unit {unit} are apart"
            self._units[unit] = members = list(group)
            if where != "none":
                self._of[unit] = build(members)
            if self.files is not None:
                self._send_away(self.files, unit)
        if where == "none":
            one = build([fragment for members in self._units.values() for fragment in members])
            self._of = dict.fromkeys(self._units, one)
            self.optimizers = [one]
        else:
            self.optimizers = list(self._of.values())
        self._apart = where != "none"
        self._host = HostCopies() if self._cuda and self._apart else None
        assert not eager or self._apart, "one optimiser updates everything at once"
        self._thread = ThreadPoolExecutor(1, "stretto-update") if eager else None
        self._begun = dict[int, Future[None]]()
        self._read_ahead(list(self._units))

    def _send_away(self, files: TensorFiles, unit: int) -> None:
        """Make a unit's states and write them with its masters, so that there are never all of them."""
        members, optimizer = self._units[unit], self._of[unit]
        prepare(optimizer, members, 0)
        tensors: list[Tensor] = [fragment.parameter for fragment in members]
        for fragment in members:
            state: dict[str, Tensor] = optimizer.state[fragment.parameter]
            tensors += [value for key, value in state.items() if key != STEP]
        files.add(unit, tensors)

    # ------------------------------------------------------------------ what is there

    @property
    def units(self) -> list[int]:
        """Numbers of the units, in the order of their updates."""
        return list(self._units)

    def owners(self) -> Iterator[tuple[torch.optim.Optimizer, Fragment]]:
        """All fragments with the optimiser that has their states, in the order of units. Where states are in
        files, read and write both through `stretto.engine.offload.tensor_files.at_hand`.
        """
        for unit, members in self._units.items():
            for fragment in members:
                yield self._of[unit], fragment

    def visit(self, change: bool = False) -> Iterator[int]:
        """Goes over the units, whose states and parameters are here meanwhile; with `change` they are kept as
        they were left.
        """
        for at, unit in enumerate(self._units):
            if self.files is not None:
                self.files.fetch(unit)
                self._read_ahead(self.units[at + 1 :])
            yield unit
            if self.files is not None:
                (self.files.put if change else self.files.release)(unit)

    def prepare(self, weight_updates: int) -> None:
        """States for a checkpoint to be read into, as after `weight_updates` updates."""
        for unit, members in self._units.items():
            if self.files is None:
                prepare(self._of[unit], members, weight_updates)
                continue
            for fragment in members:  # there from the beginning
                state: dict[str, Tensor] = self._of[unit].state[fragment.parameter]
                if STEP in state:
                    state[STEP].fill_(weight_updates)

    def set_rate(self, rate: float) -> None:
        """The learning rate of the updates to come."""
        assert not self._begun, "updates have begun"
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    # ------------------------------------------------------------------ a step

    def gradient_ready(self, unit: int) -> None:
        """A unit's gradients are reduced: their copies to host memory begin, and with `eager` its update.
        They must not change any more before `step` is over.
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
            rate: learning rate; by default, and where updates have begun, the last that was set.
            ratio: factor of all gradients, from clipping or the scale of the loss. Gradients may be scaled in
                place.

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
        elif not self._apart:
            self._update_all(ratio)
        else:
            for at, unit in enumerate(self._units):
                self._update(unit, ratio, self.units[at + 1 :], self._after)
        if self.files is not None:
            self.files.ring.check()
            self._read_ahead(self.units)  # for the next step

    def _finish(self) -> None:
        """Wait for the updates that have begun, and do the rest."""
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
    def _update(self, unit: int, ratio: float, following: Sequence[int], after: OfUnit | None = None) -> None:
        if self.files is not None:
            self.files.fetch(unit)
            self._read_ahead(following)
        self._step(self._of[unit], self._units[unit], ratio)
        for call in (self._copy, after):
            if call is not None:
                call(unit)
        if self.files is not None:
            if self._cuda:  # copies to the device must be over before the memory is another unit's
                torch.cuda.current_stream().synchronize()
            self.files.put(unit)

    def _step(self, optimizer: torch.optim.Optimizer, fragments: Sequence[Fragment], ratio: float) -> None:
        """One optimiser's update, with the parameters' gradients set for it alone."""
        before = [fragment.parameter.grad for fragment in fragments]
        gradients = [self._gradient(fragment) for fragment in fragments]
        if ratio != 1.0 and (scaled := [g for g in gradients if g is not None]):
            torch._foreach_mul_(scaled, ratio)
        for fragment, gradient in zip(fragments, gradients, strict=True):
            fragment.parameter.grad = gradient
        optimizer.step()
        for fragment, gradient in zip(fragments, before, strict=True):
            fragment.parameter.grad = gradient

    def _gradient(self, fragment: Fragment) -> Tensor | None:
        """In the parameter's type and where it is."""
        if self._host is not None and (copied := self._host.take(id(fragment))) is not None:
            return copied
        if fragment.gradient is None:
            return None
        return fragment.gradient.detach().to(fragment.parameter.device, fragment.parameter.dtype)

    def _read_ahead(self, units: Sequence[int]) -> None:
        if self.files is not None:
            for unit in units[:READ_AHEAD]:
                self.files.start_fetch(unit)

    def close(self) -> None:
        """End the thread and remove the files."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        if self.files is not None:
            self.files.close()
