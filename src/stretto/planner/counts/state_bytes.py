"""Bytes of weights, gradients and optimiser states that one rank holds, exact.

Parameters of a stage lie in flat units, which data-parallel ranks shard: a rank holds its part of a unit's
weights, gradient and optimiser states (`layout.shards`). With 16-bit weights a rank has weights, gradients,
float32 masters and states: 2 + 4 + 4 + 8 bytes a parameter with AdamW. Rajbhandari et al. 2020, "ZeRO",
section 3.1, count 2 + 2 + 12, since their gradients have 16 bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from stretto.job.data_parallel import BUCKET_BYTES, Offload
from stretto.job.finetune import TrainedParameters, is_router_correction
from stretto.job.job import Job
from stretto.job.optimiser import StateSize
from stretto.job.parameters import stays_float32
from stretto.job.reduction import reduction
from stretto.layout.shards import Mode, ShardSizes, padded
from stretto.planner.counts.compute import ELEMENT_BYTES
from stretto.planner.counts.rank_parameters import Parameter
from stretto.program.program import Program

_COUNT = 4  # bytes of the step counter that optimisers keep for each tensor
_RING = 3  # units in memory while states are in files: one written, one updated, one read


@dataclass(frozen=True, kw_only=True)
class StateConfig:
    """Configuration of weights, gradients and optimiser states on a rank.

    Attributes:
        sizes: ranks that shard the states of dense parameters; those of experts, which have `expert_copies`
            copies, are sharded over the part of it that divides.
        copies, expert_copies: ranks with the same dense, and with the same expert parameters.
        copy, expert_copy: this rank's index among them.
        element: bytes of an element of weights.
        gradient: bytes of an element of gradients if weights have 16 bits.
        keep: patterns of names of parameters that stay in 32 bits if the others have 16.
        state_size: bytes of the states of an optimiser of the user's.
        moment: bytes of an element of AdamW's moments, or None for those of the masters.
        each: sharded gradients are reduced with each microbatch.
        lasting: gradients stay whole through the step.
        remainders: masters of weights of 16 bits are the 16 bits that these lack.
        wide_shards: shards of parameters of 16 bits have 32, so that no masters are needed.
        copied: gradients of 16 bits stay whole, besides those of `gradient` bytes that they are added to.
        bucket: bytes of weights at which a unit is full.
        offload, offload_parameters: location of states, and of this rank's part of the weights.
        unified_memory: host and device share one memory, as on a CPU.
        trained: which parameters have gradients and states.
    """

    mode: Mode = "ddp"
    sizes: ShardSizes = field(default_factory=ShardSizes)
    copies: int = 1
    expert_copies: int = 1
    copy: int = 0
    expert_copy: int = 0
    element: int = 4
    gradient: int = 4
    keep: tuple[str, ...] = ()
    optimiser: str = "adamw"
    state_size: StateSize | None = None
    momentum: float = 0.0
    moment: int | None = None
    each: bool = False
    lasting: bool = False
    remainders: bool = False
    wide_shards: bool = False
    copied: bool = False
    bucket: int = BUCKET_BYTES
    offload: Offload = "none"
    offload_parameters: Offload = "none"
    unified_memory: bool = False
    trained: TrainedParameters = field(default_factory=TrainedParameters)

    @classmethod
    def of(cls, job: Job, program: Program) -> StateConfig:
        """The config of a job, for the first of the ranks with the same parameters; no other keeps more."""
        dp, precision = job.dp, job.precision
        return cls(
            mode=dp.mode,
            sizes=dp.sizes(job.copies),
            copies=job.copies,
            expert_copies=job.layout.size("expert_dp"),
            element=ELEMENT_BYTES[precision.dtype],
            gradient=2 if precision.gradients == "same" else 4,
            keep=tuple(precision.keep),
            optimiser=job.optimiser.name,
            state_size=job.optimiser.state_size,
            momentum=job.optimiser.effective_momentum,
            moment=job.optimiser.moment_bytes,
            each=reduction(program, dp.mode, dp.reduce) == "microbatch",
            lasting=bool(program.versions) or job.graphs != "off",
            remainders=job.framework.remainders,
            wide_shards=job.framework.wide_shards,
            copied=job.framework.lasting_gradients and job.dp.mode != "zero3",
            bucket=job.bucket,
            offload=dp.offload,
            offload_parameters=dp.offload_parameters,
            unified_memory=job.unified_memory,
            trained=job.trained,
        )

    def weight(self, parameter: Parameter) -> int:
        """Bytes of an element of this parameter."""
        wide = is_router_correction(parameter.name) or stays_float32(parameter.name, self.keep)
        return 4 if self.element == 2 and wide else self.element


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of parameters and of what training keeps for them.

    Attributes:
        masters: float32 weights that the optimiser updates, if the model's weights have 16 bits or are on
            another device.
        host, disk: states, masters and parameters that are not on the device.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    masters: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.weights + self.gradients + self.optimizer + self.masters

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
            masters=self.masters + other.masters,
            host=self.host + other.host,
            disk=self.disk + other.disk,
        )


@dataclass(frozen=True)
class StateUnit:
    """Parameters that are reduced, updated and gathered together; of frozen ones only the weights are held.

    Attributes:
        layers: for each parameter, the layers of the model that use it.
        element: bytes of an element of weights.
    """

    parameters: tuple[Parameter, ...]
    layers: tuple[tuple[int, ...], ...]
    element: int
    state_config: StateConfig

    @cached_property
    def users(self) -> frozenset[int]:
        """The layers that use one of the parameters."""
        return frozenset(layer for users in self.layers for layer in users)

    def gradient_of(self, name: str) -> int:
        """Bytes of a parameter's gradient."""
        return self._gradient * sum(p.elements for p in self.parameters if p.name == name)

    @cached_property
    def frozen(self) -> bool:
        """True if the parameters are not trained."""
        return not self.state_config.trained(self.parameters[0].name)

    @cached_property
    def expert(self) -> bool:
        return self.parameters[0].expert

    @cached_property
    def copies(self) -> int:
        """Ranks with these parameters."""
        return self.state_config.expert_copies if self.expert else self.state_config.copies

    @cached_property
    def sizes(self) -> ShardSizes:
        """Over how many of them parameters, gradients and states are sharded."""
        sizes = self.state_config.sizes
        sizes = sizes.for_copies(self.copies) if self.expert else sizes
        if not self.frozen:
            return sizes
        split = 1 if is_router_correction(self.parameters[0].name) else sizes.parameters
        return ShardSizes(split, split, split)

    @cached_property
    def size(self) -> int:
        """Elements, padded so that all shards are equal."""
        return padded(sum(p.elements for p in self.parameters), self.sizes.states)

    # ------------------------------------------------------------------ held all the time

    @cached_property
    def has_masters(self) -> bool:
        """True if the optimiser updates masters instead of the weights themselves."""
        narrow = self.element == 2 and not self._wide
        return not self.frozen and (narrow or self.state_config.offload != "none")

    @cached_property
    def _wide(self) -> bool:
        """True if this rank's shard of the weights has 32 bits, and is gathered in 16."""
        return self.state_config.wide_shards and self.element == 2 and self.sizes.parameters > 1

    @cached_property
    def weights(self) -> int:
        """Bytes of this rank's shard of the weights."""
        return (4 if self._wide else self.element) * self.size // self.sizes.parameters

    @cached_property
    def gradients(self) -> int:
        """Bytes of gradients that are held all the time."""
        if self.frozen:
            return 0
        size = self._gradient * self.size // (1 if self.state_config.lasting else self.sizes.gradients)
        return size + (self.element * self.size if self.state_config.copied and self.element == 2 else 0)

    @cached_property
    def masters(self) -> int:
        """Bytes of this rank's masters."""
        start, stop = self._span
        return (2 if self._remainders else self._master) * (stop - start) if self.has_masters else 0

    @cached_property
    def _remainders(self) -> bool:
        """True if masters are the 16 bits that the weights lack."""
        return self.state_config.remainders and self.element == 2

    @cached_property
    def states(self) -> int:
        """Bytes of this rank's optimiser states."""
        return 0 if self.frozen else sum(self._state(p, elements) for p, elements in self._fragments())

    @cached_property
    def lasting(self) -> StateBytes:
        """Bytes of the unit that are held all the time, by location."""
        state_config, states = self.state_config, self.states + self.masters
        weights = StateBytes(weights=self.weights)
        if self.sizes.parameters > 1 and not (
            state_config.offload_parameters == "cpu" and state_config.unified_memory
        ):
            weights = {
                "none": weights,
                "cpu": StateBytes(host=self.weights),
                "nvme": StateBytes(disk=self.weights),
            }[state_config.offload_parameters]
        states_and_gradients = StateBytes(
            weights=0, gradients=self.gradients, optimizer=self.states, masters=self.masters
        )
        if state_config.offload == "cpu" and not state_config.unified_memory:
            states_and_gradients = StateBytes(weights=0, gradients=self.gradients, host=states)
        elif state_config.offload == "nvme":
            states_and_gradients = StateBytes(weights=0, gradients=self.gradients, disk=states)
        return weights + states_and_gradients

    @cached_property
    def saved(self) -> int:
        """Bytes of a rank's part of what a checkpoint has of the unit, which all ranks with these parameters
        divide: the weights, or their masters, and the states. What lies in files is not copied.
        """
        elements = sum(p.elements for p in self.parameters)
        if self.frozen:
            size = self.element * elements
        elif self.state_config.offload == "nvme":
            size = 0
        else:
            size = self._master * elements + sum(self._state(p, p.elements) for p in self.parameters)
        return -(-size // self.copies)

    # ------------------------------------------------------------------ held for a while

    @cached_property
    def gathered(self) -> int:
        """Bytes of the whole weights while they are used, if a rank keeps a shard of them; else 0."""
        return self.element * self.size if self.sizes.parameters > 1 else 0

    @cached_property
    def open(self) -> int:
        """Bytes of the whole gradient from the first backward of a step to its reduction, unless it lasts or
        is reduced with each microbatch.
        """
        reduced_early = self.frozen or self.each or self.state_config.lasting or self.sizes.gradients == 1
        return 0 if reduced_early else self.full_gradient

    @cached_property
    def each(self) -> bool:
        """True if the gradient of every microbatch is reduced on its own."""
        return not self.frozen and self.state_config.each and self.sizes.gradients > 1

    @cached_property
    def flying(self) -> int:
        """Bytes of one microbatch's gradient during its reduction: as it is sent, as it arrives, and the
        shard that the first exchange leaves.
        """
        first = self.sizes.parameters if self.sizes.parameters > 1 else self.sizes.gradients
        return self.full_gradient + self._exchanged + self.full_gradient // first

    @cached_property
    def full_gradient(self) -> int:
        """Bytes of the whole gradient."""
        return 0 if self.frozen else self._gradient * self.size

    @cached_property
    def arriving(self) -> int:
        """Bytes of gradients received from other ranks, from a step's reduction to its end."""
        if self.state_config.mode == "server":
            return self.copies * self.full_gradient if self._span[1] and self.copies > 1 else 0
        return 0 if self.each else self._exchanged

    @cached_property
    def _exchanged(self) -> int:
        """Bytes that a reduce-scatter needs if it is done as an all-to-all, as on CPUs."""
        return self.full_gradient if self.state_config.unified_memory and self.sizes.states > 1 else 0

    @cached_property
    def updating(self) -> int:
        """Bytes of the update's temporaries: gradients in the masters' type if it differs, and whole
        update directions for optimisers that need all of a tensor before they step (LAMB, Adafactor, and
        Muon of its matrices).
        """
        if self.frozen:
            return 0
        start, stop = self._span
        cast = self._gradient != self._master and not self._remainders
        directions = (stop - start) * (self.state_config.optimiser in ("lamb", "adafactor"))
        return self._master * ((stop - start) * cast + directions) + self.directions

    @cached_property
    def directions(self) -> int:
        """Bytes of this rank's part of the directions in which Muon updates the unit's matrices."""
        if self.frozen or self.state_config.optimiser != "muon":
            return 0
        return self._master * sum(elements for p, elements in self._fragments() if p.by_muon)

    # ------------------------------------------------------------------ elements

    @cached_property
    def _gradient(self) -> int:
        """Bytes of an element of the gradient."""
        return self.state_config.gradient if self.element == 2 else self.element

    @cached_property
    def _master(self) -> int:
        """Bytes of an element of masters and states."""
        return max(4, self.element)

    @cached_property
    def _span(self) -> tuple[int, int]:
        """The elements [start, stop) whose states this rank has."""
        state_config = self.state_config
        copy = state_config.expert_copy if self.expert else state_config.copy
        if state_config.mode == "server" and copy and not self.frozen:
            return 0, 0
        return self.sizes.span(self.size, copy, self.copies, 3)

    def _fragments(self) -> Iterable[tuple[Parameter, int]]:
        """Each parameter, with the number of its elements whose states are on this rank."""
        start, stop = self._span
        offset = 0
        for parameter in self.parameters:
            yield parameter, max(0, min(stop, offset + parameter.elements) - max(start, offset))
            offset += parameter.elements

    def _state(self, parameter: Parameter, elements: int) -> int:
        """Bytes of the optimiser states for a number of elements of a parameter."""
        state_config, full = self.state_config, self._master * elements
        count = _COUNT
        if state_config.state_size is not None:
            return state_config.state_size(parameter.name, parameter.plain, elements, self._master)
        match state_config.optimiser:
            case "sgd":
                return full if state_config.momentum else 0
            case "lamb":
                return 2 * full + count
            case "adafactor":
                return _factored(parameter, elements, self._master) + count
            case "muon" if parameter.by_muon:
                return full
            case _:
                return 2 * (state_config.moment or self._master) * elements + count


_STACKED = 1 << 27  # elements of equal matrices that an accelerator orthogonalises together (muon.py)


def muon_temporaries(units: Sequence[StateUnit]) -> int:
    """Bytes that Muon's update takes besides its directions: matrices that ranks share are exchanged, as many
    elements as the rank has directions, and a stack of equal matrices is iterated on.
    """
    matrices = Counter[tuple[int, ...]]()
    exchanged = iterated = 0
    for unit in units:
        parts = [p for p in unit.parameters if p.by_muon] if unit.directions else []
        if unit.sizes.states > 1 or any(p.elements != prod(p.plain) for p in parts):
            exchanged += unit.directions
        for p in parts:
            matrices[p.plain[-2:]] += p.elements // unit.sizes.states
    for shape, elements in matrices.items():
        element, size = units[0]._master, prod(shape)
        stack, copies = 0, 2
        if not units[0].state_config.unified_memory:
            size *= max(1, min(elements, _STACKED) // size)
            # a stack is copied before it is rounded to 16 bits, and a product copies what it adds to
            stack = element * size * (size > prod(shape))
            element, copies = 2, 4
        squares = 2 * size * min(shape) // max(shape)  # Gram matrices and polynomials of them
        iterated = max(iterated, stack + element * (copies * size + squares))
    return exchanged + max(iterated, 2 * exchanged)


def cut_units(
    layers: Sequence[tuple[int, Sequence[Parameter]]],
    state_config: StateConfig,
    alone: frozenset[str] = frozenset(),
) -> list[StateUnit]:
    """The parameters of one stage in units, the last first, as a backward completes them.

    A unit has parameters of one type with the same copies, all trained or all frozen; the frozen ones come
    last. Where parameters are sharded, or gradients are reduced with each microbatch, a unit also stays
    within one layer. A unit of sharded parameters is all of its layer; any other is closed when it is full. A
    parameter is never split between units.

    Args:
        layers: number and parameters of each layer of the stage; layers may share parameters.
        alone: names of parameters that other stages use too, each of which is a unit of its own.
    """
    users = dict[str, tuple[Parameter, list[int]]]()
    for layer, parameters in layers:
        for parameter in parameters:
            users.setdefault(parameter.name, (parameter, []))[1].append(layer)
    open_units, closed = dict[object, list[str]](), list[list[str]]()
    split = state_config.sizes.parameters > 1
    by_layer = split or (state_config.each and state_config.sizes.gradients > 1)
    backwards = list(reversed(users.items()))
    for name, (parameter, using) in sorted(backwards, key=lambda item: not state_config.trained(item[0])):
        if name in alone:
            closed.append([name])
            continue
        layer = using[-1] if by_layer else None
        frozen = not state_config.trained(name)
        key = frozen, is_router_correction(name), parameter.expert, state_config.weight(parameter), layer
        names = open_units.setdefault(key, [])
        names.append(name)
        size = state_config.weight(parameter) * sum(users[n][0].elements for n in names)
        if size >= state_config.bucket and not split:
            closed.append(open_units.pop(key))
    closed += open_units.values()
    return [
        StateUnit(
            tuple(users[name][0] for name in names),
            tuple(tuple(users[name][1]) for name in names),
            state_config.weight(users[names[0]][0]),
            state_config,
        )
        for names in closed
    ]


def state_bytes(units: Sequence[StateUnit]) -> StateBytes:
    """The sum over these units."""
    total = sum((unit.lasting for unit in units), StateBytes())
    if not units or units[0].state_config.offload != "nvme":
        return total
    # the ring of units in host memory, as large as the largest unit
    ring = _RING * max(unit.states + unit.masters for unit in units)
    ring = min(ring, sum(unit.states + unit.masters for unit in units))
    return total + (
        StateBytes(optimizer=ring) if units[0].state_config.unified_memory else StateBytes(host=ring)
    )


def _factored(parameter: Parameter, elements: int, element: int) -> int:
    """Bytes of Adafactor's means: of rows and columns of each matrix, the same on every rank; of each element
    of a vector.
    """
    if len(parameter.matrices) < 2:
        return element * elements
    *many, rows, columns = parameter.matrices
    return element * prod(many) * (rows + columns)
