"""The reference of a proof: one process, dense gradients from autograd, updates by their formulas.

It shares with the job the plain dense layers and the initial values, but nothing of how ids are mapped to
rows, looked up, exchanged, reduced or updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.engine.optim.rate import LearningRate
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.models.dlrm import DenseNet, initialise_dense, pool
from stretto.recommender.placement import TableSpec, divisor_of, physical_tables
from stretto.recommender.tables.ids.quotient import initial_rows_of_table
from stretto.recommender.tables.initial import initial_rows
from stretto.recommender.tables.jagged import Jagged
from stretto.verify.compare import Snapshot
from stretto.verify.optimizer import ReferenceOptimizer


@dataclass
class Table:
    """A stored table in float64.

    Attributes:
        values: [rows, dim].
        states: of the update, [rows, dim] or [rows].
    """

    values: Tensor
    states: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True)
class Hyperparameters:
    """The learning rate of a step, and the constants of the rule."""

    lr: float
    eps: float
    beta1: float
    beta2: float


Rule = Callable[
    [Table, Tensor, Tensor, Hyperparameters], None
]  # of a table, its gradient, mask [rows] of the rows looked up, as 0 or 1


def _sgd(table: Table, g: Tensor, mask: Tensor, by: Hyperparameters) -> None:
    table.values -= by.lr * g


def _adagrad(table: Table, g: Tensor, mask: Tensor, by: Hyperparameters) -> None:
    table.states["sum"] += g**2
    table.values -= by.lr * g / (table.states["sum"] ** 0.5 + by.eps)


def _rowwise_adagrad(table: Table, g: Tensor, mask: Tensor, by: Hyperparameters) -> None:
    table.states["sum"] += (g**2).sum(1) / g.shape[1]
    table.values -= by.lr * g / (table.states["sum"] ** 0.5 + by.eps)[:, None]


def _lazy_adam(table: Table, g: Tensor, mask: Tensor, by: Hyperparameters) -> None:
    states, often = table.states, mask[:, None]
    states["count"] += mask
    states["first"] += often * (1 - by.beta1) * (g - states["first"])
    states["second"] += often * (1 - by.beta2) * (g**2 - states["second"])
    updates = states["count"].clamp(min=1)[:, None]  # rows without an update are not used
    first = states["first"] / (1 - by.beta1**updates)
    second = states["second"] / (1 - by.beta2**updates)
    table.values -= by.lr * often * first / (second**0.5 + by.eps)


def _split_sgd(table: Table, g: Tensor, mask: Tensor, by: Hyperparameters) -> None:
    table.values = in_float32(table.values - by.lr * g)


RULES: Mapping[str, Rule] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "lazy_adam": _lazy_adam,
    "split_sgd": _split_sgd,
}
_STATES: Mapping[str, Mapping[str, bool]] = {  # by name; whether there is one number for a row
    "adagrad": {"sum": False},
    "rowwise_adagrad": {"sum": True},
    "lazy_adam": {"first": False, "second": False, "count": True},
}


def initial_table(values: Tensor, rule: str) -> Table:
    """Return a table whose states are zero."""
    rows, dim = values.shape
    stored = in_float32(values) if rule == "split_sgd" else values
    states = _STATES.get(rule, {}).items()
    return Table(stored, {name: stored.new_zeros(rows if row else (rows, dim)) for name, row in states})


def visible_values(table: Table, rule: str) -> Tensor:
    """The values that lookups read: with split SGD, the upper 16 bits of each float32."""
    if rule != "split_sgd":
        return table.values.clone()
    bits = table.values.float().view(torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).double()


def in_float32(values: Tensor) -> Tensor:
    """Return values rounded to float32."""
    return values.float().double()


class ReferenceIds:
    """The ids of one hash table.

    Attributes:
        counts, last: of each id, its occurrences and the last step in which it was seen.
        with_row: ids with a row.
    """

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.counts = dict[int, int]()
        self.last = dict[int, int]()
        self.with_row = set[int]()

    def see(self, ids: Iterable[int], step: int) -> list[int]:
        """Count the ids of a batch; return the ids that get a row."""
        for key in ids:
            self.counts[key] = self.counts.get(key, 0) + 1
            self.last[key] = step
        due = [key for key in self.counts if key not in self.with_row and self.counts[key] >= self.spec.admit]
        self.with_row.update(due)
        return sorted(due)

    def evict(self, step: int) -> list[int]:
        """Evict ids before a step; return the ids that lose their row."""
        if not step or step % self.spec.evict_every:
            return []
        had, oldest = set(self.with_row), self.spec.evict == "age"
        if oldest and self.spec.max_age is not None:
            self._forget([key for key in self.counts if step - self.last[key] > self.spec.max_age])
        by_age = {key: (self.last[key], self.counts[key], key) for key in self.counts}
        by_count = {key: (self.counts[key], self.last[key], key) for key in self.counts}
        for candidates, order in (
            (self.with_row, by_age if oldest else by_count),
            (set(by_age) - self.with_row, by_age),
        ):
            lowest = sorted(candidates, key=order.__getitem__)
            self._forget(lowest[: max(0, len(lowest) - self.spec.rows)])
        return sorted(had - self.with_row)

    def _forget(self, ids: list[int]) -> None:
        for key in ids:
            del self.counts[key], self.last[key]
            self.with_row.discard(key)


class Reference:
    """A recommender in one process.

    Attributes:
        net: the plain dense layers.
        tables: by the name under which each is stored.
        hash_ids: for each hash table, the id of each row, ascending: all ids of the proof.
    """

    def __init__(
        self, config: RecommenderConfig, features: Sequence[TableSpec], batches: Sequence[ClickBatch]
    ) -> None:
        self.config, self.features = config, tuple(features)
        self.rule = config.optim.tables.name
        self.net = DenseNet(config.shape(features), fast=False).double()
        initialise_dense(self.net, config.train.seed)
        self.optimizer = ReferenceOptimizer(self.net.named_parameters(), config.dense_optimiser())
        self.hash_ids = known_ids(features, batches)
        self.ids = {name: ReferenceIds(spec) for spec in features if (name := spec.name) in self.hash_ids}
        self.fresh = {stored.name: self._initial(spec, stored) for spec, stored in _stored(features)}
        self.tables = {
            name: initial_table(
                torch.zeros_like(fresh) if name in self.hash_ids else fresh.clone(), self.rule
            )
            for name, fresh in self.fresh.items()
        }

    def _initial(self, spec: TableSpec, stored: TableSpec) -> Tensor:
        spread: Any = initial_rows_of_table(spec.rows) if stored.name != spec.name else spec.rows
        rows = self.hash_ids.get(stored.name)
        rows = torch.arange(stored.rows) if rows is None else rows
        seed, dim = self.config.train.seed, stored.dim
        return initial_rows(
            seed=seed,
            name=stored.name,
            rows_of_table=spread,
            rows=rows,
            start=0,
            stop=dim,
            dim=dim,
            dtype=torch.float64,
        )

    def run(self, batches: Sequence[ClickBatch]) -> list[Snapshot]:
        """Train on all batches but the last, which is scored after each."""
        *steps, probe = batches
        return [self.step(number, batch, probe) for number, batch in enumerate(steps)]

    def step(self, number: int, batch: ClickBatch, probe: ClickBatch) -> Snapshot:
        """Train on a batch; `number` is the number of updates before it."""
        self._count(number, batch.ids)
        leaves = {name: visible_values(t, self.rule).requires_grad_() for name, t in self.tables.items()}
        lookups = {name: torch.zeros(len(t.values), dtype=torch.float64) for name, t in self.tables.items()}
        vectors = self._pooled(batch, leaves, lookups)
        logits = self.net(batch.dense.double(), vectors)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels.double())
        loss.backward()
        gradients = {name: _or_zero(leaf) for name, leaf in leaves.items()}
        gradients |= {name: _or_zero(p).clone() for name, p in self.net.named_parameters()}
        norm = float(torch.stack([g.square().sum() for g in gradients.values()]).sum()) ** 0.5
        self._update(number, gradients, lookups, clip_factor(self.config.optim.clip, norm))
        with torch.no_grad():
            visible_tables = {name: visible_values(t, self.rule) for name, t in self.tables.items()}
            probed = self.net(probe.dense.double(), self._pooled(probe, visible_tables, None))
        weights = {name: table.values.clone() for name, table in self.tables.items()}
        weights |= {name: p.detach().clone() for name, p in self.net.named_parameters()}
        return Snapshot(
            loss=float(loss.detach()),
            norm=norm,
            gradients=gradients,
            weights=weights,
            states={
                f"{name}.{key}": s.clone() for name, t in self.tables.items() for key, s in t.states.items()
            },
            lookups=lookups,
            outputs={spec.name: vectors.detach()[:, at] for at, spec in enumerate(self.features)},
            logits={"logits": probed},
        )

    def _count(self, step: int, ids: Jagged) -> None:
        """Evict and admit the ids of hash tables, before lookups."""
        for spec, feature_ids in zip(self.features, ids.ids.split(ids.counts()), strict=True):
            if spec.name not in self.ids:
                continue
            table, row_ids = self.tables[spec.name], self.hash_ids[spec.name]
            gone = torch.searchsorted(
                row_ids, torch.tensor(self.ids[spec.name].evict(step), dtype=torch.int64)
            )
            new = torch.searchsorted(
                row_ids, torch.tensor(self.ids[spec.name].see(feature_ids.tolist(), step), dtype=torch.int64)
            )
            for rows, values in (
                (gone, 0.0),
                (new, initial_table(self.fresh[spec.name][new], self.rule).values),
            ):
                table.values[rows] = values
                for state in table.states.values():
                    state[rows] = 0.0

    def _pooled(
        self, batch: ClickBatch, tables: Mapping[str, Tensor], lookups: dict[str, Tensor] | None
    ) -> Tensor:
        """[samples, features, dim]; counts the lookups."""
        ids, pooled = batch.ids, list[Tensor]()
        counts = ids.counts()
        weights = [None] * len(counts) if ids.weights is None else ids.weights.double().split(counts)
        for number, values in enumerate(ids.ids.split(counts)):
            spec = self.features[number]
            vectors = self._vectors(spec, values, tables, lookups)
            pooled.append(pool(vectors, ids.lengths[number], weights[number], spec))
        return torch.stack(pooled, 1)

    def _vectors(
        self, spec: TableSpec, ids: Tensor, tables: Mapping[str, Tensor], lookups: dict[str, Tensor] | None
    ) -> Tensor:
        """The vector of each id [n, dim]; counts the lookups."""
        if spec.ids == "hash":
            row_ids = self.hash_ids[spec.name]
            present = torch.tensor(
                [key in self.ids[spec.name].with_row for key in ids.tolist()], dtype=torch.bool
            )
            rows = torch.searchsorted(row_ids, ids)
            _add(lookups, spec.name, rows[present])
            return tables[spec.name][rows] * present.double()[:, None]
        remainders = ids % spec.rows
        if spec.ids == "modulo":
            _add(lookups, spec.name, remainders)
            return tables[spec.name][remainders]
        quotient, remainder = f"{spec.name}.quotient", f"{spec.name}.remainder"
        above, below = remainders // divisor_of(spec), remainders % divisor_of(spec)
        _add(lookups, quotient, above)
        _add(lookups, remainder, below)
        return tables[quotient][above] * tables[remainder][below]

    @torch.no_grad()
    def _update(
        self, step: int, gradients: Mapping[str, Tensor], lookups: Mapping[str, Tensor], clipped: float
    ) -> None:
        optim, settings = self.config.optim, self.config.optim.tables
        ratio = LearningRate(optim.rate, 1.0, self.config.train.steps).ratio(step)
        numbers = Hyperparameters(settings.lr * ratio, settings.eps, *settings.betas)
        for name, table in self.tables.items():
            RULES[self.rule](table, gradients[name] * clipped, (lookups[name] > 0).double(), numbers)
        for name, parameter in self.net.named_parameters():
            parameter.grad = gradients[name] * clipped
        self.optimizer.step(self.config.optim.dense.lr * ratio)


def clip_factor(clip: float | None, norm: float) -> float:
    """Return the factor of gradients by which they are clipped."""
    return 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))


def known_ids(features: Sequence[TableSpec], batches: Sequence[ClickBatch]) -> dict[str, Tensor]:
    """For each hash table, all ids of the batches, ascending."""
    hash_ids = dict[str, Tensor]()
    for number, spec in enumerate(features):
        if spec.ids == "hash":
            values = [batch.ids.ids.split(batch.ids.counts())[number] for batch in batches]
            hash_ids[spec.name] = torch.unique(torch.cat(values))
    return hash_ids


def _stored(features: Sequence[TableSpec]) -> list[tuple[TableSpec, TableSpec]]:
    """Each stored table with the table of its feature."""
    return [(spec, stored) for spec in features for stored in physical_tables([spec])]


def _or_zero(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _add(lookups: dict[str, Tensor] | None, name: str, rows: Tensor) -> None:
    if lookups is not None:
        lookups[name] += torch.bincount(rows, minlength=len(lookups[name]))
