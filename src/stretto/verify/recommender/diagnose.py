"""Diagnoses why a placement differs from the reference, and holds the verdict on it.

The usual bugs of sharded tables each leave their mark: in the numbers that are compared, or in which rows of
which ranks are wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from stretto.engine.parallel.control import gather_json
from stretto.recommender.placement import Placements, TableSpec, physical_tables
from stretto.verify.compare import NOTHING, Comparison, relative
from stretto.verify.diagnose import FACTOR_TOLERANCE, TOLERANCE, Verdict, above, listing
from stretto.verify.recommender.local_shards import Compared, ShardRows
from stretto.verify.recommender.reference import TableSnapshot

_CLOSE = 1e-6


def duplicates_lost(
    compared: Sequence[Compared], shards: Sequence[ShardRows], lookups: Mapping[str, Tensor]
) -> list[str]:
    """Tables that differ only in rows that were looked up more than once. Collective."""
    by_number = {piece.shard.number: piece for piece in shards}
    wrong, others = set[str](), set[str]()
    for tensor in compared:
        rows = _wrong_rows(tensor)
        if bool(rows.any()):
            often = lookups[tensor.name][by_number[tensor.shard.number].table_rows]
            (wrong if bool((often[rows] > 1).all()) else others).add(tensor.shard.name)
    gathered: list[list[list[str]]] = gather_json([sorted(wrong), sorted(others)])
    spoilt = {name for _, rank_others in gathered for name in rank_others}
    return sorted({name for rank_wrong, _ in gathered for name in rank_wrong} - spoilt)


def local_statistic(
    states: Sequence[Compared],
    shards: Sequence[ShardRows],
    placed: Placements,
    before: Mapping[str, Tensor],
    expected: TableSnapshot,
) -> list[str]:
    """Column-split tables whose row statistic is the mean over each shard's columns only. Collective."""
    by_number = {piece.shard.number: piece for piece in shards}
    wrong = set[str]()
    for tensor in states:
        name = tensor.shard.name
        if tensor.actual.dim() != 1 or placed[name].split != "column" or not bool(_wrong_rows(tensor).any()):
            continue
        shard_rows = by_number[tensor.shard.number]
        gradient = shard_rows.of_table(expected.gradients[name] * expected.clipped)
        alone = shard_rows.of_table(before[tensor.name]) + gradient.square().mean(1)
        scale = float(alone.abs().max()) or 1.0
        if float((tensor.actual - alone).abs().max()) <= _CLOSE * scale:
            wrong.add(name)
    gathered: list[list[str]] = gather_json(sorted(wrong))
    return sorted({name for names in gathered for name in names})


def _wrong_rows(tensor: Compared) -> Tensor:
    """[rows] whether each differs."""
    if not tensor.actual.numel():
        return torch.zeros(len(tensor.actual), dtype=torch.bool)
    off = (tensor.actual - tensor.reference).abs()
    off = off.amax(1) if off.dim() == 2 else off
    scale = float(tensor.reference.abs().max()) or 1.0
    return ~(off <= NOTHING * scale)


@dataclass(frozen=True)
class WrongShard:
    """A shard that differs."""

    name: str
    part: int
    parts: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class TableEvidence:
    """What one step of a placement shows, compared with the reference.

    ranks: their number.
    tables: names of the stored tables; all else is dense.
    features: the table of each feature.
    copied, by_columns: replicated tables, and tables split by columns.
    initial: tables whose initial values differ.
    vectors: what is looked up and pooled, by feature; None where the step did not record it.
    gradients: of tables and dense parameters, before clipping; None where the step did not record them, as
        in training.
    norm, reference_norm: None where it is not computed.
    clipped: the factor by which the reference's gradients are clipped.
    copied_square: the share of replicated tables in the reference's squared norm.
    moves: by how much the step has changed the rows of tables, those of hash tables left out.
    duplicates_lost: tables where only rows looked up more than once are wrong.
    local_statistic: tables whose row statistic covers each shard's columns only.
    shards: shards whose rows differ.
    predict: relative error of logits without an update.
    """

    ranks: int
    tables: Collection[str]
    features: Sequence[TableSpec] = ()
    copied: Collection[str]
    by_columns: Collection[str]
    initial: Sequence[str]
    loss: float
    reference_loss: float
    vectors: Comparison | None = None
    gradients: Comparison | None
    norm: float | None
    reference_norm: float
    clipped: float = 1.0
    copied_square: float
    weights: Comparison
    states: Comparison | None
    moves: Comparison | None = None
    predict: float
    duplicates_lost: Sequence[str] = ()
    local_statistic: Sequence[str] = ()
    shards: Sequence[WrongShard] = field(default_factory=list[WrongShard])


def diagnose(evidence: TableEvidence) -> str | None:
    """One sentence on the likeliest cause; None if everything is equal."""
    if evidence.initial:
        location = _location(evidence, evidence.initial)
        return f"the rows of {listing(evidence.initial)} begin with other values{location}"
    if not relative(evidence.loss, evidence.reference_loss) <= TOLERANCE:
        return _loss(evidence)
    if evidence.gradients is not None and (wrong := above(evidence.gradients.errors)):
        return _gradients(wrong, evidence, evidence.gradients)
    if evidence.norm is not None and not relative(evidence.norm, evidence.reference_norm) <= TOLERANCE:
        return _norm(evidence, evidence.norm)
    states = above(evidence.states.errors) if evidence.states is not None else []
    weights = above(evidence.weights.errors)
    if states or weights:
        return _update(states, weights, evidence)
    if not evidence.predict <= TOLERANCE:
        return "a step is equal, but logits without an update are not: evaluation looks up other rows"
    return None


def _loss(evidence: TableEvidence) -> str:
    ratio = evidence.loss / evidence.reference_loss
    if not isfinite(ratio):
        return "the loss is not finite"
    for factor, unit in ((evidence.ranks, "times"), (1 / evidence.ranks, "of")):
        if evidence.ranks > 1 and abs(ratio / factor - 1.0) < FACTOR_TOLERANCE:
            return f"the loss is {ratio:.6g} {unit} the reference: it is no mean over the global batch"
    message = f"the loss is {ratio:.10g} times the reference"
    if evidence.vectors is None:
        return f"{message}: other rows are looked up, or sums are wrong"
    wrong = above(evidence.vectors.errors)
    if not wrong:
        return (
            f"{message}, of equal vectors from all tables: the dense networks or the mean over the batch "
            "differ"
        )
    return f"{message}: {_vectors(wrong, evidence.features)}"


def _vectors(wrong: list[str], features: Sequence[TableSpec]) -> str:
    """Why the pooled vectors of some features are wrong."""
    kinds = {
        "quotient-remainder tables": [spec.name for spec in features if spec.ids == "quotient-remainder"],
        "hash tables": [spec.name for spec in features if spec.ids == "hash"],
        "tables pooled by their mean": [spec.name for spec in features if spec.pooling == "mean"],
    }
    causes = (
        "ids are split, or their two vectors are combined, in another way",
        "ids have other rows, or are admitted or evicted at another time",
        "sums are divided by another number of ids",
    )
    for (kind, names), cause in zip(kinds.items(), causes, strict=True):
        if set(wrong) <= set(names) and len(names) < len(features):
            return f"only what {kind} return is wrong, {listing(wrong)}: {cause}"
    whose = _subject(wrong, [spec.name for spec in features], "table")
    return f"what {whose} returns is wrong: other rows are looked up, or sums are wrong"


def _gradients(wrong: list[str], evidence: TableEvidence, comparison: Comparison) -> str:
    tables = [name for name in wrong if name in evidence.tables]
    dense = [name for name in wrong if name not in evidence.tables]
    parameters = set(comparison.errors) - set(evidence.tables)
    parts = [
        *([_subject(tables, evidence.tables, "table")] if tables else []),
        *([_subject(dense, parameters, "dense parameter")] if dense else []),
    ]
    subject = " and ".join(f"the gradient of {part}" for part in parts)
    ratios = {comparison.ratios[name] for name in wrong}
    middle = sorted(ratios)[len(ratios) // 2]
    scaled = all(abs(ratio / middle - 1.0) < FACTOR_TOLERANCE for ratio in ratios) if middle else False
    if scaled and max(comparison.residuals[name] for name in wrong) <= FACTOR_TOLERANCE:
        whose = "dense networks" if not tables else "tables" if not dense else "all"
        return f"{subject} is {times(middle)} times the reference: {_scale(middle, evidence, whose)}"
    if not dense and set(tables) <= _factors(evidence.features):
        return (
            f"{subject} differs in direction, and only quotient-remainder tables do: the gradient of each "
            "factor is that of the vector times the other factor"
        )
    if tables and not dense and evidence.duplicates_lost and set(tables) <= set(evidence.duplicates_lost):
        return (
            f"{subject} differs only in rows that were looked up more than once: lookups of one row are "
            "lost, not summed"
        )
    if dense and not tables:
        # of what ranks hold, the ratio is that of the mean
        partial = all(
            abs(comparison.ratios[name] * evidence.ranks - 1.0) < FACTOR_TOLERANCE for name in dense
        )
        if evidence.ranks > 1 and partial:
            return f"{subject} differs: it is not summed over all ranks"
        return f"{subject} differs in direction: the backward of the dense networks differs"
    return (
        f"{subject} differs in direction: gradients go to other rows, or some ranks' are missing"
        + _location(evidence, tables)
    )


def _factors(features: Sequence[TableSpec]) -> set[str]:
    """The stored tables of quotient-remainder tables."""
    return {
        stored.name
        for spec in features
        if spec.ids == "quotient-remainder"
        for stored in physical_tables([spec])
    }


def times(ratio: float) -> str:
    """The ratio in as many digits as tell it from 1."""
    digits = next((n for n in range(6, 17) if f"{ratio:.{n}g}" != "1"), 17)
    return f"{ratio:.{digits}g}"


def _scale(ratio: float, evidence: TableEvidence, whose: str) -> str:
    if evidence.clipped < 1.0 and abs(ratio * evidence.clipped - 1.0) < FACTOR_TOLERANCE:
        return f"the inverse of the factor that clips, so the gradients of {whose} are not clipped"
    if evidence.ranks > 1 and abs(ratio / evidence.ranks - 1.0) < FACTOR_TOLERANCE:
        return (
            f"scaled by the number of ranks ({evidence.ranks}), as losses that are means of each rank's "
            "samples"
        )
    if evidence.ranks > 1 and abs(ratio * evidence.ranks - 1.0) < FACTOR_TOLERANCE:
        return f"divided by the number of ranks ({evidence.ranks}), as if averaged over them"
    return "wrong gradient scale"


def _norm(evidence: TableEvidence, norm: float) -> str:
    ratio = norm / evidence.reference_norm if evidence.reference_norm else 1.0
    message = (
        f"gradients are equal but their norm is {times(ratio)} times the reference, so clipping is wrong"
    )
    count = (
        1.0 + (norm**2 - evidence.reference_norm**2) / evidence.copied_square
        if evidence.copied_square
        else 1.0
    )
    if abs(count - round(count)) < FACTOR_TOLERANCE and round(count) in (0, *range(2, evidence.ranks + 1)):
        counted = f"counted {round(count)} times" if count > 1 else "not counted"
        return f"{message}: tables that every rank copies are {counted}"
    return f"{message}: a shard is left out, or counted more than once"


def _unclipped(states: Sequence[str], tables: Sequence[str], evidence: TableEvidence) -> bool:
    """Whether a first step has changed tables and their states as gradients do that are not clipped."""
    if evidence.clipped >= 1.0 or not tables:
        return False
    if states and evidence.states is not None:
        factors = [evidence.states.ratios[name] for name in states]
        powers = (1 / evidence.clipped, evidence.clipped**-2)
        return all(
            any(abs(factor / power - 1.0) < FACTOR_TOLERANCE for power in powers) for factor in factors
        )
    if evidence.moves is None:
        return False
    ratios = [evidence.moves.ratios[name] for name in tables if name in evidence.moves.ratios]
    return bool(ratios) and all(abs(ratio * evidence.clipped - 1.0) < FACTOR_TOLERANCE for ratio in ratios)


def _update(states: list[str], weights: list[str], evidence: TableEvidence) -> str:
    tables = [name for name in weights if name in evidence.tables]
    dense = [name for name in weights if name not in evidence.tables]
    equal = "gradients are equal, but " if evidence.gradients is not None else "without gradients being kept "
    owners = [name.rpartition(".")[0] for name in states]
    if _unclipped(states, tables, evidence):
        return (
            f"{equal}the rows of {listing(tables)} are updated by more, by the inverse of the factor that "
            "clips: the gradients of tables are not clipped"
        )
    if states and evidence.local_statistic and set(owners) <= set(evidence.local_statistic):
        return (
            f"{equal}the row statistic of {listing(owners)} is that of each shard's own columns: it is not "
            "the mean over all columns of the table"
        )
    if evidence.gradients is None and tables and set(tables) <= set(evidence.duplicates_lost):
        return (
            f"{equal}{listing(tables)} differs only in rows looked up more than once: lookups of one "
            "row are lost, or applied one after another"
        )
    if states:
        return f"{equal}the states {listing(states)} are not{_location(evidence, owners)}: the update differs"
    if dense and not tables:
        return f"{equal}the updated {listing(dense)} is not: the dense optimiser differs"
    location = _location(evidence, tables)
    return f"{equal}the updated rows of {listing(tables)} are not{location}: the update differs"


def _location(evidence: TableEvidence, names: Sequence[str]) -> str:
    """Which shards of these tables are wrong, if not all are."""
    wrong = sorted(
        {shard for shard in evidence.shards if shard.name in names}, key=lambda w: (w.name, w.part)
    )
    by_table: Mapping[str, list[WrongShard]] = {n: [w for w in wrong if w.name == n] for n in names}
    partial = [of for of in by_table.values() if of and len(of) < of[0].parts]
    if not partial:
        return ""
    first = partial[0][0]
    more = f" and {len(partial[0]) - 1} more" if len(partial[0]) > 1 else ""
    return f" (only part {first.part} of {first.parts} of {first.name}, on rank {first.rank}{more})"


def _subject(names: list[str], every: Collection[str], kind: str) -> str:
    return f"every {kind}" if len(names) == len(every) and len(every) > 1 else listing(names)


@dataclass(frozen=True)
class TableVerdict(Verdict):
    """One placement compared with the reference: the largest relative errors over all steps.

    In addition to language models' verdicts: states of the tables' optimiser, logits without an update, and
    where each table is placed.
    """

    state_error: float | None = None
    worst_state: str | None = None
    predict_error: float = 0.0
    placement: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def equal(self) -> bool:
        """Whether everything is within the tolerance."""
        within = self.predict_error <= self.tolerance and (self.state_error or 0.0) <= self.tolerance
        return within and super().equal
