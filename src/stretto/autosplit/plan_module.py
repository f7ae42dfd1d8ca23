"""Plan how each layer of a user's network is split over ranks: by batch, by features, or not at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from stretto.autosplit.costs import Machine
from stretto.autosplit.network import Split, StyleName
from stretto.autosplit.picture import split_svg, split_table
from stretto.autosplit.plan import SplitPlan, plan_splits
from stretto.autosplit.trace import trace_network
from stretto.engine.parallel.styles import (
    BatchParallel,
    ColumnParallel,
    ParallelStyle,
    Replicate,
    RowParallel,
)
from stretto.errors import StrettoError
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.device import Precision

_STYLES: dict[StyleName, type[Replicate | BatchParallel | ColumnParallel | RowParallel]] = {
    "replicate": Replicate,
    "batch": BatchParallel,
    "column": ColumnParallel,
    "row": RowParallel,
}
_PRECISIONS: dict[torch.dtype, Precision] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp32",
}


@dataclass(frozen=True)
class ModulePlan:
    """The fastest splits of a network's layers.

    Attributes:
        splits: every operator with its split, time and memory, and the conversions between them.
    """

    splits: SplitPlan

    def __repr__(self) -> str:
        """Return the number of layers by style, and the predicted time of a step."""
        counts = Counter(type(style).__name__ for style in self.plan.values())
        styles = ", ".join(f"{count} {name}" for name, count in counts.items())
        devices = f"{self.splits.machine.ranks} x {self.splits.machine.cluster.device.name}"
        return f"ModulePlan({styles} on {devices}: {self.seconds:.3g} s a step)"

    def _repr_svg_(self) -> str:
        return self.svg()

    @cached_property
    def plan(self) -> dict[str, ParallelStyle]:
        """The style of each module with parameters, by name, for
        `parallelize(model, plan, Mesh(Layout(tp=devices)), convert=True)`.
        """
        styles = dict[str, ParallelStyle]()
        for line in self.splits.lines:
            style = line.choice.style
            if style is not None:
                changed = line.choice.output != line.choice.leaves
                styles[line.operator.module] = _STYLES[style](output=line.choice.output if changed else None)
        return styles

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        return self.splits.cost.seconds

    def table(self) -> str:
        """Return one line for each operator and each conversion."""
        return split_table(self.splits)

    def svg(self) -> str:
        """Draw the network from top to bottom, coloured by split, as SVG."""
        return split_svg(self.splits)


def plan_module(
    model: nn.Module,
    example: Tensor | Sequence[Tensor],
    *,
    cluster: str | Path | Cluster,
    devices: int | None = None,
    memory_gib: float | None = None,
    precision: Precision | None = None,
    states: int = 8,
    inputs: Split = "whole",
    outputs: Split = "whole",
    leaves: Iterable[str] = (),
    fix: Mapping[str, StyleName] | None = None,
) -> ModulePlan:
    """Choose for each layer of a network whether it is replicated, or split by the batch, by its output
    features or by its input features, so that a step is as fast as possible and fits into devices' memory.

    Splits may change from layer to layer, as in "one weird trick" (Krizhevsky 2014), at the price of a
    conversion, which is part of the plan. The plan is the best of all combinations under the cost model, as
    in OptCNN (Jia et al. 2018).

        made = plan_module(model, torch.empty(256, 3, 224, 224), cluster="a100:4")
        print(made.table())
        parallelize(model, made.plan, Mesh(Layout(tp=4)), convert=True)

    Args:
        model: any module that torch.fx can trace; it may be on the meta device, and is not changed.
        example: its input, or several, with the samples of all ranks along dimension 0; only shapes and types
            are read.
        cluster: a name of the catalogue (`stretto catalogue`), as "a100:4", a YAML file, or "here".
        devices: number of devices; default: the cluster's.
        memory_gib: memory of each device for tensors; default: the device's, without the needs of a process
            besides tensors.
        precision: precision of matrix products; default: that of the parameters.
        states: bytes of a parameter's optimiser states: 8 for Adam, 4 for momentum, 0 for plain SGD.
        inputs, outputs: the splits with which every rank calls the model, and of its results, as for
            `parallelize`.
        leaves: names of modules that are taken as one operator, such as those that cannot be traced.
        fix: fixed styles by name of the module: "replicate", "batch", "column" or "row".
            `*` stands for any text.

    Raises:
        StrettoError: a model that cannot be traced, a batch that does not divide over the devices, no such
            cluster, or nothing that fits.
    """
    if not isinstance(cluster, Cluster):
        cluster = find_cluster(cluster, devices)
    ranks = devices or cluster.devices
    if ranks is None:
        raise StrettoError(
            f"cluster {cluster.name!r} has any number of devices", hint="devices=4, or 'a100:4'"
        )
    examples = (example,) if isinstance(example, Tensor) else tuple(example)
    network = trace_network(model, examples, inputs=inputs, outputs=outputs, leaves=leaves)
    batch = examples[0].shape[0]
    if batch % ranks:
        raise StrettoError(
            f"the example's batch of {batch} samples does not divide over {ranks} devices",
            hint=f"a batch of {max(ranks, round(batch / ranks) * ranks)}",
        )
    dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    dtype = next(dtypes, torch.float32)
    machine = Machine(
        cluster=cluster,
        ranks=ranks,
        precision=precision or _PRECISIONS.get(dtype, "fp32"),
        parameter=dtype.itemsize,
        states=states,
    )
    memory = None if memory_gib is None else memory_gib * 2**30
    return ModulePlan(plan_splits(network, machine, memory, fix or {}))
