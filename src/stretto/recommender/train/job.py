"""A recommender's training job from its config: checks, clicks, placement, ranks, outcome."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stretto.recommender.config.check import check, check_tables
from stretto.recommender.config.schema import RecommenderConfig, for_ranks, rank_choices
from stretto.recommender.placement import Placements
from stretto.recommender.train.clicks import ClickData, check_held_out, prepare_clicks
from stretto.recommender.train.placement import place
from stretto.recommender.train.report import banner
from stretto.recommender.train.resume import check_resume
from stretto.run.launch.stop import StopRequest
from stretto.run.train.job import Kind, Result, check_fresh, run_kind
from stretto.run.train.replan import Note

PRELOAD = (
    "stretto.recommender.train.worker",
    "stretto.recommender.train.registered",
    "torch._dynamo",
    "numpy.random",
    "stretto.cli.main",
)

Ready = tuple[ClickData, Placements]


def run_job(config: RecommenderConfig, quiet: bool = False, port: int = 0) -> Result:
    """Run a job: as one rank under torchrun, else on local ranks that this process starts.

    Raises:
        StrettoError: bad input, as far as possible before any rank is started.
        RankFailed: a rank failed.
    """
    return run_kind(_Recommender(), config, quiet, port)


def local_rank(config: RecommenderConfig, quiet: bool, ready: Ready) -> dict[str, Any]:
    """One rank on this machine. Imports inside, so that the parent process need not load torch."""
    from stretto.recommender.train.worker import train_rank

    with StopRequest() as stop:
        return train_rank(config, stop, quiet, ready)


class _Recommender(Kind[RecommenderConfig]):
    preload = PRELOAD

    def ranks(self, config: RecommenderConfig) -> int:
        return config.layout.ranks

    def rank_choices(self, config: RecommenderConfig) -> list[int]:
        return rank_choices(config)

    def for_ranks(self, config: RecommenderConfig, ranks: int, note: Note) -> RecommenderConfig:
        other = for_ranks(config, ranks)
        check(other)
        return other

    def check(self, config: RecommenderConfig, world: int | None, devices: int | None) -> None:
        check(config, world=world, devices=devices)

    def writes_to(self, config: RecommenderConfig) -> Path | None:
        return config.run.folder

    def check_fresh(self, config: RecommenderConfig) -> None:
        check_fresh(config)

    def prepare(self, config: RecommenderConfig, stop: StopRequest) -> Ready:
        data = prepare_clicks(config, stop)
        for problem in check_tables(config, list(data.tables)):
            raise problem
        return data, place(config, data)

    def agree(self, config: RecommenderConfig, data: Ready) -> None:
        check_held_out(config, data[0])
        check_resume(config, data[0].tables, data[0].same)

    def say(self, config: RecommenderConfig, data: Ready, quiet: bool) -> None:
        print(banner(config, *data), file=sys.stderr if quiet else sys.stdout, flush=True)

    def local(self, config: RecommenderConfig, data: Ready, quiet: bool) -> tuple[Any, ...]:
        return local_rank, config, quiet, data

    def join(self, config: RecommenderConfig, stop: StopRequest, quiet: bool) -> dict[str, Any]:
        from stretto.recommender.train.worker import train_rank

        return train_rank(config, stop, quiet)
