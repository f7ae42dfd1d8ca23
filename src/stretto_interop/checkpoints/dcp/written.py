"""A checkpoint of another framework written as one of ours, whatever it was read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from stretto.engine.checkpoint.files import check_room
from stretto.engine.checkpoint.folder import checkpoints
from stretto.engine.checkpoint.save import save
from stretto.engine.checkpoint.shards import Streamed
from stretto.errors import StrettoError
from stretto.job.optimiser import Optimiser
from stretto.job.shape import ModelShape, shape_to_record
from stretto_interop.checkpoints.dcp.archive import Archives

Progress = Callable[[int, int], object]  # bytes written so far, of all


@dataclass(frozen=True)
class Incoming:
    """One of our tensors, and how its values are read out of theirs."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        """Bytes of it in memory."""
        return prod(self.shape) * self.dtype.itemsize


class OpenImport:
    """A checkpoint of another framework, opened and checked against the shape of its model; no weight has
    been read yet.

    Attributes:
        source: the folder of the step.
        step: of training.
        samples, tokens: seen so far.
        optimiser: AdamW as it was set, where its states are imported.
        updates: of the weights, which its states count.
        parameters: of the model, each counted once.
        notes: what is different here, a sentence each.
        tensors: of the new checkpoint.
    """

    source: Path
    shape: ModelShape
    parameters: int
    tensors: Sequence[Incoming]
    step: int
    updates: int
    samples: int
    tokens: int
    optimiser: Optimiser | None
    notes: list[str]
    archives: Archives

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self.archives.close()

    @property
    def bytes(self) -> int:
        """Bytes of the new checkpoint."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def dtype(self) -> str:
        """The type of most values."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in self.tensors:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.bytes
        return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")

    def check_head(self) -> None:
        """Check that a head in the files equals the embedding that it is tied to."""
        raise NotImplementedError

    def write(
        self, run: Path, meta: Mapping[str, Any] | None = None, progress: Progress | None = None
    ) -> Path:
        """Write `run`/checkpoints/step-N; one of the tensors at a time is in memory.

        Args:
            meta: what the checkpoint's `meta` has beside what is known of the model and the optimiser.
            progress: called with the bytes written so far, and with all that there are.

        Returns:
            The checkpoint's path.

        Raises:
            StrettoError: the run has checkpoints, or the source is damaged.
        """
        folder = run / "checkpoints"
        if checkpoints(folder):
            raise StrettoError(f"{folder} already holds checkpoints", hint="import into a new run folder")
        check_room(folder, self.bytes, f"the checkpoint in {self.source}")
        self.check_head()
        done, total = 0, self.bytes

        def read(tensor: Incoming) -> Tensor:
            nonlocal done
            tensor_value = tensor.read()
            done += tensor.bytes
            if progress is not None:
                progress(done, total)
            return tensor_value

        streamed = {
            tensor.name: Streamed(
                tensor.shape,
                tensor.dtype,
                {(0,) * len(tensor.shape): (tensor.shape, lambda t=tensor: read(t))},
            )
            for tensor in self.tensors
        }
        meta_of_model: dict[str, Any] = {
            "model": shape_to_record(self.shape),
            "imported": self.source.resolve().name,
        }
        step = 0
        if self.optimiser is not None:
            step = self.step
            meta_of_model |= {
                "step": step,
                "updates": self.updates,
                "samples": self.samples,
                "tokens": self.tokens,
            }
            meta_of_model["config"] = {"optim": asdict(self.optimiser)}
        return save(folder, step, streamed, {**meta_of_model, **(meta or {})})
