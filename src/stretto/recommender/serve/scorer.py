"""A trained recommender in one process, for a server: numbers and ids in, probabilities out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stretto.engine.checkpoint.files import DamageError, read_json
from stretto.engine.checkpoint.read import StoredTensors
from stretto.errors import StrettoError, nearest
from stretto.recommender.checkpoint.export import IDS, open_rows
from stretto.recommender.checkpoint.load import read_tables
from stretto.recommender.clicks.tabular import read_rows
from stretto.recommender.clicks.transform import ClickTransform
from stretto.recommender.models.dlrm import DenseNet
from stretto.recommender.placement import TableSpec, divisor_of, physical_tables
from stretto.recommender.serve.export import (
    CONFIG,
    DENSE,
    FORMAT,
    VERSION,
    find_transform,
    load_dense,
    table_file,
)
from stretto.recommender.shape import DlrmShape
from stretto.recommender.tables.ids import quotient
from stretto.recommender.tables.ids.hash import open_map
from stretto.recommender.tables.ids.id_map import ID, ROW, IdMap
from stretto.recommender.tables.jagged import Bags, Jagged, split_features
from stretto.recommender.tables.kernels.cpu import kernels_for
from stretto.recommender.tables.pools import drop_missing
from stretto.recommender.train.resume import recorded_model
from stretto.run.evaluate.trained import find_trained


class TableValues(NamedTuple):
    """The rows [rows, dim] of a stored table and, of a hash table, the id of each row: int64 [rows]."""

    weight: Tensor
    ids: Tensor | None = None


class Scorer:
    """A trained recommender that predicts probabilities: all of its tables in one process, read-only.

        scorer = Scorer.load("exported")       # or a run, or a checkpoint
        scorer(numbers, ids, offsets)          # transformed numbers and ids
        scorer(numbers, keyed_jagged_tensor)   # with the features as keys
        scorer.score([{"I1": 3, ..., "C1": "68fd1e64", ...}])    # values as in the log

    The operations are those of `stretto score`: on the same batch, device and number of threads, and with
    one rank there, probabilities are equal bit by bit; otherwise up to rounding.

    Attributes:
        shape: sizes of the model.
        tables: one for each feature, in the order of ids.
        transform: how values of the log become numbers and ids; None if the model was trained on synthetic
            clicks.
    """

    def __init__(
        self,
        shape: DlrmShape,
        tables: Sequence[TableSpec],
        net: DenseNet,
        *,
        values: Mapping[str, TableValues],
        transform: ClickTransform | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Args:
        net: the dense network, in the type of the computation.
        values: each stored table (`physical_tables`), by name.

        Raises:
            StrettoError: a table is missing or has another size.
        """
        self.shape, self.tables = shape, tuple(tables)
        self.transform = transform
        self.device = torch.device(device)
        self._net = net.to(self.device).requires_grad_(False)
        self._dtype = next(net.parameters()).dtype
        self._kernels = kernels_for(self.device, self._dtype)
        self._weights, self._maps = dict[str, Tensor](), dict[str, IdMap]()
        for spec in physical_tables(tables):
            weight, ids = values[spec.name]
            rows = len(weight) if ids is not None else spec.rows
            if weight.shape != (rows, spec.dim) or (ids is None) != (spec.ids != "hash"):
                raise StrettoError(
                    f"table {spec.name} is {list(weight.shape)}, and the model wants {[rows, spec.dim]}",
                    hint="export the checkpoint again",
                )
            self._weights[spec.name] = weight.to(self.device)
            if ids is not None:
                entries = torch.zeros(4, len(ids), dtype=torch.int64, device=self.device)
                entries[ID], entries[ROW] = ids, torch.arange(len(ids))
                self._maps[spec.name] = open_map(self.device)
                self._maps[spec.name].replace(entries)

    @classmethod
    def load(cls, path: str | Path, *, step: int | None = None, device: torch.device | str = "cpu") -> Self:
        """Read what `stretto checkpoint export` wrote, or a checkpoint: that of a step, or the newest of a
        run.

        On the CPU, tables of an export are mapped: a row is read from its file when it is first looked up.
        Those of a checkpoint, whatever their placement was, are read into memory.

        Raises:
            StrettoError: neither there; damaged; of a language model; of another version; or exported
                without tables.
        """
        path = Path(path)
        exported = (path / CONFIG).is_file()
        try:
            shape, tables, net, values, transform = (
                _read_export(path) if exported else _read_checkpoint(path, step)
            )
        except (DamageError, OSError, SafetensorError) as error:
            raise StrettoError(f"{path} is damaged: {error}", hint="export it again") from None
        return cls(shape, tables, net, values=values, transform=transform, device=device)

    @property
    def numbers(self) -> list[str]:
        """Names of the numbers, in order; empty if the clicks were synthetic."""
        return [] if self.transform is None else self.transform.numbers

    @property
    def features(self) -> list[str]:
        """Names of the features, in the order of ids."""
        return [table.name for table in self.tables]

    def __call__(self, numbers: Any, ids: Any, offsets: Any = None) -> Tensor:
        """Return probabilities [batch], in the type of the computation.

        Args:
            numbers: [batch, numbers], as the transform makes them.
            ids: of the features, as the transform makes them, each below 2^63. One of

                - int64 [batch, features]: one id of each feature;
                - int64 [n], all ids of the first feature sample by sample, then of the second, ..., with
                  `offsets` [features * batch + 1], where each bag begins and the last one ends;
                - a `Jagged`;
                - an object like TorchRec's KeyedJaggedTensor, with `keys()`, `values()` and `lengths()` or
                  `offsets()`, and possibly `weights_or_none()`; keys are found by name, and others ignored.

        Raises:
            StrettoError: input of another shape or type, or a feature that is missing.
        """
        dense = torch.as_tensor(numbers, device=self.device).to(self._dtype)
        if dense.dim() != 2 or dense.shape[1] != self.shape.dense:
            raise StrettoError(f"numbers of shape {list(dense.shape)}", hint=f"[batch, {self.shape.dense}]")
        jagged = self._jagged(ids, offsets)
        if jagged.samples != len(dense):
            raise StrettoError(
                f"ids of {jagged.samples} samples and numbers of {len(dense)}", hint="of the same samples"
            )
        return self._predict(dense, jagged)

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return probabilities of samples with the log's own values, by column; see `read_rows`.

        Raises:
            StrettoError: the clicks were synthetic, a column is missing, or a value is of another type.
        """
        if self.transform is None:
            raise StrettoError(
                "the model was trained on synthetic clicks, which have no values of a log",
                hint="scorer(numbers, ids, offsets)",
            )
        batch = self.transform.batch(read_rows(self.transform.columns, rows))
        return self(batch.dense, batch.ids)

    @torch.no_grad()
    def _predict(self, dense: Tensor, ids: Jagged) -> Tensor:
        pooled = torch.empty(
            len(dense), len(self.tables), self.shape.dim, dtype=self._dtype, device=self.device
        )
        for index, (spec, bags) in enumerate(zip(self.tables, split_features(ids, self._dtype), strict=True)):
            pooled[:, index] = self._pool(spec, bags)
        return self._net(dense, pooled).sigmoid()

    def _pool(self, spec: TableSpec, bags: Bags) -> Tensor:
        """Return a feature's pooled vectors [samples, dim]."""
        rows = bags.ids % spec.rows
        offsets, scale = bags.offsets, bags.scale
        if spec.ids == "quotient-remainder":
            parts = zip(
                ("quotient", "remainder"),
                quotient.rows_of(bags.ids, spec.rows, divisor_of(spec)),
                strict=True,
            )
            pair = [self._weights[f"{spec.name}.{part}"][each].to(self._dtype) for part, each in parts]
            weight = quotient.combine(*pair)
            rows = torch.arange(len(weight), device=self.device)
        else:
            weight = self._weights[spec.name]
            if spec.ids == "hash":  # ids that training gave no row add nothing
                rows, offsets, scale = drop_missing(self._maps[spec.name].find(bags.ids), offsets, scale)
        sums = self._kernels.lookup(weight, rows, offsets, scale, self._dtype)
        if spec.pooling == "sum" or bags.hot == 1:
            return sums
        return sums * (1.0 / bags.lengths.clamp(min=1).to(self._dtype)).unsqueeze(1)

    def _jagged(self, ids: Any, offsets: Any) -> Jagged:
        """Return checked ids on the device; see `__call__`."""
        features = len(self.tables)
        if isinstance(ids, Jagged):
            jagged = ids
        elif all(hasattr(ids, name) for name in ("keys", "values")):
            jagged = self._keyed(ids)
        else:
            values = torch.as_tensor(ids)
            if offsets is not None and values.dim() == 1:
                starts = torch.as_tensor(offsets)
                if starts.dim() != 1 or len(starts) % features != 1 % features or not len(starts):
                    rule = f"a multiple of the {features} features, and one for the end"
                    raise StrettoError(f"{starts.numel()} offsets", hint=rule)
                jagged = Jagged(values, torch.diff(starts).view(features, -1))
                if int(starts[0]):
                    raise StrettoError(f"offsets begin with {int(starts[0])}", hint="they begin with 0")
            elif offsets is None and values.dim() == 2 and values.shape[1] == features:
                jagged = Jagged.fixed([column.unsqueeze(1) for column in values.unbind(1)])
            else:
                raise StrettoError(
                    f"ids of shape {list(values.shape)} {'without' if offsets is None else 'with'} offsets",
                    hint=f"[batch, {features}] without, or [n] with",
                )
        for name, tensor in (("ids", jagged.ids), ("lengths", jagged.lengths)):
            if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
                raise StrettoError(f"{name} of type {tensor.dtype}", hint="integers")
            if tensor.numel() and int(tensor.min()) < 0:
                raise StrettoError(
                    f"{name} with {int(tensor.min())}", hint="0 or more, and offsets that ascend"
                )
        if len(jagged.lengths) != features or int(jagged.lengths.sum()) != len(jagged.ids):
            raise StrettoError(
                f"{len(jagged.ids)} ids of {len(jagged.lengths)} features with lengths that add up to "
                f"{int(jagged.lengths.sum())}",
                hint=f"ids of the {features} features, and as many as the lengths say",
            )
        if jagged.weights is not None and jagged.weights.shape != jagged.ids.shape:
            raise StrettoError(f"{len(jagged.weights)} weights of {len(jagged.ids)} ids", hint="one for each")
        values, lengths = (each.to(self.device, torch.int64) for each in (jagged.ids, jagged.lengths))
        weights = None if jagged.weights is None else jagged.weights.to(self.device)
        return Jagged(values, lengths, weights, jagged.hot)

    def _keyed(self, ids: Any) -> Jagged:
        """Return the features of an object like a KeyedJaggedTensor, in the order of the tables."""
        keys, values = list(ids.keys()), ids.values()
        for name in self.features:
            if keys.count(name) != 1:
                close = nearest(name, keys)
                raise StrettoError(
                    f"{keys.count(name)} keys named {name}",
                    hint=f"one for each feature{f'; is it {close}?' if close else ''}",
                )
        lengths = ids.lengths() if hasattr(ids, "lengths") else torch.diff(ids.offsets())
        if lengths.numel() % len(keys):
            raise StrettoError(
                f"{lengths.numel()} lengths of {len(keys)} keys", hint="as many samples of every key"
            )
        by_key = lengths.view(len(keys), -1)
        counts = by_key.sum(1).tolist()
        if sum(counts) != len(values):
            raise StrettoError(f"{len(values)} values with lengths of {sum(counts)}", hint="as many")
        order = [keys.index(name) for name in self.features]
        weights = ids.weights_or_none() if hasattr(ids, "weights_or_none") else None
        flat = [
            None if each is None else torch.cat([each.split(counts)[index] for index in order])
            for each in (values, weights)
        ]
        assert flat[0] is not None
        return Jagged(flat[0], by_key[order], flat[1])


_Model = tuple[DlrmShape, tuple[TableSpec, ...], DenseNet, dict[str, TableValues], ClickTransform | None]


def _read_export(folder: Path) -> _Model:
    """Read an exported folder."""
    config = read_json(folder, CONFIG)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise StrettoError(
            f"{folder / CONFIG} is not of a recommender", hint="stretto checkpoint export RUN --out FOLDER"
        )
    if config.get("version") != VERSION:
        raise StrettoError(
            f"{folder} is of version {config.get('version')}, and this release reads {VERSION}",
            hint="export the checkpoint again",
        )
    shape, tables = recorded_model(config.get("model"), folder)
    if not config.get("tables"):
        raise StrettoError(
            f"{folder} was exported with --dense-only: its tables are in {config.get('checkpoint')}",
            hint="load that, or export without --dense-only",
        )
    with safe_open(folder / DENSE, framework="pt") as file:
        net = load_dense(shape, {name: file.get_tensor(name) for name in file.keys()}, folder)  # noqa: SIM118
    values = dict[str, TableValues]()
    for spec in physical_tables(tables):
        with safe_open(folder / table_file(spec.name), framework="pt") as file:
            ids = file.get_tensor(IDS) if spec.ids == "hash" else None
            values[spec.name] = TableValues(file.get_tensor(spec.name), ids)
    return shape, tables, net, values, ClickTransform.load(folder) if config.get("transform") else None


def _read_checkpoint(path: Path, step: int | None) -> _Model:
    """Read a checkpoint, whatever placement it was trained with."""
    trained = find_trained(path, step)
    checkpoint = trained.checkpoint
    shape, tables = recorded_model(trained.sizes, checkpoint)
    with StoredTensors(checkpoint) as stored:
        net = load_dense(shape, {name: stored.read(name) for name in stored.saved}, checkpoint)
    saved, values = read_tables(checkpoint), dict[str, TableValues]()
    for spec in physical_tables(tables):
        if spec.name not in saved:
            raise StrettoError(f"checkpoint {checkpoint} has no table {spec.name}", hint="use another one")
        rows = open_rows(checkpoint, saved[spec.name], joined=False)
        weight = torch.empty(rows.shape, dtype=getattr(torch, rows.dtype))
        start = 0
        for block in rows.blocks():
            weight[start : start + len(block)] = block
            start += len(block)
        values[spec.name] = TableValues(weight, rows.ids)
    return shape, tables, net, values, find_transform(trained)
