"""The proof of a schedule that updates within the step: losses, and weights after the delayed updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stretto.engine.models.language import IGNORED
from stretto.errors import StrettoError
from stretto.job.flops import layer_names
from stretto.job.job import Job
from stretto.verify.compare import Snapshot
from stretto.verify.evidence import Verdict
from stretto.verify.language.cases import describe
from stretto.verify.language.reference import Loads, Trial, build_reference
from stretto.verify.language.step import Fresh, Steps, only_unread, wrong_use_verdict, wrongly_held
from stretto.verify.optimizer import ReferenceOptimizer

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Delays:
    """How late a schedule's updates are.

    by_stage: updates that a stage makes between a gradient's weights and the gradient's own update.
    group: microbatches of one update.
    """

    by_stage: tuple[int, ...]
    group: int

    def updates(self, microbatches: int) -> int:
        """Return the number of updates in a step."""
        return -(-microbatches // self.group)


def promised(schedule: str, options: Mapping[str, Any], pp: int, microbatches: int) -> Delays:
    """The delays that a schedule promises.

    `pipedream` (Narayanan et al. 2019, sections 3.2 and 3.3): stage r of p stages is p-1-r updates late, with
    vertical sync every stage p-1; an update for each microbatch. `pipedream-2bw` (Narayanan et al. 2021,
    section 3.1): one update late everywhere, an update for `group` microbatches, p unless given.

    Raises:
        StrettoError: a schedule whose delays are not listed here.
    """
    if schedule == "pipedream":
        late = [pp - 1] * pp if options.get("vertical_sync") else [pp - 1 - r for r in range(pp)]
        return Delays(tuple(late), 1)
    if schedule == "pipedream-2bw":
        return Delays((1,) * pp, options.get("group") or min(pp, microbatches))
    raise StrettoError(
        f"schedule {schedule} updates within the step, and there is no replay of its updates",
        hint="prove it with another schedule, or add it to stretto.verify.language.asynchronous.promised",
    )


def windows_of(job: Job, steps: int) -> tuple[int, ...]:
    """Return the lengths of windows between drains: all steps but the last, and the last by itself; single
    steps if the job drains after each.
    """
    return (1,) * steps if job.window is None or steps < 2 else (steps - 1, 1)


def run_delayed(job: Job, trial: Trial, delays: Delays, windows: Sequence[int]) -> list[Snapshot]:
    """Train the plain model in float64 with delayed updates.

    Args:
        job: its data-parallel size says which samples are one microbatch of all replicas.
        windows: steps without a drain between them, of each window. Updates are late by those of the window;
            a window begins with nothing under way.
    """
    plain = build_reference(job, trial.seed)
    model = plain.model
    masters = dict(model.named_parameters())
    learning = [(name, master) for name, master in masters.items() if master.requires_grad]
    layers, stages = layer_names(job.shape), job.stages(len(delays.by_stage))
    of_layer = {layers[at]: delays.by_stage[stage] for stage, indices in enumerate(stages) for at in indices}
    late = {  # by the stage that holds the layer
        name: next(delay for layer, delay in of_layer.items() if name.startswith(f"{layer}."))
        for name in masters
    }
    rate, rescheduling = trial.rate(job), job.optimiser.rate.rescheduling_steps
    optimizers = {
        delay: ReferenceOptimizer([(n, p) for n, p in learning if late[n] == delay], job.optimiser)
        for delay in {late[name] for name, _ in learning}
    }
    size, unit = job.micro_batch, job.micro_batch * job.layout.dp
    snapshots, history = list[Snapshot](), list[Weights]()
    begins = {sum(windows[:at]) for at in range(len(windows))}
    for step, batch in enumerate(trial.batches[: sum(windows)]):
        inputs, targets = batch.inputs, batch.targets
        if step in begins:
            history = [_copied(masters)]
        first = step * len(inputs)
        total = torch.zeros((), dtype=torch.float64)
        m = len(inputs) // unit
        all_counted = int((targets != IGNORED).sum()) or 1
        loads = Loads(model)
        for start in range(0, m, delays.group):
            update = len(history) - 1
            used = {name: history[max(0, update - late[name])][name] for name in masters}
            leaves: Weights = {
                name: weight.clone().requires_grad_(masters[name].requires_grad)
                for name, weight in used.items()
            }
            rows = range(start * unit, min(start + delays.group, m) * unit)
            counted = int((targets[rows.start : rows.stop] != IGNORED).sum()) or 1
            tokens = len(rows) * inputs.shape[1]
            for row in rows[::size]:
                part = batch.take(slice(row, row + size))
                plain.begin(range(first + row, first + row + size), part)
                loss = model.loss(functional_call(model, leaves, (part.inputs,)), part.targets)
                auxiliary = model.auxiliary()
                (loss / counted + auxiliary / tokens).backward()
                total += loss.detach() / all_counted + auxiliary.detach() / inputs.numel()
                loads.add()
            for name, master in masters.items():
                master.grad = leaves[name].grad
            for delay, optimizer in optimizers.items():
                # PipeMare's technique T1: the rate of a late stage over delay^p, with p from 1 down to 0
                power = 0.0 if rescheduling is None else 1.0 - min(step / rescheduling, 1.0)
                optimizer.step(rate(step) / max(delay, 1) ** power)
            history.append(_copied(masters))
            if (old := update - max(delays.by_stage)) >= 0:
                history[old] = {}  # no later update looks there
        loads.correct()
        snapshots.append(Snapshot(loss=float(total), norm=nan, gradients={}, weights=_copied(masters)))
    return snapshots


def _copied(masters: dict[str, nn.Parameter]) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in masters.items()}


# a replay does the same sums in another order
EXACT = 1e-12
# AdamW divides by a root that may be all but zero: what rounding leaves in a gradient grows by up to 1/eps
ADAPTIVE = 1e-9

# of the delays, in such windows; collective
Replay = Callable[[Delays, tuple[int, ...]], list[Snapshot]]


def prove_asynchronous(
    fresh: Fresh, trial: Trial, delays: Delays, windows: tuple[int, ...], replay: Replay
) -> Verdict:
    """Steps as training makes them beside a replay of their delayed updates, with nothing read between them.
    Those that differ are made again, to find the first that does. Collective.

    Args:
        delays: what the schedule promises.
        windows: steps without a drain between them.
        replay: trains the plain model in one process with any delays.
    """
    reference = replay(delays, windows)
    steps = Steps(fresh, trial, reference, windows)
    with fresh() as replica:
        job = replica.job
        tolerance = EXACT if job.optimiser.name == "sgd" else ADAPTIVE
        wrong = wrongly_held(replica, reference[0].weights)
        ran = steps.run(replica, late=not trial.twice)
        updates = delays.updates(replica.pipeline.program.microbatches) * sum(windows)
    diagnosis = None
    if wrong:
        name, reason = next(iter(wrong.items()))
        diagnosis = f"numbers are equal, but of {name} {reason}, so checkpoints would be wrong"
    if ran.equal(tolerance):
        quantities = ran.quantities(tolerance)
        verdict = Verdict(layout=describe(job), quantities=quantities, diagnosis=diagnosis, updates=updates)
        return steps.same_bits_late(verdict, ran) if verdict.equal and trial.twice else verdict
    if ran.broken:
        return replace(wrong_use_verdict(describe(job), ran), updates=updates)
    step_count, verdict = 0, None
    while verdict is None or (verdict.equal and step_count < len(reference)):
        step_count += 1
        first = list[int]()  # of the windows; what comes after a step changes nothing that it does
        for length in windows:
            first.append(min(length, step_count - sum(first)))
        shorter = Steps(fresh, trial, reference[:step_count], tuple(length for length in first if length))
        verdict = _observe(shorter, delays, tolerance, replay)
    return steps.with_wrong_use(only_unread(verdict, ran) if verdict.equal else verdict, ran)


def _observe(steps: Steps, delays: Delays, tolerance: float, replay: Replay) -> Verdict:
    """Make the steps, drain, and name the likeliest cause of a difference. Collective."""
    windows = tuple(steps.windows)
    with steps.fresh() as replica:
        ran = steps.run(replica)
        updates = delays.updates(replica.pipeline.program.microbatches) * len(steps.reference)
        diagnosis = ran.failure
        if ran.weights is not None and not ran.equal(tolerance):
            right = "the losses are equal, but " if ran.losses[-1] <= tolerance else ""
            worst = ran.weights.worst
            diagnosis = f"{right}the weights after {updates} delayed updates differ, most of all {worst}"
            one_by_one = (1,) * sum(windows)
            tried = [(f"of updates {mistake}", other, windows) for mistake, other in _others(delays)]
            if windows != one_by_one:
                tried.insert(0, ("of a pipeline that drains after each step", delays, one_by_one))
            for mistake, other, among in tried:  # the first whose replay gives these weights
                snapshot = replay(other, among)[-1]
                with replica.states.full_weights() as weights:
                    error = snapshot.compare_placed("weights", weights, replica.places).error
                if error <= ADAPTIVE:
                    diagnosis = f"{diagnosis}: they are those {mistake}"
                    break
        quantities, layout = ran.quantities(tolerance), describe(replica.job)
    return Verdict(layout=layout, quantities=quantities, diagnosis=diagnosis, updates=updates)


def _others(delays: Delays) -> list[tuple[str, Delays]]:
    """Return the delays of usual mistakes, each with its description."""
    promised = delays.by_stage
    longest = max(promised)
    tried = [
        ("one later than promised, on every stage", [d + 1 for d in promised]),
        ("one later than promised, where any are late", [d + (d > 0) for d in promised]),
        ("one earlier than promised", [max(0, d - 1) for d in promised]),
        ("that are not late at all", [0 for _ in promised]),
        ("as late as with vertical sync", [longest for _ in promised]),
        ("as late as without vertical sync", [max(0, longest - r) for r in range(len(promised))]),
    ]
    others: list[tuple[str, Delays]] = []
    for mistake, late in tried:
        other = replace(delays, by_stage=tuple(late))
        if other != delays and all(other != previous for _, previous in others):
            others.append((mistake, other))
    return others
