"""The answer of `stretto partition`: as JSON and as text."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from stretto.plan.cutting.profile import names

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.plan.cutting.partition import Partition

MIB = 2**20


def facts(found: Partition) -> dict[str, Any]:
    """All of it; `cut` is the first layer of each stage and the one after its last."""
    program, layers, work = found.program, found.profile.layers, found.timeline.work
    return {
        "about": found.profile.about,
        "schedule": program.name,
        "ranks": program.ranks,
        "microbatches": program.microbatches,
        "cut": [[stage.start, stage.stop] for stage in found.stages],
        "step_s": found.seconds,
        "bound_s": found.bound,
        "proved": found.proved,
        "bubble": found.timeline.bubble.rate,
        "stages": [
            {
                "stage": at,
                "ranks": _holders(found, at),
                "layers": [layers[i].name for i in stage],
                "forward_s": sum(layers[i].forward for i in stage),
                "backward_s": sum(layers[i].backward for i in stage),
                "parameter_bytes": sum(layers[i].parameters for i in stage),
                "activation_bytes": sum(layers[i].activations for i in stage),
                "output_bytes": layers[stage.stop - 1].output,
            }
            for at, stage in enumerate(found.stages)
        ],
        "memory_bytes": list(found.memory),
        "busy_s": list(work),
        "beside": {name: None if s == inf else s for name, s in found.beside.items()},
    }


def _holders(found: Partition, stage: int) -> list[int]:
    """The ranks that hold a stage; two where there are two copies of the model."""
    program = found.program
    return [program.placement[s] for s in range(stage, program.stages, program.depth)]


_CUTS = {
    "layers": "as many layers in each stage",
    "parameters": "as many parameters",
    "work": "equal work, the schedule unknown",
    "training": "as training cuts: equal operations",
}


def show(to: Console, found: Partition) -> None:
    """For people."""
    from stretto.cli.memory_modes import side_table

    layers = found.profile.layers
    if found.profile.about:
        to.print(found.profile.about, soft_wrap=True)
    table = side_table("stage", "rank", "layers", "forward ms", "backward ms", "weights MiB")
    for at, stage in enumerate(found.stages):
        own = [layers[i] for i in stage]
        table.add_row(
            str(at),
            " ".join(map(str, _holders(found, at))),
            f"{len(own)}: {names(own)}",
            f"{1e3 * sum(layer.forward for layer in own):.3f}",
            f"{1e3 * sum(layer.backward for layer in own):.3f}",
            f"{sum(layer.parameters for layer in own) / MIB:.1f}",
        )
    to.print(table, soft_wrap=True)
    ranks = side_table("rank", "busy ms", "memory MiB")
    for rank, (busy, held) in enumerate(zip(found.timeline.work, found.memory, strict=True)):
        ranks.add_row(str(rank), f"{1e3 * busy:.3f}", f"{held / MIB:.1f}")
    to.print(ranks, soft_wrap=True)
    proof = "no cut is better" if found.proved else f"no cut is below {1e3 * found.bound:.3f} ms"
    to.print(
        f"step {1e3 * found.seconds:.3f} ms predicted, bubble {100 * found.timeline.bubble.rate:.1f}%; "
        f"{proof}",
        soft_wrap=True,
    )
    beside = side_table("other cuts", "step ms", "this one is")
    for name, seconds in found.beside.items():
        more = "does not fit" if seconds == inf else f"{100 * (1 - found.seconds / seconds):.1f}% shorter"
        beside.add_row(_CUTS.get(name, name), "" if seconds == inf else f"{1e3 * seconds:.3f}", more)
    to.print(beside, soft_wrap=True)
