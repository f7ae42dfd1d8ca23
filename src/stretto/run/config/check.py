"""Everything that can be known to go wrong before a process starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

from stretto.errors import Problem, StrettoError, nearest
from stretto.job.data_parallel import DataParallelSettings
from stretto.job.job import Job
from stretto.job.optimiser import optimiser_problems
from stretto.job.parameters import parameter_shapes
from stretto.job.rules import problems
from stretto.job.shape import ModelShape
from stretto.job.user_shape import UserShape
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import lasting_bytes
from stretto.program import PLAIN
from stretto.run.config.data import DataConfig
from stretto.run.config.device_checks import compiler_problems, graph_problems
from stretto.run.config.for_ranks import alternatives, duplicate_rank_counts
from stretto.run.config.job import job_of, program_file, tried_optimizer, try_user_loss
from stretto.run.config.run_checks import (
    guard_problems,
    long_names,
    missing_sources,
    raise_first,
    run_problems,
    similar_paths,
    writable,
)
from stretto.run.config.schema import ScheduleConfig, TrainConfig
from stretto.run.config.sources import (
    PYTHON_STDLIB,
    SAMPLE,
    is_click_folder,
    is_url,
    megatron_prefix,
    missing_half,
    tokenizer_at,
    vocabulary_is_known,
)


def check(config: TrainConfig, *, world: int | None = None, devices: int | None = None) -> None:
    """Raise the first problem of a job, with all others after it.

    Args:
        world: number of processes, if a launcher such as torchrun has started them.
        devices: number of GPUs on all machines, if the job runs on GPUs.

    Raises:
        StrettoError: names the field, its value, the rule and the nearest fix.
    """
    raise_first(find_problems(config, world=world, devices=devices))


def find_problems(
    config: TrainConfig, *, world: int | None = None, devices: int | None = None
) -> list[Problem]:
    """Return all problems of a job: broken rules of `stretto.job.rules`, and what this machine lacks."""
    broken, job = [*long_names(asdict(config))], None
    if broken:
        return broken
    builds: dict[str, Callable[[], object]] = {"model": config.shape, "layout": config.layout.to_layout}
    builds["optim.name"] = lambda: tried_optimizer(config.optim)
    if (file := config.schedule.file) is not None:
        builds["schedule"] = lambda: program_file(file)
    if (loss := config.train.loss) is not None:
        builds["train.loss"] = lambda: try_user_loss(loss)
    for field, build in builds.items():
        try:
            build()
        except StrettoError as error:
            broken.append(error.within(field))
    shape = None if any(problem.field.startswith("model") for problem in broken) else config.shape()
    if shape is not None and shape.unsupported_parts:
        rule = f"the model has {', '.join(shape.unsupported_parts)}, which can be planned and not yet built"
        fix = "model.preset=llama3-8b, or another Llama or GPT"
        broken.append(Problem("model.preset", config.model.preset, rule, fix))
    if broken:  # there is no job to check, but for its optimiser
        broken += optimiser_problems(config.optim)
    else:
        job = job_of(config, world=world, devices=devices)
        broken += problems(job)
    broken += _program_file(config.schedule)
    broken += _vocab(config.data, None if shape is None else config.vocab)
    if shape is not None:
        broken += _no_decay(config.optim.no_decay, shape)
    broken += _split(config.data.split, evaluates=config.eval.every is not None)
    broken += _mixture(config.data)
    broken += _objective(config, shape)
    if isinstance(shape, UserShape):
        planned = "auto" if config.elastic.layouts == "auto" else None
        others = {"lora.rank": config.lora.rank, "elastic.layouts": planned}
        others |= {"metrics.peak_tflops": config.metrics.peak_tflops}
        broken += _user_model(shape.build, config.data, others)
    broken += _source(config.data.sources)
    broken += _tokenizer(config.data.tokenizer_files)
    if config.train.compile != "off":
        broken += compiler_problems(config.train.compile, config.train.device)
    if config.train.graphs != "off":
        broken += graph_problems(config.train, config.layout.tp, config.data.packing, config.metrics.trace)
    broken += _guard(config, job)
    broken += run_problems(config, None if job is None else job.layout.world)
    if not broken and job is not None:
        broken += [*_memory_budget(job), *_disk_space(config.dp, job)]
    return broken or list(_elastic(config))


def _elastic(config: TrainConfig) -> Iterator[Problem]:
    """Check the layouts for other numbers of ranks."""
    if config.elastic.layouts == "auto" and job_of(config).program().versions:
        rule = "in asynchronous schedules what a step computes depends on the layout"
        yield Problem("elastic.layouts", "auto", rule, "list the layouts, or take a synchronous schedule")
    yield from duplicate_rank_counts(config)
    for field, other in alternatives(config):
        for problem in find_problems(other):
            yield Problem(field, None, problem.message, problem.fix)


def _memory_budget(job: Job) -> Iterator[Problem]:
    """Check that some choice of recomputation fits `recompute.memory_gib`."""
    if job.recompute.mode == "auto":
        try:
            memory_of(job)
        except Problem as problem:
            yield problem


def _guard(config: TrainConfig, job: Job | None) -> Iterator[Problem]:
    """Check the rules for bad steps against the schedule and the checkpoints."""
    guard, asynchronous = config.guard, False
    if guard.keeps_on or guard.rolls_back:
        try:
            asynchronous = bool((job or job_of(config)).program().versions)
        except StrettoError:
            return  # which others report
    yield from guard_problems(guard, config.checkpoint.every, asynchronous)


def _program_file(schedule: ScheduleConfig) -> Iterator[Problem]:
    """`schedule.file` excludes every other schedule option."""
    if schedule.file is None:
        return
    if schedule.name != PLAIN:
        fix = "leave one of them out"
        yield Problem("schedule.name", schedule.name, "schedule.file is the program already", fix)
    for name, value in schedule.options.items():
        rule = "it is an option of named schedules, and schedule.file is a whole program"
        yield Problem(f"schedule.{name}", value, rule, f"schedule.{name}=null")


def _vocab(data: DataConfig, vocab: int | None) -> Iterator[Problem]:
    if vocabulary_is_known(data):
        return  # their tokenizer is not trained here, and checked once they have been opened
    if data.tokenizer is None and vocab is not None and vocab < data.vocab:
        rule = f"the tokenizer may have data.vocab={data.vocab} entries"
        fix = f"model.vocab={data.vocab}, or null for the tokenizer's"
        yield Problem("model.vocab", vocab, rule, fix)


def _no_decay(patterns: Sequence[str], shape: ModelShape) -> Iterator[Problem]:
    names = parameter_shapes(shape) if patterns else {}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            similar = nearest(pattern, names)
            fix = f"did you mean {similar}?" if similar else "patterns are like blocks.*.attn.*"
            yield Problem("optim.no_decay", pattern, "it matches no parameter of the model", fix)


def _split(split: str | None, *, evaluates: bool) -> Iterator[Problem]:
    if split is None:
        return
    shares = [float(part) for part in split.split(",")]
    if not shares[0]:
        yield Problem("data.split", split, "the first number, for training, must not be 0", "949,50,1")
    if evaluates and not shares[1]:
        yield Problem(
            "data.split",
            split,
            "the second number, for evaluation, must not be 0 with eval.every",
            "949,50,1, or eval.every=null",
        )


def _mixture(data: DataConfig) -> Iterator[Problem]:
    """Check the weights of a mixture, and the order of its phases."""
    weights, phases = data.weights, data.phases
    if weights is None:
        if phases:
            fix = "data.source={A: 0.7, B: 0.3} is a mixture"
            yield Problem("data.phases", f"{len(phases)} phases", "data.source is no mixture", fix)
        return
    yield from _weights("data.source", weights)
    before = 0
    for index, phase in enumerate(phases):
        field = f"data.phases.{index}"
        if phase.from_step <= before:
            rule = f"the phase before it begins at step {before}"
            yield Problem(f"{field}.from_step", phase.from_step, rule, f"from_step: {before + 1} or more")
        before = phase.from_step
        for name in phase.weights:
            if name not in weights:
                similar = nearest(name, weights) or next(iter(weights))
                rule = "it is no source of the mixture"
                yield Problem(
                    f"{field}.weights", name, rule, f"did you mean {similar}? A weight of 0 is allowed"
                )
        yield from _weights(f"{field}.weights", phase.weights)


def _weights(field: str, weights: Mapping[str, float]) -> Iterator[Problem]:
    for name, weight in weights.items():
        if weight < 0:
            yield Problem(field, f"{name}: {weight:g}", "a weight is 0 or more", f"{name}: 0")
    if not any(weight > 0 for weight in weights.values()):
        yield Problem(field, str(dict(weights)), "one weight must be above 0", "such as {A: 0.7, B: 0.3}")


def _user_model(build: str, data: DataConfig, others: Mapping[str, object]) -> Iterator[Problem]:
    """Refuse what needs more of a model than its layers, if it is from a user's file.

    Args:
        others: values of further fields, by name; None if they are not set.
    """
    from_file = f"the model is from a file, {build}: "
    if data.packing not in (None, "stream") or data.chat:
        field, value = ("packing", data.packing) if data.packing else ("chat", data.chat)
        rule = f"{from_file}its attention would cross the edges of documents"
        yield Problem(f"data.{field}", value, rule, "data.packing=stream, of text without roles")
    rules = {
        "lora.rank": ("which linears it has is unknown", "null, and finetune.freeze=[...] freezes a part"),
        "elastic.layouts": ("layouts cannot be planned for it", "[{dp: 2}], a list"),
        "metrics.peak_tflops": ("its FLOPs are unknown, so MFU is too", "null"),
    }
    for name, value in others.items():
        if value is not None:
            rule, fix = rules[name]
            yield Problem(name, value, f"{from_file}{rule}", f"{name}={fix}")


def _objective(config: TrainConfig, shape: ModelShape | None) -> Iterator[Problem]:
    """Check that the objective suits the model, and that its samples can be made."""
    if shape is None:
        return
    data, corruption = config.data, config.corruption
    encoder = shape.encoder_layers > 0
    if encoder != (corruption is not None):
        rule = "the model has an encoder" if encoder else "the model has no encoder"
        fix = "span-corruption or infilling" if encoder else "causal, or a model such as t5-small"
        yield Problem("data.objective", data.objective, rule, fix)
        return
    if corruption is None:
        if data.noise_density is not None:
            rule = "nothing is cut out of samples with data.objective=causal"
            yield Problem("data.noise_density", data.noise_density, rule, "data.noise_density=null")
        return
    if data.chat is not None or data.packing not in (None, "stream"):
        field, value = ("chat", data.chat) if data.chat else ("packing", data.packing)
        rule = f"objective {corruption} cuts spans out of windows of a stream of text"
        yield Problem(f"data.{field}", value, rule, "data.packing=stream, of text without roles")
    try:
        lengths = config.denoising
    except Problem as problem:
        yield problem
        return
    if lengths is not None and config.target_sequence < lengths.targets:
        rule = f"objective {corruption} makes samples of {lengths.targets} targets"
        fix = f"data.target_sequence={lengths.targets}, or null"
        yield Problem("data.target_sequence", config.target_sequence, rule, fix)


def _source(sources: Sequence[str]) -> Iterator[Problem]:
    yield from missing_sources(sources, (PYTHON_STDLIB, SAMPLE))
    for name in sources:
        if is_url(name):
            continue
        if is_click_folder(Path(name).expanduser()):
            rule = "it is a click folder, which is the data of a recommender"
            yield Problem("data.source", name, rule, "name text or tokens, or train a recommender on it")
        prefix = megatron_prefix(name)
        if prefix is not None and (half := missing_half(prefix)) is not None:
            rule = f"half of a Megatron dataset: {half[0].name} is missing beside {half[1].name}"
            yield Problem("data.source", name, rule, f"copy {half[0].name} there")


def _may_be_tokenizer(path: Path) -> bool:
    return bool(tokenizer_at(path)) if path.is_dir() else path.suffix in (".json", ".model", ".tiktoken")


def _tokenizer(files: Sequence[str]) -> Iterator[Problem]:
    for name in files:
        path = Path(name).expanduser()
        if tokenizer_at(path):
            continue
        if path.is_dir():
            rule = "the folder holds no tokenizer, or several"
            yield Problem("data.tokenizer", name, rule, "name the file itself, such as its tokenizer.json")
            continue
        kind = "give a tokenizer.json, or a folder that has one; names of models are not downloaded"
        fix = similar_paths(path, _may_be_tokenizer)
        yield Problem("data.tokenizer", name, "there is no such file", fix or kind)


def _disk_space(dp: DataParallelSettings, job: Job) -> Iterator[Problem]:
    """Check the folder `dp.path`, if states or parameters are kept in files, and its free space."""
    if dp.path is None or "nvme" not in (dp.offload, dp.offload_parameters):
        return
    folder = Path(dp.path).expanduser()
    broken = list(writable("dp.path", dp.path, folder))
    yield from broken
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not broken and (free := shutil.disk_usage(existing).free) < (needed := _bytes_in_files(job)):
        required, left = f"{needed / 2**30:.3g} GiB", f"{free / 2**30:.3g} GiB"
        yield Problem(
            "dp.path",
            dp.path,
            f"the ranks of this machine keep {required} there, and {left} are free",
            "a folder on another disk, or dp.offload=cpu",
        )


def _bytes_in_files(job: Job) -> int:
    """Return the bytes that this machine's ranks keep in files: those that torchrun started, else all."""
    memory = memory_of(job)
    each = [lasting_bytes(memory, rank).disk for rank in range(memory.program.ranks)]
    return sum(each) * int(os.environ.get("LOCAL_WORLD_SIZE") or job.layout.world) // len(each)
