"""A checkpoint of torchtitan to one of ours, tensor by tensor, with the states of AdamW.

The folder says nothing of the architecture: the shape is the caller's, and every tensor is checked against it
before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from stretto.engine.optim.base import decays
from stretto.errors import StrettoError, nearest
from stretto.job.optimiser import Optimiser
from stretto.job.parameters import Sizes
from stretto.job.shape import ModelShape
from stretto_interop.checkpoints.dcp.archive import Archives
from stretto_interop.checkpoints.dcp.index import DcpIndex, find_folder, read_dcp_index
from stretto_interop.checkpoints.dcp.titan import HEADS, MOMENTS, TitanRule, TitanTensor, is_trained, rules
from stretto_interop.checkpoints.dcp.written import Incoming, OpenImport

_PREFIXES = ("", "model.")  # of parameters: of today, and of torchtitan before 0.1
_NO_PARAMETERS = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")

Parts = Sequence[tuple[str, TitanTensor]]  # with the names that they have in a checkpoint


class DcpImport(OpenImport):
    """A checkpoint of torchtitan.

    Args:
        source: the folder of one step, or the one that torchtitan keeps the steps in, of which the newest is
            taken.
        states: whether the optimiser's states are imported, where there are any.

    Raises:
        StrettoError: no such checkpoint, a damaged one, or one of another model.
    """

    def __init__(self, source: Path, shape: ModelShape, *, states: bool = True) -> None:
        self.source, self.shape = find_folder(source), shape
        self._names = _Names(read_dcp_index(self.source))
        self.archives = Archives(self._names.index)
        self.notes, self.samples = list[str](), 0
        try:
            self._match(states)
        except BaseException:
            self.close()
            raise

    def _match(self, states: bool) -> None:
        """A tensor for every parameter and state, after a check of all names, types and sizes."""
        mapping = list(rules(self.shape))
        weights = {rule.parameter: self._names.of_weight(rule) for rule in mapping}
        tensors = [self._joined(f"model.{r.parameter}", r.shape, weights[r.parameter]) for r in mapping]
        self.parameters = sum(prod(rule.shape) for rule in mapping)
        self._check_unused({name for parts in weights.values() for name, _ in parts})
        self.updates, self.optimiser = 0, None
        if states and any(name.startswith(STATE) for name in self._names.index.tensors):
            section = {
                rule.parameter: self._names.of_state(rule) for rule in mapping if is_trained(rule.parameter)
            }
            parameter = {rule.parameter: rule.shape for rule in mapping}
            tensors += [
                self._joined(
                    f"optim.{moment}.{name}",
                    parameter[name],
                    [(f"{each}.{moment}", part) for each, part in parts],
                )
                for name, parts in section.items()
                for moment in MOMENTS
            ]
            fqns = {name: [each.removeprefix(STATE) for each, _ in parts] for name, parts in section.items()}
            self.optimiser, self.updates = read_optimiser(self.archives, fqns, parameter, self.notes)
        self.tensors = tensors
        self.step = self.archives.count("train_state.step", self.updates)
        self.tokens = self.archives.count("train_state.ntokens_seen", 0)

    def _joined(self, name: str, shape: tuple[int, ...], parts: Parts) -> Incoming:
        """One of our tensors; its parts must be of one type."""
        kinds = sorted({self._names.index.tensors[each].dtype for each, _ in parts})
        if len(kinds) > 1:
            raise StrettoError(
                f"{' and '.join(each for each, _ in parts)} are of different types, {', '.join(kinds)}"
            )
        dtype: torch.dtype = getattr(torch, kinds[0])
        return Incoming(name, shape, dtype, lambda: self._read(shape, dtype, parts))

    def _read(self, shape: tuple[int, ...], dtype: torch.dtype, parts: Parts) -> Tensor:
        complete = torch.empty(shape, dtype=dtype)
        for name, part in parts:
            if part.in_order:
                self.archives.read_tensor(name, part.views[0][0](complete))
                continue
            foreign = torch.empty(part.shape, dtype=dtype)
            self.archives.read_tensor(name, foreign)
            for view, other in part.views:
                view(complete).copy_(other(foreign))
        return complete

    def _check_unused(self, used: set[str]) -> None:
        """Refuse parameters that the model does not have: they would be lost in silence."""
        for name in sorted(self._names.index.tensors.keys() - used):
            plain = name.removeprefix(self._names.prefix)
            if name.startswith(_NO_PARAMETERS) or (self.shape.tied and plain in HEADS):
                continue
            if plain.endswith((".moe.expert_bias_E", ".moe.expert_bias")):
                experts = None if self.shape.moe is None else self.shape.moe.experts
                if self._names.index.tensors[name].shape == (experts,) and not self._read_full(name).any():
                    continue  # the model balances by a loss instead
            raise StrettoError(
                f"{name} in {self.source} has no place in the model",
                hint="--model must be the model that was trained",
            )

    def _read_full(self, name: str) -> Tensor:
        stored = self._names.index.tensors[name]
        tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        self.archives.read_tensor(name, tensor)
        return tensor

    def check_head(self) -> None:
        """Check that a head in the files equals the embedding that it is tied to."""
        tensors = self._names.index.tensors
        heads = [self._names.prefix + head for head in HEADS if self._names.prefix + head in tensors]
        embedding = self._names.prefix + "tok_embeddings.weight"
        if not self.shape.tied or not heads or embedding not in tensors:
            return
        equal = tensors[heads[0]].shape == tensors[embedding].shape
        if not equal or not torch.equal(self._read_full(heads[0]), self._read_full(embedding)):
            raise StrettoError(
                f"{heads[0]} differs from the embedding, but the model's head is tied to it",
                hint="--model must be the model that was trained",
            )


class _Names:
    """What the tensors are called in one checkpoint, of the names that torchtitan's versions have."""

    def __init__(self, index: DcpIndex) -> None:
        self.index = index
        self.prefix = next((p for p in _PREFIXES if f"{p}tok_embeddings.weight" in index.tensors), "")

    def of_weight(self, rule: TitanRule) -> Parts:
        """The tensors of a parameter."""
        return [(self._present([self.prefix + n for n in part.names], part), part) for part in rule.parts]

    def of_state(self, rule: TitanRule) -> Parts:
        """The tensors of the optimiser's states of a parameter, without the name of the state; all are there
        in the expected size.
        """
        fused = rule.fused
        if fused is not None and f"{STATE}{fused.names[0]}.{MOMENTS[0]}" in self.index.tensors:
            return [(self._state([fused.names[0]], fused), fused)]
        return [(self._state(part.names, part), part) for part in rule.parts]

    def _state(self, names: Sequence[str], part: TitanTensor) -> str:
        full = [
            self._present([f"{STATE}{name}.{moment}" for name in names], part, WEIGHTS_ONLY)
            for moment in MOMENTS
        ]
        return full[0].removesuffix(f".{MOMENTS[0]}")

    def _present(self, names: Sequence[str], part: TitanTensor, hint: str | None = None) -> str:
        """The first of the names that is there, after a check of its size."""
        tensors = self.index.tensors
        name = next((name for name in names if name in tensors), None)
        if name is None:
            closest = nearest(names[0], tensors)
            raise StrettoError(
                f"{self.index.folder} has no tensor {' or '.join(names)}, {list(part.shape)} in the model",
                hint=hint or (closest and f"the nearest name in it is {closest}") or "is it torchtitan's?",
            )
        if (shape := tensors[name].shape) != tuple(part.shape):
            raise StrettoError(
                f"{name} has shape {list(shape)} in {self.index.folder}, but {list(part.shape)} in the model",
                hint="--model must be the model that was trained",
            )
        return name


# ------------------------------------------------------------------ the optimiser

GROUP = "optimizer.param_groups."
STATE = "optimizer.state."
_STATES = ("step", *MOMENTS)
WEIGHTS_ONLY = "--weights-only imports the model without its optimiser"


def read_optimiser(
    archives: Archives,
    names_there: Mapping[str, Sequence[str]],
    shapes: Mapping[str, Sizes],
    notes: list[str],
) -> tuple[Optimiser, int]:
    """The optimiser as it was set, and the updates that its states count.

    Args:
        names_there: by the name of our parameter, those that the optimiser there has for it.
        shapes: of our parameters.
        notes: to which a sentence is added for each setting that is different here.

    Raises:
        StrettoError: it is not AdamW, or counts differ.
    """
    names = [name for each in names_there.values() for name in each]
    _check_states(archives.index, names)
    counts = {archives.count(f"{STATE}{name}.step", 0) for name in names}
    if len(counts) > 1:
        raise StrettoError(
            f"{archives.index.folder}: the optimiser made {min(counts)} updates of some weights and "
            f"{max(counts)} of others, here all have the same",
            hint=WEIGHTS_ONLY,
        )
    rate = _rate(archives, names[0])
    if rate is None:
        notes.append("the optimiser's settings are not in the checkpoint: they are AdamW's usual ones")
        return Optimiser(), counts.pop()
    decay, spared = _decay(archives, names_there, shapes, notes)
    if decay and not _setting(archives, names[0], "decoupled_weight_decay", True):
        notes.append("the weight decay of Adam was part of its gradient; that of AdamW here is not")
    optimiser = Optimiser(
        lr=rate,
        betas=_betas(archives, names[0]),
        eps=_setting(archives, names[0], "eps", 1e-8),
        weight_decay=decay,
        no_decay=spared,
    )
    return optimiser, counts.pop()


def _check_states(index: DcpIndex, names: Sequence[str]) -> None:
    """Refuse states that AdamW does not have, or of parameters that the model does not have."""
    expected = {f"{STATE}{name}.{state}" for name in names for state in _STATES}
    states = {name for name in (*index.tensors, *index.objects) if name.startswith(STATE)}
    for verb, wrong in (("has", states - expected), ("lacks", expected - states)):
        if wrong:
            raise StrettoError(
                f"{index.folder} {verb} the optimiser's state {min(wrong)}, one of {len(wrong)}; here they "
                f"are AdamW's {', '.join(_STATES)} of each parameter",
                hint=WEIGHTS_ONLY,
            )


def _rate(archives: Archives, name: str) -> float | None:
    """Return the peak learning rate, or None if the checkpoint has no settings of the optimiser."""
    for key in ("amsgrad", "maximize"):
        if _setting(archives, name, key, False):
            raise StrettoError(
                f"{archives.index.folder}: AdamW with {key} is not AdamW here", hint=WEIGHTS_ONLY
            )
    rate = _setting(archives, name, "initial_lr", 0.0) or _setting(archives, name, "lr", 0.0)
    return rate or None


def _decay(
    archives: Archives,
    names_there: Mapping[str, Sequence[str]],
    shapes: Mapping[str, Sizes],
    notes: list[str],
) -> tuple[float, tuple[str, ...]]:
    """Weight decay, and the parameters without it that would have it here."""
    decay = {
        parameter: max(_setting(archives, name, "weight_decay", 0.0) for name in each)
        for parameter, each in names_there.items()
    }
    decaying = [parameter for parameter in names_there if decays(parameter, shapes[parameter])]
    default = max((decay[parameter] for parameter in decaying), default=0.0)
    if norms := [parameter for parameter in names_there if decay[parameter] and parameter not in decaying]:
        notes.append(
            f"{len(norms)} norms and biases had a weight decay of {decay[norms[0]]}; here they have none"
        )
    if other := [parameter for parameter in decaying if decay[parameter] not in (0.0, default)]:
        notes.append(f"the weight decay of {other[0]} was {decay[other[0]]}; here it is {default} for all")
    return default, tuple(parameter for parameter in decaying if default and not decay[parameter])


def _betas(archives: Archives, name: str) -> tuple[float, float]:
    full = f"{GROUP}{name}.betas"
    value = archives.read_object(full) if full in archives.index.objects else None
    if isinstance(value, tuple | list):
        numbers = cast("Sequence[Any]", value)
        if len(numbers) == 2 and all(type(beta) is float and 0.0 <= beta < 1.0 for beta in numbers):
            return numbers[0], numbers[1]
    raise StrettoError(f"{full} in {archives.index.folder} is no pair of numbers below 1", hint=WEIGHTS_ONLY)


def _setting(archives: Archives, name: str, key: str, otherwise: float) -> float:
    return archives.number(f"{GROUP}{name}.{key}", otherwise)
