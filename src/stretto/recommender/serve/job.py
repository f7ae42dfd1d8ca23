"""A trained recommender on clicks: evaluated on a split of its log, or scored on a new log, on any ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
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
from stretto.recommender.train.job import PRELOAD
from stretto.recommender.train.placement import place
from stretto.recommender.train.resume import check_fits
from stretto.run.config.schema import CheckpointConfig, EvalConfig, GuardConfig, ReportConfig, RunConfig
from stretto.run.config.sources import is_click_folder
from stretto.run.evaluate.trained import Trained
from stretto.run.launch.stop import Stopped, StopRequest
from stretto.run.train.job import Kind, Result, run_kind


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
    try:
        return run_kind(_Pass(config, request), serving_config(config, request), quiet, port)
    finally:
        discard_partial(request.out, request.process)


class _Pass(Kind[RecommenderConfig]):
    preload = (*PRELOAD, "stretto.recommender.serve.job")

    def __init__(self, training: RecommenderConfig, request: Request) -> None:
        self._training, self._request = training, request

    def ranks(self, config: RecommenderConfig) -> int:
        return config.layout.ranks

    def check(self, config: RecommenderConfig, world: int | None, devices: int | None) -> None:
        check(config, world=world, devices=devices)

    def prepare(self, config: RecommenderConfig, stop: StopRequest) -> Ready:
        return _make_ready(config, self._training, self._request, stop)

    def agree(self, config: RecommenderConfig, data: Ready) -> None:
        pass  # `prepare` has checked it, for torchrun too

    def say(self, config: RecommenderConfig, data: Ready, quiet: bool) -> None:
        request, trained = self._request, self._request.trained
        if request.log is None:
            what = f"the {request.split} split of {', '.join(config.data.sources)}"
            what += "" if request.limit is None else f", at most {request.limit} batches"
        else:
            what = ", ".join(request.log)
        line = f"step {trained.step} of {trained.folder} on {what}; {config.train.dtype}, "
        ranks = config.layout.ranks
        text = f"{line}{ranks} rank{'s' * (ranks > 1)}, batches of {config.batch.global_size}"
        to = sys.stderr if quiet or request.out == "-" else sys.stdout
        print(text, file=to, flush=True)

    def local(self, config: RecommenderConfig, data: Ready, quiet: bool) -> tuple[Any, ...]:
        return local_rank, config, self._request, data, quiet

    def join(self, config: RecommenderConfig, stop: StopRequest, quiet: bool) -> dict[str, Any]:
        from stretto.engine.parallel.control import gather_json

        gather_json(None)  # rank 0 has prepared the clicks
        ready = _make_ready(config, self._training, self._request, stop)
        return _stoppable(config, self._request, ready, stop, quiet)


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


def local_rank(config: RecommenderConfig, request: Request, ready: Ready, quiet: bool) -> dict[str, Any]:
    """One rank of this machine."""
    with StopRequest() as stop:
        return _stoppable(config, request, ready, stop, quiet)


def _stoppable(
    config: RecommenderConfig, request: Request, ready: Ready, stop: StopRequest, quiet: bool
) -> dict[str, Any]:
    try:
        return {"stopped": False, **_pass_rank(config, request, ready, stop, quiet)}
    except Stopped:
        return {"stopped": True}


def _pass_rank(
    config: RecommenderConfig, request: Request, ready: Ready, stop: StopRequest, quiet: bool
) -> dict[str, Any]:
    """Load the model as one rank of the job that RANK and WORLD_SIZE describe, and make the pass."""
    import torch.distributed as dist

    from stretto.recommender.serve.scoring import check_stop, score
    from stretto.recommender.train.engine import Recommender
    from stretto.recommender.train.evaluate import Evaluation
    from stretto.recommender.train.position import load_weights
    from stretto.recommender.train.worker import disk_folder, remove_empty
    from stretto.run.evaluate.progress import PassBar
    from stretto.run.train.loop import process_group

    step = request.trained.step
    with ExitStack() as cleanup:
        device = cleanup.enter_context(process_group(config.train))
        folder = disk_folder(config)
        if config.tables.folder is None:
            cleanup.callback(remove_empty, folder)
        recommender = Recommender.build(
            config, ready.data.tables, ready.placements, device, fresh=False, folder=folder
        )
        cleanup.callback(recommender.close)
        load_weights(recommender, request.trained.checkpoint, step)
        silent = quiet or dist.get_rank() > 0
        if request.log is not None:
            log = open_log(request.log, ready.transform, config, request.on_error)
            bar = cleanup.enter_context(PassBar("score", log.total, silent))
            job = request.process
            return score(config, recommender, log, request.out, job=job, stop=stop, bar=bar)
        evaluation = Evaluation(config, ready.data, recommender, split=request.split, limit=request.limit)
        bar = cleanup.enter_context(PassBar("evaluate", evaluation.batches, silent))
        started = time.perf_counter()

        def show(batches: int, samples: int) -> None:
            check_stop(stop, recommender)
            bar.show(batches, f"{samples / (time.perf_counter() - started):,.0f} samples/s")

        record = evaluation.run(step, show)
        dist.barrier()
        return record.facts()
