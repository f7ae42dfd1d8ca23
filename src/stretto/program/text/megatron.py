"""Cuts of a model into stages as Megatron-LM writes them: --pipeline-model-parallel-layout."""

from __future__ import annotations

from collections.abc import Sequence


def megatron_layout(stages: Sequence[range], layers: int) -> str:
    """Return a cut in letters, such as "Et|(tt|)*2tL": E embedding, t transformer layer, L head.

    Args:
        stages: of each stage, the positions in the chain: 0 the embedding, then `layers` layers and the head.
    """
    letters = list[str]()
    for stage in stages:
        count = len(range(max(1, stage.start), min(layers + 1, stage.stop)))
        blocks = "t" * count if count < 4 else f"t*{count}"
        letters.append("E" * (0 in stage) + blocks + "L" * (layers + 1 in stage))
    return _shortened(letters)


def _shortened(stages: list[str]) -> str:
    """Join stages by |, with runs of equal ones as (...|)*n."""
    parts, at = list[str](), 0
    while at < len(stages):
        count = 1
        while at + count < len(stages) and stages[at + count] == stages[at]:
            count += 1
        last = at + count == len(stages)
        if count > 2 and not last:
            parts.append(f"({stages[at]}|)*{count}")
        else:
            parts.append("|".join([stages[at]] * count) + "|" * (not last))
        at += count
    return "".join(parts)
