"""Import a model of Hugging Face, tensor by tensor, as a checkpoint of step 0."""

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

_COMPARED = 1 << 22  # elements compared at a time between a tied head and the embedding

Progress = Callable[[int, int], object]  # bytes written so far, total bytes


@dataclass(frozen=True)
class _Part:
    """One plain tensor: its rule, the names in the files, and the resulting dtype and shape."""

    rule: WeightRule
    names: list[str]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Importing:
    """A folder's model, opened and checked against its config.json; the constructor reads no weights.

    Attributes:
        config: the parsed config.json.
        notes: sentences about parts of the folder that are left out, converted or unknown.
        shape: shape of the model.
        parameters: number of parameters.
        bytes: size of the checkpoint.
        dtypes: bytes of each dtype, such as {"bfloat16": 16060522496}.

    Raises:
        StrettoError: a file is missing or damaged, the model is not supported, or weights are missing,
            unknown or of another size than in config.json.
    """

    def __init__(self, source: Path, adapters: Path | None = None) -> None:
        """
        Args:
            adapters: a folder of `peft` with adapters of this model.
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
                f"config.json has the unknown fields {', '.join(reading.unknown[:8])}: if they change what "
                "the model computes, the imported model computes something else"
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
        """The dtype of most weights, by bytes."""
        return max(self.dtypes, key=lambda name: self.dtypes[name])

    def _matched(self) -> list[_Part]:
        """Check all names, dtypes and sizes; return a part for every parameter."""
        tensors, shape = self._weights.tensors, self.shape
        layers = shape.layers + shape.encoder_layers
        if layers > len(tensors):  # checked before any loop over layers
            raise StrettoError(
                f"{self.source / CONFIG} has {layers} layers, but the files have {len(tensors)} tensors",
                hint="config.json and weights are of different models, or files are missing",
            )
        names = plain_names(tensors, shape)
        if left_out := sorted(tensors.keys() - names.values()):
            self.notes.append(
                f"{len(left_out)} tensors that the model does not use are left out, such as {left_out[0]}"
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
        """Check that a tied head in the files equals the embedding, bit for bit."""
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
        """Check that `run` has no checkpoints, and that its disk has enough free space.

        Raises:
            StrettoError: otherwise.
        """
        folder = run / "checkpoints"
        if checkpoints(folder):
            raise StrettoError(f"{folder} already holds checkpoints", hint="import into a new run folder")
        check_room(folder, self.bytes, f"the model in {self.source}")

    def write(self, run: Path, meta: dict[str, Any] | None = None, progress: Progress | None = None) -> Path:
        """Write `run`/checkpoints/step-00000000, which appears once it is complete; one tensor at a time is
        in memory.

        Args:
            meta: additional fields of the checkpoint's `meta`, which has `model` and `imported`.
            progress: called with the bytes written so far, and the total.

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
            # tensors that are stacked by rows are written one by one, without a copy
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
    """Write `run`/checkpoints/step-00000000 from a folder with config.json and safetensors files.

    It has only the model, in the files' dtypes; its `meta` has `model` and `imported`.

    Raises:
        StrettoError: as for `Importing`, or the run has checkpoints, or its disk is too full.
    """
    with Importing(Path(source)) as model:
        model.check_place(Path(run))
        model.check_head()
        return model.write(Path(run))
