"""Runs placements on real ranks in float64 and compares them with the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.engine.parallel.control import gather_json
from stretto.recommender.clicks.batch import ClickBatch, ClickSource
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import TableSpec, physical_tables
from stretto.recommender.train.clicks import rank_slice
from stretto.recommender.train.engine import Recommender
from stretto.recommender.train.task import ClickProgress, RecommenderTask
from stretto.run.train.task import StepResult
from stretto.run.train.trainer import Trainer
from stretto.verify.compare import NOTHING, Comparison, Pairs, compare_pairs, relative
from stretto.verify.diagnose import TOLERANCE
from stretto.verify.recommender.cases import PlacementCase
from stretto.verify.recommender.diagnose import (
    TableEvidence,
    TableVerdict,
    WrongShard,
    diagnose,
    duplicates_lost,
    local_statistic,
)
from stretto.verify.recommender.every import KINDS, draw
from stretto.verify.recommender.local_shards import (
    Compared,
    ShardRows,
    compare_gradients,
    compare_rows,
    pairs_by_name,
    shard_rows,
)
from stretto.verify.recommender.reference import Reference, TableSnapshot, known_ids


@dataclass(frozen=True, kw_only=True)
class ReferenceRun:
    """The training steps of the reference, in one process.

    Attributes:
        samples: what is trained on; the batch after the last step's is scored after each step.
        probe: that batch.
        hash_ids: for each hash table, the ids of its rows.
        initial: the tables before the first step.
    """

    samples: ClickSource
    probe: ClickBatch
    hash_ids: dict[str, Tensor]
    initial: dict[str, Tensor]
    snapshots: Sequence[TableSnapshot]


class Drawn:
    """Batches of one size as a source of samples."""

    def __init__(self, batches: Sequence[ClickBatch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return sum(batch.samples for batch in self._batches)

    def batch(self, first: int, count: int, part: tuple[int, int] | None = None) -> ClickBatch:
        full = self._batches[first // count]
        return full if part is None else full.part(*part)


class TableReferences:
    """Reference runs, each computed once on every rank and kept for all placements.

    Args:
        features: one table for each.
        data: the job's samples; None: all samples are random.
    """

    def __init__(
        self,
        config: RecommenderConfig,
        features: Sequence[TableSpec],
        steps: int,
        data: ClickSource | None = None,
    ) -> None:
        self.config = config
        self.features = features
        self.steps = steps
        self._data = data
        self._runs = dict[object, ReferenceRun]()

    def of(self, case: PlacementCase) -> ReferenceRun:
        """The run that a case must equal."""
        if case.reference not in self._runs:
            samples, size = self._samples(case), self.config.batch.global_size
            *steps, probe = batches = [samples.batch(at * size, size) for at in range(self.steps + 1)]
            reference = Reference(case.apply(self.config, self.features), self.features, batches)
            initial = {name: table.values.clone() for name, table in reference.tables.items()}
            snapshots = [reference.step(number, batch, probe) for number, batch in enumerate(steps)]
            hash_ids = known_ids(self.features, batches)
            self._runs[case.reference] = ReferenceRun(
                samples=samples, probe=probe, hash_ids=hash_ids, initial=initial, snapshots=snapshots
            )
        return self._runs[case.reference]

    def _samples(self, case: PlacementCase) -> ClickSource:
        if case.samples == "data":
            assert self._data is not None
            return self._data
        numbers, size = self.config.model.numbers, self.config.batch.global_size
        seed = self.config.train.seed + KINDS.index(case.samples)
        drawn = draw(
            features=self.features,
            numbers=numbers,
            samples=size,
            count=self.steps + 2,  # training reads one batch ahead
            kind=case.samples,
            seed=seed,
        )
        return Drawn(drawn)


def prove(
    references: TableReferences,
    cases: Sequence[PlacementCase],
    folder: Path,
    report: Callable[[TableVerdict, int], None] | None = None,
) -> list[TableVerdict]:
    """Compares every case with one process. Collective over the default group.

    Args:
        folder: for tables on disk.
        report: called after each case, with the number of cases.
    """
    verdicts = list[TableVerdict]()
    for case in cases:
        started = time.perf_counter()
        verdict = PlacementComparison(references, case, folder).verdict()
        verdicts.append(replace(verdict, seconds=time.perf_counter() - started))
        if report is not None:
            report(verdicts[-1], len(cases))
    return verdicts


class PlacementComparison:
    """One case, trained twice by the steps of training. The first time all is compared after every step, and
    the tables' gradients are recorded, which makes the update two-phase. The second time nothing is looked at
    between steps, for reading a table waits for what updates it: losses and norms as they come, everything
    else once, after the last step.
    """

    def __init__(self, references: TableReferences, case: PlacementCase, folder: Path) -> None:
        self.case, self.references = case, references
        self.trained = references.of(case)
        self.config = case.apply(references.config, references.features)
        self.stored = [table.name for table in physical_tables(references.features)]
        self._folder = folder
        self._initial: tuple[list[str], list[WrongShard]] = [], []

    def verdict(self) -> TableVerdict:
        """The verdict over all steps up to the first that differs. Collective."""
        verdicts = self._read_steps(record=True)
        if verdicts[-1].equal:
            verdicts.append(self._unread_steps())
            if not verdicts[-1].equal:
                again = self._read_steps(record=False)  # as in training, but for the reading
                verdicts = verdicts if again[-1].equal else again
        return _worst(verdicts)

    def _read_steps(self, record: bool) -> list[TableVerdict]:
        """A verdict after each step, up to the first that differs: later ones would only follow from it."""
        verdicts = list[TableVerdict]()
        with self._training(record=record) as (recommender, trainer):
            self._initial = self._compare_initial(recommender, shard_rows(recommender, self.trained.hash_ids))
            for number in range(len(self.trained.snapshots)):
                (trained,) = trainer.step()
                verdicts.append(self._verdict(self._evidence(recommender, number, trained)))
                if not verdicts[-1].equal:
                    break
        return verdicts

    def _unread_steps(self) -> TableVerdict:
        """The verdict on steps between which nothing is read."""
        with self._training(record=False) as (recommender, trainer):
            steps = [result for _ in self.trained.snapshots for result in trainer.step()]
            verdict = self._verdict(self._evidence(recommender, len(steps) - 1, steps[-1]))
        pairs = list(zip(steps, self.trained.snapshots, strict=True))
        losses = [relative(trained.loss, expected.loss) for trained, expected in pairs]
        norms = [relative(t.norm, expected.norm) for t, expected in pairs if t.norm is not None]
        verdict = replace(verdict, loss_error=max(losses), norm_error=max(norms, default=None))
        if verdict.equal:
            return verdict
        wrong = next((n for n, loss in enumerate(losses, 1) if not loss <= TOLERANCE), None)
        location = "after the last step" if wrong is None else f"from step {wrong} on"
        return replace(
            verdict,
            diagnosis=f"equal when tables are read after every step, but different {location} when nothing "
            "is read in between: rows or weights are used before they are updated",
        )

    @contextmanager
    def _training(self, record: bool) -> Generator[tuple[Recommender, Trainer]]:
        """This rank of the job from the beginning; where nothing is recorded, it reads samples ahead."""
        recommender = Recommender(
            self.config,
            self.references.features,
            self.case.placements,
            "cpu",
            record=record,
            folder=self._folder,
        )
        task = RecommenderTask(recommender, self.trained.samples, torch.device("cpu"))
        try:
            with ThreadPoolExecutor(1) as pool:
                task.reader = None if record else pool
                yield recommender, Trainer(task, ClickProgress())
        finally:
            recommender.close()

    def _slice(self, batch: ClickBatch) -> tuple[int, int]:
        return rank_slice(batch.samples, _rank(), self.case.ranks)

    def _compare_initial(
        self, recommender: Recommender, shards: Sequence[ShardRows]
    ) -> tuple[list[str], list[WrongShard]]:
        """Tables whose initial values differ, and in which shards."""
        compared, _ = compare_rows(recommender, shards, self.trained.initial, {})
        scales = dict.fromkeys(self.stored, 1.0)
        errors = compare_pairs(pairs_by_name(compared, self.stored), scales).errors
        wrong = [name for name, error in errors.items() if not error <= TOLERANCE]
        return wrong, _wrong(compared, self.case.placements)

    def _evidence(self, recommender: Recommender, number: int, trained: StepResult) -> TableEvidence:
        """What a step shows, the last one that was made."""
        expected = self.trained.snapshots[number]
        shards = shard_rows(recommender, self.trained.hash_ids)
        recorded, gradients = list[Compared](), None
        if recommender.record:
            recorded = list(compare_gradients(recommender, shards, expected.gradients))
            gradients = self._gradients(recommender, recorded, trained.norm, expected)
        values, states = compare_rows(recommender, shards, expected.tables, expected.states)
        pairs: dict[str, Pairs] = pairs_by_name(values, self.stored)
        for name, parameter in recommender.net.named_parameters():
            pairs[name] = [(parameter.detach(), expected.dense[name])]
        weights = compare_pairs(pairs, expected.weight_scales)
        names, compared_states = list(expected.states), None
        if names:
            compared_states = compare_pairs(pairs_by_name(states, names), expected.state_scales)
        clipping = self.config.optim.clip is not None or recommender.record
        placed, copied = self.case.placements, self._of_split("data")
        wrong_rows = recorded if gradients is not None else values
        return TableEvidence(
            ranks=self.case.ranks,
            tables=self.stored,
            features=self.references.features,
            copied=copied,
            by_columns=self._of_split("column"),
            initial=self._initial[0],
            loss=trained.loss,
            reference_loss=expected.loss,
            vectors=self._looked_up(recommender, expected),
            gradients=gradients,
            norm=trained.norm if clipping else None,
            reference_norm=expected.norm,
            clipped=expected.clipped,
            copied_square=sum(float(expected.gradients[name].square().sum()) for name in copied),
            weights=weights,
            states=compared_states,
            moves=self._moves(values, shards, number),
            predict=self._predicted(recommender, expected),
            duplicates_lost=duplicates_lost(wrong_rows, shards, expected.lookups),
            local_statistic=local_statistic(states, shards, placed, self._before(number), expected)
            if names
            else (),
            shards=self._initial[1] or _wrong([*recorded, *values, *states], placed),
        )

    def _looked_up(self, recommender: Recommender, expected: TableSnapshot) -> Comparison | None:
        """Compares what was looked up, by feature; None where the step did not record it."""
        if recommender.looked_up is None:
            return None
        start, stop = self._slice(self.trained.probe)
        pairs = {
            spec.name: [(recommender.looked_up[:, at].double(), expected.vectors[start:stop, at])]
            for at, spec in enumerate(self.references.features)
            if stop > start
        }
        pairs = {spec.name: pairs.get(spec.name, []) for spec in self.references.features}
        largest = float(expected.vectors.abs().max()) or 1.0
        return compare_pairs(pairs, dict.fromkeys(pairs, largest))

    def _moves(
        self, values: Sequence[Compared], shards: Sequence[ShardRows], number: int
    ) -> Comparison | None:
        """Compares by how much a step has changed the rows of tables, those of hash tables left out."""
        before = self.trained.snapshots[number - 1].tables if number else self.trained.initial
        by_number = {piece.shard.number: piece for piece in shards}
        names = [name for name in self.stored if name not in self.trained.hash_ids]
        pairs: dict[str, Pairs] = {name: [] for name in names}
        for tensor in values:
            if tensor.name in pairs and tensor.actual.numel():
                then = by_number[tensor.shard.number].of_table(before[tensor.name])
                pairs[tensor.name].append((tensor.actual - then, tensor.reference - then))
        return compare_pairs(pairs, dict.fromkeys(names, 1.0)) if names else None

    def _of_split(self, split: str) -> list[str]:
        return [name for name, placed in self.case.placements.items() if placed.split == split]

    def _before(self, number: int) -> Mapping[str, Tensor]:
        """The reference's states before a step."""
        if number:
            return self.trained.snapshots[number - 1].states
        return {name: torch.zeros_like(t) for name, t in self.trained.snapshots[0].states.items()}

    def _gradients(
        self,
        recommender: Recommender,
        recorded: Sequence[Compared],
        norm: float | None,
        expected: TableSnapshot,
    ) -> Comparison:
        """Compares all gradients before clipping, which has already scaled the dense ones."""
        clip, pairs = self.config.optim.clip, pairs_by_name(recorded, self.stored)
        clipped = 1.0 if clip is None or norm is None else min(1.0, clip / (norm + 1e-6))
        for name, parameter in recommender.net.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            pairs[name] = [(gradient / clipped, expected.gradients[name])]
        return compare_pairs(pairs, expected.gradient_scales)

    def _predicted(self, recommender: Recommender, expected: TableSnapshot) -> float:
        """The relative error of logits without an update, over all ranks."""
        start, stop = self._slice(self.trained.probe)
        logits = recommender.predict(self.trained.probe.part(start, stop)).double()
        pairs: Pairs = [(logits, expected.logits[start:stop])] if stop > start else []
        scale = float(expected.logits.abs().max()) or 1.0
        return compare_pairs({"logits": pairs}, {"logits": scale}).error

    def _verdict(self, evidence: TableEvidence) -> TableVerdict:
        gradients, states = evidence.gradients, evidence.states
        return TableVerdict(
            layout=str(self.case),
            loss_error=relative(evidence.loss, evidence.reference_loss),
            grad_error=None if gradients is None else gradients.error,
            worst_gradient=None if gradients is None else gradients.worst,
            norm_error=None if evidence.norm is None else relative(evidence.norm, evidence.reference_norm),
            weight_error=evidence.weights.error,
            worst_weight=evidence.weights.worst,
            diagnosis=diagnose(evidence),
            state_error=None if states is None else states.error,
            worst_state=None if states is None else states.worst,
            predict_error=evidence.predict,
            placement=self.case.placement_words,
        )


def _wrong(compared: Sequence[Compared], placed: Mapping[str, object]) -> list[WrongShard]:
    """The shards that differ, of all ranks. Collective."""
    wrong = set[tuple[str, int, int]]()
    for tensor in compared:
        scale = float(tensor.reference.abs().max()) if tensor.reference.numel() else 1.0
        if tensor.actual.numel() and not float(
            (tensor.actual - tensor.reference).abs().max()
        ) <= NOTHING * max(scale, 1e-6):
            wrong.add((tensor.shard.name, tensor.shard.part, tensor.shard.rank))
    gathered: list[list[list[int | str]]] = gather_json([list(shard) for shard in sorted(wrong)])
    parts = {name: getattr(placement, "ranks", ()) for name, placement in placed.items()}
    return [
        WrongShard(str(name), int(part), len(parts[str(name)]) or len(gathered), int(rank))
        for rank_wrong in gathered
        for name, part, rank in rank_wrong
    ]


def _worst(verdicts: Sequence[TableVerdict]) -> TableVerdict:
    """The largest errors over all steps, with the diagnosis of the last, which is the one that differs."""
    gradient = max(verdicts, key=lambda v: v.grad_error or 0.0)
    weight, state = (
        max(verdicts, key=lambda v: v.weight_error),
        max(verdicts, key=lambda v: v.state_error or 0.0),
    )
    return replace(
        verdicts[-1],
        loss_error=max(v.loss_error for v in verdicts),
        grad_error=gradient.grad_error,
        worst_gradient=gradient.worst_gradient,
        norm_error=max((v.norm_error for v in verdicts if v.norm_error is not None), default=None),
        weight_error=weight.weight_error,
        worst_weight=weight.worst_weight,
        state_error=state.state_error,
        worst_state=state.worst_state,
        predict_error=max(v.predict_error for v in verdicts),
    )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
