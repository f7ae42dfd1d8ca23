"""A checkpoint of Megatron-core (torch_dist) to one of ours, tensor by tensor, with the states of Adam.

Weights and states may be stacked over layers or layer by layer. A state of the distributed optimizer may be
whole like its weight (`fully_reshardable`, and without that optimizer), in flat pieces
(`fully_sharded_model_space`, to core_v0.13): for a weight [X, Y] that was cut into [x, y] for the ranks,
[X / x, Y / y, x y], of which the last dimension is cut once more; or in the flat buffers of the ranks.
Whatever its form, every float32 weight must round to the model's, or it is another parameter's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from stretto.errors import StrettoError, nearest
from stretto.job.parameters import Sizes
from stretto.job.shape import ModelShape
from stretto_interop.checkpoints.dcp.reader import Archives, read_dcp_index
from stretto_interop.checkpoints.dcp.transfer import MOMENTS, Incoming, OpenImport
from stretto_interop.checkpoints.megatron.buffers import (
    MASTER,
    OrderedStates,
    has_buffers,
    read_buffers,
    rounds_to,
)
from stretto_interop.checkpoints.megatron.common import (
    Common,
    find_iteration,
    groups_of,
    optimiser_of,
    read_common,
)
from stretto_interop.checkpoints.megatron.names import (
    EMBEDDING,
    EXPERTS,
    HEAD,
    LAYERS,
    MegatronRule,
    is_trained,
    rules,
)

STATE = "optimizer.state."
MASTERS = ("fp32_param", "param", "master_param")
WEIGHTS_ONLY = "--weights-only imports the model without its optimiser"
_PREFIXES = ("", "module.", "model.")  # of parameters: of Megatron-LM, and of NeMo
_NOT_ITS = (
    "where Megatron warned 'param range exceeds unpadded buffer' as it saved, save dp_reshardable there; or "
    "--weights-only"
)
_CHAINED = re.compile(r"chained_\d+\.")


@dataclass(frozen=True)
class _Slot:
    """A tensor in the checkpoint, or one layer or expert of it.

    Attributes:
        name: the tensor's name in the checkpoint.
        start: offsets in the stacked dimensions before `shape`.
    """

    name: str
    start: tuple[int, ...]
    shape: Sizes


@dataclass(frozen=True)
class _MegatronNames:
    """A parameter or state in the checkpoint; `read` returns it in Megatron's layout."""

    dtype: torch.dtype
    read: Callable[[], Tensor]


class MegatronImport(OpenImport):
    """A checkpoint of Megatron-core.

    Args:
        source: the folder of an iteration, or the folder that Megatron saves to, of which the newest is read.
        states: import the optimiser's states, if there are any.

    Raises:
        StrettoError: no such checkpoint, a damaged one, one of another model, or optimiser states in buffers
            with an unknown order of parameters.
    """

    def __init__(self, source: Path, shape: ModelShape, *, states: bool = True) -> None:
        self.source, self.shape = find_iteration(source), shape
        common = read_common(self.source)
        index = read_dcp_index(self.source)
        self.archives, self.notes = Archives(index), list[str]()
        # which of several optimisers has a state is no part of its name
        self._names = {_CHAINED.sub("", name): name for name in index.tensors}
        self._prefix = next((p for p in _PREFIXES if p + EMBEDDING in self._names), "")
        try:
            self._match(common, states)
        except BaseException:
            self.close()
            raise

    def _match(self, common: Common, states: bool) -> None:
        """Make a tensor for every parameter and state, after checking all names, types and sizes."""
        mapping = list(rules(self.shape))
        self.parameters = sum(prod(rule.shape) for rule in mapping)
        self._used = set[str]()
        weights = {rule.parameter: self._stored(rule, "") for rule in mapping}
        self._check_unused(self._used)
        self.updates, self.optimiser = 0, None
        self.step = common.iteration
        counted = common.args.get("consumed_train_samples")
        self.samples = counted if type(counted) is int and 0 <= counted < 2**48 else 0
        if states and self.samples != counted:
            self.notes.append("how many samples were seen is not in it: training begins with the first")
        sequence = common.args.get("seq_length", 0)
        self.tokens = self.samples * (sequence if isinstance(sequence, int) else 0)
        trained = [rule for rule in mapping if is_trained(rule.parameter)] if states else []
        moments = list[Incoming]()
        if trained and (result := self._states(common, trained, weights)):
            for rule in trained:
                if (master := result.get((rule.parameter, MASTER))) is not None:
                    weights[rule.parameter] = self._checked(rule, master, weights[rule.parameter])
            moments = [
                _incoming(f"optim.{moment}.{rule.parameter}", rule, result[rule.parameter, moment])
                for rule in trained
                for moment in MOMENTS
            ]
        self.tensors = [
            *(_incoming(f"model.{rule.parameter}", rule, weights[rule.parameter]) for rule in mapping),
            *moments,
        ]

    def _states(
        self, common: Common, trained: Sequence[MegatronRule], weights: Mapping[str, _MegatronNames]
    ) -> dict[tuple[str, str], _MegatronNames]:
        """Return the optimiser's states and, as MASTER, its float32 weights; empty if they were not saved."""
        if has_buffers(self.archives.index):
            buffers = read_buffers(self.archives)
            self._set_optimiser(replace(common, optimiser=dict(enumerate(buffers.settings))))
            states = OrderedStates(
                buffers, trained, common.args, lambda rule: weights[rule.parameter].read(), self.source
            )
            return {
                (rule.parameter, key): _MegatronNames(torch.float32, partial(states.read, rule, key))
                for rule in trained
                for key in (*MOMENTS, MASTER)
            }
        kinds = {
            kind
            for kind in (*MOMENTS, *MASTERS)
            if any(each.startswith(f"{STATE}{kind}.") for each in self._names)
        }
        if MOMENTS[0] not in kinds:
            return {}
        self._set_optimiser(common)
        foreign: dict[str, str] = dict(zip(MOMENTS, MOMENTS, strict=True))
        if masters := [kind for kind in MASTERS if kind in kinds]:
            foreign[MASTER] = masters[0]
        return {
            (rule.parameter, parameter): self._stored(rule, f"{STATE}{name}.")
            for rule in trained
            for parameter, name in foreign.items()
        }

    def _set_optimiser(self, common: Common) -> None:
        groups, self.updates = groups_of(common, self.source)
        self.optimiser = optimiser_of(common, groups, self.notes)

    def _checked(self, rule: MegatronRule, master: _MegatronNames, weight: _MegatronNames) -> _MegatronNames:
        """Return float32 weights that are checked, when they are read, to round to the model's."""

        def read() -> Tensor:
            foreign = master.read()
            if not rounds_to(foreign, weight.read()):
                raise StrettoError(
                    f"{rule.parameter}: the float32 weights that the optimiser in {self.source} has for it "
                    "do not "
                    "round to the weights of the model, so its states may be another parameter's",
                    hint=_NOT_ITS,
                )
            return foreign

        return _MegatronNames(master.dtype, read)

    def _slots(self, rule: MegatronRule, kind: str) -> Sequence[_Slot]:
        """Return where a parameter, or a state of it, is stored."""
        forms = [
            parts
            for name in (rule.names if rule.layer is not None else rule.names[:1])
            for parts in self._forms(rule, name, kind)
        ]
        parts = next((form for form in forms if all(slot.name in self._names for slot in form)), None)
        if parts is None:
            wanted = forms[0][0].name
            closest = nearest(wanted, self._names)
            hint = closest and f"the nearest name in it is {closest}"
            raise StrettoError(
                f"{self.source} has no tensor {wanted}, {list(rule.shape)} in the model",
                hint=WEIGHTS_ONLY if kind else hint or "is it a language model's?",
            )
        for slot in parts:
            stored = self.archives.index.tensors[self._names[slot.name]].shape
            wanted_shape = (*(self.shape.layers,) * len(slot.start), *slot.shape)
            if stored != wanted_shape and not _is_flat(stored, wanted_shape):
                raise StrettoError(
                    f"{slot.name} has shape {list(stored)} in {self.source}, but {list(wanted_shape)} in the "
                    "model",
                    hint=f"it is {rule.parameter} here: the arguments must be those of the trained model",
                )
        return [_Slot(self._names[slot.name], slot.start, slot.shape) for slot in parts]

    def _forms(self, rule: MegatronRule, name: str, kind: str) -> Iterator[list[_Slot]]:
        """Yield the forms in which it may be stored, each as parts in the order of the dimension that they
        divide.
        """
        before = kind + self._prefix
        if rule.layer is None:
            yield [_Slot(before + name, (), rule.shape)]
            return
        for full, start in (
            (f"{before}{LAYERS}{name}", (rule.layer,)),
            (f"{before}{LAYERS}{rule.layer}.{name}", ()),
        ):
            yield [_Slot(full, start, rule.shape)]
            if rule.halves is not None:
                sizes = list(rule.shape)
                sizes[rule.halves] //= 2
                yield [_Slot(f"{full}_{half}", start, tuple(sizes)) for half in "wv"]
            if rule.of_experts:
                yield from _experts(full, start, rule)

    def _check_unused(self, used: set[str]) -> None:
        """Raise StrettoError for parameters that the model does not have: they would be lost silently."""
        for plain, name in sorted(self._names.items()):
            if name in used or "optimizer." in plain or plain.startswith("rng_state"):
                continue
            bare = plain.removeprefix(self._prefix)
            if bare.endswith("_extra_state") or (self.shape.tied and bare == HEAD):
                continue
            if bare.endswith(("local_tokens_per_expert", "rotary_pos_emb.inv_freq")):
                continue  # counts of the last step, and a table
            raise StrettoError(
                f"{name} in {self.source} has no place in the model",
                hint="the arguments in common.pt do not say that the model has it; --model names another",
            )

    def _stored(self, rule: MegatronRule, kind: str) -> _MegatronNames:
        """Return a parameter, or a state of it, that is stored in tensors of its own.

        Args:
            kind: prefix of the states' names; "" for the weights.
        """
        slots = self._slots(rule, kind)
        self._used |= {slot.name for slot in slots}
        kinds = sorted({self.archives.index.tensors[slot.name].dtype for slot in slots})
        if len(kinds) > 1:
            raise StrettoError(f"{slots[0].name} and the parts beside it are of types {', '.join(kinds)}")
        dtype: torch.dtype = getattr(torch, kinds[0])

        def read() -> Tensor:
            foreign = torch.empty(rule.shape, dtype=dtype)
            for slot, target in zip(slots, _shares(foreign, slots, rule), strict=True):
                self._read_slot(slot, target)
            return foreign

        return _MegatronNames(dtype, read)

    def _read_slot(self, slot: _Slot, target: Tensor) -> None:
        """Read a part, which is stored in its shape or in flat pieces."""
        stored = self.archives.index.tensors[slot.name].shape
        wanted = (*(self.shape.layers,) * len(slot.start), *slot.shape)
        stack = len(slot.start)
        if stored == wanted:
            self.archives.read_box(
                slot.name,
                (*slot.start, *(0,) * len(slot.shape)),
                target.view(*(1,) * stack, *slot.shape)
                if target.is_contiguous()
                else target[(None,) * stack],
            )
            return
        counts = stored[stack:-1]
        sizes = tuple(n // count for n, count in zip(slot.shape, counts, strict=True))
        flat = torch.empty((1,) * (stack + len(counts)) + (prod(sizes),), dtype=target.dtype)
        for at in product(*map(range, counts)):
            self.archives.read_box(slot.name, (*slot.start, *at, 0), flat)
            box = tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, sizes, strict=True))
            target[box].copy_(flat.view(sizes))

    def check_head(self) -> None:
        """A tied head is stored once there: nothing can differ."""


def _incoming(name: str, rule: MegatronRule, foreign: _MegatronNames) -> Incoming:
    """Return one of Stretto's tensors, made from Megatron's."""

    def read() -> Tensor:
        stored = foreign.read()
        if not rule.order:
            return stored
        parameter = torch.empty_like(stored)
        for view, other in rule.order:
            view(parameter).copy_(other(stored))
        return parameter

    return Incoming(name, rule.shape, foreign.dtype, read)


def _experts(name: str, start: tuple[int, ...], rule: MegatronRule) -> Iterator[list[_Slot]]:
    """Yield the slots of experts that have tensors of their own, with gate and up projection together or
    apart.
    """
    count, sizes = rule.shape[0], list(rule.shape[1:])
    each = [name.replace(EXPERTS, f"{EXPERTS}{expert}.", 1) for expert in range(count)]
    yield [_Slot(item, start, tuple(sizes)) for item in each]
    if rule.halves is not None:
        sizes[rule.halves - 1] //= 2
        yield [_Slot(f"{item}_{half}", start, tuple(sizes)) for item in each for half in "wv"]


def _shares(foreign: Tensor, slots: Sequence[_Slot], rule: MegatronRule) -> Iterator[Tensor]:
    """Yield the part of the tensor that each slot fills."""
    if len(slots) == 1:
        yield foreign
        return
    experts = [foreign] if len(slots[0].shape) == len(rule.shape) else list(foreign.unbind(0))
    parts = len(slots) // len(experts)
    for item in experts:
        if parts == 1:
            yield item
        else:
            assert rule.halves is not None
            yield from item.chunk(parts, rule.halves - (foreign.dim() - item.dim()))


def _is_flat(stored: Sizes, wanted: Sizes) -> bool:
    """True if `stored` is the shape of flat pieces of a tensor of shape `wanted`."""
    counts = stored[:-1]
    if (
        len(counts) != len(wanted)
        or not all(counts)
        or any(n % c for n, c in zip(wanted, counts, strict=True))
    ):
        return False
    return prod(wanted) == prod(stored)
