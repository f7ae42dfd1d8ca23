"""Everything that can be known to go wrong before a process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from stretto.errors import Problem, StrettoError, nearest
from stretto.planner.memory.job import memory_of
from stretto.program import PLAIN
from stretto.run.config.compiler import compiler
from stretto.run.config.disk_space import scratch
from stretto.run.config.for_ranks import alternatives, duplicate_rank_counts
from stretto.run.config.graphs import graphs
from stretto.run.config.guard import guard_problems
from stretto.run.config.job import job_of, program_file
from stretto.run.config.run_checks import (
    beside,
    missing_sources,
    raise_first,
    resume,
    retention,
    run_folder,
    tensorboard,
)
from stretto.run.config.schema import TrainConfig
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
from stretto.spec.optimiser import optimiser_problems
from stretto.spec.parameters import parameter_shapes
from stretto.spec.rules import problems


def check(config: TrainConfig, *, world: int | None = None, devices: int | None = None) -> None:
    """Raise for the first thing that is wrong with the job, with all others after it.

    `world` is the number of processes where others start them (torchrun), `devices` the number of GPUs of all
    machines where the job runs on GPUs.

    Raises:
        StrettoError: names the field, its value, the rule and the nearest fix.
    """
    raise_first(find_problems(config, world=world, devices=devices))


def find_problems(
    config: TrainConfig, *, world: int | None = None, devices: int | None = None
) -> list[Problem]:
    """All that is wrong with the job: the rules of `stretto.spec.rules`, and what this machine lacks."""
    broken = list(_whole(config))
    if broken:  # there is no job to check, but for its optimiser
        broken += optimiser_problems(config.optim)
    else:
        broken += problems(job_of(config, world=world, devices=devices))
    broken += [problem for part in CHECKS for problem in part(config)]
    return broken or [*_budget(config), *scratch(config)] or list(_elastic(config))


def _elastic(config: TrainConfig) -> Iterator[Problem]:
    """What is wrong with the layouts for other numbers of ranks."""
    if config.elastic.layouts == "auto" and job_of(config).program().versions:
        rule = "in asynchronous schedules what a step computes depends on the layout"
        yield Problem("elastic.layouts", "auto", rule, "list the layouts, or take a synchronous schedule")
    yield from duplicate_rank_counts(config)
    for field, other in alternatives(config):
        for problem in find_problems(other):
            yield Problem(field, None, problem.message, problem.fix)


def _whole(config: TrainConfig) -> Iterator[Problem]:
    """Sizes that make no model, an order that makes no layout, a file that holds no program."""
    builds: dict[str, Callable[[], object]] = {"model": config.shape, "layout": config.layout.to_layout}
    if (file := config.schedule.file) is not None:
        builds["schedule"] = lambda: program_file(file)
    for field, build in builds.items():
        try:
            build()
        except StrettoError as error:
            yield error.within(field)
    yield from _built(config)


def _built(config: TrainConfig) -> Iterator[Problem]:
    """A model that can be planned and not yet built."""
    try:
        shape = config.shape()
    except StrettoError:
        return  # which says so itself
    if shape.unsupported_parts:
        rule = f"the model has {', '.join(shape.unsupported_parts)}, which can be planned and not yet built"
        yield Problem(
            "model.preset", config.model.preset, rule, "model.preset=llama3-8b, or another Llama or GPT"
        )


def _budget(config: TrainConfig) -> Iterator[Problem]:
    """A budget of memory that no choice of recomputation fits; of a job that is legal in all else."""
    if config.recompute.mode != "auto":
        return
    try:
        memory_of(job_of(config))
    except Problem as problem:
        yield problem


def _guard(config: TrainConfig) -> Iterator[Problem]:
    """Rules for bad steps that the schedule or the checkpoints do not allow."""
    guard, asynchronous = config.guard, False
    if guard.keeps_on or guard.rolls_back:
        try:
            asynchronous = bool(job_of(config).program().versions)
        except StrettoError:
            return  # which others report
    yield from guard_problems(guard, config.checkpoint.every, asynchronous)


def _program_file(config: TrainConfig) -> Iterator[Problem]:
    """Nothing beside a program from a file chooses the schedule."""
    schedule = config.schedule
    if schedule.file is None:
        return
    if schedule.name != PLAIN:
        fix = "leave one of them out"
        yield Problem("schedule.name", schedule.name, "schedule.file is the program already", fix)
    for name, value in schedule.options.items():
        rule = "it is an option of named schedules, and schedule.file is a whole program"
        yield Problem(f"schedule.{name}", value, rule, f"schedule.{name}=null")


def _vocab(config: TrainConfig) -> Iterator[Problem]:
    data, model = config.data, config.model
    if vocabulary_is_known(data):
        return  # their tokenizer is not trained here, and judged once they have been opened
    if data.tokenizer is None and model.vocab is not None and model.vocab < data.vocab:
        yield Problem(
            "model.vocab",
            model.vocab,
            f"the tokenizer may have data.vocab={data.vocab} entries",
            f"model.vocab={data.vocab}, or null to take what the tokenizer has",
        )


def _no_decay(config: TrainConfig) -> Iterator[Problem]:
    try:
        names = parameter_shapes(config.shape())
    except StrettoError:  # told by `_whole`
        return
    for pattern in config.optim.no_decay:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = nearest(pattern, names)
            fix = f"did you mean {near}?" if near else "patterns are like blocks.*.attn.*"
            yield Problem("optim.no_decay", pattern, "it matches no parameter of the model", fix)


def _split(config: TrainConfig) -> Iterator[Problem]:
    split = config.data.split
    shares = [float(part) for part in split.split(",")]
    if not shares[0]:
        yield Problem("data.split", split, "the first number, for training, must not be 0", "949,50,1")
    if config.eval.every is not None and not shares[1]:
        yield Problem(
            "data.split",
            split,
            "the second number, for evaluation, must not be 0 with eval.every",
            "949,50,1, or eval.every=null",
        )


def _mixture(config: TrainConfig) -> Iterator[Problem]:
    """Weights of no mixture, and phases that do not follow one another."""
    weights, phases = config.data.weights, config.data.phases
    if weights is None:
        if phases:
            fix = "data.source={A: 0.7, B: 0.3} is a mixture"
            yield Problem("data.phases", f"{len(phases)} phases", "data.source is no mixture", fix)
        return
    yield from _weights("data.source", weights)
    before = 0
    for number, phase in enumerate(phases):
        field = f"data.phases.{number}"
        if phase.from_step <= before:
            rule = f"the phase before it begins at step {before}"
            yield Problem(f"{field}.from_step", phase.from_step, rule, f"from_step: {before + 1} or more")
        before = phase.from_step
        for name in phase.weights:
            if name not in weights:
                near = nearest(name, weights) or next(iter(weights))
                rule = "it is no source of the mixture"
                yield Problem(
                    f"{field}.weights", name, rule, f"did you mean {near}? A weight of 0 is allowed"
                )
        yield from _weights(f"{field}.weights", phase.weights)


def _weights(field: str, weights: Mapping[str, float]) -> Iterator[Problem]:
    for name, weight in weights.items():
        if weight < 0:
            yield Problem(field, f"{name}: {weight:g}", "a weight is 0 or more", f"{name}: 0")
    if not any(weight > 0 for weight in weights.values()):
        yield Problem(field, str(dict(weights)), "one weight must be above 0", "such as {A: 0.7, B: 0.3}")


def _objective(config: TrainConfig) -> Iterator[Problem]:
    """An objective that is not for the model, or samples that cannot be made."""
    data = config.data
    try:
        encoder, corruption = config.shape().encoder_layers > 0, config.corruption
    except StrettoError:  # told by `_whole`
        return
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


def _source(config: TrainConfig) -> Iterator[Problem]:
    yield from missing_sources(config.data.sources, (PYTHON_STDLIB, SAMPLE))
    for name in config.data.sources:
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


def _tokenizer(config: TrainConfig) -> Iterator[Problem]:
    for name in config.data.tokenizer_files:
        path = Path(name).expanduser()
        if tokenizer_at(path):
            continue
        if path.is_dir():
            rule = "the folder holds no tokenizer, or several"
            yield Problem("data.tokenizer", name, rule, "name the file itself, such as its tokenizer.json")
            continue
        kind = "give a tokenizer.json, or a folder that has one; names of models are not downloaded"
        fix = beside(path, _may_be_tokenizer)
        yield Problem("data.tokenizer", name, "there is no such file", fix or kind)


CHECKS: tuple[Callable[[TrainConfig], Iterator[Problem]], ...] = (
    _program_file,
    _vocab,
    _no_decay,
    _split,
    _mixture,
    _objective,
    _source,
    _tokenizer,
    compiler,
    graphs,
    _guard,
    resume,
    retention,
    run_folder,
    tensorboard,
)
