"""A model of Hugging Face to a checkpoint of step 0, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.engine.checkpoint.files import check_room
from stretto.engine.checkpoint.folder import checkpoints
from stretto.engine.checkpoint.huggingface.adapters import read_adapters
from stretto.engine.checkpoint.huggingface.blocks import PlainWeights
from stretto.engine.checkpoint.huggingface.folder import CONFIG, PublishedWeights, check_links, read_json
from stretto.engine.checkpoint.index import MODEL
from stretto.engine.checkpoint.save import save
from stretto.engine.checkpoint.shards import Streamed
from stretto.engine.checkpoint.storage import dtype_name
from stretto.engine.models.huggingface import HEAD, StackedRows, WeightRule, plain_names, rules
from stretto.engine.models.weights import check_weights
from stretto.errors import StrettoError
from stretto.job.huggingface.read import read_file
from stretto.job.parameters import parameter_shapes
from stretto.job.shape import check_built, shape_to_record

_COMPARED = 1 << 22  # elements at a time, of a head that must equal the embedding

Progress = Callable[[int, int], object]  # bytes written so far, of all


@dataclass(frozen=True)
class _Part:
    """One of our tensors: its rule, the names in the files, and what comes of them."""

    rule: WeightRule
    names: list[str]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Importing:
    """A folder's model, opened and checked against its config.json; no weight has been read yet.

    Attributes:
        config: the parsed config.json.
        notes: what of the folder is left out, converted or not known, in sentences.
        shape: of the model.
        parameters: their number.
        bytes: of the checkpoint.
        dtypes: bytes of each type, such as {"bfloat16": 16060522496}.

    Raises:
        StrettoError: not such a folder, a damaged file, a model that cannot be built here, or weights that
            are missing, unknown or of another size than config.json says.
    """

    def __init__(self, source: Path, adapters: Path | None = None) -> None:
        """
        Args:
            adapters: a folder of `peft`'s, with adapters of this model.
        """
        self.source = source
        check_links(source)
        self._adapters = dict[str, Tensor]()
        self.config = read_json(source, CONFIG)
        reading = read_file(source)
        check_built(reading.shape)
        self.shape = reading.shape
        self.notes = list(reading.notes)
        if reading.unknown:
            self.notes.append(
                f"config.json says {', '.join(reading.unknown[:8])}, which is not known here: if this "
                "changes what the model computes, the import computes something else"
            )
        self._head: str | None = None
        self._weights = PlainWeights(PublishedWeights(source), self.config)
        try:
            self.notes += self._weights.notes
            self._parts = self._matched()
            if adapters is not None:
                lora, self._adapters = read_adapters(adapters, self.shape)
                self.shape = replace(self.shape, lora=lora)
        except BaseException:
            self.close()
            raise
        self.parameters = sum(torch.Size(part.shape).numel() for part in self._parts)
        self.parameters += sum(factor.numel() for factor in self._adapters.values())
        self.bytes = sum(part.bytes for part in self._parts)
        self.dtypes: dict[str, int] = {}
        for part in self._parts:
            name = dtype_name(part.dtype)
            self.dtypes[name] = self.dtypes.get(name, 0) + part.bytes

    def __enter__(self) -> Importing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files."""
        self._weights.close()

    @property
    def dtype(self) -> str:
        """The type of most weights."""
        return max(self.dtypes, key=lambda name: self.dtypes[name])

    def _matched(self) -> list[_Part]:
        """A part for every parameter, after a check of all names, types and sizes."""
        tensors, shape = self._weights.tensors, self.shape
        layers = shape.layers + shape.encoder_layers
        if layers > len(tensors):  # before anything is counted layer by layer
            raise StrettoError(
                f"{self.source / CONFIG} says {layers} layers, and the files hold {len(tensors)} tensors",
                hint="config.json and weights are of different models, or files are missing",
            )
        names = plain_names(tensors, shape)
        if left_out := sorted(tensors.keys() - names.values()):
            self.notes.append(
                f"{len(left_out)} tensors that the model has no use for are left out, such as {left_out[0]}"
            )
        if shape.tied:
            self._head = names.pop(HEAD, None)
        for name in names.values():
            if not (tensor := tensors[name]).dtype.is_floating_point:
                raise StrettoError(
                    f"weight {name!r} in {tensor.file} has type {dtype_name(tensor.dtype)}",
                    hint="import the original weights, in bfloat16, float16 or float32",
                )
        mapping = list(rules(shape, names))
        check_weights(
            {plain: torch.empty(tensors[name].shape, device="meta") for plain, name in names.items()},
            {name: sizes for rule in mapping for name, sizes in rule.sizes.items()},
        )
        plain_shapes = parameter_shapes(shape)
        parts = list[_Part]()
        for rule in mapping:
            hf_names = [names[name] for name in rule.hf_names]
            dtype = reduce(torch.promote_types, (tensors[name].dtype for name in hf_names))
            parts.append(_Part(rule, hf_names, dtype, tuple(plain_shapes[rule.plain_name])))
        return parts

    def check_head(self) -> None:
        """Check that a head in the files equals the embedding that it is tied to, bit for bit."""
        if self._head is None:
            return
        embedding = next(part for part in self._parts if part.rule.plain_name == "embed.tok.weight")
        tied, head = self._weights.read(embedding.names[0]), self._weights.read(self._head)
        is_alike = tied.shape == head.shape and tied.dtype == head.dtype
        pairs = zip(tied.reshape(-1).split(_COMPARED), head.reshape(-1).split(_COMPARED), strict=False)
        if not is_alike or not all(torch.equal(a, b) for a, b in pairs):
            raise StrettoError(
                f"weight {HEAD!r} differs from the embedding, but the model's head is tied to it",
                hint='"tie_word_embeddings": false in config.json',
            )

    def check_place(self, run: Path) -> None:
        """Check that `run` has no checkpoints, and that its disk has room.

        Raises:
            StrettoError: it has; or it has not.
        """
        folder = run / "checkpoints"
        if checkpoints(folder):
            raise StrettoError(f"{folder} already holds checkpoints", hint="import into a new run folder")
        check_room(folder, self.bytes, f"the model in {self.source}")

    def write(self, run: Path, meta: dict[str, Any] | None = None, progress: Progress | None = None) -> Path:
        """Write `run`/checkpoints/step-00000000; one of the tensors at a time is in memory. Until it is
        complete there is no checkpoint.

        Args:
            meta: what the checkpoint's `meta` has beside `model` and `imported`.
            progress: called with the bytes written so far, and with all that there are.

        Returns:
            The checkpoint's path.
        """
        done = 0

        def read(part: _Part) -> Tensor | Iterable[Tensor]:
            nonlocal done
            done += part.bytes
            if progress is not None:
                progress(done, self.bytes)
            sources = (self._weights.read(name).to(part.dtype) for name in part.names)
            # parts that are consecutive rows are written as they are read, without a copy
            return sources if isinstance(part.rule.form, StackedRows) else part.rule.join(list(sources))

        tensors = {
            MODEL + part.rule.plain_name: Streamed(
                part.shape, part.dtype, {(0,) * len(part.shape): (part.shape, lambda p=part: read(p))}
            )
            for part in self._parts
        }
        for name, factor in self._adapters.items():
            shape = tuple(factor.shape)
            tensors[MODEL + name] = Streamed(shape, factor.dtype, {(0, 0): (shape, lambda t=factor: t)})
        metadata = {"model": shape_to_record(self.shape), "imported": self.source.resolve().name}
        return save(run / "checkpoints", 0, tensors, metadata | (meta or {}))


def import_huggingface(source: str | Path, run: str | Path) -> Path:
    """Make `run`/checkpoints/step-00000000 from a folder with config.json and safetensors files. It holds
    only the model, in the files' dtype; its `meta` has `model` and `imported`.

    Raises:
        StrettoError: as `Importing`, or a run that has checkpoints or no room.
    """
    with Importing(Path(source)) as model:
        model.check_place(Path(run))
        model.check_head()
        return model.write(Path(run))
