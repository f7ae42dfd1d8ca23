"""Time and bytes of each layer of a model, measured or predicted, read from and written to JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from stretto.errors import StrettoError, nearest
from stretto.job.chain import layer_of
from stretto.job.flops import layer_names
from stretto.job.job import Job
from stretto.planner.assumptions import Assumptions
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.rank_parameters import Shares
from stretto.planner.counts.state_bytes import StateConfig, state_bytes
from stretto.planner.estimate import precision_of
from stretto.planner.machines.cluster import Cluster
from stretto.planner.memory.layer import layer_saved, total
from stretto.planner.memory.ranks import message_bytes
from stretto.planner.memory.transient import TIED, stage_units
from stretto.planner.time.step import stage_time
from stretto.program.action import ActionKind
from stretto.program.program import Program
from stretto.versions import LAYERS


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One layer and one microbatch.

    Attributes:
        forward, backward: seconds; the backward is whole, gradients of input and of weights.
        weight: seconds of the backward spent on the gradient of weights, or None for half of it.
        parameters: bytes of its weights, including those that it shares with other layers.
        activations: bytes that it keeps from its forward to its backward, beyond what earlier layers keep.
        input: bytes of its input, a part of `activations`.
        output: bytes of its output.
    """

    name: str
    forward: float
    backward: float
    parameters: int = 0
    activations: int = 0
    output: int = 0
    weight: float | None = None
    input: int = 0

    @property
    def halves(self) -> tuple[float, float]:
        """Seconds of the gradient of the input, and of that of weights."""
        weight = self.backward / 2 if self.weight is None else self.weight
        return self.backward - weight, weight


@dataclass(frozen=True)
class SharedWeights:
    """Weights that several layers share; a rank with more than one of these layers holds them once."""

    layers: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class ModelProfile:
    """All layers in the order in which they run; `about` says what was measured, and on which machine."""

    layers: tuple[LayerProfile, ...]
    shared: tuple[SharedWeights, ...] = ()
    about: str = ""


_KEYS = {
    "name": "name",
    "forward_s": "forward",
    "backward_s": "backward",
    "weight_gradient_s": "weight",
    "parameter_bytes": "parameters",
    "activation_bytes": "activations",
    "input_bytes": "input",
    "output_bytes": "output",
}
_LARGEST = 1e18
_NEEDED = ("forward_s", "backward_s")


def profile_json(profile: ModelProfile) -> dict[str, Any]:
    """The profile as `read_profile` takes it."""
    return {
        "format": LAYERS.name,
        "version": LAYERS.version,
        "about": profile.about,
        "layers": [
            {key: getattr(layer, field) for key, field in _KEYS.items() if getattr(layer, field) is not None}
            for layer in profile.layers
        ],
        "shared": [{"layers": list(weights.layers), "bytes": weights.bytes} for weights in profile.shared],
    }


def read_profile(text: str, source: str) -> ModelProfile:
    """A profile from JSON: {"layers": [{"forward_s": ..., "backward_s": ..., ...}, ...]}, or the list alone.

    Args:
        source: the file, for messages.

    Raises:
        StrettoError: not JSON, a key that is unknown or missing, a number that is negative or not finite.
    """
    try:
        parsed: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StrettoError(f"{source} is not JSON: {error}", hint=_EXAMPLE) from None
    document = cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {"layers": parsed}
    LAYERS.check(document.get("version", 1), source)  # one written by hand has none
    rows = document.get("layers")
    if not isinstance(rows, list) or not rows:
        raise StrettoError(f"{source} has no list of layers", hint=_EXAMPLE)
    layers = [_layer(row, index, source) for index, row in enumerate(cast("list[Any]", rows))]
    together = document.get("shared") or []
    if not isinstance(together, list):
        raise _not_shared(together, len(layers), source)
    shared = [_shared(entry, len(layers), source) for entry in cast("list[Any]", together)]
    return ModelProfile(tuple(layers), tuple(shared), str(document.get("about", "")))


_EXAMPLE = 'write {"layers": [{"name": "block 0", "forward_s": 0.01, "backward_s": 0.02}, ...]}'


def _layer(row: Any, index: int, source: str) -> LayerProfile:
    location = f"{source}: layers[{index}]"
    if not isinstance(row, Mapping):
        raise StrettoError(f"{location} is {row!r}, must be an object", hint=_EXAMPLE)
    values = cast("Mapping[str, Any]", row)
    for key in values:
        if key not in _KEYS:
            nearest_key = nearest(key, _KEYS)
            raise StrettoError(
                f"{location} has {key!r}",
                hint=f"did you mean {nearest_key!r}?" if nearest_key else f"keys are {', '.join(_KEYS)}",
            )
    for key in _NEEDED:
        if key not in values:
            raise StrettoError(f"{location} has no {key}", hint=f"needed are {' and '.join(_NEEDED)}")
    arguments: dict[str, Any] = {_KEYS[key]: _value(key, value, location) for key, value in values.items()}
    arguments.setdefault("name", f"layer {index}")
    layer = LayerProfile(**arguments)
    for part, sum_field in (("weight_gradient_s", "backward_s"), ("input_bytes", "activation_bytes")):
        if (values.get(part) or 0) > (values.get(sum_field) or 0):
            raise StrettoError(
                f"{location}: {part} is {values[part]}, more than {sum_field}",
                hint=f"it is a part of {sum_field}",
            )
    return layer


def _value(key: str, value: Any, location: str) -> Any:
    if key == "name":
        return str(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < _LARGEST:
        raise StrettoError(f"{location}: {key} is {value!r}", hint="a number from 0 to 1e18")
    return int(value) if key.endswith("_bytes") else float(value)


def _shared(row: Any, layers: int, source: str) -> SharedWeights:
    try:
        weights = SharedWeights(tuple(int(layer) for layer in row["layers"]), int(row["bytes"]))
    except (TypeError, KeyError, ValueError, OverflowError):
        weights = SharedWeights((), 0)
    within = all(0 <= layer < layers for layer in weights.layers)
    if len(set(weights.layers)) < 2 or not 0 <= weights.bytes < _LARGEST or not within:
        raise _not_shared(row, layers, source)
    return weights


def _not_shared(value: object, layers: int, source: str) -> StrettoError:
    return StrettoError(
        f"{source}: shared has {value!r}",
        hint=f'write {{"layers": [0, {layers - 1}], "bytes": 4096}}, of two layers or more',
    )


assert set(_KEYS.values()) == {field.name for field in fields(LayerProfile)}


def names(layers: Sequence[LayerProfile]) -> str:
    """The names of a stage's layers in short: the first and the last."""
    return layers[0].name if len(layers) == 1 else f"{layers[0].name} to {layers[-1].name}"


def predicted_profile(
    job: Job, cluster: Cluster, assumptions: Assumptions, program: Program
) -> tuple[ModelProfile, float]:
    """Time and bytes of every layer on one rank of the job, and the bytes of states per byte of weights.

    Blocks are recomputed as the job says; recompute mode `auto` is taken as none.
    """
    shape, compute = job.shape, ComputeConfig.of(job)
    split = any(action.kind is ActionKind.W for order in program.orders for action in order)
    shares = Shares.of(compute)
    keep = StateConfig.of(job, program)
    layers: list[LayerProfile] = []
    weights = states = tied = 0
    for layer, name in enumerate(layer_names(shape)):
        time = stage_time(
            job, cluster, assumptions, precision_of(job), range(layer, layer + 1), unsplit=not split
        )
        forward, back, weight = time.times
        units = stage_units(shape, (layer,), shares, keep, None).units
        state = state_bytes(units)
        weights, states = weights + state.weights, states + state.total
        shared = [u.weights for u in units if shape.tied and any(p.name == TIED for p in u.parameters)]
        tied = max([tied, *shared])
        output = 0 if layer == shape.chain - 1 else message_bytes(shape, compute, layer + 1)
        chain_layer, mode = layer_of(shape, layer), job.recompute.mode
        layer_compute = replace(compute.for_layer(chain_layer), recompute="none" if mode == "auto" else mode)
        saved_bytes = total(layer_saved(chain_layer.kind, chain_layer.shape, layer_compute))
        layers.append(
            LayerProfile(
                name=name,
                forward=forward,
                backward=back + weight,
                parameters=state.weights,
                activations=saved_bytes,
                output=output,
                weight=weight,
                input=min(saved_bytes, output),
            )
        )
    shared_layers = (SharedWeights((0, len(layers) - 1), tied),) if tied else ()
    about = f"predicted: {cluster.device.name}, microbatches of {job.micro_batch} x {job.sequence} tokens"
    return ModelProfile(tuple(layers), shared_layers, about), states / weights
