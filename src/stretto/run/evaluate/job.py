"""A language model's loss on a whole split, under any layout: checks, text, ranks."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

from stretto.errors import StrettoError
from stretto.job.job import Recompute
from stretto.job.optimiser import Optimiser
from stretto.run.config.check import check
from stretto.run.config.schema import (
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    MetricsConfig,
    RunConfig,
    TrainConfig,
)
from stretto.run.config.sources import vocabulary_is_known
from stretto.run.data.mixture import held_out
from stretto.run.data.prepare import prepare_data
from stretto.run.data.sentinels import vocabulary
from stretto.run.data.split import ALL
from stretto.run.data.token_source import TokenData
from stretto.run.data.tokenizer import TOKENIZER
from stretto.run.evaluate.trained import Trained
from stretto.run.launch.stop import StopRequest
from stretto.run.train.launch import PRELOAD, JobType, Result, run_job
from stretto.run.train.resume import check_model


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be evaluated.

    Attributes:
        split: train, valid, test, or all of the text.
        data: the text as the user named it, where it is not the run's.
        limit: global batches; None: the whole split.
    """

    trained: Trained
    split: str = "test"
    data: str | None = None
    limit: int | None = None


def evaluation_config(config: TrainConfig, request: Request) -> TrainConfig:
    """The config of an evaluation from the one of training: the same model, layout and types, the text
    requested, and nothing that only training needs.

    Raises:
        StrettoError: no text or no tokenizer is named.
    """
    trained, data = request.trained, config.data
    if request.data is not None:
        data = replace(data, source=request.data, phases=[])
    elif "data.source" in config.required:
        raise StrettoError(
            "the config names no text yet: data.source is REQUIRED", hint="name it with --data"
        )
    if not vocabulary_is_known(data):
        data = replace(data, tokenizer=_tokenizer(data.tokenizer, request))
    model = config.model
    if model.positions is None and "sequence" in trained.sizes:
        model = replace(model, positions=trained.sizes["sequence"])
    folder = trained.folder.absolute()
    # frozen weights have neither gradients nor masters; a job must train something: a norm, which is small,
    # or adapters, beside which everything is frozen already
    tied = trained.sizes.get("tied", True)
    encoder = ["encoder.*"] if trained.sizes.get("encoder_layers") else []
    freeze = ("embed.*", *encoder, "blocks.*", *(() if tied else ("head.out.*",)))
    update = {
        "finetune": replace(config.finetune, freeze=freeze if config.lora.rank is None else ()),
        "data": data,
        "model": model,
        # an optimiser without states, since none is used
        "optim": Optimiser(name="sgd", weight_decay=0.0, clip=None),
        "recompute": Recompute(),
        "eval": EvalConfig(),
        "checkpoint": CheckpointConfig(resume=str(trained.checkpoint)),
        "guard": GuardConfig(),
        "metrics": MetricsConfig(),
        "run": RunConfig(dir=str(folder.parent), name=folder.name),
    }
    return replace(replace(config, **update), required=())


def _tokenizer(configured: str | list[str] | None, request: Request) -> str | list[str] | None:
    """The tokenizer of the text: the config's, else the one that the run keeps. The run's own text needs none
    where training made it: its tokens are in the cache.
    """
    beside = request.trained.folder / TOKENIZER
    trained_on_text = "tokenizer" in request.trained.meta
    if request.data is None and trained_on_text:
        return configured
    if beside.is_file() and (trained_on_text or configured is None):
        return str(beside)
    if configured is None:
        raise StrettoError(
            f"there is no {beside}, and the config names no tokenizer",
            hint="name the model's with data.tokenizer=FILE",
        )
    return configured


def run_evaluation(config: TrainConfig, request: Request, quiet: bool = False, port: int = 0) -> Result:
    """Evaluate, as one rank under torchrun, else on local ranks that this process starts. The outcome has
    `stopped`, and unless it is true what `EvalRecord.facts` has, and `memory_gib`.

    Args:
        config: as `evaluation_config` makes it.

    Raises:
        StrettoError: bad input; what can be known without ranks, before any is started.
        RankFailed: a rank failed.
    """

    def prepare(config: TrainConfig, stop: StopRequest) -> TokenData:
        source = prepare_data(config, stop)
        _check_tokens(config, request, source)
        return source

    def print_start(config: TrainConfig, data: TokenData, quiet: bool) -> None:
        trained, splits = request.trained, held_out(data, config, request.split)
        part = "all" if request.split == ALL else f"the {request.split} split"
        tokens, limit = sum(len(part.split.range) for part in splits), request.limit
        limited = "" if limit is None else f", of them at most {limit * config.batch.global_size:,} sequences"
        print(
            f"evaluate step {trained.step} of {trained.folder} on {part} of "
            f"{', '.join(config.data.sources)}: "
            f"{tokens:,} of {data.size:,} tokens in sequences of {config.data.sequence}{limited}; "
            f"{config.train.dtype}, {config.layout.to_layout().describe()}",
            file=sys.stderr if quiet else sys.stdout,
            flush=True,
        )

    job = JobType[TrainConfig, TokenData](
        preload=PRELOAD,
        ranks=lambda config: config.layout.to_layout().world,
        check=lambda config, world, devices: check(config, world=world, devices=devices),
        prepare=prepare,
        print_start=print_start,
        run_rank=partial(_evaluate_rank, request),
    )
    return run_job(job, config, quiet, port)


def _check_tokens(config: TrainConfig, request: Request, source: TokenData) -> None:
    """Raise StrettoError unless the text was tokenised as the model's was, and has the split."""
    checkpoint, theirs = request.trained.checkpoint, request.trained.meta.get("tokenizer")
    if None not in (theirs, source.fingerprint) and theirs != source.fingerprint:
        keeps = request.trained.folder / TOKENIZER
        raise StrettoError(
            f"the tokens of {source.name} are not of the tokenizer that {checkpoint} was trained with",
            hint=f"name the text itself with --data, and {keeps} encodes it"
            if keeps.is_file()
            else "name the text itself, and the model's tokenizer.json with data.tokenizer=FILE",
        )
    rows = request.trained.sizes.get("vocab")
    if isinstance(rows, int) and source.vocab > rows:
        raise StrettoError(
            f"the tokenizer of {source.name} has {source.vocab} entries, and {checkpoint} has an "
            f"embedding of {rows}",
            hint="name the model's tokenizer.json with data.tokenizer=FILE",
        )
    check_model(checkpoint, config.shape(vocabulary(source, config)), source)
    held_out(source, config, request.split)


def _evaluate_rank(
    request: Request, config: TrainConfig, source: TokenData | None, stop: StopRequest, quiet: bool
) -> dict[str, Any]:
    """Evaluate as one rank of the job that RANK and WORLD_SIZE describe."""
    import torch.distributed as dist

    from stretto.engine.parallel.mesh import Mesh
    from stretto.run.config.job import job_of
    from stretto.run.evaluate.progress import PassBar
    from stretto.run.train.assemble import assemble
    from stretto.run.train.batches import Batches
    from stretto.run.train.evaluate import Evaluation
    from stretto.run.train.language_job import open_data
    from stretto.run.train.language_task import load_weights
    from stretto.run.train.start import process_group

    with ExitStack() as cleanup:
        device = cleanup.enter_context(process_group(config.train))
        source = open_data(config) if source is None else source
        # one pass does not earn back what compiling takes, and this machine may have no compiler
        job = replace(job_of(config, vocab=vocabulary(source, config)), compile="off", graphs="off")
        mesh = Mesh(job.layout, device, timedelta(seconds=config.train.timeout_s))
        model = assemble(job, mesh, seed=config.train.seed, fresh=False)
        cleanup.callback(model.close)
        load_weights(model, request.trained.checkpoint)
        splits = held_out(source, config, request.split)
        evaluation = Evaluation(model, Batches(model), splits, request.limit)
        bar = cleanup.enter_context(PassBar("evaluate", evaluation.batches, quiet or mesh.rank > 0))

        def show(batches: int, losses: float, tokens: int) -> None:
            bar.show(batches, f"loss {losses / tokens:.4f} on {tokens:,} tokens")

        record = evaluation.run(request.trained.step, stop, show)
        dist.barrier()
        if record is None:
            return {"stopped": True}
        bytes_ = evaluation.text_bytes if mesh.rank == 0 else None
        record = replace(record, text_bytes=bytes_, data=request.data)
        return {"stopped": False, "memory_gib": evaluation.memory_gib, **record.facts()}
