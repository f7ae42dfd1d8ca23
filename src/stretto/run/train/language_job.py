"""Training a language model from its config: checks and data before the ranks start, and what each rank
builds. Imports torch only on the ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import Problem, StrettoError
from stretto.job.devices import HOST
from stretto.run.config.check import check
from stretto.run.config.data import DataConfig
from stretto.run.config.device_checks import no_graphs
from stretto.run.config.for_ranks import rank_choices
from stretto.run.config.schema import TrainConfig
from stretto.run.data.prepare import check_samples, check_vocabulary, describe_samples, prepare_data
from stretto.run.data.sentinels import job_of_text
from stretto.run.launch.stop import StopRequest
from stretto.run.train.launch import PRELOAD, Elastic, JobType, check_fresh
from stretto.run.train.prediction import prediction_line
from stretto.run.train.replan import for_ranks
from stretto.run.train.resume import check_fits, checkpoint_to_resume, file_copy, file_digests, is_base
from stretto.user_file import path_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import ExitStack

    import torch

    from stretto.run.data.token_source import TokenData
    from stretto.run.train.task import Log, OpenedRun


def _check(config: TrainConfig, world: int | None, devices: int | None) -> None:
    check(config, world=world, devices=devices)
    check_vocabulary(config.data, config.vocab, config.corruption)
    if config.train.graphs != "off":
        from stretto.engine.device import device_kind, has_graphs

        if not has_graphs(kind := device_kind(config.train.device)):
            raise Problem("train.graphs", config.train.graphs, no_graphs(kind), "train.graphs=off")


def _prepare(config: TrainConfig, stop: StopRequest) -> TokenData:
    """Return the tokenised text, which fits the model and the checkpoint that the run resumes from."""
    data = config.data
    corruption, resume = config.corruption, config.checkpoint.resume
    source = prepare_data(data, config.vocab, stop=stop)
    check_vocabulary(data, config.vocab, corruption, source)
    check_attention(config.train.attention, config.train.device)
    job = job_of_text(config, source)
    if (checkpoint := checkpoint_to_resume(resume, config.run.folder)) is not None:
        check_fits(checkpoint, job, source, config.checkpoint.may_differ)
    check_samples(source, data, job, evaluates=config.eval.every is not None)
    return source


def check_attention(attention: str, device: str) -> None:
    """Raise StrettoError if FlexAttention is asked for on CPUs, and torch has no backward of it there."""
    if attention == "flex":
        from stretto.engine.device import device_kind
        from stretto.engine.flex import check_trains_on_host

        if device_kind(device) == HOST:
            check_trains_on_host()


def _print_start(config: TrainConfig, source: TokenData, quiet: bool) -> None:
    from stretto.run.train.banner import banner

    data = config.data
    train, evaluation = config.train, config.eval
    job = job_of_text(config, source)
    lines = [
        banner(job, source, data=data, train=train, evaluation=evaluation, folder=config.run.folder),
        *describe_samples(
            source, data, job, train.seed, steps=train.steps, evaluates=evaluation.every is not None
        ),
        prediction_line(job, train.device, train.threads),
    ]
    print("\n".join(lines), file=sys.stderr if quiet else sys.stdout, flush=True)


def open_data(data: DataConfig, vocab: int | None) -> TokenData:
    """Prepare the data on one rank of each machine, if need be; then open it on all. Collective."""
    import torch.distributed as dist

    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        prepare_data(data, vocab)
    dist.barrier()
    return prepare_data(data, vocab)


def train_language_rank(
    config: TrainConfig, source: TokenData | None, stop: StopRequest, quiet: bool
) -> dict[str, Any]:
    """Train as one rank of the job that RANK and WORLD_SIZE describe.

    Args:
        source: the tokenised text; None to let one rank of each machine prepare it.

    Returns:
        `TrainResult.as_dict`.
    """
    from stretto.run.train.trainer import train_rank

    data, vocab = config.data, config.vocab

    def open_run(source: TokenData, device: torch.device, cleanup: ExitStack, log: Log) -> OpenedRun:
        """Build this rank's model, and fill it from the checkpoint that the run resumes from. Collective."""
        from datetime import timedelta

        from stretto.engine.device import seed_random
        from stretto.engine.parallel.control import gather_json
        from stretto.engine.parallel.mesh import Mesh
        from stretto.run.train.assemble import assemble
        from stretto.run.train.async_step import AsyncTrainer
        from stretto.run.train.checkpointing import find_checkpoint
        from stretto.run.train.language_task import LanguageRun
        from stretto.run.train.metrics import TOKENS
        from stretto.run.train.task import OpenedRun
        from stretto.run.train.trainer import Trainer

        seed = config.train.seed
        seed_random(device, seed)  # its state is in checkpoints, for layers of users
        check_vocabulary(data, vocab, config.corruption, source)
        job = job_of_text(config, source)
        parts = config.user_parts
        for rank, digests in enumerate(records := gather_json(file_digests(parts)) if parts else []):
            if changed := [field for field, digest in digests.items() if digest != records[0][field]]:
                raise StrettoError(
                    f"{changed[0]}={parts[changed[0]]}: the file of rank {rank} is another than that of "
                    "rank 0",
                    hint="copy it to every machine",
                )
        mesh = Mesh(job.layout, device, timedelta(seconds=config.train.timeout_s))
        checkpoint = find_checkpoint(config.checkpoint.resume, config.run.folder, log)
        base = False
        if checkpoint is not None:
            meta = check_fits(checkpoint, job, source, config.checkpoint.may_differ)
            base = is_base(meta, job.shape)
        model = assemble(
            job,
            mesh,
            seed=seed,
            fresh="adapters" if checkpoint is not None and base else checkpoint is None,
            guarded=config.guard.keeps_on,
        )
        cleanup.callback(model.close)
        task = LanguageRun(config, model, source, reports=mesh.rank == 0)
        cleanup.callback(task.close)
        task.log = log
        return OpenedRun(
            task=task,
            progress=task.start(checkpoint),
            checkpoint=checkpoint,
            write_files=lambda run: _write_companions(source, checkpoint, config.user_parts, run),
            log_format=TOKENS,
            trainer=AsyncTrainer if model.asynchronous else Trainer,
        )

    return train_rank(
        config,
        layout=config.layout.to_layout(),
        open_data=lambda: open_data(data, vocab) if source is None else source,
        open_run=open_run,
        stop=stop,
        quiet=quiet,
    )


def _write_companions(data: TokenData, checkpoint: Path | None, parts: Mapping[str, str], run: Path) -> None:
    """Write what the run's text needs: the tokenizer of its tokens, with the chat template that rendered
    them; and from the run that it starts from generation settings, and a template if the tokens have none.
    And copies of the user's files that define parts of the job.

    Files are written under another name, then renamed: an interrupted run leaves the old one or the new.
    """
    from stretto.run.train.companions import (
        CHAT_TEMPLATE,
        TOKENIZER_CONFIG,
        copy_tokenizer_files,
        run_folder,
    )

    files = dict(data.companions())
    for field, digest in file_digests(parts).items():
        (run / "user_files").mkdir(exist_ok=True)
        files[file_copy(parts[field], digest)] = path_of(parts[field]).read_bytes()
    start = None if checkpoint is None else run_folder(checkpoint)
    has_template = "chat_template" in json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    if start is not None and not has_template and (start / TOKENIZER_CONFIG).is_file():
        files.pop(TOKENIZER_CONFIG, None)  # the model's own says more
    for name, content in files.items():
        written = run / f"{name}.new"
        written.write_bytes(content)
        written.replace(run / name)
    if start is not None and start.resolve() != run.resolve():
        copy_tokenizer_files(start, run)
    if has_template:
        (run / CHAT_TEMPLATE).unlink(missing_ok=True)  # it would come before the one in the config


LANGUAGE = JobType[TrainConfig, "TokenData"](
    preload=PRELOAD,
    ranks=lambda config: config.layout.to_layout().world,
    check=_check,
    prepare=_prepare,
    print_start=_print_start,
    run_rank=train_language_rank,
    folder=lambda config: config.run.folder,
    check_fresh=lambda config: check_fresh(config.checkpoint.resume, config.run),
    elastic=Elastic(choices=rank_choices, for_ranks=for_ranks),
)
