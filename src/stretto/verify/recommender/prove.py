"""Run placements on real ranks and compare them with the reference, in float64 and in the job's own types."""

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

from stretto.recommender.clicks.batch import ClickBatch, ClickSource
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import Placements, TablePlacement, TableSpec, physical_tables
from stretto.recommender.train.clicks import rank_slice
from stretto.recommender.train.engine import Recommender
from stretto.recommender.train.task import ClickProgress, RecommenderTask
from stretto.run.train.assemble import DTYPES
from stretto.run.train.task import StepResult
from stretto.run.train.trainer import Trainer
from stretto.verify.compare import (
    TOLERANCE,
    Comparison,
    Pairs,
    Quantity,
    Snapshot,
    compare_pairs,
    mean_errors,
    relative,
    worst_quantities,
)
from stretto.verify.diagnose import explain
from stretto.verify.evidence import Evidence, NormPart, Sum, TableMarks, Verdict, WrongShard, above
from stretto.verify.precision import STEPS, Errors, prove_rounded
from stretto.verify.recommender.cases import PlacementCase
from stretto.verify.recommender.diagnose import (
    Compared,
    ShardRows,
    compare_gradients,
    compare_rows,
    duplicates_lost,
    local_statistic,
    pairs_by_name,
    shard_rows,
    wrong_shards,
)
from stretto.verify.recommender.every import KINDS, draw
from stretto.verify.recommender.reference import Reference, clip_factor, known_ids

_QUANTITIES = ("loss", "gradients", "norm", "weights", "states", "logits")


@dataclass(frozen=True, kw_only=True)
class ReferenceRun:
    """The training steps of the reference, in one process.

    Attributes:
        batches: one for each step, and the probe, which is scored after each step.
        samples: what is trained on.
        hash_ids: for each hash table, the ids of its rows.
        initial: the tables before the first step.
    """

    batches: Sequence[ClickBatch]
    samples: ClickSource
    hash_ids: dict[str, Tensor]
    initial: dict[str, Tensor]
    snapshots: Sequence[Snapshot]

    def weights_before(self, step: int) -> Mapping[str, Tensor]:
        """The tables before a step."""
        return self.snapshots[step - 1].weights if step else self.initial

    def states_before(self, step: int) -> Mapping[str, Tensor]:
        """The states of tables before a step."""
        if step:
            return self.snapshots[step - 1].states
        return {name: torch.zeros_like(state) for name, state in self.snapshots[0].states.items()}


class FixedBatches:
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
        """Return the run that a case must equal."""
        if case.reference not in self._runs:
            config = case.apply(self.config, self.features)
            self._runs[case.reference] = self.run(case, config, self.features)
        return self._runs[case.reference]

    def run(
        self, case: PlacementCase, config: RecommenderConfig, features: Sequence[TableSpec]
    ) -> ReferenceRun:
        """Run a job on the samples of a case."""
        samples, size = self._samples(case), self.config.batch.global_size
        batches = [samples.batch(at * size, size) for at in range(self.steps + 1)]
        reference = Reference(config, features, batches)
        initial = {name: table.values.clone() for name, table in reference.tables.items()}
        return ReferenceRun(
            batches=batches,
            samples=samples,
            hash_ids=known_ids(features, batches),
            initial=initial,
            snapshots=reference.run(batches),
        )

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
        return FixedBatches(drawn)


def prove(
    references: TableReferences,
    cases: Sequence[PlacementCase],
    folder: Path,
    report: Callable[[Verdict, int], None] | None = None,
) -> list[Verdict]:
    """Compare every case with one process. Collective over the default group.

    Args:
        folder: for tables on disk.
        report: called after each case, with the number of cases.
    """
    verdicts = list[Verdict]()
    for case in cases:
        started = time.perf_counter()
        verdict = PlacementComparison(references, case, folder).verdict()
        verdicts.append(replace(verdict, seconds=time.perf_counter() - started))
        if report is not None:
            report(verdicts[-1], len(cases))
    return verdicts


def prove_placement_rounded(
    references: TableReferences, case: PlacementCase, folder: Path, alone: Sequence[Errors] | None
) -> Verdict:
    """Compare a case in the job's own types with one process in them. Collective.

    Args:
        alone: on rank 0, what `one_process_errors` returned for the case.
    """
    comparison = PlacementComparison(references, case, folder, own_types=True)
    config = comparison.config
    eps = max(torch.finfo(DTYPES[name]).eps for name in (config.train.dtype, config.tables.wire))
    return prove_rounded(str(case), config.train.dtype, eps, alone, lambda: (comparison.errors(), ()))


def one_process_errors(references: TableReferences, case: PlacementCase, folder: Path) -> list[Errors]:
    """Return the errors of one process in the job's own types. Needs no process group."""
    placements: Placements = {name: TablePlacement("table", (0,)) for name in case.placements}
    alone = replace(case, ranks=1, placements=placements)
    return PlacementComparison(references, alone, folder, own_types=True).errors()


class PlacementComparison:
    """One case, trained twice by the steps of training. The first time all is compared after every step, and
    the tables' gradients are recorded, which makes the update two-phase. The second time nothing is looked at
    between steps, for reading a table waits for what updates it: losses and norms as they come, everything
    else once, after the last step.

    Args:
        own_types: train in the types of the job, not in float64.
    """

    def __init__(
        self, references: TableReferences, case: PlacementCase, folder: Path, own_types: bool = False
    ) -> None:
        self.case, self.references = case, references
        self.trained = references.of(case)
        self.config = case.apply(references.config, references.features, own_types)
        self.stored = [table.name for table in physical_tables(references.features)]
        self._folder = folder
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._probe = slice(*rank_slice(self.trained.batches[-1].samples, rank, case.ranks))

    def verdict(self) -> Verdict:
        """The verdict over all steps up to the first that differs. Collective."""
        quantities, diagnosis = self._read_steps(record=True)
        if diagnosis is None:
            unread, diagnosis = self._unread_steps()
            if diagnosis is not None:
                again, cause = self._read_steps(record=False)  # as in training, but for the reading
                quantities, diagnosis = (quantities, diagnosis) if cause is None else (again, cause)
            quantities = worst_quantities([quantities, unread])
        return Verdict(
            layout=str(self.case),
            quantities=quantities,
            diagnosis=diagnosis,
            placement=self.case.placement_words,
        )

    def errors(self) -> list[Errors]:
        """Relative errors of the first steps, made both as training makes them and with gradients recorded.
        With 16-bit messages of one step: its rounding turns gradients near 0 into whole steps of a row, after
        which a ReLU may be open that is closed in float64, and no multiple of an epsilon bounds that.
        Collective.
        """
        steps = list[Errors]()
        compared = STEPS if self.config.tables.wire == "float32" else 1
        for record in (True, False):
            with self._training(record=record) as (recommender, trainer):
                for expected in self.trained.snapshots[:compared]:
                    (done,) = trainer.step()
                    shards = shard_rows(recommender, self.trained.hash_ids)
                    errors: Errors = {"loss": {"": relative(done.loss, expected.loss)}}
                    if record:
                        recorded = compare_gradients(recommender, shards, expected.gradients)
                        gradients = self._gradients(recommender, [*recorded], done.norm, expected)
                        errors["gradients"] = dict(gradients.errors)
                    if done.norm is not None:
                        errors["norm"] = {"": relative(done.norm, expected.norm)}
                    rows, _ = compare_rows(recommender, shards, expected.weights, {})
                    pairs = self._weights(recommender, rows, expected)
                    errors["weights"] = mean_errors({n: pairs.get(n, []) for n in expected.weights})
                    steps.append(errors)
        return steps

    def _read_steps(self, record: bool) -> tuple[list[Quantity], str | None]:
        """The errors of each step up to the first that differs, with its diagnosis: later ones would only
        follow from it.
        """
        steps, diagnosis = list[list[Quantity]](), None
        with self._training(record=record) as (recommender, trainer):
            initial = self._wrong_initial_values(recommender)
            for number in range(len(self.trained.snapshots)):
                (done,) = trainer.step()
                evidence = self._evidence(recommender, number, done, *initial)
                steps.append(evidence.quantities(*_QUANTITIES))
                if cause := explain(evidence):
                    diagnosis = cause.sentence
                    break
        return worst_quantities(steps), diagnosis

    def _unread_steps(self) -> tuple[list[Quantity], str | None]:
        """The errors of steps between which nothing is read."""
        snapshots = self.trained.snapshots
        with self._training(record=False) as (recommender, trainer):
            steps = [result for _ in snapshots for result in trainer.step()]
            last = self._evidence(recommender, len(steps) - 1, steps[-1]).quantities(*_QUANTITIES)
        each = [
            [
                Quantity("loss", relative(done.loss, expected.loss), TOLERANCE),
                Quantity(
                    "norm", None if done.norm is None else relative(done.norm, expected.norm), TOLERANCE
                ),
            ]
            for done, expected in zip(steps, snapshots, strict=True)
        ]
        quantities = worst_quantities([last, *each])
        if all(quantity.equal for quantity in quantities):
            return quantities, None
        wrong = next((n for n, (loss, _) in enumerate(each, 1) if not loss.equal), None)
        location = "after the last step" if wrong is None else f"from step {wrong} on"
        return quantities, (
            f"equal when tables are read after every step, but different {location} when nothing is read in "
            "between: rows or weights are used before they are updated"
        )

    @contextmanager
    def _training(self, record: bool) -> Generator[tuple[Recommender, Trainer]]:
        """This rank of the job from the beginning; if nothing is recorded, it reads samples ahead."""
        features, placements = self.references.features, self.case.placements
        recommender = Recommender(
            self.config, features, placements, "cpu", record=record, folder=self._folder
        )
        task = RecommenderTask(recommender, self.trained.samples, torch.device("cpu"))
        try:
            with ThreadPoolExecutor(1) as pool:
                task.reader = None if record else pool
                yield recommender, Trainer(task, ClickProgress())
        finally:
            recommender.close()

    def _wrong_initial_values(self, recommender: Recommender) -> tuple[list[str], list[WrongShard]]:
        """Tables whose initial values differ, and in which shards."""
        shards = shard_rows(recommender, self.trained.hash_ids)
        compared, _ = compare_rows(recommender, shards, self.trained.initial, {})
        pairs = pairs_by_name(compared)
        errors = compare_pairs({n: pairs.get(n, []) for n in self.stored}, dict.fromkeys(self.stored, 1.0))
        return above(errors.errors), wrong_shards(compared, self.case.placements)

    def _evidence(
        self,
        recommender: Recommender,
        number: int,
        done: StepResult,
        initial: Sequence[str] = (),
        initial_shards: Sequence[WrongShard] = (),
    ) -> Evidence:
        """The last step beside the reference's. Collective."""
        expected, placed = self.trained.snapshots[number], self.case.placements
        shards = shard_rows(recommender, self.trained.hash_ids)
        recorded = list[Compared]()
        gradients = None
        vectors = None
        if recommender.record:
            recorded = list(compare_gradients(recommender, shards, expected.gradients))
            gradients = self._gradients(recommender, recorded, done.norm, expected)
        if (looked_up := recommender.looked_up) is not None:
            features = enumerate(expected.outputs.items())
            pairs = {n: self._on_rank(looked_up[:, at].double(), t) for at, (n, t) in features}
            vectors = expected.compare("outputs", pairs)
        values, states = compare_rows(recommender, shards, expected.weights, expected.states)
        clip, dense = self.config.optim.clip, [name for name, _ in recommender.net.named_parameters()]
        clipped = clip_factor(clip, expected.norm)
        copied = [name for name, placement in placed.items() if placement.split == "data"]
        copied_square = sum(float(expected.gradients[name].square().sum()) for name in copied)
        logits = recommender.predict(
            self.trained.batches[-1].part(self._probe.start, self._probe.stop)
        ).double()
        before = self.trained.states_before(number)
        statistic = local_statistic(states, shards, placed, before=before, expected=expected, clipped=clipped)
        return Evidence(
            initial=initial,
            loss=done.loss,
            reference_loss=expected.loss,
            gradients=gradients,
            norm=done.norm if clip is not None or recommender.record else None,
            reference_norm=expected.norm,
            weights=expected.compare("weights", self._weights(recommender, values, expected)),
            states=expected.compare("states", pairs_by_name(states)) if expected.states else None,
            logits=expected.compare("logits", {"logits": self._on_rank(logits, expected.logits["logits"])}),
            clip=clip,
            kinds={"table": self.stored, "dense parameter": dense},
            sums=[Sum(self.case.ranks, "ranks", "the sum over all ranks")],
            norm_parts=[NormPart("tables that every rank copies", copied_square / expected.norm**2)],
            tables=TableMarks(
                names=self.stored,
                features=self.references.features,
                vectors=vectors,
                moves=self._moves(values, shards, number),
                duplicates_lost=duplicates_lost(recorded or values, shards, expected.lookups),
                local_statistic=statistic,
                wrong_shards=initial_shards or wrong_shards([*recorded, *values, *states], placed),
            ),
        )

    def _on_rank(self, actual: Tensor, expected: Tensor) -> Pairs:
        """Values of this rank's samples beside the reference's."""
        return [(actual, expected[self._probe])] if len(actual) else []

    def _moves(
        self, values: Sequence[Compared], shards: Sequence[ShardRows], number: int
    ) -> Comparison | None:
        """By how much a step has changed the rows of tables; hash tables are left out."""
        before = self.trained.weights_before(number)
        by_number = {piece.shard.number: piece for piece in shards}
        pairs: dict[str, Pairs] = {name: [] for name in self.stored if name not in self.trained.hash_ids}
        for tensor in values:
            if tensor.name in pairs and tensor.actual.numel():
                then = by_number[tensor.shard.number].of_table(before[tensor.name])
                pairs[tensor.name].append((tensor.actual - then, tensor.reference - then))
        return compare_pairs(pairs, dict.fromkeys(pairs, 1.0)) if pairs else None

    def _weights(
        self, recommender: Recommender, rows: Sequence[Compared], expected: Snapshot
    ) -> dict[str, Pairs]:
        """The rows of tables and the dense parameters."""
        pairs = pairs_by_name(rows)
        for name, parameter in recommender.net.named_parameters():
            pairs[name] = [(parameter.detach().double(), expected.weights[name])]
        return pairs

    def _gradients(
        self,
        recommender: Recommender,
        recorded: Sequence[Compared],
        norm: float | None,
        expected: Snapshot,
    ) -> Comparison:
        """All gradients before clipping, which has already scaled the dense ones."""
        pairs = pairs_by_name(recorded)
        clipped = 1.0 if norm is None else clip_factor(self.config.optim.clip, norm)
        for name, parameter in recommender.net.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            pairs[name] = [(gradient.double() / clipped, expected.gradients[name])]
        return expected.compare("gradients", pairs)
