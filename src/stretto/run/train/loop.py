"""What every rank of a training job does, whatever the model: it joins the other ranks, opens the run's
folder, steps to the end, agrees with the other ranks on each step, evaluates, and saves.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.engine.device import backend_for, rank_device
from stretto.engine.parallel.control import gather_json
from stretto.errors import StrettoError
from stretto.run.config import dump
from stretto.run.config.run_checks import rate_notes
from stretto.run.config.schema import JobConfig, LoopConfig
from stretto.run.launch.failure import doing
from stretto.run.launch.lease import check_lease, share
from stretto.run.launch.rendezvous import attempt_store
from stretto.run.launch.stop import StopRequest
from stretto.run.train.metrics import TOKENS, Metrics, Words

C = TypeVar("C", bound=JobConfig)
P = TypeVar("P", bound="Position")


@dataclass(kw_only=True)
class Position:
    """How far a run is; with the seed it says which samples come next."""

    step: int = 0  # updates made
    samples: int = 0
    loss: float | None = None  # of the last step


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a session ended."""

    step: int
    loss: float | None  # of the last step; None where the run has made none
    stopped: bool  # by a signal, before the last step
    checkpoint: str | None  # the newest; None where it was stopped before there was one


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one rank reports of a step or an evaluation. Tensors are on the ranks' devices, and stay there."""

    loss: float | Tensor = 0.0  # its part of the sum of all losses
    # one more than the number of the first microbatch whose loss is not finite; 0: all are
    bad_microbatch: float | Tensor = 0.0
    bad_weights: bool = False  # the step left weights that are not finite
    overflow: bool = False  # an update within the step was skipped
    stop: bool = False  # it was asked to stop
    memory_gib: float = 0.0  # its peak so far


_SUMMED = ("loss", "bad_weights", "overflow", "stop")  # over all ranks
_OF_EACH = ("bad_microbatch", "memory_gib")  # every rank learns those of each rank


@dataclass(frozen=True, kw_only=True)
class StepAgreement:
    """The reports of all ranks together, the same on every one of them."""

    loss: float  # sum over the ranks
    bad_microbatches: Mapping[int, int]  # the first on each rank that has one
    bad_weights: bool
    overflow: bool
    stop: bool
    memory_gib: float | None  # of the fullest rank; None where no rank measures it
    known: tuple[float, ...] = ()  # numbers that every rank knew before, now on the host


class Agreement:
    """The reports of all ranks, on their way to each of them: one all-reduce, started here and waited for
    later. Without a process group this rank is alone.

    Of all that a step computes, the host reads nothing but this, in one copy from the device.

    Args:
        known: numbers that are the same on every rank, [n], to be read with it.
    """

    def __init__(self, report: StepReport, device: torch.device, known: Sequence[Tensor] = ()) -> None:
        rank, self._world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        places = {name: place for place, name in enumerate(_SUMMED)}
        places |= {name: len(_SUMMED) + i * self._world + rank for i, name in enumerate(_OF_EACH)}
        values = {name: getattr(report, name) for name in places}
        facts = torch.zeros(len(_SUMMED) + len(_OF_EACH) * self._world, dtype=torch.float64)
        for name, value in values.items():
            if not isinstance(value, Tensor):
                facts[places[name]] = value
        self._facts, self._work = facts.to(device, non_blocking=True), None
        for name, value in values.items():
            if isinstance(value, Tensor):
                self._facts[places[name]] = value
        self._known = [one.to(device, torch.float64, non_blocking=True) for one in known]
        if self._world > 1:
            self._work = dist.all_reduce(self._facts, async_op=True)

    def wait(self) -> StepAgreement:
        """What all ranks report."""
        if self._work is not None:
            self._work.wait()
        facts: list[float] = torch.cat([self._facts, *self._known]).tolist()
        numbers = iter(facts)
        summed = dict(zip(_SUMMED, numbers, strict=False))
        each = {name: list(islice(numbers, self._world)) for name in _OF_EACH}
        return StepAgreement(
            loss=summed["loss"],
            bad_microbatches={at: int(n) - 1 for at, n in enumerate(each["bad_microbatch"]) if n},
            bad_weights=summed["bad_weights"] > 0,
            overflow=summed["overflow"] > 0,
            stop=summed["stop"] > 0,
            memory_gib=max(each["memory_gib"]) or None,
            known=tuple(numbers),
        )


def agree(report: StepReport, device: torch.device, known: Sequence[Tensor] = ()) -> StepAgreement:
    """Combine the reports of all ranks; see `Agreement`."""
    return Agreement(report, device, known).wait()


class TrainingLoop(ABC, Generic[C, P]):
    """The step loop of one rank, for any kind of model.

    Args:
        position: where the run is; `_step` moves it on.
        saved: the checkpoint that the run was resumed from.
        metrics: on rank 0 only.
    """

    def __init__(self, config: C, position: P, saved: Path | None, metrics: Metrics | None) -> None:
        self.config, self.position = config, position
        self.saved, self.metrics = saved, metrics
        self._saved_at = position.step if saved is not None else -1
        self._longest_save_s: float | None = None  # of this session

    @abstractmethod
    def _step(self, stop: StopRequest) -> bool:
        """One global batch; returns whether any rank was asked to stop."""

    @abstractmethod
    def evaluate(self) -> object:
        """Evaluate on held-out samples and report it."""

    @abstractmethod
    def _write_checkpoint(self) -> Path:
        """Write a checkpoint of this step. Collective over all ranks."""

    def train(self, stop: StopRequest) -> bool:
        """Train to the last step, or to the step at which a rank was asked to stop; then save, unless what is
        left of `train.grace_s` is too short for it.

        Returns:
            Whether it was stopped before the last step.
        """
        steps, position = self.config.train.steps, self.position
        stopped = position.step < steps and any(gather_json(stop.signal is not None))
        if stopped:
            self.note(f"asked to stop before step {position.step + 1}")
            return True
        if position.step >= steps:
            self.note(f"nothing to do: {position.step} of train.steps={steps} steps are done")
        while position.step < steps and not stopped:
            with doing(f"in step {position.step + 1}"):
                stopped = self._step(stop) and position.step < steps
            if stopped and not self._can_save(stop):
                return True
            if stopped:
                self.note(f"asked to stop: saving after step {position.step}")
            else:
                with doing(f"after step {position.step}"):
                    self._after(position.step)
        if self._saved_at != position.step:
            with doing(f"saving after step {position.step}"):
                self.save()
        return stopped

    def _drain_after(self, step: int) -> int:
        """The first step after this one that leaves nothing under way, for it is followed by an evaluation or
        a checkpoint, or is the last.
        """
        every = (self.config.eval.every, self.config.checkpoint.every)
        return min([self.config.train.steps, *(step + each - step % each for each in every if each)])

    def _after(self, step: int) -> None:
        """What the config asks for between two steps."""
        every, save_every = self.config.eval.every, self.config.checkpoint.every
        if every and (step % every == 0 or step == self.config.train.steps):
            self.evaluate()
        if save_every and step % save_every == 0:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of this step."""
        check_lease(self.config.run.folder)
        began = time.monotonic()
        self.saved = self._write_checkpoint()
        self._longest_save_s = max(self._longest_save_s or 0.0, time.monotonic() - began)
        self._saved_at = self.position.step
        self.note(f"saved {self.saved}")

    def _can_save(self, stop: StopRequest) -> bool:
        """Whether the time since the signal leaves enough of `train.grace_s` for the longest save so far, on
        all ranks; without a save so far one is tried. Collective.
        """
        grace, longest = self.config.train.grace_s, self._longest_save_s
        if grace is None or longest is None:
            return True
        since = time.monotonic() - (stop.since or time.monotonic())
        ranks = gather_json([grace - since, longest])
        left, needed = min(one[0] for one in ranks), max(one[1] for one in ranks)
        if left >= needed:
            return True
        self.note(
            f"asked to stop: a save takes {needed:.1f} s and {max(left, 0):.1f} s of train.grace_s are left; "
            f"none is begun, the last is {self.saved or 'missing'}"
        )
        return False

    def note(self, text: str) -> None:
        """Tell people a line, on rank 0."""
        if self.metrics is not None:
            self.metrics.note(text)


@contextmanager
def process_group(train: LoopConfig) -> Generator[torch.device]:
    """Join the ranks of the job that RANK and WORLD_SIZE describe; yields this rank's device."""
    torch.set_num_threads(train.threads)
    device = rank_device(train.device)
    timeout = timedelta(seconds=train.timeout_s)
    store, rank, world = attempt_store(timeout)
    dist.init_process_group(
        backend_for(device.type, train.backend), store=store, rank=rank, world_size=world, timeout=timeout
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()


def start_run(
    config: JobConfig,
    step: int,
    keep: Callable[[Path], object],
    cleanup: ExitStack,
    *,
    notes: Sequence[str] = (),
    quiet: bool = False,
    words: Words = TOKENS,
) -> Metrics | None:
    """Take part in the run's folder, and open it on rank 0, with the config as resolved; returns where its
    numbers go.

    Args:
        step: that the run goes on from.
        keep: writes into the folder what else belongs to the run.
        cleanup: closes the metrics at its end.
        notes: lines to tell first.
        quiet: write nothing to stdout; the progress goes to stderr.

    Raises:
        StrettoError: the folder cannot be written to.
    """
    run = config.run.folder
    cleanup.enter_context(share(run))
    if dist.get_rank() != 0:
        return None
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.yaml").write_text(dump(config), encoding="utf-8")
        keep(run)
        metrics = Metrics(
            run,
            steps=config.train.steps,
            start=step,
            every=config.metrics.every,
            board=config.metrics.board(run),
            out=sys.stderr if quiet else None,
            words=words,
        )
    except OSError as error:
        raise StrettoError(
            f"run folder {run} cannot be written to: {error.strerror or error}", hint="give another run.dir"
        ) from None
    cleanup.enter_context(metrics)
    for note in [*rate_notes(config), *notes]:
        metrics.note(note)
    return metrics
