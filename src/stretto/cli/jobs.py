"""Load, check and run a job, whether its config trains a language model or a recommender."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.recommender.config.load import AnyConfig
    from stretto.run.config.schema import TrainConfig
    from stretto.run.train.launch import JobType

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
            hint="stretto train, verify, plan, memory, compare, config and launch take it",
        )
    return config


def check_job(config: AnyConfig, elsewhere: Sequence[str] = ()) -> None:
    """Check a job before any process starts, and raise StrettoError for its first problem.

    Args:
        elsewhere: folders of the machines that will run the job; paths in them are not looked for here.
    """
    from stretto.run.config.run_checks import raise_first
    from stretto.run.config.schema import TrainConfig

    if isinstance(config, TrainConfig):
        from stretto.run.config.check import find_problems

        broken = find_problems(config)
    else:
        from stretto.recommender.config.check import find_problems as find_recommender_problems

        broken = find_recommender_problems(config)
    raise_first(
        [
            problem
            for problem in broken
            if problem.field not in ("run.dir", "data.source", "data.tokenizer")
            or not any(PurePath(str(problem.value)).is_relative_to(folder) for folder in elsewhere)
        ]
    )


def ranks_of(config: AnyConfig) -> tuple[int, str]:
    """The job's number of ranks, and its layout as text."""
    from stretto.run.config.schema import TrainConfig

    if isinstance(config, TrainConfig):
        layout = config.layout.to_layout()
        return layout.world, str(layout)
    return config.layout.ranks, f"ranks={config.layout.ranks}"


def for_ranks(config: AnyConfig, ranks: int | None, quiet: bool) -> AnyConfig:
    """Re-plan the job for `ranks` ranks. Without `ranks`: under torchrun, use its world size if the config
    has an `elastic` section; otherwise keep the configured layout.

    Args:
        quiet: print what was chosen to stderr, not to stdout.

    Raises:
        StrettoError: the config has no layout for this number of ranks.
    """
    from stretto.run.config.schema import TrainConfig
    from stretto.run.launch.rendezvous import RendezvousInfo
    from stretto.run.train.launch import under_torchrun

    def note(text: str) -> None:
        print(text, file=sys.stderr if quiet else sys.stdout, flush=True)

    language = isinstance(config, TrainConfig)
    if joins := under_torchrun():
        if ranks is not None:
            raise StrettoError("torchrun has started the ranks already", hint="leave --ranks out")
        elastic = config.elastic.layouts if language else config.elastic.ranks
        ranks = RendezvousInfo.of(os.environ).world if elastic else None
    if ranks is None:
        return config
    if not language:
        return config.for_ranks(ranks)
    from stretto.run.train.replan import for_ranks, join_for_ranks

    return join_for_ranks(config, note) if joins else for_ranks(config, ranks, note)


def job_type(config: AnyConfig) -> JobType[Any, Any]:
    """How the ranks of the config's job are prepared, started and run (`stretto.run.train.launch`)."""
    from stretto.run.config.schema import TrainConfig

    if isinstance(config, TrainConfig):
        from stretto.run.train.language_job import LANGUAGE

        return LANGUAGE
    from stretto.recommender.train.job import RECOMMENDER

    return RECOMMENDER


def reference() -> str:
    """Every field of every kind of job, as Markdown: `docs/reference/config.md`."""
    from stretto.recommender.config.schema import RecommenderConfig
    from stretto.run.config.reference import reference as text_of
    from stretto.run.config.schema import TrainConfig

    return text_of([("", TrainConfig), (_RECOMMENDERS, RecommenderConfig)])
