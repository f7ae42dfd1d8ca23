"""Export a checkpoint's model, tensor by tensor, to a folder that `transformers` loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.engine.checkpoint.files import check_room
from stretto.engine.checkpoint.huggingface.folder import CONFIG, MAP, WEIGHTS, write_json
from stretto.engine.checkpoint.huggingface.importing import Progress
from stretto.engine.checkpoint.read import StoredTensors, shape_of
from stretto.engine.checkpoint.storage import TensorSource, dtype_name, write_tensors
from stretto.engine.models.huggingface import WeightRule, rules
from stretto.engine.models.peft import merged
from stretto.engine.models.weights import check_weights
from stretto.errors import StrettoError
from stretto.job.huggingface.read import config_to_huggingface
from stretto.job.lora import is_adapter
from stretto.job.parameters import parameter_shapes
from stretto.job.shape import ModelShape

SHARD_BYTES = 5 * 10**9  # a larger model is written to several files, like by transformers
PUBLIC = 0o666  # file mode before the umask: exports are meant to be shared
PARTIAL = ".partial"


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One tensor to write: number `index` of those that `rule` splits a plain tensor into."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rule: WeightRule
    index: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def export_huggingface(
    path: str | Path,
    out: str | Path,
    shard_bytes: int = SHARD_BYTES,
    *,
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
    merge: bool = False,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the model of a checkpoint so that `transformers` loads it with `from_pretrained(out)`.

    One tensor at a time is in memory. Neither optimiser states nor tokeniser are written.

    Args:
        shard_bytes: maximum size of a file in bytes, unless it has a single larger tensor.
        dtype: dtype of the weights, by default that of the checkpoint.
        config: additional fields of config.json, such as `eos_token_id`.
        merge: add adapters to the weights of their linears; a model without adapters is written unchanged.
        progress: called with the bytes written so far, and the total.

    Returns:
        The files written.

    Raises:
        StrettoError: the checkpoint is damaged, `transformers` has no such model, the folder already has an
            export, or the disk is too full.
    """
    out = Path(out)
    if taken := [name for name in (CONFIG, WEIGHTS, MAP) if (out / name).exists()]:
        raise StrettoError(f"{out} already holds {taken[0]}", hint="export to a new folder")
    with StoredTensors(path) as stored:
        adapted = shape_of(path, stored.meta)
        if adapted.lora is not None and not merge:
            raise StrettoError(
                f"the model in {path} has adapters",
                hint="--adapters writes them, --merge adds them to the weights",
            )
        shape = replace(adapted, lora=None)
        parts = _parts(stored, shape, dtype)
        sizes: dict[torch.dtype, int] = {}
        for part in parts:
            sizes[part.dtype] = sizes.get(part.dtype, 0) + part.bytes
        main_dtype = dtype_name(max(sizes, key=lambda dtype: sizes[dtype]))
        described = {**config_to_huggingface(shape), **(config or {}), "dtype": main_dtype}
        total = sum(part.bytes for part in parts)
        check_room(out, total, f"the model in {path}")
        out.mkdir(parents=True, exist_ok=True)
        files = list(_files(parts, shard_bytes))
        many = len(files)
        names = [f"model-{i:05d}-of-{many:05d}.safetensors" for i in range(1, many + 1)]
        names = [WEIGHTS] if many == 1 else names
        source = _Source(stored, total, progress, adapted)
        try:
            for name, file in zip(names, files, strict=True):
                (out / (name + PARTIAL)).unlink(missing_ok=True)
                entries = [source.entry(part) for part in file]
                write_tensors(out / (name + PARTIAL), entries, {"format": "pt"}, PUBLIC)
        except BaseException as error:
            for name in names:
                (out / (name + PARTIAL)).unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise StrettoError(f"{out} cannot be written: {error.strerror or error}") from None
            raise
    for name in names:
        (out / (name + PARTIAL)).rename(out / name)
    if many > 1:
        weight_map = {part.name: name for name, file in zip(names, files, strict=True) for part in file}
        write_json(out / MAP, {"metadata": {"total_size": total}, "weight_map": weight_map})
        names.append(MAP)
    write_json(out / CONFIG, described)
    return [out / name for name in [*names, CONFIG]]


class _Source:
    """The tensors to write, in the order of the rules, so that each plain tensor is read once."""

    def __init__(
        self, stored: StoredTensors, total: int, progress: Progress | None, shape: ModelShape
    ) -> None:
        self._stored, self._total = stored, total
        self._progress, self._shape = progress, shape
        self._split: tuple[str, list[Tensor]] = ("", [])
        self._done = 0

    def entry(self, part: _Part) -> TensorSource:
        """Return the tensor as a source for `write_tensors`."""
        return TensorSource(part.name, dtype_name(part.dtype), part.shape, lambda: self._get(part))

    def _get(self, part: _Part) -> Tensor:
        self._done += part.bytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        if self._split[0] != part.rule.plain_name:
            self._split = ("", [])  # frees the previous tensor before the next is read
            self._split = (part.rule.plain_name, part.rule.split(self._merged(part.rule.plain_name)))
        return self._split[1][part.index].to(part.dtype)

    def _merged(self, name: str) -> Tensor:
        """Return a plain weight, merged with its adapters."""
        weight, lora = self._stored.read(name), self._shape.lora
        linear = name.removesuffix(".weight")
        first, _, inner = linear.partition(".")
        number, _, module = inner.partition(".")
        if lora is None or first != "blocks" or not (adapted := lora.adapted(module)) or linear == name:
            return weight
        factors = {
            projection: tuple(self._stored.read(f"{linear}.lora.{projection}.{f}.weight") for f in "AB")
            for projection in adapted
        }
        return merged(weight, module, factors, self._shape.block(int(number)))


def _parts(stored: StoredTensors, shape: ModelShape, dtype: torch.dtype | None) -> list[_Part]:
    """Return the tensors to write, in the plain model's order; checks that the checkpoint has all of them."""
    mapping = list(rules(shape))
    saved = {name: entry for name, entry in stored.saved.items() if not is_adapter(name)}
    check_weights(
        {name: torch.empty(entry.shape, device="meta") for name, entry in saved.items()},
        parameter_shapes(shape),
    )
    return [
        _Part(
            name=name,
            dtype=dtype or getattr(torch, stored.saved[rule.plain_name].dtype),
            shape=tuple(sizes),
            rule=rule,
            index=i,
        )
        for rule in mapping
        for i, (name, sizes) in enumerate(rule.sizes.items())
    ]


def _files(parts: list[_Part], limit: int) -> Iterator[list[_Part]]:
    """Yield the parts of each file."""
    file, size = list[_Part](), 0
    for part in parts:
        if file and size + part.bytes > limit:
            yield file
            file, size = list[_Part](), 0
        file.append(part)
        size += part.bytes
    yield file
