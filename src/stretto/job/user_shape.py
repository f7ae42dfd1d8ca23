"""The shape of a model that a user's file builds: its layers by name, and no sizes of a transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.errors import StrettoError
from stretto.job.shape import ModelShape


class UserShape(ModelShape):
    """What is known of a model from a file once it has been built and run on a sample.

    Everything else that a `ModelShape` has, such as `hidden`, is unknown: reading it raises StrettoError, so
    nothing that needs it (predictions, tensor parallelism, generation) can compute with an invented value.

    Attributes:
        build: FILE.py:NAME of the function that returns the layers.
        arguments: keyword arguments of the function.
        layer_names: in the order in which they are called.
        parameters: name and sizes of every parameter, in the order of the layers; shared ones once.
        shared: parameters that several layers have, by their first names.
        vocab: number of the logits of a token.
        sequence: tokens of the samples.
    """

    build: str
    arguments: Mapping[str, Any]
    layer_names: tuple[str, ...]
    parameters: Mapping[str, tuple[int, ...]]
    shared: tuple[str, ...]

    def __init__(
        self,
        *,
        build: str,
        arguments: Mapping[str, Any],
        layer_names: Sequence[str],
        parameters: Mapping[str, tuple[int, ...]],
        shared: Sequence[str],
        vocab: int,
        sequence: int,
    ) -> None:
        values = {"build": build, "arguments": dict(arguments), "parameters": dict(parameters)}
        values |= {"layer_names": tuple(layer_names), "shared": tuple(shared), "tied": bool(shared)}
        # parts that only Stretto's own models have
        values |= {"encoder_layers": 0, "moe": None, "lora": None, "rope": None, "unmodelled_features": ()}
        self.__dict__.update(values, vocab=vocab, sequence=sequence)

    def __getattribute__(self, name: str) -> Any:
        values = object.__getattribute__(self, "__dict__")
        if name in values or name not in _FIELDS:
            return object.__getattribute__(self, name)
        raise StrettoError(
            f"the model is from a file, {values.get('build')}: its {name}, and what its layers compute and "
            "store, are unknown",
            hint="it can be trained, evaluated and verified; plans, predictions and everything else "
            "take a model.preset or a model.family",
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserShape) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((self.build, self.layer_names, self.sequence))

    def __repr__(self) -> str:
        return f"UserShape({self.build}, {len(self.layer_names)} layers)"

    @property
    def title(self) -> str:
        """The function that builds the model."""
        return self.build

    @property
    def chain(self) -> int:
        """Number of layers."""
        return len(self.layer_names)

    @property
    def unsupported_parts(self) -> tuple[str, ...]:
        """Return an empty tuple: all of the model has been built."""
        return ()

    @property
    def pretraining_sequence(self) -> int:
        """Tokens of a sample."""
        return self.sequence

    def record(self) -> dict[str, Any]:
        """Return what checkpoints have of the model, as JSON."""
        return {
            "family": self.build,
            "vocab": self.vocab,
            "parameters": {name: list(sizes) for name, sizes in self.parameters.items()},
        }


_FIELDS = frozenset(ModelShape.__dataclass_fields__)
