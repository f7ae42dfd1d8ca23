"""The likeliest cause of a difference from one process, by one table for language models, recommenders and
users' models.

What tasks differ in is data in the evidence: names, kinds of parameters, sums over ranks, axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stretto.verify import causes
from stretto.verify.evidence import Cause, Evidence, above, listing

Rule = Callable[[Evidence, list[str]], Cause | str | None]
"""Returns its sentence, or None if its mark is not there."""


def _first_cause(rules: Sequence[Rule | str], evidence: Evidence, wrong: list[str]) -> Cause:
    for rule in rules:
        if isinstance(rule, str):
            about = {"loss": causes.loss_message(evidence), "norm": causes.norm_message(evidence)}
            misplaced = evidence.misplaced.get(wrong[0], "")
            about["location"] = (
                causes.shard_location(evidence.tables, wrong) if evidence.tables is not None else ""
            )
            names, equal = listing(wrong), causes.equal_so_far(evidence)
            return Cause(rule.format(names=names, equal=equal, misplaced=misplaced, **about))
        if (cause := rule(evidence, wrong)) is not None:
            return cause if isinstance(cause, Cause) else Cause(cause)
    raise AssertionError("the last cause of a quantity is a sentence")


def _experts(evidence: Evidence, wrong: list[str]) -> str | None:
    """Experts alone, or beside others that have a cause of their own."""
    sentence = causes.experts(evidence, wrong)
    others = [name for name in wrong if name not in evidence.experts]
    if sentence is None or not others:
        return sentence
    return f"{_first_cause(_OTHERS, evidence, others).sentence}; {sentence}"


_OTHERS: Sequence[Rule | str] = (
    causes.scaled,
    causes.unsummed,
    causes.quotient_tables,
    causes.lost_lookups,
    causes.unequal_counts,
    causes.no_gradient,
    causes.same_on_all_ranks,
    causes.rounded,
    causes.wrong_tables,
    causes.other_direction,
)
_OPTIMISER = "{equal} the updated {names} are not: the optimiser differs"

CAUSES: Mapping[str, Sequence[Rule | str]] = {
    "initial": ("the rows of {names} begin with other values{location}",),
    "loss": (
        causes.infinite_loss,
        causes.dropped_microbatch,
        causes.wrong_forward,
        causes.scaled_loss,
        causes.wrong_vectors,
        "{loss}: wrong data or a wrong forward",
    ),
    "gradients": (causes.tied, causes.router, _experts, *_OTHERS),
    "norm": (
        causes.misplaced_norm,
        causes.norm_of_ranks,
        causes.counted_again,
        "{norm}: a shard is left out, or a replicated or tied parameter counted more than once",
    ),
    "step": ("losses and gradients are equal, but the optimiser made no step on some rank",),
    "masters": (_OPTIMISER,),
    "states": (
        causes.unclipped_tables,
        causes.row_statistic,
        causes.lost_updates,
        causes.wrong_states,
        "{equal} the optimiser's {names} are not: the optimiser differs",
    ),
    "weights": (
        causes.router_correction,
        causes.stale_weights,
        causes.unclipped_tables,
        causes.lost_updates,
        causes.wrong_rows,
        causes.weights_of_ranks,
        _OPTIMISER,
    ),
    "buffers": (
        causes.batch_statistics,
        "weights are equal but the buffers {names} are not: ranks do not keep them alike",
    ),
    "logits": ("a step is equal, but logits without an update are not: evaluation looks up other rows",),
    "misplaced": ("numbers are equal, but of {names} {misplaced}, so checkpoints would be wrong",),
}
"""By quantity, in the order of computing: rules and sentences, in the order in which they are tried."""


def explain(evidence: Evidence) -> Cause | None:
    """Return the likeliest cause of a difference, or None if all is equal. Collective if the values of ranks
    were recorded.
    """
    for quantity, rules in CAUSES.items():
        if quantity == "initial":
            wrong = list(evidence.initial)
        elif quantity == "misplaced":
            wrong = list(evidence.misplaced)
        elif quantity == "step":
            wrong = [] if evidence.updated else [""]
        else:
            wrong = above(evidence.errors(quantity), evidence.bounds.get(quantity))
        if wrong:
            return _first_cause(rules, evidence, wrong)
    return None
