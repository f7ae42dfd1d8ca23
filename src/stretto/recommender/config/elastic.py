"""Numbers of ranks that a recommender's run can go on with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from stretto.run.config.elastic import no_such_ranks
from stretto.run.config.section import Section

if TYPE_CHECKING:
    from stretto.recommender.config.schema import RecommenderConfig


class ElasticRanks(Section):
    """Fewer or more ranks: a run goes on from its checkpoint with its tables placed on as many ranks as there
    are, with the same global batch and the same samples in the same order. `WORLD_SIZE` of torchrun chooses
    the number, or `--ranks`; where a local rank dies twice in one step, a restart takes the next smaller one.
    """

    ranks: list[int] = Field(
        default_factory=list[int],
        examples=["[3, 2, 1]"],
        description="Numbers of ranks beside `layout.ranks`.",
    )


def rank_choices(config: RecommenderConfig) -> list[int]:
    """The numbers of ranks that the job can have, the largest first."""
    return sorted({config.layout.ranks, *config.elastic.ranks}, reverse=True)


def for_ranks(config: RecommenderConfig, ranks: int) -> RecommenderConfig:
    """The job on so many ranks.

    Raises:
        StrettoError: it is not for so many.
    """
    if ranks not in (choices := rank_choices(config)):
        raise no_such_ranks(ranks, choices, "elastic.ranks")
    return config.model_copy(update={"layout": config.layout.model_copy(update={"ranks": ranks})})
