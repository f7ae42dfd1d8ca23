"""Grades `cut`: uneven layers cut into stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from math import inf
from random import Random
from typing import Any

from stretto.learn.checks import Check, at_most
from stretto.planner.cutting.partition import partition
from stretto.planner.cutting.profile import LayerProfile, ModelProfile
from stretto.program import schedule

RANKS = 1
TEMPLATE = '''def cut(layers: list[dict], ranks: int, microbatches: int, memory: float) -> list[int]:
    """Return the number of layers of each stage, from the first rank to the last.

    Args:
        layers: {"forward": s, "backward": s, "weights": bytes, "activations": bytes} for each layer, of one
            microbatch.
        ranks: p, at most the number of layers.
        microbatches: m, at least 8 p.
        memory: bytes that a rank may hold; inf: no limit.
    """
    raise NotImplementedError
'''


def checks(reader: Mapping[str, Any], random: Random) -> Iterator[Check]:
    """Compare the step time of cuts, without and with a limit of memory, with the best."""
    for ranks, limited in ((2, False), (4, False), (8, False), (4, True), (8, True)):
        count, microbatches = random.randint(4 * ranks, 5 * ranks), 8 * ranks
        layers = [
            LayerProfile(
                name=f"layer {index}",
                forward=(seconds := random.choice((1.0, 1.0, 2.0, 4.0)) * random.uniform(0.9, 1.1)),
                backward=2 * seconds,
                parameters=random.randint(10, 50),
                activations=random.randint(5, 40),
            )
            for index in range(count)
        ]
        program, profile = schedule("1f1b", ranks, microbatches), ModelProfile(tuple(layers))
        memory = inf
        if limited:  # between the least possible and what the fastest cut takes
            fastest = partition(profile, program, states=1.0)
            smallest = partition(profile, program, states=1.0, memory=1.0, must_fit=False)
            memory = 0.3 * max(fastest.memory) + 0.7 * max(smallest.memory)
        case = f"{count} layers on {ranks} ranks" + f" in {memory:.0f} bytes" * limited
        rows = [
            {
                "forward": a.forward,
                "backward": a.backward,
                "weights": a.parameters,
                "activations": a.activations,
            }
            for a in layers
        ]
        sizes = reader["cut"](rows, ranks, microbatches, memory)
        valid = isinstance(sizes, list) and len(sizes) == ranks and sum(sizes) == count and min(sizes) > 0
        text = f"it returned {sizes!r}, must be {ranks} numbers above 0 with the sum {count}"
        yield Check(f"{case}: a cut", None if valid else text)
        stages = [range(start, end) for start, end in pairwise([0, *accumulate(sizes)])]
        best = partition(
            profile, program, states=1.0, memory=memory if limited else None, others={"reader": stages}
        )
        seconds = best.start_seconds["reader"]
        fits = Check(f"{case}: memory")
        if seconds == inf:
            fits = fits._replace(problem=f"a rank of the cut {sizes} holds more than {memory:.0f} bytes")
        yield fits
        slowest = max(sum(layers[at].forward + layers[at].backward for at in stage) for stage in stages)
        yield at_most(
            f"{case}: time",
            seconds,
            1.02 * best.seconds,
            f"the cut {sizes} takes {{actual}} s, 2% above the best is {{limit}} s; its slowest stage takes "
            f"{slowest:.4g} s of {sum(a.forward + a.backward for a in layers):.4g}",
        )
