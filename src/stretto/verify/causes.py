"""Causes of a difference from one process: each usual bug leaves its mark.

A cause returns its sentence, or None if its mark is missing or the task lacks the data in which it would
show. Where a mark is exact (the sum over some ranks is the reference) and the values of ranks were recorded,
it is tested on the values themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations
from math import isfinite, log2, nan, prod
from statistics import median

import torch
from torch import Tensor, nn

from stretto.engine.parallel.control import gather_json
from stretto.recommender.placement import physical_tables
from stretto.verify.axes import combined, gathered, missing_over
from stretto.verify.compare import TOLERANCE, Comparison
from stretto.verify.evidence import (
    FACTOR_TOLERANCE,
    Cause,
    Evidence,
    RankValues,
    Sum,
    TableMarks,
    above,
    listing,
    times,
)
from stretto.verify.outputs import beside_rows, first_difference

_SHARING = 2  # stages that share a tied parameter: the embedding's and the head's
_PART_TOLERANCE = 0.15  # relative; how close a ratio must be to the share that a partial sum would have
_SHOWN = 4  # parameters that are named
_CLIPPING = 1e-4  # above what torch's clipping adds to a norm
_LEAST_SCALE = 2.0**6  # a smaller power of two may be a number of ranks
_SINGLE = 1e-5  # larger errors do not come from rounding to float32


# ---------------------------------------------------------------------- words


def _ratio(value: float | None, reference: float) -> float:
    return value / reference if value is not None and reference else nan


def shard_location(marks: TableMarks, names: Collection[str]) -> str:
    """The wrong shards of the first of these tables of which some are right."""
    wrong = sorted(
        {shard for shard in marks.wrong_shards if shard.name in names}, key=lambda w: (w.name, w.part)
    )
    by_table = [[shard for shard in wrong if shard.name == name] for name in names]
    shards = next((shards for shards in by_table if shards and len(shards) < shards[0].parts), None)
    if shards is None:
        return ""
    first, more = shards[0], f" and {len(shards) - 1} more" if len(shards) > 1 else ""
    return f" (only part {first.part} of {first.parts} of {first.name}, on rank {first.rank}{more})"


# ---------------------------------------------------------------------- loss


def infinite_loss(evidence: Evidence, wrong: list[str]) -> Cause | None:
    if evidence.loss is not None and isfinite(evidence.loss):
        return None
    module = None if evidence.values is None else _first_output(evidence, evidence.values)[0]
    return Cause("the loss is not finite", module)


def dropped_microbatch(evidence: Evidence, wrong: list[str]) -> str | None:
    count, ratio = evidence.microbatches, _loss_ratio(evidence)
    if not isfinite(ratio):
        return None
    short = (1.0 - ratio) * count
    missing = round(short)
    # microbatches differ in their losses, so a dropped one never leaves an exact fraction
    if not (0 < missing < count and FACTOR_TOLERANCE < abs(short - missing) < 0.2):
        return None
    return (
        f"the loss is {ratio:.4f} of the reference, about {missing} of {count} microbatches short: a "
        "microbatch is dropped"
    )


def wrong_forward(evidence: Evidence, wrong: list[str]) -> Cause | str | None:
    """The first module whose output differs; without one, how ranks combine their losses."""
    values = evidence.values
    if values is None:
        return None
    module, compared = _first_output(evidence, values)
    if module is None:
        right = "every output that was compared is the plain model's, but " if compared else ""
        return f"{right}{_wrong_reduction(evidence, values, compared)}"
    reason = _wrong_output(evidence, values, module)
    return Cause(f"{loss_message(evidence)}; the first output that differs is {module}'s{reason}", module)


def _first_output(evidence: Evidence, values: RankValues) -> tuple[str | None, int]:
    """The first module whose output differs, and how many outputs were compared."""
    tolerance = TOLERANCE if evidence.close <= FACTOR_TOLERANCE else evidence.close
    return first_difference(values.outputs, values.expected_outputs, beside_rows, tolerance)


def _wrong_reduction(evidence: Evidence, values: RankValues, compared: int) -> str:
    """A wrong combination of the ranks' losses, if the outputs are right."""
    losses = [None if loss is None else torch.tensor([loss]).double() for loss in values.losses]
    reference = torch.tensor([evidence.reference_loss]).double()
    ratio = _loss_ratio(evidence)
    message = loss_message(evidence)
    if missing := missing_over(losses, reference, values.axes, evidence.close):
        label, operation = missing
        return (
            f"the losses of {label} differ, and their {operation} is the reference: the loss that the step "
            "returns is not reduced over them"
        )
    if label := values.axes.of_size(ratio, evidence.close):
        return f"{message}, as if summed over {label}"
    if label := values.axes.of_size(1.0 / ratio, evidence.close):
        return f"{message}, as if not summed over {label}, or divided by their number twice"
    ranks = [f"{loss:.6g}" for loss in values.losses if loss is not None]
    if compared and len({*ranks}) > 1:
        return (
            f"the mean of the ranks' losses ({', '.join(ranks[:8])}) is {times(ratio)} the reference: means "
            "over unequal numbers of tokens are averaged; sum them, and divide by the number of tokens of "
            "the global batch"
        )
    return f"{message}: other samples, or another loss"


def _wrong_output(evidence: Evidence, values: RankValues, name: str) -> str:
    """What is wrong with the output of a module."""
    module = values.modules.get(name)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return (
            ": it normalises by the samples of one rank; convert it with "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
        )
    expected, actual = values.expected_outputs[name], values.outputs.get(name)
    shapes: list[list[int] | None] = gather_json(None if actual is None else list(actual.shape))
    if len({tuple(shape) for shape in shapes if shape}) != 1:
        return ""
    shape = next(filter(None, shapes))
    everywhere = gathered(None if actual is None else actual.to("cpu", torch.float64), shape)
    aligned = [value for value in everywhere if value is not None]
    if values.axes.over and (label := _summed(evidence, values, everywhere, expected)):
        return f": the outputs of {label} sum to the plain model's, so their all-reduce is missing"
    bias = values.initial.get(f"{name}.bias")
    if bias is not None and aligned and bias.shape == aligned[0].shape[-1:]:
        for count in range(2, len(everywhere) + 1):
            if _equal_rows(aligned[0] - (count - 1) * bias, expected, FACTOR_TOLERANCE):
                return f": its bias is added {count} times, once on each rank that has a part of its input"
    if all(bool((value - aligned[0]).abs().max() <= evidence.close) for value in aligned):
        ratio = _tensor_ratio(aligned[0], expected)
        if ratio is not None and (label := values.axes.of_size(ratio, evidence.close)):
            return f": it is {times(ratio)} the plain model's, as if summed over copies on {label}"
    return ""


def _summed(
    evidence: Evidence, values: RankValues, everywhere: Sequence[Tensor | None], expected: Tensor
) -> str | None:
    """The ranks whose outputs sum to the plain model's."""
    for label, groups in values.axes.over:
        sums = combined(everywhere, groups, mean=False)
        if all(_equal_rows(tensor, expected, evidence.close) for tensor in sums if tensor is not None):
            return label
    return None


def _equal_rows(actual: Tensor, expected: Tensor, close: float) -> bool:
    pair = beside_rows(actual, expected)
    return pair is not None and bool((pair[0] - pair[1]).abs().max() <= close * float(expected.abs().max()))


def _tensor_ratio(actual: Tensor, expected: Tensor) -> float | None:
    """The factor between two tensors of one shape; None if there is none."""
    if actual.shape != expected.shape:
        return None
    ratio = float((actual * expected).sum() / expected.square().sum())
    off = (actual - ratio * expected).abs().max()
    return ratio if bool(off <= FACTOR_TOLERANCE * float(expected.abs().max())) else None


def scaled_loss(evidence: Evidence, wrong: list[str]) -> str | None:
    ratio = _loss_ratio(evidence)
    for factor in (ratio, 1.0 / ratio if ratio else nan):
        if factor > 1.5 and abs(factor - round(factor)) < FACTOR_TOLERANCE:
            return f"{loss_message(evidence)}: wrong scale of the loss"
    return None


def wrong_vectors(evidence: Evidence, wrong: list[str]) -> str | None:
    """The features whose pooled vectors are wrong."""
    if evidence.tables is None:
        return None
    message, features = loss_message(evidence), evidence.tables.features
    if evidence.tables.vectors is None:
        return f"{message}: other rows are looked up, or sums are wrong"
    vectors = above(evidence.tables.vectors.errors)
    if not vectors:
        return (
            f"{message}, of equal vectors from all tables: the dense networks or the mean over the batch "
            "differ"
        )
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
        if set(vectors) <= set(names) and len(names) < len(features):
            return f"{message}: only what {kind} return is wrong, {listing(vectors)}: {cause}"
    whose = "every table" if len(vectors) == len(features) > 1 else listing(vectors)
    return f"{message}: what {whose} returns is wrong: other rows are looked up, or sums are wrong"


def _loss_ratio(evidence: Evidence) -> float:
    return _ratio(evidence.loss, evidence.reference_loss)


def loss_message(evidence: Evidence) -> str:
    return f"the loss is {times(_loss_ratio(evidence))} the reference"


# ---------------------------------------------------------------------- gradients


def _compared(evidence: Evidence) -> Comparison:
    assert evidence.gradients is not None
    return evidence.gradients


def _is_every(evidence: Evidence, wrong: Sequence[str]) -> bool:
    return len(wrong) > 0.9 * len(_compared(evidence).errors)


def _subject(evidence: Evidence, wrong: list[str]) -> str:
    if _is_every(evidence, wrong):
        return "every gradient"
    for kind, names in evidence.kinds.items():
        if len(wrong) > 1 and set(wrong) == set(names):
            return f"the gradient of every {kind}"
    return f"the gradient of {listing(wrong)}"


def _sums(evidence: Evidence, wrong: list[str]) -> list[Sum]:
    """The sums over several ranks that these gradients go through."""
    if evidence.values is not None:
        over = [(len(groups[0]), label) for label, groups in evidence.values.axes.over]
        return [Sum(holders, label.removeprefix(f"the {holders} ")) for holders, label in over]
    sums = [total for total in evidence.sums if total.holders > 1]
    if not _is_every(evidence, wrong) and evidence.tp > 1:
        sums.insert(0, Sum(evidence.tp, "tensor-parallel ranks", _OVER_TP))
    return sums


_OVER_TP = "the sum over tp of what ranks compute from their own tokens or heads"


def tied(evidence: Evidence, wrong: list[str]) -> str | None:
    if not set(wrong) <= set(evidence.tied):
        return None
    values = evidence.values
    close = evidence.close
    gradients = _compared(evidence)
    holders = _SHARING
    who = "stages"
    parts = list[Tensor]()
    if values is not None:
        local = values.actual.get(wrong[0], ())
        copies = [value for value in _gradients_of(values, wrong[0]) if value is not None]
        holders, who = max(len(copies), len(local)), "places"
        parts = copies if len(copies) > 1 else list(local)
    over = f"over the {holders} {who} that share it"
    message = f"only the gradient of the tied parameter {listing(wrong)} is wrong: it is"
    ratio = gradients.factor(wrong, close)
    if ratio is not None:
        if holders > 1 and abs(ratio / holders - 1.0) < close:
            return f"{message} {times(ratio)} the reference, summed twice {over}"
        if holders > 1 and abs(ratio * holders - 1.0) < close:
            return f"{message} {times(ratio)} the reference, averaged {over}"
        return f"{message} {times(ratio)} the reference: {_scale(evidence, ratio, _sums(evidence, wrong))}"
    if values is None:
        part = gradients.ratio(wrong, close)
        missing = part is not None and abs(part * holders - 1.0) < close
    else:
        missing = len(parts) > 1 and _equal_to(torch.stack(parts).sum(0), values.expected[wrong[0]], close)
    return (
        f"{message} not summed {over}" if missing else f"{message} not the sum over the {who} that share it"
    )


def _gradients_of(values: RankValues, name: str) -> list[Tensor | None]:
    """Every rank's gradient of a parameter. Collective."""
    gradients = values.actual.get(name)
    return gathered(gradients[0] if gradients else None, tuple(values.expected[name].shape))


def _equal_to(value: Tensor, expected: Tensor, close: float) -> bool:
    return bool((value - expected).abs().max() <= close * float(expected.abs().max()))


def router(evidence: Evidence, wrong: list[str]) -> str | None:
    """The router at which the backward goes wrong: its experts are right, and all that comes later."""
    order = list(_compared(evidence).errors)
    routers = [name for name in wrong if ".router." in name]
    if not routers or not evidence.experts:
        return None
    sums = [Sum(evidence.tp, "", ""), *evidence.sums]
    if scaled(evidence, wrong, None, sums) or unsummed(evidence, wrong, None, sums):
        return None
    last = max(routers, key=order.index)
    block = last.partition(".router.")[0]
    experts = {name for name in evidence.experts if name.startswith(f"{block}.")}
    later = [name for name in wrong if order.index(name) > order.index(last)]
    if not experts or later or experts & set(wrong):
        return None
    return (
        f"the gradient of {last} is wrong, and those of its experts and of all that comes later are right: "
        "the gradient of the routing weights is dropped or wrong"
    )


def experts(evidence: Evidence, wrong: list[str]) -> str | None:
    """Experts alone, or beside others by a cause of their own."""
    experts = [name for name in wrong if name in evidence.experts]
    dense = [name for name in wrong if name not in evidence.experts]
    if not experts or (dense and _compared(evidence).ratio(wrong, evidence.close) is not None):
        return None  # one sum is missing, or one that spoils all before it
    subject = f"the gradient of experts alone, {listing(experts)},"
    copies, who = evidence.expert_copies, "ranks that hold the same experts"
    sums = [Sum(copies, who, "the reduction over expert_dp")] if copies > 1 else []
    return (
        scaled(evidence, experts, subject, sums)
        or unsummed(evidence, experts, subject, sums)
        or f"{subject} differs in direction: it is summed over ranks that hold other experts (expert_dp is "
        "not dp), or tokens go to the wrong experts"
    )


def scaled(
    evidence: Evidence, wrong: list[str], subject: str | None = None, sums: Sequence[Sum] | None = None
) -> str | None:
    """The factor that explains all of these gradients, if there is one."""
    subject, sums = subject or _subject(evidence, wrong), _sums(evidence, wrong) if sums is None else sums
    ratio = _compared(evidence).factor(wrong, evidence.close)
    if ratio is None:
        return None
    scale = _scale(evidence, ratio, sums)
    if evidence.values is not None and ratio < 1.0 and evidence.clip is None and _is_every(evidence, wrong):
        norm = ratio * evidence.reference_norm
        scale += f" (or clipping by code of the step's own: then give clip={norm:.4g})"
    return f"{subject} is {times(ratio)} the reference: {scale}"


def _scale(evidence: Evidence, ratio: float, sums: Sequence[Sum]) -> str:
    """The meaning of a factor between gradients and the reference."""
    clip, watched = evidence.clip, evidence.values is not None
    if clip is not None and abs(_ratio(ratio * clip, evidence.reference_norm) - 1.0) < _CLIPPING:
        return f"as if the step did not clip to a norm of {clip:g}"
    if label := _of_size(sums, ratio, evidence.close):
        over = f"over {label} where the mean is due, or summed twice" if watched else f"twice over {label}"
        return f"wrong gradient scale, as if summed {over}"
    if label := _of_size(sums, 1.0 / ratio, evidence.close):
        due = " where the sum is due, or averaged twice" if watched else ""
        return f"wrong gradient scale, as if averaged over {label}{due}"
    if scale := _loss_scale(ratio):
        used = "used" if clip is None else "clipped"
        return f"as if gradients were {used} before the loss scale of {scale:g} was undone"
    if scale := _loss_scale(1.0 / ratio):
        return f"as if gradients were clipped before the loss scale of {scale:g} was undone"
    return "wrong gradient scale"


def _of_size(sums: Sequence[Sum], size: float, close: float) -> str:
    """The ranks of the sums over this number of holders, in words."""
    return " or ".join(f"the {s.holders} {s.who}" for s in sums if abs(s.holders / size - 1.0) < close)


def _loss_scale(ratio: float) -> float | None:
    """The loss scale that a ratio equals; loss scales are powers of two."""
    if not ratio >= _LEAST_SCALE * (1.0 - FACTOR_TOLERANCE):
        return None
    scale = 2.0 ** round(log2(ratio))
    return scale if abs(ratio / scale - 1.0) < 1e-4 else None


def unsummed(
    evidence: Evidence, wrong: list[str], subject: str | None = None, sums: Sequence[Sum] | None = None
) -> str | None:
    """A missing sum over ranks: their gradients add up to the reference."""
    subject, sums = subject or _subject(evidence, wrong), _sums(evidence, wrong) if sums is None else sums
    if (values := evidence.values) is not None:
        name = _worst(evidence, wrong)
        missing = missing_over(
            _gradients_of(values, name), values.expected[name], values.axes, evidence.close
        )
        if missing is None:
            return None
        label, operation = missing
        return (
            f"{subject} differs between {label}, and their {operation} is the reference: the reduction over "
            "them is missing"
        )
    ratio = _compared(evidence).ratio(wrong, evidence.close)  # if several ranks have one, that of the mean
    if ratio is None or (evidence.tables is not None and set(wrong) & set(evidence.tables.names)):
        return None
    together = next(filter(None, (_together(sums, n, 1.0 / ratio) for n in range(1, len(sums) + 1))), [])
    if not together:
        return None
    names = " or ".join(" and ".join(total.name for total in sums) for sums in together)
    whose = f"the {together[0][0].holders} {together[0][0].who}"
    if len(together[0]) > 1 or len(together) > 1:
        whose = f"its {round(1.0 / ratio)} holders"
    are = "are" if len(together[-1]) > 1 else "is"
    return f"{subject} differs between {whose}, and their sum is the reference: {names} {are} missing"


def _together(
    sums: Sequence[Sum], count: int, holders: float, tolerance: float = FACTOR_TOLERANCE
) -> list[tuple[Sum, ...]]:
    """Combinations of `count` sums that have this number of holders together."""
    return [
        chosen
        for chosen in combinations(sums, count)
        if abs(prod(total.holders for total in chosen) / holders - 1.0) < tolerance
    ]


def _worst(evidence: Evidence, wrong: Sequence[str]) -> str:
    return max(wrong, key=lambda name: _compared(evidence).errors[name])


def quotient_tables(evidence: Evidence, wrong: list[str]) -> str | None:
    specs = () if evidence.tables is None else evidence.tables.features
    factors = [spec for spec in specs if spec.ids == "quotient-remainder"]
    if not set(wrong) <= {stored.name for spec in factors for stored in physical_tables([spec])}:
        return None
    return (
        f"{_subject(evidence, wrong)} differs in direction, and only quotient-remainder tables do: the "
        "gradient of each factor is that of the vector times the other factor"
    )


def lost_lookups(evidence: Evidence, wrong: list[str]) -> str | None:
    if evidence.tables is None or not set(wrong) <= set(evidence.tables.duplicates_lost):
        return None
    return (
        f"{_subject(evidence, wrong)} differs only in rows that were looked up more than once: lookups of "
        "one row are lost, not summed"
    )


def unequal_counts(evidence: Evidence, wrong: list[str]) -> str | None:
    """The ranks' gradients are averaged, and their shares differ in tokens."""
    values = evidence.values
    if values is None or values.share_gradients is None:
        return None
    name = _worst(evidence, wrong)
    share, shape = values.share_gradients().get(name), tuple(values.expected[name].shape)
    shares = [value for value in gathered(share, shape) if value is not None]
    actual = [value for value in _gradients_of(values, name) if value is not None]
    if not shares or not actual:
        return None
    mean = torch.stack(shares).mean(0)
    if not all(_equal_to(value, mean, evidence.close) for value in actual):
        return None
    return (
        f"{_subject(evidence, wrong)} differs in direction: it is the mean of what each rank's share gives "
        "alone, and the shares have unequal numbers of tokens: sum the losses, and divide by the number of "
        "tokens of the global batch"
    )


def no_gradient(evidence: Evidence, wrong: list[str]) -> str | None:
    if evidence.values is None or any(_compared(evidence).ratios[name] for name in wrong):
        return None
    return f"{_subject(evidence, wrong)} is zero or missing: nothing of the loss reaches it"


def same_on_all_ranks(evidence: Evidence, wrong: list[str]) -> str | None:
    if evidence.values is None or not _is_every(evidence, wrong):
        return None
    everywhere = _gradients_of(evidence.values, _worst(evidence, wrong))
    present = [value for value in everywhere if value is not None]
    if any(not torch.equal(value, present[0]) for value in present[1:]):
        return None
    return (
        "every gradient differs in direction, and is the same on every rank: it is averaged over ranks with "
        "unequal numbers of tokens, or some rank's part is left out"
    )


def rounded(evidence: Evidence, wrong: list[str]) -> str | None:
    largest = max(_compared(evidence).errors[name] for name in wrong)
    if evidence.values is not None or not largest < _SINGLE:
        return None
    return (
        f"{_subject(evidence, wrong)} is off by {largest:.1e} of its largest value, as if something were "
        "computed or sent in float32"
    )


def wrong_tables(evidence: Evidence, wrong: list[str]) -> str | None:
    if evidence.tables is None:
        return None
    subject = f"{_subject(evidence, wrong)} differs in direction"
    tables = [name for name in wrong if name in evidence.tables.names]
    if not tables:
        return f"{subject}: the backward of the dense networks differs"
    location = shard_location(evidence.tables, tables)
    return f"{subject}: gradients go to other rows, or some ranks' are missing{location}"


def other_direction(evidence: Evidence, wrong: list[str]) -> str:
    cause = _lost_parts(evidence, wrong) or "a reduction is missing or a shard is misplaced"
    if evidence.recompute != "none":
        again = f"what runs again (recompute={evidence.recompute}) is not what ran"
        cause = f"{cause}, or {again}, as with other dropout"
    if evidence.values is not None:
        cause += _right_down_to(evidence, evidence.values, wrong)
    return f"{_subject(evidence, wrong)} differs in direction, not only in scale: {cause}"


def _lost_parts(evidence: Evidence, wrong: Sequence[str]) -> str | None:
    """A sum whose missing parts cannot be computed exactly: the other ranks' parts of a shard are gone, and
    the remainder is about as large as its share of the tokens.
    """
    ratio, shards = median(_compared(evidence).ratios[name] for name in wrong), evidence.shards
    for count in range(1, len(shards) + 1):
        if ratio and (together := _together(shards, count, 1.0 / ratio, _PART_TOLERANCE)):
            sums = [" and ".join(f"the {total.holders} {total.who}" for total in sums) for sums in together]
            return f"about {ratio:.2f} of it is there, as if it were not summed over {' or '.join(sums)}"
    return None


def _right_down_to(evidence: Evidence, values: RankValues, wrong: Collection[str]) -> str:
    """The module down to which the backward is right: later ones have right gradients."""
    order = [*values.expected_outputs]
    position = {path: index for index, path in enumerate(order)}
    paths = [name.rpartition(".")[0] for name in wrong]
    last = max((position[path] for path in paths if path in position), default=len(order))
    owners = {name.rpartition(".")[0] for name in _compared(evidence).errors}
    right = [path for path in order[last + 1 :] if path in owners]
    return f"; the backward is right down to {right[0]}" if right else ""


# ---------------------------------------------------------------------- norm


def norm_message(evidence: Evidence) -> str:
    ratio = times(_ratio(evidence.norm, evidence.reference_norm))
    return f"gradients are equal but their norm is {ratio} the reference, so clipping is wrong"


def misplaced_norm(evidence: Evidence, wrong: list[str]) -> str | None:
    if not evidence.misplaced:
        return None
    name, reason = next(iter(evidence.misplaced.items()))
    others = f", and of {len(evidence.misplaced) - 1} more" if len(evidence.misplaced) > 1 else ""
    return f"{norm_message(evidence)}: of {name} {reason}{others}"


def norm_of_ranks(evidence: Evidence, wrong: list[str]) -> str | None:
    """The ranks over which the squared norm is not summed, or summed although they have copies."""
    if (values := evidence.values) is None:
        return None
    message, ratio = norm_message(evidence), _ratio(evidence.norm, evidence.reference_norm)
    squares = [None if norm is None else torch.tensor([norm**2]).double() for norm in values.norms]
    reference = torch.tensor([evidence.reference_norm**2]).double()
    missing = missing_over(squares, reference, values.axes, evidence.close)
    if missing is not None and missing[1] == "sum":
        return (
            f"{message}: each rank's is over its own shards only, its square is not summed over {missing[0]}"
        )
    if scale := _loss_scale(ratio):
        return f"{message}: it is taken before the loss scale of {scale:g} is undone"
    if label := values.axes.of_size(ratio**2, evidence.close):
        return f"{message}: every element is counted once on each of {label}, as if copies were parts"
    if label := values.axes.of_size(1.0 / ratio**2, evidence.close):
        return f"{message}: its square is not summed over {label}"
    return None


def counted_again(evidence: Evidence, wrong: list[str]) -> str | None:
    """All elements, or those of some parameters, are counted by a wrong number of ranks."""
    message, ratio = norm_message(evidence), _ratio(evidence.norm, evidence.reference_norm)
    if evidence.values is not None or not isfinite(ratio):
        return None
    count = round(ratio**2)
    if count > 1 and abs(ratio**2 - count) < FACTOR_TOLERANCE * count:
        return f"{message}: every element is counted {count} times, as if copies of shards were parts"
    for part in evidence.norm_parts:
        counted = 1.0 + (ratio**2 - 1.0) / part.share if part.share else 1.0
        if counted > 1.5 and abs(counted - round(counted)) < FACTOR_TOLERANCE * counted:
            return f"{message}: {part.who} are counted {round(counted)} times"
        if abs(counted) < FACTOR_TOLERANCE:
            return f"{message}: {part.who} are not counted"
        if part.over is not None and 0.0 < counted < 1.0:
            part_of_it = f"as if {counted:.0%} of the {part.who} were counted"
            return f"{message}, {part_of_it}: the sum over {part.over} is missing"
    return None


# ---------------------------------------------------------------------- update


def equal_so_far(evidence: Evidence) -> str:
    if evidence.gradients is None:
        return "losses are equal (gradients were not recorded) but"
    return "gradients and norm are equal but"


def unclipped_tables(evidence: Evidence, wrong: list[str]) -> str | None:
    """In the first step, tables and their states change as much as unclipped gradients would change them."""
    if evidence.tables is None or evidence.clip is None or not evidence.clip < evidence.reference_norm:
        return None
    inverse = evidence.reference_norm / evidence.clip
    weights = above(evidence.weights.errors)
    tables = [name for name in weights if name in evidence.tables.names]
    states = above(evidence.errors("states"))
    if states and evidence.states is not None:
        ratios, powers = [evidence.states.ratios[name] for name in states], (1, 2)
    else:
        moves = evidence.tables.moves
        ratios = [] if moves is None else [moves.ratios[name] for name in tables if name in moves.ratios]
        powers = (1,)
    if not tables or not ratios:
        return None
    if not all(any(abs(ratio / inverse**n - 1.0) < _CLIPPING for n in powers) for ratio in ratios):
        return None
    return (
        f"{equal_so_far(evidence)} the rows of {listing(tables)} are updated by {times(inverse)} as much: "
        "the gradients of tables are not clipped"
    )


def row_statistic(evidence: Evidence, wrong: list[str]) -> str | None:
    owners = [name.rpartition(".")[0] for name in wrong]
    if evidence.tables is None or not set(owners) <= set(evidence.tables.local_statistic):
        return None
    return (
        f"{equal_so_far(evidence)} the row statistic of {listing(owners)} is that of each shard's own "
        "columns: it is not the mean over all columns of the table"
    )


def lost_updates(evidence: Evidence, wrong: list[str]) -> str | None:
    if evidence.tables is None or evidence.gradients is not None:
        return None
    tables = [name for name in above(evidence.weights.errors) if name in evidence.tables.names]
    if not tables or not set(tables) <= set(evidence.tables.duplicates_lost):
        return None
    return (
        f"{equal_so_far(evidence)} {listing(tables)} differs only in rows looked up more than once: lookups "
        "of one row are lost, or applied one after another"
    )


def wrong_states(evidence: Evidence, wrong: list[str]) -> str | None:
    if evidence.tables is None:
        return None
    location = shard_location(evidence.tables, [name.rpartition(".")[0] for name in wrong])
    return f"{equal_so_far(evidence)} the states {listing(wrong)} are not{location}: the optimiser differs"


def router_correction(evidence: Evidence, wrong: list[str]) -> str | None:
    if not all(name.endswith("router.correction") for name in wrong):
        return None
    return (
        f"all else is equal, but {_ranks(evidence)} moved {listing(wrong)} by other loads than those of the "
        "step: they are not summed over all ranks and microbatches, or the correction is missing"
    )


def stale_weights(evidence: Evidence, wrong: list[str]) -> str | None:
    if evidence.masters is None:
        return None
    other = f"{_ranks(evidence)} would compute with other {listing(wrong)}"
    message = f"what optimisers updated is equal, but {other}: "
    if evidence.updated_here is not None and not above(evidence.updated_here.errors):
        return f"{message}of what others have updated it has older values, so they do not come"
    return (
        f"{message}updated values are not copied into the weights, or older ones that were gathered are kept"
    )


def _ranks(evidence: Evidence) -> str:
    """The ranks whose weights differ."""
    ranks = evidence.weights.ranks
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_SHOWN]))}{more}"


def wrong_rows(evidence: Evidence, wrong: list[str]) -> str | None:
    tables = [] if evidence.tables is None else [name for name in wrong if name in evidence.tables.names]
    if evidence.tables is None or not tables:
        return None
    location = shard_location(evidence.tables, tables)
    return (
        f"{equal_so_far(evidence)} the updated rows of {listing(tables)} are not{location}: the optimiser "
        "differs"
    )


def weights_of_ranks(evidence: Evidence, wrong: list[str]) -> str | None:
    ranks = evidence.weights.ranks
    if evidence.values is None or not 0 < len(ranks) < len(evidence.values.losses):
        return None
    location = f"(on ranks {', '.join(map(str, ranks[:4]))})"
    message = f"{equal_so_far(evidence)} the updated {listing(wrong)} are not {location}"
    return f"{message}: updated weights do not reach these ranks"


def batch_statistics(evidence: Evidence, wrong: list[str]) -> str | None:
    modules = {} if evidence.values is None else evidence.values.modules
    owners = [modules.get(name.rpartition(".")[0]) for name in wrong]
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in owners):
        return None
    return (
        f"weights are equal but the buffers {listing(wrong)} are not: each rank keeps statistics of its "
        "own samples; convert with torch.nn.SyncBatchNorm.convert_sync_batchnorm"
    )
