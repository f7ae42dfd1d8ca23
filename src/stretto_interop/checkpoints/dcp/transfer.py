"""Checkpoints of other frameworks written as Stretto's, and Stretto's written in the format of
torch.distributed.checkpoint, from tensors that are fetched one by one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from stretto.engine.checkpoint.files import check_room, remove
from stretto.engine.checkpoint.folder import checkpoints
from stretto.engine.checkpoint.index import MODEL, OPTIM
from stretto.engine.checkpoint.manifest import Manifest, read_manifest
from stretto.engine.checkpoint.read import StoredTensors, shape_of
from stretto.engine.checkpoint.save import save
from stretto.engine.checkpoint.shards import Streamed
from stretto.engine.checkpoint.storage import run_collective
from stretto.errors import StrettoError
from stretto.job.optimiser import Optimiser, RateSchedule
from stretto.job.shape import ModelShape, shape_to_record
from stretto_interop.checkpoints.dcp.reader import Archives

# ------------------------------------------------------------------ import

MOMENTS = ("exp_avg", "exp_avg_sq")  # the states of AdamW
Progress = Callable[[int, int], object]  # bytes written so far, of all


@dataclass(frozen=True)
class Incoming:
    """A tensor of the new checkpoint, and how its values are read from the other framework's."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        """Bytes in memory."""
        return prod(self.shape) * self.dtype.itemsize


class OpenImport:
    """A checkpoint of another framework, open and checked against the shape of its model; no weight has been
    read yet.

    Attributes:
        source: folder of the step.
        step: training step.
        samples, tokens: seen so far.
        optimiser: AdamW's settings if its states are imported, else None.
        updates: number of weight updates that the states count.
        parameters: number of parameters of the model, each counted once.
        notes: differences from the source, a sentence each.
        tensors: those of the new checkpoint.
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
        """Write `run`/checkpoints/step-N, with one tensor at a time in memory.

        Args:
            meta: entries of the checkpoint's `meta` besides those about the model and the optimiser.
            progress: called with the bytes written so far and the total.

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


# ------------------------------------------------------------------ export


@dataclass(frozen=True, kw_only=True)
class ExportedCheckpoint:
    """What an export wrote.

    Attributes:
        step: training step of the optimiser's states, or None if only the model was written.
        notes: what was left out, a sentence each.
    """

    files: list[Path]
    step: int | None
    notes: list[str]


class _Named(Protocol):
    """A rule for a parameter."""

    @property
    def parameter(self) -> str:
        """The parameter's name in Stretto."""
        ...


R = TypeVar("R", bound=_Named)


@dataclass(frozen=True, kw_only=True)
class OpenExport(Generic[R]):
    """A checkpoint of Stretto whose model another framework has.

    Attributes:
        mapping: a rule for every parameter of the model.
    """

    manifest: Manifest
    shape: ModelShape
    mapping: Sequence[R]
    stored: StoredTensors


@contextmanager
def open_export(
    path: str | Path, out: Path, rules: Callable[[ModelShape], Iterable[R]], *, framework: str, form: str
) -> Generator[OpenExport[R]]:
    """Open a checkpoint that will be written to the new folder `out`.

    Args:
        rules: yields the other framework's rules for a model's parameters.
        framework, form: its name and its `--format`, for errors.

    Raises:
        StrettoError: a damaged checkpoint, a model that the framework does not have, or a folder with files.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StrettoError(f"{out} is not empty", hint="export to a new folder")
    manifest = read_manifest(path)
    shape = shape_of(path, manifest.meta)
    mapping = list(rules(shape))
    with StoredTensors(path, "") as stored:
        names = {MODEL + rule.parameter for rule in mapping}
        if extra := sorted(name for name in stored.saved if name.startswith(MODEL) and name not in names):
            raise StrettoError(
                f"{extra[0]}, one of {len(extra)} tensors that {path} has beside its model, has no "
                f"counterpart in {framework}",
                hint=f"export for transformers or PEFT instead, without --format {form}",
            )
        yield OpenExport(manifest=manifest, shape=shape, mapping=mapping, stored=stored)


def write_whole(state: dict[str, Any], out: Path, size: int, source: str | Path) -> list[Path]:
    """Write a state dict into the new folder `out`; if that fails, nothing is left there.

    Args:
        size: bytes of all tensors.
        source: what is exported, for errors.

    Returns:
        The files.

    Raises:
        StrettoError: no room.
    """
    check_room(out, size, f"the checkpoint {source}")
    existed = out.exists()
    try:
        writer, planner = _StreamingWriter(out), _StreamingPlanner()
        run_collective(lambda: dcp_save(state, storage_writer=writer, planner=planner, no_dist=True))
    except BaseException:
        for child in list(out.iterdir()) if out.is_dir() else ():
            remove(child)
        if out.is_dir() and not existed:
            out.rmdir()
        raise
    return [out / name for name in sorted(child.name for child in out.iterdir())]


class _StreamingWriter(FileSystemWriter):
    """torch's writer, changed to hold one tensor at a time; torch's own keeps all until its file is complete
    (torch 2.13).
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this process: objects first, as torch does, then the tensors one by one. A
        tensor with two names is written once.
        """
        name = f"{plan.storage_data.prefix}0.distcp"
        results, places = list[WriteResult](), dict[tuple[int, Any], _StorageInfo]()
        with (Path(self.path) / name).open("wb") as stream:
            for item in sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO):
                value, offset = planner.state_dict[item.index.fqn], stream.tell()  # pyright: ignore
                if (earlier := places.get((id(value), item.index.offset))) is not None:
                    results.append(WriteResult(item.index, earlier.length, earlier))
                    continue
                data = planner.resolve_data(item)
                if isinstance(data, Tensor):
                    alone = data.untyped_storage().nbytes() == data.nbytes
                    torch.save(data if alone else data.clone(), stream)
                else:
                    stream.write(data.getbuffer())
                length = stream.tell() - offset
                place = _StorageInfo(name, offset, length)
                if isinstance(value, Streamed):
                    places[id(value), item.index.offset] = place
                results.append(WriteResult(item.index, length, place))
            stream.flush()
            os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class _StreamingPlanner(DefaultSavePlanner):
    """torch's planner, changed to fetch a streamed tensor only when it is written."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return (
            value.__get_tensor_shard__(index) if isinstance(value, Streamed) else super().lookup_object(index)
        )


def saved_optimiser(
    meta: Mapping[str, Any], stored: StoredTensors, trained: Sequence[str], notes: list[str]
) -> Optimiser | None:
    """Return the optimiser as the run's config has it, or None unless it is AdamW and all its states are
    stored.

    Args:
        trained: names of the parameters that must have states.
        notes: receives a sentence if the states are left out.
    """
    config = meta.get("config")
    section: Mapping[str, Any] = config.get("optim", {}) if isinstance(config, Mapping) else {}
    name = section.get("name", "adamw")
    wanted = [f"{OPTIM}{moment}.{parameter}" for parameter in trained for moment in MOMENTS]
    if not any(each.startswith(OPTIM) for each in stored.saved):
        notes.append("the checkpoint has no states of an optimiser: the model alone was written")
    elif name != "adamw":
        notes.append(f"the states of {name} are left out: it is not AdamW, whose alone are written")
    elif any(each not in stored.saved for each in wanted):
        notes.append("the optimiser's states are left out: parameters that were not trained have none")
    else:
        if not section:
            notes.append("no config of the run is in it: settings of AdamW are the usual ones")
        names = {field.name for field in fields(Optimiser)}
        values = {key: value for key, value in section.items() if key in names}
        rate = RateSchedule(**values.pop("rate", {}))
        values["betas"] = tuple(values.get("betas", Optimiser.betas))
        values["no_decay"] = tuple(values.get("no_decay", ()))
        return Optimiser(**values, rate=rate)
    return None


def steps_of(meta: Mapping[str, Any]) -> int | None:
    """Return the number of updates of the complete run, on which the learning rate depends; None without a
    config.
    """
    config: Any = meta.get("config")
    train: Any = config.get("train") if isinstance(config, Mapping) else None
    steps: Any = train.get("steps") if isinstance(train, Mapping) else None
    return steps if isinstance(steps, int) else None
