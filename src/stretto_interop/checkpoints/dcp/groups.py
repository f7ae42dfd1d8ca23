"""AdamW's settings and counts in a torchtitan checkpoint: `optimizer.param_groups.NAME.lr` and the like, once
for every parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from stretto.engine.optim.base import decays
from stretto.errors import StrettoError
from stretto.job.optimiser import Optimiser
from stretto.job.parameters import Sizes
from stretto_interop.checkpoints.dcp.archive import Archives
from stretto_interop.checkpoints.dcp.index import DcpIndex

GROUP = "optimizer.param_groups."
STATE = "optimizer.state."
MOMENTS = ("exp_avg", "exp_avg_sq")
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
    """The peak learning rate; None where nothing is said of settings."""
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
