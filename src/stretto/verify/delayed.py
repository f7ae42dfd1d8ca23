"""The other side of the proof for asynchronous schedules: their delayed updates, replayed in one process.

Written from the papers' words, which say how old the weights are that a gradient is taken at; it knows
nothing of programs. Update t of a stage is

    w(t+1) = w(t) - rule(gradient at the weights of max(0, t - delay) updates of the step)

for the stage's own delay, the same for all microbatches of the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stretto.config.schema import TrainConfig
from stretto.cost.layers import layer_costs, layer_names
from stretto.cost.shape import ModelShape
from stretto.errors import StrettoError
from stretto.layout.cut import cut
from stretto.models.language import IGNORED
from stretto.optim.build import build_optimizer, build_rate
from stretto.verify.cases import Case
from stretto.verify.reference import Snapshot, build_reference

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
        """Of a step."""
        return -(-microbatches // self.group)


def promised(case: Case, microbatches: int) -> Delays:
    """What the case's schedule promises.

    `pipedream` (Narayanan et al. 2019, sections 3.2 and 3.3): stage r of p stages is p-1-r updates late, with
    vertical sync every stage p-1; an update for each microbatch. `pipedream-2bw` (Narayanan et al. 2021,
    section 3.1): one update late everywhere, an update for `group` microbatches, p unless given.

    Raises:
        StrettoError: nobody has written down what the schedule promises.
    """
    p = case.pp
    if case.schedule == "pipedream":
        late = [p - 1] * p if case.options.get("vertical_sync") else [p - 1 - r for r in range(p)]
        return Delays(tuple(late), 1)
    if case.schedule == "pipedream-2bw":
        return Delays((1,) * p, case.options.get("group") or min(p, microbatches))
    raise StrettoError(
        f"schedule {case.schedule} updates within the step, and there is no replay of its updates",
        hint="prove it with another schedule, or add it to stretto.verify.delayed.promised",
    )


def run_delayed(
    config: TrainConfig, shape: ModelShape, steps: Sequence[tuple[Tensor, Tensor]], delays: Delays
) -> list[Snapshot]:
    """Train the plain model in float64 with delayed updates; each step begins with nothing under way.

    Args:
        config: of the case; its data-parallel size says which samples are one microbatch of all replicas.
        steps: inputs and targets [global batch, sequence] of each step, in the order of the samples.
    """
    model, keys = build_reference(config, shape)
    masters = dict(model.named_parameters())
    optimizer, rate = build_optimizer(masters.items(), config.optim), build_rate(config)
    late = _late(masters, shape, config.data.sequence, delays.by_stage)
    size, unit = config.batch.micro_size, config.batch.micro_size * config.layout.dp
    snapshots = list[Snapshot]()
    for step, (inputs, targets) in enumerate(steps):
        first, total, m = step * len(inputs), torch.zeros((), dtype=torch.float64), len(inputs) // unit
        history: list[Weights] = [_copied(masters)]
        for update, start in enumerate(range(0, m, delays.group)):
            used = {name: history[max(0, update - late[name])][name] for name in masters}
            leaves: Weights = {name: weight.clone().requires_grad_() for name, weight in used.items()}
            rows = range(start * unit, min(start + delays.group, m) * unit)
            tokens = int((targets[rows.start : rows.stop] != IGNORED).sum())
            for row in rows[::size]:
                keys.samples = range(first + row, first + row + size)
                here = slice(row, row + size)
                loss = model.loss(functional_call(model, leaves, (inputs[here],)), targets[here])
                loss = loss + model.auxiliary()
                (loss / tokens).backward()
                total += loss.detach()
            for name, master in masters.items():
                master.grad = leaves[name].grad
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
            history.append(_copied(masters))
            if (old := update - max(delays.by_stage)) >= 0:
                history[old] = {}  # no later update looks there
        loss = total / int((targets != IGNORED).sum())
        snapshots.append(Snapshot(loss, torch.full((), torch.nan, dtype=torch.float64), {}, history[-1]))
    return snapshots


def _copied(masters: dict[str, nn.Parameter]) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in masters.items()}


def _late(
    names: dict[str, nn.Parameter], shape: ModelShape, sequence: int, by_stage: Sequence[int]
) -> dict[str, int]:
    """The delay of each parameter: that of the stage that holds its layer."""
    layers = layer_names(shape)
    stages = cut(layer_costs(shape, sequence), len(by_stage))
    of_layer = {layers[at]: by_stage[stage] for stage, held in enumerate(stages) for at in held}
    return {name: next(d for layer, d in of_layer.items() if name.startswith(f"{layer}.")) for name in names}
