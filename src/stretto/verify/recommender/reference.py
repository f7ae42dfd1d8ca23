"""The other side of the proof: one process, dense gradients by autograd, updates by their formulas.

It shares with the job the plain dense layers, their optimisers and initial values; nothing of how ids become
rows, are looked up, exchanged, brought together or updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.config.recommender.schema import RecommenderConfig
from stretto.data.clicks.batch import ClickBatch
from stretto.layout.tables import TableSpec, divisor_of, physical_tables
from stretto.models.dlrm import DenseNet, pool
from stretto.models.dlrm_initial import initialise_dense
from stretto.optim.build import build_optimizer
from stretto.optim.rate import Rate
from stretto.parallel.tables.ids.quotient import initial_rows_of_table
from stretto.parallel.tables.initial import initial_rows
from stretto.parallel.tables.jagged import Jagged
from stretto.verify.compare import scales_of
from stretto.verify.recommender.rules import RULES, Numbers, begin, looked_up
from stretto.verify.recommender.unbounded import Ids


@dataclass(frozen=True)
class Snapshot:
    """What one step must give, in float64; tables whole, a hash table with a row for every id of the proof.

    Attributes:
        loss: mean over the batch.
        norm: of all gradients together.
        gradients: of tables by name, and of dense parameters; before clipping.
        clipped: what gradients are multiplied with.
        tables, states, dense: after the update; states by NAME.STATE.
        lookups: [rows] of each table, how often each row was looked up.
        logits: of the probe, after the update.
    """

    loss: float
    norm: float
    clipped: float
    gradients: dict[str, Tensor]
    tables: dict[str, Tensor]
    states: dict[str, Tensor]
    dense: dict[str, Tensor]
    lookups: dict[str, Tensor]
    logits: Tensor

    @cached_property
    def gradient_scales(self) -> dict[str, float]:
        """What differences of the gradients are measured against."""
        return _scales(self.gradients)

    @cached_property
    def weight_scales(self) -> dict[str, float]:
        """Of tables and dense weights."""
        return _scales({**self.tables, **self.dense})

    @cached_property
    def state_scales(self) -> dict[str, float]:
        """Of states; each kind by itself, for their sizes have nothing to do with each other."""
        kinds = sorted({name.rpartition(".")[2] for name in self.states})
        found = dict[str, float]()
        for kind in kinds:
            found |= _scales({name: t for name, t in self.states.items() if name.rpartition(".")[2] == kind})
        return found


def _scales(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    filled = {name: t for name, t in tensors.items() if t.numel()}
    found = scales_of(filled) if filled else {}
    return {name: found.get(name) or 1.0 for name in tensors}


class Reference:
    """A recommender in one process.

    Attributes:
        net: the plain dense layers.
        tables: by the name under which each is stored.
        known: of each hash table, the id of each of its rows, ascending: all that the proof has.
    """

    def __init__(
        self, config: RecommenderConfig, features: Sequence[TableSpec], batches: Sequence[ClickBatch]
    ) -> None:
        self.config, self.features = config, tuple(features)
        self.rule = config.optim.tables.name
        self.net = DenseNet(config.shape(features), fast=False).double()
        initialise_dense(self.net, config.train.seed)
        self.optimizer: Any = build_optimizer(self.net.named_parameters(), config.dense_optim())
        self.known = known_ids(features, batches)
        self.ids = {name: Ids(spec) for spec in features if (name := spec.name) in self.known}
        self.fresh = {stored.name: self._initial(spec, stored) for spec, stored in _stored(features)}
        self.tables = {
            name: begin(torch.zeros_like(fresh) if name in self.known else fresh.clone(), self.rule)
            for name, fresh in self.fresh.items()
        }

    def _initial(self, spec: TableSpec, stored: TableSpec) -> Tensor:
        spread: Any = initial_rows_of_table(spec.rows) if stored.name != spec.name else spec.rows
        rows = self.known.get(stored.name)
        rows = torch.arange(stored.rows) if rows is None else rows
        seed, dim = self.config.train.seed, stored.dim
        return initial_rows(seed, stored.name, spread, rows, 0, dim, dim, torch.float64)

    def step(self, number: int, batch: ClickBatch, probe: ClickBatch) -> Snapshot:
        """Train on a batch, the step's number being that of the updates before it."""
        self._count(number, batch.ids)
        leaves = {name: looked_up(t, self.rule).requires_grad_() for name, t in self.tables.items()}
        lookups = {name: torch.zeros(len(t.values), dtype=torch.float64) for name, t in self.tables.items()}
        logits = self._logits(batch, leaves, lookups)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels.double())
        loss.backward()
        gradients = {name: _or_zero(leaf) for name, leaf in leaves.items()}
        gradients |= {name: _or_zero(p).clone() for name, p in self.net.named_parameters()}
        norm = float(torch.stack([g.square().sum() for g in gradients.values()]).sum()) ** 0.5
        clip = self.config.optim.clip
        clipped = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        self._update(number, gradients, lookups, clipped)
        with torch.no_grad():
            seen = {name: looked_up(t, self.rule) for name, t in self.tables.items()}
            probed = self._logits(probe, seen, None)
        return Snapshot(
            float(loss.detach()),
            norm,
            clipped,
            gradients,
            {name: t.values.clone() for name, t in self.tables.items()},
            {f"{name}.{key}": s.clone() for name, t in self.tables.items() for key, s in t.states.items()},
            {name: p.detach().clone() for name, p in self.net.named_parameters()},
            lookups,
            probed,
        )

    def _count(self, step: int, ids: Jagged) -> None:
        """What hash tables do before lookups: rows are taken back and given."""
        for spec, own in zip(self.features, ids.ids.split(ids.counts()), strict=True):
            if spec.name not in self.ids:
                continue
            table, known = self.tables[spec.name], self.known[spec.name]
            gone = torch.searchsorted(known, torch.tensor(self.ids[spec.name].evict(step), dtype=torch.int64))
            new = torch.searchsorted(
                known, torch.tensor(self.ids[spec.name].see(own.tolist(), step), dtype=torch.int64)
            )
            for rows, values in ((gone, 0.0), (new, begin(self.fresh[spec.name][new], self.rule).values)):
                table.values[rows] = values
                for state in table.states.values():
                    state[rows] = 0.0

    def _logits(
        self, batch: ClickBatch, tables: Mapping[str, Tensor], lookups: dict[str, Tensor] | None
    ) -> Tensor:
        ids, pooled = batch.ids, list[Tensor]()
        counts = ids.counts()
        weights = [None] * len(counts) if ids.weights is None else ids.weights.double().split(counts)
        for number, own in enumerate(ids.ids.split(counts)):
            spec = self.features[number]
            vectors = self._vectors(spec, own, tables, lookups)
            pooled.append(pool(vectors, ids.lengths[number], weights[number], spec))
        return self.net(batch.dense.double(), torch.stack(pooled, 1))

    def _vectors(
        self, spec: TableSpec, ids: Tensor, tables: Mapping[str, Tensor], lookups: dict[str, Tensor] | None
    ) -> Tensor:
        """Of each id [n, dim]; counts the lookups."""
        if spec.ids == "hash":
            known = self.known[spec.name]
            there = torch.tensor([one in self.ids[spec.name].held for one in ids.tolist()], dtype=torch.bool)
            rows = torch.searchsorted(known, ids)
            _add(lookups, spec.name, rows[there])
            return tables[spec.name][rows] * there.double()[:, None]
        own = ids % spec.rows
        if spec.ids == "modulo":
            _add(lookups, spec.name, own)
            return tables[spec.name][own]
        quotient, remainder = f"{spec.name}.quotient", f"{spec.name}.remainder"
        above, below = own // divisor_of(spec), own % divisor_of(spec)
        _add(lookups, quotient, above)
        _add(lookups, remainder, below)
        return tables[quotient][above] * tables[remainder][below]

    @torch.no_grad()
    def _update(
        self, step: int, gradients: Mapping[str, Tensor], lookups: Mapping[str, Tensor], clipped: float
    ) -> None:
        ratio, given = rate_of(self.config).ratio(step), self.config.optim.tables
        numbers = Numbers(given.lr * ratio, given.eps, *given.betas)
        for name, table in self.tables.items():
            RULES[self.rule](table, gradients[name] * clipped, (lookups[name] > 0).double(), numbers)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.optim.dense.lr * ratio
        for name, parameter in self.net.named_parameters():
            parameter.grad = gradients[name] * clipped
        self.optimizer.step()
        self.optimizer.zero_grad()


def run_reference(
    config: RecommenderConfig, features: Sequence[TableSpec], steps: Sequence[ClickBatch], probe: ClickBatch
) -> list[Snapshot]:
    """Train for a few steps, each on a whole global batch; `probe` is scored after each."""
    reference = Reference(config, features, [*steps, probe])
    return [reference.step(number, batch, probe) for number, batch in enumerate(steps)]


def known_ids(features: Sequence[TableSpec], batches: Sequence[ClickBatch]) -> dict[str, Tensor]:
    """Of each hash table all ids of the batches, ascending."""
    found = dict[str, Tensor]()
    for number, spec in enumerate(features):
        if spec.ids == "hash":
            own = [batch.ids.ids.split(batch.ids.counts())[number] for batch in batches]
            found[spec.name] = torch.unique(torch.cat(own))
    return found


def rate_of(config: RecommenderConfig) -> Rate:
    """The schedule that both learning rates follow; its peak is 1."""
    rate = config.optim.rate
    steps = config.train.steps
    return Rate(rate.schedule, 1.0, steps, rate.warmup, rate.min_ratio, rate.decay_fraction, rate.decay)


def _stored(features: Sequence[TableSpec]) -> list[tuple[TableSpec, TableSpec]]:
    """Each stored table with its feature's."""
    return [(spec, stored) for spec in features for stored in physical_tables([spec])]


def _or_zero(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _add(lookups: dict[str, Tensor] | None, name: str, rows: Tensor) -> None:
    if lookups is not None:
        lookups[name] += torch.bincount(rows, minlength=len(lookups[name]))
