"""A recommender's job on another number of ranks."""

from __future__ import annotations

from dataclasses import replace

from stretto.recommender.config.schema import RecommenderConfig
from stretto.run.config.for_ranks import no_layout_error


def rank_choices(config: RecommenderConfig) -> list[int]:
    """The numbers of ranks that the job can have, the largest first; of any number those up to its own."""
    if config.elastic.ranks == "auto":
        return list(range(config.layout.ranks, 0, -1))
    return sorted({config.layout.ranks, *config.elastic.ranks}, reverse=True)


def for_ranks(config: RecommenderConfig, ranks: int) -> RecommenderConfig:
    """The job on so many ranks.

    Raises:
        StrettoError: it is not for so many.
    """
    if config.elastic.ranks != "auto" and ranks not in (choices := rank_choices(config)):
        raise no_layout_error(ranks, choices, "elastic.ranks")
    return replace(config, layout=replace(config.layout, ranks=ranks))
