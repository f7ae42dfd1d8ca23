"""A trained recommender on clicks: evaluated on a split of its log, or scored on a new log, on any ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.recommender.clicks.folder import ClickFolder
from stretto.recommender.clicks.index import TRANSFORM
from stretto.recommender.clicks.transform import ClickTransform
from stretto.recommender.config.check import check
from stretto.recommender.config.schema import ClickDataConfig, RecommenderConfig
from stretto.recommender.placement import Placements, TableSpec
from stretto.recommender.serve.log import OnError, open_log
from stretto.recommender.serve.output import discard_partial
from stretto.recommender.train.clicks import ClickData, open_clicks, prepare_clicks
from stretto.recommender.train.job import PRELOAD, table_folder
from stretto.recommender.train.placement import place
from stretto.recommender.train.resume import check_fits
from stretto.run.config.schema import CheckpointConfig, EvalConfig, GuardConfig, ReportConfig, RunConfig
from stretto.run.config.sources import is_click_folder
from stretto.run.evaluate.trained import Trained
from stretto.run.launch.stop import Stopped, StopRequest
from stretto.run.train.launch import JobType, Result, run_job


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be evaluated or scored.

    Attributes:
        split: of the log that the model was trained on; where `log` is None.
        log: files of a new log, or a click folder.
        out: where its probabilities go: a file, - for stdout; None: nowhere.
        limit: global batches of the split; None: all.
        on_error: what becomes of malformed lines of a new log.
        labelled: a log without labels is refused.
        process: that asks; names the output while it is written.
    """

    trained: Trained
    split: str = "valid"
    log: tuple[str, ...] | None = None
    out: str | None = None
    limit: int | None = None
    on_error: OnError = "fatal"
    labelled: bool = False
    process: int = field(default_factory=os.getpid)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The model's tables, where they are placed, and how raw clicks become its input."""

    data: ClickData
    placements: Placements
    transform: ClickTransform | None


def serving_config(config: RecommenderConfig, request: Request) -> RecommenderConfig:
    """The config of a pass over clicks from the one of training: the same model, ranks and types, and no
    optimiser states, since nothing is updated.
    """
    trained, tables = request.trained, config.optim.tables
    if tables.name != "split_sgd":  # which keeps a part of the weights in its states
        tables = type(tables)(name="sgd")
    folder = trained.folder.absolute()
    update: dict[str, Any] = {
        "optim": replace(config.optim, dense=type(config.optim.dense)(name="sgd"), tables=tables, clip=None),
        "eval": EvalConfig(),
        "checkpoint": CheckpointConfig(resume=str(trained.checkpoint)),
        "guard": GuardConfig(),
        "metrics": ReportConfig(),
        "run": RunConfig(dir=str(folder.parent), name=folder.name),
    }
    if request.log is not None:
        source = list(request.log)
        if len(source) == 1 and is_click_folder(Path(source[0]).expanduser()):
            update["data"] = ClickDataConfig(source=source)
        else:
            update["data"] = replace(config.data, source=source)
    return replace(replace(config, **update), required=())


def run_pass(config: RecommenderConfig, request: Request, quiet: bool = False, port: int = 0) -> Result:
    """Evaluate or score, as one rank under torchrun, else on local ranks that this process starts.

    The outcome has `stopped`, and unless it is true the numbers of the pass.

    Args:
        config: of training.

    Raises:
        StrettoError: bad input; what can be known without ranks, before any is started.
        RankFailed: a rank failed.
    """

    def print_start(config: RecommenderConfig, data: Ready, quiet: bool) -> None:
        trained, ranks = request.trained, config.layout.ranks
        text = ", ".join(request.log or ())
        if request.log is None:
            text = f"the {request.split} split of {', '.join(config.data.sources)}"
            text += "" if request.limit is None else f", at most {request.limit} batches"
        line = (
            f"step {trained.step} of {trained.folder} on {text}; {config.train.dtype}, "
            f"{ranks} rank{'s' * (ranks > 1)}, batches of {config.batch.global_size}"
        )
        print(line, file=sys.stderr if quiet or request.out == "-" else sys.stdout, flush=True)

    job = JobType[RecommenderConfig, Ready](
        preload=(*PRELOAD, "stretto.recommender.serve.job"),
        ranks=lambda config: config.layout.ranks,
        check=lambda config, world, devices: check(config, world=world, devices=devices),
        prepare=lambda serving, stop: _make_ready(serving, config, request, stop),
        print_start=print_start,
        run_rank=partial(_pass_rank, config, request),
    )
    try:
        return run_job(job, serving_config(config, request), quiet, port)
    finally:
        discard_partial(request.out, request.process)


def _make_ready(
    config: RecommenderConfig, training: RecommenderConfig, request: Request, stop: StopRequest | None
) -> Ready:
    """Open the clicks, and place the tables.

    Raises:
        StrettoError: clicks that are not there, or do not fit the model.
    """
    checkpoint = request.trained.checkpoint
    if request.log is None:
        data = prepare_clicks(training, stop)
        open_clicks(training, data, request.split)
        check_fits(checkpoint, training, data.tables, data.same)
        return Ready(data=data, placements=place(config, data), transform=None)
    tables = _tables_of(request.trained)
    check_fits(checkpoint, training, tables)
    transform = _transform_of(training, request.trained)
    log = open_log(request.log, transform, config, request.on_error)
    if request.labelled and not log.labelled:
        raise StrettoError(
            f"{', '.join(request.log)} has no labels to compare with", hint="stretto score needs none"
        )
    data = ClickData(path=None, tables=tables, samples=0, held_out=0, popularity={}, same={})
    return Ready(data=data, placements=place(config, data), transform=transform)


def _tables_of(trained: Trained) -> tuple[TableSpec, ...]:
    """The tables of a checkpoint.

    Raises:
        StrettoError: it is of no recommender.
    """
    tables = trained.sizes.get("tables")
    if trained.sizes.get("family") != "dlrm" or not isinstance(tables, Mapping):
        raise StrettoError(
            f"checkpoint {trained.checkpoint} is of family {trained.sizes.get('family')!r}, and clicks are "
            "scored by recommenders",
            hint="stretto evaluate takes language models",
        )
    return tuple(TableSpec(name=str(name), **facts) for name, facts in tables.items())


def _transform_of(config: RecommenderConfig, trained: Trained) -> ClickTransform | None:
    """The transform of the clicks that a model was trained on: the run's copy, or that of its click folder;
    None where they were synthetic.
    """
    if (trained.folder / TRANSFORM).is_file():
        return ClickTransform.load(trained.folder)
    if config.data.is_synthetic:
        return None
    data = prepare_clicks(config, quiet=True)
    check_fits(trained.checkpoint, config, data.tables, data.same)
    return None if data.path is None else ClickFolder(data.path).transform


def _pass_rank(
    training: RecommenderConfig,
    request: Request,
    config: RecommenderConfig,
    ready: Ready | None,
    stop: StopRequest,
    quiet: bool,
) -> dict[str, Any]:
    """Load the model as one rank of the job that RANK and WORLD_SIZE describe, and make the pass.

    Args:
        training: the config of training.
        config: that of the pass.
        ready: None under torchrun, whose rank 0 has prepared the clicks.
    """
    import torch.distributed as dist

    from stretto.engine.parallel.control import gather_json
    from stretto.recommender.serve.scoring import check_stop, score
    from stretto.recommender.train.engine import Recommender
    from stretto.recommender.train.evaluate import Evaluation
    from stretto.recommender.train.task import load_weights
    from stretto.run.evaluate.progress import PassBar
    from stretto.run.train.start import process_group

    if ready is None:
        gather_json(None)
        ready = _make_ready(config, training, request, stop)
    step = request.trained.step
    with ExitStack() as cleanup:
        cleanup.enter_context(suppress(Stopped))
        device = cleanup.enter_context(process_group(config.train))
        recommender = Recommender.build(
            config,
            ready.data.tables,
            ready.placements,
            device,
            fresh=False,
            folder=table_folder(config, cleanup),
        )
        cleanup.callback(recommender.close)
        load_weights(recommender, request.trained.checkpoint, step)
        silent = quiet or dist.get_rank() > 0
        if request.log is not None:
            log = open_log(request.log, ready.transform, config, request.on_error)
            bar = cleanup.enter_context(PassBar("score", log.total, silent))
            scored = score(config, recommender, log, request.out, job=request.process, stop=stop, bar=bar)
            return {"stopped": False, **scored}
        evaluation = Evaluation(config, ready.data, recommender, split=request.split, limit=request.limit)
        bar = cleanup.enter_context(PassBar("evaluate", evaluation.batches, silent))
        started = time.perf_counter()

        def show(batches: int, samples: int) -> None:
            check_stop(stop, recommender)
            bar.show(batches, f"{samples / (time.perf_counter() - started):,.0f} samples/s")

        record = evaluation.run(step, show)
        dist.barrier()
        return {"stopped": False, **record.facts()}
    return {"stopped": True}
