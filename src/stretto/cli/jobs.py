"""Load, check and run a job, whether its config trains a language model or a recommender."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.recommender.config.load import AnyConfig
    from stretto.run.config.schema import TrainConfig
    from stretto.run.train.job import Result

# heading of the recommenders' part of the reference
_RECOMMENDERS = """
# Recommenders

If `model.family` is `dlrm`, or `model.preset` names a recommender, a config has these sections. `eval`,
`checkpoint` and `run` are as above.
"""


def load_language(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The job of a config, for commands that support language models only.

    Raises:
        StrettoError: as `load_config`, or the config is a recommender's.
    """
    from stretto.recommender.config.load import load_config
    from stretto.run.config.schema import TrainConfig

    config = load_config(path, overrides)
    if not isinstance(config, TrainConfig):
        raise StrettoError(
            f"{path} is the config of a recommender, and this command is for language models",
            hint="stretto train, verify, plan, config and launch take it",
        )
    return config


def check_job(config: AnyConfig) -> None:
    """Raise StrettoError for what is known to go wrong with the job before a process starts."""
    from stretto.run.config.schema import TrainConfig

    if isinstance(config, TrainConfig):
        from stretto.run.config.check import check

        check(config)
    else:
        from stretto.recommender.config.check import check as check_recommender

        check_recommender(config)


def ranks_of(config: AnyConfig) -> tuple[int, str]:
    """The job's number of ranks, and its layout as text."""
    from stretto.run.config.schema import TrainConfig

    if isinstance(config, TrainConfig):
        layout = config.layout.to_layout()
        return layout.world, str(layout)
    return config.layout.ranks, f"ranks={config.layout.ranks}"


def for_ranks(config: AnyConfig, ranks: int | None) -> AnyConfig:
    """The job on so many ranks, or on as many as torchrun has started where the config says what to do with
    them; None: on those of its layout.

    Raises:
        StrettoError: the config is for other numbers.
    """
    from stretto.recommender.config import for_ranks as recommender
    from stretto.run.config import for_ranks as language
    from stretto.run.config.schema import TrainConfig
    from stretto.run.train.job import under_torchrun

    if under_torchrun():
        if ranks is not None:
            raise StrettoError("torchrun has started the ranks already", hint="leave --ranks out")
        several = (
            language.rank_choices(config)
            if isinstance(config, TrainConfig)
            else recommender.rank_choices(config)
        )
        ranks = int(os.environ["WORLD_SIZE"]) if len(several) > 1 else None
    if ranks is None:
        return config
    if isinstance(config, TrainConfig):
        return language.for_ranks(config, ranks)
    return recommender.for_ranks(config, ranks)


def run_job(config: AnyConfig, quiet: bool, port: int = 0) -> Result:
    """Train, as one rank under torchrun, otherwise on local ranks that this process starts.

    Raises:
        StrettoError: bad input.
        RankFailed: a rank failed.
    """
    from stretto.run.config.schema import TrainConfig

    if isinstance(config, TrainConfig):
        from stretto.run.train.job import run_job as run_language

        return run_language(config, quiet, port)
    from stretto.recommender.train.job import run_job as run_recommender

    return run_recommender(config, quiet, port)


def reference() -> str:
    """Every field of every kind of job, as Markdown: `docs/config.md`."""
    from stretto.recommender.config.schema import RecommenderConfig
    from stretto.run.config.reference import reference as text_of
    from stretto.run.config.schema import TrainConfig

    return text_of([("", TrainConfig), (_RECOMMENDERS, RecommenderConfig)])
