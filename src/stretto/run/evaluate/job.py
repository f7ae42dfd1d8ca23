"""A language model's loss on a whole split, under any layout: checks, text, ranks."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from typing import Any

from stretto.errors import StrettoError
from stretto.job.job import Recompute
from stretto.job.optimiser import Optimiser
from stretto.run.config.check import check
from stretto.run.config.schema import (
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    LoopConfig,
    MetricsConfig,
    RunConfig,
    TrainConfig,
)
from stretto.run.config.sources import vocabulary_is_known
from stretto.run.data.mixture import held_out
from stretto.run.data.prepare import prepare_data
from stretto.run.data.sentinels import job_of_text
from stretto.run.data.split import ALL
from stretto.run.data.token_source import TokenData
from stretto.run.data.tokenizer import TOKENIZER
from stretto.run.evaluate.trained import Trained
from stretto.run.launch.stop import StopRequest
from stretto.run.train.launch import PRELOAD, JobType, Result, run_job
from stretto.run.train.resume import check_model


@dataclass(frozen=True, kw_only=True)
class EvaluationJob:
    """A pass over a split of a text.

    Attributes:
        config: as `evaluation_config` makes it.
        split: train, valid, test, or all of the text.
        text: the text as the user named it, or None for the run's own.
        limit: global batches, or None for the whole split.
    """

    config: TrainConfig
    trained: Trained
    split: str = "test"
    text: str | None = None
    limit: int | None = None

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

    def prepare(self, stop: StopRequest) -> TokenData:
        """Return the tokenised text.

        Raises:
            StrettoError: it was not tokenised as the model's was, or lacks the split.
        """
        source = prepare_data(self.config.data, self.config.vocab, stop=stop)
        checkpoint, fingerprint = self.trained.checkpoint, self.trained.meta.get("tokenizer")
        if None not in (fingerprint, source.fingerprint) and fingerprint != source.fingerprint:
            tokenizer = self.trained.folder / TOKENIZER
            raise StrettoError(
                f"the tokens of {source.name} are not of the tokenizer that {checkpoint} was trained with",
                hint=f"name the text itself with --data, and {tokenizer} encodes it"
                if tokenizer.is_file()
                else "name the text itself, and the model's tokenizer.json with data.tokenizer=FILE",
            )
        rows = self.trained.sizes.get("vocab")
        if isinstance(rows, int) and source.vocab > rows:
            raise StrettoError(
                f"the tokenizer of {source.name} has {source.vocab} entries, and {checkpoint} has an "
                f"embedding of {rows}",
                hint="name the model's tokenizer.json with data.tokenizer=FILE",
            )
        job = job_of_text(self.config, source)
        check_model(checkpoint, job.shape, source)
        held_out(source, self.config.data, job, self.split)
        return source

    def print_start(self, source: TokenData, quiet: bool) -> None:
        """Print what is evaluated, to stderr with `quiet`."""
        config = self.config
        trained, limit = self.trained, self.limit
        splits = held_out(source, config.data, job_of_text(self.config, source), self.split)
        part = "all" if self.split == ALL else f"the {self.split} split"
        tokens = sum(len(part.split.range) for part in splits)
        limited = "" if limit is None else f", of them at most {limit * config.batch.global_size:,} sequences"
        print(
            f"evaluate step {trained.step} of {trained.folder} on {part} of "
            f"{', '.join(config.data.sources)}: "
            f"{tokens:,} of {source.size:,} tokens in sequences of {config.data.sequence}{limited}; "
            f"{config.train.dtype}, {config.layout.to_layout().describe()}",
            file=sys.stderr if quiet else sys.stdout,
            flush=True,
        )

    def run_rank(self, source: TokenData | None, stop: StopRequest, quiet: bool) -> dict[str, Any]:
        """Evaluate as one rank of the job that RANK and WORLD_SIZE describe."""
        import torch.distributed as dist

        from stretto.engine.parallel.mesh import Mesh
        from stretto.run.evaluate.progress import PassBar
        from stretto.run.train.assemble import assemble
        from stretto.run.train.batches import Batches
        from stretto.run.train.evaluate import Evaluation
        from stretto.run.train.language_job import open_data
        from stretto.run.train.language_task import load_weights
        from stretto.run.train.start import process_group

        data, train = self.config.data, self.config.train
        with ExitStack() as cleanup:
            device = cleanup.enter_context(process_group(train))
            source = open_data(data, self.config.vocab) if source is None else source
            # one pass does not earn back what compiling takes, and this machine may have no compiler
            job = replace(job_of_text(self.config, source), compile="off", graphs="off")
            mesh = Mesh(job.layout, device, timedelta(seconds=train.timeout_s))
            model = assemble(job, mesh, seed=train.seed, fresh=False)
            cleanup.callback(model.close)
            load_weights(model, self.trained.checkpoint)
            splits = held_out(source, data, job, self.split)
            evaluation = Evaluation(model, Batches(model), splits, self.limit)
            bar = cleanup.enter_context(PassBar("evaluate", evaluation.batches, quiet or mesh.rank > 0))

            def show(batches: int, losses: float, tokens: int) -> None:
                bar.show(batches, f"loss {losses / tokens:.4f} on {tokens:,} tokens")

            record = evaluation.run(self.trained.step, stop, show)
            dist.barrier()
            if record is None:
                return {"stopped": True}
            bytes_ = evaluation.text_bytes if mesh.rank == 0 else None
            record = replace(record, text_bytes=bytes_, data=self.text)
            return {"stopped": False, "memory_gib": evaluation.memory_gib, **record.as_dict()}


def evaluation_config(config: TrainConfig, trained: Trained, text: str | None = None) -> TrainConfig:
    """Return the config of an evaluation from the one of training: the same model, layout and types, the text
    requested, and nothing that only training needs.

    Args:
        text: the text as the user named it, or None for the run's own.

    Raises:
        StrettoError: no text or no tokenizer is named.
    """
    data = config.data
    if text is not None:
        data = replace(data, source=text, phases=[])
    elif "data.source" in config.required:
        raise StrettoError(
            "the config names no text yet: data.source is REQUIRED", hint="name it with --data"
        )
    if not vocabulary_is_known(data):
        data = replace(data, tokenizer=_tokenizer(data.tokenizer, trained, text is None))
    model = config.model
    if model.positions is None and "sequence" in trained.sizes:
        model = replace(model, positions=trained.sizes["sequence"])
    folder = trained.folder.absolute()
    # frozen weights have neither gradients nor masters; a job must train something: a norm, which is small,
    # or adapters, in whose model everything else is frozen already
    tied = trained.sizes.get("tied", True)
    encoder = ["encoder.*"] if trained.sizes.get("encoder_layers") else []
    freeze: tuple[str, ...] = ("embed.*", *encoder, "blocks.*", *(() if tied else ("head.out.*",)))
    if parameters := trained.sizes.get("parameters"):  # of a model from a file: all but the smallest
        freeze = tuple(sorted(parameters, key=lambda name: prod(parameters[name]))[1:])
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


def _tokenizer(
    configured: str | list[str] | None, trained: Trained, is_of_run: bool
) -> str | list[str] | None:
    """Return the tokenizer of the text: the config's, else the one in the run's folder. The run's own text
    needs none if training made it: its tokens are in the cache.

    Args:
        is_of_run: the text is the run's own.
    """
    copy = trained.folder / TOKENIZER
    trained_on_text = "tokenizer" in trained.meta
    if is_of_run and trained_on_text:
        return configured
    if copy.is_file() and (trained_on_text or configured is None):
        return str(copy)
    if configured is None:
        raise StrettoError(
            f"there is no {copy}, and the config names no tokenizer",
            hint="name the model's with data.tokenizer=FILE",
        )
    return configured


def run_evaluation(job: EvaluationJob, quiet: bool = False, port: int = 0) -> Result:
    """Evaluate, as one rank under torchrun, else on local ranks that this process starts. The outcome has
    `stopped`, and unless it is true what `EvalRecord.as_dict` gives, and `memory_gib`.

    Raises:
        StrettoError: bad input; what can be known without ranks, before any is started.
        RankFailed: a rank failed.
    """
    passes = JobType[EvaluationJob, TokenData](
        preload=PRELOAD,
        ranks=lambda job: job.config.layout.to_layout().world,
        check=EvaluationJob.check,
        prepare=EvaluationJob.prepare,
        print_start=EvaluationJob.print_start,
        run_rank=EvaluationJob.run_rank,
    )
    return run_job(passes, job, quiet, port)
