"""Measured memory of one rank in training: every tensor storage from its first use to its end, in bytes.

It counts the tensors that torch's operators create, take and return, and not what a kernel allocates and
frees internally (workspaces, a collective's buffers).
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.engine.device import backend_for, rank_device
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.traffic import traffic
from stretto.engine.pipeline.rank_buffers import Call
from stretto.engine.pipeline.recorder import Recorder
from stretto.job.job import Job
from stretto.run.train.assemble import assemble
from stretto.run.train.language_task import apply_gradients
from stretto.run.train.rank_model import RankModel, loss_weights

OTHER = "other"
# seconds within which gloo's threads release the tensors of a finished collective
_RELEASE_S = 2e-3


@dataclass(frozen=True)
class Sample:
    """One action: bytes allocated after it, and the most during it."""

    label: str
    allocated: int
    peak: int


class _Storage:
    """One storage: its size, its kind, and a weak reference that reports its end."""

    __slots__ = ("bytes", "kind", "reference")

    def __init__(self, size: int, kind: str) -> None:
        self.bytes, self.kind = size, kind
        self.reference: Any = None


class MemoryTracker(TorchDispatchMode):
    """Tracks all storages of this process while it is active; costs nothing otherwise.

    Attributes:
        allocated: bytes now.
        peak: most bytes at once since the start or the last `restart`.
        kinds: bytes now, by kind: "parameters", "gradients", ... as set by `name`, else "other".
        peak_kinds: `kinds` at the peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocated = self.peak = 0
        self.kinds, self.peak_kinds = Counter[str](), Counter[str]()
        self._storages = dict[int, _Storage]()
        self._watched: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled, and torch's wrapper imports its compiler and slows each call."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for tensor in self._watched:
            self._see(tensor)
        for tensor in _tensors((args, kwargs, out)):
            self._see(tensor)
        return out

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Check these after every operator: their storages are freed and created again without one."""
        self._watched += tensors

    def look(self) -> None:
        """Check the watched tensors now."""
        for tensor in self._watched:
            self._see(tensor)

    def name(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Set the kind of these tensors' storages."""
        for tensor in tensors:
            storage = self._see(tensor)
            if storage is not None and storage.kind != kind:
                self.kinds[storage.kind] -= storage.bytes
                self.kinds[kind] += storage.bytes
                storage.kind = kind

    def change(self, kinds: Mapping[str, int]) -> None:
        """Add bytes of these kinds, or subtract if negative, that no storage of this process has."""
        self.kinds.update(kinds)
        self.allocated += sum(kinds.values())
        self._note_peak()

    def restart(self) -> None:
        """Restart the search for the peak."""
        self.peak, self.peak_kinds = self.allocated, self.kinds.copy()

    def _see(self, tensor: Tensor) -> _Storage | None:
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return None
        untyped = tensor.untyped_storage()
        key = untyped._cdata
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = _Storage(0, OTHER)
            storage.reference = weakref.ref(untyped, lambda _: self._free(key))
        if (grown := untyped.nbytes() - storage.bytes) != 0:
            self._add(storage.kind, grown)
            storage.bytes += grown
        return storage

    def _free(self, key: int) -> None:
        storage = self._storages.pop(key)
        self._add(storage.kind, -storage.bytes)

    def _add(self, kind: str, size: int) -> None:
        self.allocated += size
        self.kinds[kind] += size
        self._note_peak()

    def _note_peak(self) -> None:
        if self.allocated > self.peak:
            self.peak, self.peak_kinds = self.allocated, self.kinds.copy()


class MemoryRecorder(Recorder):
    """Records the memory after every action of a step, instead of its time."""

    def __init__(self, memory: MemoryTracker, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self.memory, self.samples = memory, list[Sample]()

    def record(self, label: str, call: Call, wait: Call | None) -> None:
        """Run a call, after the wait that it begins with."""
        if wait is not None:
            wait()
        memory = self.memory
        before, fullest = memory.peak, memory.peak_kinds
        memory.peak = memory.allocated
        call()
        memory.look()
        time.sleep(_RELEASE_S)
        self.samples.append(Sample(label, memory.allocated, memory.peak))
        if memory.peak <= before:
            memory.peak, memory.peak_kinds = before, fullest


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(item)


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory:
    """The memory of one rank in one step of training, bytes.

    Attributes:
        pipeline: the rank's index in its pipeline.
        peak: most at once, temporaries included.
        between_actions: most after any action.
        kinds: bytes at the peak, by kind.
        sent: bytes that left the rank, as `engine.parallel.traffic` counts them.
        samples: every action of the step.
    """

    rank: int
    pipeline: int
    peak: int
    between_actions: int
    kinds: dict[str, int]
    sent: int
    samples: tuple[Sample, ...]


def measure(job: Job, mesh: Mesh, steps: int = 2) -> MeasuredMemory:
    """Train on random tokens and follow the last step. Collective over all ranks.

    The first step creates what is kept: message buffers, optimiser states, tables of positions.

    Args:
        steps: at least 2.
    """
    memory = MemoryTracker()
    with memory:
        model = assemble(replace(job, compile="off"), mesh, seed=0)
        try:
            model.pipeline.train()
            for step in range(1, steps):
                random_step(model, step)
            name_kinds(memory, model)
            memory.watch(passing_flats(model))
            recorder = MemoryRecorder(memory, mesh.device)
            memory.restart()
            with traffic() as sent:
                random_step(model, steps, recorder)
            if dist.is_initialized():
                dist.barrier()  # no rank closes its groups while others still use them
        finally:
            model.close()
    kinds = {kind: size for kind, size in memory.peak_kinds.items() if size}
    return MeasuredMemory(
        rank=mesh.rank,
        pipeline=mesh.index("pp"),
        peak=memory.peak,
        between_actions=max(sample.allocated for sample in recorder.samples),
        kinds=kinds,
        sent=sent.total,
        samples=tuple(recorder.samples),
    )


def passing_flats(model: RankModel) -> Iterator[Tensor]:
    """Yield gathered weights and whole gradients, which may have memory only for a time; no weights that are
    always whole, since a reference to them would keep an old version.
    """
    units = (unit.flat for units in model.states.units.values() for unit in units if unit.split)
    gradients = (flat.flat for buffer in model.pipeline.buffers.values() for flat in buffer.gradients)
    yield from (flat for flat in (*units, *gradients) if flat is not None)


def name_kinds(memory: MemoryTracker, model: RankModel) -> None:
    """Set the kinds of a rank's weights, gradients and optimiser states."""
    units = [unit for units in model.states.units.values() for unit in units]
    memory.name("masters", (fragment.parameter.data for fragment in model.fragments))
    memory.name("weights", (p.data for p in model.parameters.values()))
    split = [unit for unit in units if unit.split]
    memory.name("gathered", (unit.flat for unit in split if unit.flat is not None))
    memory.name("weights", (unit.shard for unit in split if unit.shard is not None))
    memory.name("gradients", model.gradients())
    states = (state for o in model.optimizers for of in o.state.values() for state in of.values())
    memory.name("optimizer", (state for state in states if isinstance(state, Tensor)))


def random_step(model: RankModel, step: int, recorder: Recorder | None = None) -> None:
    """One training step on random tokens, its update included.

    Args:
        step: seeds the tokens.
    """
    job, m = model.job, model.pipeline.program.microbatches
    size, target = job.micro_batch, job.target_sequence
    rate = job.optimiser.lr
    random = torch.Generator().manual_seed(step)
    model.samples[:] = [range(i * size, (i + 1) * size) for i in range(m)]

    def draw(length: int) -> Tensor:
        return torch.randint(model.shape.vocab, (size, length), generator=random)

    pairs = [model.share(draw(job.sequence), draw(target)) for _ in range(m)]
    device = model.mesh.device
    if model.shape.encoder_layers:
        model.decoders[:] = [(draw(target).to(device).clone(), None) for _ in range(m)]
    inputs, targets = [x.to(device).clone() for x, _ in pairs], [y.to(device).clone() for _, y in pairs]
    del pairs
    tokens = torch.full((m,), job.global_batch * target / m, dtype=torch.float64)
    if model.asynchronous:
        model.set_rate(rate)
    model.step(inputs, targets, loss_weights(model.update_numbers, tokens), recorder)
    if not model.asynchronous:
        apply_gradients(model, rate, float(model.gradient_norm()))


def measure_rank(job: Job, device_kind: str, threads: int, backend: str) -> MeasuredMemory:
    """`measure` as one rank of the job that RANK and WORLD_SIZE describe.

    Args:
        device_kind, backend: `train.device` and `train.backend`.
    """
    torch.set_num_threads(threads)
    device = rank_device(device_kind)
    dist.init_process_group(backend_for(device.type, backend))
    try:
        return measure(job, Mesh(job.layout, device))
    finally:
        dist.destroy_process_group()
