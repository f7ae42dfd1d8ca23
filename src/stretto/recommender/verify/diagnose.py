"""What a proof of one placement says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from stretto.engine.parallel.control import gather_json
from stretto.recommender.placement import Placements
from stretto.recommender.verify.local_shards import Beside, Holding
from stretto.recommender.verify.reference import Snapshot
from stretto.run.verify.compare import NOTHING, Comparison, relative
from stretto.run.verify.diagnose import TOLERANCE, Verdict

_CLOSE = 1e-6


def duplicates_lost(
    beside: Sequence[Beside], held: Sequence[Holding], lookups: Mapping[str, Tensor]
) -> list[str]:
    """Tables that differ, and only in rows that were looked up more than once. Collective."""
    by_number = {one.shard.number: one for one in held}
    wrong, others = set[str](), set[str]()
    for one in beside:
        rows = _wrong_rows(one)
        if bool(rows.any()):
            often = lookups[one.name][by_number[one.shard.number].whole]
            (wrong if bool((often[rows] > 1).all()) else others).add(one.shard.name)
    gathered: list[list[list[str]]] = gather_json([sorted(wrong), sorted(others)])
    spoilt = {name for _, rank_others in gathered for name in rank_others}
    return sorted({name for rank_wrong, _ in gathered for name in rank_wrong} - spoilt)


def own_statistic(
    states: Sequence[Beside],
    held: Sequence[Holding],
    placed: Placements,
    before: Mapping[str, Tensor],
    expected: Snapshot,
) -> list[str]:
    """Tables split by columns whose row statistic is right for each shard's own columns. Collective."""
    by_number = {one.shard.number: one for one in held}
    wrong = set[str]()
    for one in states:
        name = one.shard.name
        if one.ours.dim() != 1 or placed[name].split != "column" or not bool(_wrong_rows(one).any()):
            continue
        holding = by_number[one.shard.number]
        gradient = holding.part(expected.gradients[name] * expected.clipped)
        alone = holding.part(before[one.name]) + gradient.square().mean(1)
        scale = float(alone.abs().max()) or 1.0
        if float((one.ours - alone).abs().max()) <= _CLOSE * scale:
            wrong.add(name)
    gathered: list[list[str]] = gather_json(sorted(wrong))
    return sorted({name for names in gathered for name in names})


def _wrong_rows(one: Beside) -> Tensor:
    """[rows] whether they differ."""
    if not one.ours.numel():
        return torch.zeros(len(one.ours), dtype=torch.bool)
    off = (one.ours - one.reference).abs()
    off = off.amax(1) if off.dim() == 2 else off
    scale = float(one.reference.abs().max()) or 1.0
    return ~(off <= NOTHING * scale)


_SAME = 1e-6  # factors this close are one factor
_SHOWN = 4  # names that are said


@dataclass(frozen=True)
class Wrong:
    """A shard whose part differs."""

    name: str
    part: int
    parts: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One step of a placement beside the reference.

    ranks: how many there are.
    tables: names of the stored tables; all else is dense.
    copied, by_columns: those that every rank copies, and those that are split by columns.
    initial: tables that began with other values.
    gradients: of tables and dense parameters; None where the step kept none, as a job does.
    norm, reference_norm: None where it is not computed.
    copied_square: the part of copied tables in the reference's squared norm.
    duplicates_lost: tables of which only rows are wrong that were looked up more than once.
    own_statistic: tables whose row statistic is that of each shard's own columns.
    shards: those whose rows differ.
    lone: tables of which gradients differ on some shards alone.
    predict: relative error of the logits of a batch that is not trained on.
    """

    ranks: int
    tables: Collection[str]
    copied: Collection[str]
    by_columns: Collection[str]
    initial: Sequence[str]
    loss: float
    reference_loss: float
    gradients: Comparison | None
    norm: float | None
    reference_norm: float
    copied_square: float
    weights: Comparison
    states: Comparison | None
    predict: float
    duplicates_lost: Sequence[str] = ()
    own_statistic: Sequence[str] = ()
    shards: Sequence[Wrong] = field(default_factory=list[Wrong])


def diagnose(seen: Seen) -> str | None:
    """One sentence on the likeliest cause; None when all is equal."""
    if seen.initial:
        return f"the rows of {_names(seen.initial)} begin with other values{_where(seen, seen.initial)}"
    if not relative(seen.loss, seen.reference_loss) <= TOLERANCE:
        return _loss(seen)
    if seen.gradients is not None and (wrong := _above(seen.gradients.errors)):
        return _gradients(wrong, seen, seen.gradients)
    if seen.norm is not None and not relative(seen.norm, seen.reference_norm) <= TOLERANCE:
        return _norm(seen, seen.norm)
    states = _above(seen.states.errors) if seen.states is not None else []
    weights = _above(seen.weights.errors)
    if states or weights:
        return _update(states, weights, seen)
    if not seen.predict <= TOLERANCE:
        return "a step is equal, but logits without an update are not: evaluation looks up other rows"
    return None


def _loss(seen: Seen) -> str:
    ratio = seen.loss / seen.reference_loss
    if not isfinite(ratio):
        return "the loss is not finite"
    for factor, said in ((seen.ranks, "times"), (1 / seen.ranks, "of")):
        if seen.ranks > 1 and abs(ratio / factor - 1.0) < _SAME:
            return f"the loss is {ratio:.6g} {said} the reference: it is no mean over the global batch"
    return f"the loss is {ratio:.10g} times the reference: other rows are looked up, or sums are wrong"


def _gradients(wrong: list[str], seen: Seen, comparison: Comparison) -> str:
    tables = [name for name in wrong if name in seen.tables]
    dense = [name for name in wrong if name not in seen.tables]
    where = " and ".join(
        said
        for said in (
            f"the gradient of {_some(tables, seen.tables, 'table')}" if tables else "",
            f"the gradient of {_some(dense, set(comparison.errors) - set(seen.tables), 'dense parameter')}"
            if dense
            else "",
        )
        if said
    )
    ratios = {comparison.ratios[name] for name in wrong}
    middle = sorted(ratios)[len(ratios) // 2]
    scaled = all(abs(ratio / middle - 1.0) < _SAME for ratio in ratios) if middle else False
    if scaled and max(comparison.residuals[name] for name in wrong) <= _SAME:
        return f"{where} is {middle:.6g} times the reference: {_scale(middle, seen)}"
    if tables and not dense and seen.duplicates_lost and set(tables) <= set(seen.duplicates_lost):
        return (
            f"{where} differs only in rows that were looked up more than once: lookups of one row are lost, "
            "not summed"
        )
    if dense and not tables:
        return f"{where} differs: it is not summed over all ranks"
    return f"{where} differs in direction: gradients go to other rows, or some ranks' are missing" + _where(
        seen, tables
    )


def _scale(ratio: float, seen: Seen) -> str:
    if seen.ranks > 1 and abs(ratio / seen.ranks - 1.0) < _SAME:
        return (
            f"scaled by the number of ranks ({seen.ranks}), as losses that are means of each rank's samples"
        )
    if seen.ranks > 1 and abs(ratio * seen.ranks - 1.0) < _SAME:
        return f"divided by the number of ranks ({seen.ranks}), as if averaged over them"
    return "wrong gradient scale"


def _norm(seen: Seen, norm: float) -> str:
    ratio = norm / seen.reference_norm if seen.reference_norm else 1.0
    said = f"gradients are equal but their norm is {ratio:.6g} times the reference, so clipping is wrong"
    times = 1.0 + (norm**2 - seen.reference_norm**2) / seen.copied_square if seen.copied_square else 1.0
    if abs(times - round(times)) < _SAME and round(times) in (0, *range(2, seen.ranks + 1)):
        counted = f"counted {round(times)} times" if times > 1 else "not counted"
        return f"{said}: tables that every rank copies are {counted}"
    return f"{said}: a shard is left out, or counted more than once"


def _update(states: list[str], weights: list[str], seen: Seen) -> str:
    tables = [name for name in weights if name in seen.tables]
    dense = [name for name in weights if name not in seen.tables]
    equal = "gradients are equal, but " if seen.gradients is not None else "without gradients being kept "
    owners = [name.rpartition(".")[0] for name in states]
    if states and seen.own_statistic and set(owners) <= set(seen.own_statistic):
        return (
            f"{equal}the row statistic of {_names(owners)} is that of each shard's own columns: it is not "
            "the mean over all columns of the table"
        )
    if seen.gradients is None and tables and set(tables) <= set(seen.duplicates_lost):
        return (
            f"{equal}{_names(tables)} differs only in rows looked up more than once: lookups of one "
            "row are lost, or applied one after another"
        )
    if states:
        return f"{equal}the states {_names(states)} are not{_where(seen, owners)}: the update differs"
    if dense and not tables:
        return f"{equal}the updated {_names(dense)} is not: the dense optimiser differs"
    return f"{equal}the updated rows of {_names(tables)} are not{_where(seen, tables)}: the update differs"


def _where(seen: Seen, names: Sequence[str]) -> str:
    """Which shards of these tables are wrong, where not all are."""
    wrong = sorted({one for one in seen.shards if one.name in names}, key=lambda w: (w.name, w.part))
    by_table: Mapping[str, list[Wrong]] = {n: [w for w in wrong if w.name == n] for n in names}
    some = [of for of in by_table.values() if of and len(of) < of[0].parts]
    if not some:
        return ""
    first = some[0][0]
    more = f" and {len(some[0]) - 1} more" if len(some[0]) > 1 else ""
    return f" (only part {first.part} of {first.parts} of {first.name}, on rank {first.rank}{more})"


def _some(names: list[str], every: Collection[str], what: str) -> str:
    return f"every {what}" if len(names) == len(every) and len(every) > 1 else _names(names)


def _names(names: Sequence[str]) -> str:
    kept = list(dict.fromkeys(names))
    more = f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else ""
    return ", ".join(kept[:_SHOWN]) + more


def _above(errors: Mapping[str, float]) -> list[str]:
    """Names with an error above the tolerance, the worst first."""
    above = [name for name, error in errors.items() if not error <= TOLERANCE]
    return sorted(above, key=lambda name: -errors[name])


@dataclass(frozen=True)
class TableVerdict(Verdict):
    """One placement against the reference: largest relative errors over all steps.

    Beside what is said of language models: of the states of the tables' optimiser, of logits without an
    update, and where each table is.
    """

    state_error: float | None = None
    worst_state: str | None = None
    predict_error: float = 0.0
    placement: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def equal(self) -> bool:
        """Everything within the tolerance."""
        within = self.predict_error <= self.tolerance and (self.state_error or 0.0) <= self.tolerance
        return within and super().equal
