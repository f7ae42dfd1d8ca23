"""What `train.graphs` does not go with beside the job's own rules (`spec.rules_graphs`)."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.errors import Problem
from stretto.run.config.schema import TrainConfig
from stretto.spec.devices import HOST

FIELD = "train.graphs"


def graphs(config: TrainConfig) -> Iterator[Problem]:
    """Samples, libraries, devices and traces that graphs cannot be made with."""
    if config.train.graphs != "off":
        for rule, fix in _obstacles(config):
            yield Problem(FIELD, config.train.graphs, rule, f"train.graphs=off, or {fix}")


def _obstacles(config: TrainConfig) -> Iterator[tuple[str, str]]:
    if config.train.device == HOST:
        yield no_graphs(HOST), "train.device=auto on a machine with an accelerator"
    if config.train.backend == "gloo" and (tp := config.layout.tp) > 1:
        rule = f"layout.tp={tp} communicates within the graph, and with gloo the host does that"
        yield rule, "train.backend=auto"
    if config.data.packing == "documents":
        rule = "data.packing=documents attends by where documents begin, which differs between microbatches"
        yield rule, "data.packing=stream"
    if config.metrics.trace:
        yield f"metrics.trace={config.metrics.trace} times forward and backward apart", "metrics.trace=0"


def no_graphs(kind: str) -> str:
    """The rule that is broken where devices have no graphs."""
    return f"this torch has no graphs for device {kind}"
