"""Numbers of ranks that a recommender's run can go on with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from stretto.spec.field import Field


@dataclass(frozen=True, kw_only=True)
class ElasticRanks:
    """Fewer or more ranks: a run goes on from its checkpoint with its tables placed on as many ranks as there
    are, with the same global batch and the same samples in the same order. `WORLD_SIZE` of torchrun chooses
    the number, or `--ranks`; where a local rank dies twice in one step, or devices are gone, a restart takes
    the next smaller one.
    """

    ranks: Annotated[
        list[int] | Literal["auto"],
        Field("Numbers of ranks beside `layout.ranks`; or `auto`: any number.", examples=("[3, 2, 1]",)),
    ] = field(default_factory=list[int])
