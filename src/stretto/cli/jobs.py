"""Load, check and run a job, whether its config trains a language model or a recommender."""

from __future__ import annotations

import os
import sys
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


def for_ranks(config: AnyConfig, ranks: int | None, quiet: bool) -> AnyConfig:
    """The job on so many ranks, or on as many as torchrun has started where the config says what to do with
    them; None: on those of its layout.

    Args:
        quiet: say what was chosen on stderr, not on stdout.

    Raises:
        StrettoError: the config is for other numbers.
    """
    from stretto.recommender.config import schema as recommender
    from stretto.run.config.schema import TrainConfig
    from stretto.run.launch.rendezvous import Meeting
    from stretto.run.train.job import under_torchrun

    def note(text: str) -> None:
        print(text, file=sys.stderr if quiet else sys.stdout, flush=True)

    language = isinstance(config, TrainConfig)
    if joins := under_torchrun():
        if ranks is not None:
            raise StrettoError("torchrun has started the ranks already", hint="leave --ranks out")
        elastic = config.elastic.layouts if language else config.elastic.ranks
        ranks = Meeting.of(os.environ).world if elastic else None
    if ranks is None:
        return config
    if not language:
        return recommender.for_ranks(config, ranks)
    from stretto.run.train.replan import for_ranks, join_for_ranks

    return join_for_ranks(config, note) if joins else for_ranks(config, ranks, note)


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
