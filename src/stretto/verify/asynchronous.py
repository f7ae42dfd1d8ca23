"""The proof of a schedule that updates within the step: losses, and weights after so many delayed updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from stretto.config.schema import TrainConfig
from stretto.optim.build import build_rate
from stretto.train.replica import Replica
from stretto.verify.cases import Case
from stretto.verify.compare import Comparison, compare, relative
from stretto.verify.delayed import Delays
from stretto.verify.reference import Snapshot
from stretto.verify.step import Batch, run_step, wrongly_held
from stretto.verify.verdict import Verdict

# a replay does the same sums in another order
EXACT = 1e-12
# AdamW divides by a root that may be all but zero: what rounding leaves in a gradient grows by up to 1/eps
ADAPTIVE = 1e-9

Replay = Callable[[Delays, int], list[Snapshot]]  # of the delays, for so many steps; collective


def prove_asynchronous(
    case: Case, config: TrainConfig, replica: Replica, steps: Sequence[Batch], delays: Delays, replay: Replay
) -> Verdict:
    """Steps of the replica beside a replay of its delayed updates. Collective.

    Args:
        delays: what the schedule promises.
        replay: trains the plain model in one process with any delays.
    """
    reference, rate = replay(delays, len(steps)), build_rate(config)
    tolerance = EXACT if config.optim.name == "sgd" else ADAPTIVE
    wrong = wrongly_held(replica, reference[0].weights)
    losses, worst, updates, diagnosis = list[float](), None, 0, None
    for step, (batch, expected) in enumerate(zip(steps, reference, strict=True)):
        replica.set_rate(rate(step))
        losses.append(relative(run_step(replica, config, step, batch), float(expected.loss)))
        with replica.states.whole() as ours:
            weights = compare(ours, replica.places, expected.weights, expected.weight_scales)
        updates += delays.updates(config.microbatches)
        worst = weights if worst is None or not weights.error <= worst.error else worst
        if not (losses[-1] <= tolerance and weights.error <= tolerance):
            diagnosis = _diagnosis(replica, losses[-1], weights, updates, tolerance)
            if cause := _likely(replica, delays, step + 1, replay):
                diagnosis = f"{diagnosis}: {cause}"
            break
    assert worst is not None
    if diagnosis is None and wrong:
        name, why = next(iter(wrong.items()))
        diagnosis = f"numbers are equal, but of {name} {why}, so checkpoints would be wrong"
    facts = (max(losses), None, None, None, worst.error, worst.worst, diagnosis)
    return replace(Verdict(str(case), *facts), updates=updates, tolerance=tolerance)


def _diagnosis(replica: Replica, loss: float, weights: Comparison, updates: int, tolerance: float) -> str:
    where = f"the weights after {updates} delayed updates differ, most of all {weights.worst}"
    if loss <= tolerance:
        return f"the losses are equal, but {where}"
    return where


def _likely(replica: Replica, delays: Delays, steps: int, replay: Replay) -> str | None:
    """The first of some other delays whose replay the weights are equal to. Collective."""
    for said, other in _others(delays):
        snapshot = replay(other, steps)[-1]
        with replica.states.whole() as ours:
            error = compare(ours, replica.places, snapshot.weights).error
        if error <= ADAPTIVE:
            return f"they are those of updates {said}"
    return None


def _others(delays: Delays) -> list[tuple[str, Delays]]:
    """Delays that a wrong version would give, each with its words."""
    promised = delays.by_stage
    most = max(promised)
    tried = [
        ("one later than promised, on every stage", [d + 1 for d in promised]),
        ("one later than promised, where any are late", [d + (d > 0) for d in promised]),
        ("one earlier than promised", [max(0, d - 1) for d in promised]),
        ("that are not late at all", [0 for _ in promised]),
        ("as late as with vertical sync", [most for _ in promised]),
        ("as late as without vertical sync", [max(0, most - r) for r in range(len(promised))]),
    ]
    found: list[tuple[str, Delays]] = []
    for said, late in tried:
        other = replace(delays, by_stage=tuple(late))
        if other != delays and all(other != known for _, known in found):
            found.append((said, other))
    return found
