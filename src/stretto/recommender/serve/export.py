"""A trained recommender as a folder for servers: dense network, tables, and the transform of its clicks."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

import stretto
from stretto.engine.checkpoint.files import DamageError
from stretto.engine.checkpoint.index import MODEL
from stretto.engine.checkpoint.read import read_whole
from stretto.engine.checkpoint.storage import TensorSource, dtype_name, write_tensors
from stretto.errors import StrettoError
from stretto.recommender.checkpoint.export import PUBLIC, open_rows, write_rows
from stretto.recommender.checkpoint.load import read_tables
from stretto.recommender.clicks.index import TRANSFORM, VOCABULARY
from stretto.recommender.clicks.transform import ClickTransform
from stretto.recommender.models.dlrm import DenseNet
from stretto.recommender.placement import physical_tables
from stretto.recommender.shape import DlrmShape
from stretto.recommender.train.resume import recorded_model
from stretto.run.evaluate.trained import Trained, find_trained

FORMAT, VERSION = "stretto-recommender", 1
CONFIG, README = "config.json", "README.md"
DENSE, PROGRAM = "dense.safetensors", "dense.pt2"


def table_file(name: str) -> str:
    """Return the file of a stored table in an exported folder."""
    return f"tables/{quote(name, safe='')}.safetensors"


def load_dense(shape: DlrmShape, weights: Mapping[str, Tensor], source: Path) -> DenseNet:
    """Return the dense network with these weights, in their type.

    Raises:
        StrettoError: weights are missing, or have other shapes.
    """
    layers = len(shape.bottom) + len(shape.top)
    types = {weight.dtype for weight in weights.values()}
    try:
        if len(weights) != 2 * layers + 3 * shape.cross_layers or len(types) != 1:
            raise RuntimeError(f"{len(weights)} tensors of {len(types)} types")  # before modules are made
        with torch.device("meta"):
            net = DenseNet(shape)
        # copies, which are aligned as in training: products of views of a mapped file may round otherwise
        net.load_state_dict({name: weight.clone() for name, weight in weights.items()}, assign=True)
    except RuntimeError as error:
        raise StrettoError(f"{source}: the dense network is not of the model's sizes: {error}") from None
    return net.requires_grad_(False)


def find_transform(trained: Trained) -> ClickTransform | None:
    """Return the transform of the clicks that a model was trained on, which its run keeps; None if they were
    synthetic, or the checkpoint is not in its run.

    Raises:
        StrettoError: the transform is damaged, or of other clicks than the checkpoint's.
    """
    path = trained.folder / TRANSFORM
    clicks = trained.meta.get("clicks")
    saved = clicks.get("transform") if isinstance(clicks, dict) else None
    if saved is None or not path.is_file():
        return None
    if saved != [zlib.crc32(path.read_bytes())]:
        raise StrettoError(
            f"{path} is not the transform that {trained.checkpoint} was trained with",
            hint="export a checkpoint of the newest training in this folder",
        )
    return ClickTransform.load(trained.folder)


def export_recommender(
    checkpoint: Path,
    out: Path,
    *,
    dense_only: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Path], list[str]]:
    """Write a recommender for servers: the folder that `Scorer.load` reads.

    dense.safetensors has the dense network by its canonical names, dense.pt2 the same by torch.export, from
    numbers [batch, numbers] and pooled embeddings [batch, features, dim] to logits [batch]; it is loaded
    again and compared. tables/ has a file for each table, of which a few rows are in memory at a time.
    config.json, which is written last, has the version of the format and the sizes.

    Args:
        dense_only: without tables.
        progress: called with the bytes of tables written so far, and with all that there are.

    Returns:
        The files, and notes on what the folder lacks.

    Raises:
        StrettoError: not a recommender's checkpoint, or a damaged one; a folder with an export; no room.
    """
    trained = find_trained(checkpoint)
    shape, tables = recorded_model(trained.sizes, checkpoint)
    names = ("tables", DENSE, PROGRAM, TRANSFORM, VOCABULARY, README, CONFIG)
    if taken := [name for name in names if (out / name).exists()]:
        raise StrettoError(f"{out} already holds {taken[0]}", hint="export to a new folder")
    transform = find_transform(trained)
    weights, _ = read_whole(checkpoint, MODEL)
    net = load_dense(shape, weights, checkpoint)
    saved = {} if dense_only else read_tables(checkpoint)
    rows = {
        spec.name: open_rows(checkpoint, saved[spec.name], joined=False)
        for spec in physical_tables(tables)
        if not dense_only
    }
    config = {
        "format": FORMAT,
        "version": VERSION,
        "stretto": stretto.__version__,
        "checkpoint": str(checkpoint),
        "step": trained.step,
        "dtype": dtype_name(next(iter(weights.values())).dtype),
        "model": trained.sizes,
        "numbers": None if transform is None else transform.numbers,
        "transform": transform is not None,
        "tables": {name: {"shape": list(each.shape), "dtype": each.dtype} for name, each in rows.items()},
    }
    with removed_on_failure(checkpoint, out, names):
        (out / "tables").mkdir(parents=True, exist_ok=True)
        entries = [
            TensorSource(name, dtype_name(weight.dtype), tuple(weight.shape), lambda weight=weight: weight)
            for name, weight in weights.items()
        ]
        write_tensors(out / DENSE, entries, {"format": "pt"}, PUBLIC)
        _write_program(net, out / PROGRAM)
        files, done = [DENSE, PROGRAM], 0
        sizes = {
            name: TensorSource(name, each.dtype, each.shape, each.blocks).bytes for name, each in rows.items()
        }
        for name, each in rows.items():
            write_rows(out / table_file(name), name, each)
            files.append(table_file(name))
            done += sizes[name]
            if progress is not None:
                progress(done, sum(sizes.values()))
        if transform is not None:
            contents = transform.to_files()
            for file in (TRANSFORM, VOCABULARY):
                (out / file).write_bytes(bytes(contents[file]))
                files.append(file)
        (out / README).write_text(_README, encoding="utf-8")
        (out / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    notes = ["no tables (--dense-only): they stay in the checkpoint"] if dense_only else []
    if transform is None:
        notes.append("no transform: the clicks were synthetic, or the checkpoint is not in its run")
    return [out / file for file in [*files, README, CONFIG]], notes


@contextmanager
def removed_on_failure(checkpoint: Path, out: Path, names: Iterable[str]) -> Generator[None]:
    """Remove these files and folders of an export if it fails.

    Raises:
        StrettoError: the checkpoint is damaged, or the export cannot be written.
    """
    try:
        yield
    except BaseException as error:
        for path in (out / name for name in names):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if isinstance(error, DamageError):
            raise StrettoError(
                f"checkpoint {checkpoint} is damaged: {error}", hint="use an older one"
            ) from None
        if isinstance(error, OSError):
            raise StrettoError(f"{out} cannot be written: {error.strerror or error}") from None
        raise


def _write_program(net: DenseNet, path: Path) -> None:
    """Write the network by torch.export, load it again, and compare.

    Raises:
        StrettoError: the loaded program differs from the network.
    """
    shape, plain = net.shape, DenseNet(net.shape, fast=False)
    plain.load_state_dict(net.state_dict(), assign=True)
    generator = torch.Generator().manual_seed(0)
    dtype = next(net.parameters()).dtype

    def example(batch: int) -> tuple[Tensor, Tensor]:
        sizes = ((batch, shape.dense), (batch, len(shape.tables), shape.dim))
        numbers, pooled = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
        return numbers, pooled

    batch = torch.export.Dim("batch")
    program = torch.export.export(plain, example(2), dynamic_shapes=({0: batch}, {0: batch}))
    torch.export.save(program, path)
    loaded: Any = torch.export.load(path).module()
    for batch_size in (1, 7):
        inputs = example(batch_size)
        if not torch.allclose(loaded(*inputs), net(*inputs), rtol=1e-4, atol=1e-5):
            raise StrettoError(f"{path} computes other logits than the network", hint="report this, please")


_README = """\
# A recommender for serving

Written by `stretto checkpoint export`. All files but `dense.pt2` are plain data.

- `config.json`: the version of this format, and the model's sizes
- `dense.safetensors`: the dense network, `bottom.0.weight`, ..., `top.0.weight`, ...
- `dense.pt2`: the same by torch.export, from numbers [batch, numbers] and pooled embeddings [batch,
  features, dim] to logits [batch]; `torch.export.load` may unpickle parts of a file: load only one that
  you trust
- `tables/NAME.safetensors`: the rows of a table in order, looked up by id modulo rows; of a table with
  `ids: hash` also `ids`, the id of each row
- `transform.json`, `vocabulary.bin`: how values of the log become numbers and ids

```python
from stretto import Scorer

scorer = Scorer.load("FOLDER")
scorer(numbers, ids, offsets)  # probabilities; ids may be a KeyedJaggedTensor
scorer.score(rows)             # of values as in the log: [{"I1": 3, ..., "C1": "68fd1e64", ...}, ...]
```
"""
