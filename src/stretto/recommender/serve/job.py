"""A trained recommender on clicks: evaluated on a split of its log, or scored on a new log, on any ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError, counted
from stretto.recommender.clicks.folder import ClickFolder
from stretto.recommender.clicks.index import TRANSFORM
from stretto.recommender.clicks.transform import ClickTransform
from stretto.recommender.config.check import check
from stretto.recommender.config.schema import ClickDataConfig, RecommenderConfig
from stretto.recommender.placement import Placements, TableSpec
from stretto.recommender.serve.log import OnError, open_log
from stretto.recommender.serve.output import discard_partial
from stretto.recommender.train.clicks import ClickData, prepare_clicks
from stretto.recommender.train.job import PRELOAD, table_folder
from stretto.recommender.train.placement import place
from stretto.recommender.train.resume import check_fits
from stretto.run.config.schema import (
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    LoopConfig,
    ReportConfig,
    RunConfig,
)
from stretto.run.config.sources import is_click_folder
from stretto.run.evaluate.trained import Trained
from stretto.run.launch.stop import Stopped, StopRequest
from stretto.run.train.launch import JobType, Result, run_job


@dataclass(frozen=True, kw_only=True)
class PreparedClicks:
    """The model's tables, where they are placed, and how raw clicks become its input."""

    data: ClickData
    placements: Placements
    transform: ClickTransform | None


@dataclass(frozen=True, kw_only=True)
class ScoringJob:
    """A pass of a trained model over clicks, which evaluates or scores it.

    Attributes:
        training: the config of training.
        split: of the log that the model was trained on, if `log` is None.
        log: files of a new log, or a click folder.
        out: file of its probabilities, - for stdout, or None to write none.
        limit: global batches of the split, or None for all.
        on_error: what to do with malformed lines of a new log.
        labelled: a log without labels is refused.
        process: id of the process that asks; names the output while it is written.
    """

    training: RecommenderConfig
    trained: Trained
    split: str = "valid"
    log: tuple[str, ...] | None = None
    out: str | None = None
    limit: int | None = None
    on_error: OnError = "fatal"
    labelled: bool = False
    process: int = field(default_factory=os.getpid)

    @cached_property
    def config(self) -> RecommenderConfig:
        """The config of the pass: the model, ranks and types of training, and no optimiser states, since
        nothing is updated.
        """
        config, trained = self.training, self.trained
        tables = config.optim.tables
        if tables.name != "split_sgd":  # which keeps a part of the weights in its states
            tables = type(tables)(name="sgd")
        folder = trained.folder.absolute()
        update: dict[str, Any] = {
            "optim": replace(
                config.optim, dense=type(config.optim.dense)(name="sgd"), tables=tables, clip=None
            ),
            "eval": EvalConfig(),
            "checkpoint": CheckpointConfig(resume=str(trained.checkpoint)),
            "guard": GuardConfig(),
            "metrics": ReportConfig(),
            "run": RunConfig(dir=str(folder.parent), name=folder.name),
        }
        if self.log is not None:
            source = list(self.log)
            if len(source) == 1 and is_click_folder(Path(source[0]).expanduser()):
                update["data"] = ClickDataConfig(source=source)
            else:
                update["data"] = replace(config.data, source=source)
        return replace(replace(config, **update), required=())

    @property
    def train(self) -> LoopConfig:
        """The section of the ranks' device, threads and times."""
        return self.config.train

    @property
    def required(self) -> tuple[str, ...]:
        """Fields that are still to be set: none."""
        return self.config.required

    def check(self, world: int | None, devices: int | None) -> None:
        """Raise StrettoError for a job that is known to fail; see `JobType.check`."""
        check(self.config, world=world, devices=devices)

    def prepare(self, stop: StopRequest | None) -> PreparedClicks:
        """Open the clicks, and place the tables.

        Raises:
            StrettoError: the clicks do not exist, or do not fit the model.
        """
        config, training = self.config, self.training
        if self.log is None:
            data = prepare_clicks(training, stop)
            data.open(self.split)
            self._check_fits(data.tables, data.identity)
            return PreparedClicks(data=data, placements=place(config, data), transform=None)
        sizes = self.trained.sizes
        saved = sizes.get("tables")
        if sizes.get("family") != "dlrm" or not isinstance(saved, Mapping):
            raise StrettoError(
                f"checkpoint {self.trained.checkpoint} is of family {sizes.get('family')!r}, and clicks are "
                "scored by recommenders",
                hint="stretto evaluate takes language models",
            )
        tables = tuple(TableSpec(name=str(name), **fields) for name, fields in saved.items())
        self._check_fits(tables)
        transform = self._transform()
        log = open_log(self.log, transform, config.data, self.on_error)
        if self.labelled and not log.labelled:
            raise StrettoError(
                f"{', '.join(self.log)} has no labels to compare with", hint="stretto score needs none"
            )
        data = ClickData(
            path=None,
            tables=tables,
            samples=0,
            held_out=0,
            popularity={},
            identity={},
            settings=config.data,
            seed=config.train.seed,
        )
        return PreparedClicks(data=data, placements=place(config, data), transform=transform)

    def _check_fits(self, tables: Sequence[TableSpec], clicks: Mapping[str, Any] | None = None) -> None:
        training = self.training
        check_fits(self.trained.checkpoint, training.shape(tables), tables, training.optim, clicks)

    def _transform(self) -> ClickTransform | None:
        """Return the transform of the clicks that the model was trained on: the run's copy, or that of its
        click folder; None if they were synthetic.
        """
        if (self.trained.folder / TRANSFORM).is_file():
            return ClickTransform.load(self.trained.folder)
        if self.training.data.is_synthetic:
            return None
        data = prepare_clicks(self.training, quiet=True)
        self._check_fits(data.tables, data.identity)
        return None if data.path is None else ClickFolder(data.path).transform

    def print_start(self, clicks: PreparedClicks, quiet: bool) -> None:
        """Print what is evaluated or scored, to stderr with `quiet` or if the output is stdout."""
        config = self.config
        trained, ranks = self.trained, self.config.layout.ranks
        text = ", ".join(self.log or ())
        if self.log is None:
            text = f"the {self.split} split of {', '.join(config.data.sources)}"
            text += "" if self.limit is None else f", at most {self.limit} batches"
        line = (
            f"step {trained.step} of {trained.folder} on {text}; {config.train.dtype}, "
            f"{counted(ranks, 'rank')}, batches of {config.batch.global_size}"
        )
        print(line, file=sys.stderr if quiet or self.out == "-" else sys.stdout, flush=True)

    def run_rank(self, clicks: PreparedClicks | None, stop: StopRequest, quiet: bool) -> dict[str, Any]:
        """Load the model as one rank of the job that RANK and WORLD_SIZE describe, and make the pass.

        Args:
            clicks: None under torchrun, whose rank 0 has prepared the clicks.
        """
        import torch.distributed as dist

        from stretto.engine.parallel.control import gather_json
        from stretto.recommender.serve.scoring import check_stop, score
        from stretto.recommender.train.engine import Recommender
        from stretto.recommender.train.evaluate import ClickEvaluation
        from stretto.recommender.train.task import load_weights
        from stretto.run.evaluate.progress import PassBar
        from stretto.run.train.start import process_group

        if clicks is None:
            gather_json(None)
            clicks = self.prepare(stop)
        config = self.config
        data, step = clicks.data, self.trained.step
        with ExitStack() as cleanup:
            cleanup.enter_context(suppress(Stopped))
            device = cleanup.enter_context(process_group(config.train))
            folder = table_folder(config.tables.folder, config.run.folder, cleanup)
            recommender = Recommender(
                config, data.tables, clicks.placements, device, fresh=False, folder=folder
            )
            cleanup.callback(recommender.close)
            load_weights(recommender, self.trained.checkpoint, step)
            silent = quiet or dist.get_rank() > 0
            if self.log is not None:
                log = open_log(self.log, clicks.transform, config.data, self.on_error)
                bar = cleanup.enter_context(PassBar("score", log.total, silent))
                scored = score(recommender, log, self.out, job=self.process, stop=stop, bar=bar)
                return {"stopped": False, **scored}
            evaluation = ClickEvaluation(
                data, recommender, batch=config.batch.global_size, split=self.split, limit=self.limit
            )
            bar = cleanup.enter_context(PassBar("evaluate", evaluation.batches, silent))
            started = time.perf_counter()

            def show(batches: int, samples: int) -> None:
                check_stop(stop, recommender)
                bar.show(batches, f"{samples / (time.perf_counter() - started):,.0f} samples/s")

            record = evaluation.run(step, show)
            dist.barrier()
            return {"stopped": False, **record.as_dict()}
        return {"stopped": True}


def run_pass(job: ScoringJob, quiet: bool = False, port: int = 0) -> Result:
    """Evaluate or score, as one rank under torchrun, else on local ranks that this process starts.

    The outcome has `stopped`, and unless it is true the numbers of the pass.

    Raises:
        StrettoError: bad input; what can be known without ranks, before any is started.
        RankFailed: a rank failed.
    """
    passes = JobType[ScoringJob, PreparedClicks](
        preload=(*PRELOAD, "stretto.recommender.serve.job"),
        ranks=lambda job: job.config.layout.ranks,
        check=ScoringJob.check,
        prepare=ScoringJob.prepare,
        print_start=ScoringJob.print_start,
        run_rank=ScoringJob.run_rank,
    )
    try:
        return run_job(passes, job, quiet, port)
    finally:
        discard_partial(job.out, job.process)
