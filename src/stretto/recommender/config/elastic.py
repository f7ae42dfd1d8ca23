"""Numbers of ranks that a recommender's run can go on with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stretto.run.config.section import Section


class ElasticRanks(Section):
    """Fewer or more ranks: a run goes on from its checkpoint with its tables placed on as many ranks as there
    are, with the same global batch and the same samples in the same order. `WORLD_SIZE` of torchrun chooses
    the number, or `--ranks`; where a local rank dies twice in one step, or devices are gone, a restart takes
    the next smaller one.
    """

    ranks: list[int] | Literal["auto"] = Field(
        default_factory=list[int],
        examples=["[3, 2, 1]"],
        description="Numbers of ranks beside `layout.ranks`; or `auto`: any number.",
    )
