"""What every rank of a training job runs."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stretto.engine.parallel.mesh import Mesh
from stretto.run.config.job import job_of
from stretto.run.config.schema import TrainConfig
from stretto.run.data.prepare import check_vocabulary, prepare_data
from stretto.run.data.sentinels import vocabulary
from stretto.run.data.token_source import TokenData
from stretto.run.launch.stop import StopRequest
from stretto.run.train.assemble import assemble
from stretto.run.train.companions import (
    CHAT_TEMPLATE,
    TOKENIZER_CONFIG,
    copy_companions,
    run_folder,
)
from stretto.run.train.loop import process_group, start_run
from stretto.run.train.position import TextPosition, find_checkpoint, go_on
from stretto.run.train.resume import check_fits, is_base
from stretto.run.train.session import Session
from stretto.run.watch.joint import watched_together
from stretto.run.watch.record import HANG, hang_record, record_environment


def train_rank(
    config: TrainConfig, stop: StopRequest, quiet: bool = False, source: TokenData | None = None
) -> dict[str, Any]:
    """Train as one rank of the job that RANK and WORLD_SIZE describe; returns the `Outcome` as a mapping.

    Args:
        stop: whether this rank was asked to stop.
        quiet: write nothing to stdout (`--json`); the progress goes to stderr.
        source: the data, where the launcher has opened it; otherwise one rank of each machine prepares it.
    """
    with ExitStack() as cleanup:
        record_environment(config.run.folder / HANG)
        device = cleanup.enter_context(process_group(config.train))
        timeout = timedelta(seconds=config.train.timeout_s)
        torch.manual_seed(config.train.seed)  # its state is in checkpoints, for layers of users
        source = open_data(config) if source is None else source
        check_vocabulary(config, source)
        job = job_of(config, vocab=vocabulary(source, config))
        mesh = Mesh(job.layout, device, timeout)
        pipeline = job.layout.group(mesh.rank, "pp")
        cleanup.enter_context(hang_record(config.run.folder / HANG, pipeline))
        cleanup.enter_context(watched_together(config.run.folder / HANG, config.train.hang_s))
        notes = list[str]()
        saved, base = find_checkpoint(config, notes.append), False
        if saved is not None:
            base = is_base(check_fits(saved, config, job.shape, source), job.shape)
        fresh = "adapters" if saved is not None and base else saved is None
        guarded = config.guard.keeps_on
        replica = assemble(job, mesh, seed=config.train.seed, fresh=fresh, guarded=guarded)
        cleanup.callback(replica.close)
        position = TextPosition()
        if saved is not None:
            position = go_on(config, replica, source, saved, notes.append)
        metrics = start_run(
            config,
            position.step,
            lambda run: _keep_companions(source, saved, run),
            cleanup,
            notes=notes,
            quiet=quiet,
        )
        outcome = Session(
            config=config, replica=replica, source=source, position=position, saved=saved, metrics=metrics
        ).run(stop)
        dist.barrier()
        return asdict(outcome)


def open_data(config: TrainConfig) -> TokenData:
    """One rank of each machine prepares the data if need be; then all open it."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        prepare_data(config)
    dist.barrier()
    return prepare_data(config)


def _keep_companions(source: TokenData, saved: Path | None, run: Path) -> None:
    """Keep in the run what its text needs: the tokenizer of its tokens, with the chat template that rendered
    them; and from the run that it starts from generation settings, and a template where the tokens have none.

    Files are written beside, then renamed: an interrupted run leaves the old one or the new.
    """
    files = dict(source.companions())
    start = None if saved is None else run_folder(saved)
    described = "chat_template" in json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    if start is not None and not described and (start / TOKENIZER_CONFIG).is_file():
        files.pop(TOKENIZER_CONFIG, None)  # the model's own says more
    for name, data in files.items():
        beside = run / f"{name}.new"
        beside.write_bytes(data)
        beside.replace(run / name)
    if start is not None and start.resolve() != run.resolve():
        copy_companions(start, run)
    if described:
        (run / CHAT_TEMPLATE).unlink(missing_ok=True)  # it would come before the one in the config
