"""From a config to the job that rules, planner, training and proofs take."""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from pathlib import Path

from stretto.errors import Problem, StrettoError
from stretto.program.lower import unlower
from stretto.program.program import Program
from stretto.program.text import read_program
from stretto.run.config.run_checks import beside
from stretto.run.config.schema import TrainConfig
from stretto.spec.data_parallel import DataParallel, Precision
from stretto.spec.finetune import Trained
from stretto.spec.job import Job, Recompute


def job_of(
    config: TrainConfig,
    *,
    vocab: int | None = None,
    world: int | None = None,
    devices: int | None = None,
) -> Job:
    """The config's job.

    Args:
        vocab: of the tokenizer, where it is known.
        world: processes, where others start them.
        devices: accelerators of all machines, where each rank needs one.

    Raises:
        StrettoError: the model's sizes or the layout's order make no whole.
    """
    return Job(
        shape=config.shape(vocab),
        layout=config.layout.to_layout(),
        global_batch=config.batch.global_size,
        micro_batch=config.batch.micro_size,
        sequence=config.data.sequence,
        target_sequence=config.target_sequence,
        encoder_pp=config.layout.encoder_pp,
        schedule=config.schedule.name,
        options=config.schedule.options,
        stage_layers=None if config.layout.stages is None else tuple(config.layout.stages),
        custom_program=None if config.schedule.file is None else program_file(config.schedule.file),
        world=world,
        devices=devices,
        expert_tp=config.layout.expert_tp,
        sequence_parallel=config.layout.sequence_parallel,
        context=config.layout.context,
        recompute=Recompute(**config.recompute.model_dump()),
        dp=DataParallel(**config.dp.model_dump()),
        precision=_precision(config),
        optimiser=config.optim.settings(),
        attention=config.train.attention,
        loss_chunk=config.train.loss_chunk,
        vocab_multiple=config.train.vocab_multiple,
        bucket=int(config.train.bucket_mib * 2**20),
        one_memory=config.train.device == "cpu",
        trained=Trained(freeze=tuple(config.finetune.freeze)),
        initial=config.model.initial(),
        undrained=_undrained(config),
        compile=config.train.compile,
        graphs=config.train.graphs,
        async_save=config.checkpoint.async_save and config.checkpoint.every is not None,
    )


def _undrained(config: TrainConfig) -> float:
    """Steps from one drain of an asynchronous schedule to the next, on average over the run."""
    steps = config.train.steps
    every = [n for n in (config.eval.every, config.checkpoint.every) if n is not None]
    drains = sum(steps // n for n in every) - (steps // lcm(*every) if len(every) == 2 else 0)
    ends = any(steps % n == 0 for n in every)  # the last step is one of them already
    return steps / (drains + (not ends))


def _precision(config: TrainConfig) -> Precision:
    """The types of weights, gradients and products."""
    precision = config.precision
    return Precision(
        dtype=config.train.dtype,
        gradients=precision.gradients,
        keep=tuple(precision.keep),
        fp8=precision.fp8,
        loss_scale=precision.loss_scale,
        loss_scale_steps=precision.loss_scale_steps,
    )


def program_file(name: str) -> Program:
    """The program of `schedule.file`, without communication, which training adds itself.

    Raises:
        StrettoError: there is no such file, or no program in it that training can run.
    """
    path = Path(name).expanduser()
    try:
        program = _read(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise Problem("file", name, f"it cannot be read: {error.strerror}", beside(path)) from None
    except StrettoError as error:
        raise Problem("file", name, error.message.removeprefix(f"{path}: "), error.hint) from None
    return unlower(program) if program.lowered else program


@lru_cache(maxsize=4)
def _read(path: Path, changed: int) -> Program:
    """The file's program; it is read again once its time of change, ns since the epoch, is another."""
    return read_program(path)
