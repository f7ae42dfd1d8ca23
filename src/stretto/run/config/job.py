"""From a config to the job that rules, planner, training and proofs take."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import lcm
from pathlib import Path
from typing import Any

from stretto.errors import Problem, StrettoError
from stretto.job.data_parallel import KEEP, Precision
from stretto.job.field import declared
from stretto.job.job import Execution, Job
from stretto.job.optimiser import Optimiser
from stretto.job.user_shape import UserShape
from stretto.program.lower import unlower
from stretto.program.program import Program
from stretto.program.text import read_program
from stretto.run.config.run_checks import similar_paths
from stretto.run.config.schema import TrainConfig


def job_of(
    config: TrainConfig,
    *,
    vocab: int | None = None,
    world: int | None = None,
    devices: int | None = None,
) -> Job:
    """Return the config's job.

    Args:
        vocab: entries of the tokenizer; None if it is not known yet.
        world: number of processes, if a launcher has started them.
        devices: number of accelerators on all machines, if each rank needs one.

    Raises:
        StrettoError: sizes of the model that do not fit, or an invalid order of the layout.
    """
    train, steps = config.train, config.train.steps
    every = [n for n in (config.eval.every, config.checkpoint.every) if n is not None]
    drains = sum(steps // n for n in every) - (steps // lcm(*every) if len(every) == 2 else 0)
    drains += not any(steps % n == 0 for n in every)  # at the end, unless the last step is one of them
    execution: dict[str, Any] = {name: getattr(train, name) for name in declared(Execution)}
    if train.loss is not None:
        try_user_loss(train.loss)
        execution["loss_chunk"] = train.loss_chunk or 0
    precision = Precision(dtype=train.dtype, **vars(config.precision))
    shape = config.shape(vocab)
    if isinstance(shape, UserShape) and precision.half and precision.keep == KEEP:
        precision = replace(precision, keep=())  # its norms take inputs of the weights' type
    return Job(
        **execution,
        shape=shape,
        layout=config.layout.to_layout(),
        global_batch=config.batch.global_size,
        micro_batch=config.batch.micro_size,
        sequence=config.data.sequence,
        target_sequence=config.target_sequence,
        encoder_pp=config.layout.encoder_pp,
        expert_tp=config.layout.expert_tp,
        sequence_parallel=config.layout.sequence_parallel,
        context=config.layout.context,
        schedule=config.schedule.name,
        options=config.schedule.options,
        stage_layers=None if config.layout.stages is None else tuple(config.layout.stages),
        custom_program=None if config.schedule.file is None else program_file(config.schedule.file),
        world=world,
        devices=devices,
        recompute=config.recompute,
        dp=config.dp,
        precision=precision,
        optimiser=tried_optimizer(config.optim),
        bucket=int(train.bucket_mib * 2**20),
        unified_memory=train.device == "cpu",
        trained=config.finetune,
        initial=config.model.initial(),
        steps_between_drains=steps / drains,
        async_save=config.checkpoint.async_save and config.checkpoint.every is not None,
    )


def tried_optimizer(optimiser: Optimiser) -> Optimiser:
    """Return the settings, with the size of the states of a class in a file, after a first update with it.

    Raises:
        StrettoError: there is no such class, or it fails.
    """
    if not optimiser.user_defined:
        return optimiser
    from stretto.engine.optim.user_optimizer import try_optimizer

    return try_optimizer(optimiser)


def try_user_loss(named: str) -> None:
    """Raise StrettoError if there is no such function, or it is no sum over tokens."""
    from stretto.engine.parallel.tensor.user_loss import try_loss

    try_loss(named)


def program_file(name: str) -> Program:
    """The program of `schedule.file`, without communication, which training adds itself.

    Raises:
        StrettoError: there is no such file, or no program in it that training can run.
    """
    path = Path(name).expanduser()
    try:
        program = _read(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise Problem("file", name, f"it cannot be read: {error.strerror}", similar_paths(path)) from None
    except StrettoError as error:
        raise Problem("file", name, error.message.removeprefix(f"{path}: "), error.hint) from None
    return unlower(program) if program.lowered else program


@lru_cache(maxsize=4)
def _read(path: Path, changed: int) -> Program:
    """The file's program; it is read again once its time of change, ns since the epoch, is another."""
    return read_program(path)
